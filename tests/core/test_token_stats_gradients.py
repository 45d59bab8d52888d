"""Gradients of token statistics: their values, and what they cost in work and memory."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trustregion.token_stats import CHUNK_BYTES, IGNORE_INDEX, token_stats

from .helpers import peaked_logits, random_ids, random_logits, reference_cells


@pytest.mark.slow
@pytest.mark.parametrize("cells", ["none", "topk", "given", "binary"])
def test_gradcheck(cells):
    logits, tokens = random_logits(3, 2, 9, scale=1.0).requires_grad_(), random_ids(3, 2, V=9)
    tokens[1, 0] = IGNORE_INDEX
    temperature = torch.tensor([[0.5], [1.0], [2.0]])
    given = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:3] for i in range(6)])
    given = given.view(3, 2, 3)
    given[0, 0, 1] = tokens[0, 0] if tokens[0, 0] not in given[0, 0] else given[0, 0, 1]
    arguments = {"none": {}, "topk": {"topk": 3}, "given": {"cell_ids": given}, "binary": {"cell_ids": given[..., :0]}}

    def outputs(logits):
        stats = token_stats(logits, tokens, temperature, **arguments[cells])
        if stats.cell_log_prob is None:
            return stats.log_prob, stats.entropy
        return stats.log_prob, stats.entropy, stats.cell_log_prob.masked_fill(stats.cell_log_prob == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(outputs, logits, atol=1e-8)
    for index in range(len(outputs(logits))):  # each on its own: the other upstream gradients are absent, not 0
        assert torch.autograd.gradcheck(lambda logits, index=index: outputs(logits)[index], logits, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_equals_that_of_log_softmax(dtype):
    logits, tokens = random_logits(2, 11, 640, dtype=dtype).requires_grad_(), random_ids(2, 11, V=640)
    cell_ids = logits.topk(5).indices
    weights = random_logits(4, 2, 11, 7, seed=3, scale=1.0, dtype=dtype)
    log_p = (logits / 0.7).log_softmax(-1)
    cells = reference_cells((logits / 0.7).log_softmax(-1), tokens, cell_ids)
    stats = token_stats(logits, tokens, temperature=0.7, topk=5)
    assert stats.cell_ids.equal(cell_ids.to(torch.int32)) and not stats.cell_ids.requires_grad

    def gradient(log_prob, entropy, cells):
        loss = (weights[0, ..., 0] * log_prob).sum() + (weights[1, ..., 0] * entropy).sum()
        loss = loss + (weights[2] * cells.masked_fill(cells == -torch.inf, 0.0)).sum()
        return torch.autograd.grad(loss, logits)[0]

    theirs = gradient(log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1), cells)
    ours = gradient(stats.log_prob, stats.entropy, stats.cell_log_prob)
    bar = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(ours, theirs, rtol=10 * bar, atol=bar)


def test_gradient_of_nearly_certain_tokens_is_relatively_accurate():
    """Both of ln p and of the rest's log-mass: with float32's 1 - p, most would be 0."""
    logits, tokens = peaked_logits([20.0, 24.0, 30.0], V=500), torch.zeros(3, dtype=torch.long)
    for cells, cell in ((False, None), (True, -2), (True, -1)):
        gradients = []
        for x in (logits, logits.double()):
            x = x.clone().requires_grad_()
            stats = token_stats(x, tokens, cell_ids=tokens[:, None][:, :0] if cells else None)
            (stats.cell_log_prob[:, cell] if cells else stats.log_prob).sum().backward()
            gradients.append(x.grad)
        assert gradients[1][:, 0].abs().max() < 1e-4 or cell == -1
        torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=2e-5, atol=0)


def test_cells_of_impossible_tokens_are_empty_and_give_no_gradient():
    logits = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf, -torch.inf]], requires_grad=True)
    stats = token_stats(logits, torch.tensor([0]), topk=4)
    assert stats.cell_log_prob[0, 2:].tolist() == [-torch.inf] * 4
    (stats.cell_log_prob.sum() + stats.entropy.sum()).backward()
    assert logits.grad.isfinite().all() and (logits.grad[0, 2:] == 0).all()
    certain = token_stats(torch.tensor([[3.0, -torch.inf, -torch.inf]]), torch.tensor([0]), topk=1)
    assert certain.log_prob == 0 and certain.entropy == 0
    assert certain.cell_log_prob.tolist() == [[0.0, -torch.inf, -torch.inf]]
    assert token_stats(torch.tensor([[3.0, -torch.inf]]), torch.tensor([1])).log_prob == -torch.inf


def test_rows_without_upstream_gradient_change_nothing_in_the_others(monkeypatch):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2 * 40 * 8)
    logits, tokens = random_logits(9, 40).requires_grad_(), random_ids(9, V=40)
    weights = torch.tensor([0.0, 1, 0, 2, 3, 0, 0, 4, 0])
    stats = token_stats(logits, tokens)
    (ours,) = torch.autograd.grad((weights * stats.log_prob).sum(), logits, retain_graph=True)
    (every,) = torch.autograd.grad(stats.log_prob.sum(), logits, retain_graph=True)
    torch.testing.assert_close(ours, weights[:, None] * every)
    (nothing,) = torch.autograd.grad((0 * stats.log_prob).sum(), logits)
    assert (nothing == 0).all()


def test_backward_computes_only_what_is_used(path):
    class Count(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.elements += out.numel() if isinstance(out, torch.Tensor) else 0
            return out

    def work(use, **cells):
        stats = token_stats(random_logits(8, 640).requires_grad_(), random_ids(8, V=640), **cells)
        loss = use(stats).sum()
        with Count() as count:
            loss.backward()
        return count.elements

    alone = work(lambda stats: stats.log_prob)
    assert work(lambda stats: stats.log_prob, topk=5) < alone + 640
    if path == "torch":  # which takes another pass for it
        assert work(lambda stats: stats.log_prob + stats.entropy) > alone + 8 * 640


MEASURE_MEMORY = """
import re, torch
from trustregion.token_stats import token_stats
torch.set_num_threads(1)

