"""Statistics of a loss call that merge exactly: sums, counts and maxima, never means of means.

Micro-batches and workers each compute theirs; merged, they give what one call over all tokens would have given. Each
metric is explained in docs/metrics.md.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trustregion.batch import Tokens
from trustregion.partitions import binary_divergence
from trustregion.regions import Verdict
from trustregion.surrogates import MAX_LOG_RATIO, is_outward

# Buckets of the anchor's probability of the sampled token, which tokens are clipped in very different shares.
BUCKETS = (0.0, 0.01, 0.2, 0.5, 0.8, 1.0)
BUCKET_NAMES = tuple(f"{low:g}-{high:g}" for low, high in zip(BUCKETS, BUCKETS[1:], strict=False))
# Percentiles come from counts in bins, which merge exactly. Divergence: 10 bins a decade.
DIVERGENCE_EDGES = tuple(-8 + i / 10 for i in range(101))  # log10
# Entropy ratio: bins 0.3 % wide at 1, 0.5 % at 1.05, and wider away from it, up to a factor of 100.
ENTROPY_RATIO_EDGES = tuple(0.03 * math.sinh(5.727 * (i - 64) / 64) for i in range(129))  # natural log
MAX_ENTROPY_RATIO = 100.0


@dataclass(frozen=True)
class LossStats:
    """Mergeable statistics of one or more loss calls. Every value is a float64 tensor on the batch's device.

    Args:
        sums: by name, what merges by addition (`tokens` is the number of live tokens); numbers, or 1-d counts by bin.
        maxima: by name, what merges by maximum; numbers >= 0.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def merge(self, *others: "LossStats") -> "LossStats":
        """The statistics of all tokens of `self` and `others` together."""
        parts = (self, *others)
        return LossStats(
            sums={name: torch.stack([part.sums[name] for part in parts]).sum(0) for name in self.sums},
            maxima={name: torch.stack([part.maxima[name] for part in parts]).amax(0) for name in self.maxima},
        )

    def flatten(self) -> dict[str, Tensor]:
        """One flat dict of numbers, `sum/<name>`, `sum/<name>.<bin>` and `max/<name>`: the prefix says how to reduce."""
        flat = {}
        for name, value in self.sums.items():
            if value.dim():
                flat |= {f"sum/{name}.{i:03d}": count for i, count in enumerate(value.unbind())}
            else:
                flat[f"sum/{name}"] = value
        return flat | {f"max/{name}": value for name, value in self.maxima.items()}

    @classmethod
    def unflatten(cls, flat: Mapping[str, Tensor | float]) -> "LossStats":
        """The inverse of `flatten`, of tensors or of numbers; other keys are ignored."""
        sums, maxima, bins = {}, {}, {}
        for key, value in flat.items():
            value = torch.as_tensor(value, dtype=torch.float64)
            kind, _, name = key.partition("/")
            if kind == "sum" and (of_bin := re.fullmatch(r"(.+)\.(\d+)", name)):
                bins.setdefault(of_bin[1], {})[int(of_bin[2])] = value
            elif kind in ("sum", "max"):
                (sums if kind == "sum" else maxima)[name] = value
        sums |= {name: torch.stack([counts[i] for i in sorted(counts)]) for name, counts in bins.items()}
        return cls(sums, maxima)

    def summarize(self) -> dict[str, float]:
        """The metrics `trust/*` of docs/metrics.md; one device sync for all of them. Means over no tokens are 0."""
        names = [*self.sums, *self.maxima]
        tensors = [*self.sums.values(), *self.maxima.values()]
        numbers = torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()
        values = {}
        for name, tensor in zip(names, tensors, strict=True):
            taken, numbers = numbers[: tensor.numel()], numbers[tensor.numel() :]
            values[name] = taken if tensor.dim() else taken[0]
        return _summary(values)


def _summary(values: dict) -> dict[str, float]:
    tokens = values["tokens"]

    def share(name: str, of: str = "tokens") -> float:
        return values[name] / values[of] if values[of] else 0.0

    summary = {
        "trust/tokens": tokens,
        "trust/clip_fraction": share("clipped"),
        "trust/clip_fraction_up": share("clipped_up"),
        "trust/clip_fraction_down": share("clipped_down"),
        "trust/blocked_by_region": share("blocked_by_region"),
        "trust/blocked_by_dual_clip": share("blocked_by_dual_clip"),
        "trust/log_ratio_mean": share("log_ratio"),
        "trust/log_ratio_abs_mean": share("log_ratio_abs"),
        "trust/log_ratio_abs_max": values["log_ratio_abs_max"],
        "trust/ratio_mean": share("ratio"),
        "trust/divergence_mean": share("divergence"),
        "trust/divergence_p99": min(
            10 ** _quantile(values["divergence_counts"], DIVERGENCE_EDGES, 0.99), values["divergence_max"]
        ),
        "trust/divergence_max": values["divergence_max"],
    }
    for side in ("up", "down"):
        counts = zip(BUCKET_NAMES, values[f"clipped_{side}_by_bucket"], values["tokens_by_bucket"], strict=True)
        summary |= {f"trust/clip_fraction_{side}/{name}": n / of if of else 0.0 for name, n, of in counts}
    for name in ("capped", "saturated"):
        if name in values:
            summary[f"trust/{name}_fraction"] = share(name)
    if "entropy_ratio" in values:
        quantiles = {
            name: math.exp(_quantile(values["entropy_ratio_counts"], ENTROPY_RATIO_EDGES, q))
            for name, q in (("p05", 0.05), ("p95", 0.95))
            if values["entropy_looked_at"]
        }
        summary |= {
            "trust/blocked_by_entropy": share("blocked_by_entropy"),
            "trust/entropy_looked_at": share("entropy_looked_at"),
            "trust/entropy_ratio_mean": share("entropy_ratio", of="entropy_looked_at"),
            **{f"trust/entropy_ratio_{name}": quantiles.get(name, 0.0) for name in ("p05", "p95")},
            "trust/entropy_lost_fraction": share("entropy_lost", of="entropy_looked_at"),
            "trust/entropy_gained_fraction": share("entropy_gained", of="entropy_looked_at"),
            "trust/entropy_lost_prob_mean": share("entropy_lost_prob", of="entropy_lost"),
            "trust/entropy_gained_prob_mean": share("entropy_gained_prob", of="entropy_gained"),
        }
    if "dropped" in values:
        summary["trust/dropped_tokens"] = values["dropped"]
    return summary


