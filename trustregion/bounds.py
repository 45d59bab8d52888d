"""From the trust region to a ratio interval (BandPO, arXiv 2603.04918).

Over all policies within divergence delta of the anchor, the sampled token's ratio r is largest and smallest where all
other tokens are rescaled by one common factor. So its bounds are the two roots, around r = 1, of
p f(r) + (1-p) f((1 - r p)/(1 - p)) = delta, or the edge of the simplex (r = 0, r = 1/p) where there is no root.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from trustregion.divergences import Divergence, get_divergence
from trustregion.numerics import at_most, round_down
from trustregion.ops import band_bounds as kernel
from trustregion.partitions import upcast


@torch.no_grad()
def band_bounds(
    log_prob_old: Tensor, divergence: str | Divergence = "kl", delta: float = 0.05, ratio_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The interval of log-ratios that the trust region D_f(pi || pi_old) <= delta leaves a sampled token.

    Args:
        log_prob_old: ln p of the token under the anchor policy, in nats, <= 0, any shape. Values above 0 count as 0.
        divergence: a name that `divergences.get_divergence` knows, or an instance.
        delta: radius, > 0, in the divergence's own unit (nats for kl).
        ratio_cap: largest ratio allowed whatever the trust region says, > 1, or None.

    Returns:
        (log_lower, log_upper), log_lower <= 0 <= log_upper, shaped like the input and without gradient; float64 for
        float64, else float32. They compare directly with log_prob - log_prob_old. Where the trust region lets the
        token vanish log_lower is -inf; where it lets it take all the mass log_upper is exactly -log_prob_old.

    Raises:
        ValueError: unknown divergence, or delta or ratio_cap out of range.
    """
    _check_above("delta", delta, 0)
    if ratio_cap is not None:
        _check_above("ratio_cap", ratio_cap, 1)
    return interval(get_divergence(divergence), log_prob_old, delta, delta, ratio_cap)


def interval(
    divergence: Divergence, log_prob_old: Tensor, delta_low: float, delta_high: float, ratio_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """`band_bounds` with a radius of its own on either side."""
    dtype = torch.promote_types(log_prob_old.dtype, torch.float32)
    info = torch.finfo(dtype)  # a radius outside its range would end in 0 / 0 or inf * 0
    delta_low, delta_high = (min(max(delta, info.tiny), info.max) for delta in (delta_low, delta_high))
    vanishes_at, fills_at = divergence.saturation(delta_low)[0], divergence.saturation(delta_high)[1]
    log_cap = math.inf if ratio_cap is None else math.log(ratio_cap)
    if kernel.covers(divergence, log_prob_old):
        vanishes_at, fills_at = round_down(vanishes_at, dtype), -round_down(-fills_at, dtype)
        return kernel.band_bounds(log_prob_old, divergence, delta_low, delta_high, vanishes_at, fills_at, log_cap)

    log_p = upcast(log_prob_old).clamp(max=0)
    log_lower, log_upper = (bound.to(log_p.dtype) for bound in divergence.bounds(log_p, delta_low, delta_high))
    log_lower = torch.where(at_most(log_p, vanishes_at), -torch.inf, log_lower)
    log_upper = torch.where(at_most(-log_p, -fills_at), -log_p, log_upper)
    # Rounding must put neither bound on the wrong side of 1, nor the upper one above 1/p.
    log_upper = torch.minimum(log_upper.clamp(min=0), -log_p)
    return log_lower.clamp(max=0), log_upper if ratio_cap is None else log_upper.clamp(max=log_cap)


def _check_above(name: str, value: float, above: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not above < value < math.inf:
        raise ValueError(f"{name} = {value!r}: must be a finite number > {above}")
