"""Elementary functions where the obvious formula cancels, overflows or rounds the wrong way."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

# A float32 log-prob of exactly 0 is common, and hides a complement mass of up to half an ulp: below the floor, the mass
# 1 - p of all other tokens is rounding error.
COMPLEMENT_FLOOR = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def complement(log_prob: Tensor, at_most: float = math.inf) -> Tensor:
    """Mass 1 - p of all other tokens, floored at half an ulp of 1 (`at_most`: or at this, where it is less)."""
    return (-torch.expm1(log_prob)).clamp(min=min(COMPLEMENT_FLOOR[log_prob.dtype], at_most))


def exp_minus_tangent(t: Tensor, a: float = 0.0) -> Tensor:
    """e^t - 1 - t for |t| <= 1 to rounding, by its Taylor series.

    With a given, [(e^t - 1) - (e^(a t) - 1) / a] / (1 - a), of which a = 0 is the limit, for |t| <= 1 and |a t| <= 1.
    """
    first, *rest = _tangent_series(a, 20 if t.dtype == torch.float64 else 12)
    series = torch.full_like(t, first)
    for coefficient in rest:
        series = (series * t).add_(coefficient)
    return t * t * series


@lru_cache
def _tangent_series(a: float, last: int) -> list[float]:
    """Coefficients (1 + a + ... + a^(n-2)) / n! of t^n, from n = last down to 2."""
    sums = accumulate(a**k for k in range(last - 1))
    return [total / math.factorial(n) for n, total in enumerate(sums, start=2)][::-1]


def log1p_quotient(numerator: Tensor | float, log_denominator: Tensor) -> Tensor:
    """ln(1 + a/b) from a and ln b, where b may be too small for the float range."""
    quotient = numerator * (-log_denominator).exp()
    return torch.where(quotient < 1, quotient.log1p(), (log_denominator.exp() + numerator).log() - log_denominator)


def difference(a: float, b: Tensor) -> Tensor:
    """a - b for b close to a, where rounding a to b's dtype first would lose the difference."""
    rounded = _round(a, b.dtype)
    return (rounded - b) + (a - rounded)


def at_most(x: Tensor, limit: float) -> Tensor:
    """x <= limit, exactly: compared as it is, the limit would first be rounded to x's dtype, up or down."""
    return x <= round_down(limit, x.dtype)


def round_down(x: float, dtype: torch.dtype) -> float:
    """The largest number of that dtype that is <= x."""
    return _round(x, dtype, down=True)


@lru_cache
def _round(x: float, dtype: torch.dtype, down: bool = False) -> float:
    """x rounded to a float type, to nearest or down. Cached: a call of the loss asks for the same few each time."""
    rounded = torch.tensor(x, dtype=dtype, device="cpu")
    if down and rounded.item() > x:
        rounded = rounded.nextafter(torch.tensor(-torch.inf, dtype=dtype, device="cpu"))
    return rounded.item()


def last_float(holds: Callable[[Tensor], Tensor], largest: float, dtype: torch.dtype = torch.float64) -> float:
    """The largest float y in [0, largest] for which holds(y), as it does from 0 up to there; -inf where it never does.

    Found among all floats of the type, on the CPU. `holds` takes a tensor of them and gives bools.
    """
    # Positive floats are ordered like the integers that have the same bits.
    as_bits = torch.int64 if dtype == torch.float64 else torch.int32
    low, high = -1, torch.tensor(largest, dtype=dtype, device="cpu").view(as_bits).item() + 1
    while high - low > 1:
        step = max((high - low) // 1024, 1)
        bits = torch.arange(low + step, high, step, dtype=as_bits, device="cpu")
        within = int(holds(bits.view(dtype)).int().cumprod(0).sum())
        low, high = low + within * step, min(low + (within + 1) * step, high)
    return torch.tensor(low, dtype=as_bits, device="cpu").view(dtype).item() if low >= 0 else -math.inf
