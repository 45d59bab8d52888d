"""Statistics merge exactly, and mean what their names say."""

import math
from functools import reduce

import pytest
import torch

from trustregion import LossStats, PolicyLoss, TokenBatch, preset_names

from .helpers import random_tokens


def batch_of(tokens, mask) -> TokenBatch:
    return TokenBatch(*tokens, response_mask=mask)


@pytest.mark.parametrize("preset", preset_names())
def test_any_split_merges_to_the_whole(preset):
    loss = PolicyLoss.from_preset(preset)
    tokens = [x.reshape(24, 50) for x in random_tokens(1200, seed=0, dtype=torch.float32)]
    mask = (torch.arange(50) < torch.randint(0, 51, (24, 1), generator=torch.Generator().manual_seed(0))).long()
    whole = loss(batch_of(tokens, mask)).metrics.summarize()
    assert whole["trust/tokens"] == mask.sum() and whole["trust/clip_fraction"] > 0
    for sizes in ([1] * 24, [5, 19], [23, 1], [8, 8, 8]):
        parts = [
            loss(batch_of(part[:3], part[3])).metrics
            for part in zip(*(x.split(sizes) for x in (*tokens, mask)), strict=True)
        ]
        for merged in (parts[0].merge(*parts[1:]), reduce(LossStats.merge, parts[::-1])):
            summary = merged.summarize()
            assert summary.keys() == whole.keys()
            for name in whole:
                assert summary[name] == pytest.approx(whole[name], rel=1e-12), name
            for name in ("trust/tokens", "trust/clip_fraction", "trust/log_ratio_abs_max", "trust/divergence_max"):
                assert summary[name] == whole[name]


def test_values_of_a_small_batch():
    log_ratio = torch.log(torch.tensor([[1.5, 0.5, 1.5, 1.1, 5.0]], dtype=torch.float64))
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1]])
    log_prob_old = torch.full_like(log_ratio, math.log(0.1))
    summary = PolicyLoss.from_preset("grpo")(
        TokenBatch(log_prob_old + log_ratio, log_prob_old, advantages, mask)
    ).metrics.summarize()
    kl = [0.1 * -math.log(r) + 0.9 * math.log(0.9 / (1 - 0.1 * r)) for r in (1.5, 0.5, 1.5, 1.1, 5.0)]
    assert summary == pytest.approx({
        "trust/tokens": 5,
        "trust/clip_fraction": 3 / 5,  # up, down, and the dual clip
        "trust/clip_fraction_up": 1 / 5,
        "trust/clip_fraction_down": 1 / 5,
        "trust/log_ratio_mean": log_ratio.mean().item(),
        "trust/log_ratio_abs_mean": log_ratio.abs().mean().item(),
        "trust/log_ratio_abs_max": math.log(5),
        "trust/ratio_mean": (1.5 + 0.5 + 1.5 + 1.1 + 5) / 5,
        "trust/divergence_mean": sum(kl) / 5,
        "trust/divergence_max": max(kl),
    })


def test_the_divergence_is_the_regions_own():
    tokens = random_tokens(100, seed=1)
    mask = torch.ones(1, 100)
    maxima = {
        preset: PolicyLoss.from_preset(preset)(batch_of(tokens, mask)).metrics.summarize()["trust/divergence_max"]
        for preset in ("grpo", "band_kl", "dppo_binary_kl", "band_tv", "dppo_binary_tv", "band_chi2")
    }
    assert maxima["grpo"] == maxima["band_kl"] == maxima["dppo_binary_kl"]  # binary KL where a region has none
    assert maxima["band_tv"] == maxima["dppo_binary_tv"] <= 1
    assert maxima["band_chi2"] not in (maxima["band_kl"], maxima["band_tv"])


def test_flat_keys_say_how_to_reduce():
    stats = PolicyLoss.from_preset("band_kl")(batch_of(random_tokens(30, seed=2), torch.ones(1, 30))).metrics
    flat = stats.flatten()
    assert all(key.startswith(("sum/", "max/")) for key in flat)
    for value in flat.values():
        assert value.shape == () and value.dtype == torch.float64 and not value.requires_grad
    doubled = {key: 2 * value if key.startswith("sum/") else value for key, value in flat.items()}
    assert LossStats.unflatten(doubled | {"other/key": torch.zeros(())}).summarize() == stats.merge(stats).summarize()
    numbers = {key: value.item() for key, value in flat.items()}
    assert LossStats.unflatten(numbers).summarize() == stats.summarize()
