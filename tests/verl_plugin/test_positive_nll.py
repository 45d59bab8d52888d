"""The likelihood of correct responses: what it counts, and that no split changes it."""

import pytest
import torch

from trustregion import ConfigError
from trustregion.presets import read_preset

pytest.importorskip("verl")
from verl.utils import tensordict_utils as tu  # noqa: E402

from trustregion.verl_plugin.config import TrustRegionLossConfig  # noqa: E402
from trustregion.verl_plugin.policy_loss import trust_region_loss  # noqa: E402
from trustregion.verl_plugin.positive_nll import TOKENS, assign_token_count, positive_nll  # noqa: E402

PROMPTS, RESPONSES, REWARDS = (2, 3, 1, 2), (3, 1, 4, 2), (1.0, 0.0, 1.0, 0.2)


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch_of(rows: list[int], dp_size: int = 1):
    """A (micro-)batch of some of four sequences, and the model's log-probs for them."""
    generator = torch.Generator().manual_seed(0)
    log_probs = [-torch.rand(p + r, generator=generator) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    masks = [torch.ones(r, dtype=torch.int64) for r in RESPONSES]
    masks[2][1] = 0  # a tool's token
    scores = [torch.zeros(r).index_fill(0, torch.tensor(r - 1), s) for r, s in zip(RESPONSES, REWARDS, strict=True)]
    data = tu.get_tensordict(
        {
            "prompts": nested(torch.zeros(PROMPTS[i], dtype=torch.int64) for i in rows),
            "responses": nested(torch.zeros(RESPONSES[i], dtype=torch.int64) for i in rows),
            "response_mask": nested(masks[i] for i in rows),
            "rm_scores": nested(scores[i] for i in rows),
        },
        {"dp_size": dp_size},
    )
    return nested(log_probs[i] for i in rows), data


def test_it_is_the_mean_over_tokens_of_correct_responses():
    log_probs, data = batch_of([0, 1, 2, 3])
    assign_token_count(data, correct_reward=1.0, group=None)
    first, third = log_probs[0][1:4], log_probs[2][0:4][torch.tensor([True, False, True, True])]
    assert tu.get_non_tensor_data(data, TOKENS, None) == 6
    torch.testing.assert_close(positive_nll(log_probs, data, 1.0), -torch.cat([first, third]).mean())
    assign_token_count(data, correct_reward=0.2, group=None)
    assert tu.get_non_tensor_data(data, TOKENS, None) == 8


def test_no_split_into_micro_batches_or_workers_changes_it():
    log_probs, data = batch_of([0, 1, 2, 3])
    assign_token_count(data, 1.0, None)
    whole = positive_nll(log_probs, data, 1.0)
    for groups in ([[[0], [1, 2], [3]]], [[[0, 3]], [[1], [2]]]):
        total = torch.zeros(())
        for worker in groups:
            for rows in worker:
                log_probs, data = batch_of(rows, dp_size=len(groups))
                tu.assign_non_tensor(data, **{TOKENS: 6})
                total += positive_nll(log_probs, data, 1.0) / len(groups)
        torch.testing.assert_close(total, whole)


def test_without_a_correct_response_it_is_zero():
    log_probs, data = batch_of([1, 3])
    assign_token_count(data, 1.0, None)
    assert positive_nll(log_probs, data, 1.0) == 0


@pytest.mark.parametrize("wrong", [{"positive_nll_coef": -1}, {"positive_nll_coef": "much"}, {"correct_reward": float("nan")}])
def test_its_numbers_are_checked(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"policy_loss.{name} = "):
        TrustRegionLossConfig(method=read_preset("grpo"), **wrong)


def test_verls_own_trainers_are_refused_where_they_carry_too_little():
    from verl.workers.config import ActorConfig

    x = torch.full((1, 2), -1.0)
    for method, needed in (("erc_dapo", "entropy"), ("dppo_topk_tv", "cells")):
        config = ActorConfig(
            strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True,
            policy_loss=TrustRegionLossConfig(method=read_preset(method)),
        )
        with pytest.raises(ValueError, match=rf"needs {needed} of every token.*recipes.train"):
            trust_region_loss(x, x, x, torch.ones(1, 2), config=config)
