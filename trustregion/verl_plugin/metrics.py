"""Carries the loss's statistics through verl's metric reduction without turning them into means of means.

verl takes plain numbers from a registered loss and averages them over micro-batches, workers and mini-batches. Sums may
be averaged, because a ratio of averaged sums is the ratio of the sums; maxima may not. So the loss reports sums and
maxima under prefixed names, `reduce_exactly` (in the worker) says which is which, and `pop_summary` (in the trainer)
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


def reduce_exactly(metrics: dict[str, Metric]) -> None:
    """In a worker: has verl reduce our sums as sums and our maxima as maxima, from here on."""
    for name, metric in metrics.items():
        for prefix, aggregation in KINDS.items():
            if name.startswith(prefix):
                metrics[name] = Metric(aggregation)
                metrics[name].extend(metric.values)


def pop_summary(metrics: dict[str, float]) -> dict[str, float]:
    """Takes the statistics of a step, `actor/trust_*`, out of verl's reduced metrics; returns `trust/*`."""
    carried = f"actor/{PREFIX}"
    names = [name for name in metrics if name.startswith(carried)]
    stats = LossStats.unflatten({name.removeprefix(carried): metrics.pop(name) for name in names})
    summary = stats.summarize()
    del summary["trust/tokens"]  # averaged over the step's updates by now, as all sums are
    return summary
