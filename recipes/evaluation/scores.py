"""From samples to estimates with intervals, and to paired differences."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from recipes.errors import UserError
from recipes.evaluation.samples import Samples
from recipes.evaluation.statistics import interval, maj_at_k, mean_at_k, paired_difference, pass_at_k, verl_best_at_k

SEED = 0  # of draws and resamples: the same samples give the same report


@dataclass(frozen=True)
class Score:
    """`per_problem` [P] in order of the rows; `low` and `high` bound the mean over problems in 95 % of resamples."""

    metric: str
    per_problem: np.ndarray
    low: float
    high: float

    @property
    def value(self) -> float:
        return float(np.mean(self.per_problem))


@dataclass(frozen=True)
class Result:
    """What a benchmark's report says; fractions of all samples are `cut_off` at max_tokens and `unanswered`."""

    benchmark: str
    problems: int
    n: int
    scores: dict[str, Score]
    tokens: float
    cut_off: float
    unanswered: float


def powers_to(n: int) -> list[int]:
    """1, 2, 4, ... and n."""
    return sorted({2**e for e in range(n.bit_length())} | {n})


def result(samples: Samples, only: Collection[str] | None = None) -> Result:
    """All estimates of one benchmark from its complete samples, or those named. Raises UserError below two problems."""
    n, problems = samples.header["n"], sorted({problem for problem, _ in samples.rows}, key=lambda name: int(name.rpartition("/")[2]))
    if len(problems) < 2:
        raise UserError(f"{samples.file}: has {len(problems)} problem, and intervals are over problems: give at least two.")
    rows = [[samples.rows[problem, k] for k in range(n)] for problem in problems]
    correct = np.array([[row["correct"] for row in mine] for mine in rows])
    answers = [[row["answer"] for row in mine] for mine in rows]
    everything = [row for mine in rows for row in mine]
    estimates = {f"mean@{n}": lambda c, _: mean_at_k(c)}
    estimates |= {f"pass@{k}": lambda c, _, k=k: pass_at_k(c, k) for k in powers_to(n)}
    above_1 = powers_to(n)[1:]  # of one sample they are the mean
    estimates |= {f"maj@{k}": lambda c, a, k=k: maj_at_k(a, c, k, SEED) for k in above_1}
    estimates |= {f"best@{k}(bootstrap)": lambda c, _, k=k: verl_best_at_k(c, k, SEED) for k in above_1}
    chosen = {metric: estimate for metric, estimate in estimates.items() if only is None or metric in only}
    return Result(
        samples.header["benchmark"], len(problems), n,
        scores={metric: _score(metric, correct, answers, estimate) for metric, estimate in chosen.items()},
        tokens=float(np.mean([row["tokens"] for row in everything])),
        cut_off=float(np.mean([row["finish"] == "length" for row in everything])),
        unanswered=float(np.mean([row["answer"] is None for row in everything])),
    )  # fmt: skip


def _score(metric: str, correct: np.ndarray, answers: list[list[str | None]], estimate) -> Score:
    per_problem = np.array([estimate(correct[i : i + 1], answers[i : i + 1]) for i in range(len(correct))])
    return Score(metric, per_problem, *interval(per_problem, seed=SEED))


def headline(n: int) -> list[str]:
    """The metrics that say most, of n samples."""
    return [f"mean@{n}", *([f"pass@{n}", f"maj@{n}", f"best@{n}(bootstrap)"] if n > 1 else [])]


def differences(ours: dict[str, Samples], theirs: dict[str, Samples], said: str) -> list[dict]:
    """Rows of this minus that evaluation's, benchmark by benchmark, with interval and p-value over the same problems.

    Raises UserError when they have no benchmark in common, or one with other problems or another n.
    """
    common = [name for name in ours if name in theirs]
    if not common:
        raise UserError(f"{said}: has samples of {', '.join(theirs)}, and this evaluation of {', '.join(ours)}: none in common.")
    rows = []
    for name in common:
        for key in ("benchmark_sha256", "n"):
            here, there = ours[name].header[key], theirs[name].header[key]
            if here != there:
                raise UserError(f"{said}: {name} has {key} = {there} there and {here} here, and only the same problems and n can be paired.")
        a, b = result(ours[name]), result(theirs[name])
        for metric in headline(a.n)[:3]:
            here, there = a.scores[metric], b.scores[metric]
            found = paired_difference(here.per_problem, there.per_problem, 0.95, SEED)
            row = {"benchmark": name, "metric": metric, "here": here.value, "there": there.value, "difference": found.difference}
            rows.append({**row, "low": found.low, "high": found.high, "p_value": found.p_value})
    return rows
