"""What a policy loss costs, forward, statistics and backward, next to verl's `vanilla` loss on the same tensors:

    python -m benchmarks.policy_loss --device cpu --threads 2

and writes benchmarks/results/policy_loss_<device>.csv.
"""

import argparse
import functools

import torch

from benchmarks.baselines import vanilla_loss
from benchmarks.tables import compiled, median, rows, write
from trustregion import PolicyLoss, TokenBatch
from trustregion.ops import describe, using

METHODS = ("grpo", "clip_higher", "dcpo", "band_kl", "band_reverse_kl", "band_tv", "band_chi2", "band_kl_preserve",
           "band_kl_cispo", "dppo_binary_kl", "dppo_binary_tv", "gppo", "cispo")  # fmt: skip
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)


def batch(tokens: int, device: str) -> tuple[torch.Tensor, ...]:
    """As in training: log-probs of text, off the anchor by a tenth; a tenth of the positions is padding."""
    generator = torch.Generator().manual_seed(0)
    shape = (10, tokens // 10)
    log_prob_old = -torch.exp(torch.rand(shape, generator=generator) * 18.9 - 16.1)
    log_prob = (log_prob_old + 0.1 * torch.randn(shape, generator=generator)).clamp(max=0)
    advantages = torch.randn(shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.9).float()
    return tuple(x.to(device) for x in (log_prob, log_prob_old, advantages, mask))


def ours(loss: PolicyLoss, mode: str, log_prob, log_prob_old, advantages, mask):
    with using(mode):
        out = loss(TokenBatch(log_prob, log_prob_old, advantages, mask))
    return out.token_loss.sum() / mask.sum()


def forward_backward(loss, tensors):
    log_prob, *others = tensors
    log_prob = log_prob.detach().requires_grad_()
    loss(log_prob, *others).backward()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe())

    def step(loss, tensors):
        return functools.partial(forward_backward, loss, tensors)

    tensors = batch(1_000_000, args.device)
    runs = {"verl's vanilla": step(vanilla_loss, tensors), "verl's vanilla, compiled": step(compiled(vanilla_loss), tensors)}
    for name in METHODS:
        loss = PolicyLoss.from_preset(name)
        runs[name] = step(functools.partial(ours, loss, ""), tensors)
        runs[f"{name} in torch"] = step(functools.partial(ours, loss, "torch"), tensors)
    table = rows(runs, args.device, args.repeats, tokens=1_000_000, series="methods")
    for size in SIZES:
        loss = functools.partial(ours, PolicyLoss.from_preset("band_kl"), "")
        sized = batch(size, args.device)
        table += rows({"band_kl": step(loss, sized), "verl's vanilla": step(vanilla_loss, sized)}, args.device,
                      args.repeats, tokens=size, series="sizes")  # fmt: skip
    print(write(f"policy_loss_{args.device}", table))

    vanilla = median(table, way="verl's vanilla", series="methods")
    for name in METHODS:
        print(f"{name}: {median(table, way=name, series='methods') / vanilla:.2f} of verl's vanilla")


if __name__ == "__main__":
    main()
