"""Trust-region policy losses for reinforcement learning of language models: region x surrogate, in pure torch."""

from trustregion.batch import TokenBatch
from trustregion.bounds import band_bounds
from trustregion.config import MethodConfig
from trustregion.divergences import DIVERGENCES, Divergence
from trustregion.fields import ConfigError
from trustregion.loss import LossOutput, PolicyLoss
from trustregion.metrics import LossStats
from trustregion.partitions import binary_divergence, cell_divergence
from trustregion.presets import load_preset, preset_names
from trustregion.regions import DivergenceBall, RatioInterval, Verdict
from trustregion.surrogates import Clip, Mask

__all__ = [
    "DIVERGENCES",
    "Clip",
    "ConfigError",
    "Divergence",
    "DivergenceBall",
    "LossOutput",
    "LossStats",
    "Mask",
    "MethodConfig",
    "PolicyLoss",
    "RatioInterval",
    "TokenBatch",
    "Verdict",
    "band_bounds",
    "binary_divergence",
    "cell_divergence",
    "load_preset",
    "preset_names",
]
