"""Losses as a whole: Band against the divergence mask, golden tokens, gradients, and limits."""

from dataclasses import replace

import pytest
import torch

from trustregion import (
    Clip,
    DivergenceBall,
    Mask,
    PolicyLoss,
    RatioInterval,
    TokenBatch,
    Verdict,
    load_preset,
    preset_names,
)

from .helpers import golden_tokens, gradient, random_tokens

DIVERGENCES = ["kl", "tv", "chi2"]
EXACT = {"rtol": 1e-12, "atol": 1e-14}


# ---- a ratio is outside the Band interval if and only if the divergence exceeds delta on its side --------------------
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("delta_low", "delta_high"), [(0.05, 0.05), (0.3, 0.01)])
def test_band_blocks_the_very_tokens_that_the_divergence_mask_blocks(divergence, delta_low, delta_high):
    ball = DivergenceBall(divergence, delta_low=delta_low, delta_high=delta_high)
    tokens = random_tokens(120_000, seed=1)
    band, band_out = gradient(PolicyLoss(ball, Clip()), *tokens)
    mask, mask_out = gradient(PolicyLoss(ball, Mask()), *tokens)

    differing = ((band != 0) != (mask != 0)).sum().item()
    assert differing == 0, f"{differing} tokens differ in gradient support"
    assert (band_out.active == (band != 0)).all() and (mask_out.active == (mask != 0)).all()
    # The comparison is about something: both sides block, and neither blocks nearly all.
    summary = band_out.metrics.summarize()
    assert summary["trust/clip_fraction_up"] > 0.01 and summary["trust/clip_fraction_down"] > 0.01
    assert summary["trust/clip_fraction"] < 0.6
    # Where a token survives, the weights are the same too.
    alive = mask != 0
    torch.testing.assert_close(band[alive], mask[alive], **EXACT)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_band_and_mask_agree_where_the_anchor_is_certain(divergence):
    log_prob = -torch.logspace(-6, 1.2, 2000, dtype=torch.float64).repeat(2, 1)
    advantages = torch.ones_like(log_prob) * torch.tensor([[1.0], [-1.0]])
    ball = DivergenceBall(divergence, delta=0.05)
    band, _ = gradient(PolicyLoss(ball, Clip()), log_prob, torch.zeros_like(log_prob), advantages)
    mask, _ = gradient(PolicyLoss(ball, Mask()), log_prob, torch.zeros_like(log_prob), advantages)
    assert ((band != 0) == (mask != 0)).all()
    assert (band[0] != 0).all() and (band[1] == 0).any()


# ---- golden tokens ---------------------------------------------------------------------------------------------------
def golden_batch(dtype=torch.float64):
    golden = golden_tokens()
    rows = (golden["expected"]["logp_new"], golden["expected"]["logp_old"], golden["inputs"]["advantages"])
    log_prob, log_prob_old, advantages = (torch.tensor([row], dtype=dtype) for row in rows)
    return log_prob, log_prob_old, advantages, torch.tensor([golden["inputs"]["response_mask"]])


def golden_mask_loss(name: str, C=None) -> PolicyLoss:
    mask = golden_tokens()["expected"]["masks"][name]
    divergence = mask["divergence"].removeprefix("binary/")
    return PolicyLoss(
        DivergenceBall(divergence, delta_low=mask["delta_low"], delta_high=mask["delta_high"]), Mask(C=C)
    )


