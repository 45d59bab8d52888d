"""`trustregion::policy_loss`: a whole loss call, its statistics included, in one pass over the tokens.

The seam is `kernel_parameters`: it says a loss as the numbers that the kernel takes, or that it is none of the kernel's.
Values, gradients, activity and statistics are those of regions.py, surrogates.py and metrics.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trustregion.batch import TokenBatch, check_given, prepare
from trustregion.bounds import interval
from trustregion.divergences import Divergence, get_divergence
from trustregion.metrics import LossStats
from trustregion.numerics import last_float, round_down
from trustregion.ops.band_bounds import NATIVE
from trustregion.ops.library import is_loaded, native
from trustregion.regions import DcpoInterval, DivergenceBall, EntropyBand, RatioInterval, Region, parts_of
from trustregion.surrogates import MAX_LOG_RATIO, Cispo, Clip, Mask, Preserve, Surrogate

# csrc/policy_loss.h has the same orders.
REGIONS = (EntropyBand, RatioInterval, DcpoInterval, DivergenceBall)
SURROGATES = (Clip, Mask, Preserve, Cispo)
STATISTICS = (
    "tokens", "clipped", "clipped_up", "clipped_down", "blocked_by_region", "blocked_by_dual_clip", "log_ratio",
    "log_ratio_abs", "ratio", "divergence", "capped", "saturated", "blocked_by_entropy", "entropy_looked_at",
    "entropy_ratio", "entropy_lost", "entropy_gained", "entropy_lost_prob", "entropy_gained_prob", "dropped",
)  # fmt: skip
COUNTS = {"tokens_by_bucket": 5, "clipped_up_by_bucket": 5, "clipped_down_by_bucket": 5, "invalid": 6,
          "divergence_counts": 102, "entropy_ratio_counts": 130}  # fmt: skip
MAXIMA = ("log_ratio_abs_max", "divergence_max")
SIZE = len(STATISTICS) + sum(COUNTS.values()) + len(MAXIMA)

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64, *FLOATS)
# The log-probs to which thresholds are looked for: below, no float is a probability.
_SMALLEST_LOG_PROB = -1000.0


@dataclass(frozen=True)
class Parameters:
    """A loss as the kernel takes it, and which of the optional statistics are its."""

    choices: list[int]
    numbers: list[float]
    optional: frozenset[str]


def policy_loss(
    region: Region, surrogate: Surrogate, drop_invalid: bool, batch: TokenBatch
) -> tuple[Tensor, Tensor, LossStats] | None:
    """(token_loss, active, statistics) of `PolicyLoss.__call__`, with its errors; None where the kernel does not apply."""
    if not (native(batch.log_prob.device.type) and _can_read(batch)):
        return None
    dtype = torch.promote_types(torch.promote_types(batch.log_prob.dtype, batch.log_prob_old.dtype), torch.float32)
    parameters = kernel_parameters(region, surrogate, dtype, batch.update)
    if parameters is None:
        return None
    requires = region.requires(batch.update)
    check_given(batch, requires)
    mask = batch.response_mask  # of which the kernel takes a float as a weight
    entropies = (batch.entropy.detach(), batch.entropy_old.detach()) if "entropy" in requires else (None, None)
    token_loss, _, active, numbers = torch.ops.trustregion.policy_loss(
        batch.log_prob,
        batch.log_prob_old.detach(),
        batch.advantages.detach(),
        mask != 0 if mask.is_floating_point() else mask,
        None if batch.weights is None else batch.weights.detach(),
        *entropies,
        parameters.choices,
        parameters.numbers,
    )
    sums, maxima = _named(numbers)
    if not drop_invalid and sums["invalid"].any():  # the one sync of a call
        prepare(batch, requires)  # which says what is invalid
        raise AssertionError("the kernel refuses tokens that prepare() accepts")
    unwanted = {"invalid", "capped", "saturated", *_ENTROPY} - parameters.optional | (set() if drop_invalid else {"dropped"})
    return token_loss, active, LossStats({name: x for name, x in sums.items() if name not in unwanted}, maxima)


_ENTROPY = [name for name in (*STATISTICS, *COUNTS) if "entropy" in name]


def _named(numbers: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    *counts, maxima = numbers[len(STATISTICS) :].split([*COUNTS.values(), len(MAXIMA)])
    sums = dict(zip(STATISTICS, numbers[: len(STATISTICS)].unbind(), strict=True))
    return sums | dict(zip(COUNTS, counts, strict=True)), dict(zip(MAXIMA, maxima.unbind(), strict=True))


def _can_read(batch: TokenBatch) -> bool:
    floats = (batch.log_prob, batch.log_prob_old, batch.advantages, batch.weights, batch.entropy, batch.entropy_old)
    floats = [x for x in floats if x is not None]
    return (
        all(x.dtype in FLOATS for x in floats)
        and batch.response_mask.dtype in MASKS
        and all(x.device == batch.log_prob.device for x in (*floats, batch.response_mask))
    )


def kernel_parameters(
    region: Region, surrogate: Surrogate, dtype: torch.dtype, update: int
) -> Parameters | None:
    """The loss as numbers, or None: regions and surrogates of other types, several of a kind, other divergences."""
    parts = {type(part): part for part in parts_of(region)}
    if len(parts) < len(parts_of(region)) or not parts.keys() <= set(REGIONS) or type(surrogate) not in SURROGATES:
        return None
    band = parts.pop(EntropyBand, None)
    if len(parts) > 1:
        return None
    (part,) = parts.values() or (None,)
    divergence, kind = get_divergence("kl"), REGIONS.index(type(part)) if part else 0
    relaxed = fixed = (0.0, 0.0)  # the interval contains at least nothing
    radii, eps, ratio_cap, ends, caps_at = (1.0, 1.0), (1.0, 1.0), None, (-math.inf, math.inf), -math.inf
    optional = set()

    if isinstance(part, RatioInterval):
        fixed = _log1p(-part.eps_low), _log1p(part.eps_high)
    elif isinstance(part, DcpoInterval):
        eps, ratio_cap = (part.eps_low, part.eps_high), part.ratio_cap
    elif isinstance(part, DivergenceBall):
        divergence = get_divergence(part.divergence) if part.divergence != "alpha" else None
        if part.partition != "binary" or type(divergence) not in NATIVE:
            return None
        radii, ratio_cap = part.radii, part.ratio_cap
        relaxed = (
            0.0 if part.relax_low is None else _log1p(-part.relax_low),
            0.0 if part.relax_high is None else _log1p(part.relax_high),
        )
        fixed = relaxed
        if surrogate.needs_interval:
            optional.add("saturated")
            *ends, caps_at = _thresholds(divergence, *radii, relaxed[1], ratio_cap, dtype)
    if ratio_cap is not None:
        optional.add("capped")
    if band is not None:
        optional.update(_ENTROPY)

    looks = band is not None and "entropy" in band.requires(update)
    open_band = (1 - band.beta_low, 1 + band.beta_high) if looks else (-math.inf, math.inf)
    info = torch.finfo(dtype)
    radii = [min(max(delta, info.tiny), info.max) for delta in radii]
    saturation = divergence.saturation(radii[0])[0], divergence.saturation(radii[1])[1]
    numbers = [
        *radii,
        round_down(saturation[0], dtype),
        -round_down(-saturation[1], dtype),
        math.inf if ratio_cap is None else math.log(ratio_cap),
        *fixed,
        *(math.log(e) for e in eps),
        *ends,
        caps_at,
        *open_band,
        _limit(getattr(surrogate, "dual_clip", None), math.inf),
        _limit(getattr(surrogate, "C", None), math.exp(MAX_LOG_RATIO)),
        getattr(surrogate, "beta_1", 0.0),
        getattr(surrogate, "beta_2", 0.0),
    ]
    choices = [kind, NATIVE.index(type(divergence)), SURROGATES.index(type(surrogate))]
    return Parameters(choices, numbers, frozenset(optional))


def _log1p(x: float) -> float:
    return math.log1p(x) if x > -1 else -math.inf


def _limit(x: float | None, largest: float) -> float:
    return largest if x is None else min(x, largest)


@lru_cache(maxsize=256)
def _thresholds(
    divergence: Divergence, delta_low: float, delta_high: float, relax: float, ratio_cap: float | None, dtype: torch.dtype
) -> tuple[float, float, float]:
    """(a, b, c): the bounds saturate at log-probs <= a and >= b, and the cap is the upper bound at those <= c.

    These metrics of every token then need no bounds, which the kernel only solves for near the edge of the region.
    """

    def bounds(log_prob: Tensor) -> tuple[Tensor, Tensor]:
        return interval(divergence, log_prob, delta_low, delta_high)

    def is_capped(log_prob: Tensor) -> Tensor:
        return bounds(log_prob)[1].clamp(min=relax) > math.log(ratio_cap)

    return (
        -_first(lambda log_p: bounds(log_p)[0] == -torch.inf, dtype),
        -_last(lambda log_p: bounds(log_p)[1] == -log_p, dtype),
        -math.inf if ratio_cap is None else -_first(is_capped, dtype),
    )


def _last(holds: Callable[[Tensor], Tensor], dtype: torch.dtype) -> float:
    """The largest y for which holds(-y), as it does from 0 up to there; -inf where it never does."""
    return last_float(lambda y: holds(-y), -_SMALLEST_LOG_PROB, dtype)


def _first(holds: Callable[[Tensor], Tensor], dtype: torch.dtype) -> float:
    """The smallest y for which holds(-y), as it does from there on; inf where it never does."""
    before = _last(lambda log_p: ~holds(log_p), dtype)
    if before == -math.inf:
        return 0.0
    if before == -_SMALLEST_LOG_PROB:
        return math.inf
    return math.nextafter(before, math.inf) if dtype == torch.float64 else _next_float32(before)


def _next_float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32, device="cpu").nextafter(torch.tensor(math.inf, device="cpu")).item()


def _fake(log_prob, log_prob_old, advantages, mask, weights, entropy, entropy_old, choices, numbers):
    dtype = torch.promote_types(torch.promote_types(log_prob.dtype, log_prob_old.dtype), torch.float32)

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(log_prob.shape, dtype=dtype, device=log_prob.device)

    return empty(dtype), empty(dtype), empty(torch.bool), log_prob.new_empty(SIZE, dtype=torch.float64)


def _save_factor(ctx, inputs, output):
    _, factor, active, statistics = output
    ctx.mark_non_differentiable(factor, active, statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(factor, inputs[0])
    ctx.dtype = inputs[0].dtype


class _Once(torch.autograd.Function):
    """A gradient that depends on `log_prob`, of which the kernel has no second derivative: an error where one is asked for."""

    @staticmethod
    def forward(ctx, gradient, log_prob):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("policy_loss is differentiable once. For second derivatives: trustregion.ops.using('torch').")


def _backward(ctx, grad, *_):
    if grad is None:
        return 9 * (None,)
    factor, log_prob = ctx.saved_tensors
    # Not their product alone: a mean over a response without live tokens comes with inf or nan.
    gradient = torch.where(factor == 0, 0.0, grad * factor).to(ctx.dtype)
    return _Once.apply(gradient, log_prob) if torch.is_grad_enabled() else gradient, *8 * (None,)


if is_loaded():
    torch.library.register_fake("trustregion::policy_loss", _fake)
    torch.library.register_autograd("trustregion::policy_loss", _backward, setup_context=_save_factor)
