"""Each replaced function: that the replacement works, and that it is still needed."""

import inspect

import pytest
import torch

pytestmark = pytest.mark.slow  # importing vLLM takes seconds
pytest.importorskip("vllm")


def packed_weight(dispatch) -> torch.Tensor:
    layer = torch.nn.Linear(64, 64, bias=False)
    layer.weight.requires_grad_(False)
    dispatch(layer, remove_weight=True)
    return layer.weight


def test_vllm_still_drops_linear_weights_and_the_replacement_keeps_them(monkeypatch):
    from vllm.model_executor.layers import utils

    from trustregion.verl_plugin.replacements import keep_vllm_linear_weights

    original = utils.dispatch_cpu_unquantized_gemm
    assert packed_weight(original).numel() == 0, "vLLM keeps the weight by itself: remove keep_vllm_linear_weights"
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", original)
    keep_vllm_linear_weights()
    keep_vllm_linear_weights()  # twice is once
    assert packed_weight(utils.dispatch_cpu_unquantized_gemm).shape == (64, 64)


def test_verls_separate_trainer_still_passes_flush_to_its_logger_which_drops_it():
    import logging

    from verl.trainer.ppo.v1 import trainer_separate_async

    from trustregion.verl_plugin.replacements import let_separate_trainer_log

    text = inspect.getsource(trainer_separate_async.PPOTrainerSeparateAsync._setup)
    assert "flush=True" in text, "verl no longer does: remove let_separate_trainer_log"
    with pytest.raises(TypeError):
        logging.Logger("plain").warning("words", flush=True)
    let_separate_trainer_log()
    let_separate_trainer_log()  # twice is once
    wrapped = trainer_separate_async.logger
    assert isinstance(wrapped.logger, logging.Logger)
    assert wrapped.process("words", {"flush": True, "stacklevel": 2}) == ("words", {"stacklevel": 2})
