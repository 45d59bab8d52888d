"""What an f-divergence has to say about itself."""

import math
from typing import ClassVar

from torch import Tensor

from trustregion.divergences import solver
from trustregion.divergences.cells import Cell


class Divergence:
    """An f-divergence, anchor policy first: the sum over cells of p f(q/p), f convex, f(1) = 0.

    A subclass gives a name, two constants and `term`; everything else follows from these, and is overridden only
    where a formula is at hand. Tensors are float32 or float64, any shape, and carry no gradient.
    """

    name: str
    max_value: float = math.inf  # no two policies are further apart: f(0) + f'(inf)
    slope_at_infinity: float = math.inf  # f'(inf): a cell the anchor gives no mass contributes this times its new mass

    def term(self, cell: Cell) -> Tensor:
        """What one cell contributes: p f(q/p) >= 0, without cancellation, overflow or nan; inf where f is."""
        raise NotImplementedError

    def largest_loss(self, delta: float) -> float:
        """-ln(1 - m) of the largest mass m that may vanish within the radius: 0 if none may, inf if all of it may."""
        return math.inf if delta >= self.max_value else solver.largest_loss(self.term, delta)

    def saturation(self, delta: float) -> tuple[float, float]:
        """(a, b): the sampled token's ratio may fall to 0 where ln p <= a, and rise to 1/p where ln p >= b."""
        loss = self.largest_loss(delta)  # vanishing is the token in the first case, all others in the second
        return math.log(-math.expm1(-loss)) if loss > 0 else -math.inf, -loss if loss > 0 else math.inf

    def bounds(self, log_prob_old: Tensor, delta_low: float, delta_high: float) -> tuple[Tensor, Tensor]:
        """(log_lower, log_upper) of the ratio: asked for, and valid, only where they do not saturate.

        log_prob_old is <= 0; the result may be of a wider float type.
        """
        return solver.solve_bounds(self.term, log_prob_old, delta_low, delta_high)
