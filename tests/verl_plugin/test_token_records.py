"""Token records: the rows are what the policy loss saw, whatever the micro-batches, updates and workers; and the files."""

import json
import logging
import os
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

pytest.importorskip("verl")
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.engine.utils import prepare_micro_batches  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

from trustregion import PolicyLoss, TokenBatch  # noqa: E402
from trustregion.presets import read_preset  # noqa: E402
from trustregion.verl_plugin.config import TrustRegionLossConfig  # noqa: E402
from trustregion.verl_plugin.full_vocabulary import CELLS, ENTROPY, REQUEST, FullVocabulary  # noqa: E402
from trustregion.verl_plugin.token_records import SCHEMA, SEQUENCE, TokenRecorder, is_due  # noqa: E402
from trustregion.verl_plugin.worker_loss import WorkerLoss  # noqa: E402

K = 20  # of the presets with partition topk
PROMPT = 3  # tokens of each prompt


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return " ".join(f"<{token_id}>" for token_id in ids)


class Base:
    """verl's engine as far as it matters: cuts an update into micro-batches, and has a loss of each."""

    def train_batch(self, data, loss_function):
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=100, global_batch_size=len(data), **self.cut)
        micro_batches, _ = prepare_micro_batches(data)
        for micro_batch in micro_batches:
            names = {"log_probs": "log_probs", ENTROPY: "new_entropy", CELLS: "new_cells"}
            output = {name: micro_batch[field] for name, field in names.items() if field in micro_batch}
            loss_function(output, micro_batch)


class Engine(FullVocabulary, Base):
    def __init__(self, cut: dict):
        self.cut = cut


