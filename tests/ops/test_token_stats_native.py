"""The kernels of token statistics: the answers of the pure-torch path, on all formats, layouts and odd sizes."""

import pytest
import torch

from trustregion import ops, token_stats
from trustregion.token_stats import IGNORE_INDEX

from .random_rows import random_ids, random_logits

FORMATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CELLS = ["none", "topk", "given", "binary"]

def arguments(cells, logits, tokens, K=5):
    """Cells of that kind; of those given, half of the rows name their sampled token."""
    if cells == "none":
        return {}
    if cells == "topk":
        return {"topk": K}
    if cells == "binary":
        return {"cell_ids": tokens[..., None][..., :0]}
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(logits.shape[-1], generator=generator)[:K] for _ in range(tokens.numel())])
    ids[::2, 0] = torch.where((ids[::2] == tokens.view(-1)[::2, None]).any(-1), ids[::2, 0], tokens.view(-1)[::2])
    return {"cell_ids": ids.clamp(min=0).view(*tokens.shape, K)}

def every_result(logits, tokens, temperature=1.0, weights=(1.0, 0.3, 0.7), **given):
    leaf = logits.detach().requires_grad_()
    stats = token_stats(leaf, tokens, temperature, **given)
    generator = torch.Generator().manual_seed(2)
    loss = weights[0] * stats.log_prob.sum() + weights[1] * stats.entropy.sum()
    if stats.cell_log_prob is not None:
        cells = stats.cell_log_prob.masked_fill(stats.cell_log_prob == -torch.inf, 0.0)
        drawn = torch.randn(cells.shape, generator=generator).to(cells.device) / cells.shape[-1] ** 0.5
        loss = loss + weights[2] * (cells * drawn).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return stats, gradient

def assert_same(logits, tokens, temperature=1.0, **given):
    """Native and torch, within 1e-6 relative (float64: 1e-12); gradients of half precision within a rounding of theirs."""
    with ops.using("native"):
        ours, our_gradient = every_result(logits, tokens, temperature, **given)
    if "topk" in given:  # ties may break differently
        named = logits.flatten(0, -2).gather(-1, ours.cell_ids.flatten(0, -2).long())
        assert named.equal(logits.flatten(0, -2).topk(given["topk"]).values)
        given = {"cell_ids": ours.cell_ids}
    with ops.using("torch"):
        theirs, their_gradient = every_result(logits, tokens, temperature, **given)
    assert_same_results(ours, our_gradient, theirs, their_gradient)
    return ours, our_gradient

def assert_same_results(ours, our_gradient, theirs, their_gradient):
    bar = 1e-12 if our_gradient.dtype == torch.float64 else 1e-6
    for name in ("log_prob", "entropy", "cell_log_prob"):
        if getattr(theirs, name) is not None:
            a, b = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(a, b, rtol=bar, atol=bar, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
    rounding = torch.finfo(our_gradient.dtype).eps if our_gradient.dtype in (torch.bfloat16, torch.float16) else 10 * bar
    atol = 1e-7 if our_gradient.dtype == torch.float16 else bar  # subnormal there
    torch.testing.assert_close(our_gradient, their_gradient, rtol=rounding, atol=atol, equal_nan=True)

@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("V", [7, 2048, 4099])
def test_equals_torch(dtype, cells, V):
    logits, tokens = random_logits(3, 4, V, dtype=dtype), random_ids(3, 4, V=V)
    tokens[1, 2] = IGNORE_INDEX
    assert_same(logits, tokens, **arguments(cells, logits, tokens))
    assert_same(logits, tokens.int(), torch.tensor([[0.3], [1.0], [2.5]]), **arguments(cells, logits, tokens))

@pytest.mark.slow
@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("V", [151_936, 262_144])
def test_equals_torch_on_large_vocabularies(cells, V):
    logits, tokens = random_logits(5, V, dtype=torch.float32), random_ids(5, V=V)
    assert_same(logits, tokens, 0.7, **arguments(cells, logits, tokens, K=20))
    rounded = logits.bfloat16()
    assert_same(rounded, tokens, 0.7, **arguments(cells, rounded, tokens, K=20))

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_read_and_written_as_torch_does(dtype):
    every = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    with ops.using("native"):
        read = token_stats(every[:, None].clone(), torch.zeros(1 << 16, dtype=torch.long), cell_ids=None)
        assert read.log_prob.isnan().equal(~every.isfinite()) and (read.log_prob[every.isfinite()] == 0).all()
        # Two logits of 0: the gradient of the first one's ln p is half of what comes from above.
        finite = every[every.isfinite()].float()
        upstream = torch.cat([finite * factor for factor in (1.0, 1 + 2.0**-9, 1 + 2.0**-8, 1 + 2.0**-11, 1 + 2.0**-12)])
        logits = torch.zeros(len(upstream), 2, dtype=dtype, requires_grad=True)
        stats = token_stats(logits, torch.zeros(len(upstream), dtype=torch.long))
        (gradient,) = torch.autograd.grad(stats.log_prob, logits, upstream)
    torch.testing.assert_close(gradient[:, 0], (upstream / 2).to(dtype), rtol=0, atol=0, equal_nan=True)
    pairs = torch.stack([every, torch.zeros_like(every)], -1)
    tokens = torch.zeros(1 << 16, dtype=torch.long)
    with ops.using("native"):
        ours = token_stats(pairs, tokens).log_prob
        theirs = token_stats(pairs.float(), tokens).log_prob
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)

