"""What kernels are compared with: the plain torch that people write today."""

import torch
from torch import Tensor


def bisected_kl_bounds(log_prob_old: Tensor, delta: float, steps: int = 50) -> tuple[Tensor, Tensor]:
    """Bounds of the ratio by bisection in ratio space, as BandPO's own operator does it: 50 steps a side."""
    p = log_prob_old.exp()

    def divergence(ratio: Tensor) -> Tensor:
        q = (ratio * p).clamp(max=1 - 1e-7)
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    def bisect(inside: Tensor, outside: Tensor) -> Tensor:
        for _ in range(steps):
            middle = 0.5 * (inside + outside)
            within = divergence(middle) <= delta
            inside, outside = torch.where(within, middle, inside), torch.where(within, outside, middle)
        return inside

    one = torch.ones_like(p)
    return bisect(one, torch.zeros_like(p)).log(), bisect(one, 1 / p).log()


def chi2_bounds(log_prob_old: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """1 - a and 1 + a, a = sqrt(delta (1-p)/p), clamped into [0, 1/p]."""
    p = log_prob_old.exp()
    a = (delta * (1 - p) / p).sqrt()
    return (1 - a).clamp(min=0).log(), torch.minimum(1 + a, 1 / p).log()


def vanilla_loss(log_prob: Tensor, log_prob_old: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """verl's own PPO loss, metrics included as they are part of it, averaged over tokens."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)
    loss, _ = get_policy_loss_fn("vanilla")(log_prob_old, log_prob, advantages, response_mask, "token-mean", config)
    return loss
