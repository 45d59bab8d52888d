"""Trust regions: what counts as inside. A region answers for every token of a batch; a surrogate acts on the answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from trustregion.batch import Tokens
from trustregion.bounds import interval
from trustregion.divergences import DIVERGENCES, get_divergence
from trustregion.fields import ConfigError, Validated, choice, number
from trustregion.partitions import binary_divergence, cell_divergence


@dataclass(frozen=True)
class Verdict:
    """What a region says about each token, without gradient. All [B, T].

    Args:
        outside_up: the ratio has left the region by growing; pushing it further up (A > 0) is to be blocked.
        outside_down: the ratio has left the region by falling; pushing it further down (A < 0) is to be blocked.
        blocked: no update at all, in either direction; None where the region has no such condition.
        log_lower, log_upper: the region as an interval of log-ratios; None where it is not one or was not asked for.
        capped: bool, the upper bound is the ratio cap, not the trust region's; None where there is no cap.
        saturated: bool, the trust region would let the token vanish or take all the mass; None where not known.
        divergence: the divergence the region measures; None where it measures none.
        entropy_ratio: H(pi) / H(pi_old), nan in updates that do not look at it; None for a region that never does.
    """

    outside_up: Tensor
    outside_down: Tensor
    blocked: Tensor | None = None
    log_lower: Tensor | None = None
    log_upper: Tensor | None = None
    capped: Tensor | None = None
    saturated: Tensor | None = None
    divergence: Tensor | None = None
    entropy_ratio: Tensor | None = None


class Region(Protocol):
    """A trust region.

    has_interval: it can be expressed as an interval of log-ratios around 0, for every token.
    """

    has_interval: bool

    def requires(self, update: int) -> frozenset[str]:
        """Which optional parts of a TokenBatch it needs in that update, of `entropy` and `cells`."""
        ...

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        """The verdict on every token. `as_interval`: the surrogate needs `log_lower` and `log_upper`."""
        ...


class _NeedsNothing:
    def requires(self, update: int) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class RatioInterval(_NeedsNothing, Validated):
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
class DcpoInterval(_NeedsNothing, Validated):
    """Interval that widens as the token's anchor probability p falls (DCPO, arXiv 2509.02333).

    r in [1/2 + 1/2 sqrt(max(1 - 4 eps_low / p, 0)), 1/2 + 1/2 sqrt(1 + 4 eps_high / p)]: where |(r - 1) r p| = eps.

    Args:
        eps_low, eps_high: > 0, in units of probability.
        ratio_cap: largest ratio whatever p is, > 1, or None.

    Raises:
        ConfigError: a value is out of range.
    """

    eps_low: float = number("how far the ratio may fall, times the probability, e.g. 0.16", above=0)
    eps_high: float = number("how far the ratio may rise, times the probability, e.g. 0.2", above=0)
    ratio_cap: float | None = number("the largest ratio, e.g. 10", above=1, infinity_ok=True, default=None)

    has_interval: ClassVar[bool] = True

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        log_p = tokens.log_prob_old
        # (1 + sqrt(1 + 4 e/p)) / 2 = 1 + (e/p) / ((1 + sqrt(1 + 4 e/p)) / 2), accurate near 1 as below near 1/2. Where
        # e/p leaves the float range the bound is sqrt(e/p).
        largest = math.log(torch.finfo(log_p.dtype).max) - 2
        log_rise, log_fall = math.log(self.eps_high) - log_p, math.log(self.eps_low) - log_p
        rise = log_rise.clamp(max=largest).exp()
        log_upper = torch.where(
            log_rise < largest, torch.log1p(2 * rise / (1 + torch.sqrt(1 + 4 * rise))), 0.5 * log_rise
        )
        fall = log_fall.clamp(max=0).exp()  # beyond 1/4 the root's argument is negative, and the bound 1/2
        log_lower = torch.log1p(-2 * fall.clamp(max=0.25) / (1 + torch.sqrt((1 - 4 * fall).clamp(min=0))))
        log_upper, capped = _cap(log_upper, self.ratio_cap)
        return _interval_verdict(tokens, log_lower, log_upper, capped=capped)


@dataclass(frozen=True)
class DivergenceBall(Validated):
    """The policies within f-divergence delta of the anchor, seen through a partition of the vocabulary.

    As an interval of the ratio (BandPO, arXiv 2603.04918) it is the `band_bounds` of each token; as a mask (DPPO, arXiv
    2602.04879) it is D > delta on the side the ratio moved to. Over the binary partition the two are outside at the
    same tokens; over the others there is no interval.

    Args:
        divergence: which f-divergence (`divergences.DIVERGENCES`), or `alpha`.
        partition: what the divergence is measured over: `binary` is {sampled token} against {all others}; `topk` the
            anchor's K most likely tokens, the sampled one and the rest; `full` whatever cells the batch has.
        delta: radius in the divergence's unit (nats for kl), > 0, at most the divergence's largest value (1 for tv).
        delta_low, delta_high: radius for falling and for rising ratios, where it is not `delta`.
        alpha: the order a of the divergence `alpha` (Cressie-Read); for no other divergence.
        K: how many of the anchor's most likely tokens `topk` names, >= 1 (20 in DPPO); for no other partition.
        ratio_cap: largest ratio whatever the divergence says, > 1 (interval only).
        relax_low, relax_high: the interval contains at least [1 - relax_low, 1 + relax_high] (interval only).

    Raises:
        ConfigError: a value is out of range, or a side has no radius.
    """

    divergence: str = choice("an f-divergence, anchor first", (*DIVERGENCES, "alpha"))
    partition: str = choice("the cells the divergence is measured over", ("binary", "topk", "full"), default="binary")
    delta: float | None = number("a divergence radius, e.g. 0.05", above=0, default=None)
    delta_low: float | None = number("the radius for falling ratios", above=0, default=None)
    delta_high: float | None = number("the radius for rising ratios", above=0, default=None)
    alpha: float | None = number("the divergence's order, e.g. 0.5", above=-math.inf, default=None)
    K: int | None = number("the anchor's most likely tokens, e.g. 20", above=0, whole=True, default=None)
    ratio_cap: float | None = number("the largest ratio, e.g. 10", above=1, infinity_ok=True, default=None)
    relax_low: float | None = number("how far the ratio may always fall, e.g. 0.2", above=0, at_most=1, default=None)
    relax_high: float | None = number("how far the ratio may always rise, e.g. 0.28", above=0, default=None)

    interval_only: ClassVar[tuple[str, ...]] = ("ratio_cap", "relax_low", "relax_high")

    def __post_init__(self):
        super().__post_init__()
        for name, belongs_to, chosen in (("alpha", "divergence", "alpha"), ("K", "partition", "topk")):
            is_chosen = getattr(self, belongs_to) == chosen
            if is_chosen and getattr(self, name) is None:
                raise ConfigError(f"{name} = None: must be set for {belongs_to} {chosen!r}")
            if not is_chosen and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r}: is for {belongs_to} {chosen!r}, and {belongs_to} is "
                    f"{getattr(self, belongs_to)!r}; remove it (null)"
                )
        try:
            f = get_divergence(f"alpha({self.alpha})" if self.divergence == "alpha" else self.divergence)
        except ValueError as error:
            raise ConfigError(f"alpha = {self.alpha!r}: {error}") from None
        object.__setattr__(self, "_f", f)  # not a field: the configuration is what its fields say
        for name in ("delta", "delta_low", "delta_high"):
            radius = getattr(self, name)
            if radius is not None and radius > f.max_value:
                raise ConfigError(
                    f"{name} = {radius!r}: must be a number > 0 and <= {f.max_value:g} (no two policies are further "
                    f"apart in {f.name}, so that it would constrain nothing)"
                )
        if self.delta is None and (self.delta_low is None or self.delta_high is None):
            raise ConfigError("delta = None: must be set, or both delta_low and delta_high (a radius, e.g. 0.05)")

    @property
    def has_interval(self) -> bool:
        return self.partition == "binary"

    def requires(self, update: int) -> frozenset[str]:
        return frozenset() if self.partition == "binary" else frozenset({"cells"})

    @property
    def radii(self) -> tuple[float, float]:
        """For falling and for rising ratios."""
        return (
            self.delta if self.delta_low is None else self.delta_low,
            self.delta if self.delta_high is None else self.delta_high,
        )

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        delta_low, delta_high = self.radii
        distance = self._distance(tokens)
        if not as_interval:
            log_ratio = tokens.log_ratio
            return Verdict(
                outside_up=(log_ratio > 0) & (distance > delta_high),
                outside_down=(log_ratio < 0) & (distance > delta_low),
                divergence=distance,
            )
        log_lower, log_upper = interval(self._f, tokens.log_prob_old, delta_low, delta_high)
        saturated = (log_lower == -torch.inf) | (log_upper == -tokens.log_prob_old)
        if self.relax_low is not None:
            log_lower = log_lower.clamp(max=_log1p(-self.relax_low))
        if self.relax_high is not None:
            log_upper = log_upper.clamp(min=_log1p(self.relax_high))
        log_upper, capped = _cap(log_upper, self.ratio_cap)
        return _interval_verdict(
            tokens, log_lower, log_upper, divergence=distance, saturated=saturated, capped=capped
        )

    def _distance(self, tokens: Tokens) -> Tensor:
        if self.partition == "binary":
            return binary_divergence(tokens.log_prob, tokens.log_prob_old, self._f)
        cells = tokens.cell_log_prob.shape[-1]
        if self.partition == "topk" and cells != self.K + 2:
            raise ValueError(f"cell_log_prob has {cells} cells a token: must be K + 2 = {self.K + 2} (K = {self.K})")
        return cell_divergence(tokens.cell_log_prob, tokens.cell_log_prob_old, self._f)


@dataclass(frozen=True)
class EntropyBand(Validated):
    """Blocks tokens whose entropy ratio rho = H(pi) / H(pi_old) leaves (1 - beta_low, 1 + beta_high) (ERC, 2512.05591).

    The block is hard: no gradient whatever the advantage's sign. The ratio of probabilities is not constrained; combine
    with a region that does. Where H(pi_old) is 0, rho is 1 if H(pi) is 0 too, else infinite.

    Args:
        beta_low: how far the entropy may fall, relative to the anchor's, in (0, 1].
        beta_high: how far it may rise, > 0.
        every_k_steps: look at the entropy in every k-th update only, from the first on, and block nothing in the others.

    Raises:
        ConfigError: a value is out of range.
    """

    beta_low: float = number("how far the entropy ratio may fall below 1, e.g. 0.05", above=0, at_most=1)
    beta_high: float = number("how far the entropy ratio may rise above 1, e.g. 0.05", above=0)
    every_k_steps: int = number("act in every k-th update, 1 for all", above=0, whole=True, default=1)

    has_interval: ClassVar[bool] = True  # the whole line

    def requires(self, update: int) -> frozenset[str]:
        return frozenset({"entropy"} if update % self.every_k_steps == 0 else ())

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        nowhere = torch.zeros_like(tokens.live)
        if tokens.update % self.every_k_steps == 0:
            ratio = tokens.entropy / tokens.entropy_old
            ratio = torch.where((tokens.entropy == 0) & (tokens.entropy_old == 0), 1.0, ratio)
            blocked = ~((ratio > 1 - self.beta_low) & (ratio < 1 + self.beta_high))
        else:
            ratio, blocked = torch.full_like(tokens.log_ratio, torch.nan), nowhere
        return Verdict(
            outside_up=nowhere,
            outside_down=nowhere,
            blocked=blocked,
            log_lower=torch.full_like(ratio, -torch.inf) if as_interval else None,
            log_upper=torch.full_like(ratio, torch.inf) if as_interval else None,
            entropy_ratio=ratio,
        )


@dataclass(frozen=True)
class All:
    """The conjunction of regions: outside one is outside, blocked by one is blocked, intervals intersect.

    Args:
        regions: at least one.
    """

    regions: Sequence[Region]

    def __post_init__(self):
        if not self.regions:
            raise ConfigError("region = []: must name at least one region")
        object.__setattr__(self, "regions", tuple(self.regions))

    @property
    def has_interval(self) -> bool:
        return all(region.has_interval for region in self.regions)

    def requires(self, update: int) -> frozenset[str]:
        return frozenset().union(*(region.requires(update) for region in self.regions))

    def judge(self, tokens: Tokens, as_interval: bool) -> Verdict:
        verdicts = [region.judge(tokens, as_interval) for region in self.regions]

        def combine(name: str, operation) -> Tensor | None:
            values = [value for verdict in verdicts if (value := getattr(verdict, name)) is not None]
            return operation(torch.stack(values)) if len(values) > 1 else values[0] if values else None

        def any_of(values: Tensor) -> Tensor:
            return values.any(0)

        return Verdict(
            outside_up=combine("outside_up", any_of),
            outside_down=combine("outside_down", any_of),
            blocked=combine("blocked", any_of),
            log_lower=combine("log_lower", lambda values: values.amax(0)),
            log_upper=combine("log_upper", lambda values: values.amin(0)),
            capped=combine("capped", any_of),
            saturated=combine("saturated", any_of),
            divergence=combine("divergence", lambda values: values[0]),  # for the metrics: of the first that has one
            entropy_ratio=combine("entropy_ratio", lambda values: values[0]),
        )


def parts_of(region: Region) -> Sequence[Region]:
    """The regions that a conjunction is made of, and those in it; any other region alone."""
    if not isinstance(region, All):
        return (region,)
    return [part for inner in region.regions for part in parts_of(inner)]


def _interval_verdict(tokens: Tokens, log_lower: Tensor, log_upper: Tensor, **measured: Tensor | None) -> Verdict:
    log_ratio = tokens.log_ratio
    return Verdict(
        outside_up=log_ratio > log_upper,
        outside_down=log_ratio < log_lower,
        log_lower=log_lower,
        log_upper=log_upper,
        **measured,
    )


def _cap(log_upper: Tensor, ratio_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """The upper bound under the cap, and where it is the cap."""
    if ratio_cap is None:
        return log_upper, None
    log_cap = math.log(ratio_cap)
    return log_upper.clamp(max=log_cap), log_upper > log_cap


def _log1p(x: float) -> float:
    return math.log1p(x) if x > -1 else -math.inf


REGIONS: dict[str, type] = {
    "ratio_interval": RatioInterval,
    "dcpo_interval": DcpoInterval,
    "divergence_ball": DivergenceBall,
    "entropy_band": EntropyBand,
}
