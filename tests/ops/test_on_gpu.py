"""The CUDA operators on a GPU against the CPU's, on the last GPU there is while the first is current."""

from dataclasses import fields, is_dataclass, replace
from functools import partial

import pytest
import torch

from trustregion import PolicyLoss, band_bounds, token_stats
from trustregion.ops import describe
from trustregion.ops.library import is_loaded
from trustregion.token_stats import IGNORE_INDEX

from . import test_band_bounds as bounds
from . import test_policy_loss as losses
from . import test_token_stats_native as stats
from .random_rows import random_ids, random_logits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.skipif(not is_loaded("cuda"), reason=f"no CUDA kernels: {describe()}"),
]
GPU = torch.device("cuda", max(torch.cuda.device_count() - 1, 0))


def to(device, x):
    """Whatever holds tensors, on that device; a strided tensor keeps its strides."""
    if isinstance(x, torch.Tensor):
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x.detach())
        return moved.requires_grad_(x.requires_grad and x.is_leaf)
    if isinstance(x, dict):
        return {name: to(device, value) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(to(device, value) for value in x)
    if is_dataclass(x):
        return replace(x, **{field.name: to(device, getattr(x, field.name)) for field in fields(x)})
    return x


def bits_of(x) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x.detach().reshape(-1).view(torch.uint8)]
    values = x if isinstance(x, tuple | list) else x.values() if isinstance(x, dict) else vars(x).values()
    return [bits for value in values if value is not None for bits in bits_of(value)]


def twice(run):
    """What it returns, on the CPU, once it has returned the same bits on a stream of its own."""
    result, stream = run(), torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(stream):
        again = run()
    stream.synchronize()
    assert all(a.equal(b) for a, b in zip(bits_of(result), bits_of(again), strict=True))
    return to("cpu", result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", bounds.DIVERGENCES)
def test_bounds(divergence, dtype):
    x = bounds.log_probs(dtype, 70_000)
    for part in (x, x[:0], x[:1], x[:255], x[:257], x[::3], x[:60_000].view(200, 300).T):
        on_gpu = to(GPU, part)
        for delta in (1e-3, 0.05, 0.9):
            ours = twice(partial(band_bounds, on_gpu, divergence, delta))
            bounds.assert_same(ours, band_bounds(part, divergence, delta), part, divergence, delta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", losses.METHODS)
def test_the_loss(method, dtype):
    loss = losses.METHODS[method]
    check_loss(loss, losses.batch_of(loss, dtype, count=20_020))


@pytest.mark.parametrize("method", ["band_kl", "dppo_binary_tv", "erc_gppo"])
def test_the_loss_of_any_shape_and_type(method):
    loss = PolicyLoss.from_preset(method, on_invalid="drop")
    batch = losses.batch_of(loss)

    def each(change):
        return {name: change(x) for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}

    for change in (lambda x: x[:, :0], lambda x: x[:1, :1], lambda x: x[:3, :19], lambda x: x.T, lambda x: x[::2, 1::3],
                   lambda x: x.flatten()):  # fmt: skip
        check_loss(loss, replace(batch, **each(change)))
    for dtype in (torch.bfloat16, torch.float16):
        check_loss(loss, replace(batch, **each(lambda x, dtype=dtype: x.to(dtype) if x.is_floating_point() else x)))
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32):
        check_loss(loss, replace(batch, response_mask=batch.response_mask.to(dtype), weights=torch.rand(20, 1)))
    spoilt = batch.log_prob.clone()
    spoilt[3, :7], spoilt[4, 5] = torch.nan, 0.1
    check_loss(loss, replace(batch, log_prob=spoilt, weights=None))


def check_loss(loss, batch):
    on_gpu = to(GPU, batch)
    losses.assert_same_results(twice(lambda: losses.run(loss, on_gpu, "native")), losses.run(loss, batch, "native"))


@pytest.mark.parametrize("cells", stats.CELLS)
@pytest.mark.parametrize("dtype", stats.FORMATS)
def test_statistics_of_any_shape(dtype, cells):
    for V in (7, 1025, 5000):
        for rows in ((0,), (1,), (5,), (3, 40), (2, 3, 4)):
            logits, tokens = random_logits(*rows, V, dtype=dtype), random_ids(*rows, V=V)
            tokens.view(-1)[1::4] = IGNORE_INDEX  # none of those that `arguments` names
            temperature = torch.linspace(0.5, 2, tokens.numel()).view(rows)
            check_statistics(logits, tokens, cells)
            check_statistics(logits, tokens.int(), cells, temperature)
    whole = random_logits(30, 3, 709, dtype=dtype)
    views = whole[..., 1:701], whole[..., 3:703], whole[:, ::2, :700], whole.permute(1, 0, 2), whole.transpose(0, 2)
    for view in views:
        check_statistics(view, random_ids(*view.shape[:-1], V=view.shape[-1]), cells)


@pytest.mark.parametrize("cells", stats.CELLS)
@pytest.mark.parametrize("V", [151_936, 262_144])
def test_statistics_of_large_vocabularies(V, cells):
    logits, tokens = random_logits(9, V, dtype=torch.float32), random_ids(9, V=V)
    for dtype in stats.FORMATS[:3]:
        check_statistics(logits.to(dtype), tokens, cells, 0.7, K=20)
        check_statistics(logits.to(dtype), tokens.int(), cells, K=20)


def check_statistics(logits, tokens, cells, temperature=1.0, K=5):
    given = stats.arguments(cells, logits, tokens, K) if tokens.numel() else {}
    on_gpu = to(GPU, (logits, tokens, temperature, given))

    def run():
        logits, tokens, temperature, given = on_gpu
        return stats.every_result(logits, tokens, temperature, **given)

    ours, our_gradient = twice(run)
    theirs, their_gradient = stats.every_result(logits, tokens, temperature, **given)
    assert ours.cell_ids is None or ours.cell_ids.equal(theirs.cell_ids)
    stats.assert_same_results(ours, our_gradient, theirs, their_gradient)


def test_the_gradient_may_be_written_over_the_logits():
    logits, tokens = to(GPU, (random_logits(6, 5000, dtype=torch.bfloat16), random_ids(6, V=5000)))
    gradients = []
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        gradients += torch.autograd.grad(token_stats(leaf, tokens, inplace_backward=inplace).log_prob.sum(), leaf)
    assert gradients[0].equal(gradients[1]) and gradients[1].data_ptr() == leaf.data_ptr()
