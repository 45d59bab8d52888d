"""The hyper-parameters of the loss `trust_region`, as verl reads them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.config import PolicyLossConfig

from trustregion import ConfigError, MethodConfig, PolicyLoss, TokenBatch
from trustregion.verl_plugin.names import LOSS_NAME


@dataclass
class TrustRegionLossConfig(PolicyLossConfig):
    """`actor_rollout_ref.actor.policy_loss` with `_target_` set to this class.

    Args:
        method: a preset's fields as in configs/method/*.yaml (region, surrogate, anchor and their numbers).
        positive_nll_coef: weight of the mean negative log-likelihood of correct responses (`positive_nll.py`), >= 0.
        correct_reward: the reward from which a response counts as correct.

    Raises:
        trustregion.ConfigError: a field is unknown, of the wrong type or out of range. verl itself checks no types.
    """

    _mutable_fields = PolicyLossConfig._mutable_fields | {"loss", "parts", "observe"}

    loss_mode: str = LOSS_NAME
    method: dict[str, Any] = field(default_factory=dict)
    positive_nll_coef: float = 0.0
    correct_reward: float = 1.0

    def __post_init__(self):
        for name, smallest in (("positive_nll_coef", 0.0), ("correct_reward", -math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not smallest <= value < math.inf:
                at_least = f" >= {smallest:g}" if smallest > -math.inf else ""
                raise ConfigError(f"policy_loss.{name} = {value!r}: must be a finite number{at_least}")
        self._initial = PolicyLoss.from_method(MethodConfig.from_flat(self.method))
        self.loss = self._initial
        self.parts: dict[str, Any] = {}  # of the TokenBatch, beyond what verl passes to a policy loss
        self.observe: Callable[[PolicyLoss, TokenBatch], None] | None = None  # is shown each batch that `loss` computes

    def set_values(self, values: Mapping[str, float]):
        """Has `loss` go on with other values for some of its fields, as the method's schedules set them."""
        self.loss = self._initial.with_values(values)


def method_of(config: DictConfig) -> MethodConfig:
    """The method in a whole configuration of verl's trainer. Raises ConfigError as `TrustRegionLossConfig` does."""
    return MethodConfig.from_flat(
        OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss.method, resolve=True)
    )
