"""f-divergences whose bounds are found numerically."""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from trustregion.divergences.base import Divergence
from trustregion.divergences.cells import Cell, move_mass
from trustregion.numerics import complement, exp_minus_tangent

# From the start that KL gives, four steps reach float64's last digits for delta from 1e-12 up and every p; a fixed
# number of them needs no device sync.
NEWTON_STEPS = 4
# Below this log-prob every mass is 0 in float64 too.
_SMALLEST_LOG_PROB = -1000.0


class KL(Divergence):
    """KL(pi_old || pi), f(u) = -ln u + u - 1: the direction of TRPO, BandPO and DPPO. Its bounds never saturate.

    Newton's method is exact and fast for this one: it converges from one side, whatever the masses.
    """

    name = "kl"
    slope_at_infinity = 1.0

    def term(self, cell: Cell) -> Tensor:
        return self._term(cell.mass, cell.gained, cell.log_ratio)

    @staticmethod
    def _term(mass: Tensor, gained: Tensor, log_ratio: Tensor) -> Tensor:
        far = gained - mass * log_ratio  # cancels to nothing as the log-ratio goes to 0
        return torch.where(log_ratio.abs() < 1, mass * exp_minus_tangent(log_ratio), far)

    def largest_loss(self, delta: float) -> float:
        return 0.0

    def bounds(self, log_prob_old: Tensor, delta_low: float, delta_high: float) -> tuple[Tensor, Tensor]:
        clamped = log_prob_old.clamp(min=_SMALLEST_LOG_PROB)
        p, c = clamped.exp(), complement(clamped)
        _, growth = self._solve_side(p, c, clamped, delta_high)  # the token grows, the rest shrinks
        decay, _ = self._solve_side(c, p, c.log(), delta_low)  # the other way round
        return -decay, growth + (clamped - log_prob_old)

    def _solve_side(self, grow: Tensor, shrink: Tensor, log_grow: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        """`solver.move_until` by Newton's method, in the float type of the masses."""
        # To the right of the root; D is convex and increasing in z, so that Newton's steps only go left.
        start = math.sqrt(2 * delta) * (grow / shrink).sqrt() + delta / shrink
        z = start
        for _ in range(NEWTON_STEPS):
            moved, x = move_mass(z, grow, shrink, log_grow)
            # Both terms are >= 0: nothing cancels but the final difference.
            excess = self._term(grow, moved, x) + self._term(shrink, -moved, -z) - delta
            z = z - excess / (shrink * -torch.expm1(-(z + x)))
        z = torch.where(start < torch.inf, z, torch.inf)  # beyond the float range, the steps above are inf - inf
        return z, move_mass(z, grow, shrink, log_grow)[1]


class ReverseKL(Divergence):
    """KL(pi || pi_old), f(u) = u ln u - u + 1: kl with the policies exchanged."""

    name = "reverse_kl"

    def term(self, cell: Cell) -> Tensor:
        return _KL.term(cell.mirrored())

    def largest_loss(self, delta: float) -> float:
        return delta


class JS(Divergence):
    """Jensen-Shannon, f(u) = (u ln u - (1+u) ln((1+u)/2)) / 2: mean KL of either policy to their mean."""

    name = "js"
    max_value = math.log(2)
    slope_at_infinity = 0.5 * math.log(2)

    def term(self, cell: Cell) -> Tensor:
        # With w = (q-p)/(q+p) = tanh(t/2) it is (p+q)/4 [(1+w) ln(1+w) + (1-w) ln(1-w)], even in t = ln(q/p).
        t = cell.log_ratio.abs().clamp(max=1e3)  # where it is inf, t e^-t is to be 0
        w, decay = torch.tanh(t / 2), (-t).exp()
        near = w * t + torch.log1p(-w * w)
        far = math.log(4) - 2 * torch.log1p(decay) - 2 * t * decay / (1 + decay)  # the same where 1 - w is lost
        return 0.25 * (2 * cell.mass + cell.gained) * torch.where(t < 2, near, far)


@dataclass(frozen=True)
class Alpha(Divergence):
    """Cressie-Read divergence of order a, f(u) = (u^a - 1 - a(u-1)) / (a(a-1)).

    a -> 0 is kl, a = 1/2 is 4 hellinger, a -> 1 reverse_kl, a = 2 chi2/2. Orders a and 1 - a differ by an exchange of
    the policies.

    Args:
        a: order, from -10 to 10; 0 and 1 are the limits.

    Raises:
        ValueError: a is out of range.
    """

    a: float

    def __post_init__(self):
        if isinstance(self.a, bool) or not isinstance(self.a, Real) or not -10 <= self.a <= 10:
            raise ValueError(f"a = {self.a!r}: must be a number from -10 to 10")

    @property
    def name(self) -> str:
        return f"alpha({self.a!r})"

    @property
    def max_value(self) -> float:
        return 1 / (self.a * (1 - self.a)) if 0 < self.a < 1 else math.inf

    @property
    def slope_at_infinity(self) -> float:
        return 1 / (1 - self.a) if self.a < 1 else math.inf

    def term(self, cell: Cell) -> Tensor:
        a = self.a
        if a > 0.5:  # of the two orders, take the one that is further from 1, where the formula is 0 / 0
            cell, a = cell.mirrored(), 1 - a
        if abs(a) < 1e-20:  # kl to the last digit, for every log-ratio that a float can hold the ratio of
            return _KL.term(cell)
        t = cell.log_ratio
        scaled = a * t
        # p (u^a - 1) / a, where u^a may overflow alone, and p a underflow.
        power = (cell.log_mass + scaled.clamp(min=0)).exp() * (-torch.expm1(-scaled.abs()) / abs(a)) * t.sign()
        far = (cell.gained - power) / (1 - a)  # cancels to nothing as the log-ratio goes to 0
        return torch.where(t.abs() < 1 / max(1, -a), cell.mass * exp_minus_tangent(t, a), far)

    def largest_loss(self, delta: float) -> float:
        # (1 - (1-m)^(1-a)) / (a(1-a)) = delta
        if self.a <= 0:
            return 0.0
        if delta >= self.max_value:
            return math.inf
        grown = delta * self.a * (self.a - 1)
        return math.log1p(grown) / (self.a - 1) if self.a != 1 else delta


_KL = KL()
