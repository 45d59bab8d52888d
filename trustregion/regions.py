"""Trust regions: what counts as inside. A region answers for every token of a batch; a surrogate acts on the answer."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from trustregion.batch import Tokens
from trustregion.bounds import interval
from trustregion.divergences import DIVERGENCES
from trustregion.fields import ConfigError, Validated, choice, number
from trustregion.partitions import binary_divergence


@dataclass(frozen=True)
class Verdict:
    """What a region says about each token, without gradient. All [B, T].

    Args:
        outside_up: the ratio has left the region by growing; pushing it further up (A > 0) is to be blocked.
        outside_down: the ratio has left the region by falling; pushing it further down (A < 0) is to be blocked.
        blocked: no update at all, in either direction; None where the region has no such condition.
        log_lower, log_upper: the region as an interval of log-ratios; None where it is not one or was not asked for.
        divergence: the divergence the region measures; None where it measures none.
    """

    outside_up: Tensor
    outside_down: Tensor
    blocked: Tensor | None = None
    log_lower: Tensor | None = None
    log_upper: Tensor | None = None
    divergence: Tensor | None = None


class Region(Protocol):
    """A trust region. `has_interval`: it can be expressed as an interval of log-ratios around 0, for every token."""

    has_interval: bool

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        """The verdict on every token. `as_interval`: the surrogate needs `log_lower` and `log_upper`."""
        ...


@dataclass(frozen=True)
class RatioInterval(Validated):
    """Fixed interval 1 - eps_low <= r <= 1 + eps_high of the ratio (PPO, arXiv 1707.06347; DAPO, arXiv 2503.14476).

    Args:
        eps_low: how far the ratio may fall below 1, in (0, 1].
        eps_high: how far it may rise above 1, > 0.

    Raises:
        ConfigError: a value is out of range.
    """

    eps_low: float = number("how far the ratio may fall below 1, e.g. 0.2", above=0, at_most=1)
    eps_high: float = number("how far the ratio may rise above 1, e.g. 0.28", above=0)

    has_interval: ClassVar[bool] = True

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        log_lower = torch.full_like(tokens.log_ratio, _log1p(-self.eps_low))
        log_upper = torch.full_like(tokens.log_ratio, _log1p(self.eps_high))
        return _interval_verdict(tokens, log_lower, log_upper)


@dataclass(frozen=True)
class DivergenceBall(Validated):
    """The policies within f-divergence delta of the anchor, seen through a partition of the vocabulary.

    As an interval of the ratio (BandPO, arXiv 2603.04918) it is the `band_bounds` of each token; as a mask (DPPO, arXiv
    2602.04879) it is D > delta on the side the ratio moved to. The two are outside at the same tokens.

    Args:
        divergence: which f-divergence (`divergences.DIVERGENCES`).
        partition: what the divergence is measured over: `binary` is {sampled token} against {all others}.
        delta: radius in the divergence's unit (nats for kl), > 0, at most the divergence's largest value (1 for tv).
        delta_low, delta_high: radius for falling and for rising ratios, where it is not `delta`.
        ratio_cap: largest ratio whatever the divergence says, > 1 (interval only).
        relax_low, relax_high: the interval contains at least [1 - relax_low, 1 + relax_high] (interval only).

    Raises:
        ConfigError: a value is out of range, or a side has no radius.
    """

    divergence: str = choice("an f-divergence, anchor first", tuple(DIVERGENCES))
    partition: str = choice("the cells the divergence is measured over", ("binary",), default="binary")
    delta: float | None = number("a divergence radius, e.g. 0.05", above=0, default=None)
    delta_low: float | None = number("the radius for falling ratios", above=0, default=None)
    delta_high: float | None = number("the radius for rising ratios", above=0, default=None)
    ratio_cap: float | None = number("the largest ratio, e.g. 10", above=1, infinity_ok=True, default=None)
    relax_low: float | None = number("how far the ratio may always fall, e.g. 0.2", above=0, at_most=1, default=None)
    relax_high: float | None = number("how far the ratio may always rise, e.g. 0.28", above=0, default=None)

    has_interval: ClassVar[bool] = True
    interval_only: ClassVar[tuple[str, ...]] = ("ratio_cap", "relax_low", "relax_high")

    def __post_init__(self):
        super().__post_init__()
        largest = DIVERGENCES[self.divergence].max_value
        for name in ("delta", "delta_low", "delta_high"):
            radius = getattr(self, name)
            if radius is not None and radius > largest:
                raise ConfigError(
                    f"{name} = {radius!r}: must be a number > 0 and <= {largest:g} (no two policies are further "
                    f"apart in {self.divergence}, so that it would constrain nothing)"
                )
        if self.delta is None and (self.delta_low is None or self.delta_high is None):
            raise ConfigError("delta = None: must be set, or both delta_low and delta_high (a radius, e.g. 0.05)")

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        delta_low = self.delta if self.delta_low is None else self.delta_low
        delta_high = self.delta if self.delta_high is None else self.delta_high
        distance = binary_divergence(tokens.log_prob, tokens.log_prob_old, self.divergence)
        if not as_interval:
            log_ratio = tokens.log_ratio
            return Verdict(
                outside_up=(log_ratio > 0) & (distance > delta_high),
                outside_down=(log_ratio < 0) & (distance > delta_low),
                divergence=distance,
            )
        log_lower, log_upper = interval(DIVERGENCES[self.divergence], tokens.log_prob_old, delta_low, delta_high)
        if self.relax_low is not None:
            log_lower = log_lower.clamp(max=_log1p(-self.relax_low))
        if self.relax_high is not None:
            log_upper = log_upper.clamp(min=_log1p(self.relax_high))
        if self.ratio_cap is not None:
            log_upper = log_upper.clamp(max=math.log(self.ratio_cap))
        return _interval_verdict(tokens, log_lower, log_upper, distance)


def _interval_verdict(
    tokens: Tokens, log_lower: Tensor, log_upper: Tensor, divergence: Tensor | None = None
) -> Verdict:
    log_ratio = tokens.log_ratio
    return Verdict(
        outside_up=log_ratio > log_upper,
        outside_down=log_ratio < log_lower,
        log_lower=log_lower,
        log_upper=log_upper,
        divergence=divergence,
    )


def _log1p(x: float) -> float:
    return math.log1p(x) if x > -1 else -math.inf


REGIONS: dict[str, type] = {"ratio_interval": RatioInterval, "divergence_ball": DivergenceBall}
