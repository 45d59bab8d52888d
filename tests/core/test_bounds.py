"""Band bounds against golden values and high-precision arithmetic, at the float range's edges, and their properties."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustregion import Divergence, band_bounds
from trustregion.divergences import get_divergence
from trustregion.divergences.solver import bracketed_root
from trustregion.numerics import COMPLEMENT_FLOOR

from .helpers import exact_bounds, generator, golden_bounds, value_at_zero

BAR = {torch.float32: 1e-6, torch.float64: 1e-11}
DTYPES = list(BAR)
DIVERGENCES = [
    "kl", "reverse_kl", "tv", "chi2", "hellinger", "js",
    "alpha(-1)", "alpha(0.3)", "alpha(0.5)", "alpha(0.7)", "alpha(1.5)", "alpha(3)",
]


@pytest.fixture(autouse=True)
def _precision():
    with mp.workdps(40):
        yield


def ours(divergence, delta, log_prob, dtype) -> tuple[float, float]:
    log_lower, log_upper = band_bounds(torch.tensor([log_prob], dtype=dtype), divergence, delta)
    assert log_lower.dtype == log_upper.dtype == dtype
    return log_lower.item(), log_upper.item()


def assert_accurate(divergence, delta, log_probs, dtype, exact=None, slack_of_delta=0.0):
    """Bounds within `BAR`, relatively, of what the exact ones take over log_prob +- 2 ulp.

    Close to saturation half an ulp of the input moves a bound by far more than rounding does, and no algorithm that is
    given the rounded log-prob can do better. `slack_of_delta`: relative, how far the radius may be off as well.
    """
    inputs = torch.tensor(log_probs, dtype=dtype)
    assert inputs.tolist() == log_probs
    log_lower, log_upper = band_bounds(inputs, divergence, delta)
    exact = exact or [exact_bounds(divergence, delta, log_prob) for log_prob in log_probs]
    for log_prob, *bounds, values in zip(log_probs, log_lower.tolist(), log_upper.tolist(), exact, strict=True):
        ulp = float(np.spacing(np.float32(-log_prob) if dtype == torch.float32 else np.float64(-log_prob)))
        for side, (bound, value) in enumerate(zip(bounds, values, strict=True)):
            if bound == value or abs(bound - value) <= BAR[dtype] * abs(value):
                continue
            around = [
                exact_bounds(divergence, delta * (1 + mp.mpf(radius)), log_prob + steps * mp.mpf(ulp))[side]
                for steps in (-2, 2)
                for radius in {-slack_of_delta, slack_of_delta}
            ]
            distance = max(min(around) - bound, bound - max(around))
            assert distance <= BAR[dtype] * abs(value), (divergence, dtype, delta, log_prob, bounds, values)


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "tv", "chi2"])
def test_bounds_equal_golden_values(divergence):
    rows = [row for row in golden_bounds() if row["divergence"] == divergence]
    assert len(rows) == 180
    for delta in sorted({row["delta"] for row in rows}):
        texts = [row["text"] for row in rows if row["delta"] == delta and row["log_prob"] < 0]
        log_probs = [float(text["log_prob"]) for text in texts]
        golden = [(mp.mpf(text["log_lower"]), mp.mpf(text["log_upper"])) for text in texts]
        for text, values in zip(texts[::3], golden[::3], strict=True):
            reference = exact_bounds(divergence, text["delta"], text["log_prob"])
            assert all(x == y or abs(x / y - 1) < 1e-18 for x, y in zip(reference, values, strict=True)), text
        for dtype in DTYPES:
            assert_accurate(divergence, delta, log_probs, dtype, exact=golden)
            bounds = torch.stack(band_bounds(torch.tensor(log_probs, dtype=dtype), divergence, delta), -1).tolist()
            for log_prob, ours, values in zip(log_probs, bounds, golden, strict=True):
                assert (ours[0] == -math.inf) == (values[0] < -torch.finfo(dtype).max), (delta, log_prob)
                assert ours[1] == -log_prob or float(values[1]) != -log_prob, (delta, log_prob)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "tv", "chi2"])
def test_bounds_of_a_certain_token_equal_golden_limits(divergence, dtype):
    """Golden values at log_prob = 0 are limits as p -> 1, ours the bounds at the floor of complement masses."""
    rows = [row for row in golden_bounds() if row["divergence"] == divergence and row["log_prob"] == 0]
    assert len(rows) == 9
    for row in rows:
        golden = [float(row["text"][side]) for side in ("log_lower", "log_upper")]
        if divergence == "reverse_kl":  # the limit is far: 1 - lower falls no faster than delta / ln(1/(1-p))
            assert golden[0] == 0
            golden[0] = float(exact_bounds(divergence, row["delta"], 0, COMPLEMENT_FLOOR[dtype])[0])
        assert ours(divergence, row["delta"], 0.0, dtype) == pytest.approx(golden, abs=1e-4), row


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bounds_equal_high_precision_between_golden_values(divergence, dtype):
    generator = np.random.default_rng(0)
    log_probs = (-np.exp(generator.uniform(math.log(1e-7), math.log(80), 24))).astype(np.float32).astype(float)
    for delta in (0.01, 0.05, 0.3, 2.0):
        assert_accurate(divergence, delta, log_probs.tolist(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name != "kl"])
def test_bounds_keep_all_digits_at_the_ends_of_the_range(divergence):
    """In float64: the smallest radii, and log-probs far below float32's range."""
    for delta in (1e-12, 1e-6, 0.6):
        assert_accurate(divergence, delta, [-1000.0, -80.0, -1e-7], torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name not in ("kl", "alpha(-1)")])
