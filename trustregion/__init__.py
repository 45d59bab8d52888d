"""Trust-region policy losses for reinforcement learning of language models: region x surrogate, in pure torch."""

from trustregion.batch import TokenBatch
from trustregion.bounds import band_bounds
from trustregion.config import MethodConfig
from trustregion.divergences import DIVERGENCES, Alpha, Divergence
from trustregion.fields import ConfigError
from trustregion.loss import LossOutput, PolicyLoss
from trustregion.metrics import LossStats
from trustregion.partitions import binary_divergence, cell_divergence
from trustregion.presets import load_preset, preset_names
from trustregion.regions import All, DcpoInterval, DivergenceBall, EntropyBand, RatioInterval, Verdict
from trustregion.schedules import Scheduler
from trustregion.surrogates import Cispo, Clip, Mask, Preserve
from trustregion.token_stats import TokenStats, token_stats

__all__ = [
    "DIVERGENCES",
    "All",
    "Alpha",
    "Cispo",
    "Clip",
    "ConfigError",
    "DcpoInterval",
    "Divergence",
    "DivergenceBall",
    "EntropyBand",
    "LossOutput",
    "LossStats",
    "Mask",
    "MethodConfig",
    "PolicyLoss",
    "Preserve",
    "RatioInterval",
    "Scheduler",
    "TokenBatch",
    "TokenStats",
    "Verdict",
    "band_bounds",
    "binary_divergence",
    "cell_divergence",
    "load_preset",
    "preset_names",
    "token_stats",
]
