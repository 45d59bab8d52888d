"""The runs that a table or figure is made from, and the small files in which they can be kept beside it.

A folder of them has, besides what is made from it,

    study.json            what the runs have in common; of each: method, seed, steps, right answers by validation problem
    <method>-seed<n>.csv  a line a step: the metrics of SERIES, with six significant digits
    tokens.parquet        of some hundred recorded tokens of each run: log-probabilities, entropy ratio, what blocked them
"""

import csv
import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from recipes.errors import UserError
from recipes.run_files import Metrics, read_metrics, token_files
from trustregion.metrics import BUCKET_NAMES

STUDY, TOKENS = "study.json", "tokens.parquet"
SERIES = (
    "reward", "entropy", "actor/grad_norm", "trust/log_ratio_abs_mean", "trust/divergence_mean",
    *(f"trust/{name}" for name in ("clip_fraction", "blocked_by_region", "blocked_by_entropy", "blocked_by_dual_clip")),
    *(f"trust/clip_fraction_up/{bucket}" for bucket in BUCKET_NAMES),
)  # fmt: skip
KEPT_TOKENS = 400  # of each run, of those that were blocked and of those that were not


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        method: its name in the table.
        series: of SERIES, those that were logged, by step.
        correct: of each validation problem, in the order of the prompts' text, how many of its `samples` responses are right.
        tokens: log_prob_old, log_prob, entropy_ratio (NaN where the method has none), cause, advantage's sign, and weight,
            how many recorded tokens a row stands for. Empty where none were recorded.
    """

    method: str
    seed: int
    steps: int
    series: dict[str, dict[int, float]] = field(repr=False)
    correct: tuple[int, ...] = ()
    samples: int = 0
    tokens: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False)

    @property
    def name(self) -> str:
        return f"{self.method}-seed{self.seed}"

    @property
    def accuracy(self) -> np.ndarray | None:
        """By problem; None where there was no validation."""
        return np.array(self.correct) / self.samples if self.samples else None

    def get(self, key: str) -> dict[int, float]:
        return self.series.get(key, {})


# ---- from a run's folder ---------------------------------------------------------------------------------------------
def read_run(folder: Path, method: str, seed: int) -> Job:
    """A run's folder as a Job, of what it has."""
    metrics = read_metrics(folder / "metrics.jsonl")
    correct, samples = _validation(folder / "validation", metrics.steps[-1] if metrics.steps else 0)
    return Job(method, seed, len(metrics.steps), _series(metrics), correct, samples, _tokens(folder))


def _series(metrics: Metrics) -> dict[str, dict[int, float]]:
    found = {key: {step: _rounded(value) for step, value in metrics.get(key).items() if step in metrics.steps} for key in SERIES}
    return {key: values for key, values in found.items() if values}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _validation(folder: Path, step: int) -> tuple[tuple[int, ...], int]:
    file = folder / f"{step}.jsonl"
    if not file.is_file():
        return (), 0
    right = defaultdict(list)
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # str's would break at U+2028, which a text may have
        try:
            row = json.loads(line)
            right[str(row["input"])].append(float(row["score"]) == 1.0)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: is no validation sample ({error!r}). Run the job again.") from error
    counts = {len(mine) for mine in right.values()}
    if len(counts) != 1:
        said = f"{min(counts, default=0)} to {max(counts, default=0)} responses a prompt"
        raise UserError(f"{file}: has {said}: it was cut short, or prompts are there twice. Run the job again.")
    return tuple(sum(right[prompt]) for prompt in sorted(right)), counts.pop()


def _tokens(folder: Path) -> pd.DataFrame:
    files = [file for files in token_files(folder).values() for file in files]
    if not files:
        return pd.DataFrame()
    columns = ["step", "update", "sequence", "position", "log_prob_old", "log_prob", "advantage", "entropy_old", "entropy", "cause"]
    try:
        found = _kept_columns(pd.concat([pd.read_parquet(file.absolute(), columns=columns) for file in files]))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise UserError(f"{folder}/tokens: {error}. Remove the damaged file, or run the job again.") from error
    blocked = found.cause != ""
    return pd.concat([_some(found[blocked]), _some(found[~blocked])], ignore_index=True)


