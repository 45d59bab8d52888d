"""Statistics survive verl's reduction over micro-batches, workers and mini-batches exactly."""

import pytest
import torch

pytest.importorskip("verl")

from verl.utils.metric import AggregationType, Metric, reduce_metrics  # noqa: E402

from trustregion import PolicyLoss, TokenBatch  # noqa: E402
from trustregion.verl_plugin.metrics import pop_stats, reduce_exactly, summarize, to_scalars  # noqa: E402


def token_batch(tokens: int, seed: int) -> TokenBatch:
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(1, tokens, generator=rng) * 3
    new = (old + torch.randn(1, tokens, generator=rng) * 0.5).clamp(max=0)
    advantages = torch.randn(1, tokens, generator=rng)
    entropy = 1 + 0.1 * torch.randn(1, tokens, generator=rng)
    mask, ones = torch.ones(1, tokens, dtype=torch.bool), torch.ones(1, tokens)
    return TokenBatch(new, old, advantages, mask, entropy=entropy, entropy_old=ones)


def in_worker(loss: PolicyLoss, batch: TokenBatch) -> dict[str, Metric]:
    """What verl's ppo_loss does with the metrics of a registered loss, and our worker then."""
    metrics = Metric.from_dict(to_scalars(loss(batch).metrics), aggregation=AggregationType.MEAN)
    reduce_exactly(metrics)
    return metrics


@pytest.mark.parametrize("preset", ["grpo", "band_kl_erc"])
def test_equal_to_one_call_over_all_tokens(preset):
    loss = PolicyLoss.from_preset(preset)
    sizes = [[[7, 60], [1, 30]], [[200, 3], [11, 5]]]  # mini-batch, worker, micro-batch: unequal on purpose
    batches = [[[token_batch(n, seed=n) for n in worker] for worker in mini] for mini in sizes]

    reported = {}
    for mini in batches:
        per_worker = []
        for worker in mini:
            merged: dict[str, Metric] = {}
            for micro in worker:
                for name, metric in in_worker(loss, micro).items():
                    merged.setdefault(name, metric.init_list()).append(metric)
            per_worker.append(merged)
        for name in per_worker[0]:
            reported.setdefault(f"actor/{name}", []).append(Metric.aggregate_dp([w[name] for w in per_worker]))
    metrics = reduce_metrics({**reported, "actor/grad_norm": [1.0, 3.0]})
    summary = summarize([pop_stats(metrics)])

    flat = [micro for mini in batches for worker in mini for micro in worker]
    whole = TokenBatch(*(torch.cat([getattr(b, f) for b in flat], dim=1)
                         for f in ("log_prob", "log_prob_old", "advantages", "response_mask", "entropy", "entropy_old")))
    expected = loss(whole).metrics.summarize()
    del expected["trust/tokens"]
    assert expected["trust/clip_fraction"] > 0.05
    assert summary == pytest.approx(expected, rel=1e-6)
    assert metrics == {"actor/grad_norm": 2.0}  # nothing of ours is left, nothing of theirs is gone


def test_names_do_not_trigger_verls_reduction_by_name():
    names = to_scalars(PolicyLoss.from_preset("band_kl")(token_batch(5, 0)).metrics)
    for name in names:
        assert ("max" in name) == name.startswith("trust_max/") and "min" not in name
