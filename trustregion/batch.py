"""The tokens a loss is computed from: as a trainer hands them over, and as regions and surrogates see them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding can leave a log-prob slightly above 0; anything larger is no log-probability but a bug upstream.
MAX_LOG_PROB = 1e-4
# What a masked position is replaced by before any arithmetic: an ordinary on-policy token without advantage.
_BENIGN_LOG_PROB = -1.0


@dataclass(frozen=True)
class TokenBatch:
    """One (micro-)batch of sampled tokens. Log-probs and entropies are in nats. B sequences, T tokens.

    Args:
        log_prob: log-prob of each sampled token under the policy being trained, differentiable, [B, T].
        log_prob_old: the same under the anchor policy, the one the trust region is centred on, [B, T].
        advantages: [B, T].
        response_mask: [B, T], bool or 0/1: true where a token counts. Elsewhere every other tensor may hold anything.
        entropy, entropy_old: entropy of the policy and of the anchor at each token's state, [B, T].
        cell_log_prob, cell_log_prob_old: log-masses of vocabulary cells (`partitions.py`), [B, T, K+2].
        weights: what token losses are multiplied by, for example importance weights of a stale or mismatched sampler;
            [B, T], or [B, 1] for one weight a sequence.
    """

    log_prob: Tensor
    log_prob_old: Tensor
    advantages: Tensor
    response_mask: Tensor
    entropy: Tensor | None = None
    entropy_old: Tensor | None = None
    cell_log_prob: Tensor | None = None
    cell_log_prob_old: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """A TokenBatch made safe: masked positions are benign, log-probs are <= 0, only `log_prob` carries gradient.

    All are [B, T], in float64 where a log-prob was float64 and in float32 otherwise.
    """

    log_prob: Tensor
    log_prob_old: Tensor
    advantages: Tensor
    weights: Tensor | None
    live: Tensor  # bool: the tokens that count

    @property
    def log_ratio(self) -> Tensor:
        """ln(pi / pi_old) of the sampled token, detached, [B, T]."""
        return self.log_prob.detach() - self.log_prob_old


def prepare(batch: TokenBatch) -> Tokens:
    """Upcasts, neutralises masked positions and refuses live tokens that no loss can be computed for.

    One device sync, for the refusal.

    Raises:
        ValueError: shapes differ; a live log-prob is nan, infinite or above 1e-4; a live advantage or weight is not
            finite.
    """
    _check_shapes(batch)
    dtype = torch.promote_types(torch.promote_types(batch.log_prob.dtype, batch.log_prob_old.dtype), torch.float32)
    live = batch.response_mask != 0

    # torch.where picks before anything is computed, so that nan and inf at masked positions reach neither the values
    # nor, as 0 * nan, the gradient.
    log_prob = torch.where(live, batch.log_prob.to(dtype), _BENIGN_LOG_PROB)
    log_prob_old = torch.where(live, batch.log_prob_old.detach().to(dtype), _BENIGN_LOG_PROB)
    advantages = torch.where(live, batch.advantages.detach().to(dtype), 0.0)
    weights = None if batch.weights is None else torch.where(live, batch.weights.detach().to(dtype), 1.0)
    _refuse_invalid(log_prob.detach(), log_prob_old, advantages, weights)

    return Tokens(
        # Clamps the value to 0 but, unlike clamp(max=0), keeps the token's gradient.
        log_prob=log_prob - log_prob.detach().clamp(min=0),
        log_prob_old=log_prob_old.clamp(max=0),
        advantages=advantages,
        weights=weights,
        live=live,
    )


def _check_shapes(batch: TokenBatch) -> None:
    shape = batch.log_prob.shape
    for name in ("log_prob_old", "advantages", "response_mask"):
        if getattr(batch, name).shape != shape:
            raise ValueError(f"{name} has shape {tuple(getattr(batch, name).shape)}, log_prob has {tuple(shape)}")
    if batch.weights is not None and batch.weights.shape not in (shape, (*shape[:-1], 1)):
        raise ValueError(f"weights has shape {tuple(batch.weights.shape)}: must be {tuple(shape)} or [B, 1]")


def _refuse_invalid(log_prob: Tensor, log_prob_old: Tensor, advantages: Tensor, weights: Tensor | None) -> None:
    is_log_prob = f"must be finite and <= {MAX_LOG_PROB:g}"
    checks = {
        f"log_prob_old ({is_log_prob})": log_prob_old.isfinite() & (log_prob_old <= MAX_LOG_PROB),
        f"log_prob ({is_log_prob})": log_prob.isfinite() & (log_prob <= MAX_LOG_PROB),
        "advantages (must be finite)": advantages.isfinite(),
    }
    if weights is not None:
        checks["weights (must be finite)"] = weights.isfinite()
    valid = torch.stack([check.all() for check in checks.values()])
    if valid.all():  # the one sync of a call; below, everything is lost anyway
        return
    counts = [f"{int((~check).sum())} in {name}" for name, check in checks.items() if not check.all()]
    raise ValueError(
        f"invalid values at live tokens of {tuple(log_prob.shape)}: {'; '.join(counts)}. "
        "Set response_mask to 0 there, or find out where they come from."
    )
