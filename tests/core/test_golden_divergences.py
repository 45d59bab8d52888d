"""Binary, top-K and full divergences of the golden tokens, from logits."""

import pytest
import torch

from trustregion import binary_divergence, cell_divergence

from .helpers import golden_tokens, reference_cells


def golden_log_probs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = golden_tokens()["inputs"]
    logits = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("new_logits", "old_logits"))
    new, old = (x.log_softmax(-1) for x in logits)
    return new, old, torch.tensor(inputs["tokens"])


def union_cells(log_probs, old, tokens, K):
    """The cells of the anchor's top K."""
    return reference_cells(log_probs, tokens, old.topk(K).indices)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("partition", ["binary", "topk5_union", "topk20_union", "full"])
def test_divergences_equal_golden_values(partition, divergence):
    new, old, tokens = golden_log_probs()
    if partition == "binary":
        sampled = tokens[:, None]
        ours = binary_divergence(new.gather(-1, sampled), old.gather(-1, sampled), divergence)[:, 0]
    elif partition == "full":
        ours = cell_divergence(new, old, divergence)
    else:
        K = int(partition.removeprefix("topk").removesuffix("_union"))
        ours = cell_divergence(union_cells(new, old, tokens, K), union_cells(old, old, tokens, K), divergence)
    golden = torch.tensor(golden_tokens()["expected"]["divergence"][partition][divergence], dtype=torch.float64)
    torch.testing.assert_close(ours, golden, rtol=1e-12, atol=1e-15)
