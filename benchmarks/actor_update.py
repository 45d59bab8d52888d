"""What ERC and top-K DPPO add to verl's actor update, against GRPO in the same worker, on the same mini-batch:

    python -m benchmarks.actor_update

starts the real loop with the 135M model at learning rate 0, has its worker repeat one update as each method in turn, and
writes benchmarks/results/actor_update.csv.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.tables import write

ROOT = Path(__file__).resolve().parents[1]
# The anchor's pass must yield both entropies and cells.
BOTH = [
    "method=dppo_topk_tv", "method.anchor=old", "method.region=[divergence_ball,entropy_band]",
    "+method.beta_low=0.05", "+method.beta_high=0.05",
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("overrides", nargs="*", help="any override of recipes.train")
    args = parser.parse_args()
    found = probe(args.repeats, args.overrides)
    baseline = times(found, "grpo")
    table = []
    for method in dict.fromkeys(row["method"] for row in found["rows"]):
        seconds = times(found, method)
        # By round, so that a slow spell of the machine hits both sides of a quotient.
        added = sorted(s / b - 1 for s, b in zip(seconds, baseline, strict=True))
        table.append({
            "method": method,
            "seconds_median": round(statistics.median(seconds), 3),
            "seconds_p20": round(quantile(seconds, 0.2), 3),
            "seconds_p80": round(quantile(seconds, 0.8), 3),
            "added_median": round(statistics.median(added), 4),
            "added_p20": round(quantile(added, 0.2), 4),
            "added_p80": round(quantile(added, 0.8), 4),
            "peak_above_start_mib": round(max(r["grown_mib"] for r in found["rows"] if r["method"] == method)),
            **{key: found[key] for key in ("sequences", "tokens", "vocabulary", "threads")},
            "repeats": len(seconds),
            "cores": len(os.sched_getaffinity(0)),
            **{name: importlib.metadata.version(name) for name in ("torch", "verl")},
        })  # fmt: skip
    print(write("actor_update", table).read_text())


def probe(repeats: int, overrides: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "probe.json"
        command = [sys.executable, "-m", "recipes.train", "model=smollm2_135m", *BOTH, f"runs={folder}", "name=run"]
        command += ["actor_rollout_ref.actor.optim.lr=0", "trainer.total_training_steps=1"]
        command += ["actor_rollout_ref.model.external_lib=benchmarks.actor_update_probe", *overrides]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": path, "PROBE_TO": str(answer), "PROBE_REPEATS": str(repeats)}
        subprocess.run(command, check=True, env=env)
        return json.loads(answer.read_text())


def times(found: dict, method: str) -> list[float]:
    return [row["seconds"] for row in found["rows"] if row["method"] == method]


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main()
