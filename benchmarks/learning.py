"""Does it learn, how fast, and do rollouts and actor agree? Trains the tiny model with several seeds:

    python -m benchmarks.learning --method band_kl --seeds 0 1 2

and writes benchmarks/results/learning_<method>.csv, one row a seed.
"""

import argparse
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.tables import write
from recipes.run_files import read_metrics

WINDOW = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="band_kl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="any override of recipes.train")
    args = parser.parse_args()
    rows = [measure(args.method, seed, args.overrides) for seed in args.seeds]
    suffix = "".join("_" + part.replace("=", "-") for part in args.overrides)
    path = write(f"learning_{args.method}{suffix}", rows)
    print(path.read_text())


def measure(method: str, seed: int, overrides: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "recipes.train", f"method={method}", f"seed={seed}", f"runs={runs}", "name=run"]
        subprocess.run([*command, *overrides], check=True)
        metrics = read_metrics(Path(runs) / "run" / "metrics.jsonl")
    reward = list(metrics.get("reward").values())
    seconds = sorted(list(metrics.get("seconds").values())[1:])
    first, last = statistics.fmean(reward[:WINDOW]), statistics.fmean(reward[-WINDOW:])
    difference = metrics.get("training/rollout_probs_diff_mean").values()
    return {
        "method": method,
        "seed": seed,
        "steps": len(reward),
        f"reward_first_{WINDOW}": round(first, 4),
        f"reward_last_{WINDOW}": round(last, 4),
        "gain": round(last - first, 4),
        "clip_fraction_mean": round(statistics.fmean(metrics.get("clipped").values()), 6),
        "probability_difference_worst_step": max(difference, default=None),
        "seconds_median": round(statistics.median(seconds), 2),
        "seconds_p20": round(seconds[len(seconds) // 5], 2),
        "seconds_p80": round(seconds[len(seconds) * 4 // 5], 2),
        "peak_memory_gib": round(max(metrics.get("actor/perf/cpu_memory_used_gb").values()), 2),
        "cores": len(os.sched_getaffinity(0)),
        **{name: importlib.metadata.version(name) for name in ("torch", "verl", "vllm", "ray")},
    }


if __name__ == "__main__":
    main()
