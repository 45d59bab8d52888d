"""Statistics of a loss call that merge exactly: sums, counts and maxima, never means of means.

Micro-batches and workers each compute theirs; merged, they give what one call over all tokens would have given.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trustregion.batch import Tokens
from trustregion.partitions import binary_divergence
from trustregion.regions import Verdict
from trustregion.surrogates import MAX_LOG_RATIO


@dataclass(frozen=True)
class LossStats:
    """Mergeable statistics of one or more loss calls. Every value is a 0-dim float64 tensor on the batch's device.

    Args:
        sums: by name, what merges by addition (`tokens` is the number of live tokens).
        maxima: by name, what merges by maximum; all are >= 0.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def merge(self, *others: "LossStats") -> "LossStats":
        """The statistics of all tokens of `self` and `others` together."""
        parts = (self, *others)
        return LossStats(
            sums={name: torch.stack([part.sums[name] for part in parts]).sum() for name in self.sums},
            maxima={name: torch.stack([part.maxima[name] for part in parts]).amax() for name in self.maxima},
        )

    def flatten(self) -> dict[str, Tensor]:
        """One flat dict, `sum/<name>` and `max/<name>`: the key's prefix says how to reduce the value."""
        sums = {f"sum/{name}": value for name, value in self.sums.items()}
        return sums | {f"max/{name}": value for name, value in self.maxima.items()}

    @classmethod
    def unflatten(cls, flat: Mapping[str, Tensor | float]) -> "LossStats":
        """The inverse of `flatten`, of tensors or of numbers; other keys are ignored."""

        def select(prefix: str) -> dict[str, Tensor]:
            return {
                key.removeprefix(prefix): torch.as_tensor(value, dtype=torch.float64)
                for key, value in flat.items()
                if key.startswith(prefix)
            }

        return cls(sums=select("sum/"), maxima=select("max/"))

    def summarize(self) -> dict[str, float]:
        """Named metrics, one device sync for all of them. Means over no tokens are 0.

        `trust/clip_fraction`: share of live tokens whose update is blocked, for whatever reason;
        `trust/clip_fraction_up`, `trust/clip_fraction_down`: by leaving the region upward with A > 0, downward with
        A < 0; `trust/log_ratio_mean`, `trust/log_ratio_abs_mean`, `trust/log_ratio_abs_max`: of ln(pi / pi_old), in
        nats; `trust/ratio_mean`: of pi / pi_old, which is 1 in expectation on the anchor's own samples;
        `trust/divergence_mean`, `trust/divergence_max`: of the region's divergence, binary KL where it has none;
        `trust/tokens`: live tokens.
        """
        names = [*self.sums, *self.maxima]
        values = dict(zip(names, torch.stack([*self.sums.values(), *self.maxima.values()]).tolist(), strict=True))
        tokens = values["tokens"]

        def mean(name: str) -> float:
            return values[name] / tokens if tokens else 0.0

        return {
            "trust/tokens": tokens,
            "trust/clip_fraction": mean("clipped"),
            "trust/clip_fraction_up": mean("clipped_up"),
            "trust/clip_fraction_down": mean("clipped_down"),
            "trust/log_ratio_mean": mean("log_ratio"),
            "trust/log_ratio_abs_mean": mean("log_ratio_abs"),
            "trust/log_ratio_abs_max": values["log_ratio_abs_max"],
            "trust/ratio_mean": mean("ratio"),
            "trust/divergence_mean": mean("divergence"),
            "trust/divergence_max": values["divergence_max"],
        }


@torch.no_grad()
def loss_stats(tokens: Tokens, verdict: Verdict, active: Tensor) -> LossStats:
    """Statistics of one call. `active`: bool, [B, T], false where a live token's update is blocked. No device sync."""
    live, log_ratio = tokens.live, tokens.log_ratio
    divergence = verdict.divergence
    if divergence is None:
        divergence = binary_divergence(tokens.log_prob, tokens.log_prob_old, "kl")
    divergence = divergence.clamp(max=1e30)  # chi2 can leave the float range, and one such token would end all sums

    def total(x: Tensor) -> Tensor:
        return torch.where(live, x, 0).sum(dtype=torch.float64)

    def largest(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), torch.where(live, x, 0.0).flatten()]).amax().double()

    return LossStats(
        sums={
            "tokens": total(torch.ones_like(log_ratio)),
            "clipped": total(~active),
            "clipped_up": total(verdict.outside_up & (tokens.advantages > 0)),
            "clipped_down": total(verdict.outside_down & (tokens.advantages < 0)),
            "log_ratio": total(log_ratio),
            "log_ratio_abs": total(log_ratio.abs()),
            "ratio": total(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()),
            "divergence": total(divergence),
        },
        maxima={"log_ratio_abs_max": largest(log_ratio.abs()), "divergence_max": largest(divergence)},
    )
