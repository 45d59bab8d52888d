"""Does every method run in the real loop, with one worker and with two? Trains each for a few steps:

    python -m benchmarks.every_preset

and writes benchmarks/results/every_preset.csv, one row a run, as soon as it has ended; rows that are there are not run
again. The first step has learning rate 0 (`*_at_lr_0`). `books_balance` says that in every update recorded in the workers
exactly the active tokens with an advantage got a gradient, and that the metrics count as many blocked tokens as there are.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from recipes.run_files import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "every_preset.csv"
UPDATES = 4  # a step
SMALL = ["data.train_batch_size=8", f"actor_rollout_ref.actor.ppo_mini_batch_size={8 // UPDATES}"]
SMALL += ["actor_rollout_ref.rollout.agent.num_workers=1"]  # a process less to start
AT_LR_0 = ("clip_fraction", "log_ratio_abs_max", "divergence_max", "entropy_ratio_mean")
DIFFERENCE = "training/rollout_probs_diff_mean"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", default=sorted(p.stem for p in (ROOT / "configs/method").glob("*.yaml")))
    args = parser.parse_args()
    for workers in args.workers:
        for method in args.methods:
            if (method, str(workers)) not in finished():
                append(measure(method, workers, args.steps))
    print(RESULTS.read_text())


def finished() -> set[tuple[str, str]]:
    if not RESULTS.exists():
        return set()
    with RESULTS.open(newline="") as file:
        return {(row["method"], row["workers"]) for row in csv.DictReader(file)}


def append(row: dict):
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def measure(method: str, workers: int, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes.train", f"method={method}", f"cluster.workers={workers}", *SMALL]
        command += [f"trainer.total_training_steps={steps}", f"runs={folder}", "name=run"]
        command += ["actor_rollout_ref.model.external_lib=recorder", "actor_rollout_ref.actor.optim.lr_warmup_steps=1"]
        path = [str(ROOT / "tests/e2e"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "RECORD_TO": folder}
        done = subprocess.run(command, env=env)
        metrics = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        records = read_records(Path(folder))
        shares = [share for share, _ in records]
        series = metrics.series
        return {
            "method": method,
            "workers": workers,
            "steps": len(metrics.steps),
            "exit_code": done.returncode,
            **{f"{name}_at_lr_0": series.get(f"trust/{name}", {}).get(1) for name in AT_LR_0},
            "blocked": round(statistics.fmean(shares or [0]), 6),
            "clip_fraction": round(statistics.fmean(metrics.get("clipped").values() or [0]), 6),
            "books_balance": all(right for _, right in records) and counted_alike(shares, series),
            "log_ratio_abs_max": round(max(metrics.get("trust/log_ratio_abs_max").values(), default=0), 4),
            "probability_difference_worst_step": max(series.get(DIFFERENCE, {}).values(), default=None),
            "seconds_median": round(statistics.median(list(metrics.get("seconds").values())[1:] or [0]), 2),
        }


def counted_alike(shares: list[float], series: dict) -> bool:
    """Whether the metrics count as many blocked tokens, step by step, as the records hold."""
    region, dual_clip = (list(series[f"trust/blocked_by_{cause}"].values()) for cause in ("region", "dual_clip"))
    entropy = list(series.get("trust/blocked_by_entropy", {}).values()) or [0.0] * len(region)
    # Tokens that both the region and the entropy block are counted under both, so that the sum is a bound.
    return len(shares) == len(region) > 0 and all(
        max(r, e) + d - 1e-6 <= share <= r + e + d + 1e-6
        for share, r, e, d in zip(shares, region, entropy, dual_clip, strict=True)
    )


def read_records(folder: Path) -> list[tuple[float, bool]]:
    """By step: the share of blocked tokens, and whether gradients went exactly to the others that have an advantage."""
    tokens, blocked, right = defaultdict(int), defaultdict(int), defaultdict(lambda: True)
    for path in folder.glob("update-*.pt"):
        seen = torch.load(path)
        step = int(path.stem.split("-")[1]) // UPDATES
        live = seen["response_mask"].bool()
        right[step] &= torch.equal(seen["gradient"] != 0, live & seen["active"] & (seen["advantages"] != 0))
        tokens[step] += int(live.sum())
        blocked[step] += int((live & ~seen["active"]).sum())
    return [(blocked[step] / tokens[step], right[step]) for step in sorted(tokens)]


if __name__ == "__main__":
    main()
