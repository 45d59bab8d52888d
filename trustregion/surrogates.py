"""Surrogates: what happens to the update of a token that a region calls outside.

Each maps the tokens and the region's verdict to a loss per token, to be minimised, and to whether the token has any
gradient. Pushes outward (A > 0 above the region, A < 0 below it) are acted on, pushes inward never, except by `cispo`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from trustregion.batch import Tokens
from trustregion.fields import Validated, number
from trustregion.regions import Verdict

# Ratios are computed from log-ratios clamped to this range, as in verl: e^20 is 5e8. No gradient passes the clamp.
MAX_LOG_RATIO = 20.0


class Surrogate(Protocol):
    """A surrogate objective. `needs_interval`: it uses the region's bounds, not only which tokens are outside."""

    needs_interval: bool

    def __call__(self, tokens: Tokens, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """The loss per token, differentiable, and whether its gradient is not blocked, bool; both [B, T].

        What the region blocks hard is none of its business: `PolicyLoss` zeroes that.
        """
        ...


@dataclass(frozen=True)
class Clip(Validated):
    """-min(r A, clip(r, lower, upper) A): no gradient from tokens pushed further outward (PPO, arXiv 1707.06347).

    Tokens whose log-ratio is beyond +-20 get no gradient either, as in verl's `vanilla` loss.

    Args:
        dual_clip: for A < 0 the loss is at most dual_clip |A|, and without gradient there (arXiv 1912.09729); > 1, or
            None for no limit.

    Raises:
        ConfigError: the value is out of range.
    """

    dual_clip: float | None = number(
        "the largest ratio that counts where the advantage is negative, e.g. 3",
        above=1,
        infinity_ok=True,
        default=None,
    )

    needs_interval: ClassVar[bool] = True

    def __call__(self, tokens: Tokens, verdict: Verdict) -> tuple[Tensor, Tensor]:
        return self._loss(tokens, verdict, at_bound=None)

    def _loss(self, tokens: Tokens, verdict: Verdict, at_bound: Tensor | None) -> tuple[Tensor, Tensor]:
        """`at_bound`: what the bound's weight is multiplied by where it replaces the ratio; None means 1, a constant."""
        log_ratio = (tokens.log_prob - tokens.log_prob_old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        nearest_inside = torch.clamp(log_ratio.detach(), verdict.log_lower, verdict.log_upper).exp()

        outward = is_outward(tokens, verdict)
        weight = torch.where(outward, nearest_inside if at_bound is None else nearest_inside * at_bound, ratio)
        active = tokens.log_ratio.abs() <= MAX_LOG_RATIO
        active = active & ~outward if at_bound is None else active | outward
        if self.dual_clip is not None:
            too_heavy = (tokens.advantages < 0) & (ratio.detach() > self.dual_clip)
            weight = weight.masked_fill(too_heavy, self.dual_clip)
            active = active & ~too_heavy
        return -weight * tokens.advantages, active


@dataclass(frozen=True)
class Preserve(Clip):
    """Values as `Clip`, but tokens pushed outward keep a gradient as if their ratio were the bound (GPPO, 2508.07629).

    The gradient's factor on A d ln pi is beta_1 lower below the region, beta_2 upper above it (CE-GPPO, 2509.20712);
    GPPO is both 1.

    Args:
        dual_clip: as in `Clip`.
        beta_1: weight of tokens below the region pushed down (A < 0), > 0.
        beta_2: weight of tokens above the region pushed up (A > 0), > 0.

    Raises:
        ConfigError: a value is out of range.
    """

    beta_1: float = number("the weight of tokens pushed below the region, e.g. 0.75", above=0, default=1.0)
    beta_2: float = number("the weight of tokens pushed above the region, e.g. 1", above=0, default=1.0)

    def __call__(self, tokens: Tokens, verdict: Verdict) -> tuple[Tensor, Tensor]:
        slope = torch.where(tokens.advantages < 0, self.beta_1, self.beta_2)
        # 1 in value, with the slope as its derivative.
        return self._loss(tokens, verdict, at_bound=1 + slope * (tokens.log_prob - tokens.log_prob.detach()))


@dataclass(frozen=True)
class Mask(Validated):
    """-M sg(min(r, C)) A ln pi: a policy gradient with a truncated importance weight (DPPO, arXiv 2602.04879).

    M is 0 for tokens pushed further outward; sg stops the gradient.

    Args:
        C: where the importance weight is truncated, > 0, or None for no limit.

    Raises:
        ConfigError: the value is out of range.
    """

    C: float | None = number(
        "where the importance weight is truncated, e.g. 5", above=0, infinity_ok=True, default=None
    )

    needs_interval: ClassVar[bool] = False

    def __call__(self, tokens: Tokens, verdict: Verdict) -> tuple[Tensor, Tensor]:
        weight = tokens.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if self.C is not None:
            weight = weight.clamp(max=min(self.C, math.exp(MAX_LOG_RATIO)))
        outward = is_outward(tokens, verdict)
        return torch.where(outward, 0.0, -weight * tokens.advantages * tokens.log_prob), ~outward


@dataclass(frozen=True)
class Cispo(Validated):
    """-sg(clip(r, lower, upper)) A ln pi: every token keeps its gradient, with a clipped weight (CISPO, 2506.13585).

    The weight is clipped inward and outward alike.
    """

    needs_interval: ClassVar[bool] = True

    def __call__(self, tokens: Tokens, verdict: Verdict) -> tuple[Tensor, Tensor]:
        log_ratio = tokens.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        weight = torch.clamp(log_ratio, verdict.log_lower, verdict.log_upper).exp()
        return -weight * tokens.advantages * tokens.log_prob, torch.ones_like(tokens.live)


def is_outward(tokens: Tokens, verdict: Verdict) -> Tensor:
    """Tokens outside the region whose advantage pushes them further out, bool, [B, T]."""
    return (tokens.advantages > 0) & verdict.outside_up | (tokens.advantages < 0) & verdict.outside_down


SURROGATES: dict[str, type] = {"clip": Clip, "mask": Mask, "preserve": Preserve, "cispo": Cispo}
