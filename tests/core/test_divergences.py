"""Divergences over two cells and over many, against their definition in high precision and at the edges."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustregion import DIVERGENCES, band_bounds, binary_divergence, cell_divergence
from trustregion.divergences import Alpha, get_divergence

from .helpers import generator, order, random_tokens, value_at_zero

ALPHAS = [f"alpha({a})" for a in (-10, -1, -0.03, 0.0001, 0.3, 0.5, 0.7, 0.9999, 1.02, 1.5, 3, 10)]
NAMES = [*DIVERGENCES, *ALPHAS]


def definition(divergence, log_prob, log_prob_old):
    with mp.workdps(60):
        f, log_prob, log_prob_old = generator(divergence), mp.mpf(log_prob), mp.mpf(log_prob_old)
        p, c = mp.exp(log_prob_old), -mp.expm1(log_prob_old)
        return float(p * f(mp.exp(log_prob - log_prob_old)) + c * f(-mp.expm1(log_prob) / c))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-13), (torch.float32, 4e-6)])
@pytest.mark.parametrize("divergence", NAMES)
def test_binary_divergence_is_relatively_accurate(divergence, dtype, bar):
    """From p = e^-80 to 1 - p = 1e-4, and from moves that cancel to nothing to moves of all the mass."""
    log_prob_old = [-80.0, -30.0, -8.0, -2.0, -0.75, -0.125, -0.0078125, -0.0001220703125]
    for old in log_prob_old:
        for fraction in (-64.0, -8.0, -0.5, -(2.0**-7), -(2.0**-12), 2.0**-12, 2.0**-7, 0.25, 0.75, 1 - 2.0**-6):
            new = old * (1 - fraction)
            ours = binary_divergence(torch.tensor([new], dtype=dtype), torch.tensor([old], dtype=dtype), divergence)
            exact = definition(divergence, torch.tensor(new, dtype=dtype).item(), old)
            if exact < 1e37:  # beyond, float32 gives inf
                # A power (q/p)^a has a times the error of q/p, and that of the last digit of a ln(q/p).
                a = abs(float(order(divergence))) if "alpha" in divergence else 0
                rel = bar * (1 + a) + torch.finfo(dtype).eps * a * abs(new - old)
                assert ours.item() == pytest.approx(exact, rel=rel), (divergence, old, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divergence", NAMES)
def test_binary_divergence_at_the_edges(divergence, dtype):
    log_prob = torch.tensor([0.0, -1e-9, -1e-3, -5, -90, -110, -200, -1000], dtype=dtype)
    new, old = torch.meshgrid(log_prob, log_prob, indexing="ij")
    distance = binary_divergence(new, old, divergence)
    assert not distance.isnan().any() and (distance >= 0).all()
    assert (distance.diagonal() == 0).all()
    assert distance.dtype == dtype


@pytest.mark.parametrize("divergence", NAMES)
def test_binary_divergence_rises_with_the_move(divergence):
    for old in (-60.0, -3.0, -0.5, -1e-3, 0.0):
        for end in (-120.0, 0.0):
            new = old + torch.linspace(0, 1, 2001, dtype=torch.float64) * (end - old)
            distance = binary_divergence(new, torch.full_like(new, old), divergence)
            assert (distance[1:] >= distance[:-1] * (1 - 1e-14)).all(), (old, end)


def random_cells(cells: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, 64, cells, generator=generator, dtype=torch.float64)
    new, old = logits.log_softmax(-1)
    return new, old


@pytest.mark.parametrize("divergence", NAMES)
def test_cell_divergence_is_the_sum_of_its_definition(divergence):
    new, old = random_cells(7, seed=0)
    ratio = (new - old).exp()
    with mp.workdps(40):
        f = [[float(generator(divergence)(mp.mpf(u))) for u in row] for row in ratio.tolist()]
    expected = (old.exp() * torch.tensor(f, dtype=torch.float64)).sum(-1)
    torch.testing.assert_close(cell_divergence(new, old, divergence), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("divergence", NAMES)
def test_two_cells_are_the_binary_partition(divergence):
    new, old = random_cells(2, seed=1)
    binary = binary_divergence(new[:, 0], old[:, 0], divergence)
    torch.testing.assert_close(cell_divergence(new, old, divergence), binary, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("divergence", NAMES)
def test_empty_cells(divergence):
    """Where either policy gives a cell nothing the definition is a limit: f(0) and f'(inf)."""
    old = torch.tensor([[0.5, 0.5, 0], [1, 0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0]]).log()
    new = torch.tensor([[0.25, 0.75, 0], [0.75, 0.25, 0], [1, 0, 0], [0, 0, 1]]).log()
    f, at_zero = (lambda u, f=generator(divergence): float(f(mp.mpf(u)))), float(value_at_zero(divergence))
    slope = get_divergence(divergence).slope_at_infinity
    expected = [(f(0.5) + f(1.5)) / 2, f(0.75) + slope / 4, (f(2) + at_zero) / 2, at_zero + slope]
    torch.testing.assert_close(cell_divergence(new, old, divergence), torch.tensor(expected), rtol=2e-6, atol=0)
    torch.testing.assert_close(get_divergence(divergence).max_value, expected[-1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("divergence", NAMES)
def test_cells_that_underflow(divergence):
    log_mass = torch.tensor([-80.0, -90, -103, -110, -1000])
    new, old = torch.meshgrid(log_mass, log_mass, indexing="ij")
    rest = torch.zeros_like(old)
    distance = cell_divergence(torch.stack([new, rest], -1), torch.stack([old, rest], -1), divergence)
    assert not distance.isnan().any() and (distance >= 0).all() and (distance.diagonal() == 0).all()


@pytest.mark.parametrize("divergence", NAMES)
def test_slope_at_infinity_is_the_limit(divergence):
    slope = get_divergence(divergence).slope_at_infinity
    with mp.workdps(40):
        distance_from_one = abs(1 - order(divergence)) if "alpha" in divergence else 0.05
        u = mp.mpf(10) ** (30 / min(distance_from_one, 1))
        at_infinity = generator(divergence)(u) / u
    assert at_infinity > 1e2 if slope == math.inf else slope == pytest.approx(float(at_infinity), rel=1e-8)


@settings(max_examples=150, deadline=None)
@given(divergence=st.sampled_from(NAMES), cells=st.integers(3, 9), seed=st.integers(0, 10**6))
def test_a_coarser_partition_is_never_further_apart(divergence, cells, seed):
    new, old = random_cells(cells, seed)
    merged = [torch.cat([x[:, :-2], x[:, -2:].logsumexp(-1, keepdim=True)], -1) for x in (new, old)]
    fine, coarse = cell_divergence(new, old, divergence), cell_divergence(*merged, divergence)
    binary = binary_divergence(new[:, 0], old[:, 0], divergence)
    slack = 1e-8  # log-softmax rounds: where the first cell has nearly all the mass, what is left is less accurate
    assert (binary <= coarse * (1 + slack) + slack).all() and (coarse <= fine * (1 + slack) + slack).all()


# ---- alpha -----------------------------------------------------------------------------------------------------------
SPECIAL_ORDERS = [(0, "kl", 1), (1, "reverse_kl", 1), (2, "chi2", 0.5), (0.5, "hellinger", 4)]


@pytest.mark.parametrize(("a", "other", "factor"), SPECIAL_ORDERS)
def test_special_orders_of_alpha_are_the_other_divergences(a, other, factor):
    log_prob, log_prob_old, _ = random_tokens(5000, seed=0)
    expected = factor * binary_divergence(log_prob, log_prob_old, other)
    finite = expected < 1e300
    actual = binary_divergence(log_prob, log_prob_old, Alpha(a))
    torch.testing.assert_close(actual[finite], expected[finite], rtol=1e-12, atol=0)
    for delta in (0.01, 0.3):
        # Bounds at one radius are those of the other divergence at radius / factor.
        for ours, theirs in zip(
            band_bounds(log_prob_old, Alpha(a), delta), band_bounds(log_prob_old, other, delta / factor), strict=True
        ):
            ours, theirs = ours.clamp(min=-1e30), theirs.clamp(min=-1e30)
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=0)
    assert Alpha(a).saturation(0.3) == pytest.approx(get_divergence(other).saturation(0.3 / factor), rel=1e-14)
    assert Alpha(a).max_value == pytest.approx(factor * get_divergence(other).max_value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("a", "other"), [(0, "kl"), (1, "reverse_kl")])
def test_alpha_is_accurate_next_to_its_limits(a, other, dtype):
    """Relatively in D: (u^a - 1 - a(u-1)) / (a(a-1)) as it stands has lost all digits long before."""
    log_prob, log_prob_old, _ = random_tokens(2000, seed=1, dtype=dtype)
    limit = binary_divergence(log_prob, log_prob_old, other)
    for epsilon in (1e-4, 1e-8, 1e-13, 1e-19, 1e-21, 1e-45, 1e-300):
        for order in (a + epsilon, a - epsilon):
            distance = binary_divergence(log_prob, log_prob_old, Alpha(order))
            # The two differ by a share of epsilon x the log-ratio, which here is below 40 for either cell.
            rtol = 40 * (torch.finfo(dtype).eps + epsilon)
            torch.testing.assert_close(distance, limit, rtol=rtol, atol=1e-37)


@pytest.mark.parametrize("a", [-3, 0.25, 0.9])
def test_alpha_of_exchanged_policies_has_order_one_minus_a(a):
    new, old = random_cells(6, seed=3)
    forward, backward = cell_divergence(new, old, Alpha(a)), cell_divergence(old, new, Alpha(1 - a))
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=0)


