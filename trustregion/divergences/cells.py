"""A cell of the vocabulary in two policies, and the move of mass from one cell to another."""

from typing import NamedTuple

import torch
from torch import Tensor


class Cell(NamedTuple):
    """A cell that has mass p under the anchor and q under the policy: tensors of one shape, float32 or float64.

    All four are given because each is accurate where it cannot be had from the others.
    """

    mass: Tensor  # p, > 0: at least the smallest normal number
    log_mass: Tensor  # ln p, which is still right where p underflows
    gained: Tensor  # q - p
    log_ratio: Tensor  # ln(q/p); -inf where the cell loses all it has

    @property
    def new_mass(self) -> Tensor:
        """q, relatively accurate also where it is next to nothing."""
        return self.mass * self.log_ratio.clamp(max=0).exp() + self.gained.clamp(min=0)

    def mirrored(self) -> "Cell":
        """The same cell with anchor and policy exchanged."""
        # A log-ratio of inf would meet a mass of 0; e^-1000 is 0 as well.
        log_ratio = -self.log_ratio.clamp(min=-1e3)
        return Cell(self.new_mass, self.log_mass + self.log_ratio, -self.gained, log_ratio)


def positive(mass: Tensor) -> Tensor:
    """The mass, or where it underflows the smallest normal number, by which a term may divide."""
    return mass.clamp(min=torch.finfo(mass.dtype).tiny)


def move_mass(z: Tensor, grow: Tensor, shrink: Tensor, log_grow: Tensor) -> tuple[Tensor, Tensor]:
    """The mass that changes cell when the shrinking one falls by e^-z, and the log-ratio x of the growing one.

    Args:
        z: minus the log-ratio of the shrinking cell, >= 0.
        grow, shrink: the anchor's masses of the cell that grows and of the one that shrinks; they add up to 1.
        log_grow: ln grow, which is still right where grow underflows.
    """
    moved, left = shrink * -torch.expm1(-z), shrink * (-z).exp()
    # x = ln(1 + moved/grow). In turn: exact where hardly anything is left; exact for small moves; cannot overflow.
    x = torch.where(
        moved > left,
        torch.log1p(-left) - log_grow,
        torch.where(moved < grow, torch.log1p(moved / grow), (grow + moved).log() - log_grow),
    )
    return moved, x
