"""The one policy loss that is registered with verl; its region and surrogate come from the configuration."""

from verl.trainer.ppo.core_algos import agg_loss

from trustregion import TokenBatch
from trustregion.verl_plugin.metrics import to_scalars
from trustregion.verl_plugin.names import SYNC


def trust_region_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    """A policy loss as verl calls it (`register_policy_loss`).

    Args:
        old_log_prob: log-probs of the sampled tokens under the anchor policy, [B, T], in nats. In bypass mode verl puts
            the rollout engine's here (`method.anchor=rollout`).
        log_prob: the same under the policy being trained, differentiable, [B, T].
        advantages: [B, T]. response_mask: [B, T], true where a token counts.
        loss_agg_mode: how verl turns token losses into one number.
        config: the actor's configuration; `config.policy_loss` is a TrustRegionLossConfig.
        rollout_is_weights: importance weights that multiply the token losses, [B, T] or [B, 1], or None.

    Returns:
        The aggregated loss (scalar) and this micro-batch's mergeable statistics by name.

    Raises:
        ValueError: a live token's `old_log_prob` is not a log-probability; the mode divides by a width that depends on
            padding; or the method needs what verl's own trainers do not carry.
    """
    if loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
        raise ValueError(
            "actor.loss_agg_mode = 'seq-mean-token-sum-norm' without actor.loss_scale_factor would divide by the width "
            "that a micro-batch happens to be padded to. Set actor.loss_scale_factor, for example to "
            "data.max_response_length."
        )
    policy_loss = config.policy_loss
    if policy_loss.loss.requires and not policy_loss.parts:
        raise ValueError(
            f"the method needs {' and '.join(sorted(policy_loss.loss.requires))} of every token, and verl's own trainers "
            f"carry none: start with python -m recipes.train, whose trainer ({SYNC}) does."
        )
    batch = TokenBatch(
        log_prob=log_prob,
        log_prob_old=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        weights=rollout_is_weights,
        **policy_loss.parts,
    )
    out = policy_loss.loss(batch)
    if policy_loss.observe is not None:
        policy_loss.observe(policy_loss.loss, batch)
    loss = agg_loss(
        loss_mat=out.token_loss, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    return loss, to_scalars(out.metrics)
