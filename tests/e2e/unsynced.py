"""The negative control: a rollout engine that takes the first weight sync and drops the others."""

from trustregion.verl_plugin.vllm_extension import CpuWorkerExtension


class UnsyncedWorkerExtension(CpuWorkerExtension):
    def update_weights_from_ipc(self, *args, **kwargs):
        super().update_weights_from_ipc(*args, **kwargs)
        self.drops_weights = True

    def _update_weights(self, weights, peft_config, base_sync_done):
        if not getattr(self, "drops_weights", False):
            super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
