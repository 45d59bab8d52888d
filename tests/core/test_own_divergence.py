"""A divergence of one's own: the very example of docs/adding_a_divergence.md."""

import math
import re
from pathlib import Path

import mpmath as mp
import pytest
import torch

from trustregion import Divergence, band_bounds, binary_divergence, cell_divergence
from trustregion.bounds import interval

from .helpers import random_tokens

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_divergence.md"


@pytest.fixture(scope="module")
def triangular() -> Divergence:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 15
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["Triangular"]()


def exact_distance(r, p):
    """In mpmath, of {sampled token, all others} at ratio r."""
    u = (1 - r * p) / (1 - p)
    return p * (r - 1) ** 2 / (2 * (r + 1)) + (1 - p) * (u - 1) ** 2 / (2 * (u + 1))


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.float64, 1e-11)])
def test_its_bounds_are_where_the_divergence_is_delta(triangular, dtype, bar):
    for p in (1e-12, 0.001, 0.125, 0.5, 0.9375):
        log_prob = torch.tensor([math.log(p)], dtype=dtype)
        for delta in (1e-6, 0.01, 0.05, 0.2, 0.6):
            bounds = torch.cat(band_bounds(log_prob, triangular, delta)).double().tolist()
            with mp.workdps(50):
                exact_p = mp.exp(mp.mpf(log_prob.item()))
                for bound, edge in zip(bounds, (-math.inf, -log_prob.item()), strict=True):
                    if exact_distance(mp.exp(mp.mpf(edge)), exact_p) <= delta:
                        assert bound == edge, (p, delta)
                        continue
                    # The divergence at a bound a little wider is above delta, at one a little narrower below.
                    wider, narrower = (exact_distance(mp.exp(bound * (1 + s * bar)), exact_p) for s in (1, -1))
                    assert narrower < delta < wider, (p, delta, bound)


def test_its_saturation_is_found_to_the_last_digits(triangular):
    """A mass m vanishes at the divergence m/2 + m^2 / (2 (2 - m)) = m / (2 - m)."""
    for delta in (1e-9, 0.01, 0.3, 0.9):
        m = mp.mpf(2 * delta) / (1 + delta)
        vanishing, filling = triangular.saturation(delta)
        assert vanishing == pytest.approx(float(mp.log(m)), rel=1e-15)
        assert filling == pytest.approx(float(mp.log1p(-m)), rel=1e-14)
    assert triangular.saturation(1.0) == (0, -math.inf)


def test_its_divergence_mask_is_its_interval(triangular):
    log_prob, log_prob_old, _ = random_tokens(20_000, seed=12)
    log_lower, log_upper = interval(triangular, log_prob_old, 0.05, 0.05)
    log_ratio = log_prob - log_prob_old
    outside = (log_ratio > log_upper) | (log_ratio < log_lower)
    assert torch.equal(outside, binary_divergence(log_prob, log_prob_old, triangular) > 0.05)
    assert 0.02 < outside.double().mean() < 0.7


def test_it_works_over_cells_and_at_the_edges(triangular):
    old, new = torch.tensor([[0.5, 0.5, 0, 0]]).log(), torch.tensor([[0.25, 0, 0.75, 0]]).log()
    assert cell_divergence(new, old, triangular).item() == pytest.approx(1 / 24 + 0.25 + 0.375)
    for dtype in (torch.float32, torch.float64):
        log_prob = torch.tensor([0.0, -1e-9, -1, -100, -1000, -math.inf], dtype=dtype)
        for bound in band_bounds(log_prob, triangular, 0.05):
            assert not bound.isnan().any()
        new, old = torch.meshgrid(log_prob[:-1], log_prob[:-1], indexing="ij")
        distance = binary_divergence(new, old, triangular)
        assert (distance >= 0).all() and (distance <= 1).all()
