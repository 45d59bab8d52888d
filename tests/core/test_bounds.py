"""Band bounds against golden values and high-precision arithmetic, at the float range's edges, and their properties."""

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustregion import band_bounds

from .helpers import exact_bounds, golden_bounds

BAR = {torch.float32: 1e-6, torch.float64: 1e-11}
DTYPES = list(BAR)
DIVERGENCES = ["kl", "tv", "chi2"]


@pytest.fixture(autouse=True)
def _precision():
    with mp.workdps(40):
        yield


def ours(divergence, delta, log_prob, dtype) -> tuple[float, float]:
    log_lower, log_upper = band_bounds(torch.tensor([log_prob], dtype=dtype), divergence, delta)
    assert log_lower.dtype == log_upper.dtype == dtype
    return log_lower.item(), log_upper.item()


def errors_beyond_two_ulp(bounds, divergence, delta, log_prob, dtype) -> list[float]:
    """Relative distance of (log_lower, log_upper) from what the exact bounds take over log_prob +- 2 ulp.

    Close to saturation half an ulp of the input moves a bound by far more than rounding does, and no algorithm that is
    given the rounded log-prob can do better.
    """
    ulp = mp.mpf(float(np.spacing(np.float32(-log_prob) if dtype == torch.float32 else np.float64(-log_prob))))
    around = [exact_bounds(divergence, delta, log_prob + steps * ulp) for steps in (-2, 0, 2)]
    errors = []
    for value, reachable in zip(bounds, zip(*around, strict=True), strict=True):
        distance = max(min(reachable) - value, value - max(reachable), 0)
        errors.append(float(distance / abs(reachable[1])) if value != reachable[1] else 0.0)
    return errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bounds_equal_golden_values(divergence, dtype):
    rows = [row for row in golden_bounds() if row["divergence"] == divergence]
    assert len(rows) == 180
    for row in rows:
        delta, log_prob = row["delta"], row["log_prob"]
        text = row["text"]
        golden = mp.mpf(text["log_lower"]), mp.mpf(text["log_upper"])
        bounds = ours(divergence, delta, log_prob, dtype)
        where = f"{divergence}, {dtype}, delta {delta}, log_prob {log_prob}: {bounds}, golden {golden}"
        saturated = golden[0] == -mp.inf, float(golden[1]) == -log_prob
        assert not saturated[0] or bounds[0] == -math.inf, where
        assert not saturated[1] or bounds[1] == -log_prob, where
        if log_prob == 0:  # the golden values are limits, ours the bounds at the floor of complement masses
            assert all(saturated[side] or abs(bounds[side] - golden[side]) <= 1e-4 for side in (0, 1)), where
            continue
        for reference, value in zip(exact_bounds(divergence, text["delta"], text["log_prob"]), golden, strict=True):
            assert reference == value or abs(reference / value - 1) < 1e-18, f"{where}: the reference is {reference}"
        errors = errors_beyond_two_ulp(bounds, divergence, delta, log_prob, dtype)
        assert max(errors) <= BAR[dtype], f"{where}: errors {errors}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bounds_equal_high_precision_between_golden_values(divergence, dtype):
    generator = np.random.default_rng(0)
    log_probs = -np.exp(generator.uniform(math.log(2e-7), math.log(79), 40)).astype(np.float32).astype(float)
    for delta in (0.01, 0.05, 0.3, 2.0):
        for log_prob in log_probs.tolist():
            bounds = ours(divergence, delta, log_prob, dtype)
            errors = errors_beyond_two_ulp(bounds, divergence, delta, log_prob, dtype)
            assert max(errors) <= BAR[dtype], (divergence, delta, log_prob, bounds, errors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", ["tv", "chi2"])
def test_saturation_is_decided_exactly(divergence, dtype):
    """At the log-prob just inside and just outside the threshold, where masses in floating point cannot tell."""
    for delta in (0.01, 0.05, 0.3, 0.7):
        exact = mp.mpf(delta)
        vanishing, filling = (exact, 1 - exact) if divergence == "tv" else (exact / (1 + exact), 1 / (1 + exact))
        for side, threshold in ((0, mp.log(vanishing)), (1, mp.log(filling))):
            nearest = torch.tensor(float(threshold), dtype=dtype)
            for log_prob in (nearest, nearest.nextafter(torch.zeros_like(nearest)), nearest.nextafter(nearest - 1)):
                bounds = ours(divergence, delta, log_prob.item(), dtype)
                if abs(mp.mpf(log_prob.item()) - threshold) < 1e-15:
                    continue  # the threshold itself is rounded to float64
                if side == 0:
                    assert (bounds[0] == -math.inf) == (log_prob.item() <= threshold), (delta, log_prob, bounds)
                elif log_prob.item() >= threshold:
                    assert bounds[1] == -log_prob.item(), (delta, log_prob, bounds)


@pytest.mark.parametrize(
    ("dtype", "log_probs"), [(torch.float32, (-89, -95, -110, -500)), (torch.float64, (-740, -2000))]
)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_upper_bounds_survive_masses_below_the_float_range(divergence, dtype, log_probs):
    for log_prob in log_probs:
        log_upper = ours(divergence, 0.05, log_prob, dtype)[1]
        assert log_upper == pytest.approx(float(exact_bounds(divergence, 0.05, log_prob)[1]), rel=BAR[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *DTYPES])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bounds_are_never_nan(divergence, dtype):
    log_prob = [1e-5, 0.0, -1e-30, -1e-10, -1e-7, -1e-3, -0.5, -3, -80, -90, -110, -200, -800, -5000, -math.inf]
    log_prob = torch.tensor(log_prob, dtype=dtype).reshape(3, 5)
    for delta in (1e-300, 1e-40, 1e-12, 0.05, 0.99, 1e6, 1e30, 1e300):
        log_lower, log_upper = band_bounds(log_prob, divergence, delta)
        assert log_lower.shape == log_upper.shape == log_prob.shape
        assert log_lower.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (log_lower <= 0).all() and (log_upper >= 0).all(), delta
        assert (log_upper <= -log_prob.to(log_upper.dtype).clamp(max=0)).all(), delta


def test_kl_crossovers_with_fixed_ratio_clips():
    """Where Band-KL at delta .05 is as wide as GRPO and Clip-Higher."""
    for p, side, ratio in ((0.540, 1, 1.28), (0.671, 1, 1.2), (0.751, 0, 0.8)):
        assert math.exp(ours("kl", 0.05, math.log(p), torch.float64)[side]) == pytest.approx(ratio, abs=1.5e-3)


def test_ratio_cap_limits_the_upper_bound():
    log_prob_old = torch.tensor([-9.0, -0.5])
    _, free = band_bounds(log_prob_old, "kl", 0.05)
    log_lower, capped = band_bounds(log_prob_old, "kl", 0.05, ratio_cap=10)
    assert free[0] > math.log(10) and capped[0] == torch.tensor(math.log(10))
    assert capped[1] == free[1]
    # It starts to bind at p = .00714.
    _, (above, below) = band_bounds(torch.log(torch.tensor([0.00712, 0.00716])), "kl", 0.05)
    assert above > math.log(10) > below


def test_bounds_carry_no_gradient():
    log_lower, log_upper = band_bounds(torch.tensor([-1.0], requires_grad=True), "kl", 0.05)
    assert not log_lower.requires_grad and not log_upper.requires_grad


@pytest.mark.parametrize("arguments", [
    {"delta": 0}, {"delta": -1}, {"delta": math.nan}, {"delta": math.inf}, {"delta": True}, {"delta": "0.1"},
    {"ratio_cap": 1}, {"ratio_cap": math.nan}, {"divergence": "kll"},
])
def test_bad_arguments_are_refused(arguments):
    (name, value), = arguments.items()
    with pytest.raises(ValueError, match=f"{name} = {value!r}"):
        band_bounds(torch.tensor([-1.0]), **arguments)


log_probs = st.floats(-80, -1e-7)
radii = st.floats(1e-4, 0.999)


@settings(max_examples=150, deadline=None)
@given(divergence=st.sampled_from(DIVERGENCES), log_prob=log_probs, delta=radii, wider=radii)
def test_bounds_contain_the_anchor_and_grow_with_delta(divergence, log_prob, delta, wider):
    delta, wider = sorted((delta, wider))
    inner = ours(divergence, delta, log_prob, torch.float64)
    outer = ours(divergence, wider, log_prob, torch.float64)
    slack = 1e-14
    assert inner[0] <= 0 <= inner[1] <= -log_prob
    assert outer[0] <= inner[0] * (1 - slack) and inner[1] <= outer[1] * (1 + slack)
