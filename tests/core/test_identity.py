"""A ratio is outside the Band interval if and only if the binary divergence exceeds delta on its side (float64)."""

import pytest
import torch

from trustregion import DIVERGENCES, binary_divergence
from trustregion.bounds import interval
from trustregion.divergences import get_divergence

from .helpers import random_tokens

NAMES = [*DIVERGENCES, "alpha(-1)", "alpha(0.3)", "alpha(1.5)", "alpha(3)"]
DELTA_LOW, DELTA_HIGH = 0.05, 0.02


def sides(log_prob, log_prob_old, divergence):
    """(up, down): which tokens are outside according to the interval, and the same according to the divergence."""
    log_lower, log_upper = interval(get_divergence(divergence), log_prob_old, DELTA_LOW, DELTA_HIGH)
    log_ratio, distance = log_prob - log_prob_old, binary_divergence(log_prob, log_prob_old, divergence)
    assert not (log_lower.isnan() | log_upper.isnan() | distance.isnan()).any()
    band = log_ratio > log_upper, log_ratio < log_lower
    mask = (log_ratio > 0) & (distance > DELTA_HIGH), (log_ratio < 0) & (distance > DELTA_LOW)
    return band, mask


@pytest.mark.slow
@pytest.mark.parametrize("divergence", NAMES)
def test_interval_and_divergence_agree_on_every_token(divergence):
    log_prob, log_prob_old, _ = random_tokens(100_000, seed=11)
    assert log_prob_old.min() < -79 and log_prob_old.max() > -1.1e-7
    (band_up, band_down), (mask_up, mask_down) = sides(log_prob, log_prob_old, divergence)
    assert (band_up != mask_up).sum() == 0 and (band_down != mask_down).sum() == 0
    # The comparison is about something: both sides are left, and most tokens stay inside.
    assert band_up.double().mean() > 0.01 and band_down.double().mean() > 0.01
    assert (band_up | band_down).double().mean() < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("divergence", NAMES)
def test_interval_and_divergence_agree_close_to_the_bounds(divergence):
    """Tokens within 1e-9 of their bounds, relatively, on either side: no coarser agreement would do."""
    log_prob_old = -torch.logspace(-7, 1.9, 400, dtype=torch.float64)
    log_lower, log_upper = interval(get_divergence(divergence), log_prob_old, DELTA_LOW, DELTA_HIGH)
    for factor in (1 - 1e-9, 1 + 1e-9):
        for side, bound in ((0, log_upper), (1, log_lower)):
            # Saturated bounds are never crossed, and next to 1 - p < 1e-9 a ratio is no longer resolved.
            crossed = bound.isfinite() & (bound < -log_prob_old) & (bound > -1e3)
            log_prob = log_prob_old + bound * factor
            band, mask = sides(log_prob.clamp(max=0)[crossed], log_prob_old[crossed], divergence)
            certain = log_prob[crossed] > -1e-5
            assert crossed.sum() > 20 and (band[side] == mask[side])[~certain].all(), (side, factor)
            assert (band[side] == (factor > 1))[~certain].all(), (side, factor)


@pytest.mark.parametrize("divergence", NAMES)
def test_interval_and_divergence_agree_where_the_anchor_is_certain(divergence):
    """log_prob_old = 0: both see the mass of the other tokens at its floor."""
    log_prob = -torch.logspace(-15, 1.9, 20_000, dtype=torch.float64)
    (band_up, band_down), (mask_up, mask_down) = sides(log_prob, torch.zeros_like(log_prob), divergence)
    assert (band_down == mask_down).all() and band_down.any() and not band_down.all()
    assert not band_up.any() and not mask_up.any()
