"""Functions of verl and vLLM that have to be replaced, all of them, each with the reason and the versions it is for.

tests/verl_plugin/test_replacements.py fails when one of them is no longer needed.
"""

import logging


def keep_vllm_linear_weights():
    """vLLM's CPU backend (0.28): keep a linear layer's weight after packing it.

    `dispatch_cpu_unquantized_gemm` packs each weight for oneDNN and then replaces it by an empty tensor, so that the
    first weight sync has nothing to load into. Kept, verl's sync loads the weight and its
    `process_weights_after_loading` packs it anew. Costs the unpacked weights' memory once more.
    """
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "keeps_weight", False):
        return

    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        return packing(layer, remove_weight=False)

    dispatch_cpu_unquantized_gemm.keeps_weight = True
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def let_separate_trainer_log():
    """verl 0.9.1: `PPOTrainerSeparateAsync._setup` passes print's `flush=True` to a logger, a TypeError that ends every run
    with `hybrid_engine=False` at its start. Its module's logger drops the argument here."""
    from verl.trainer.ppo.v1 import trainer_separate_async

    if not isinstance(trainer_separate_async.logger, _WithoutFlush):
        trainer_separate_async.logger = _WithoutFlush(trainer_separate_async.logger, {})


class _WithoutFlush(logging.LoggerAdapter):
    def process(self, msg, kwargs):
        kwargs.pop("flush", None)
        return msg, kwargs
