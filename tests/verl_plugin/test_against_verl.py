"""The losses against verl's own: `vanilla`, `dppo_tv` and `dppo_kl`, in float64."""

import mpmath as mp
import pytest
import torch

from trustregion import PolicyLoss, TokenBatch, binary_divergence

pytest.importorskip("verl")
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

AGG_MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def tokens(seed: int, smallest_log_prob: float, largest_log_prob: float, log_ratio_scale: float):
    """log_prob, log_prob_old, advantages, response_mask, weights of 64 sequences of up to 128 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def uniform():
        return torch.rand(64, 128, generator=generator, dtype=torch.float64)

    def normal():
        return torch.randn(64, 128, generator=generator, dtype=torch.float64)

    largest, smallest = torch.tensor([-largest_log_prob, -smallest_log_prob], dtype=torch.float64).log()
    log_prob_old = -torch.exp(largest + uniform() * (smallest - largest))
    log_prob = (log_prob_old + log_ratio_scale * normal()).clamp(smallest_log_prob, largest_log_prob)
    advantages = normal()
    advantages[:, ::16] = 0
    lengths = torch.randint(1, 129, (64, 1), generator=generator)
    return log_prob, log_prob_old, advantages, (torch.arange(128) < lengths).long(), 2 * uniform()


def verls(name: str, batch, mode: str, **settings):
    log_prob, log_prob_old, advantages, mask, weights = batch
    log_prob = log_prob.clone().requires_grad_()
    config = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **settings)
    loss, metrics = get_policy_loss_fn(name)(log_prob_old, log_prob, advantages, mask, mode, config, weights)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def ours(loss: PolicyLoss, batch, mode: str):
    log_prob, log_prob_old, advantages, mask, weights = batch
    log_prob = log_prob.clone().requires_grad_()
    out = loss(TokenBatch(log_prob, log_prob_old, advantages, mask, weights=weights))
    value = agg_loss(out.token_loss, mask, mode)
    value.backward()
    return value.detach(), log_prob.grad, out


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize(("preset", "eps_high"), [("grpo", 0.2), ("clip_higher", 0.28)])
def test_ratio_clips_equal_vanilla(preset, eps_high, mode):
    for seed, scale in ((0, 0.3), (1, 30.0)):  # the second goes far beyond verl's clamp of log-ratios to +-20
        batch = tokens(seed, smallest_log_prob=-80, largest_log_prob=-1e-7, log_ratio_scale=scale)
        value, grad, metrics = verls("vanilla", batch, mode, clip_ratio_high=eps_high)
        our_value, our_grad, out = ours(PolicyLoss.from_preset(preset), batch, mode)
        torch.testing.assert_close(our_value, value, **EXACT)
        torch.testing.assert_close(our_grad, grad, **EXACT)
        assert ((our_grad != 0) == (grad != 0)).all()
        clipped = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
        assert clipped > 0.05 and out.metrics.summarize()["trust/clip_fraction"] > 0.05
    assert (batch[0] - batch[1]).abs().max() > 50


@pytest.mark.parametrize("mode", AGG_MODES)
def test_dppo_binary_tv_equals_verls(mode):
    for seed, scale in ((2, 1.0), (3, 10.0)):
        batch = tokens(seed, smallest_log_prob=-80, largest_log_prob=-1e-7, log_ratio_scale=scale)
        value, grad, metrics = verls(
            "dppo_tv", batch, mode, clip_ratio=0.15, clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=5.0
        )
        our_value, our_grad, out = ours(PolicyLoss.from_preset("dppo_binary_tv"), batch, mode)
        torch.testing.assert_close(our_value, value, **EXACT)
        torch.testing.assert_close(our_grad, grad, **EXACT)
        assert ((our_grad != 0) == (grad != 0)).all()
        clip_fraction = out.metrics.summarize()["trust/clip_fraction"]
        assert clip_fraction > 0.05


def verls_kl_error(log_prob, log_prob_old):
    """What 1e-8 inside the logs, and masses 1 - p by subtraction, can move verl's binary KL by."""
    rest, rest_old = -torch.expm1(log_prob), -torch.expm1(log_prob_old)
    from_epsilon = rest_old * (torch.log1p(1e-8 / rest_old) - torch.log1p(1e-8 / rest)).abs()
    ulp = 2.0**-52  # of 1, and so of 1 - p, whose log it moves by ulp / (1 - p + 1e-8)
    from_rounding = 4 * ulp * (1 + log_prob.abs() + rest_old / (rest + 1e-8))
    return from_epsilon + from_rounding


@pytest.mark.parametrize("mode", AGG_MODES)
def test_dppo_binary_kl_equals_verls_but_for_its_epsilon(mode):
    """Equal masks, and so equal losses, for all tokens whose divergence is further from delta than verl's error."""
    for seed, scale in ((4, 1.0), (5, 10.0)):
        batch = tokens(seed, smallest_log_prob=-80, largest_log_prob=-1e-7, log_ratio_scale=scale)
        log_prob, log_prob_old, advantages, mask, weights = batch
        margin = (binary_divergence(log_prob, log_prob_old, "kl") - 0.05).abs()
        decided = margin > verls_kl_error(log_prob, log_prob_old)
        assert (~decided).sum() < 0.001 * decided.numel()
        batch = log_prob, log_prob_old, advantages, mask * decided, weights
        value, grad, _ = verls(
            "dppo_kl", batch, mode, clip_ratio=0.05, clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=5.0
        )
        our_value, our_grad, out = ours(PolicyLoss.from_preset("dppo_binary_kl"), batch, mode)
        torch.testing.assert_close(our_value, value, **EXACT)
        torch.testing.assert_close(our_grad, grad, **EXACT)
        assert ((our_grad != 0) == (grad != 0)).all()
        assert out.metrics.summarize()["trust/clip_fraction"] > 0.05


def test_where_verls_epsilon_decides_ours_follows_the_definition():
    """A token that all but uses up the remaining mass: the divergence exceeds .05, and 1e-8 hides that."""
    log_prob_old, log_prob = torch.log1p(torch.tensor([[-5e-3, -1e-12]], dtype=torch.float64)).split(1, -1)
    with mp.workdps(40):
        p, q = mp.exp(mp.mpf(log_prob_old.item())), mp.exp(mp.mpf(log_prob.item()))
        exact = float(p * mp.log(p / q) + (1 - p) * mp.log((1 - p) / (1 - q)))
    assert exact > 0.1 and binary_divergence(log_prob, log_prob_old).item() == pytest.approx(exact, rel=1e-12)
    delta = exact - 0.01
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = log_prob, log_prob_old, one, one.long(), one
    _, grad, _ = verls("dppo_kl", batch, "token-mean", clip_ratio=delta, clip_ratio_low=delta, clip_ratio_high=delta)
    _, our_grad, _ = ours(PolicyLoss.from_preset("dppo_binary_kl", delta=delta), batch, "token-mean")
    assert our_grad.item() == 0 and grad.item() != 0
    assert verls_kl_error(log_prob, log_prob_old).item() > 0.01
