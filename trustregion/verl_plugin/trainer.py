"""verl's trainers with what a method needs of them: schedules, the anchor's statistics and exact metrics;
prompts in a fixed order; no waiting for dead processes; and whole checkpoints."""

import json
import os
import warnings

import ray
import transfer_queue as tq
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from trustregion.verl_plugin.advice import advice
from trustregion.verl_plugin.checkpointing import WholeCheckpoints
from trustregion.verl_plugin.config import method_of
from trustregion.verl_plugin.full_vocabulary import CELL_IDS, CELLS, REQUEST
from trustregion.verl_plugin.metrics import pop_stats, summarize
from trustregion.verl_plugin.names import COLOCATE_ASYNC, SEPARATE_ASYNC, SYNC
from trustregion.verl_plugin.replacements import let_separate_trainer_log
from trustregion.verl_plugin.replay_buffer import OrderedReplayBuffer
from trustregion.verl_plugin.rollout_cells import anchor_cells
from trustregion.verl_plugin.health import Health, ProcessDied
from trustregion.verl_plugin.rollout_server import TOP_IDS, TOP_LOG_PROBS
from trustregion.verl_plugin.schedule import TrainerSchedule
from trustregion.verl_plugin.token_records import FOLDER, SEQUENCE, is_due
from trustregion.verl_plugin.worker import TrustRegionTrainingWorker, TrustRegionWorker


class TrustRegionTrainer:
    """Mixin in front of one of verl's trainers."""

    verls_mode: str  # verl's own name of that trainer, which it compares with in several places

    def __init__(self, config):
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verls_mode
        for sentence in advice(config):
            warnings.warn(sentence, stacklevel=2)
        self.method = method_of(config)
        self.schedule = TrainerSchedule(self.method)
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

    # ---- dead processes are noticed ----------------------------------------------------------------------------------
    def on_init_end(self):
        workers = self.actor_rollout_wg.workers
        self.health = Health(
            [replica for manager in self._rollout_server_managers() for replica in manager.get_replicas()],
            {f"FSDP worker {rank} of {len(workers)}": worker for rank, worker in enumerate(workers)},
        )
        self.health.guard(super().on_init_end)  # these two give the servers their weights, and wait without end

    def on_step_end(self):
        self.health.guard(super().on_step_end)

    def fit(self, agent_loop_manager):
        try:
            super().fit(agent_loop_manager)
        except ProcessDied:
            raise
        except Exception as error:
            self.health.name_the_dead(error)
            raise

    # ---- the anchor's pass and the update ----------------------------------------------------------------------------
    def _compute_old_log_prob(self, batch, metrics):
        request = {"entropy": self.method.entropy_every_k_steps > 0, "topk": self.method.topk}
        batch.extra_info[REQUEST] = json.dumps(request)
        batch = super()._compute_old_log_prob(batch, metrics)
        batch.extra_info.pop(REQUEST, None)  # the same batch goes to the reference model next
        if self.method.anchor == "rollout" and self.method.topk:
            self._put_rollout_cells(batch)
        return batch

    def _put_rollout_cells(self, batch):
        fields = [TOP_IDS, TOP_LOG_PROBS, "old_log_probs", "responses", "prompts"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        *by_token, prompts = (data[name].unbind() for name in fields)
        cell_ids, cells = anchor_cells(*by_token, [len(prompt) for prompt in prompts])
        cells = tu.get_tensordict({CELL_IDS: cell_ids, CELLS: cells})
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=cells)

    def _update_actor(self, batch, metrics):
        policy_loss = self.config.actor_rollout_ref.actor.policy_loss
        request = {
            "entropy_every": self.method.entropy_every_k_steps,
            "at_cells": self.method.topk > 0,
            "first_update": (self.global_steps - 1) * self._updates_per_step,
            "correct_reward": policy_loss.correct_reward if policy_loss.positive_nll_coef else None,
            "values": self.schedule.values(self.global_steps),
        }
        records = self.config.token_records
        if is_due(self.global_steps, records.every):
            folder = os.path.join(self.config.run_dir, FOLDER)
            request["token_records"] = {"step": self.global_steps, "folder": folder, "sequences": records.sequences}
            names = tu.get_tensordict({SEQUENCE: list(batch.keys)})
            batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=names)
        batch.extra_info[REQUEST] = json.dumps(request)
        batch = super()._update_actor(batch, metrics)
        self._stats.append(pop_stats(metrics))
        return batch

    def step(self, metrics, timing_raw):
        self._stats = []
        batch = super().step(metrics, timing_raw)
        summary = summarize(self._stats)
        metrics.update(summary | self.schedule.observe(summary))
        return batch

    @property
    def _updates_per_step(self) -> int:
        actor = self.config.actor_rollout_ref.actor
        return self.config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs

    def _save_checkpoint(self):
        super()._save_checkpoint()
        self.schedule.save(os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}"))

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if self.global_steps:
            newest = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            chosen = self.config.trainer.resume_from_path
            self.schedule.load(chosen if self.config.trainer.resume_mode == "resume_path" else newest)


@register_trainer(SYNC)
class TrustRegionSync(WholeCheckpoints, TrustRegionTrainer, PPOTrainerSync):
    """`trainer.v1.trainer_mode=trust_region_sync`: rollouts and updates take turns."""

    verls_mode = "sync"


@register_trainer(COLOCATE_ASYNC)
class TrustRegionColocateAsync(WholeCheckpoints, TrustRegionTrainer, PPOTrainerColocateAsync):
    """`trainer.v1.trainer_mode=trust_region_colocate_async`: what is not finished when a batch is goes on after the update."""

    verls_mode = "colocate_async"


@register_trainer(SEPARATE_ASYNC)
class TrustRegionSeparateAsync(WholeCheckpoints, TrustRegionTrainer, PPOTrainerSeparateAsync):
    """`trainer.v1.trainer_mode=trust_region_separate_async`: rollouts go on beside the updates, on devices of their own."""

    verls_mode = "separate_async"

    def _setup(self):
        let_separate_trainer_log()
        super()._setup()
