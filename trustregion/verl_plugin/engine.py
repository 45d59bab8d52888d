"""FSDP2 as verl has it, for parameters that live on a CPU."""

from unittest import mock

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuFSDPEngine(FSDPEngineWithLMHead):
    """verl registers its FSDP engines for cuda and npu only; FSDP2 over gloo runs them on a CPU unchanged."""

    def _build_fsdp_module(self, module):
        # verl offloads every forward-only engine (the KL reference) to pinned host memory, and pinning needs an
        # accelerator. On a CPU there is nothing to offload: build the reference as the actor is built.
        with mock.patch.dict(self.engine_config.__dict__, forward_only=False):
            return super()._build_fsdp_module(module)