FIXED = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
WHOLE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 6}
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def an_update(seed: int, loss: PolicyLoss, request: dict, lengths=(4, 9, 1, 7, 5, 6)):
    """A worker's batch as verl's engine gets it, and the same tokens as a TokenBatch."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows = [{} for _ in lengths]
    for length, row in zip(lengths, rows, strict=True):
        row["old_log_probs"] = -2 * torch.rand(length, generator=generator) - 0.05
        row["new"] = (row["old_log_probs"] + 0.5 * normal(length)).clamp(max=-1e-3)
        row["advantages"] = normal(length)
        row["response_mask"] = torch.ones(length, dtype=torch.int64)
        row["responses"] = torch.randint(100, (length,), generator=generator)
        row["prompts"] = torch.zeros(PROMPT, dtype=torch.int64)
        row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
        row["entropy"] = torch.rand(length, generator=generator) + 0.1
        row["entropy_new"] = row["entropy"] * (1 + 0.1 * normal(length))
        for name in ("cells_old", "cells_new"):
            row[name] = normal(length, K + 2).log_softmax(-1)
    rows[1]["response_mask"][2] = 0  # a tool's token
    rows[2]["response_mask"][:] = 0  # verl's padding

    def shifted(x):  # verl's model outputs: over prompt and response, each value where its token is predicted
        return torch.cat([x.new_zeros(PROMPT - 1, *x.shape[1:]), x, x.new_zeros(1, *x.shape[1:])])

    fields = ["old_log_probs", "advantages", "response_mask", "responses", "prompts", "input_ids"]
    data = {name: nested(row[name] for row in rows) for name in fields}
    data["log_probs"] = nested(shifted(row["new"]) for row in rows)
    if "entropy" in loss.requires:
        data["entropy"] = nested(row["entropy"] for row in rows)
        data["new_entropy"] = nested(shifted(row["entropy_new"]) for row in rows)
    if "cells" in loss.requires:
        data[CELLS] = nested(shifted(row["cells_old"]) for row in rows)
        data["new_cells"] = nested(shifted(row["cells_new"]) for row in rows)
    data[SEQUENCE] = [f"{seed:08d}-{i:06d}_0_0" for i in range(len(rows))]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    batch = TokenBatch(
        *(pad([row[name] for row in rows]) for name in ("new", "old_log_probs", "advantages", "response_mask")),
        entropy=pad([row["entropy_new"] for row in rows]), entropy_old=pad([row["entropy"] for row in rows]),
        cell_log_prob=pad([row["cells_new"] for row in rows]), cell_log_prob_old=pad([row["cells_old"] for row in rows]),
    )  # fmt: skip
    return tu.get_tensordict(data, {REQUEST: json.dumps(request)}), batch, pad([row["responses"] for row in rows])


def a_loss(method: str, recorder: TokenRecorder) -> WorkerLoss:
    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, policy_loss=TrustRegionLossConfig(method=read_preset(method))
    )
    return WorkerLoss(partial(ppo_loss, config), config.policy_loss, recorder)


def asked(folder: Path, step: int, sequences: int = 4, **others) -> dict:
    records = {"step": step, "folder": str(folder), "sequences": sequences}
    return {"token_records": records, "first_update": 10 * step, **others}


METHODS = ["band_kl", "erc_gppo", "band_kl_erc", "dppo_binary_tv", "dppo_topk_kl", "clip_higher", "cispo"]


@pytest.mark.parametrize("cut", [FIXED, WHOLE, DYNAMIC], ids=["fixed", "whole", "dynamic"])
@pytest.mark.parametrize("method", METHODS)
def test_rows_are_what_the_loss_saw(tmp_path, method, cut):
    loss = PolicyLoss.from_preset(method)
    engine, worker_loss = Engine(cut), a_loss(method, TokenRecorder(Tokenizer()))
    expected = []
    for seed in (0, 1):
        data, batch, responses = an_update(seed, loss, asked(tmp_path / "tokens", step=7))
        engine.train_batch(data, worker_loss)
        out, diagnosis = loss(batch), loss.diagnose(batch)
        for row in (0, 1, 3, 4):  # the first four that have a live token
            for position in batch.response_mask[row].nonzero().flatten().tolist():
                at = (row, position)
                expected.append({
                    "step": 7, "update": seed, "sequence": f"{seed:08d}-{row:06d}_0_0", "position": position,
                    "token_id": responses[at].item(), "token": f"<{responses[at].item()}>",
                    "log_prob_old": batch.log_prob_old[at].item(), "log_prob": batch.log_prob[at].item(),
                    "advantage": batch.advantages[at].item(),
                    "entropy_old": batch.entropy_old[at].item() if "entropy" in loss.requires else None,
                    "entropy": batch.entropy[at].item() if "entropy" in loss.requires else None,
                    "divergence": None if (d := diagnosis.verdict.divergence) is None else d[at].item(),
                    "active": out.active[at].item(),
                    "cause": "+".join(name for name, blocked in diagnosis.blocked_by.items() if blocked[at]),
                })  # fmt: skip
    found = pd.read_parquet(tmp_path / "tokens" / "7.parquet")
    assert list(found.columns) == SCHEMA.names
    expected = pd.DataFrame(expected).astype(found.dtypes.to_dict())
    pd.testing.assert_frame_equal(found, expected, check_exact=False, rtol=1e-6)
    assert found.active.equals(found.cause == "") and found.active.any()
    assert (~found.active).any() or method == "cispo"
    if method == "band_kl_erc":
        assert {"", "region", "entropy", "region+entropy"} <= set(found.cause)


def test_workers_share_the_responses(tmp_path):
    for rank in range(3):
        engine, worker_loss = Engine(FIXED), a_loss("grpo", TokenRecorder(Tokenizer(), rank, workers=3))
        data, *_ = an_update(rank, PolicyLoss.from_preset("grpo"), asked(tmp_path, step=1, sequences=4))
        engine.train_batch(data, worker_loss)
    counts = {path.stem: pd.read_parquet(path).sequence.nunique() for path in tmp_path.iterdir()}
    assert counts == {"1-0": 2, "1-1": 1, "1-2": 1}


def test_a_step_trained_again_replaces_its_file_and_others_stay(tmp_path):
    engine, worker_loss = Engine(FIXED), a_loss("grpo", TokenRecorder(Tokenizer()))
    loss = PolicyLoss.from_preset("grpo")

    def update(step: int, seed: int):
        engine.train_batch(an_update(seed, loss, asked(tmp_path, step))[0], worker_loss)

    for step, seed in ((2, 0), (2, 1), (4, 2), (4, 3)):
        update(step, seed)
    before = (tmp_path / "2.parquet").read_bytes()
    engine, worker_loss = Engine(FIXED), a_loss("grpo", TokenRecorder(Tokenizer()))  # gone on with from step 3
    update(4, seed=9)
    assert (tmp_path / "2.parquet").read_bytes() == before
    found = pd.read_parquet(tmp_path / "4.parquet")
    assert set(found["update"]) == {0} and found.sequence.str.startswith("00000009").all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.parquet", "4.parquet"]


def test_nothing_is_recorded_unless_asked_for(tmp_path, monkeypatch):
    class Untouched:
        def __getattr__(self, name):
            raise AssertionError(f"the recorder's {name} was used")

    worker_loss = a_loss("grpo", Untouched())
    monkeypatch.setattr(PolicyLoss, "diagnose", lambda *_: pytest.fail("diagnosed"))
    data, *_ = an_update(0, PolicyLoss.from_preset("grpo"), {"first_update": 0})
    Engine(FIXED).train_batch(data, worker_loss)
    # Workers that share their sequences with another have no recorder: that one writes.
    data, *_ = an_update(0, PolicyLoss.from_preset("grpo"), asked(tmp_path, step=1))
    Engine(FIXED).train_batch(data, a_loss("grpo", None))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said_and_training_goes_on(tmp_path, caplog, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    worker_loss = a_loss("grpo", TokenRecorder(Tokenizer()))
    data, *_ = an_update(0, PolicyLoss.from_preset("grpo"), asked(tmp_path, step=3))
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(os, "fsync", full)
        Engine(FIXED).train_batch(data, worker_loss)
    (message,) = caplog.messages
    assert f"{tmp_path / '3.parquet'} (No space left on device)" in message and "token_records.every=0" in message
    assert list(tmp_path.iterdir()) == []  # half a file neither


def test_which_steps_are_due():
    assert [step for step in range(1, 10) if is_due(step, 4)] == [1, 4, 8]
    assert [step for step in range(1, 4) if is_due(step, 1)] == [1, 2, 3]
    assert not any(is_due(step, 0) for step in range(1, 10))
