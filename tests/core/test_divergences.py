"""Divergences over two cells and over many, against their definition in high precision and at the edges."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustregion import DIVERGENCES, binary_divergence, cell_divergence

GENERATORS = {
    "kl": lambda u: -mp.log(u) + u - 1,
    "tv": lambda u: abs(u - 1) / 2,
    "chi2": lambda u: (u - 1) ** 2,
}
NAMES = list(GENERATORS)


def definition(divergence, log_prob, log_prob_old):
    with mp.workdps(60):
        f, log_prob, log_prob_old = GENERATORS[divergence], mp.mpf(log_prob), mp.mpf(log_prob_old)
        p, c = mp.exp(log_prob_old), -mp.expm1(log_prob_old)
        return float(p * f(mp.exp(log_prob - log_prob_old)) + c * f(-mp.expm1(log_prob) / c))


def test_every_divergence_is_tested_here():
    assert set(NAMES) == set(DIVERGENCES)


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
                assert ours.item() == pytest.approx(exact, rel=bar), (divergence, old, new)


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
            assert (distance.diff() >= 0).all(), (old, end)


def random_cells(cells: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, 64, cells, generator=generator, dtype=torch.float64)
    new, old = logits.log_softmax(-1)
    return new, old


@pytest.mark.parametrize("divergence", NAMES)
def test_cell_divergence_is_the_sum_of_its_definition(divergence):
    new, old = random_cells(7, seed=0)
    ratio = (new - old).exp()
    f = {"kl": -ratio.log() + ratio - 1, "tv": (ratio - 1).abs() / 2, "chi2": (ratio - 1) ** 2}[divergence]
    torch.testing.assert_close(cell_divergence(new, old, divergence), (old.exp() * f).sum(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("divergence", NAMES)
def test_two_cells_are_the_binary_partition(divergence):
    new, old = random_cells(2, seed=1)
    binary = binary_divergence(new[:, 0], old[:, 0], divergence)
    torch.testing.assert_close(cell_divergence(new, old, divergence), binary, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("divergence", NAMES)
def test_empty_cells(divergence):
    inf = math.inf
    old = torch.tensor([[0.5, 0.5, 0], [1, 0, 0], [0.5, 0.5, 0]]).log()
    new = torch.tensor([[0.25, 0.75, 0], [0.75, 0.25, 0], [1, 0, 0]]).log()
    expected = {
        "kl": [0.5 * math.log(4 / 3), -math.log(0.75), inf],
        "tv": [0.25, 0.25, 0.5],
        "chi2": [0.25, inf, 1.0],
    }[divergence]
    torch.testing.assert_close(cell_divergence(new, old, divergence), torch.tensor(expected))


@settings(max_examples=60, deadline=None)
@given(divergence=st.sampled_from(NAMES), cells=st.integers(3, 9), seed=st.integers(0, 10**6))
def test_a_coarser_partition_is_never_further_apart(divergence, cells, seed):
    new, old = random_cells(cells, seed)
    merged = [torch.cat([x[:, :-2], x[:, -2:].logsumexp(-1, keepdim=True)], -1) for x in (new, old)]
    fine, coarse = cell_divergence(new, old, divergence), cell_divergence(*merged, divergence)
    binary = binary_divergence(new[:, 0], old[:, 0], divergence)
    slack = 1e-8  # log-softmax rounds: where the first cell has nearly all the mass, what is left is less accurate
    assert (binary <= coarse * (1 + slack) + slack).all() and (coarse <= fine * (1 + slack) + slack).all()


def test_divergences_carry_no_gradient():
    x = torch.tensor([[-1.0, -0.5]], requires_grad=True)
    assert not binary_divergence(x, x - 0.1).requires_grad
    assert not cell_divergence(x, x - 0.1).requires_grad


def test_bad_arguments_are_refused():
    x = torch.tensor([-1.0, -0.5])
    with pytest.raises(ValueError, match="divergence = 'klx': must be one of kl, tv, chi2"):
        binary_divergence(x, x, "klx")
    with pytest.raises(ValueError, match=r"cell_log_prob has shape \(2,\), cell_log_prob_old \(1,\)"):
        cell_divergence(x, x[:1])
