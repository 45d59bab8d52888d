"""Losses as a whole: Band against the divergence mask, golden tokens, gradients, and limits."""

import math
from dataclasses import replace

import pytest
import torch

from trustregion import (
    All,
    Cispo,
    Clip,
    DcpoInterval,
    DivergenceBall,
    EntropyBand,
    Mask,
    PolicyLoss,
    Preserve,
    RatioInterval,
    TokenBatch,
    Verdict,
    load_preset,
    preset_names,
)
from trustregion.divergences import get_divergence

from .helpers import gradient, made_up_parts, random_tokens

DIVERGENCES = ["kl", "reverse_kl", "tv", "chi2", "hellinger", "js"]
EXACT = {"rtol": 1e-12, "atol": 1e-14}


# ---- a ratio is outside the Band interval if and only if the divergence exceeds delta on its side --------------------
@pytest.mark.slow
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


# ---- derivatives -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
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


def test_cispo_gradient_is_the_derivative_of_its_value():
    """Where every weight is clipped, and so a constant of the value too."""
    log_prob, log_prob_old, advantages = smooth_tokens()
    near = (log_prob - log_prob_old).abs() < 0.01
    log_prob = torch.where(near, log_prob_old - 0.01, log_prob).detach().requires_grad_()
    loss = PolicyLoss(RatioInterval(0.001, 0.001), Cispo())
    batch = TokenBatch(log_prob, log_prob_old, advantages, torch.ones_like(advantages))
    assert torch.autograd.gradcheck(lambda x: loss(replace(batch, log_prob=x)).token_loss, (log_prob,))


@pytest.mark.parametrize("region", [
    RatioInterval(0.2, 0.28), DcpoInterval(0.16, 0.2, ratio_cap=10), DivergenceBall("kl", delta=0.05, ratio_cap=10)
], ids=["ratio_interval", "dcpo", "band"])
@pytest.mark.parametrize(("beta_1", "beta_2"), [(1.0, 1.0), (0.75, 1.5)])
def test_the_corners_of_every_surrogate(region, beta_1, beta_2):
    """The factor on A d ln pi inside and outside, for either sign of A, as the methods' papers give it."""
    log_prob, log_prob_old, advantages = random_tokens(4000, seed=3)
    verdict = bounds_of(region, log_prob_old)
    x = log_prob - log_prob_old
    lower, upper, ratio = verdict[0].exp(), verdict[1].exp(), x.exp()
    above, below = (x > verdict[1]) & (advantages > 0), (x < verdict[0]) & (advantages < 0)
    assert above.sum() > 50 and below.sum() > 50
    factor = {
        Clip(): torch.where(above | below, 0.0, ratio),
        Mask(): torch.where(above | below, 0.0, ratio),
        Preserve(None, beta_1, beta_2): torch.where(
            above, beta_2 * upper, torch.where(below, beta_1 * lower, ratio)
        ),
        Cispo(): torch.clamp(ratio, lower, upper),
    }
    for surrogate, expected in factor.items():
        if isinstance(surrogate, Mask) and getattr(region, "ratio_cap", None) and isinstance(region, DivergenceBall):
            continue  # the cap is no part of the divergence, and a configuration error with a mask
        grad, out = gradient(PolicyLoss(region, surrogate), log_prob, log_prob_old, advantages)
        torch.testing.assert_close(-grad, expected * advantages, **EXACT)
        if isinstance(surrogate, Clip):  # preserve too: gradients are kept, values are not changed
            clipped = torch.minimum(ratio * advantages, torch.clamp(ratio, lower, upper) * advantages)
            torch.testing.assert_close(out.token_loss, -clipped, **EXACT)
        blocked = (above | below) if type(surrogate) in (Clip, Mask) else torch.zeros_like(above)
        assert torch.equal(out.active, ~blocked)
        assert out.metrics.summarize()["trust/clip_fraction"] == (above | below).double().mean()


def bounds_of(region, log_prob_old) -> tuple[torch.Tensor, torch.Tensor]:
    from trustregion.batch import prepare

    ones = torch.ones_like(log_prob_old)
    verdict = region.judge(prepare(TokenBatch(log_prob_old, log_prob_old, ones, ones)), as_interval=True)
    return verdict.log_lower, verdict.log_upper


@pytest.mark.parametrize("preset", preset_names())
def test_no_gradient_flows_into_anything_but_log_prob(preset):
    loss = PolicyLoss.from_preset(preset)
    tensors = [x.requires_grad_() for x in random_tokens(50, seed=4)]
    parts = {"weights": torch.rand_like(tensors[0])} | made_up_parts(loss, *(x.detach() for x in tensors[:2]))
    parts = {name: part.clone().requires_grad_() for name, part in parts.items()}
    out = loss(TokenBatch(*tensors, torch.ones(1, 50), **parts))
    out.token_loss.sum().backward()
    assert tensors[0].grad is not None
    assert all(x.grad is None for x in (*tensors[1:], *parts.values()))


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


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_largest_radius_equals_no_clipping(divergence):
    """Radii without limit where the divergence has none, else its largest value."""
    log_prob, log_prob_old, advantages = random_tokens(5000, seed=6)
    ratio = (log_prob - log_prob_old).exp()
    largest = get_divergence(divergence).max_value
    for delta in (1e9, 1e300) if largest == math.inf else (largest,):
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


