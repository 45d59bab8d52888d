"""What a method allows a token of probability p:

    python -m trustregion.explain band_kl
    python -m trustregion.explain band_kl --p 0.01 --p 0.5 delta=0.03 relax_high=0.28
    python -m trustregion.explain band_kl --plot bounds.png        # beside GRPO and Clip-Higher; needs matplotlib

Prints the interval that the method leaves the ratio r = q/p of a sampled token, where p is the token's probability under
the anchor policy and q the one under the policy being trained; and what sets either bound.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trustregion import All, ConfigError, MethodConfig, TokenBatch, load_preset
from trustregion.batch import prepare
from trustregion.config import replace_fields
from trustregion.presets import read_preset
from trustregion.regions import parts_of

PROBABILITIES = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
NO_LIMIT = {"ratio_cap": math.inf, "relax_low": None, "relax_high": None}  # of the fields that shape an interval


@dataclass(frozen=True)
class Bounds:
    """The ratios that a method leaves a token of probability p, and what sets them.

    Args:
        p: probability under the anchor policy.
        lower, upper: the interval of r = q/p; 0 where the token may vanish, at least 1/p where it may take all the mass.
        lower_by, upper_by: the field of the region that sets the bound; `q = 0`, `q = 1` where nothing is ever outside on
            that side.
    """

    p: float
    lower: float
    upper: float
    lower_by: str
    upper_by: str


def explain(method: MethodConfig, probabilities: Sequence[float] = PROBABILITIES) -> list[Bounds] | None:
    """The bounds for each p; None where the region is not an interval of ratios.

    Raises ConfigError: a p is not in (0, 1).
    """
    for p in probabilities:
        if not 0 < p < 1:
            raise ConfigError(f"p = {p!r}: must be a probability, > 0 and < 1")
    log_p = torch.tensor([probabilities], dtype=torch.float64).log()
    found = _interval(method.region, log_p)
    if found is None:
        return None
    # A field sets a bound if the bound moves without it.
    movable = [name for name in NO_LIMIT if _is_set(method.region, name)]
    without = {name: _interval(*replace_fields([method.region], {name: NO_LIMIT[name]}), log_p) for name in movable}

    def set_by(side: int, i: int, otherwise: tuple[str, ...]) -> str:
        moved = [name for name in movable if without[name][side][i] != found[side][i]]
        return next((name for name in (*moved, *otherwise) if _is_set(method.region, name)), "region")

    rows = []
    for i, p in enumerate(probabilities):
        log_lower, log_upper = found[0][i], found[1][i]
        nothing_below, nothing_above = log_lower == -math.inf, log_upper >= -log_p[0, i].item()
        rows.append(
            Bounds(
                p=p,
                lower=math.exp(log_lower),
                upper=math.exp(min(log_upper, 709)),
                lower_by="q = 0" if nothing_below else set_by(0, i, ("delta_low", "delta", "eps_low")),
                upper_by="q = 1" if nothing_above else set_by(1, i, ("delta_high", "delta", "eps_high")),
            )
        )
    return rows


def _is_set(region: Any, field: str) -> bool:
    return any(getattr(part, field, None) is not None for part in parts_of(region))


def _interval(region: Any, log_p: torch.Tensor) -> tuple[list[float], list[float]] | None:
    if not region.has_interval:
        return None
    verdict = region.judge(_on_policy(log_p), as_interval=True)
    return verdict.log_lower[0].tolist(), verdict.log_upper[0].tolist()


def _on_policy(log_p: torch.Tensor):
    ones = torch.ones_like(log_p)
    return prepare(TokenBatch(log_p, log_p, ones, ones, entropy=ones, entropy_old=ones), requires=("entropy",))


def describe(name: str, method: MethodConfig, probabilities: Sequence[float]) -> str:
    """The text that the command prints."""
    head = f"{name}: {_spell(method.region)}, {_spell(method.surrogate)}"
    rows = explain(method, probabilities)
    if rows is None:
        return f"{head}\n\n{_why_not(method.region)}"
    titles = ("lower", "upper", "q from", "q to", "eps_low", "eps_high")
    verb = "are clipped" if method.surrogate.needs_interval else "are masked"
    lines = [
        head,
        f"Tokens whose ratio r = q/p is outside [lower, upper] {verb} where the advantage pushes them further out.",
        f"p is the token's probability under the anchor ({method.anchor} log-probs), q under the policy being trained.",
        "",
        f"{'p':>8}" + "".join(f"{title:>12}" for title in titles) + "   lower set by  upper set by",
    ]
    for row in rows:
        numbers = (row.lower, row.upper, row.p * row.lower, min(1.0, row.p * row.upper), 1 - row.lower, row.upper - 1)
        formatted = "".join(f"{number:>12.5g}" for number in numbers)
        lines.append(f"{row.p:>8.6g}{formatted}   {row.lower_by:<14}{row.upper_by}")
    lines += ["", "eps_low and eps_high: the fixed clip range that would be the same at this p."]
    if any("q = " in by for row in rows for by in (row.lower_by, row.upper_by)):
        lines.append("q = 0, q = 1: the token may vanish, or take all the mass; nothing is outside on that side.")
    if getattr(method.surrogate, "dual_clip", None) is not None:
        lines.append(f"For a negative advantage, ratios above dual_clip = {method.surrogate.dual_clip:g} are stopped too.")
    if _blocks(method.region):
        lines.append("Besides, the region blocks tokens by what p does not tell, such as their entropy: not shown.")
    return "\n".join(lines)


def _why_not(region: Any) -> str:
    if any(getattr(part, "partition", "binary") != "binary" for part in parts_of(region)):
        return (
            "Not an interval: this divergence also depends on where the probability of the other named tokens goes, so\n"
            "that p and q do not decide it. It is never smaller than the binary one (partition=binary): what is outside\n"
            "the binary region is outside of this one too."
        )
    return (
        "Not an interval: p and q do not decide what is outside. The region looks at the whole distribution, such as its\n"
        "entropy, at the token's state."
    )


def _blocks(region: Any) -> bool:
    return region.judge(_on_policy(torch.tensor([[-1.0]])), as_interval=True).blocked is not None


def _spell(part: Any) -> str:
    if isinstance(part, All):
        return " and ".join(map(_spell, part.regions))
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    given = [f"{name}={f'{v:g}' if isinstance(v, float) else v}" for name, v in values.items() if v is not None]
    return f"{type(part).__name__}({', '.join(given)})"


def plot(path: str, name: str, method: MethodConfig) -> None:
    """Draws the bounds over p to `path`, beside those of the fixed clip ranges. Needs matplotlib.

    Raises ConfigError: the region is not an interval, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot: needs matplotlib (pip install 'trustregion[plots]')") from None
    probabilities = torch.linspace(-8, 7, 600, dtype=torch.float64).sigmoid().tolist()
    rows = explain(method, probabilities)
    if rows is None:
        raise ConfigError(f"--plot: {name} is not an interval of ratios, there is nothing to draw")

    bottom, top, grey = 0.03, 30.0, "#777777"
    figure = Figure(figsize=(7.8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    reciprocals = [1 / p for p in probabilities]
    axes.fill_between(probabilities, reciprocals, max(reciprocals), color="#eeeeee", linewidth=0)
    axes.text(0.62, 6, "q above 1", color=grey, fontsize=9)
    lower, upper = [max(row.lower, bottom / 2) for row in rows], [min(row.upper, 1 / row.p) for row in rows]
    axes.fill_between(probabilities, lower, upper, color="#0072B2", alpha=0.12, linewidth=0)
    styles = {"grpo": {"color": "#D55E00"}, "clip_higher": {"color": "#009E73", "dashes": (4, 3)}}
    for baseline, style in styles.items():
        if baseline == name:
            continue
        fixed = explain(load_preset(baseline), [0.5])[0]
        axes.axhline(fixed.upper, linewidth=1.4, **style, label=f"{baseline}: {fixed.lower:g} to {fixed.upper:g}")
        axes.axhline(fixed.lower, linewidth=1.4, **style)
    axes.plot(probabilities, upper, color="#0072B2", linewidth=2.4, label=name)
    axes.plot(probabilities, lower, color="#0072B2", linewidth=2.4)

    axes.set_xscale("logit")
    axes.set_yscale("log")
    axes.set_xlim(probabilities[0], probabilities[-1])
    axes.set_ylim(bottom, top)
    axes.minorticks_off()
    for axis, ticks in ((axes.xaxis, (0.001, 0.01, 0.1, 0.5, 0.9, 0.99)), (axes.yaxis, (0.1, 0.3, 1, 3, 10))):
        axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("probability p of the token under the anchor policy")
    axes.set_ylabel("ratio q / p")
    axes.set_title(f"How far {name} lets a token move", loc="left", fontsize=13, weight="bold", pad=22)
    axes.text(0, 1.02, _spell(method.region), transform=axes.transAxes, color=grey, fontsize=9, parse_math=False)
    axes.legend(frameon=False, loc="lower right")
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise ConfigError(f"--plot {path}: {error}") from None


def _value(text: str) -> Any:
    """A field's value as the command line gives it: null, a number, or a word."""
    if text.lower() in ("null", "none"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 with a message on stderr where something given is wrong."""
    parser = argparse.ArgumentParser(prog="python -m trustregion.explain", description="what a method allows a token")
    parser.add_argument("method", help="a preset, such as band_kl")
    parser.add_argument("fields", nargs="*", metavar="field=value", help="fields of the preset to override: delta=0.03")
    parser.add_argument("--p", action="append", type=float, help="probability under the anchor; can be repeated")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the bounds over p")
    given = parser.parse_intermixed_args(arguments)
    try:
        if malformed := [field for field in given.fields if "=" not in field]:
            raise ConfigError(f"{malformed[0]}: must be field=value, e.g. delta=0.03")
        overrides = {key: _value(text) for key, _, text in (field.partition("=") for field in given.fields)}
        method = MethodConfig.from_flat({**read_preset(given.method), **overrides})
        print(describe(given.method, method, given.p or PROBABILITIES))
        if given.plot:
            plot(given.plot, given.method, method)
            print(f"wrote {given.plot}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
