"""Statistics merge exactly, and mean what their names say."""

import math
import re
from functools import reduce
from pathlib import Path

import pytest
import torch

from trustregion import LossStats, PolicyLoss, TokenBatch, binary_divergence, preset_names

from .helpers import made_up_parts, random_tokens


def batch_of(tokens, mask, loss=None) -> TokenBatch:
    parts = made_up_parts(loss, *tokens[:2]) if loss else {}
    return TokenBatch(*tokens, response_mask=mask, **parts)


@pytest.mark.slow
@pytest.mark.parametrize("preset", preset_names())
def test_any_split_merges_to_the_whole(preset):
    loss = PolicyLoss.from_preset(preset)
    tokens = [x.reshape(24, 50) for x in random_tokens(1200, seed=0, dtype=torch.float32)]
    mask = (torch.arange(50) < torch.randint(0, 51, (24, 1), generator=torch.Generator().manual_seed(0))).long()
    whole = loss(batch_of(tokens, mask, loss)).metrics.summarize()
    assert whole["trust/tokens"] == mask.sum() and whole["trust/clip_fraction"] > 0
    for sizes in ([1] * 24, [5, 19], [23, 1], [8, 8, 8]):
        parts = [
            loss(batch_of(part[:3], part[3], loss)).metrics
            for part in zip(*(x.split(sizes) for x in (*tokens, mask)), strict=True)
        ]
        for merged in (parts[0].merge(*parts[1:]), reduce(LossStats.merge, parts[::-1])):
            summary = merged.summarize()
            assert summary.keys() == whole.keys()
            for name in whole:
                assert summary[name] == pytest.approx(whole[name], rel=1e-12), name
            for name in whole:  # counts and maxima, and what is computed from them alone
                if "mean" not in name:
                    assert summary[name] == whole[name], name


def test_values_of_a_small_batch():
    log_ratio = torch.log(torch.tensor([[1.5, 0.5, 1.5, 1.1, 5.0]], dtype=torch.float64))
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1]])
    log_prob_old = torch.full_like(log_ratio, math.log(0.1))
    summary = PolicyLoss.from_preset("grpo")(
        TokenBatch(log_prob_old + log_ratio, log_prob_old, advantages, mask)
    ).metrics.summarize()
    kl = [0.1 * -math.log(r) + 0.9 * math.log(0.9 / (1 - 0.1 * r)) for r in (1.5, 0.5, 1.5, 1.1, 5.0)]
    p99 = summary.pop("trust/divergence_p99")
    assert sorted(kl)[-2] < p99 <= summary["trust/divergence_max"]
    expected = {
        "trust/tokens": 5,
        "trust/clip_fraction": 3 / 5,  # up, down, and the dual clip
        "trust/clip_fraction_up": 1 / 5,
        "trust/clip_fraction_down": 1 / 5,
        "trust/blocked_by_region": 2 / 5,
        "trust/blocked_by_dual_clip": 1 / 5,
        "trust/log_ratio_mean": log_ratio.mean().item(),
        "trust/log_ratio_abs_mean": log_ratio.abs().mean().item(),
        "trust/log_ratio_abs_max": math.log(5),
        "trust/ratio_mean": (1.5 + 0.5 + 1.5 + 1.1 + 5) / 5,
        "trust/divergence_mean": sum(kl) / 5,
        "trust/divergence_max": max(kl),
    }
    for side in ("up", "down"):
        for bucket in ("0-0.01", "0.01-0.2", "0.2-0.5", "0.5-0.8", "0.8-1"):
            expected[f"trust/clip_fraction_{side}/{bucket}"] = 1 / 5 if bucket == "0.01-0.2" else 0
    assert summary == pytest.approx(expected)


def test_clip_fractions_by_bucket_are_shares_of_the_bucket():
    log_prob_old = torch.log(torch.tensor([[0.005, 0.005, 0.1, 0.3, 0.3, 0.3, 0.6, 0.9, 0.9]], dtype=torch.float64))
    up = torch.tensor([[True, False, True, True, True, False, True, False, False]])
    log_ratio = torch.where(up, 0.3, 0.0).double()
    advantages = torch.tensor([[1.0, 1, 1, 1, -1, 1, 1, 1, 1]], dtype=torch.float64)  # the fifth is pushed inward
    summary = PolicyLoss.from_preset("grpo")(
        TokenBatch((log_prob_old + log_ratio).clamp(max=0), log_prob_old, advantages, torch.ones(1, 9))
    ).metrics.summarize()
    shares = {"0-0.01": 1 / 2, "0.01-0.2": 1, "0.2-0.5": 1 / 3, "0.5-0.8": 1, "0.8-1": 0}
    assert {name: summary[f"trust/clip_fraction_up/{name}"] for name in shares} == pytest.approx(shares)
    assert not any(summary[f"trust/clip_fraction_down/{name}"] for name in shares)


