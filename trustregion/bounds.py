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
from trustregion.numerics import at_most
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
    log_lower, log_upper = interval(get_divergence(divergence), upcast(log_prob_old), delta, delta)
    if ratio_cap is not None:
        _check_above("ratio_cap", ratio_cap, 1)
        log_upper = log_upper.clamp(max=math.log(ratio_cap))
    return log_lower, log_upper


def interval(
    divergence: Divergence, log_prob_old: Tensor, delta_low: float, delta_high: float
) -> tuple[Tensor, Tensor]:
    """`band_bounds` with a radius of its own on either side; float32 or float64 in, the same out."""
    log_p = log_prob_old.clamp(max=0)
    info = torch.finfo(log_p.dtype)  # a radius outside its range would end in 0 / 0 or inf * 0
    delta_low, delta_high = (min(max(delta, info.tiny), info.max) for delta in (delta_low, delta_high))
    log_lower, log_upper = (bound.to(log_p.dtype) for bound in divergence.bounds(log_p, delta_low, delta_high))

    vanishes = at_most(log_p, divergence.saturation(delta_low)[0])
    fills = at_most(-log_p, -divergence.saturation(delta_high)[1])
    log_lower = torch.where(vanishes, -torch.inf, log_lower)
    log_upper = torch.where(fills, -log_p, log_upper)
    # Rounding must put neither bound on the wrong side of 1, nor the upper one above 1/p.
    return log_lower.clamp(max=0), torch.minimum(log_upper.clamp(min=0), -log_p)


def _check_above(name: str, value: float, above: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not above < value < math.inf:
        raise ValueError(f"{name} = {value!r}: must be a finite number > {above}")
