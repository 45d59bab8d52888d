"""verl's replay buffers, sampled in a fixed order, polled often, and with their failures counted."""

from collections import Counter

POLL_SECONDS = 0.1  # verl's 2.0 has no configuration key and dominates the steps of a small model
FAILED_PROMPTS = "rollout_failure/prompts"  # after training/, or validation/ for the validations since the last step


class OrderedReplayBuffer:
    """Mixin in front of one of verl's replay buffers: hands out trajectories by prompt, rollout and turn instead of by
    which of them finished first."""

    @classmethod
    def adopt(cls, buffer, check_health) -> "OrderedReplayBuffer":
        """`buffer`, of the class that verl has chosen (synchronous, asynchronous, a user's own), with this mixin.

        `check_health(now=False)` raises when the rollouts waited for can never come.
        """
        buffer.__class__ = type(f"Ordered{type(buffer).__name__}", (cls, type(buffer)), {})
        buffer.poll_interval, buffer.check_health, buffer.failed = POLL_SECONDS, check_health, Counter()
        return buffer

    def sample(self, global_steps, partition_id, batch_size):
        """A batch, and metrics. verl logs an error of the agent loop or of the reward function and goes on without the
        response: here the metrics count the prompts that lack some.

        Raises:
            RuntimeError: all responses failed.
        """
        try:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
        except RuntimeError as error:
            if "no materializable trajectories" not in str(error):
                raise
            raise RuntimeError(
                f"step {global_steps}: every response failed with an error in the agent loop or in the reward function, "
                "which the log has below `Error in _run_prompt`."
            ) from error
        finally:
            # Rollouts that failed count as done in verl: a batch that lacks them, or an error about that, may only be
            # the trace of a dead server. Name it then.
            self.check_health(now=True)
        if partition_id == "train":  # verl drops the metrics of the other
            metrics |= {f"{self._metrics_prefix(of)}/{FAILED_PROMPTS}": self.failed.pop(of, 0) for of in ("train", "val")}
        return batch, metrics

    def _wait_for_next_poll(self, partition_id, last_debug_time):
        self.check_health()
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _evict_terminal_groups(self, global_steps, partition_id, eviction_reasons):
        *_, failed, _counts = eviction_reasons  # groups that are replaced
        self.failed[partition_id] += len(failed)
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
        # verl sorts a set by step alone: which prompts of a step are left over would depend on how strings hash.
        return super()._select_prompt_uids(partition_id, sorted(sampleable_keys), batch_size)

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        def order(item):
            uid, session, turn = item[0].rsplit("_", 2)
            return uid, int(session), int(turn)

        self.failed[partition_id] += len(self.failure_keys[partition_id].intersection(selected_prompt_uids))
        return super()._materialize_batch(
            partition_id, selected_prompt_uids, dict(sorted(partition_snapshot.items(), key=order))
        )
