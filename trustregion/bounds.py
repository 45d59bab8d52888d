"""From the trust region to a ratio interval (BandPO, arXiv 2603.04918).

Over all policies within divergence delta of the anchor, the sampled token's ratio r is largest and smallest where all
other tokens are rescaled by one common factor. So its bounds are the two roots, around r = 1, of
p f(r) + (1-p) f((1 - r p)/(1 - p)) = delta, or the edge of the simplex (r = 0, r = 1/p) where there is no root.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from trustregion.divergences import ClosedForm, Divergence, NewtonSolved, get_divergence
from trustregion.partitions import complement, upcast

# Four steps reach the last digits for delta from 1e-4 to 20 and ln p down to -79; one more for what lies beyond.
NEWTON_STEPS = 5
# Below this log-prob every mass is 0 in float64 too.
_SMALLEST_LOG_PROB = -1000.0


@torch.no_grad()
def band_bounds(
    log_prob_old: Tensor, divergence: str | Divergence = "kl", delta: float = 0.05, ratio_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The interval of log-ratios that the trust region D_f(pi || pi_old) <= delta leaves a sampled token.

    Args:
        log_prob_old: ln p of the token under the anchor policy, in nats, <= 0, any shape. Values above 0 count as 0.
        divergence: a name in `divergences.DIVERGENCES`, or an instance.
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
    if isinstance(divergence, ClosedForm):
        log_lower, log_upper = divergence.log_lower(log_p, delta_low), divergence.log_upper(log_p, delta_high)
    else:
        log_lower, log_upper = _solve(divergence, log_p, delta_low, delta_high)

    vanishes = _at_most(log_p, divergence.saturation(delta_low)[0])
    fills = _at_most(-log_p, -divergence.saturation(delta_high)[1])
    log_lower = torch.where(vanishes, -torch.inf, log_lower)
    log_upper = torch.where(fills, -log_p, log_upper)
    # Rounding must put neither bound on the wrong side of 1, nor the upper one above 1/p.
    return log_lower.clamp(max=0), torch.minimum(log_upper.clamp(min=0), -log_p)


def _solve(divergence: NewtonSolved, log_p: Tensor, delta_low: float, delta_high: float) -> tuple[Tensor, Tensor]:
    clamped = log_p.clamp(min=_SMALLEST_LOG_PROB)
    log_c = complement(clamped).log()
    _, growth = solve_side(divergence, clamped, log_c, delta_high)  # the token grows, the rest shrinks
    decay, _ = solve_side(divergence, log_c, clamped, delta_low)  # the other way round
    return -decay, growth + (clamped - log_p)


def solve_side(divergence: NewtonSolved, log_grow: Tensor, log_shrink: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Moves mass from one cell to the other until the divergence is delta.

    Args:
        log_grow, log_shrink: the anchor's log-masses of the cell that grows and of the one that shrinks; they add up
            to mass 1.
        delta: the radius.

    Returns:
        (z, x): minus the log-ratio of the shrinking cell, and the log-ratio of the growing one, both >= 0.
    """
    grow, shrink = log_grow.exp(), log_shrink.exp()
    start = divergence.start(grow, shrink, delta)
    z = start
    for _ in range(NEWTON_STEPS):
        x = _growth(z, log_grow, grow, shrink)
        # Both terms are >= 0: nothing cancels but the final difference.
        excess = divergence.term(log_grow, x) + divergence.term(log_shrink, -z) - delta
        z = z - excess / divergence.slope(shrink, z, x)
    z = torch.where(start < torch.inf, z, torch.inf)  # beyond the float range, the steps above are inf - inf
    return z, _growth(z, log_grow, grow, shrink)


def _growth(z: Tensor, log_grow: Tensor, grow: Tensor, shrink: Tensor) -> Tensor:
    """Log-ratio x of the growing cell when the other one's mass falls by e^-z: ln(1 + (shrink/grow)(1 - e^-z))."""
    left, moved = shrink * (-z).exp(), shrink * -torch.expm1(-z)
    # In turn: exact where hardly anything is left to move; exact for small moves; no overflow of shrink/grow.
    return torch.where(
        moved > left,
        torch.log1p(-left) - log_grow,
        torch.where(moved < grow, torch.log1p(moved / grow), (grow + moved).log() - log_grow),
    )


def _at_most(x: Tensor, limit: float) -> Tensor:
    """x <= limit, exactly: torch would round the limit to x's dtype first, and a tie could go either way."""
    rounded = torch.tensor(limit, dtype=x.dtype)
    if rounded.item() > limit:
        rounded = torch.nextafter(rounded, torch.tensor(-torch.inf, dtype=x.dtype))
    return x <= rounded.item()


def _check_above(name: str, value: float, above: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not above < value < math.inf:
        raise ValueError(f"{name} = {value!r}: must be a finite number > {above}")
