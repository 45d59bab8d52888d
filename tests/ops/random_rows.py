"""Random rows of logits and sampled tokens."""

import torch


def random_logits(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def random_ids(*shape, V):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))
