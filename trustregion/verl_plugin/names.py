"""The names under which verl finds our parts: here alone in Python, and without an import, for programs that check a
configuration before verl is loaded. configs/train.yaml has to repeat them."""

LOSS_NAME = "trust_region"  # actor_rollout_ref.actor.policy_loss.loss_mode
LOSS_CONFIG = "trustregion.verl_plugin.config.TrustRegionLossConfig"  # actor_rollout_ref.actor.policy_loss._target_
# trainer.v1.trainer_mode
SYNC = "trust_region_sync"
COLOCATE_ASYNC = "trust_region_colocate_async"
SEPARATE_ASYNC = "trust_region_separate_async"
AGENT_LOOP = "seeded_single_turn"  # actor_rollout_ref.rollout.agent.default_agent_loop
