"""A divergence seen through a partition of the vocabulary: group tokens into cells, compare the cells' masses.

One layout serves all partitions: a last dimension of cell log-masses. With the anchor's K most likely tokens there are
K+2 cells: those K; the sampled token (-inf in both policies when it is among the K); all the rest. The binary
partition, {sampled token} against {all others}, is K = 0. A coarser partition never gives a larger divergence.
"""

import math

import torch
from torch import Tensor

from trustregion.divergences import Cell, Divergence, get_divergence
from trustregion.divergences.cells import positive
from trustregion.numerics import complement


def upcast(x: Tensor) -> Tensor:
    """At least float32, detached."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def binary_divergence(log_prob: Tensor, log_prob_old: Tensor, divergence: str | Divergence = "kl") -> Tensor:
    """Divergence of {sampled token, all others} between two policies, from the sampled token's log-probs.

    D = p f(q/p) + (1-p) f((1-q)/(1-p)), with p under the anchor and q under the policy (DPPO, arXiv 2602.04879).
    Relatively accurate as p -> 0, as p -> 1 and as q -> p.

    Args:
        log_prob: ln q, in nats, finite, any shape. Values above 0 count as 0.
        log_prob_old: ln p, same shape and range.
        divergence: a name that `divergences.get_divergence` knows, or an instance.

    Returns:
        D >= 0, same shape, without gradient; float64 if an input is, else float32. 0 exactly where q = p.

    Raises:
        ValueError: unknown divergence.
    """
    divergence = get_divergence(divergence)
    dtype = torch.promote_types(upcast(log_prob).dtype, log_prob_old.dtype)
    log_prob, log_prob_old = upcast(log_prob).to(dtype).clamp(max=0), upcast(log_prob_old).to(dtype).clamp(max=0)
    log_ratio = log_prob - log_prob_old
    rest, rest_old = complement(log_prob), complement(log_prob_old)

    gained = _gained(log_prob, log_prob_old, log_ratio)
    # Where the others lose most of their mass the quotient rounds to -1; there the masses are far apart, and the
    # difference of their logs is accurate.
    growth, log_rest_old = -gained / rest_old, rest_old.log()
    rest_log_ratio = torch.where(growth > -0.5, growth.log1p(), rest.log() - log_rest_old)
    sampled = Cell(positive(log_prob_old.exp()), log_prob_old, gained, log_ratio)
    others = Cell(rest_old, log_rest_old, -gained, rest_log_ratio)
    return (divergence.term(sampled) + divergence.term(others)).clamp(min=0)  # underflow may leave -1e-38


@torch.no_grad()
def cell_divergence(cell_log_prob: Tensor, cell_log_prob_old: Tensor, divergence: str | Divergence = "tv") -> Tensor:
    """Divergence between two policies over the cells of a partition: sum over cells of p f(q/p).

    Args:
        cell_log_prob: log-masses of the cells under the policy, in nats, [..., K+2] (any number of cells).
        cell_log_prob_old: the same under the anchor, same shape. Cells that are -inf in both contribute 0.
        divergence: a name that `divergences.get_divergence` knows, or an instance.

    Returns:
        D >= 0, [...], without gradient; float64 if an input is, else float32. Infinite where the definition is.

    Raises:
        ValueError: unknown divergence, or shapes that differ.
    """
    if cell_log_prob.shape != cell_log_prob_old.shape:
        raise ValueError(
            f"cell_log_prob has shape {tuple(cell_log_prob.shape)}, cell_log_prob_old {tuple(cell_log_prob_old.shape)}"
        )
    divergence = get_divergence(divergence)
    dtype = torch.promote_types(upcast(cell_log_prob).dtype, cell_log_prob_old.dtype)
    new, old = upcast(cell_log_prob).to(dtype), upcast(cell_log_prob_old).to(dtype)
    log_ratio = new - old
    terms = divergence.term(Cell(positive(old.exp()), old, _gained(new, old, log_ratio), log_ratio))
    # p f(q/p) -> q f'(inf) as p -> 0, and 0 where q is 0 too.
    slope = divergence.slope_at_infinity
    from_nothing = new.exp() * slope if slope < math.inf else torch.full_like(new, math.inf)  # not 0 inf, where q underflows
    from_nothing = torch.where(new == -torch.inf, 0.0, from_nothing)
    return torch.where(old == -torch.inf, from_nothing, terms).sum(-1).clamp(min=0)


def _gained(log_new: Tensor, log_old: Tensor, log_ratio: Tensor) -> Tensor:
    """q - p without subtracting near-equal masses, and without the overflow of p (e^t - 1)."""
    return torch.maximum(log_new, log_old).exp() * -torch.expm1(-log_ratio.abs()) * log_ratio.sign()
