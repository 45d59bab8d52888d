"""The tokens a loss is computed from: as a trainer hands them over, and as regions and surrogates see them."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding can leave a log-prob slightly above 0, an entropy slightly below; anything further off is a bug upstream.
TOLERANCE = 1e-4
# What a masked position is replaced by before any arithmetic: an ordinary on-policy token without advantage.
_BENIGN = {"log_prob": -1.0, "log_prob_old": -1.0, "advantages": 0.0, "weights": 1.0, "entropy": 1.0, "entropy_old": 1.0}


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
        update: which update of the policy this is, counted from 0, for regions that do not act in every one.
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
    update: int = 0


@dataclass(frozen=True)
class Tokens:
    """A TokenBatch made safe: masked positions are benign, log-probs are <= 0, only `log_prob` carries gradient.

    All are [B, T], cells [B, T, K+2], in float64 where a log-prob was float64 and in float32 otherwise. Entropies and
    cells are there only where the region asked for them.
    """

    log_prob: Tensor
    log_prob_old: Tensor
    advantages: Tensor
    live: Tensor  # bool: the tokens that count
    weights: Tensor | None = None
    entropy: Tensor | None = None
    entropy_old: Tensor | None = None
    cell_log_prob: Tensor | None = None
    cell_log_prob_old: Tensor | None = None
    dropped: Tensor | None = None  # bool: tokens left out because they were invalid; None where these raise
    update: int = 0

    @property
    def log_ratio(self) -> Tensor:
        """ln(pi / pi_old) of the sampled token, detached, [B, T]."""
        return self.log_prob.detach() - self.log_prob_old


def prepare(batch: TokenBatch, requires: Collection[str] = (), drop_invalid: bool = False) -> Tokens:
    """Upcasts, neutralises masked positions, and refuses or drops live tokens that no loss can be computed for.

    Args:
        batch: the tokens.
        requires: which optional parts a region needs, of `entropy` and `cells`.
        drop_invalid: treat invalid live tokens as masked instead of raising.

    One device sync, for the refusal; none where tokens are dropped.

    Raises:
        ValueError: shapes differ; something required is missing; or, unless they are dropped, a live log-prob is nan,
            infinite or above 1e-4, a live entropy is not a finite number >= 0, a live cell log-mass is nan or above
            1e-4, a live advantage or weight is not finite.
    """
    names = check_given(batch, requires)
    dtype = torch.promote_types(torch.promote_types(batch.log_prob.dtype, batch.log_prob_old.dtype), torch.float32)
    given = {name: getattr(batch, name).to(dtype) for name in names}
    given = {name: value if name == "log_prob" else value.detach() for name, value in given.items()}
    live, dropped = batch.response_mask != 0, None
    validity = {name: _is_valid(name, value.detach()) for name, value in given.items()}
    if drop_invalid:
        valid = torch.stack([x.expand_as(live) for x in validity.values()]).all(0)
        live, dropped = live & valid, live & ~valid
    else:
        _refuse_invalid({name: x | ~live for name, x in validity.items()}, live.shape)

    # torch.where picks before anything is computed, so that nan and inf at masked positions reach neither the values
    # nor, as 0 * nan, the gradient.
    given = {
        name: torch.where(live if value.dim() == live.dim() else live[..., None], value, _BENIGN.get(name, 0.0))
        for name, value in given.items()
    }
    # Clamps the value to 0 but, unlike clamp(max=0), keeps the token's gradient.
    given["log_prob"] = given["log_prob"] - given["log_prob"].detach().clamp(min=0)
    for name in ("log_prob_old", "cell_log_prob", "cell_log_prob_old"):
        if name in given:
            given[name] = given[name].clamp(max=0)
    for name in ("entropy", "entropy_old"):
        if name in given:
            given[name] = given[name].clamp(min=0)
    return Tokens(**given, live=live, dropped=dropped, update=batch.update)


def check_given(batch: TokenBatch, requires: Collection[str]) -> list[str]:
    """The names of the tensors that a loss uses. Raises ValueError: one of them is missing, or shapes differ."""
    names = ["log_prob", "log_prob_old", "advantages"]
    names += ["weights"] if batch.weights is not None else []
    for part, pair in (("entropy", ("entropy", "entropy_old")), ("cells", ("cell_log_prob", "cell_log_prob_old"))):
        if part in requires:
            _check_given(batch, pair)
            names += pair
    _check_shapes(batch, names)
    return names


_RANGES = {
    "log_prob": f"finite and <= {TOLERANCE:g}",
    "log_prob_old": f"finite and <= {TOLERANCE:g}",
    "cell_log_prob": f"<= {TOLERANCE:g}",
    "cell_log_prob_old": f"<= {TOLERANCE:g}",
    "entropy": f"finite and >= -{TOLERANCE:g}",
    "entropy_old": f"finite and >= -{TOLERANCE:g}",
}


def _is_valid(name: str, value: Tensor) -> Tensor:
    """Whether each token's value is in its range, bool, [B, T] (or [B, 1])."""
    if name.startswith("cell_"):
        return (value <= TOLERANCE).all(-1)  # -inf is a mass of 0; nan compares as false
    if name.startswith("entropy"):
        return value.isfinite() & (value >= -TOLERANCE)
    if name.startswith("log_prob"):
        return value.isfinite() & (value <= TOLERANCE)
    return value.isfinite()


def _refuse_invalid(validity: dict[str, Tensor], shape: torch.Size) -> None:
    if torch.stack([valid.all() for valid in validity.values()]).all():  # the one sync of a call
        return
    counts = [
        f"{int((~valid).sum())} in {name} (must be {_RANGES.get(name, 'finite')})"
        for name, valid in validity.items()
        if not valid.all()
    ]
    raise ValueError(
        f"invalid values at live tokens of {tuple(shape)}: {'; '.join(counts)}. Set response_mask to 0 there, find out "
        "where they come from, or set on_invalid to 'drop'."
    )


def _check_given(batch: TokenBatch, names: tuple[str, str]) -> None:
    missing = [name for name in names if getattr(batch, name) is None]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)}: missing from the batch, and this loss's region needs {' and '.join(names)} "
            "(token_stats computes them from logits)"
        )


def _check_shapes(batch: TokenBatch, names: list[str]) -> None:
    shape = batch.log_prob.shape
    for name in ["response_mask", *names]:
        found = getattr(batch, name).shape
        if name.startswith("cell_"):
            if found[:-1] != shape or found != batch.cell_log_prob.shape:
                raise ValueError(f"{name} has shape {tuple(found)}: both cell tensors must be {tuple(shape)} + (K+2,)")
        elif found != shape and not (name == "weights" and found == (*shape[:-1], 1)):
            or_row = " or [B, 1]" if name == "weights" else ""
            raise ValueError(f"{name} has shape {tuple(found)}: must be {tuple(shape)}{or_row}, as log_prob")
