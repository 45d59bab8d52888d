"""Binary, top-K and full divergences of the golden tokens, from logits."""

import pytest
import torch

from trustregion import binary_divergence, cell_divergence

from .helpers import golden_tokens


def golden_log_probs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = golden_tokens()["inputs"]
    logits = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("new_logits", "old_logits"))
    new, old = (x.log_softmax(-1) for x in logits)
    return new, old, torch.tensor(inputs["tokens"])


def union_cells(log_probs, old, tokens, K):
    """The layout of K+2 cells: the anchor's top K, the sampled token unless it is among them, the rest."""
    ids = old.topk(K).indices
    sampled = tokens[:, None]
    among = (ids == sampled).any(-1, keepdim=True)
    named = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, ids, True).scatter(-1, sampled, True)
    return torch.cat([
        log_probs.gather(-1, ids),
        log_probs.gather(-1, sampled).masked_fill(among, -torch.inf),
        log_probs.masked_fill(named, -torch.inf).logsumexp(-1, keepdim=True),
    ], -1)


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