def stats(logits, token_ids):
    return token_stats(logits, token_ids).log_prob

def usual(logits, token_ids):
    return logits.float().log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]

def peak():  # not ru_maxrss, which starts from what the parent process had
    return 1024 * int(re.search("VmHWM: *([0-9]+)", open("/proc/self/status").read().replace("\\t", " "))[1])

small = torch.zeros(2, 32768, dtype=torch.bfloat16, requires_grad=True)
for log_prob in (stats, usual):
    log_prob(small, torch.zeros(2, dtype=torch.long)).sum().backward()
# Its rows make no single view: flattening them would copy.
logits = torch.empty(4, 513, 32768, dtype=torch.bfloat16).uniform_(-9, 9)[:, 1:].requires_grad_()
token_ids = torch.zeros(4, 512, dtype=torch.long)
size = logits.numel() * logits.element_size()
start = peak()
log_prob = stats(logits, token_ids)
print((peak() - start) / size)
torch.autograd.grad(log_prob.sum(), logits)
print((peak() - start) / size)
torch.autograd.grad(usual(logits, token_ids).sum(), logits)
print((peak() - start) / size)
"""


@pytest.mark.slow
def test_memory_is_that_of_the_gradient(path):
    """Of 2048 rows of 32,768 bfloat16 logits, in multiples of their size; the usual way shows that this can fail."""
    environment = {**os.environ, "TRUSTREGION_OPS": path}
    command = [sys.executable, "-c", MEASURE_MEMORY]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    forward, both, usual = map(float, run.stdout.split())
    assert forward < (0.05 if path == "native" else 0.2)
    assert both < (1.05 if path == "native" else 1.3)
    assert usual > 4
