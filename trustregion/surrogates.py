"""Surrogates: what happens to the update of a token that a region calls outside.

Each maps the tokens and the region's verdict to a loss per token, to be minimised, and to whether the token has any
gradient. Pushes outward (A > 0 above the region, A < 0 below it) are acted on, pushes inward never.
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
        """The loss per token, differentiable, and whether its gradient is not blocked, bool; both [B, T]."""
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
        log_ratio = (tokens.log_prob - tokens.log_prob_old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        nearest_inside = torch.clamp(log_ratio.detach(), verdict.log_lower, verdict.log_upper).exp()

        stopped = _outward(tokens, verdict)
        weight = torch.where(stopped, nearest_inside, ratio)
        if self.dual_clip is not None:
            too_heavy = (tokens.advantages < 0) & (ratio.detach() > self.dual_clip)
            weight = weight.masked_fill(too_heavy, self.dual_clip)
            stopped = stopped | too_heavy
        loss = -weight * tokens.advantages
        return _block(loss, ~stopped & (tokens.log_ratio.abs() <= MAX_LOG_RATIO), verdict)


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
        stopped = _outward(tokens, verdict)
        loss = -weight * tokens.advantages * tokens.log_prob
        return _block(torch.where(stopped, 0.0, loss), ~stopped, verdict)


def _outward(tokens: Tokens, verdict: Verdict) -> Tensor:
    """Tokens outside the region whose advantage pushes them further out, bool, [B, T]."""
    return (tokens.advantages > 0) & verdict.outside_up | (tokens.advantages < 0) & verdict.outside_down


def _block(loss: Tensor, active: Tensor, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Applies the region's hard block: value and gradient 0."""
    if verdict.blocked is None:
        return loss, active
    return torch.where(verdict.blocked, 0.0, loss), active & ~verdict.blocked


SURROGATES: dict[str, type] = {"clip": Clip, "mask": Mask}