BINARY_MASKS = ["binary_tv_0.15", "binary_tv_0.2", "binary_kl_0.05", "binary_tv_low0.2_high0.1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BINARY_MASKS)
def test_masks_equal_golden_values(name, dtype):
    *tokens, _ = golden_batch(dtype)
    _, out = gradient(golden_mask_loss(name), *tokens)
    assert out.active.int().tolist() == [golden_tokens()["expected"]["masks"][name]["mask"]]


@pytest.mark.parametrize("C", [None, 3.0, 5.0, 20.0])
@pytest.mark.parametrize("name", ["binary_tv_0.15", "binary_kl_0.05"])
def test_dppo_losses_equal_golden_values(name, C):
    golden = golden_tokens()["expected"]["dppo_loss"][f"{name}__C{C}"]
    *tokens, response_mask = golden_batch()
    grad, out = gradient(golden_mask_loss(name, C), *tokens, response_mask)
    live = response_mask.sum()
    torch.testing.assert_close(-grad, torch.tensor([golden["coef"]], dtype=torch.float64), **EXACT)
    assert (out.token_loss.sum() / live).item() == pytest.approx(golden["score_function_loss"], rel=1e-12)
    assert (-grad.sum() / live).item() == pytest.approx(golden["paper_objective"], rel=1e-12)


@pytest.mark.parametrize(("dual_clip", "suffix"), [(None, ""), (10.0, "_with_dual_clip_c10")])
def test_dapo_equals_golden_values(dual_clip, suffix):
    golden = golden_tokens()["expected"]["losses"]["dapo"]
    *tokens, response_mask = golden_batch()
    grad, out = gradient(PolicyLoss(RatioInterval(0.2, 0.28), Clip(dual_clip)), *tokens, response_mask)
    torch.testing.assert_close(-grad, torch.tensor([golden[f"coef{suffix}"]], dtype=torch.float64), **EXACT)
    value = golden["loss_value_code_dual_clip_c10" if dual_clip else "loss_paper"]
    assert (out.token_loss.sum() / response_mask.sum()).item() == pytest.approx(value, rel=1e-12)


# ---- derivatives -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", [
    PolicyLoss(RatioInterval(0.2, 0.28), Clip(dual_clip=3.0)),
    PolicyLoss(DivergenceBall("kl", delta=0.05), Clip()),
    PolicyLoss(DivergenceBall("tv", delta=0.05, ratio_cap=10, relax_low=0.2, relax_high=0.28), Clip(dual_clip=10.0)),
], ids=["ratio_interval", "band", "band_with_caps"])
def test_clip_gradient_is_the_derivative_of_its_value(loss):
    log_prob, log_prob_old, advantages = smooth_tokens()
    weights = torch.rand_like(advantages)
    batch = TokenBatch(log_prob, log_prob_old, advantages, torch.ones_like(advantages), weights=weights)
    assert torch.autograd.gradcheck(lambda x: loss(replace(batch, log_prob=x)).token_loss, (log_prob,))


def test_mask_gradient_is_the_derivative_of_its_value():
    """Where the importance weight is truncated, and so a constant of the value too."""
    log_prob, log_prob_old, advantages = smooth_tokens()
    assert (log_prob - log_prob_old).min() > -2.1
    loss = PolicyLoss(DivergenceBall("kl", delta=0.05), Mask(C=0.1))
    batch = TokenBatch(log_prob, log_prob_old, advantages, torch.ones_like(advantages))
    assert torch.autograd.gradcheck(lambda x: loss(replace(batch, log_prob=x)).token_loss, (log_prob,))


def smooth_tokens():
    """150 tokens that keep some distance from probability 1; the chance that gradcheck steps over a kink is nil."""
    log_prob, log_prob_old, advantages = random_tokens(150, seed=2)
    log_prob = (log_prob_old + (log_prob - log_prob_old).clamp(-2, 2)).clamp(max=-1e-3)
    return log_prob.requires_grad_(), log_prob_old, advantages


def test_mask_weighs_tokens_by_the_truncated_ratio():
    log_prob, log_prob_old, advantages = random_tokens(300, seed=3)
    grad, out = gradient(PolicyLoss(DivergenceBall("kl", delta=0.05), Mask(C=2.0)), log_prob, log_prob_old, advantages)
    coefficient = -(log_prob - log_prob_old).exp().clamp(max=2.0) * out.active * advantages
    torch.testing.assert_close(grad, coefficient, **EXACT)
    torch.testing.assert_close(out.token_loss, coefficient * log_prob, **EXACT)


def test_no_gradient_flows_into_anything_but_log_prob():
    tensors = [x.requires_grad_() for x in random_tokens(50, seed=4)]
    weights = torch.rand_like(tensors[0]).requires_grad_()
    out = PolicyLoss.from_preset("band_kl")(TokenBatch(*tensors, torch.ones(1, 50), weights=weights))
    out.token_loss.sum().backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None and tensors[2].grad is None and weights.grad is None


# ---- limits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_nothing_is_clipped(preset, dtype):
    _, log_prob_old, advantages = random_tokens(5000, seed=5, dtype=dtype)
    log_prob_old[0, :100] = 0
    grad, out = gradient(PolicyLoss.from_preset(preset), log_prob_old, log_prob_old, advantages)
    summary = out.metrics.summarize()
    assert summary["trust/clip_fraction"] == 0 and out.active.all()
    assert summary["trust/ratio_mean"] == 1 and summary["trust/divergence_max"] == 0
    torch.testing.assert_close(grad, -advantages)  # the policy gradient


