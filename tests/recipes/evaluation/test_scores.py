"""Estimates from samples, against values worked out by hand; differences between two evaluations."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest

from recipes.errors import UserError
from recipes.evaluation.scores import differences, headline, powers_to, result
from recipes.evaluation.statistics import average_interval, half_width, interval

RANDOM = (np.random.default_rng(0).random((40, 8)) < np.linspace(0, 1, 40)[:, None]).tolist()


def test_pass_at_k_counts_all_subsets(make_samples):
    verdicts = [[True, False, False, False], [True, True, False, False], [False] * 4, [True] * 4]
    scores = result(make_samples(verdicts)).scores
    assert scores["mean@4"].value == pytest.approx(7 / 16)
    for k in (1, 2, 4):
        solved = [np.mean([any(chosen) for chosen in itertools.combinations(row, k)]) for row in verdicts]
        assert scores[f"pass@{k}"].per_problem == pytest.approx(solved)


def test_verls_best_at_n_stays_below_pass_at_n(make_samples):
    scores = result(make_samples([[True] + [False] * 31, [True] * 32])).scores
    assert scores["pass@32"].per_problem.tolist() == [1, 1]
    first, second = scores["best@32(bootstrap)"].per_problem
    assert second == 1 and first == pytest.approx(1 - (31 / 32) ** 32, abs=0.05)  # .638


def test_the_majority_answers(make_samples):
    samples = make_samples([[True, True, False], [True, False, False], [True, False, False], [True, False, False]])
    for k in (1, 2):
        samples.rows["arithmetic/2", k]["answer"] = None  # no answer, no vote: the one that is right wins
    samples.rows["arithmetic/3", 2]["answer"] = "5"  # three answers: a tie
    assert result(samples).scores["maj@3"].per_problem == pytest.approx([1, 0, 1, 1 / 3])
    for row in samples.rows.values():
        row.update(answer=None, correct=False)
    found = result(samples)
    assert found.scores["maj@3"].value == 0 and found.unanswered == 1


def test_intervals_hold_the_value_and_shrink_with_problems(make_samples):
    few, many = result(make_samples(RANDOM[::4], "few")), result(make_samples(RANDOM, "many"))
    for one in (few, many):
        assert all(score.low <= score.value <= score.high for score in one.scores.values())
    few, many = few.scores["mean@8"], many.scores["mean@8"]
    assert 0 < many.high - many.low < few.high - few.low


def test_the_interval_of_an_average_is_of_all_its_benchmarks():
    values = np.array(RANDOM).mean(axis=1)
    low, high = interval(values)
    assert average_interval([values]) == (low, high)
    of_four = average_interval([values] * 4)  # other problems in each: half the width
    assert of_four[1] - of_four[0] == pytest.approx((high - low) / 2, rel=0.15)
    assert sum(of_four) / 2 == pytest.approx(values.mean(), abs=0.01)
    with pytest.raises(ValueError, match="1 problem"):
        average_interval([values, [1.0]])


@pytest.mark.parametrize("count", [2, 3, 10, 31])
def test_intervals_over_seeds_are_students(count):
    """The density, from -t to t, holds 95 %."""
    values = np.random.default_rng(count).normal(size=count)
    t = half_width(values.tolist()) / (values.std(ddof=1) / np.sqrt(count))
    freedom = count - 1
    with mp.workdps(20):
        scale = mp.gamma((freedom + 1) / mp.mpf(2)) / (mp.sqrt(freedom * mp.pi) * mp.gamma(freedom / mp.mpf(2)))
        inside = 2 * scale * mp.quad(lambda x: (1 + x * x / freedom) ** (-(freedom + 1) / mp.mpf(2)), [0, 2, t])
    assert float(inside) == pytest.approx(0.95, abs=5e-6)  # of four decimals
    assert half_width([1.0]) is None and half_width([2.0, 2.0]) == 0
    assert half_width([0.0, 1.0] * 40) == pytest.approx(0.1131, rel=0.02)  # beyond the table: a little too wide


def test_single_metrics_are_those_of_all(make_samples):
    samples = make_samples(RANDOM)
    (score,) = result(samples, {"best@8(bootstrap)", "mean@32"}).scores.values()
    assert (score.value, score.low) == (result(samples).scores["best@8(bootstrap)"].value, result(samples).scores["best@8(bootstrap)"].low)


def test_the_order_of_lines_is_of_no_account(make_samples):
    samples = make_samples(RANDOM)
    before = result(samples).scores
    samples.rows = dict(reversed(samples.rows.items()))
    after = result(samples).scores
    assert [(score.value, score.low, score.high) for score in before.values()] == [(score.value, score.low, score.high) for score in after.values()]


def test_ks_are_powers_of_two_and_n():
    assert [powers_to(n) for n in (1, 2, 6, 32)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32]]
    assert headline(1) == ["mean@1"]


def test_one_sample_of_each_problem_will_do_and_one_problem_will_not(make_samples):
    assert result(make_samples([[True], [False]])).scores["mean@1"].value == 0.5
    with pytest.raises(UserError, match="has 1 problem, and intervals are over problems"):
        result(make_samples([[True, True]], "one"))


def test_differences_are_paired(make_samples):
    a = make_samples(RANDOM, "a")
    b = make_samples([[right and k > 0 for k, right in enumerate(row)] for row in RANDOM], "b")
    (row,) = [row for row in differences({"arithmetic": a}, {"arithmetic": b}, "compare=b") if row["metric"] == "mean@8"]
    assert row["difference"] == pytest.approx(row["here"] - row["there"]) and 0 < row["low"] < row["difference"] < row["high"]
    # Problems differ far more from each other than the two do: unpaired, the interval would be this wide.
    assert row["high"] - row["low"] < 0.5 * (result(a).scores["mean@8"].high - result(a).scores["mean@8"].low)
    assert row["p_value"] < 0.001
    same = differences({"arithmetic": a}, {"arithmetic": a}, "compare=a")
    assert all((row["difference"], row["low"], row["high"], row["p_value"]) == (0, 0, 0, 1) for row in same)


def test_the_permutation_test_is_exact_for_few_problems(make_samples):
    a, b = make_samples([[True]] * 5, "a"), make_samples([[False]] * 5, "b")
    (row,) = differences({"arithmetic": a}, {"arithmetic": b}, "compare=b")
    assert row["p_value"] == pytest.approx(2 / 2**5, abs=0.006)  # all five the same way, or all the other
    assert not math.isnan(row["low"])


@pytest.mark.parametrize(("key", "value"), [("benchmark_sha256", "c" * 64), ("n", 9)])
def test_only_the_same_problems_are_compared(make_samples, key, value):
    a, b = make_samples(RANDOM, "a"), make_samples(RANDOM, "b")
    b.header[key] = value
    with pytest.raises(UserError, match=f"arithmetic has {key} = {value} there"):
        differences({"arithmetic": a}, {"arithmetic": b}, "compare=b")
    with pytest.raises(UserError, match="none in common"):
        differences({"arithmetic": a}, {"aime24": b}, "compare=b")
