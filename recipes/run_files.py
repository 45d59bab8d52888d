"""Reads back what a run left in its folder: metrics.jsonl by key, and config.yaml.

Runs are interrupted and killed, so the files are taken as they happen to be: a last line cut in half, values that are
not numbers, keys that are missing.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.progress import first_of, step_values


FINISHED = "finished.json"  # in a run's folder when it has trained to its end: the last step, and when


@dataclass
class Metrics:
    """metrics.jsonl by key instead of by row.

    Args:
        steps: the training steps that were finished, ascending.
        series: key -> {step: value}; verl's keys and the columns of recipes.progress; finite numbers only.
        not_finite: key -> the steps at which it was NaN or infinite (verl's logger writes these as null).
    """

    steps: list[int]
    series: dict[str, dict[int, float]]
    not_finite: dict[str, list[int]]

    def get(self, *keys: str) -> dict[int, float]:
        """The series of the first key that was logged, by step; empty when none was."""
        return first_of(self.series, *keys) or {}


def read_metrics(path: Path) -> Metrics:
    steps, series, not_finite = set(), defaultdict(dict), defaultdict(set)
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            row = json.loads(line)
            step, data = int(row["step"]), row["data"].items()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            continue  # cut in half by a kill, or empty
        numbers = {}
        for key, value in data:
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                not_finite[key].add(step)
            elif isinstance(value, (int, float)) and abs(value) < 1e300:
                numbers[key] = float(value)
        if {"timing_s/step", "critic/rewards/mean"} & row["data"].keys():  # a row of validation alone has neither
            steps.add(step)
        columns = {c: v for c, v in step_values({"step": step, "data": numbers}).items() if v is not None}
        for key, value in (numbers | columns).items():
            series[key][step] = value  # of a step that is there twice, the later row counts
    return Metrics(
        steps=sorted(steps),
        series={key: dict(sorted(values.items())) for key, values in series.items()},
        not_finite={key: sorted(at) for key, at in not_finite.items()},
    )


def read_samples(path: Path) -> dict[str, dict]:
    """A step's responses by their `uid`, or by their line where they have none: `input`, `output` and `score` of each."""
    found = {}
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else []):
        try:
            row = json.loads(line)
            found[str(row.get("uid", number))] = {key: row[key] for key in ("input", "output", "score")}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # cut in half by a kill
    return found


def token_files(run_dir: Path) -> dict[int, list[Path]]:
    """The token records of each recorded step, ascending; several where there are several workers."""
    found = {}
    for path in sorted((run_dir / "tokens").glob("*.parquet")):
        if match := re.fullmatch(r"(\d+)(-\d+)?", path.stem):
            found.setdefault(int(match[1]), []).append(path)
    return dict(sorted(found.items()))


def read_config(path: Path) -> dict:
    """As it was written: YAML's own rules would read 1e-06 as text. {} where it cannot be read."""
    try:
        config = OmegaConf.load(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException):
        return {}
    return OmegaConf.to_container(config) if isinstance(config, DictConfig) else {}


def value_at(config: dict, dotted: str):
    """config["a"]["b"] for "a.b", or None."""
    for key in dotted.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def what_ran(config: dict) -> str:
    """"band_kl on tiny, seed 0", as far as it is known."""
    text = str(value_at(config, "chosen.method") or "training")
    if model := value_at(config, "chosen.model"):
        text += f" on {model}"
    if (seed := value_at(config, "seed")) is not None:
        text += f", seed {seed}"
    return text


def steps_done(steps: list[int], config: dict) -> str:
    """"37 of 50 steps". A resumed run goes on counting where the one before it stopped, and has its own steps only."""
    asked = value_at(config, "trainer.total_training_steps")
    text = f"{steps[-1]} of {asked} steps" if isinstance(asked, int) else f"{steps[-1]} steps"
    return text if len(steps) == steps[-1] else f"{text} ({len(steps)} in this run, from step {steps[0]})"
