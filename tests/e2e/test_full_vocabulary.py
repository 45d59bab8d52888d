"""What reaches the loss in the real loop, against a plain recomputation in float64; and how methods act under stress."""

from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from trustregion.divergences import get_divergence
from trustregion.partitions import cell_divergence

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TEMPERATURE, K = 0.8, 5
# 16 updates a step, so that every region has tokens to block.
STRESS = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.optim.lr=2e-4",
    f"actor_rollout_ref.rollout.temperature={TEMPERATURE}", "trainer.total_training_steps=1",
]  # fmt: skip
BETA, DELTA = 0.05, 0.02
TOP_K_AND_ENTROPY = [
    "method=dppo_topk_tv", f"method.K={K}", "method.anchor=old", "method.region=[divergence_ball,entropy_band]",
    f"+method.beta_low={BETA}", f"+method.beta_high={BETA}", f"method.delta={DELTA}",
]  # fmt: skip
UNSYNCED = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=unsynced.UnsyncedWorkerExtension"


@pytest.fixture
def record(train, tmp_path):
    """record(*overrides) -> (run, folder of what `recorder` wrote)."""

    def record(*overrides):
        folder = tmp_path / "record"
        folder.mkdir()
        env = {"PYTHONPATH": str(Path(__file__).parent), "RECORD_TO": str(folder), "RECORD_WEIGHTS": "0 3"}
        return train(*STRESS, *overrides, "actor_rollout_ref.model.external_lib=recorder", env=env), folder

    return record


def test_entropies_and_cells_are_those_of_the_weights(record):
    # In the same run the rollout engine drops the weights of every sync but the first, which verl's check must show.
    run, folder = record(*TOP_K_AND_ENTROPY, "trainer.total_training_steps=2", UNSYNCED)
    synced, stale = run.column("training/rollout_probs_diff_mean")
    assert synced < 1e-5 and stale > 1e-3

    seen = torch.load(folder / "update-3-0-0.pt")
    live = seen["response_mask"].bool()
    old, new = (distributions(folder, n, seen, run) for n in (0, 3))
    in_single_precision = [distributions(folder, n, seen, run, torch.float32) for n in (0, 3)]

    def at_tokens(rows):  # in the order in which [live] takes tokens out of [B, T]
        return torch.cat(rows)[torch.cat([mask[: len(row)] for mask, row in zip(live, rows, strict=True)])]

    tokens = at_tokens([ids[-n:] for ids, n in zip(seen["input_ids"], seen["response_lengths"], strict=True)])
    old, new = at_tokens(old), at_tokens(new)
    for name, log_p in (("log_prob_old", old), ("log_prob", new)):
        torch.testing.assert_close(seen[name][live].double(), log_p.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)

    rho = (seen["entropy"] / seen["entropy_old"])[live].double()
    torch.testing.assert_close(rho, entropy(new) / entropy(old), rtol=1e-4, atol=0)

    # To 1e-6 and what the model's own float32 arithmetic leaves uncertain, which depends on how a batch is put together.
    def divergences(old, new):
        p, q = (cells(log_p.exp(), named, tokens) for log_p in (old, new))
        return {"tv": 0.5 * (p - q).abs().sum(-1), "kl": torch.xlogy(p, p / q).nan_to_num().sum(-1)}

    named = old.topk(K).indices
    exact, in_float32 = divergences(old, new), divergences(*(at_tokens(x) for x in in_single_precision))
    found = [seen[name][live] for name in ("cell_log_prob", "cell_log_prob_old")]
    for name in exact:
        error = (cell_divergence(*found, get_divergence(name)) - exact[name]).abs().max()
        plain = (in_float32[name] - exact[name]).abs().max()
        print(f"{name} up to {exact[name].max():.2g}: off by at most {error:.1e}, a plain pass in float32 by {plain:.1e}")
        assert error <= 1e-6 + 2 * plain
    tv = exact["tv"]

    # What is blocked follows from these numbers, and has no gradient at all; every other token has.
    ratio = (seen["log_prob"] - seen["log_prob_old"])[live]
    advantages = seen["advantages"][live]
    outward = (ratio * advantages > 0) & (tv > DELTA)
    drifted = (rho <= 1 - BETA) | (rho >= 1 + BETA)
    assert outward.any() and drifted.any() and not (outward | drifted).all()
    assert torch.equal(seen["active"][live], ~(outward | drifted))
    assert torch.equal(seen["gradient"][live] != 0, ~(outward | drifted) & (advantages != 0))
    assert not seen["gradient"][~live].any()