@torch.no_grad()
def loss_stats(tokens: Tokens, verdict: Verdict, left: Tensor) -> LossStats:
    """Statistics of one call. `left`: bool, [B, T], true where the surrogate leaves a token a gradient, which the verdict may
    still block. No device sync."""
    live, log_ratio, prob_old = tokens.live, tokens.log_ratio, tokens.log_prob_old.exp()
    divergence = verdict.divergence
    if divergence is None:
        divergence = binary_divergence(tokens.log_prob, tokens.log_prob_old, "kl")
    divergence = divergence.clamp(max=1e30)  # chi2 can leave the float range, and one such token would end all sums
    outward = is_outward(tokens, verdict)
    up, down = outward & (tokens.advantages > 0), outward & (tokens.advantages < 0)
    hard = torch.zeros_like(live) if verdict.blocked is None else verdict.blocked

    def total(x: Tensor) -> Tensor:
        return torch.where(live, x, 0).sum(dtype=torch.float64)

    def largest(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), torch.where(live, x, 0.0).flatten()]).amax().double()

    def counts(x: Tensor, edges: tuple[float, ...], of: Tensor = live) -> Tensor:
        """How many tokens lie below the first edge, between each two, and from the last edge up."""
        bins = torch.bucketize(x.contiguous(), x.new_tensor(edges), right=True)
        zeros = torch.zeros(len(edges) + 1, dtype=torch.float64, device=x.device)
        return zeros.index_add_(0, bins.flatten(), (of & live).flatten().double())  # sums of ones: exact in any order

    bucket_edges = BUCKETS[1:-1]
    sums = {
        "tokens": total(torch.ones_like(log_ratio)),
        "clipped": total(outward | hard | ~left),
        "clipped_up": total(up),
        "clipped_down": total(down),
        "blocked_by_region": total(outward & ~left),
        "blocked_by_dual_clip": total(~left & ~outward & ~hard),
        "log_ratio": total(log_ratio),
        "log_ratio_abs": total(log_ratio.abs()),
        "ratio": total(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()),
        "divergence": total(divergence),
        "divergence_counts": counts(divergence.log10(), DIVERGENCE_EDGES),
        "tokens_by_bucket": counts(prob_old, bucket_edges),
        "clipped_up_by_bucket": counts(prob_old, bucket_edges, of=up),
        "clipped_down_by_bucket": counts(prob_old, bucket_edges, of=down),
    }
    for name in ("capped", "saturated"):
        if (holds := getattr(verdict, name)) is not None:
            sums[name] = total(holds)
    if (ratio := verdict.entropy_ratio) is not None:
        lost, gained, looked_at = hard & (ratio < 1), hard & (ratio > 1), ~ratio.isnan()
        sums |= {
            "blocked_by_entropy": total(hard),
            "entropy_looked_at": total(looked_at),
            "entropy_ratio": total(torch.where(looked_at, ratio.clamp(max=MAX_ENTROPY_RATIO), 0.0)),
            "entropy_ratio_counts": counts(ratio.log(), ENTROPY_RATIO_EDGES, of=looked_at),
            "entropy_lost": total(lost),
            "entropy_gained": total(gained),
            "entropy_lost_prob": total(torch.where(lost, prob_old, 0.0)),
            "entropy_gained_prob": total(torch.where(gained, prob_old, 0.0)),
        }
    if tokens.dropped is not None:
        sums["dropped"] = tokens.dropped.sum(dtype=torch.float64)
    return LossStats(sums, {"log_ratio_abs_max": largest(log_ratio.abs()), "divergence_max": largest(divergence)})


def _quantile(counts: list[float], edges: tuple[float, ...], q: float) -> float:
    """The q-quantile of what was counted in bins, linear within a bin; beyond the edges, the nearest edge."""
    rank, below = q * sum(counts), 0.0
    for i, count in enumerate(counts):
        if count and below + count >= rank:
            low, high = edges[max(i - 1, 0)], edges[min(i, len(edges) - 1)]
            return low + (high - low) * (rank - below) / count
        below += count
    return edges[0]
