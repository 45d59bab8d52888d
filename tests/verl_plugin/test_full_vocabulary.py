"""Entropies and cells from the logits in verl's engine, in both of its layouts, and from the rollout engine."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl")
from verl.utils import tensordict_utils as tu  # noqa: E402

from trustregion import token_stats  # noqa: E402
from trustregion.verl_plugin import full_vocabulary  # noqa: E402
from trustregion.verl_plugin.full_vocabulary import CELL_IDS, CELLS, ENTROPY, REQUEST, UPDATE, FullVocabulary  # noqa: E402
from trustregion.verl_plugin.rollout_cells import WithTopTokens, anchor_cells  # noqa: E402
from trustregion.verl_plugin.rollout_server import TOP_IDS, TOP_LOG_PROBS, UNKNOWN, most_likely  # noqa: E402

VOCABULARY, LENGTHS, TEMPERATURE = 17, (5, 3, 7), (0.7, 0.7, 0.7)


class Engine(FullVocabulary):
    """verl's engine as far as our mixin uses it."""

    use_ulysses_sp = False

    def _gather_and_unpad_packed(self, tensor, pad_size):
        return tensor[:-pad_size] if pad_size else tensor


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def a_pass(remove_padding: bool, request: dict, pad: int = 0, **batch_fields):
    """What verl's engine hands to `prepare_model_outputs`, and the packed logits and labels behind it."""
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(n, VOCABULARY, generator=generator) for n in LENGTHS]
    ids = [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    labels = torch.cat(ids).roll(-1)
    micro_batch = tu.get_tensordict(
        {"input_ids": nested(ids), **batch_fields},
        {"use_remove_padding": remove_padding, REQUEST: json.dumps(request), UPDATE: 0},
    )
    leaf = torch.cat(logits).requires_grad_()
    rows = leaf.split(LENGTHS)
    if remove_padding:
        output = torch.cat([leaf, leaf.new_zeros(pad, VOCABULARY)])[None]
        arguments = {
            "input_ids_rmpad_rolled": torch.cat([labels, labels.new_zeros(pad)]),
            "temperature_rmpad": torch.full((sum(LENGTHS) + pad,), TEMPERATURE[0]),
            "pad_size": pad,
        }
    else:
        output = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        arguments = {"input_ids_rmpad_rolled": labels, "temperature": torch.tensor(TEMPERATURE)}
    return SimpleNamespace(logits=output), arguments, micro_batch, leaf, labels


LAYOUTS = [(False, 0), (True, 0), (True, 3)]


@pytest.mark.parametrize(("remove_padding", "pad"), LAYOUTS)
def test_the_anchors_pass(remove_padding, pad):
    output, arguments, micro_batch, logits, labels = a_pass(remove_padding, {"entropy": True, "topk": 4}, pad)
    tu.assign_non_tensor(micro_batch, calculate_entropy=True)
    found = Engine().prepare_model_outputs(output, arguments, micro_batch, None)
    expected = token_stats(logits.detach(), labels, TEMPERATURE[0], topk=4)
    assert found.keys() == {"log_probs", "entropy", CELL_IDS, CELLS}
    for name, value in {
        "log_probs": expected.log_prob, "entropy": expected.entropy,
        CELL_IDS: expected.cell_ids, CELLS: expected.cell_log_prob,
    }.items():
        assert torch.equal(found[name].values(), value)
        assert found[name].offsets().diff().tolist() == list(LENGTHS)
    assert found[CELL_IDS].dtype == torch.int32 and found[CELLS].dtype == torch.float32


@pytest.mark.parametrize(("remove_padding", "pad"), LAYOUTS)
def test_the_updates_pass_looks_at_the_anchors_cells(remove_padding, pad):
    cell_ids = torch.stack([torch.randperm(VOCABULARY)[:4] for _ in range(sum(LENGTHS))]).int()
    output, arguments, micro_batch, logits, labels = a_pass(
        remove_padding, {"entropy_every": 1, "at_cells": True}, pad, **{CELL_IDS: nested(cell_ids.split(LENGTHS))}
    )
    found = Engine().prepare_model_outputs(output, arguments, micro_batch, None)
    expected = token_stats(logits, labels, TEMPERATURE[0], cell_ids=cell_ids)
    assert found.keys() == {"log_probs", ENTROPY, CELLS}
    assert torch.equal(found[CELLS].values(), expected.cell_log_prob) and not found[CELLS].requires_grad
    assert torch.equal(found[ENTROPY].values(), expected.entropy) and not found[ENTROPY].requires_grad
    weights = torch.rand(sum(LENGTHS))
    (grad,) = torch.autograd.grad((found["log_probs"].values() * weights).sum(), logits, retain_graph=True)
    (expected_grad,) = torch.autograd.grad((expected.log_prob * weights).sum(), logits)
    assert torch.equal(grad, expected_grad) and (grad != 0).any()


@pytest.mark.parametrize(("remove_padding", "pad"), LAYOUTS)
def test_the_gradient_is_written_over_the_logits(remove_padding, pad):
    """With an entropy bonus too, for which verl's own functions need memory for another gradient."""
    output, arguments, micro_batch, logits, labels = a_pass(remove_padding, {"entropy_every": 1}, pad)
    tu.assign_non_tensor(micro_batch, calculate_entropy=True)
    found = Engine().prepare_model_outputs(output, arguments, micro_batch, None)
    before = output.logits.detach().clone()
    loss = found["log_probs"].values().square().sum() + found["entropy"].values().sum()
    grad, grad_output = torch.autograd.grad(loss, (logits, output.logits))
    if remove_padding:
        assert grad_output.data_ptr() == output.logits.data_ptr() and not output.logits.equal(before)
    expected = token_stats(logits, labels, TEMPERATURE[0])
    (expected_grad,) = torch.autograd.grad(expected.log_prob.square().sum() + expected.entropy.sum(), logits)
    assert torch.equal(grad, expected_grad) and (grad != 0).any()


def test_ulysses_workers_share_the_sequence(monkeypatch):
    """Two workers' parts, put together, are the whole sequence's and its padding's."""
    packed = torch.stack([torch.randperm(VOCABULARY)[:4] for _ in range(15)]).int()
    engine = Engine()
    engine.use_ulysses_sp = True
    monkeypatch.setattr(full_vocabulary, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(full_vocabulary, "get_ulysses_sequence_parallel_rank", lambda rank=rank: rank)
        parts.append(engine._slice(packed, pad_size=3))
    assert [len(part) for part in parts] == [9, 9]
    assert torch.equal(torch.cat(parts)[:15], packed)
    assert all(len(set(row)) == 4 for row in torch.cat(parts)[15:].tolist())  # ids that token_stats accepts


def test_updates_are_counted_and_entropy_is_due_in_every_kth():
    class Recorded(Engine):
        seen = []

        def train_batch(self, data, loss_function):
            return super().train_batch(data, loss_function)

    class Base:
        def train_batch(self, data, loss_function):
            self.seen.append(tu.get_non_tensor_data(data, UPDATE, None))

    engine = type("Tested", (Recorded, Base), {})()
    for first_update, updates in ((0, 3), (3, 3), (12, 2)):
        for _ in range(updates):
            data = tu.get_tensordict({}, {REQUEST: json.dumps({"first_update": first_update})})
            engine.train_batch(data, None)
    assert engine.seen == [0, 1, 2, 3, 4, 5, 12, 13]

    for update, due in ((0, True), (1, False), (2, False), (3, True)):
        output, arguments, micro_batch, *_ = a_pass(False, {"entropy_every": 3, "topk": 1})
        tu.assign_non_tensor(micro_batch, **{UPDATE: update})
        assert (ENTROPY in Engine().prepare_model_outputs(output, arguments, micro_batch, None)) == due


@pytest.mark.parametrize(("key", "remedy"), [
    ("use_fused_kernels", "actor_rollout_ref.model.use_fused_kernels=False"),
    ("distillation_use_topk", "without entropy band and top-K"),
])
def test_what_cannot_work_is_refused(key, remedy):
    output, arguments, micro_batch, *_ = a_pass(False, {"topk": 2})
    tu.assign_non_tensor(micro_batch, **{key: True})
    with pytest.raises(NotImplementedError, match=remedy):
        Engine().prepare_model_outputs(output, arguments, micro_batch, None)


# ---- from the rollout engine -----------------------------------------------------------------------------------------
def test_the_rollout_engines_cells_are_those_of_the_trainers_layout():
    """At the same weights, both ways to the anchor's cells agree where there is a response."""
    generator = torch.Generator().manual_seed(1)
    lengths, prompts = (6, 4), (2, 3)
    logits = [torch.randn(n, VOCABULARY, generator=generator) for n in lengths]
    ids = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]
    ids[0][3] = logits[0][2].argmax()  # one sampled token is among the most likely
    responses = [x[p:] for x, p in zip(ids, prompts, strict=True)]
    predicted = [x[p - 1 : -1] for x, p in zip(logits, prompts, strict=True)]
    stats = [token_stats(x, y, topk=4) for x, y in zip(predicted, responses, strict=True)]
    named = [x.log_softmax(-1).gather(-1, s.cell_ids.long()) for x, s in zip(predicted, stats, strict=True)]
    cell_ids, cells = anchor_cells(
        [s.cell_ids for s in stats], named, [s.log_prob for s in stats], responses, list(prompts)
    )
    assert cell_ids.offsets().diff().tolist() == cells.offsets().diff().tolist() == list(lengths)
    assert any((s.cell_log_prob[:, -2] == -torch.inf).any() for s in stats)
    for i, (prompt, s) in enumerate(zip(prompts, stats, strict=True)):
        at_tokens = slice(prompt - 1, lengths[i] - 1)
        assert torch.equal(cell_ids[i][at_tokens], s.cell_ids)
        torch.testing.assert_close(cells[i][at_tokens], s.cell_log_prob, rtol=1e-5, atol=1e-5)


def test_a_rest_without_mass_is_empty():
    one = [torch.tensor([[0, 1]])]
    log_probs = [torch.log(torch.tensor([[0.7, 0.3000001]]))]
    _, cells = anchor_cells(one, log_probs, [torch.tensor([-1.2])], [torch.tensor([1])], [1])
    assert cells[0][0].tolist()[2:] == [-torch.inf, -torch.inf]


def test_vllms_answer_is_sorted_and_cut():
    def found(rank, log_prob):
        return SimpleNamespace(rank=rank, logprob=log_prob)

    answer = [{7: found(5, -4.0), 3: found(1, -0.1), 9: found(2, -3.0)}, {1: found(2, -2.0), 2: found(1, -0.2)}]
    ids, log_probs = most_likely(answer, 2)
    assert ids.tolist() == [[3, 9], [2, 1]] and ids.dtype == np.int32
    np.testing.assert_allclose(log_probs, [[-0.1, -3.0], [-0.2, -2.0]], rtol=1e-6)
    ids, log_probs = most_likely([{7: found(40, -9.0), 3: found(1, -0.1)}], 2)  # the sampled token does not stand in
    assert ids.tolist() == [[3, UNKNOWN]] and np.isnan(log_probs[0, 1])


def test_top_tokens_travel_as_tensors_or_not_at_all():
    def output(rows):
        top = {TOP_IDS: np.zeros((rows, 2), np.int32), TOP_LOG_PROBS: np.zeros((rows, 2), np.float32)}
        return WithTopTokens(
            prompt_ids=[1], response_ids=[2, 3, 4], response_mask=[1, 1, 1], metrics={}, extra_fields=top
        )

    values = output(4).as_dict()
    assert values[TOP_IDS].shape == values[TOP_LOG_PROBS].shape == (3, 2) and values["extra_fields"] == {}
    assert output(2).as_dict()[TOP_IDS].tolist() == [[0, 0], [0, 0], [UNKNOWN, UNKNOWN]]


def test_tokens_without_their_most_likely_ones_are_refused():
    top = [torch.tensor([[4, 5], [6, UNKNOWN]], dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.int32)]
    log_probs, responses = [torch.full((2, 2), -1.0), torch.full((1, 2), -1.0)], [torch.tensor([4, 6]), torch.tensor([1])]
    sampled = [torch.full((2,), -1.0), torch.full((1,), -1.0)]
    with pytest.raises(RuntimeError, match="1 of 3 sampled tokens .* 2 most likely .* Set method.anchor=old"):
        anchor_cells(top, log_probs, sampled, responses, [1, 1])
    # A row that only fills up a batch is cut to what it has to be, and what is cut off is not looked at.
    anchor_cells(top, log_probs, sampled, [torch.tensor([4]), torch.tensor([1])], [1, 1])
