"""Log-prob, entropy and vocabulary cells of sampled tokens from their logits.

By compiled kernels where there are any (ops/token_stats.py), else here in pure torch, a chunk of rows at a time.

With x = logits / temperature, m the largest x_i, and sums over all i but the argmax (over all but one, on a tie):

    t = sum e^(x_i - m),   w = sum e^(x_i - m) (m - x_i),   ln p_a = x_a - m - log1p(t),   H = log1p(t) + w / (1 + t)

No term is negative: nothing cancels as p -> 1 and H -> 0, where logsumexp(x) - sum(p x) is rounding error.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trustregion.ops import native
from trustregion.ops import token_stats as kernels

IGNORE_INDEX = -100
# Of each of two workspaces: what a CPU's caches hold, what keeps a GPU busy.
CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
# A log-mass whose mass is 0 in float64 too; unlike -inf it can be multiplied by 0.
_NEVER = -1e4


@dataclass(frozen=True)
class TokenStats:
    """Statistics of sampled tokens in nats, float64 where the logits are, else float32.

    Args:
        log_prob: ln p of each sampled token, 0 where it is ignored, [...].
        entropy: over the whole vocabulary, [...].
        cell_ids: the K named tokens, int32, [..., K]; None without cells.
        cell_log_prob: log-masses of the cells (`partitions.py`), [..., K+2]; None without cells.
    """

    log_prob: Tensor
    entropy: Tensor
    cell_ids: Tensor | None = None
    cell_log_prob: Tensor | None = None


def token_stats(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    topk: int = 0,
    cell_ids: Tensor | None = None,
    inplace_backward: bool = False,
) -> TokenStats:
    """Log-prob, entropy and, on request, cells of sampled tokens.

    All are differentiable (once), and what a loss does not use costs it nothing. bfloat16 and float16 are computed in
    float32. Beyond the results, the forward pass needs no memory to speak of (without kernels, that for a chunk of
    rows), the backward pass in addition the gradient, in the logits' dtype. Rows whose upstream gradients are all 0 are
    skipped: whatever their logits, nan included, their gradient is 0. With kernels, torch.compile takes it whole.

    Args:
        logits: any float dtype and strides, [..., V]. -inf is a token of probability 0. A row that holds nan or inf, or
            nothing but -inf, is nan in its own results and in no others.
        token_ids: the sampled tokens, integers in [0, V), [...]; or IGNORE_INDEX, -100: then log_prob is 0 without
            gradient, the sampled token's cell is empty, and all else as usual.
        temperature: divides the logits, > 0; a number, or a tensor that broadcasts to [...]. Gets no gradient.
        topk: K in [0, V). Above 0: cells for the K most likely tokens, in falling order. Ties break alike for equal
            rows: by id with kernels, lowest first; else as `torch.topk` breaks them in the dtype computed in.
        cell_ids: instead of topk, the K tokens to name: integers in [0, V), [..., K], K >= 0, distinct in
            each row (not checked).
        inplace_backward: the gradient may be written over the logits, if they are contiguous: for logits that nobody
            reads after this. A backward pass that has saved them too, this one a second time included, gets autograd's
            error. Under torch.compile, which plans memory itself, it changes nothing.

    Returns:
        TokenStats. Its K+2 cells: the K named tokens; the sampled token, -inf where it is among those; all the rest,
        -inf where none is left, and summed from the unnamed tokens unless it is most of the mass. Cells of -inf pass
        no gradient on.

    Raises:
        ValueError: an argument outside these ranges. Finding out takes one device sync; torch.compile leaves the
            values of tensors unchecked, and what ids outside the vocabulary name is nan.
    """
    shape = logits.shape[:-1]
    token_ids, temperature, cell_ids = _checked(logits, token_ids, temperature, topk, cell_ids)
    inplace_backward = inplace_backward and not torch.compiler.is_compiling()
    compute = kernels.token_stats if native(logits.device.type) else _TokenStats.apply
    log_prob, entropy, cell_ids, cells = compute(logits, token_ids, temperature, cell_ids, topk, inplace_backward)
    if cells is not None:
        cell_ids, cells = cell_ids.view(*shape, cell_ids.shape[-1]), cells.view(*shape, cells.shape[-1])
    return TokenStats(log_prob.view(shape), entropy.view(shape), cell_ids, cells)


class Rows(NamedTuple):
    """Results of N rows and what their gradient needs: [N, 1]; cells [N, K] and [N, K+2], or None."""

    log_prob: Tensor
    entropy: Tensor
    cell_ids: Tensor | None
    cell_log_prob: Tensor | None
    largest: Tensor  # logit, before the division by the temperature
    log_norm: Tensor  # log1p(t)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids, temperature, cell_ids, topk, inplace_backward):
        given = token_ids, temperature, cell_ids
        rows = _cat([forward_rows(block, *_at(index, *given), topk) for block, index in _row_blocks(logits)])
        ctx.set_materialize_grads(False)
        ctx.inplace = inplace_backward and logits.is_contiguous()
        ctx.save_for_backward(logits, token_ids, temperature, *rows)
        return rows[:4]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy, _, grad_cells):
        logits, token_ids, temperature, *rows = ctx.saved_tensors
        given = token_ids, temperature, grad_log_prob, grad_entropy, grad_cells
        grad_logits = logits if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad_rows = grad_logits.view(len(token_ids), logits.shape[-1])
        for block, index in _row_blocks(logits):
            backward_rows(grad_rows[index], block, Rows(*_at(index, *rows)), *_at(index, *given))
        return grad_logits.detach(), None, None, None, None, None


def forward_rows(logits: Tensor, token_ids: Tensor, temperature, cell_ids: Tensor | None, topk: int) -> Rows:
    """From logits [N, V], int64 token_ids [N, 1] and cell_ids [N, K], and temperature [N, 1] (None: 1)."""
    x, y = _workspaces(logits)
    given = logits, token_ids, temperature, cell_ids
    starts = range(0, max(len(logits), 1), len(x))
    return _cat([_forward_chunk(x, y, *_at(slice(start, start + len(x)), *given), topk) for start in starts])


def _forward_chunk(x, y, logits, token_ids, temperature, cell_ids, topk) -> Rows:
    x, y = x[: len(logits)].copy_(logits), y[: len(logits)]
    argmax = _argmax(x)
    largest = x.gather(-1, argmax)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    ignored, token_ids = token_ids < 0, token_ids.clamp(min=0)
    token_logit = x.gather(-1, token_ids)
    token = _divide(token_logit - largest, temperature)

    if topk:
        cell_ids = x.topk(topk).indices
    if cell_ids is not None:
        named = _divide(x.gather(-1, cell_ids) - largest, temperature)
        # The unnamed are measured from a largest of their own: from the overall one, all of them can underflow.
        y.copy_(x).scatter_(-1, token_ids, torch.where(ignored, token_logit, -torch.inf))
        y.scatter_(-1, cell_ids, -torch.inf)
        largest_unnamed = y.amax(-1, keepdim=True)
        largest_unnamed = torch.where(largest_unnamed == -torch.inf, largest, largest_unnamed)
        rest = _row_sum(_divide(y.sub_(largest_unnamed), temperature).exp_()).log()
        rest += _divide(largest_unnamed - largest, temperature)

    below = _divide(x.sub_(largest), temperature).clamp_(min=_NEVER)
    torch.exp(below, out=y)
    w = -_row_sum(below.mul_(y))
    t = _row_sum(y.scatter_(-1, argmax, 0.0))
    log_norm = t.log1p()

    log_prob, cells = token - log_norm, None
    if cell_ids is not None:
        has_no_cell = ignored | (cell_ids == token_ids).any(-1, keepdim=True)
        named = torch.cat([named - log_norm, log_prob.masked_fill(has_no_cell, -torch.inf)], -1)
        # Close to 1, the rest's mass is known best by what it lacks.
        named_mass = named.exp().sum(-1, keepdim=True)
        cells = torch.cat([named, torch.where(named_mass < 0.5, torch.log1p(-named_mass), rest - log_norm)], -1)
        cell_ids = cell_ids.to(torch.int32)
    return Rows(log_prob.masked_fill(ignored, 0.0), log_norm + w / (1 + t), cell_ids, cells, largest, log_norm)


def backward_rows(grad_logits: Tensor, logits: Tensor, rows: Rows, token_ids, temperature, *grads) -> None:
    """Writes grad_logits [N, V], which may be the logits, given what `forward_rows` took and gave, and the gradients
    (None: 0) of log_prob g_a, entropy g_H and cells g_c. With P_c a cell's mass and G = g_a + sum g_c, that of x_i is

        g_a [i = a] + sum_c g_c [i in c] p_i / P_c - p_i (G + g_H (ln p_i + H))
    """
    grad_log_prob, grad_entropy, grad_cells = grads
    no_gradient = torch.zeros_like(rows.largest)
    grad_log_prob = no_gradient if grad_log_prob is None else grad_log_prob.masked_fill(token_ids < 0, 0.0)
    if grad_cells is not None:
        grad_cells = grad_cells.masked_fill(rows.cell_log_prob == -torch.inf, 0.0)
    grads = grad_log_prob, grad_entropy, grad_cells
    used = torch.cat([grad for grad in grads if grad is not None], -1) != 0
    used = used.any(-1)
    live = used.nonzero()[:, 0].tolist()  # syncs, but prompts, padding and blocked tokens then cost nothing
    if len(live) < len(logits):
        grad_logits.index_fill_(0, (~used).nonzero()[:, 0], 0.0)
    x, y = _workspaces(logits)
    for start in range(0, len(live), len(x)):
        index = live[start : start + len(x)]
        if index[-1] - index[0] < len(index):  # a slice is a view, which saves a copy
            index = slice(index[0], index[-1] + 1)
        given = _at(index, logits, token_ids, temperature, *grads)
        grad_logits[index] = _backward_chunk(x, y, Rows(*_at(index, *rows)), *given).to(logits.dtype)


def _backward_chunk(x, y, rows, logits, token_ids, temperature, grad_log_prob, grad_entropy, grad_cells) -> Tensor:
    x, y = x[: len(logits)].copy_(logits), y[: len(logits)]
    ignored, token_ids = token_ids < 0, token_ids.clamp(min=0)
    ids, own, total = token_ids, grad_log_prob, grad_log_prob
    grad_rest = log_rest = torch.zeros_like(rows.largest)
    if grad_cells is not None:
        cell_ids = rows.cell_ids.long()
        grad_named, grad_token, grad_rest = grad_cells.tensor_split([cell_ids.shape[-1], -1], -1)
        ids = torch.cat([token_ids, cell_ids], -1)
        own = torch.cat([grad_log_prob + grad_token, grad_named + grad_log_prob * (cell_ids == token_ids)], -1)
        total = grad_log_prob + grad_cells.sum(-1, keepdim=True)
        log_rest = rows.cell_log_prob[:, -1:]
        log_rest = torch.where(log_rest == -torch.inf, 0.0, log_rest)
    named = _divide(x.gather(-1, ids) - rows.largest, temperature) - rows.log_norm

    # As if all tokens were unnamed: from y = p_i / P_rest, which also makes p_i = P_rest y, never the other way round.
    _divide(x.sub_(rows.largest), temperature).sub_(rows.log_norm + log_rest).clamp_(min=_NEVER)
    torch.exp(x, out=y)
    rest = log_rest.exp()
    factor = -grad_rest * torch.expm1(log_rest) - rest * (total - grad_rest)
    if grad_entropy is None:
        y.mul_(_divide(factor, temperature))
    else:
        factor -= rest * grad_entropy * (log_rest + rows.entropy)
        x.mul_(_divide(-rest * grad_entropy, temperature)).add_(_divide(factor, temperature))
        y.mul_(x)

    # Then the named ones: 1 - p without cancellation, and the cell's gradient last where the sampled token is in one.
    grad_named = -own * torch.expm1(named) - (total - own) * named.exp()
    if grad_entropy is not None:
        grad_named -= grad_entropy * named.exp() * (named.clamp(min=_NEVER) + rows.entropy)
    grad_named = _divide(grad_named, temperature)
    y.scatter_(-1, token_ids, torch.where(ignored, y.gather(-1, token_ids), grad_named[:, :1]))
    return y.scatter_(-1, ids[:, 1:], grad_named[:, 1:])


def _argmax(x: Tensor) -> Tensor:
    """[N, 1]. On a CPU, torch's own takes longer than all the rest of a pass; so it gets one block of each row only."""
    size = math.gcd(x.shape[-1], 256)
    block = x.unflatten(-1, (-1, size)).amax(-1).argmax(-1, keepdim=True)
    ids = block * size + torch.arange(size, device=x.device)
    return ids.gather(-1, x.gather(-1, ids).argmax(-1, keepdim=True))


