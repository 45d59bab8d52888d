"""Masks, losses and gradients of the golden tokens, from their logits, for every method that the file knows."""

import pytest
import torch

from trustregion import DivergenceBall, Mask, PolicyLoss, TokenBatch

from .helpers import golden_tokens
from .test_golden_divergences import golden_log_probs, union_cells

GOLDEN = golden_tokens()
EXACT = {"rtol": 1e-12, "atol": 1e-14}
MASKS = [name for name in GOLDEN["expected"]["masks"] if "replace" not in name]
DPPO = [name for name in GOLDEN["expected"]["dppo_loss"] if "replace" not in name]


def golden_batch(K: int | None = None, dtype=torch.float64) -> TokenBatch:
    """The tokens as one sequence; log_prob is a leaf. Over `K` named tokens, or all when K is 0."""
    new, old, tokens = golden_log_probs()
    log_prob, log_prob_old = (x.gather(-1, tokens[:, None]).T for x in (new, old))
    cells = (None, None)
    if K is not None:
        cells = (new, old) if K == 0 else (union_cells(new, old, tokens, K), union_cells(old, old, tokens, K))
        cells = [x[None].to(dtype) for x in cells]
    return TokenBatch(
        log_prob=log_prob.to(dtype).requires_grad_(),
        log_prob_old=log_prob_old.to(dtype),
        advantages=torch.tensor([GOLDEN["inputs"]["advantages"]], dtype=dtype),
        response_mask=torch.tensor([GOLDEN["inputs"]["response_mask"]]),
        entropy=-(new.exp() * new).sum(-1)[None].to(dtype),
        entropy_old=-(old.exp() * old).sum(-1)[None].to(dtype),
        cell_log_prob=cells[0],
        cell_log_prob_old=cells[1],
    )


def mask_loss(name: str, C: float | None = None) -> tuple[PolicyLoss, int | None]:
    """The loss of a golden mask, and K as `golden_batch` takes it."""
    mask = GOLDEN["expected"]["masks"][name]
    partition, divergence = mask["divergence"].split("/")
    K = int(partition[4:].split("_")[0]) if partition.startswith("topk") else None
    kind = {"binary": "binary", "full": "full"}.get(partition, "topk")
    ball = DivergenceBall(divergence, kind, delta_low=mask["delta_low"], delta_high=mask["delta_high"], K=K)
    return PolicyLoss(ball, Mask(C)), 0 if kind == "full" else K


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype):
    loss, K = mask_loss(name)
    batch = golden_batch(K, dtype)
    live = batch.response_mask.bool()
    expected = torch.tensor([GOLDEN["expected"]["masks"][name]["mask"]]).bool()
    assert torch.equal(loss(batch).active, expected & live)


@pytest.mark.parametrize("name", DPPO)
def test_dppo_losses(name):
    golden = GOLDEN["expected"]["dppo_loss"][name]
    loss, K = mask_loss(golden["mask"], golden["C"])
    batch = golden_batch(K)
    check(loss(batch), batch, golden["coef"], golden["score_function_loss"])
    objective = (torch.tensor(golden["coef"]).double().sum() / batch.response_mask.sum()).item()
    assert objective == pytest.approx(golden["paper_objective"], rel=1e-6)


@pytest.mark.parametrize("dual_clip", [None, 10.0])
@pytest.mark.parametrize(("name", "preset", "overrides"), [
    ("dapo", "clip_higher", {}),
    ("gppo", "gppo", {"eps_high": 0.28}),
    ("erc_dapo", "erc_dapo", {}),
    ("erc_gppo", "erc_gppo", {"eps_high": 0.28}),
])
def test_dapo_gppo_and_erc(name, preset, overrides, dual_clip):
    golden = GOLDEN["expected"]["losses"][name]
    batch = golden_batch()
    out = PolicyLoss.from_preset(preset, dual_clip=dual_clip, **overrides)(batch)
    # With the dual clip the file has the authors' value, which keeps that of tokens blocked by their entropy ratio.
    value = golden["loss_paper"] if dual_clip is None else golden["loss_value_code_dual_clip_c10"]
    check(
        out, batch, golden["coef" if dual_clip is None else "coef_with_dual_clip_c10"],
        None if dual_clip and name.startswith("erc") else value,
    )


def test_cispo():
    golden = GOLDEN["expected"]["losses"]["cispo_both_sides"]
    batch = golden_batch()
    check(PolicyLoss.from_preset("cispo")(batch), batch, golden["coef"], golden["score_function_loss"])


@pytest.mark.parametrize("beta", ["0.05", "0.2"])
def test_entropy_indicators(beta):
    batch = golden_batch()
    loss = PolicyLoss.from_preset("erc_dapo", beta_low=float(beta), beta_high=float(beta), eps_low=1, eps_high=1e9, dual_clip=None)
    inside = torch.tensor([GOLDEN["expected"]["erc"][beta]["indicator"]]) == 1
    assert torch.equal(loss(batch).active, inside & (batch.response_mask == 1))


def test_entropy_ratios():
    batch = golden_batch()
    expected = GOLDEN["expected"]
    torch.testing.assert_close(batch.entropy, torch.tensor([expected["entropy_new"]], dtype=torch.float64), **EXACT)
    torch.testing.assert_close(
        batch.entropy / batch.entropy_old, torch.tensor([expected["entropy_ratio"]], dtype=torch.float64), **EXACT
    )


@pytest.mark.parametrize("preset", ["erc_dapo", "erc_gppo"])
def test_gradients_reach_the_logits(preset):
    new, old, tokens = golden_log_probs()
    logits = torch.tensor(GOLDEN["inputs"]["new_logits"], dtype=torch.float64).requires_grad_()
    batch = golden_batch()
    log_prob = logits.log_softmax(-1).gather(-1, tokens[:, None]).T
    out = PolicyLoss.from_preset(preset, dual_clip=None, eps_high=0.28)(
        TokenBatch(**{**vars(batch), "log_prob": log_prob})
    )
    (out.token_loss.sum() / batch.response_mask.sum()).backward()
    golden = torch.tensor(GOLDEN["expected"]["losses"][preset]["grad_logits"], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, golden, **EXACT)


def check(out, batch: TokenBatch, coefficients, value):
    (grad,) = torch.autograd.grad(out.token_loss.sum(), batch.log_prob)
    torch.testing.assert_close(-grad, torch.tensor([coefficients], dtype=torch.float64), **EXACT)
    if value is not None:
        assert (out.token_loss.sum() / batch.response_mask.sum()).item() == pytest.approx(value, rel=1e-12)
