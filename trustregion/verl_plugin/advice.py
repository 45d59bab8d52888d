"""What is allowed but is hardly meant: said once before training. Imports no verl."""

from omegaconf import DictConfig


def advice(config: DictConfig) -> list[str]:
    """Sentences about a composed configuration of verl's trainer."""
    return [text for text in (_nothing_can_clip(config),) if text]


def _nothing_can_clip(config: DictConfig) -> str | None:
    actor = config.actor_rollout_ref.actor
    updates = -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    if updates > 1 or actor.policy_loss.method.get("anchor", "old") == "rollout":
        return None
    return (
        f"one update a batch (data.train_batch_size = {config.data.train_batch_size}, ppo_mini_batch_size = "
        f"{actor.ppo_mini_batch_size}, ppo_epochs = {actor.ppo_epochs}): the policy is its own anchor at every update, so "
        "that the ratio is 1 and no trust region can ever act. Choose a smaller actor_rollout_ref.actor."
        "ppo_mini_batch_size, or more ppo_epochs."
    )
