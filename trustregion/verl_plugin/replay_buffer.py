"""verl's replay buffer, sampled in a fixed order and polled often."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_SECONDS = 0.1  # verl's 2.0 has no configuration key and dominates the steps of a small model


class OrderedReplayBuffer(ReplayBuffer):
    """Hands out trajectories by prompt, rollout and turn instead of by which of them finished first."""

    @classmethod
    def adopt(cls, buffer: ReplayBuffer, check_health) -> "OrderedReplayBuffer":
        """`buffer`, as verl has configured it (group filtering included), with this class's sampling.

        `check_health(now=False)` raises when the rollouts waited for can never come.
        """
        ordered = cls.__new__(cls)
        ordered.__dict__.update(buffer.__dict__, poll_interval=POLL_SECONDS, check_health=check_health)
        return ordered

    def sample(self, *args, **kwargs):
        try:
            return super().sample(*args, **kwargs)
        finally:
            # Rollouts that failed count as done in verl: a batch that lacks them, or an error about that, may only be
            # the trace of a dead server. Name it then.
            self.check_health(now=True)

    def _wait_for_next_poll(self, partition_id, last_debug_time):
        self.check_health()
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
        # verl sorts a set by step alone: which prompts of a step are left over would depend on how strings hash.
        return super()._select_prompt_uids(partition_id, sorted(sampleable_keys), batch_size)

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        def order(item):
            uid, session, turn = item[0].rsplit("_", 2)
            return uid, int(session), int(turn)

        return super()._materialize_batch(
            partition_id, selected_prompt_uids, dict(sorted(partition_snapshot.items(), key=order))
        )
