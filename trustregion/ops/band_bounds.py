"""`trustregion::band_bounds`, the bounds of four divergences in one launch; its callers and checks are in bounds.py."""

import torch
from torch import Tensor

from trustregion.divergences import Divergence
from trustregion.divergences.closed_form import TV, Chi2
from trustregion.divergences.solved import KL, ReverseKL
from trustregion.ops.library import is_loaded, native

# In the order of csrc/mathematics.h. By type, as a subclass may have formulas of its own.
NATIVE = (KL, ReverseKL, TV, Chi2)


def covers(divergence: Divergence, log_prob: Tensor) -> bool:
    """Whether the operator runs for that divergence and tensor."""
    return type(divergence) in NATIVE and log_prob.is_floating_point() and native(log_prob.device.type)


def band_bounds(
    log_prob_old: Tensor,
    divergence: Divergence,
    delta_low: float,
    delta_high: float,
    vanishes_at: float,
    fills_at: float,
    log_cap: float,
) -> tuple[Tensor, Tensor]:
    """(log_lower, log_upper): `bounds.interval`, for arguments that it has brought into the float type's range.

    `vanishes_at`, `fills_at`: the token may vanish at log-probs <= the one, and take all mass at >= the other, both
    numbers of the result's float type. `log_cap`: the largest log_upper, inf for none.
    """
    index = NATIVE.index(type(divergence))
    return torch.ops.trustregion.band_bounds(
        log_prob_old.detach(), index, delta_low, delta_high, vanishes_at, fills_at, log_cap
    )


def _fake(log_prob_old, divergence, delta_low, delta_high, vanishes_at, fills_at, log_cap):
    dtype = torch.promote_types(log_prob_old.dtype, torch.float32)
    return tuple(torch.empty(log_prob_old.shape, dtype=dtype, device=log_prob_old.device) for _ in range(2))


if is_loaded():
    torch.library.register_fake("trustregion::band_bounds", _fake)
