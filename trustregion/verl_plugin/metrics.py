"""Carries the loss's statistics through verl's metric reduction without turning them into means of means.

verl takes plain numbers from a registered loss and averages them over micro-batches, workers and mini-batches. Sums may
be averaged, because a ratio of averaged sums is the ratio of the sums; maxima may not. So the loss reports sums and
maxima under prefixed names, `WithExactMetrics` (in the worker) says which is which, and `pop_summary` (in the trainer)
turns what arrives into the metrics `trust/*`, exact over all tokens of the step.
"""

import torch
from verl.utils.metric import AggregationType, Metric

from trustregion.metrics import LossStats

PREFIX = "trust_"
KINDS = {f"{PREFIX}sum/": AggregationType.SUM, f"{PREFIX}max/": AggregationType.MAX}


def to_scalars(stats: LossStats) -> dict[str, float]:
    """A micro-batch's statistics as verl takes them from a loss; one device sync."""
    flat = stats.flatten()
    values = torch.stack(list(flat.values())).tolist()
    return {PREFIX + name: value for name, value in zip(flat, values, strict=True)}


class WithExactMetrics:
    """verl's loss function of a worker, which then reduces our sums as sums and our maxima as maxima."""

    def __init__(self, loss_function):
        self._loss_function = loss_function

    def __call__(self, model_output, data, dp_group=None):
        loss, metrics = self._loss_function(model_output=model_output, data=data, dp_group=dp_group)
        for name, metric in metrics.items():
            for prefix, aggregation in KINDS.items():
                if name.startswith(prefix):
                    metrics[name] = Metric(aggregation)
                    metrics[name].extend(metric.values)
        return loss, metrics


def pop_summary(metrics: dict[str, float]) -> dict[str, float]:
    """Takes the statistics of a step, `actor/trust_*`, out of verl's reduced metrics; returns `trust/*`."""
    carried = f"actor/{PREFIX}"
    names = [name for name in metrics if name.startswith(carried)]
    stats = LossStats.unflatten({name.removeprefix(carried): metrics.pop(name) for name in names})
    summary = stats.summarize()
    del summary["trust/tokens"]  # averaged over the step's updates by now, as all sums are
    return summary
