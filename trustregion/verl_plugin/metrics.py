"""Carries the loss's statistics through verl's metric reduction without turning them into means of means.

verl takes plain numbers from a registered loss and averages them over micro-batches, workers and mini-batches. Sums may
be averaged, because a ratio of averaged sums is the ratio of the sums; maxima may not. So the loss reports sums and
maxima under prefixed names, `reduce_exactly` (in the worker) says which is which, and the trainer turns what arrives into
the metrics `trust/*`.
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


def pop_stats(metrics: dict[str, float]) -> LossStats:
    """Takes the statistics of some updates, `actor/trust_*`, out of verl's reduced metrics.

    Their sums have been averaged over the updates, as all sums are: quotients and maxima are exact, counts are not.
    """
    carried = f"actor/{PREFIX}"
    names = [name for name in metrics if name.startswith(carried)]
    return LossStats.unflatten({name.removeprefix(carried): metrics.pop(name) for name in names})


def summarize(stats: list[LossStats]) -> dict[str, float]:
    """The metrics `trust/*` of a step, exact over all its tokens, from one or more equally large parts of it."""
    first, *others = stats
    summary = first.merge(*others).summarize()
    del summary["trust/tokens"]
    return summary
