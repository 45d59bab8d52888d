"""The policy loss: a region says which tokens are outside, a surrogate what that means for their update."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustregion.batch import TokenBatch, Tokens, prepare
from trustregion.config import MethodConfig, check_fit, check_on_invalid, replace_fields
from trustregion.metrics import LossStats, loss_stats
from trustregion.ops import policy_loss as kernel
from trustregion.presets import load_preset
from trustregion.regions import Region, Verdict
from trustregion.surrogates import Surrogate, is_outward


@dataclass(frozen=True)
class LossOutput:
    """What a loss call returns.

    Args:
        token_loss: loss per token, to be minimised, differentiable with respect to `log_prob`, [B, T]; 0 with gradient
            0 where `response_mask` is 0. How to average it is the trainer's choice.
        active: bool, [B, T]: false where the token's update is blocked, or the token masked.
        metrics: mergeable statistics; `metrics.summarize()` gives named numbers.
    """

    token_loss: Tensor
    active: Tensor
    metrics: LossStats


@dataclass(frozen=True)
class Diagnosis:
    """What a loss makes of each token, for people to look at. All are [B, T], without gradient.

    Args:
        tokens: the batch, made safe.
        verdict: the region's.
        blocked_by: bool, by cause: true where it alone would leave the token without gradient. `region`: pushed outward;
            `entropy`: blocked hard, as an entropy band does; `dual_clip`: the dual clip, or a log-ratio beyond +-20. A
            live token is active where all are false; of a masked token all are.
    """

    tokens: Tokens
    verdict: Verdict
    blocked_by: dict[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A trust-region policy loss.

        loss = PolicyLoss.from_preset("band_kl", delta=0.03)
        out = loss(TokenBatch(log_prob, log_prob_old, advantages, response_mask))
        (out.token_loss.sum() / response_mask.sum()).backward()

    Args:
        region: `RatioInterval`, `DivergenceBall`, ..., or anything with their `judge`.
        surrogate: `Clip`, `Mask`, ..., or anything that can be called like them.
        on_invalid: what to do about live tokens whose values no loss can be computed from: `raise`, or `drop` them,
            which counts them and treats them as masked.

    Raises:
        ConfigError: the surrogate cannot use the region, or `on_invalid` is neither.
    """

    region: Region
    surrogate: Surrogate
    on_invalid: str = "raise"

    def __post_init__(self):
        check_fit(self.region, self.surrogate)
        check_on_invalid(self.on_invalid)

    @classmethod
    def from_method(cls, method: MethodConfig) -> "PolicyLoss":
        """The loss of a method, with the values that its schedules start from."""
        return cls(method.region, method.surrogate, method.on_invalid)

    @classmethod
    def from_preset(cls, name: str, /, **overrides: Any) -> "PolicyLoss":
        """The loss of `configs/method/<name>.yaml`, fields overridden by name; None unsets an optional field.

        Raises ConfigError: unknown preset, unknown field, or a value out of range.
        """
        return cls.from_method(load_preset(name, **overrides))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PolicyLoss":
        """The loss of `{"region": {"type": ..., **fields}, "surrogate": {"type": ..., **fields}}`.

        Raises ConfigError: unknown type or field, or a value out of range.
        """
        return cls.from_method(MethodConfig.from_nested(config))

    @property
    def requires(self) -> frozenset[str]:
        """Which optional parts of a TokenBatch this loss needs, if not in every update: `entropy`, `cells`, or none."""
        return self.region.requires(update=0)

    def with_values(self, values: Mapping[str, float]) -> "PolicyLoss":
        """This loss with other values for some fields of its region and surrogate, as a schedule sets them.

        Raises ConfigError: no such field, or a value out of range.
        """
        region, surrogate = replace_fields((self.region, self.surrogate), values)
        return dataclasses.replace(self, region=region, surrogate=surrogate)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Computes the loss of a batch. At most one device sync.

        Raises ValueError: shapes differ; the region needs entropies or cells that are missing; and, with
        `on_invalid="raise"`, a live value is out of range (see `batch.prepare`).
        """
        if (done := kernel.policy_loss(self.region, self.surrogate, self.on_invalid == "drop", batch)) is not None:
            return LossOutput(*done)
        tokens, verdict = self._judge(batch)
        token_loss, left = self.surrogate(tokens, verdict)
        active = left
        if verdict.blocked is not None:
            token_loss, active = torch.where(verdict.blocked, 0.0, token_loss), left & ~verdict.blocked
        if tokens.weights is not None:
            token_loss = token_loss * tokens.weights
        return LossOutput(
            token_loss=torch.where(tokens.live, token_loss, 0.0),
            active=active & tokens.live,
            metrics=loss_stats(tokens, verdict, left),
        )

    @torch.no_grad()
    def diagnose(self, batch: TokenBatch) -> Diagnosis:
        """Why each token is blocked, or that it is not. In pure torch: for a few tokens, not for every update.

        Raises ValueError as a call does.
        """
        tokens, verdict = self._judge(batch)
        _, active = self.surrogate(tokens, verdict)
        outward = is_outward(tokens, verdict)
        blocked_by = {
            "region": ~active & outward,
            "entropy": torch.zeros_like(outward) if verdict.blocked is None else verdict.blocked,
            "dual_clip": ~active & ~outward,
        }
        return Diagnosis(tokens, verdict, {cause: blocked & tokens.live for cause, blocked in blocked_by.items()})

    def _judge(self, batch: TokenBatch) -> tuple[Tokens, Verdict]:
        tokens = prepare(batch, self.region.requires(batch.update), drop_invalid=self.on_invalid == "drop")
        with torch.no_grad():
            return tokens, self.region.judge(tokens, as_interval=self.surrogate.needs_interval)
