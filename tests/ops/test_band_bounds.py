"""Native bounds against those of pure torch, and the operator's manners. Golden values: tests/core/test_bounds.py."""

import pytest
import torch

from trustregion import band_bounds
from trustregion.bounds import interval
from trustregion.divergences import get_divergence
from trustregion.ops import using

DIVERGENCES = ["kl", "reverse_kl", "tv", "chi2"]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}  # of the bounds' type


def log_probs(dtype, count=20_000):
    spread = -torch.logspace(-7, 1.9, count, dtype=torch.float64)
    return torch.cat([spread, torch.tensor([0.0, -1e-30, -1e-10, -87, -95, -200, -800, -5000, -torch.inf])]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.05, 0.3, 0.9])
def test_bounds_equal_those_of_pure_torch(divergence, delta, dtype):
    x = log_probs(dtype)
    ours = band_bounds(x, divergence, delta)
    with using("torch"):
        expected = band_bounds(x, divergence, delta)
    assert_same(ours, expected, x, divergence, delta)


def assert_same(ours, expected, x, divergence, delta):
    """Bounds of log-probs x, within float32's or float64's accuracy."""
    rtol = TOLERANCE[ours[0].dtype]
    rtol *= 1 if delta > 0.01 or rtol == TOLERANCE[torch.float64] else 4  # kl in float32 is off by 2e-6 itself
    for side, other, saturation in zip(ours, expected, get_divergence(divergence).saturation(delta), strict=True):
        assert side.dtype == other.dtype and side.shape == other.shape
        assert torch.equal(side.isinf(), other.isinf())
        # Next to saturation, rounding of the input moves a bound by far more than its own share.
        near = ((x - saturation).abs() < 1e-3 * abs(saturation)) | (x > -1e-6) if divergence != "kl" else x > 1
        torch.testing.assert_close(side[~near], other[~near], rtol=rtol, atol=0)
        torch.testing.assert_close(side, other, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_either_side_has_its_radius_and_the_cap_binds(divergence):
    x = log_probs(torch.float64, 500)
    low, high = interval(get_divergence(divergence), x, 0.01, 0.2, ratio_cap=1.5)
    assert torch.equal(low, band_bounds(x, divergence, 0.01)[0])
    assert torch.equal(high, band_bounds(x, divergence, 0.2)[1].clamp(max=torch.tensor(1.5, dtype=x.dtype).log()))
    assert (high == torch.tensor(1.5, dtype=x.dtype).log()).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_half_is_read_as_its_float32(divergence, dtype):
    bits = torch.arange(2**16).to(torch.uint16).view(dtype)
    x = bits[bits <= 0]
    for ours, expected in zip(band_bounds(x, divergence), band_bounds(x.float(), divergence), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, expected)


def test_a_bound_depends_on_its_token_alone():
    """Not on how many there are, on where it stands, on strides or on the number of threads."""
    x = log_probs(torch.float32, 9000)
    whole = torch.stack(band_bounds(x, "kl"))
    for count in (0, 1, 2, 15, 255, 256, 257, 4097):
        assert torch.equal(torch.stack(band_bounds(x[:count], "kl")), whole[:, :count])
    assert torch.equal(torch.stack(band_bounds(x.flip(0), "kl")), whole.flip(1))
    assert torch.equal(torch.stack(band_bounds(x[::3], "kl")), whole[:, ::3])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(torch.stack(band_bounds(x, "kl")), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_operator_passes_opcheck(dtype):
    x = log_probs(dtype, 50)[None]
    for i, name in enumerate(DIVERGENCES):
        vanishes_at, fills_at = get_divergence(name).saturation(0.05)
        torch.library.opcheck(torch.ops.trustregion.band_bounds, (x, i, 0.05, 0.05, vanishes_at, fills_at, 1.0))


@pytest.mark.slow
def test_bounds_compile_without_a_graph_break():
    def bounds(x):
        log_lower, log_upper = torch.ops.trustregion.band_bounds(x, 0, 0.05, 0.05, -torch.inf, torch.inf, 2.0)
        return torch.clamp(x, log_lower, log_upper)

    x = log_probs(torch.float32, 500)
    for dynamic in (False, True):
        compiled = torch.compile(bounds, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert torch.equal(compiled(x), bounds(x))


def test_a_wrong_argument_is_refused():
    with pytest.raises(RuntimeError, match="divergence 4: must be 0"):
        torch.ops.trustregion.band_bounds(torch.zeros(3), 4, 0.05, 0.05, -1.0, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="must be floats"):
        torch.ops.trustregion.band_bounds(torch.zeros(3, dtype=torch.int64), 0, 0.05, 0.05, -1.0, 0.0, 1.0)