def test_bounds_keep_their_digits_next_to_saturation(divergence, dtype):
    """But for what rounding the divergence itself in float64 costs there."""
    for share in (0.05, 0.5, 0.95):
        delta = share * min(get_divergence(divergence).max_value, 5)
        for threshold in get_divergence(divergence).saturation(delta):
            near = torch.tensor([threshold * (1 + s * 10.0**-k) for s in (-1, 1) for k in (2, 4, 6)], dtype=dtype)
            assert_accurate(divergence, delta, near.tolist(), dtype, slack_of_delta=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name != "chi2"])
def test_a_certain_token_has_the_bounds_of_the_complement_floor(divergence, dtype):
    """But for chi2, whose bound is kept within 1e-4 of the limit."""
    for delta in (0.01, 0.05, 0.3):
        exact = float(exact_bounds(divergence, delta, 0, COMPLEMENT_FLOOR[dtype])[0])
        assert ours(divergence, delta, 0.0, dtype) == pytest.approx((exact, 0), rel=BAR[dtype], abs=0), delta


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "log_probs"), [(torch.float32, (-89, -95, -110, -500)), (torch.float64, (-740, -1000))]
)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_upper_bounds_survive_masses_below_the_float_range(divergence, dtype, log_probs):
    for log_prob in log_probs:
        log_upper = ours(divergence, 0.05, log_prob, dtype)[1]
        assert log_upper == pytest.approx(float(exact_bounds(divergence, 0.05, log_prob)[1]), rel=BAR[dtype])


@pytest.mark.slow
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_radius_beyond_every_distance_constrains_nothing(divergence, dtype):
    log_prob = torch.tensor([-1e-7, -1e-3, -0.5, -3, -30], dtype=dtype)
    largest = get_divergence(divergence).max_value
    bounded = largest < math.inf
    log_lower, log_upper = band_bounds(log_prob, divergence, largest if bounded else 1e30)
    if bounded:
        assert (log_lower == -math.inf).all() and torch.equal(log_upper, -log_prob)
        # A smaller one still constrains: what is nearly certain cannot vanish, what is rare can.
        log_lower, _ = band_bounds(log_prob, divergence, 0.9 * largest)
        assert log_lower[0] > -math.inf and (log_lower[-1] == -math.inf)
    else:
        assert (log_lower < -5).all()
        torch.testing.assert_close(log_upper, -log_prob)


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name not in ("kl", "alpha(-1)")])
def test_saturation_is_where_the_vanished_mass_costs_delta(divergence):
    """m f(0) + (1-m) f(1/(1-m)) = delta, for the token's mass m or that of all others."""
    f, at_zero = generator(divergence), value_at_zero(divergence)
    for delta in (1e-9, 0.01, 0.05, 0.3, 0.65):
        vanishing, filling = map(mp.mpf, get_divergence(divergence).saturation(delta))
        for m, rest in ((mp.exp(vanishing), -mp.expm1(vanishing)), (-mp.expm1(filling), mp.exp(filling))):
            assert m * at_zero + rest * f(1 / rest) == pytest.approx(delta, rel=1e-14, abs=0), (delta, m)


def test_the_solver_for_any_divergence_agrees_with_the_one_for_kl():
    class AnyKL(Divergence):
        term = staticmethod(get_divergence("kl").term)

    log_prob = torch.cat([-torch.logspace(-16, 2.8, 300, dtype=torch.float64), torch.tensor([0.0, -math.inf])])
    for delta in (1e-12, 0.05, 2):
        for ours, theirs in zip(band_bounds(log_prob, AnyKL(), delta), band_bounds(log_prob, "kl", delta), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert AnyKL().saturation(0.05) == (-math.inf, math.inf)


def test_roots_outside_of_the_range_are_noticed():
    exact = torch.tensor([-5.0, -1.0, -0.999, 0.1, 0.999, 1.0, 1.001, 5.0], dtype=torch.float64)
    points = [torch.full_like(exact, x) for x in (-1.0, 0.5, 1.0)]
    root, never = bracketed_root(lambda x: (x - exact).sinh(), points, steps=12)
    assert never.tolist() == [False] * 5 + [True] * 3
    torch.testing.assert_close(root[~never], exact[~never].clamp(min=-1), rtol=1e-15, atol=1e-16)


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


LOG_PROBS = -torch.logspace(-7, math.log10(80), 60, dtype=torch.float64)
radii = st.floats(1e-4, 0.999)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", DIVERGENCES)
@settings(max_examples=12, deadline=None)
@given(delta=radii, wider=radii)
def test_bounds_contain_the_anchor_and_grow_with_delta(divergence, delta, wider):
    delta, wider = sorted((delta, wider))
    inner, outer = (band_bounds(LOG_PROBS, divergence, radius) for radius in (delta, wider))
    slack = 1e-14
    assert (inner[0] < 0).all() and (inner[1] > 0).all() and (inner[1] <= -LOG_PROBS).all()
    assert (outer[0] <= inner[0] * (1 - slack)).all() and (inner[1] <= outer[1] * (1 + slack)).all()


def test_tiny_radii_do_not_underflow():
    log_prob = torch.tensor([-48.27])
    for delta in (1e-26, 3.16e-25, 5.6e-25):
        single, double = (band_bounds(x, "kl", delta)[1].item() for x in (log_prob, log_prob.double()))
        assert single == pytest.approx(double, rel=1e-5)
