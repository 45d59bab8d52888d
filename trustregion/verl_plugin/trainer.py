"""verl's synchronous trainer, repeatable, with exact trust-region metrics, and unable to wait for a dead server."""

import ray
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from trustregion.verl_plugin.metrics import pop_summary
from trustregion.verl_plugin.names import TRAINER_MODE
from trustregion.verl_plugin.replay_buffer import OrderedReplayBuffer
from trustregion.verl_plugin.rollout_health import RolloutHealth
from trustregion.verl_plugin.worker import TrustRegionTrainingWorker, TrustRegionWorker


@register_trainer(TRAINER_MODE)
class TrustRegionTrainer(PPOTrainerSync):
    """`trainer.v1.trainer_mode=trust_region_sync`."""

    def __init__(self, config):
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares with this literal in several places
        super().__init__(config)
        self._drawn_in_step = (0, 0)  # (training step, prompts drawn in it)

    # ---- the workers ------------------------------------------------------------------------------------------------
    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = TrustRegionTrainingWorker if role == Role.Critic else TrustRegionWorker
            self.role_worker_mapping[role] = ray.remote(worker)

    # ---- repeatable: the same prompts, uids and order for the same seed -----------------------------------------------
    def _build_replay_buffer(self):
        return OrderedReplayBuffer.adopt(
            super()._build_replay_buffer(), check_health=lambda now=False: self.health.check(now)
        )

    def _next_train_batch(self, num_prompts=None):
        batch = super()._next_train_batch(num_prompts)
        step, drawn = self._drawn_in_step
        drawn = drawn if step == self.global_steps else 0
        # verl draws a random uuid for each prompt. Ours sorts as it was drawn; "_" separates verl's key fields.
        uids = [f"{self.global_steps:08d}-{drawn + i:06d}" for i in range(len(batch))]
        tu.assign_non_tensor_stack(batch, "uid", uids)
        self._drawn_in_step = (self.global_steps, drawn + len(batch))
        return batch

    # ---- dead servers are noticed ------------------------------------------------------------------------------------
    def on_init_end(self):
        self.health = RolloutHealth(self.llm_server_manager.get_replicas())
        self._sync_weights()

    def on_step_end(self):
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._sync_weights()

    def _sync_weights(self):
        # What verl's checkpoint manager does for colocated workers, but without its unbounded wait.
        self.health.wait(self.actor_rollout_wg.update_weights(global_steps=self.global_steps, mode="naive"))

    # ---- exact metrics -----------------------------------------------------------------------------------------------
    def _update_actor(self, batch, metrics):
        batch = super()._update_actor(batch, metrics)
        metrics.update(pop_summary(metrics))
        return batch
