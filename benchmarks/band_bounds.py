"""What the bounds of a trust region cost, next to bisection and to closed forms in plain torch:

    python -m benchmarks.band_bounds --device cpu --threads 2

and writes benchmarks/results/band_bounds_<device>.csv.
"""

import argparse
import functools

import torch

from benchmarks.baselines import bisected_kl_bounds, chi2_bounds
from benchmarks.tables import compiled, median, rows, write
from trustregion import band_bounds
from trustregion.ops import describe, using

DELTA = 0.05
DIVERGENCES = ("kl", "reverse_kl", "tv", "chi2")
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)


def anchors(tokens: int, device: str) -> torch.Tensor:
    """Log-probs from -16 to -1e-7, evenly in their logarithm."""
    generator = torch.Generator().manual_seed(0)
    return -torch.exp(torch.rand(tokens, generator=generator) * 18.9 - 16.1).to(device)


def in_torch(log_prob, divergence):
    with using("torch"):
        return band_bounds(log_prob, divergence, DELTA)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe())

    x = anchors(1_000_000, args.device)
    runs = {"kl, bisection": lambda: bisected_kl_bounds(x, DELTA), "chi2, closed form": lambda: chi2_bounds(x, DELTA)}
    bisection, closed_form = compiled(bisected_kl_bounds), compiled(chi2_bounds)
    runs["kl, bisection, compiled"] = lambda: bisection(x, DELTA)
    runs["chi2, closed form, compiled"] = lambda: closed_form(x, DELTA)
    for divergence in DIVERGENCES:
        runs[f"{divergence}, ours"] = functools.partial(band_bounds, x, divergence, DELTA)
        runs[f"{divergence}, ours in torch"] = functools.partial(in_torch, x, divergence)
    table = rows(runs, args.device, args.repeats, tokens=len(x), dtype="float32")
    for size in SIZES:
        part = anchors(size, args.device)
        table += rows({"kl, ours": lambda part=part: band_bounds(part, "kl", DELTA)}, args.device, args.repeats,
                      tokens=size, dtype="float32, sizes")  # fmt: skip
    print(write(f"band_bounds_{args.device}", table))

    times = {way: median(table, way=way, dtype="float32") for way in runs}
    ours = times["kl, ours"]
    print(f"kl: {times['kl, bisection'] / ours:.0f} times faster than bisection (compiled: "
          f"{times['kl, bisection, compiled'] / ours:.1f}), {ours / times['chi2, closed form']:.1f} times the closed "
          f"form of chi2 (compiled: {ours / times['chi2, closed form, compiled']:.1f})")  # fmt: skip


if __name__ == "__main__":
    main()