def test_caps_and_saturation_are_counted():
    log_prob_old = torch.log(torch.tensor([[0.001, 0.004, 0.3, 0.97]], dtype=torch.float64))
    batch = TokenBatch(log_prob_old, log_prob_old, torch.ones(1, 4), torch.ones(1, 4))
    summary = PolicyLoss.from_preset("band_kl")(batch).metrics.summarize()
    assert summary["trust/capped_fraction"] == 0.5 and summary["trust/saturated_fraction"] == 0
    summary = PolicyLoss.from_preset("band_tv")(batch).metrics.summarize()  # lower 0 where p <= .05, upper 1/p where >= .95
    assert summary["trust/saturated_fraction"] == 0.75
    assert "trust/capped_fraction" not in PolicyLoss.from_preset("grpo")(batch).metrics.summarize()


def test_entropy_metrics_say_what_was_blocked_and_why():
    ratio = torch.tensor([[0.5, 0.94, 0.96, 1.0, 1.04, 1.06, 3.0, 500.0]], dtype=torch.float64)
    p = torch.tensor([[0.1, 0.3, 0.5, 0.5, 0.5, 0.2, 0.4, 0.9]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1, 1, -1, 1, -1, 1, 0]], dtype=torch.float64)
    batch = TokenBatch(p.log(), p.log(), advantages, torch.ones(1, 8), entropy=ratio, entropy_old=torch.ones(1, 8))
    out = PolicyLoss.from_preset("erc_dapo")(batch)
    assert out.active.tolist() == [[False, False, True, True, True, False, False, False]]
    summary = out.metrics.summarize()
    assert summary["trust/clip_fraction"] == summary["trust/blocked_by_entropy"] == 5 / 8
    assert summary["trust/blocked_by_region"] == summary["trust/blocked_by_dual_clip"] == 0
    assert summary["trust/entropy_lost_fraction"] == 2 / 8 and summary["trust/entropy_gained_fraction"] == 3 / 8
    assert summary["trust/entropy_lost_prob_mean"] == pytest.approx((0.1 + 0.3) / 2)
    assert summary["trust/entropy_gained_prob_mean"] == pytest.approx((0.2 + 0.4 + 0.9) / 3)
    assert summary["trust/entropy_ratio_mean"] == pytest.approx((ratio.clamp(max=100).sum() / 8).item())


def test_percentiles_are_right_to_the_width_of_a_bin():
    generator = torch.Generator().manual_seed(3)
    ratio = torch.exp(0.03 * torch.randn(1, 20_000, generator=generator, dtype=torch.float64))
    log_prob_old = torch.full_like(ratio, math.log(0.3))
    log_prob = log_prob_old + 0.2 * torch.randn(1, 20_000, generator=generator, dtype=torch.float64)
    ones = torch.ones_like(ratio)
    batch = TokenBatch(log_prob, log_prob_old, ones, ones, entropy=ratio, entropy_old=ones)
    summary = PolicyLoss.from_preset("band_kl_erc")(batch).metrics.summarize()
    assert summary["trust/entropy_ratio_p05"] == pytest.approx(ratio.quantile(0.05).item(), abs=5e-4)
    assert summary["trust/entropy_ratio_p95"] == pytest.approx(ratio.quantile(0.95).item(), abs=5e-4)
    divergence = binary_divergence(log_prob, log_prob_old, "kl")
    assert summary["trust/divergence_p99"] == pytest.approx(divergence.quantile(0.99).item(), rel=0.03)


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


def test_the_glossary_has_every_metric_and_no_other():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    explained = {name.replace("<bucket>", "") for name in re.findall(r"`(trust/[^`]+)`", text)}
    reported = set()
    for preset in preset_names():
        loss = PolicyLoss.from_preset(preset, on_invalid="drop")
        reported |= loss(batch_of(random_tokens(10, seed=0), torch.ones(1, 10), loss)).metrics.summarize().keys()
    reported = {re.sub(r"/[0-9.]+-[0-9.]+$", "/", name) for name in reported}
    assert explained - {"trust/*", "trust/<field>", "trust/delta"} == reported
