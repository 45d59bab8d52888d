"""What may stand at masked positions, what is refused at live ones, and values at the edge of the float range."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trustregion import PolicyLoss, RatioInterval, TokenBatch, preset_names

from .helpers import gradient, made_up_parts, random_tokens

PRESETS = preset_names()
HOSTILE = [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0]


@pytest.mark.parametrize("preset", PRESETS)
def test_masked_positions_may_hold_anything(preset):
    # Row 0 is masked and holds every pair of hostile values, as (log_prob, log_prob_old) and as (advantages, weights);
    # row 1 is live and holds ordinary tokens.
    pairs = torch.cartesian_prod(torch.tensor(HOSTILE), torch.tensor(HOSTILE))
    log_prob, log_prob_old = pairs.T
    advantages, weights = pairs.flip(0).T
    live = torch.arange(2)[:, None].expand(2, len(pairs)) == 1
    clean = [x.reshape(2, -1).float() for x in random_tokens(2 * len(pairs), seed=0)]
    hostile = (log_prob, log_prob_old, advantages, weights)
    dirty = [torch.where(live, x, y) for x, y in zip([*clean, torch.ones_like(clean[0])], hostile, strict=True)]
    loss = PolicyLoss.from_preset(preset)
    parts = made_up_parts(loss, *clean[:2])
    nothing = torch.tensor(HOSTILE).repeat(len(pairs) // len(HOSTILE))
    dirty_parts = {
        name: torch.where(live if part.dim() == 2 else live[..., None], part, nothing if part.dim() == 2 else math.nan)
        for name, part in parts.items()
    }
    expected_grad, expected = gradient(loss, *clean, live, **parts)
    grad, out = gradient(loss, *dirty[:3], live, weights=dirty[3], **dirty_parts)
    assert (out.token_loss[~live] == 0).all() and (grad[~live] == 0).all() and not out.active[~live].any()
    assert torch.equal(out.token_loss, expected.token_loss) and torch.equal(grad, expected_grad)
    assert out.metrics.summarize() == expected.metrics.summarize()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_and_advantages_stay_finite(preset, dtype):
    log_ratio = [-1e3, -89.0, -20.5, -20, -1.0, 0.0, 1.0, 20.0, 20.5, 89.0, 1e3]
    advantages = [-1e8, -1.0, 0.0, 1.0, 1e8]
    log_ratio, advantages = torch.meshgrid(
        torch.tensor(log_ratio, dtype=dtype), torch.tensor(advantages, dtype=dtype), indexing="ij"
    )
    for base in (0.0, -1.0, -100.0):
        log_prob_old = base - log_ratio.clamp(min=0)
        grad, out = gradient(PolicyLoss.from_preset(preset), log_prob_old + log_ratio, log_prob_old, advantages)
        assert out.token_loss.isfinite().all() and grad.isfinite().all()
        assert all(math.isfinite(value) for value in out.metrics.summarize().values())
        assert (out.active | (grad == 0)).all() and ((grad != 0) | ~out.active | (advantages == 0)).all()


def test_clip_gives_no_gradient_beyond_a_log_ratio_of_20():
    log_ratio = torch.tensor([[-20.5, 20.5, -19.5, 19.5]])
    tokens = log_ratio - 30, torch.full_like(log_ratio, -30.0), torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    grad, out = gradient(PolicyLoss.from_preset("band_kl", ratio_cap=None), *tokens)
    assert out.active.tolist() == [[False, False, True, True]]
    assert (grad != 0).tolist() == [[False, False, True, True]]
    assert out.metrics.summarize()["trust/clip_fraction"] == 0.5


@pytest.mark.parametrize("preset", PRESETS)
def test_a_fully_masked_batch_gives_zero(preset):
    nothing = torch.full((2, 3), math.nan)
    grad, out = gradient(PolicyLoss.from_preset(preset), nothing, nothing, nothing, torch.zeros(2, 3))
    assert (out.token_loss == 0).all() and (grad == 0).all() and not out.active.any()
    assert set(out.metrics.summarize().values()) == {0.0}


def test_masked_positions_are_zero_whatever_the_surrogate():
    class Likelihood:
        needs_interval = False

        def __call__(self, tokens, verdict):
            return -tokens.log_prob, torch.ones_like(tokens.live)

    x = torch.full((1, 2), -3.0)
    grad, out = gradient(PolicyLoss(RatioInterval(0.2, 0.2), Likelihood()), x, x, x, torch.tensor([[1, 0]]))
    assert out.token_loss.tolist() == [[3.0, 0.0]] and grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("preset", PRESETS)
def test_an_empty_batch_is_fine(preset):
    nothing = torch.zeros(0, 7)
    grad, out = gradient(PolicyLoss.from_preset(preset), nothing, nothing, nothing)
    assert out.token_loss.shape == grad.shape == (0, 7)
    assert set(out.metrics.summarize().values()) == {0.0}


@pytest.mark.parametrize(("name", "value"), [
    ("log_prob_old", -math.inf), ("log_prob_old", math.nan), ("log_prob_old", math.inf), ("log_prob_old", 1.1e-4),
    ("log_prob", -math.inf), ("log_prob", math.nan), ("log_prob", 0.5),
    ("advantages", math.nan), ("advantages", math.inf), ("weights", math.nan),
])
def test_invalid_live_tokens_are_refused(name, value):
    tensors = {"log_prob": -1.0, "log_prob_old": -1.0, "advantages": 1.0, "weights": 1.0}
    tensors = {key: torch.full((2, 3), number) for key, number in tensors.items()}
    tensors[name][1, 1:] = value
    with pytest.raises(ValueError, match=rf"live tokens of \(2, 3\): 2 in {name} \(must be finite"):
        PolicyLoss.from_preset("band_kl")(TokenBatch(**tensors, response_mask=torch.ones(2, 3)))
    tensors[name][1, 1:] = 0.9e-4
    PolicyLoss.from_preset("band_kl")(TokenBatch(**tensors, response_mask=torch.ones(2, 3)))


@pytest.mark.parametrize(("name", "value"), [
    ("entropy", math.nan), ("entropy_old", math.inf), ("entropy", -1e-3),
    ("cell_log_prob", math.nan), ("cell_log_prob_old", 1.1e-4),
])
def test_invalid_entropies_and_cells_are_refused(name, value):
    loss = PolicyLoss.from_preset("erc_dapo" if "entropy" in name else "dppo_topk_tv", **({} if "entropy" in name else {"K": 2}))
    x = torch.full((1, 3), -1.0)
    parts = made_up_parts(loss, x, x)
    parts[name] = parts[name].clone()
    parts[name].view(1, 3, -1)[0, 1, -1] = value
    with pytest.raises(ValueError, match=rf"1 in {name} \(must be"):
        gradient(loss, x, x, x, **parts)
    mask = torch.tensor([[1, 0, 1]])
    assert gradient(loss, x, x, x, mask, **parts)[1].token_loss.isfinite().all()


def test_what_the_region_needs_must_be_there():
    x = torch.full((1, 3), -1.0)
    with pytest.raises(ValueError, match="entropy_old: missing from the batch, and this loss's region needs entropy and"):
        PolicyLoss.from_preset("erc_gppo")(TokenBatch(x, x, x, x, entropy=-x))
    with pytest.raises(ValueError, match="cell_log_prob and cell_log_prob_old: missing"):
        PolicyLoss.from_preset("dppo_topk_kl")(TokenBatch(x, x, x, x))
    cells = torch.full((1, 3, 7), -1.0)
    with pytest.raises(ValueError, match=r"has 7 cells a token: must be K \+ 2 = 22"):
        PolicyLoss.from_preset("dppo_topk_kl")(TokenBatch(x, x, x, x, cell_log_prob=cells, cell_log_prob_old=cells))


@pytest.mark.parametrize("preset", PRESETS)
def test_invalid_tokens_can_be_dropped_and_are_counted(preset):
    """They change nothing else: the rest is as if they had been masked."""
    clean = [x.reshape(4, 25) for x in random_tokens(100, seed=5, dtype=torch.float32)]
    loss = PolicyLoss.from_preset(preset, on_invalid="drop")
    parts = made_up_parts(loss, *clean[:2])
    mask = torch.ones(4, 25)
    mask[3, 20:] = 0
    bad = [x.clone() for x in clean]
    bad[0][0, 0], bad[0][0, 1], bad[1][1, 2], bad[1][1, 3], bad[2][2, 4] = math.nan, 0.1, -math.inf, math.nan, math.inf
    bad[0][3, 22] = math.nan  # masked: not counted
    kept = mask.clone()
    kept[[0, 0, 1, 1, 2], [0, 1, 2, 3, 4]] = 0
    expected_grad, expected = gradient(loss, *clean, kept, **parts)
    grad, out = gradient(loss, *bad, mask, **parts)
    assert torch.equal(grad, expected_grad) and torch.equal(out.token_loss, expected.token_loss)
    summary, expected_summary = out.metrics.summarize(), expected.metrics.summarize()
    assert summary.pop("trust/dropped_tokens") == 5 and expected_summary.pop("trust/dropped_tokens") == 0
    assert summary == expected_summary
    with pytest.raises(ValueError, match="set on_invalid to 'drop'"):
        gradient(PolicyLoss.from_preset(preset), *bad, mask, **parts)


def test_shapes_that_differ_are_refused():
    x = torch.full((2, 3), -1.0)
    for wrong in ({"log_prob_old": x[:, :1]}, {"advantages": x[0]}, {"response_mask": x[:1]}, {"weights": x[:1]}):
        batch = {"log_prob": x, "log_prob_old": x, "advantages": x, "response_mask": x} | wrong
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} has shape"):
            PolicyLoss.from_preset("grpo")(TokenBatch(**batch))


@pytest.mark.parametrize("preset", PRESETS)
def test_log_probs_slightly_above_zero_count_as_zero_but_keep_their_gradient(preset):
    above, zero, advantages = torch.tensor([[1e-4, 5e-5]]), torch.zeros(1, 2), torch.tensor([[1.0, -1.0]])
    loss = PolicyLoss.from_preset(preset)
    grad, out = gradient(loss, above, above, advantages)
    expected_grad, expected = gradient(loss, zero, zero, advantages)
    assert torch.equal(out.token_loss, expected.token_loss)
    assert torch.equal(grad, expected_grad) and (grad != 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_rounding_noise_of_a_certain_token_is_no_move(preset):
    """A float32 log-prob of 0 says that 1 - p is below 3e-8, not that it is 0."""
    ulp = 2.0**-24
    log_prob_old = torch.tensor([[0.0, 0.0, -ulp, -2 * ulp]])
    log_prob = torch.tensor([[-ulp, -4 * ulp, 0.0, -ulp]])
    loss = PolicyLoss.from_preset(preset)
    entropies = {"entropy": torch.ones(1, 4), "entropy_old": torch.ones(1, 4)} if "entropy" in loss.requires else {}
    for advantage in (1.0, -1.0):
        _, out = gradient(loss, log_prob, log_prob_old, torch.full_like(log_prob, advantage), **entropies)
        assert out.active.all()
        assert out.metrics.summarize()["trust/divergence_max"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decides_like_float32_on_the_same_values(preset, dtype):
    rounded = [x.clamp(-40, 40).to(dtype) for x in random_tokens(5000, seed=1)]
    loss = PolicyLoss.from_preset(preset)
    _, half = gradient(loss, *rounded)
    _, single = gradient(loss, *(x.float() for x in rounded))
    assert half.token_loss.dtype == torch.float32
    assert torch.equal(half.active, single.active) and torch.equal(half.token_loss, single.token_loss)


@pytest.mark.parametrize("preset", PRESETS)
def test_results_are_repeatable_and_leave_the_random_state_alone(preset):
    tokens = random_tokens(500, seed=2)
    state = torch.get_rng_state()
    first, second = (gradient(PolicyLoss.from_preset(preset), *tokens) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1].token_loss, second[1].token_loss)
    assert torch.equal(state, torch.get_rng_state())


class CountSyncs(TorchDispatchMode):
    """Counts reads of a tensor's value by Python: on a GPU each waits for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_call_syncs_with_the_device_once(preset):
    loss = PolicyLoss.from_preset(preset)
    log_prob, log_prob_old, advantages = random_tokens(50, seed=3)
    parts = made_up_parts(loss, log_prob, log_prob_old)
    batch = TokenBatch(log_prob, log_prob_old, advantages, torch.ones(1, 50), **parts)
    loss(batch)  # the first call also rounds a few constants on the CPU
    with CountSyncs() as syncs:
        out = loss(batch)
    assert syncs.count == 1
    with CountSyncs() as syncs:
        out.metrics.merge(out.metrics)
        PolicyLoss.from_preset(preset, on_invalid="drop")(batch)
    assert syncs.count == 0
