"""Estimators over n samples of each of P problems, and how sure they are: intervals and tests over problems.

`correct` is [P, n], boolean or 0/1; `answers` the stated answer of each sample, None where there is none.
"""

from dataclasses import dataclass
from math import comb

import numpy as np

DRAWS = 1000  # of k out of n samples: verl's number
RESAMPLES = 2000  # of the problems
# The 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference over problems, its interval, and the p-value of no difference (two-sided)."""

    difference: float
    low: float
    high: float
    p_value: float


def mean_at_k(correct: np.ndarray) -> float:
    """How often a sample is right."""
    return float(np.mean(correct))


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Probability that of k samples one is right: the unbiased estimate 1 - C(n-c, k) / C(n, k)."""
    n = _checked(correct, k)
    return float(np.mean([1 - comb(n - int(c), k) / comb(n, k) for c in np.sum(correct, axis=1)]))


def maj_at_k(answers: list[list[str | None]], correct: np.ndarray, k: int, seed: int) -> float:
    """How often the answer that most of k samples state is right, over draws without replacement; of a tie, the mean."""
    n, found = _checked(correct, k), []
    for stated, right in zip(answers, np.asarray(correct), strict=True):
        kinds = {answer: index for index, answer in enumerate(dict.fromkeys(answer for answer in stated if answer is not None))}
        if not kinds:
            found.append(0.0)
            continue
        vote = np.array([kinds.get(answer, len(kinds)) for answer in stated])
        worth = np.array([np.mean(right[vote == index]) for index in range(len(kinds))])
        draws = np.random.default_rng(seed).permuted(np.tile(np.arange(n), (DRAWS if k < n else 1, 1)), axis=1)[:, :k]
        counts = np.zeros((len(draws), len(kinds) + 1))
        np.add.at(counts, (np.arange(len(draws))[:, None], vote[draws]), 1)
        counts = counts[:, :-1]  # what states nothing has no vote
        most = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
        found.append(np.mean(most @ worth / np.maximum(most.sum(axis=1), 1)))
    return float(np.mean(found))


def verl_best_at_k(correct: np.ndarray, k: int, seed: int) -> float:
    """verl's best@k/mean: whether the best of k samples is right, over draws of k of n *with* replacement. At k = n below
    pass@k: a problem solved by one of 32 samples counts .638."""
    n = _checked(correct, k)
    draws = np.random.default_rng(seed).integers(0, n, (DRAWS, k))
    return float(np.mean([np.asarray(right)[draws].max(axis=1).mean() for right in correct]))


def interval(per_problem: np.ndarray, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap of the mean over problems, [P]. Raises ValueError below two problems."""
    return average_interval([per_problem], level, seed)


def average_interval(per_problem: list[np.ndarray], level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The same of an average over benchmarks, each counting the same: problems are resampled within each, [P] each."""
    means = np.mean([_resampled(np.asarray(values, dtype=float), seed + index) for index, values in enumerate(per_problem)], axis=0)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def half_width(values: list[float]) -> float | None:
    """Of the 95 % interval of the mean of a few values, such as one a seed, by Student's t; None of a single one."""
    if len(values) < 2:
        return None
    return float(T[min(len(values) - 1, len(T)) - 1] * np.std(values, ddof=1) / np.sqrt(len(values)))


def paired_difference(a: np.ndarray, b: np.ndarray, level: float = 0.95, seed: int = 0) -> PairedDifference:
    """a - b over the same problems, [P] each: bootstrap over problems, and a test that swaps a and b in each at random."""
    difference = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    low, high = interval(difference, level, seed)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (10 * RESAMPLES, len(difference)))
    extreme = np.abs(signs @ difference) >= np.abs(difference.sum()) - 1e-12
    return PairedDifference(float(difference.mean()), low, high, float((extreme.sum() + 1) / (len(signs) + 1)))


def _resampled(values: np.ndarray, seed: int) -> np.ndarray:
    if len(values) < 2:
        raise ValueError(f"{len(values)} problem: an interval over problems needs two")
    rng = np.random.default_rng(seed)
    return np.array([values[rng.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)])


def _checked(correct: np.ndarray, k: int) -> int:
    n = np.shape(correct)[1]
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: must be 1 to n = {n}")
    return n
