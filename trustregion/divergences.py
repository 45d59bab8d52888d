"""f-divergences D_f(pi || pi_old) = sum over tokens a of pi_old(a) f(pi(a) / pi_old(a)), f convex, f(1) = 0.

A divergence here is what one cell contributes, `term`, written so that it neither cancels nor overflows; where the
bounds of its trust region saturate; and either these bounds in closed form or what Newton's method needs to find them
(`bounds.py`). To add one, subclass `Divergence` and add an instance to `DIVERGENCES`.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from trustregion.numerics import complement, difference, exp_minus_tangent, log1p_quotient


class Divergence:
    """An f-divergence, anchor policy first. Tensors are float32 or float64, any shape, and carry no gradient."""

    name: ClassVar[str]
    max_value: ClassVar[float] = math.inf  # no two policies are further apart
    slope_at_infinity: ClassVar[float]  # f'(inf): a cell the anchor gives no mass contributes this times its new mass

    def term(self, mass: Tensor, gained: Tensor, log_ratio: Tensor) -> Tensor:
        """What one cell contributes: p f(q/p) >= 0, for mass = p (anchor), gained = q - p and log_ratio = ln(q/p).

        All three are given because each is accurate where it cannot be had from the others.
        """
        raise NotImplementedError

    def saturation(self, delta: float) -> tuple[float, float]:
        """(a, b): the sampled token's ratio may fall to 0 where ln p <= a, and rise to 1/p where ln p >= b."""
        raise NotImplementedError


class ClosedForm(Divergence):
    """A divergence with bounds in closed form. They are asked for, and valid, only where they do not saturate."""

    def log_lower(self, log_prob_old: Tensor, delta: float) -> Tensor:
        raise NotImplementedError

    def log_upper(self, log_prob_old: Tensor, delta: float) -> Tensor:
        raise NotImplementedError


class NewtonSolved(Divergence):
    """A divergence whose bounds are found by Newton's method (`bounds.solve_side`).

    One cell grows, the other shrinks; z > 0 is minus the log-ratio of the shrinking cell and x that of the growing one.
    """

    def start(self, grow: Tensor, shrink: Tensor, delta: float) -> Tensor:
        """A z from which the iteration converges, given the anchor's masses of the two cells."""
        raise NotImplementedError

    def slope(self, shrink: Tensor, z: Tensor, x: Tensor) -> Tensor:
        """dD/dz along the constraint that the masses add up to 1."""
        raise NotImplementedError


class KL(NewtonSolved):
    """KL(pi_old || pi), f(u) = -ln u + u - 1: the direction of TRPO, BandPO and DPPO. Its bounds never saturate."""

    name = "kl"
    slope_at_infinity = 1.0

    def term(self, mass: Tensor, gained: Tensor, log_ratio: Tensor) -> Tensor:
        far = gained - mass * log_ratio  # cancels to nothing as the log-ratio goes to 0
        return torch.where(log_ratio.abs() < 1, mass * exp_minus_tangent(log_ratio), far)

    def saturation(self, delta: float) -> tuple[float, float]:
        return -math.inf, math.inf

    def start(self, grow: Tensor, shrink: Tensor, delta: float) -> Tensor:
        # To the right of the root; D is convex and increasing in z, so that Newton's steps only go left.
        return (2 * delta * grow / shrink).sqrt() + delta / shrink

    def slope(self, shrink: Tensor, z: Tensor, x: Tensor) -> Tensor:
        return shrink * -torch.expm1(-(z + x))


class TV(ClosedForm):
    """Total variation, f(u) = |u - 1| / 2. Bounds 1 + delta/p and 1 - delta/p, clamped into [0, 1/p]."""

    name = "tv"
    max_value = 1.0
    slope_at_infinity = 0.5

    def term(self, mass: Tensor, gained: Tensor, log_ratio: Tensor) -> Tensor:
        return 0.5 * gained.abs()

    def saturation(self, delta: float) -> tuple[float, float]:
        return math.log(delta), math.log1p(-delta) if delta < 1 else -math.inf

    def log_lower(self, log_prob_old: Tensor, delta: float) -> Tensor:
        fall = delta * (-log_prob_old).exp()
        remaining = -torch.expm1(difference(math.log(delta), log_prob_old))  # 1 - delta/p, accurate as it goes to 0
        return torch.where(fall < 0.5, torch.log1p(-fall), remaining.log())

    def log_upper(self, log_prob_old: Tensor, delta: float) -> Tensor:
        return log1p_quotient(delta, log_prob_old)


class Chi2(ClosedForm):
    """Pearson chi-squared, f(u) = (u - 1)^2. Bounds 1 + a and 1 - a, a = sqrt(delta (1-p)/p), clamped into [0, 1/p]."""

    name = "chi2"
    slope_at_infinity = math.inf

    def term(self, mass: Tensor, gained: Tensor, log_ratio: Tensor) -> Tensor:
        largest = math.log(torch.finfo(gained.dtype).max) - 1  # no e^t = inf, which times gained = 0 would be nan
        return gained * torch.expm1(log_ratio.clamp(max=largest))  # (q-p)^2 / p

    def saturation(self, delta: float) -> tuple[float, float]:
        return -math.log1p(1 / delta), -math.log1p(delta)

    def log_lower(self, log_prob_old: Tensor, delta: float) -> Tensor:
        fall = self._scaled_root(log_prob_old, delta) * (-0.5 * log_prob_old).exp()
        # 1 - a = (1 - a^2) / (1 + a), and 1 - a^2 = (1 + delta)(1 - p_saturated/p): accurate as it goes to 0.
        log_saturated, _ = self.saturation(delta)
        remaining = (1 + delta) * -torch.expm1(difference(log_saturated, log_prob_old)) / (1 + fall)
        return torch.where(fall < 0.5, torch.log1p(-fall), remaining.log())

    def log_upper(self, log_prob_old: Tensor, delta: float) -> Tensor:
        return log1p_quotient(self._scaled_root(log_prob_old, delta), 0.5 * log_prob_old)

    @staticmethod
    def _scaled_root(log_prob_old: Tensor, delta: float) -> Tensor:
        # a sqrt(p) = sqrt(delta (1-p)). The root magnifies the floor of complement masses: where delta is large it is
        # lowered, so that at p = 1, where the limit is 0, the bound is at most 1e-4.
        return (delta * complement(log_prob_old, at_most=0.99e-8 / delta)).sqrt()


DIVERGENCES: dict[str, Divergence] = {divergence.name: divergence for divergence in (KL(), TV(), Chi2())}


def get_divergence(divergence: str | Divergence) -> Divergence:
    """The divergence of that name. Raises ValueError with the known names when there is none."""
    if isinstance(divergence, Divergence):
        return divergence
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence = {divergence!r}: must be one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[divergence]
