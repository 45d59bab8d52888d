"""verl's FSDP engines with statistics of the whole vocabulary, and FSDP2 for parameters that live on a CPU.

On GPUs, verl's workers choose ours by VERL_ENGINE_VENDOR=trustregion, which `recipes.train` sets.
"""

import copy

from tensordict import NonTensorStack
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from trustregion.verl_plugin.full_vocabulary import FullVocabulary


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor="trustregion"
)
class TrustRegionFSDPEngine(FullVocabulary, FSDPEngineWithLMHead):
    """verl's engine, which computes entropies and cells along with the log-probs where a method needs them."""


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuFSDPEngine(FullVocabulary, FSDPEngineWithLMHead):
    """verl registers its FSDP engines for cuda and npu only; FSDP2 over gloo runs them on a CPU unchanged."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        # verl moves the micro-batch to the device. That does nothing to tensors here, but it copies the objects that
        # come with every sample (prompt text, reward rule, ...), which takes longer than a small model's forward pass
        # and which no text model reads.
        objects = [key for key in micro_batch.keys() if isinstance(micro_batch.get(key), NonTensorStack)]
        return super().forward_step(micro_batch.exclude(*objects), loss_function, forward_only)

    def _build_fsdp_module(self, module):
        # verl offloads a forward-only engine (the KL reference) to pinned host memory, and pinning needs an
        # accelerator. On a CPU there is nothing to offload: the reference is built as the actor is.
        config = self.engine_config
        self.engine_config = copy.copy(config)
        object.__setattr__(self.engine_config, "forward_only", False)  # verl's configs refuse plain assignment
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config