def test_how_alpha_is_named():
    x, y = torch.tensor([-1.0, -0.5]), torch.tensor([-2.0, -0.7])
    assert get_divergence("alpha(0.5)") == Alpha(0.5) and Alpha(0.5).name == "alpha(0.5)"
    assert get_divergence("alpha(-2)").a == -2 and get_divergence(Alpha(3).name) == Alpha(3)
    assert torch.equal(binary_divergence(x, y, "alpha(0.3)"), binary_divergence(x, y, Alpha(0.3)))
    for name, message in {
        "alpha": r"divergence = 'alpha': its order is missing, as in 'alpha\(0.5\)' or Alpha\(0.5\)",
        "alpha(11)": r"divergence = 'alpha\(11\)': a = 11.0: must be a number from -10 to 10",
        "alpha(nan)": r"divergence = 'alpha\(nan\)': a = nan: must be",
        "alpha(x)": r"divergence = 'alpha\(x\)': could not convert",
        "alpha()": r"divergence = 'alpha\(\)': must be one of",
    }.items():
        with pytest.raises(ValueError, match=message):
            get_divergence(name)
    for a in (True, "0.5", None, 10.5, math.inf):
        with pytest.raises(ValueError, match=f"a = {a!r}: must be a number from -10 to 10"):
            Alpha(a)


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_divergences_carry_no_gradient():
    x = torch.tensor([[-1.0, -0.5]], requires_grad=True)
    assert not binary_divergence(x, x - 0.1).requires_grad
    assert not cell_divergence(x, x - 0.1).requires_grad


def test_bad_arguments_are_refused():
    x = torch.tensor([-1.0, -0.5])
    known = "kl, reverse_kl, tv, chi2, hellinger, js, or alpha"
    with pytest.raises(ValueError, match=f"divergence = 'klx': must be one of {known}"):
        binary_divergence(x, x, "klx")
    with pytest.raises(ValueError, match=r"cell_log_prob has shape \(2,\), cell_log_prob_old \(1,\)"):
        cell_divergence(x, x[:1])


@pytest.mark.parametrize("divergence", ["reverse_kl", "chi2", "alpha(1.5)"])
@pytest.mark.parametrize(("dtype", "log_mass"), [(torch.float32, -110.0), (torch.float64, -800.0)])
def test_a_mass_that_underflows_where_the_anchor_has_none_is_infinitely_far(divergence, dtype, log_mass):
    new, old = torch.tensor([0.0, log_mass], dtype=dtype), torch.tensor([0.0, -torch.inf], dtype=dtype)
    assert cell_divergence(new, old, divergence).item() == torch.inf
