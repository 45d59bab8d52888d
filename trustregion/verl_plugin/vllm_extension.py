"""What vLLM's workers mix in (`rollout.engine_kwargs.vllm.worker_extension_cls`) when they run on a CPU."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from trustregion.verl_plugin.replacements import keep_vllm_linear_weights


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's own extension; vLLM creates it before it loads the model, which is in time for the replacement."""

    def __new__(cls, **kwargs):
        keep_vllm_linear_weights()
        return super().__new__(cls, **kwargs)

