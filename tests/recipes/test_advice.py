"""Configurations that train but cannot do what they are for are pointed out."""

import pytest

from recipes.train import compose
from trustregion.verl_plugin.advice import advice


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "expected"), [
    ([], False),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=16"], True),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.ppo_epochs=2"], False),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=16", "method=dppo_binary_tv"], False),
])
def test_one_update_a_batch_cannot_clip(overrides, expected):
    found = advice(compose(["name=x", *overrides]))
    assert len(found) == expected
    assert all("ppo_mini_batch_size = 16" in text and "no trust region can ever act" in text for text in found)
