"""The policy loss: a region says which tokens are outside, a surrogate what that means for their update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustregion.batch import TokenBatch, prepare
from trustregion.config import MethodConfig, check_fit
from trustregion.metrics import LossStats, loss_stats
from trustregion.presets import load_preset
from trustregion.regions import Region
from trustregion.surrogates import Surrogate


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
class PolicyLoss:
    """A trust-region policy loss.

        loss = PolicyLoss.from_preset("band_kl", delta=0.03)
        out = loss(TokenBatch(log_prob, log_prob_old, advantages, response_mask))
        (out.token_loss.sum() / response_mask.sum()).backward()

    Args:
        region: `RatioInterval`, `DivergenceBall`, or anything with their `judge`.
        surrogate: `Clip`, `Mask`, or anything that can be called like them.

    Raises:
        ConfigError: the surrogate cannot use the region.
    """

    region: Region
    surrogate: Surrogate

    def __post_init__(self):
        check_fit(self.region, self.surrogate)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "PolicyLoss":
        """The loss of `configs/method/<name>.yaml`, fields overridden by name; None unsets an optional field.

        Raises ConfigError: unknown preset, unknown field, or a value out of range.
        """
        method = load_preset(name, **overrides)
        return cls(method.region, method.surrogate)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PolicyLoss":
        """The loss of `{"region": {"type": ..., **fields}, "surrogate": {"type": ..., **fields}}`.

        Raises ConfigError: unknown type or field, or a value out of range.
        """
        method = MethodConfig.from_nested(config)
        return cls(method.region, method.surrogate)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Computes the loss of a batch. At most one device sync.

        Raises ValueError: shapes differ; a live log-prob is nan, infinite or above 1e-4; a live advantage or weight is
        not finite.
        """
        tokens = prepare(batch)
        with torch.no_grad():
            verdict = self.region.judge(tokens, as_interval=self.surrogate.needs_interval)
        token_loss, active = self.surrogate(tokens, verdict)
        if tokens.weights is not None:
            token_loss = token_loss * tokens.weights
        return LossOutput(
            token_loss=torch.where(tokens.live, token_loss, 0.0),
            active=active & tokens.live,
            metrics=loss_stats(tokens, verdict, active),
        )