@pytest.mark.parametrize("divergence", ["kl", "chi2"])
def test_a_huge_radius_equals_no_clipping(divergence):
    log_prob, log_prob_old, advantages = random_tokens(5000, seed=6)
    ratio = (log_prob - log_prob_old).exp()
    for delta in (1e9, 1e300):
        loss = PolicyLoss(DivergenceBall(divergence, delta=delta), Clip())
        grad, out = gradient(loss, log_prob, log_prob_old, advantages)
        assert out.active.all()
        torch.testing.assert_close(out.token_loss, -ratio * advantages, **EXACT)
        torch.testing.assert_close(grad, -ratio * advantages, **EXACT)


def test_clipped_tokens_keep_their_value_at_the_bound():
    loss = PolicyLoss(RatioInterval(0.2, 0.28), Clip(dual_clip=3.0))
    log_ratio = torch.log(torch.tensor([[1.5, 0.5, 1.5, 0.5, 4.0]]))
    advantages = torch.tensor([[2.0, -2.0, -2.0, 2.0, -2.0]])
    _, out = gradient(loss, log_ratio - 3, torch.full_like(log_ratio, -3.0), advantages)
    torch.testing.assert_close(out.token_loss, torch.tensor([[-2.56, 1.6, 3.0, -1.0, 6.0]]))
    assert out.active.tolist() == [[False, False, True, True, False]]


def test_relaxation_and_cap_shape_the_interval():
    ball = {"divergence": "kl", "delta": 0.05}
    log_prob_old = torch.log(torch.tensor([[0.9, 0.9, 0.001, 0.001]]))
    log_ratio = torch.log(torch.tensor([[1.1, 0.82, 9.0, 11.0]]))  # Band's interval is [.867, 1.076], then [0, 53]
    advantages = torch.tensor([[1.0, -1.0, 1.0, 1.0]])

    def active(**shape):
        loss = PolicyLoss(DivergenceBall(**ball, **shape), Clip())
        return gradient(loss, log_prob_old + log_ratio, log_prob_old, advantages)[1].active.tolist()

    assert active() == [[False, False, True, True]]
    assert active(relax_low=0.2, relax_high=0.28) == [[True, True, True, True]]
    assert active(ratio_cap=10) == [[False, False, True, False]]


def test_weights_multiply_token_losses():
    tokens = random_tokens(60, seed=7)
    tokens = [x.reshape(4, 15) for x in tokens]
    loss = PolicyLoss.from_preset("clip_higher")
    plain, _ = gradient(loss, *tokens)
    for shape in ((4, 15), (4, 1)):
        weights = torch.rand(shape, dtype=torch.float64)
        weighted, _ = gradient(loss, *tokens, weights=weights)
        torch.testing.assert_close(weighted, plain * weights, **EXACT)


def test_a_hard_block_stops_both_directions():
    class Alternating:
        """Nothing is outside, every other token is blocked."""

        has_interval = True

        def judge(self, tokens, as_interval):
            nowhere = torch.zeros_like(tokens.live)
            bound = torch.full_like(tokens.log_ratio, torch.inf)
            return Verdict(nowhere, nowhere, torch.arange(nowhere.shape[-1]) % 2 == 1, -bound, bound)

    tokens = random_tokens(400, seed=8)
    for surrogate in (Clip(), Mask()):
        grad, out = gradient(PolicyLoss(Alternating(), surrogate), *tokens)
        assert (grad[:, ::2] != 0).all() and out.active[:, ::2].all()
        assert (grad[:, 1::2] == 0).all() and (out.token_loss[:, 1::2] == 0).all() and not out.active[:, 1::2].any()
        assert out.metrics.summarize()["trust/clip_fraction"] == 0.5


# ---- presets ---------------------------------------------------------------------------------------------------------
def test_presets_are_the_published_methods():
    band = {"partition": "binary", "delta": 0.05, "ratio_cap": 10.0}
    expected = {
        "grpo": (RatioInterval(0.2, 0.2), Clip(3.0), "old"),
        "clip_higher": (RatioInterval(0.2, 0.28), Clip(3.0), "old"),
        "band_kl": (DivergenceBall("kl", **band), Clip(10.0), "old"),
        "band_tv": (DivergenceBall("tv", **band), Clip(10.0), "old"),
        "band_chi2": (DivergenceBall("chi2", **band), Clip(10.0), "old"),
        "dppo_binary_tv": (DivergenceBall("tv", delta=0.15), Mask(5.0), "rollout"),
        "dppo_binary_kl": (DivergenceBall("kl", delta=0.05), Mask(5.0), "rollout"),
    }
    assert preset_names() == sorted(expected)
    for name, method in expected.items():
        loaded = load_preset(name)
        assert (loaded.region, loaded.surrogate, loaded.anchor) == method
