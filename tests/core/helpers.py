"""What several tests share: random tokens, gradients, golden values, and bounds in high precision."""

import csv
import json
from pathlib import Path

import mpmath as mp
import torch

from trustregion import PolicyLoss, TokenBatch

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_bounds() -> list[dict]:
    """Rows of band_bounds.csv; `text` holds each row as written, with all its digits."""
    with open(GOLDEN / "band_bounds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {
            "divergence": row["divergence"],
            "delta": float(row["delta"]),
            "log_prob": float(row["log_prob"]),
            "text": row,
        }
        for row in rows
    ]


def golden_tokens() -> dict:
    return json.loads((GOLDEN / "dppo_erc.json").read_text())


def gradient(loss: PolicyLoss, log_prob, log_prob_old, advantages, response_mask=None, **parts):
    """Gradient of the summed token losses with respect to log_prob, and the loss's output.

    `parts`: weights, entropies, cells. What the loss needs beyond them is made up (`made_up_parts`).
    """
    log_prob = log_prob.clone().requires_grad_()
    mask = torch.ones_like(advantages) if response_mask is None else response_mask
    parts = made_up_parts(loss, log_prob.detach(), log_prob_old) | parts
    out = loss(TokenBatch(log_prob, log_prob_old, advantages, mask, **parts))
    (grad,) = torch.autograd.grad(out.token_loss.sum(), log_prob)
    return grad, out


def made_up_parts(loss: PolicyLoss, log_prob, log_prob_old) -> dict[str, torch.Tensor]:
    """Entropies and cells that a loss requires, as if the vocabulary were the sampled token and one other."""
    made = {}
    for suffix, log_p in (("", log_prob), ("_old", log_prob_old)):
        log_p = log_p.to(torch.promote_types(log_p.dtype, torch.float32)).clamp(max=0)
        rest = (-torch.expm1(log_p)).clamp(min=2.0**-24).log()  # the floor that the binary divergence has
        if "entropy" in loss.requires:
            made[f"entropy{suffix}"] = -log_p.exp() * log_p - rest.exp() * rest
        if "cells" in loss.requires:
            unused = torch.full((*log_p.shape, loss.region.K), -torch.inf, dtype=log_p.dtype)
            made[f"cell_log_prob{suffix}"] = torch.cat([unused, log_p[..., None], rest[..., None]], -1)
    return made


def random_tokens(count: int, seed: int, log_ratio_scale: float = 1.0, dtype=torch.float64):
    """Log-probs, anchor log-probs from -80 to -1e-7, and advantages of both signs; all [1, count].

    Half of the tokens move by a log-ratio of that scale, half by an amount that moves about as much mass as the other
    tokens have, so that small and large probabilities both cross the edge of the region.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(1, count, generator=generator, dtype=torch.float64)
    log_prob_old = -torch.exp(torch.log(torch.tensor(1e-7)) + uniform * torch.log(torch.tensor(80 / 1e-7)))
    noise = torch.randn(1, count, generator=generator, dtype=torch.float64)
    shift = torch.where(uniform.mul(1e6).frac() < 0.5, log_ratio_scale * noise, 2 * noise * log_prob_old.abs())
    log_prob = (log_prob_old + shift.clamp(-19, 19)).clamp(max=-1e-12)
    advantages = torch.randn(1, count, generator=generator, dtype=torch.float64)
    return log_prob.to(dtype), log_prob_old.to(dtype), advantages.to(dtype)


def order(divergence: str) -> mp.mpf:
    """The a of "alpha(a)": the number that the float next to it is."""
    return mp.mpf(float(divergence.removeprefix("alpha(").removesuffix(")")))


def generator(divergence: str):
    """f(u) as the tables write it, in mpmath; it cancels freely, so give it digits to spare."""
    if divergence.startswith("alpha"):
        a = order(divergence)
        return lambda u: (u**a - 1 - a * (u - 1)) / (a * (a - 1))
    return {
        "kl": lambda u: -mp.log(u) + u - 1,
        "reverse_kl": lambda u: u * mp.log(u) - u + 1,
        "tv": lambda u: abs(u - 1) / 2,
        "chi2": lambda u: (u - 1) ** 2,
        "hellinger": lambda u: (mp.sqrt(u) - 1) ** 2 / 2,
        "js": lambda u: (u * mp.log(u) - (1 + u) * mp.log((1 + u) / 2)) / 2,
    }[divergence]


def derivative(divergence: str):
    """f'(u) in mpmath."""
    if divergence.startswith("alpha"):
        a = order(divergence)
        return lambda u: (u ** (a - 1) - 1) / (a - 1)
    return {
        "kl": lambda u: 1 - 1 / u,
        "reverse_kl": mp.log,
        "hellinger": lambda u: (1 - 1 / mp.sqrt(u)) / 2,
        "js": lambda u: mp.log(2 * u / (1 + u)) / 2,
    }[divergence]