def _kept_columns(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.sort_values(["step", "update", "sequence", "position"], kind="stable")
    old, new = (pd.to_numeric(rows[name], errors="coerce") for name in ("entropy_old", "entropy"))
    return pd.DataFrame({
        "step": rows.step.astype("int32"),
        "log_prob_old": _four_digits(rows.log_prob_old),
        "log_prob": _four_digits(rows.log_prob),
        "entropy_ratio": _four_digits(new / old.where(old > 0)),
        "sign": np.sign(rows.advantage).astype("int8"),
        "cause": rows.cause.fillna("").astype(str),
    })  # fmt: skip


def _four_digits(values: pd.Series) -> pd.Series:
    """Of which a picture shows three, and which take half the room."""
    values = values.astype("float64")
    unit = 10.0 ** (np.floor(np.log10(values.abs().where(values != 0, 1.0))) - 3)
    return ((values / unit).round() * unit).astype("float32")


def _some(rows: pd.DataFrame) -> pd.DataFrame:
    """KEPT_TOKENS rows, evenly over all."""
    count = min(KEPT_TOKENS, len(rows))
    chosen = rows.iloc[np.linspace(0, len(rows) - 1, count).astype(int)] if count else rows
    return chosen.assign(weight=np.float32(len(rows) / count if count else 0))


# ---- beside the table ------------------------------------------------------------------------------------------------
def write_jobs(out: Path, about: dict, jobs: list[Job]):
    """`about`: what the runs have in common, for `read_jobs` to return."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / STUDY).is_file():  # else they are somebody else's
        for old in out.glob("*-seed*.csv"):
            old.unlink()
    for job in jobs:
        steps = sorted({step for values in job.series.values() for step in values})
        with open(out / f"{job.name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["step", *job.series])
            writer.writerows([step, *(f"{values[step]:.6g}" if step in values else "" for values in job.series.values())] for step in steps)
    known = [{key: value for key, value in asdict(job).items() if key not in ("series", "tokens", "correct")} for job in jobs]
    known = [mine | {"correct": " ".join(map(str, job.correct))} for mine, job in zip(known, jobs, strict=True)]
    (out / STUDY).write_text(json.dumps(about | {"jobs": known}, indent=1) + "\n", encoding="utf-8")
    tokens = [job.tokens.assign(method=job.method, seed=job.seed) for job in jobs if len(job.tokens)]
    (out / TOKENS).unlink(missing_ok=True)
    if tokens:
        pd.concat(tokens, ignore_index=True).to_parquet((out / TOKENS).absolute(), compression="zstd", index=False)


def read_jobs(folder: Path) -> tuple[dict, list[Job]]:
    """What `write_jobs` wrote. Raises UserError where a file is missing or damaged."""
    try:
        about = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        known = about.pop("jobs")
        if not known:
            raise ValueError(f"{STUDY} has no jobs")
        tokens = pd.read_parquet((folder / TOKENS).absolute()) if (folder / TOKENS).is_file() else pd.DataFrame({"method": [], "seed": []})
        jobs = []
        for job in known:
            correct = tuple(map(int, job.pop("correct").split()))
            mine = tokens[(tokens.method == job["method"]) & (tokens.seed == job["seed"])].drop(columns=["method", "seed"])
            series = _read_series(folder / f"{job['method']}-seed{job['seed']}.csv", job["steps"])
            if wrong := [key for key in ("seed", "steps", "samples") if type(job[key]) is not int or job[key] < 0]:
                raise ValueError(f"{STUDY}: {wrong[0]} = {job[wrong[0]]!r}")
            if max(correct, default=0) > job["samples"]:
                raise ValueError(f"{STUDY}: more are right than there are samples = {job['samples']}")
            jobs.append(Job(**job, series=series, correct=correct, tokens=mine.reset_index(drop=True)))
        if len({job.name for job in jobs}) < len(jobs):
            raise ValueError(f"{STUDY} has a job twice")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        raise UserError(
            f"{folder}: its files are damaged or not all there ({error}). Make them anew from the runs, with runs=<the sweep's folder>."
        ) from error
    return about, jobs


def _read_series(path: Path, steps: int) -> dict[str, dict[int, float]]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    if len(rows) != steps or any(None in row or None in row.values() for row in rows):
        raise ValueError(f"{path.name} has not {steps} whole lines")
    keys = [key for key in (rows[0] if rows else ()) if key != "step"]
    found = {key: {int(row["step"]): float(row[key]) for row in rows if row[key]} for key in keys}
    if not all(math.isfinite(value) for values in found.values() for value in values.values()):
        raise ValueError(f"{path.name} has values that are no finite numbers")
    return found
