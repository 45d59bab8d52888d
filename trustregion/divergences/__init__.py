"""f-divergences D_f(pi || pi_old) = sum over tokens a of pi_old(a) f(pi(a) / pi_old(a)), f convex, f(1) = 0.

A divergence here is what one cell contributes, `term`, written so that it neither cancels nor overflows. The bounds of
its trust region (`bounds.py`) follow from that, unless it has formulas of its own. docs/adding_a_divergence.md shows
how to add one.
"""

import re

from trustregion.divergences.base import Divergence
from trustregion.divergences.cells import Cell
from trustregion.divergences.closed_form import TV, Chi2, Hellinger
from trustregion.divergences.solved import JS, KL, Alpha, ReverseKL

__all__ = ["DIVERGENCES", "Alpha", "Cell", "Divergence", "get_divergence"]

DIVERGENCES: dict[str, Divergence] = {
    divergence.name: divergence for divergence in (KL(), ReverseKL(), TV(), Chi2(), Hellinger(), JS())
}


def get_divergence(divergence: str | Divergence) -> Divergence:
    """The divergence of that name: one of `DIVERGENCES`, or "alpha(a)" with a number a; an instance is returned as is.

    Raises:
        ValueError: no such divergence, or an order a out of range.
    """
    if isinstance(divergence, Divergence):
        return divergence
    if divergence in DIVERGENCES:
        return DIVERGENCES[divergence]
    if divergence == "alpha":
        raise ValueError("divergence = 'alpha': its order is missing, as in 'alpha(0.5)' or Alpha(0.5)")
    order = re.fullmatch(r"alpha\(([^()]+)\)", str(divergence))
    if order is None:
        known = ", ".join(DIVERGENCES)
        raise ValueError(f"divergence = {divergence!r}: must be one of {known}, or alpha(a), e.g. alpha(0.5)")
    try:
        return Alpha(float(order[1]))
    except ValueError as error:
        raise ValueError(f"divergence = {divergence!r}: {error}") from None