def _row_sum(x: Tensor) -> Tensor:
    """[N, 1]. torch splits a lone sum over threads, which rounds differently: a row must not depend on its company."""
    return (x.expand(2, -1) if len(x) == 1 else x).sum(-1, keepdim=True)[: len(x)]


def _divide(x: Tensor, temperature: Tensor | None) -> Tensor:
    """In place."""
    return x if temperature is None else x.div_(temperature)


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _workspaces(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Two of at most N rows, at least one."""
    N, V = logits.shape
    dtype = _compute_dtype(logits)
    fitting = CHUNK_BYTES.get(logits.device.type, CHUNK_BYTES["cuda"]) // (V * dtype.itemsize)
    return tuple(logits.new_empty(2, max(1, min(N, fitting)), V, dtype=dtype))


def _row_blocks(logits: Tensor, start: int = 0):
    """Pairs of a view [n, V] and the slice of rows it is; several where strides forbid a single view: no copies."""
    n = logits.shape[:-1].numel()
    try:
        yield logits.view(n, logits.shape[-1]), slice(start, start + n)
    except RuntimeError:
        for i, part in enumerate(logits):
            yield from _row_blocks(part, start + i * (n // len(logits)))


def _at(index: Tensor | slice, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x[index] for x in tensors)


def _cat(parts: list[Rows]) -> Rows:
    return Rows(*(None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _checked(logits, token_ids, temperature, topk, cell_ids) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """token_ids [N, 1], temperature [N, 1] (None: 1) and cell_ids [N, K]."""
    if not logits.is_floating_point() or logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits of {logits.dtype} have shape {tuple(logits.shape)}: must be floats, [..., V]")
    shape, V, dtype = logits.shape[:-1], logits.shape[-1], _compute_dtype(logits)
    if isinstance(topk, bool) or not isinstance(topk, int) or not 0 <= topk < V:
        raise ValueError(f"topk={topk}: must be in [0, {V}), the size of the vocabulary")
    if topk and cell_ids is not None:
        raise ValueError(f"topk={topk} and cell_ids of shape {tuple(cell_ids.shape)}: give one of them")

    token_ids = _flat_ids("token_ids", token_ids.unsqueeze(-1), shape)
    cell_ids = None if cell_ids is None else _flat_ids("cell_ids", cell_ids, shape)
    if isinstance(temperature, Tensor):
        try:
            temperature = temperature.detach().to(logits.device, dtype).expand(shape).reshape(-1, 1)
        except RuntimeError:
            raise ValueError(f"temperature of shape {tuple(temperature.shape)} for {tuple(shape)} tokens") from None
    elif not 0 < temperature <= torch.finfo(dtype).max:
        raise ValueError(f"temperature={temperature}: must be finite and > 0")
    else:
        temperature = None if temperature == 1 else torch.full_like(token_ids, temperature, dtype=dtype)

    if torch.compiler.is_compiling():
        return token_ids, temperature, cell_ids
    checks = [
        ("token_ids", token_ids, lambda ids: (ids >= 0) & (ids < V) | (ids == IGNORE_INDEX), f"in [0, {V}) or -100"),
        ("cell_ids", cell_ids, lambda ids: (ids >= 0) & (ids < V), f"in [0, {V})"),
        ("temperature", temperature, lambda T: (T > 0) & T.isfinite(), "finite and > 0"),
    ]
    checks = [(name, x, valid(x), meaning) for name, x, valid, meaning in checks if x is not None]
    if not torch.stack([valid.all() for _, _, valid, _ in checks]).all():
        name, x, valid, meaning = next(check for check in checks if not check[2].all())
        raise ValueError(f"{name} holds {x[~valid][0].item()}: must be {meaning}")
    return token_ids, temperature, cell_ids


def _flat_ids(name: str, ids: Tensor, shape: torch.Size) -> Tensor:
    if ids.dtype not in (torch.int32, torch.int64) or ids.shape[:-1] != shape or ids.dim() != len(shape) + 1:
        given = tuple(ids.shape[:-1])
        raise ValueError(f"{name} of {ids.dtype} for {given} tokens: must be int32 or int64, for {tuple(shape)} tokens")
    return ids.reshape(shape.numel(), ids.shape[-1]).long()