# ---- conjunctions and hard blocks ------------------------------------------------------------------------------------
def test_a_hard_block_stops_both_directions():
    class Alternating:
        """Nothing is outside, every other token is blocked."""

        has_interval = True
        def requires(self, update):
            return frozenset()

        def judge(self, tokens, as_interval):
            nowhere = torch.zeros_like(tokens.live)
            bound = torch.full_like(tokens.log_ratio, torch.inf)
            return Verdict(nowhere, nowhere, torch.arange(nowhere.shape[-1]) % 2 == 1, -bound, bound)

    tokens = random_tokens(400, seed=8)
    for surrogate in (Clip(), Mask(), Preserve(), Cispo()):
        grad, out = gradient(PolicyLoss(Alternating(), surrogate), *tokens)
        assert (grad[:, ::2] != 0).all() and out.active[:, ::2].all()
        assert (grad[:, 1::2] == 0).all() and (out.token_loss[:, 1::2] == 0).all() and not out.active[:, 1::2].any()
        assert out.metrics.summarize()["trust/clip_fraction"] == 0.5


def test_a_conjunction_is_outside_where_any_part_is():
    log_prob, log_prob_old, advantages = random_tokens(5000, seed=9)
    interval, ball = RatioInterval(0.2, 0.28), DivergenceBall("kl", delta=0.05)
    both, first, second = (
        gradient(PolicyLoss(region, Clip()), log_prob, log_prob_old, advantages)[1]
        for region in (All([interval, ball]), interval, ball)
    )
    assert torch.equal(both.active, first.active & second.active)
    assert (first.active != second.active).any()
    # Where both clip, the narrower of the two bounds gives the value.
    lower, upper = (torch.stack(x) for x in zip(*(bounds_of(r, log_prob_old) for r in (interval, ball)), strict=True))
    clipped = torch.clamp(log_prob - log_prob_old, lower.amax(0), upper.amin(0)).exp()
    ratio = (log_prob - log_prob_old).exp()
    torch.testing.assert_close(both.token_loss, -torch.minimum(ratio * advantages, clipped * advantages), **EXACT)


def test_the_entropy_band_is_open_and_handles_zero():
    old = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1e-30, 2.0]], dtype=torch.float64)
    new = torch.tensor([[0.75, 0.76, 1.25, 1.24, 0.0, 1e-9, 1e-30, 0.0]], dtype=torch.float64)
    x = torch.full_like(old, -1.0)
    loss = PolicyLoss(EntropyBand(0.25, 0.25), Mask())
    grad, out = gradient(loss, x, x, torch.ones_like(x), entropy=new, entropy_old=old)
    assert out.active.tolist() == [[False, True, False, True, True, False, True, False]]
    assert torch.equal(grad != 0, out.active)


def test_the_entropy_band_can_act_in_every_kth_update_only():
    x = torch.full((1, 2), -1.0)
    loss = PolicyLoss.from_preset("erc_dapo", every_k_steps=3)
    looked_at = TokenBatch(x, x, x, x, entropy=torch.tensor([[2.0, 1.0]]), entropy_old=torch.ones(1, 2))
    stats = []
    for update in range(6):
        batch = replace(looked_at, update=update) if update % 3 == 0 else TokenBatch(x, x, x, x, update=update)
        out = loss(batch)
        stats.append(out.metrics)
        assert out.active.tolist() == ([[False, True]] if update % 3 == 0 else [[True, True]])
    summary = stats[0].merge(*stats[1:]).summarize()
    assert summary["trust/entropy_looked_at"] == pytest.approx(1 / 3)
    assert summary["trust/entropy_ratio_mean"] == 1.5 and summary["trust/entropy_gained_fraction"] == 0.5
    assert summary["trust/blocked_by_entropy"] == pytest.approx(1 / 6)
    assert stats[1].summarize()["trust/entropy_ratio_p95"] == 0
    with pytest.raises(ValueError, match="entropy and entropy_old: missing"):
        loss(TokenBatch(x, x, x, x, update=3))


def test_dcpo_bounds_are_those_of_its_formula():
    p = torch.logspace(-30, 0, 500, dtype=torch.float64)[None]
    lower, upper = bounds_of(DcpoInterval(0.16, 0.2), p.log())
    torch.testing.assert_close(lower.exp(), 0.5 + 0.5 * (1 - 0.64 / p).clamp(min=0).sqrt())
    torch.testing.assert_close(upper.exp(), 0.5 + 0.5 * (1 + 0.8 / p).sqrt())
    lower, upper = bounds_of(DcpoInterval(1e-9, 1e-9), torch.zeros(1, 1, dtype=torch.float64))
    assert upper.item() == pytest.approx(1e-9, rel=1e-8) and lower.item() == pytest.approx(-1e-9, rel=1e-8)
    lower, upper = bounds_of(DcpoInterval(0.16, 0.2, ratio_cap=10), torch.tensor([[-1e3, -0.1]]))
    assert upper[0, 0].exp() == pytest.approx(10) and upper.isfinite().all() and lower.isfinite().all()