def value_at_zero(divergence: str) -> mp.mpf:
    """f(0), the limit."""
    if divergence.startswith("alpha"):
        return 1 / order(divergence) if order(divergence) > 0 else mp.inf
    zero = {"kl": mp.inf, "reverse_kl": 1, "tv": 0.5, "chi2": 1, "hellinger": 0.5, "js": mp.log(2) / 2}
    return mp.mpf(zero[divergence])


def exact_bounds(divergence: str, delta, log_prob, floor: float = 0) -> tuple[mp.mpf, mp.mpf]:
    """Log-ratio bounds from the definition, in mpmath's working precision; any of delta, log_prob may be an mpf.

    `floor`: the least mass of all other tokens.
    """
    delta, log_prob = mp.mpf(delta), mp.mpf(log_prob)
    p, c = mp.exp(log_prob), max(-mp.expm1(log_prob), floor)
    if divergence == "tv":
        return (mp.log1p(-delta / p) if p > delta else -mp.inf), (mp.log1p(delta / p) if c > delta else -log_prob)
    if divergence == "chi2":
        a = mp.sqrt(delta * c / p)
        return (mp.log1p(-a) if a < 1 else -mp.inf), min(mp.log1p(a), -log_prob)
    return -_exact_side(divergence, c, p, delta)[0], _exact_side(divergence, p, c, delta)[1]


def _exact_side(divergence: str, grow, shrink, delta):
    """(z, x): minus the log-ratio of the shrinking cell and that of the growing one, where the divergence is delta."""
    with mp.extradps(90 - 2 * int(mp.log10(grow * shrink))):  # a ratio may be within a mass of 1, f within its square
        f, slope, total = generator(divergence), derivative(divergence), grow + shrink
        if shrink * value_at_zero(divergence) + grow * f(total / grow) <= delta:
            return mp.inf, mp.log(total / grow)

        # Newton's method for ln D as a function of ln z, kept between two ends by bisection.
        y = min(mp.log(mp.sqrt(2 * delta * grow / shrink)), 6)
        low, high = y - 60 + mp.log(grow * shrink) / 2, mp.mpf(300)
        for _ in range(300):
            z = mp.exp(y)
            kept = mp.exp(-z)
            u = 1 + shrink * (1 - kept) / grow
            distance = shrink * f(kept) + grow * f(u)
            if distance > delta:
                high = y
            else:
                low = y
            rise = z * shrink * kept * (slope(u) - slope(kept)) / distance
            step = mp.log(distance / delta) / rise
            y, before = (y - step if low < y - step < high else (low + high) / 2), y
            if abs(y - before) < mp.mpf(10) ** -35:
                return mp.exp(y), mp.log1p(shrink * -mp.expm1(-mp.exp(y)) / grow)
    raise ArithmeticError("the reference did not converge")


def random_logits(*shape, seed=0, scale=3.0, dtype=torch.float64):
    logits = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.to(dtype)


def random_ids(*shape, V, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def reference_cells(log_probs, token_ids, cell_ids):
    """K+2 log-masses from the definition, for log-probs [..., V]: the named tokens, the sampled one unless named, the rest."""
    sampled = token_ids[..., None]
    named = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, cell_ids, True).scatter(-1, sampled, True)
    among = (cell_ids == sampled).any(-1, keepdim=True)
    token = log_probs.gather(-1, sampled).masked_fill(among, -torch.inf)
    rest = log_probs.masked_fill(named, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, cell_ids), token, rest], -1)


def peaked_logits(gaps, V=2048, seed=0, dtype=torch.float32):
    """Rows [len(gaps), V] whose first logit exceeds all others by about a gap, centred on 0."""
    logits = random_logits(len(gaps), V, seed=seed, scale=1.0)
    gaps = torch.tensor(gaps, dtype=torch.float64)
    logits -= gaps[:, None] / 2
    logits[:, 0] = gaps / 2
    return logits.to(dtype)