@pytest.mark.long
@pytest.mark.parametrize(("model", "tolerance"), [("tiny", 1e-5), ("smollm2_135m", 1e-4)])
def test_the_rollout_engine_and_the_trainer_name_the_same_tokens(record, model, tolerance):
    """On the weights of the first update, which both have: vLLM's most likely tokens, and those of the plain model."""
    temperature = 0.6 if model == "smollm2_135m" else TEMPERATURE
    run, folder = record(
        "method=dppo_topk_tv", f"method.K={K}", f"model={model}", f"actor_rollout_ref.rollout.temperature={temperature}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    )  # fmt: skip
    exact, plain = (empty_model(run).to(dtype) for dtype in (torch.float64, torch.float32))
    for model_ in (exact, plain):
        model_.load_state_dict(torch.load(folder / "weights-0.pt"))
    same, tokens, worst, uncertain, apart = 0, 0, 0.0, 0.0, 0.0
    for path in folder.glob("update-0-0-*.pt"):
        seen = torch.load(path)
        parts = (seen[name] for name in ("input_ids", "response_lengths", "cell_ids", "cells"))
        for ids, n, named, masses in zip(*parts, strict=True):
            with torch.no_grad():
                passes = [model_(ids[None]).logits[0, -n - 1 : -1].double() / temperature for model_ in (exact, plain)]
            theirs = named[-n - 1 : -1].long()
            at_exact, at_plain = (logits.log_softmax(-1).gather(1, theirs) for logits in passes)
            ours = passes[1].topk(K)
            same += int((theirs.sort(-1).values == ours.indices.sort(-1).values).sum())
            tokens += theirs.numel()
            worst = max(worst, float((masses[-n - 1 : -1, :K] - at_exact).abs().max()))
            uncertain = max(uncertain, float((at_plain - at_exact).abs().max()))
            apart = max(apart, float((masses[-n - 1 : -1, :K] - at_plain).abs().max()))
    print(
        f"{model}: {same} of {tokens} ids are the same; log-probs are off by at most {worst:.1e}, "
        f"those of a plain pass in float32 by {uncertain:.1e}, and the two are apart by at most {apart:.1e}"
    )
    assert tokens > 1000 and same >= 0.999 * tokens and worst <= tolerance + 2 * uncertain


@pytest.mark.long
@pytest.mark.parametrize("method", ["band_kl", "dppo_binary_tv", "dppo_topk_tv", "erc_dapo"])
def test_what_a_method_blocks_gets_no_gradient(record, method):
    run, folder = record(f"method={method}")
    assert run.rows[0]["trust/clip_fraction"] > 0
    blocked = 0
    for path in folder.glob("update-*.pt"):
        seen = torch.load(path)
        live = seen["response_mask"].bool()
        inert = live & ~seen["active"]
        assert not seen["gradient"][inert].any() and not seen["gradient"][~live].any()
        assert seen["gradient"][live & seen["active"] & (seen["advantages"] != 0)].all()
        blocked += int(inert.sum())
    assert blocked > 0


@pytest.mark.long
def test_where_everything_is_blocked_the_weights_stay(train):
    nothing_is_inside = ["method=erc_dapo", "method.beta_low=1e-30", "method.beta_high=1e-30"]
    no_decay = "actor_rollout_ref.actor.optim.weight_decay=0"
    run = train(*nothing_is_inside, no_decay, "trainer.total_training_steps=3")
    assert run.column("trust/blocked_by_entropy") == [1.0] * 3
    assert run.column("actor/grad_norm") == [0.0] * 3
    assert run.column("trust/log_ratio_abs_max") == [0.0] * 3  # the last updates of a step compute what the first did


def distributions(folder: Path, update: int, seen: dict, run, dtype=torch.float64) -> list[torch.Tensor]:
    """Log-probs of the whole vocabulary at every response token, from logits in `dtype`: a list by sequence of [T, V]."""
    model = empty_model(run).to(dtype)
    model.load_state_dict(torch.load(folder / f"weights-{update}.pt"))
    with torch.no_grad():
        return [
            (model(ids[None]).logits[0, -n - 1 : -1].double() / TEMPERATURE).log_softmax(-1)
            for ids, n in zip(seen["input_ids"], seen["response_lengths"], strict=True)
        ]


def empty_model(run):
    return AutoModelForCausalLM.from_pretrained(OmegaConf.load(run.folder / "config.yaml").actor_rollout_ref.model.path)


def entropy(log_p):
    return -(log_p.exp() * log_p).sum(-1)


def cells(p, named, tokens):
    """Masses of the named tokens, of the sampled one where it is not among them, and of the rest."""
    among = (named == tokens[:, None]).any(-1, keepdim=True)
    sampled = p.gather(1, tokens[:, None]).masked_fill(among, 0)
    parts = torch.cat([p.gather(1, named), sampled], -1)
    return torch.cat([parts, (1 - parts.sum(-1, keepdim=True)).clamp(min=0)], -1)
