"""Each replaced function: that the replacement works, and that it is still needed."""

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