# ---- presets ---------------------------------------------------------------------------------------------------------
def test_presets_are_the_published_methods():
    def band(divergence="kl", **fields):
        return DivergenceBall(divergence, delta=0.05, ratio_cap=10.0, **fields)

    erc, clip = EntropyBand(0.05, 0.05), Clip(10.0)
    expected = {
        "grpo": (RatioInterval(0.2, 0.2), Clip(3.0), "old"),
        "clip_higher": (RatioInterval(0.2, 0.28), Clip(3.0), "old"),
        "dcpo": (DcpoInterval(0.16, 0.2, 10.0), clip, "old"),
        **{f"band_{f}": (band(f), clip, "old") for f in DIVERGENCES},
        "band_alpha": (band("alpha", alpha=0.5), clip, "old"),
        "band_kl_relaxed": (band(relax_low=0.2, relax_high=0.28), clip, "old"),
        "band_kl_preserve": (band(), Preserve(10.0), "old"),
        "band_kl_cispo": (band(), Cispo(), "old"),
        "band_kl_erc": (All([band(), erc]), clip, "old"),
        "dppo_binary_tv": (DivergenceBall("tv", delta=0.15), Mask(5.0), "rollout"),
        "dppo_binary_kl": (DivergenceBall("kl", delta=0.05), Mask(5.0), "rollout"),
        "dppo_topk_tv": (DivergenceBall("tv", "topk", delta=0.2, K=20), Mask(5.0), "rollout"),
        "dppo_topk_kl": (DivergenceBall("kl", "topk", delta=0.05, K=20), Mask(5.0), "rollout"),
        "gppo": (RatioInterval(0.2, 0.2), Preserve(10.0), "old"),
        "ce_gppo": (RatioInterval(0.2, 0.2), Preserve(10.0, beta_1=0.75, beta_2=1.0), "old"),
        "cispo": (RatioInterval(0.2, 0.28), Cispo(), "old"),
        "erc_dapo": (All([RatioInterval(0.2, 0.28), erc]), clip, "old"),
        "erc_gppo": (All([RatioInterval(0.2, 0.2), erc]), Preserve(10.0), "old"),
    }
    assert preset_names() == sorted(expected)
    for name, method in expected.items():
        loaded = load_preset(name)
        assert (loaded.region, loaded.surrogate, loaded.anchor) == method


# ---- why a token is blocked ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", preset_names())
def test_a_token_is_active_unless_something_blocks_it(preset):
    loss = PolicyLoss.from_preset(preset)
    log_prob, log_prob_old, advantages = random_tokens(20_000, seed=5, dtype=torch.float32)
    mask = torch.rand(log_prob.shape, generator=torch.Generator().manual_seed(5)) < 0.8
    batch = TokenBatch(log_prob, log_prob_old, advantages, mask, **made_up_parts(loss, log_prob, log_prob_old))
    out, found = loss(batch), loss.diagnose(batch)
    assert torch.equal(out.active, mask & ~torch.stack([*found.blocked_by.values()]).any(0))
    share = {cause: (blocked.sum() / mask.sum()).item() for cause, blocked in found.blocked_by.items()}
    summary = out.metrics.summarize()
    assert share["entropy"] == pytest.approx(summary.get("trust/blocked_by_entropy", 0), abs=1e-6)
    assert share["region"] == pytest.approx(summary["trust/blocked_by_region"], abs=1e-6)
    if share["entropy"] == 0:  # the metric leaves out what the entropy blocks too
        assert share["dual_clip"] == pytest.approx(summary["trust/blocked_by_dual_clip"], abs=1e-6)


def test_each_cause_is_named():
    old = torch.full((1, 6), 0.3).log()
    ratio = torch.tensor([[1.0, 2.0, 2.0, 1.0, 3.2, 2.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, 1.0]])
    entropy = torch.tensor([[1.0, 1.0, 2.0, 2.0, 1.0, 9.0]])
    batch = TokenBatch(old + ratio.log(), old, advantages, torch.tensor([[1, 1, 1, 1, 1, 0]]), entropy=entropy, entropy_old=torch.ones(1, 6))
    region = All((RatioInterval(0.2, 0.2), EntropyBand(0.05, 0.05)))

    def causes(surrogate) -> dict[str, list[int]]:
        found = PolicyLoss(region, surrogate).diagnose(batch)
        return {cause: blocked[0].nonzero().flatten().tolist() for cause, blocked in found.blocked_by.items()}

    assert causes(Clip(dual_clip=3.0)) == {"region": [1, 2], "entropy": [2, 3], "dual_clip": [4]}
    # What keeps a gradient outside the region is not blocked by it.
    assert causes(Preserve(dual_clip=3.0)) == {"region": [], "entropy": [2, 3], "dual_clip": [4]}
    assert causes(Mask()) == {"region": [1, 2], "entropy": [2, 3], "dual_clip": []}
