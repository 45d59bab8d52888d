"""f-divergences whose trust region has bounds in closed form."""

import math

import torch
from torch import Tensor

from trustregion.divergences.base import Divergence
from trustregion.divergences.cells import Cell
from trustregion.numerics import complement, difference, log1p_quotient


class TV(Divergence):
    """Total variation, f(u) = |u - 1| / 2. Bounds 1 + delta/p and 1 - delta/p, clamped into [0, 1/p]."""

    name = "tv"
    max_value = 1.0
    slope_at_infinity = 0.5

    def term(self, cell: Cell) -> Tensor:
        return 0.5 * cell.gained.abs()

    def largest_loss(self, delta: float) -> float:
        return -math.log1p(-delta) if delta < 1 else math.inf

    def bounds(self, log_prob_old: Tensor, delta_low: float, delta_high: float) -> tuple[Tensor, Tensor]:
        return self._log_lower(log_prob_old, delta_low), log1p_quotient(delta_high, log_prob_old)

    @staticmethod
    def _log_lower(log_prob_old: Tensor, delta: float) -> Tensor:
        fall = delta * (-log_prob_old).exp()
        remaining = -torch.expm1(difference(math.log(delta), log_prob_old))  # 1 - delta/p, accurate as it goes to 0
        return torch.where(fall < 0.5, torch.log1p(-fall), remaining.log())


class Chi2(Divergence):
    """Pearson chi-squared, f(u) = (u - 1)^2. Bounds 1 + a and 1 - a, a = sqrt(delta (1-p)/p), clamped into [0, 1/p]."""

    name = "chi2"

    def term(self, cell: Cell) -> Tensor:
        largest = math.log(torch.finfo(cell.gained.dtype).max) - 1  # no e^t = inf, which times gained = 0 would be nan
        return cell.gained * torch.expm1(cell.log_ratio.clamp(max=largest))  # (q-p)^2 / p

    def largest_loss(self, delta: float) -> float:
        return math.log1p(delta)

    def bounds(self, log_prob_old: Tensor, delta_low: float, delta_high: float) -> tuple[Tensor, Tensor]:
        log_upper = log1p_quotient(self._scaled_root(log_prob_old, delta_high), 0.5 * log_prob_old)
        return self._log_lower(log_prob_old, delta_low), log_upper

    def _log_lower(self, log_prob_old: Tensor, delta: float) -> Tensor:
        fall = self._scaled_root(log_prob_old, delta) * (-0.5 * log_prob_old).exp()
        # 1 - a = (1 - a^2) / (1 + a), and 1 - a^2 = (1 + delta)(1 - p_saturated/p): accurate as it goes to 0.
        beyond_saturation = -torch.expm1(difference(-math.log1p(1 / delta), log_prob_old))
        remaining = (1 + delta) * beyond_saturation / (1 + fall)
        return torch.where(fall < 0.5, torch.log1p(-fall), remaining.log())

    @staticmethod
    def _scaled_root(log_prob_old: Tensor, delta: float) -> Tensor:
        # a sqrt(p) = sqrt(delta (1-p)). The root magnifies the floor of complement masses: where delta is large it is
        # lowered, so that at p = 1, where the limit is 0, the bound is at most 1e-4.
        return (delta * complement(log_prob_old, at_most=0.99e-8 / delta)).sqrt()


class Hellinger(Divergence):
    """Squared Hellinger distance, f(u) = (sqrt(u) - 1)^2 / 2, which is 1 - cos(theta_p - theta_q) with p = sin^2 theta_p.

    So theta moves by at most arccos(1 - delta). With s = delta (2 - delta), the squared sine of that angle, the square
    roots of the bounds are 1 - delta +- sqrt(s (1-p)/p).
    """

    name = "hellinger"
    max_value = 1.0
    slope_at_infinity = 0.5

    def term(self, cell: Cell) -> Tensor:
        larger = cell.mass + cell.gained.clamp(min=0)
        return 0.5 * larger * torch.expm1(-0.5 * cell.log_ratio.abs()).square()

    def largest_loss(self, delta: float) -> float:
        return -2 * math.log1p(-delta) if delta < 1 else math.inf

    def bounds(self, log_prob_old: Tensor, delta_low: float, delta_high: float) -> tuple[Tensor, Tensor]:
        delta_low, delta_high = min(delta_low, 1.0), min(delta_high, 1.0)
        scaled = (_squared_sine(delta_high) * complement(log_prob_old)).sqrt() - delta_high * (0.5 * log_prob_old).exp()
        return self._log_lower(log_prob_old, delta_low), 2 * log1p_quotient(scaled, 0.5 * log_prob_old)

    @staticmethod
    def _log_lower(log_prob_old: Tensor, delta: float) -> Tensor:
        squared_sine = _squared_sine(delta)
        swing = (squared_sine * complement(log_prob_old)).sqrt() * (-0.5 * log_prob_old).exp()
        fall = delta + swing
        # sin(a - b) sin(a + b) = sin^2 a - sin^2 b: the root is (1 - s/p) / (1 - delta + swing), accurate as it goes to 0.
        remaining = -torch.expm1(difference(math.log(squared_sine), log_prob_old)) / (1 - delta + swing)
        return 2 * torch.where(fall < 0.5, torch.log1p(-fall), remaining.log())


def _squared_sine(delta: float) -> float:
    return delta * (2 - delta)
