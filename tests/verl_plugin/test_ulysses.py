"""Statistics of a sequence that several workers share (Ulysses), with verl's own slicing and gathering, over gloo."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("verl")
pytestmark = pytest.mark.slow  # starts processes that import verl

VOCABULARY, LENGTHS, K, WORKERS = 19, (5, 3, 7), 4, 2
REQUESTS = [{"entropy": True, "topk": K}, {"entropy_every": 1, "at_cells": True}]


def passes(rank: int, group) -> tuple[list[dict], torch.Tensor]:
    """Results of the anchor's pass and of the update's, and the gradient of the latter's log-probs."""
    from types import SimpleNamespace

    from verl.utils import tensordict_utils as tu
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from trustregion.verl_plugin.full_vocabulary import CELL_IDS, REQUEST, UPDATE, FullVocabulary

    class Engine(FullVocabulary):
        use_ulysses_sp = group is not None
        _gather_and_unpad_packed = FSDPEngine._gather_and_unpad_packed

    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    logits = 3 * torch.randn(tokens, VOCABULARY, generator=generator)
    ids = torch.randint(VOCABULARY, (1, tokens), generator=generator)
    temperature, pad_size = torch.full((1, tokens), 0.7), 0
    set_ulysses_sequence_parallel_group(group)
    if group is not None:
        pad_size = -tokens % WORKERS
        rows = torch.cat([logits, torch.zeros(pad_size, VOCABULARY)]).chunk(WORKERS)
        logits = rows[rank]
        ids, _, _ = ulysses_pad_and_slice_inputs(ids, sp_size=WORKERS)
        temperature, _, _ = ulysses_pad_and_slice_inputs(temperature, sp_size=WORKERS, pad_value=1)
    logits = logits.clone().requires_grad_()
    arguments = {"input_ids_rmpad_rolled": ids[0], "temperature_rmpad": temperature[0], "pad_size": pad_size}

    cells, found = {}, []
    for request in REQUESTS:
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
        sequences = torch.nested.nested_tensor_from_jagged(torch.zeros(tokens, dtype=torch.long), offsets)
        settings = {"use_remove_padding": True, REQUEST: json.dumps(request), UPDATE: 0}
        batch = tu.get_tensordict({"input_ids": sequences, **cells}, settings)
        results = Engine().prepare_model_outputs(SimpleNamespace(logits=logits[None]), arguments, batch, None)
        cells = {CELL_IDS: results[CELL_IDS]} if CELL_IDS in results else cells
        found.append({name: value.values() for name, value in results.items()})
    weights = torch.randn(tokens, generator=generator)
    (found[-1]["log_probs"] * weights).sum().backward()
    return [{name: value.detach() for name, value in results.items()} for results in found], logits.grad


def work(rank: int, file: str, results: dict):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORKERS)
    results[rank] = passes(rank, dist.group.WORLD)
    dist.destroy_process_group()


def test_two_workers_compute_what_one_computes(tmp_path):
    alone, gradient = passes(0, None)
    results = mp.Manager().dict()
    mp.spawn(work, args=(str(tmp_path / "meeting"), results), nprocs=WORKERS)
    for rank in range(WORKERS):
        shared, _ = results[rank]
        for one, both in zip(alone, shared, strict=True):
            assert one.keys() == both.keys()
            for name in one:
                torch.testing.assert_close(both[name], one[name], rtol=0, atol=0, msg=name)
    # verl scales what it gathers by the number of workers, because it averages their gradients.
    parts = torch.cat([results[rank][1] for rank in range(WORKERS)])[: sum(LENGTHS)]
    torch.testing.assert_close(parts / WORKERS, gradient, rtol=1e-6, atol=1e-7)