def test_a_larger_logit_late_in_the_row_and_rising_rows():
    """The running maximum grows with every block, and in the last one by far more than float32's exp can hold."""
    V = 10_000
    rising = torch.linspace(-30, 30, V).repeat(3, 1)
    rising[1, -1], rising[2, V // 2] = 300.0, 200.0
    assert_same(rising, torch.tensor([V - 1, V - 1, 3]), topk=4)
    assert_same(rising.flip(-1), torch.tensor([0, 0, 3]), topk=4)
    assert_same(torch.zeros(2, V), torch.tensor([0, V - 1]))
    assert_same(torch.full((2, V), -3e38), torch.tensor([0, V - 1]))

def test_rows_of_impossible_and_invalid_logits():
    V = 5000
    logits, tokens = random_logits(9, V, dtype=torch.float32), random_ids(9, V=V)
    logits[0, : V // 2], logits[1, V // 2 :], logits[2] = -torch.inf, -torch.inf, -torch.inf
    logits[2, 77] = 1.0
    logits[3] = -torch.inf
    logits[4, 4321], logits[5, 11], logits[6, int(tokens[6])] = torch.nan, torch.inf, torch.nan
    logits[7, :4096] = -torch.inf
    logits[7, 17] = torch.nan
    for cells in CELLS:
        given = arguments(cells, logits, tokens)
        with ops.using("native"):
            ours, our_gradient = every_result(logits, tokens, **given)
        if cells == "topk":
            ids = ours.cell_ids.sort(-1).values
            assert (ids >= 0).all() and (ids < V).all() and (ids.diff() > 0).all()
            given = {"cell_ids": ours.cell_ids}
        with ops.using("torch"):
            theirs, their_gradient = every_result(logits, tokens, **given)
        bad = torch.tensor([3, 4, 5, 6, 7])
        assert ours.log_prob[bad].isnan().all() and ours.entropy[bad].isnan().all()
        for name in ("log_prob", "entropy", "cell_log_prob"):
            if getattr(ours, name) is not None:
                a, b = getattr(ours, name), getattr(theirs, name)
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-6, equal_nan=True)

def test_ties_in_the_topk_break_by_id():
    values = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, 2.0])
    for V in (8, 5000):
        logits = torch.full((9, V), -1.0)
        logits[:, -8:] = values
        tokens = torch.tensor([*range(V - 8, V), IGNORE_INDEX])  # the sampled one gets no better place
        with ops.using("native"):
            ids = token_stats(logits, tokens, topk=4).cell_ids
        assert (ids == torch.tensor([1, 3, 2, 4]) + V - 8).all()

def test_many_named_tokens():
    V = 3000
    logits, tokens = random_logits(4, V, dtype=torch.float32), random_ids(4, V=V)
    for K in (40, 2999):
        assert_same(logits, tokens, topk=K)
    assert_same(logits, tokens, cell_ids=torch.stack([torch.randperm(V) for _ in range(4)]))

@pytest.mark.parametrize("mode", ["native", "torch"])
def test_the_gradient_may_be_written_over_the_logits(mode):
    logits, tokens = random_logits(6, 300, dtype=torch.bfloat16), random_ids(6, V=300)
    upstream = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.0, 4.0])
    with ops.using(mode):

        def gradient(x, inplace):
            stats = token_stats(x, tokens, topk=3, inplace_backward=inplace)
            loss = (upstream * (stats.log_prob + stats.entropy + stats.cell_log_prob[:, -1])).sum()
            return torch.autograd.grad(loss, x, retain_graph=True)[0], loss

        leaf = logits.clone().requires_grad_()
        expected, _ = gradient(leaf, inplace=False)
        assert leaf.equal(logits)
        ours, loss = gradient(leaf, inplace=True)
        assert ours.equal(expected) and ours.data_ptr() == leaf.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

        strided = torch.cat([logits, logits], -1)[:, :300].requires_grad_()
        ours, _ = gradient(strided, inplace=True)
        assert ours.equal(expected) and strided.equal(logits)

