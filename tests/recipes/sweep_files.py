"""What a sweep's folder holds, written and read by tests."""

import csv
import json
from pathlib import Path


def row(step: int, reward: float, **more) -> str:
    values = {"critic/rewards/mean": reward, "actor/entropy": 0.5, "trust/clip_fraction": 0.01, "timing_s/step": 10.0 - step}
    return json.dumps({"step": step, "data": values | more}) + "\n"


def table(folder: Path) -> list[dict]:
    with open(folder / "sweep_results.csv", newline="") as file:
        return list(csv.DictReader(file))
