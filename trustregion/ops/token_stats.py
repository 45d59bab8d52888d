"""`trustregion::token_stats` and its gradient, in one read of the logits each; caller and checks are in token_stats.py.

The mathematics is csrc/token_stats_math.h, for CPU and GPU. Of equal logits the lower id is in the top-K. What an id outside
the vocabulary names is nan.
"""

import torch
from torch import Tensor

from trustregion.ops.library import is_loaded


def token_stats(
    logits: Tensor,
    token_ids: Tensor,
    temperature: Tensor | None,
    cell_ids: Tensor | None,
    topk: int,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """log_prob, entropy [N, 1], cell_ids [N, K] and cells [N, K+2] of logits [..., V] with any strides.

    Takes token_ids and temperature [N, 1], cell_ids [N, K]. None stands for temperature 1, and for no cells.
    """
    given = logits, token_ids, temperature, cell_ids, topk, inplace_backward
    log_prob, entropy, named, cells, _, _ = torch.ops.trustregion.token_stats(*given)
    return (log_prob, entropy, None, None) if topk == 0 and cell_ids is None else (log_prob, entropy, named, cells)


def _fake(logits, token_ids, temperature, cell_ids, topk, inplace_backward):
    N, K = token_ids.numel(), topk if cell_ids is None else cell_ids.shape[-1]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_prob, entropy, largest, log_norm = (logits.new_empty(N, 1, dtype=dtype) for _ in range(4))
    cells = logits.new_empty(N, 0 if topk == 0 and cell_ids is None else K + 2, dtype=dtype)
    return log_prob, entropy, logits.new_empty(N, K, dtype=torch.int32), cells, largest, log_norm


def _fake_backward(logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    logits, token_ids, temperature, _, _, ctx.inplace_backward = inputs
    _, entropy, cell_ids, cells, largest, log_norm = output
    ctx.mark_non_differentiable(cell_ids, largest, log_norm)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, token_ids, temperature, cell_ids, cells, entropy, largest, log_norm)


def _backward(ctx, grad_log_prob, grad_entropy, _, grad_cells, *__):
    logits, *rows = ctx.saved_tensors
    given = logits, grad_log_prob, grad_entropy, grad_cells, *rows
    if ctx.inplace_backward and logits.is_contiguous():
        torch.ops.trustregion.token_stats_backward_(*given)
        torch.autograd.graph.increment_version(logits)  # whoever else has saved them gets autograd's error
        grad_logits = logits.detach()
    else:
        grad_logits = torch.ops.trustregion.token_stats_backward(*given)
    return grad_logits, None, None, None, None, None


def _refuse(ctx, *_):
    raise RuntimeError("token_stats is differentiable once: its gradient has none")


if is_loaded():
    torch.library.register_fake("trustregion::token_stats", _fake)
    torch.library.register_fake("trustregion::token_stats_backward", _fake_backward)
    torch.library.register_fake("trustregion::token_stats_backward_", lambda *_: None)
    torch.library.register_autograd("trustregion::token_stats", _backward, setup_context=_save)
    torch.library.register_autograd("trustregion::token_stats_backward", _refuse)