@pytest.mark.slow
def test_operators_pass_opcheck():
    for dtype in (torch.bfloat16, torch.float32):
        logits, tokens = random_logits(5, 40, dtype=dtype).requires_grad_(), random_ids(5, 1, V=40)
        temperature, ids = torch.full((5, 1), 0.7), random_ids(5, 3, V=40)
        for given in ((None, None, 0), (temperature, None, 3), (temperature, ids, 0), (None, ids[:, :0], 0)):
            torch.library.opcheck(torch.ops.trustregion.token_stats.default, (logits, tokens, *given, False))
    log_prob, entropy, cell_ids, cells, largest, log_norm = torch.ops.trustregion.token_stats(
        logits.detach(), tokens, temperature, None, 3, False
    )
    rows = tokens, temperature, cell_ids, cells, entropy, largest, log_norm
    for grads in ((log_prob, entropy, cells), (None, entropy, None), (log_prob, None, cells)):
        arguments = logits.detach(), *grads, *rows
        torch.library.opcheck(torch.ops.trustregion.token_stats_backward.default, arguments)
        torch.library.opcheck(torch.ops.trustregion.token_stats_backward_.default, arguments)

def test_a_second_derivative_is_refused():
    logits = random_logits(2, 9).requires_grad_()
    with ops.using("native"):
        log_prob = token_stats(logits, torch.tensor([1, 2])).log_prob
        (gradient,) = torch.autograd.grad(log_prob.sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            gradient.sum().backward()

@pytest.mark.slow
@pytest.mark.parametrize("cells", CELLS)
def test_torch_compile_takes_it_whole(cells):
    def loss(logits, tokens, temperature, given, inplace):
        stats = token_stats(logits.sin(), tokens, temperature, inplace_backward=inplace, **given)
        total = stats.log_prob.sum() + stats.entropy.mean()
        return total if stats.cell_log_prob is None else total + stats.cell_log_prob[..., -1].sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    with ops.using("native"):
        for N in (3, 5):
            for inplace in (False, True):
                logits, tokens = random_logits(N, 60, dtype=torch.float32).requires_grad_(), random_ids(N, V=60)
                given = logits, tokens, torch.full((N,), 0.8), arguments(cells, logits, tokens), inplace
                results = [(x, *torch.autograd.grad(x, logits)) for x in (compiled(*given), loss(*given))]
                for ours, eager in zip(*results, strict=True):
                    torch.testing.assert_close(ours, eager)

def test_what_ids_outside_the_vocabulary_name_is_nan_where_nobody_checks():
    logits, tokens = random_logits(3, 40, dtype=torch.float32), torch.tensor([[40], [1], [2]])
    ids = torch.tensor([[0, 3], [0, 3], [-1, 3]])
    log_prob, entropy, _, cells, *rows = torch.ops.trustregion.token_stats(logits, tokens, None, ids, 0, False)
    assert log_prob[0].isnan() and log_prob[1:].isfinite().all() and entropy.isfinite().all()
    assert cells[2, 0].isnan() and cells[:2, 0].isfinite().all() and cells[:, 1].isfinite().all()
    given = log_prob, entropy, cells.nan_to_num(), tokens, None, ids.int(), cells, entropy, *rows
    assert torch.ops.trustregion.token_stats_backward(logits, *given)[1].isfinite().all()
    with pytest.raises(ValueError, match="topk=40"):
        torch.ops.trustregion.token_stats(logits, tokens, None, None, 40, False)

@pytest.mark.slow
def test_threads_and_company_change_no_bit():
    V = 40_960
    logits, tokens = random_logits(7, V, dtype=torch.bfloat16), random_ids(7, V=V)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with ops.using("native"):
                stats, gradient = every_result(logits, tokens, 0.9, topk=3, weights=(1.0, 0.3, 0.0))
                results.append((stats.log_prob, stats.entropy, stats.cell_log_prob, gradient))
                alone = [
                    every_result(logits[i : i + 1], tokens[i : i + 1], 0.9, topk=3, weights=(1.0, 0.3, 0.0))
                    for i in range(7)
                ]
                results.append(
                    [torch.cat([getattr(s, n) for s, _ in alone]) for n in ("log_prob", "entropy", "cell_log_prob")]
                    + [torch.cat([g for _, g in alone])]
                )
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], others, strict=True))
