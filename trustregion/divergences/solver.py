"""Where a two-cell divergence reaches a given radius, for any f-divergence: its `term` is all that is asked for.

Everything here is computed in float64: for float32 tokens the bounds then lose nothing but what their log-prob has
lost already, even where the term itself cancels somewhat.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from trustregion.divergences.cells import Cell, move_mass, positive
from trustregion.numerics import COMPLEMENT_FLOOR, last_float

# The unknown is ln z: where to look first, between the ends of what float64 can hold. Far out the divergence is a power
# of z, exponential or flat, so that few points are needed.
LOG_Z = (-700.0, -12.0, 0.0, 6.0, 20.0, 709.0)
# Every divergence here, with alpha(a) down to |a| = 1e-4, took at most 13 to its last digits: for delta from 1e-12 to
# the largest value, log-probs from -1000 to -1e-7 and 0. alpha(1e-6), with bounds down to -1e8, takes 15.
STEPS = 16
# ln(1 - m) of a mass m that vanishes: beyond, 1 - m is below float64's range.
LARGEST_LOSS = 700.0

Term = Callable[[Cell], Tensor]


def solve_bounds(term: Term, log_p: Tensor, delta_low: float, delta_high: float) -> tuple[Tensor, Tensor]:
    """(log_lower, log_upper) of the ratio, in float64, for log-probs in float32 or float64.

    Where the divergence never reaches the radius they are -inf and -log_p. A fixed number of steps: no device sync.
    """
    floor = COMPLEMENT_FLOOR[log_p.dtype]
    log_p = log_p.double()
    p, c = log_p.exp(), (-torch.expm1(log_p)).clamp(min=floor)
    log_c = c.log()
    # Both sides at once: the token grows and the rest shrinks, or the other way round.
    delta = torch.stack([torch.full_like(p, delta_high), torch.full_like(p, delta_low)])
    z, x = move_until(term, torch.stack([p, c]), torch.stack([c, p]), torch.stack([log_p, log_c]),
                      torch.stack([log_c, log_p]), delta)
    return -z[1], x[0]


def move_until(
    term: Term, grow: Tensor, shrink: Tensor, log_grow: Tensor, log_shrink: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Moves mass from one cell to the other until the divergence is delta. All tensors float64, of one shape.

    Args:
        grow, shrink: the anchor's masses of the cell that grows and of the one that shrinks; they add up to 1.
        log_grow, log_shrink: their logarithms, which are still right where the masses underflow.
        delta: the radius.

    Returns:
        (z, x): minus the log-ratio of the shrinking cell (inf: it may vanish), and that of the growing one, both >= 0.
        Moves of less than e^-700 are not told apart.
    """
    info = torch.finfo(torch.float64)
    mass_grow, mass_shrink = positive(grow), positive(shrink)

    def excess(log_z: Tensor) -> Tensor:
        z = log_z.exp()
        moved, x = move_mass(z, grow, shrink, log_grow)
        distance = term(Cell(mass_grow, log_grow, moved, x)) + term(Cell(mass_shrink, log_shrink, -moved, -z))
        # In logarithms the divergence is nearly a straight line over most of the range.
        return (distance / delta).clamp(info.tiny, info.max).log()

    log_z, never = bracketed_root(excess, [torch.full_like(grow, log_z) for log_z in LOG_Z], STEPS)
    z = torch.where(never, torch.inf, log_z.exp())
    return z, move_mass(z, grow, shrink, log_grow)[1]


def bracketed_root(f: Callable[[Tensor], Tensor], points: list[Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Root of an increasing function by Chandrupatla's method: inverse quadratic steps where safe, else bisection.

    Args:
        f: called with tensors shaped like the points.
        points: where to look first, in ascending order; the root is between the first and the last.
        steps: how many evaluations follow.

    Returns:
        (root, never). The root is the first point where f is positive there already; never: not even at the last point.
    """
    # f changes sign between a, the latest point, and b; c is the point before.
    (a, *rest), f_a = points, f(points[0])
    b, f_b = a, f_a
    for x in rest:
        f_x, bracketed = f(x), f_b > 0
        a, f_a = torch.where(bracketed, a, b), torch.where(bracketed, f_a, f_b)
        b, f_b = torch.where(bracketed, b, x), torch.where(bracketed, f_b, f_x)
    never = f_b <= 0
    fraction = torch.full_like(a, 0.5)  # of the way from a to b
    for _ in range(steps):
        x = a + fraction * (b - a)
        f_x = f(x)
        same = f_x.sign() == f_a.sign()
        c, f_c = torch.where(same, a, b), torch.where(same, f_a, f_b)
        b, f_b = torch.where(same, b, a), torch.where(same, f_b, f_a)
        a, f_a = x, f_x

        xi, phi = (a - b) / (c - b), (f_a - f_b) / (f_c - f_b)
        safe = (phi.square() < xi) & ((1 - phi).square() < 1 - xi)
        step = f_a / (f_b - f_a) * f_c / (f_b - f_c) + (c - a) / (b - a) * f_a / (f_c - f_a) * f_b / (f_c - f_b)
        # Once a hits the root, the quotients may be 0 / 0.
        fraction = torch.where(safe & step.isfinite(), step.clamp(0, 1), 0.5)
    return torch.where(f_a.abs() < f_b.abs(), a, b), never


@lru_cache(maxsize=1024)
def largest_loss(term: Term, delta: float) -> float:
    """-ln(1 - m) of the largest mass m that may vanish altogether within the radius delta, at most `LARGEST_LOSS`.

    Found among all positive float64 numbers, on the CPU, once for each radius.
    """
    return max(last_float(lambda loss: _loss_distance(term, loss) <= delta, LARGEST_LOSS), 0.0)


def _loss_distance(term: Term, loss: Tensor) -> Tensor:
    rest, gone = (-loss).exp(), -torch.expm1(-loss)
    vanishing = term(Cell(gone, gone.log(), -gone, torch.full_like(loss, -torch.inf)))
    return vanishing + term(Cell(positive(rest), -loss, gone, loss))
