"""The intervals and the test over problems, against scipy's on synthetic data."""

import numpy as np
import pytest
from scipy import stats

from recipes.evaluation.statistics import T, half_width, interval, paired_difference, pass_at_k

RNG = np.random.default_rng(7)
SKILL = RNG.beta(0.5, 0.5, 60)  # of the problems: many always solved, many never
HERE, THERE = (RNG.binomial(16, np.clip(SKILL + gain, 0, 1)) / 16 for gain in (0.03, 0.0))


def test_the_interval_is_scipys_percentile_bootstrap():
    expected = stats.bootstrap((HERE,), np.mean, n_resamples=50_000, method="percentile", random_state=0).confidence_interval
    width = expected.high - expected.low
    assert interval(HERE) == pytest.approx((expected.low, expected.high), abs=0.05 * width)  # of 2000 resamples


@pytest.mark.parametrize("problems", [8, 60])
def test_the_permutation_test_is_scipys(problems):
    here, there = HERE[-problems:], THERE[-problems:]

    def mean_difference(a, b, axis):
        return np.mean(a - b, axis=axis)

    expected = stats.permutation_test(
        (here, there), mean_difference, permutation_type="samples", vectorized=True, n_resamples=50_000, random_state=0
    )
    found = paired_difference(here, there)
    assert found.difference == pytest.approx(expected.statistic)
    assert 0.001 < expected.pvalue < 0.999
    assert found.p_value == pytest.approx(expected.pvalue, abs=4 * np.sqrt(expected.pvalue / 20_000) + 0.001)


def test_the_paired_interval_is_scipys():
    expected = stats.bootstrap(
        (HERE, THERE), lambda a, b, axis: np.mean(a - b, axis=axis), paired=True, vectorized=True, n_resamples=50_000, method="percentile", random_state=0
    ).confidence_interval
    found = paired_difference(HERE, THERE)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.05 * (expected.high - expected.low))


def test_the_interval_over_seeds_is_students():
    assert T == pytest.approx(stats.t.ppf(0.975, np.arange(1, len(T) + 1)), abs=5e-5)
    low, high = stats.t.interval(0.95, df=4, loc=np.mean(HERE[:5]), scale=stats.sem(HERE[:5]))
    assert half_width(HERE[:5].tolist()) == pytest.approx((high - low) / 2, rel=5e-5)  # the table has four decimals


@pytest.mark.parametrize("k", [1, 2, 8, 16])
def test_pass_at_k_is_one_less_the_hypergeometric_chance_of_none(k):
    correct = np.arange(16) < np.arange(17)[:, None]
    assert pass_at_k(correct, k) == pytest.approx(np.mean(stats.hypergeom.sf(0, 16, np.arange(17), k)))


def test_the_interval_covers_the_truth_as_often_as_it_says():
    draws = RNG.beta(2, 3, (400, 50))
    covered = [low <= 0.4 <= high for low, high in map(interval, draws)]
    assert stats.binomtest(sum(covered), len(covered), 0.94).pvalue > 0.001  # of 50 problems a percentile bootstrap has 94 %
