"""The papers' figures, from runs: how far tokens may move, what is clipped, and what entropy does. Needs matplotlib.

Each function returns a Figure, or None where the runs have not recorded what it shows; `draw_all` writes all as PNG files.
"""

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, style
from recipes.results.jobs import Job
from recipes.series import smooth, smoothing_window
from trustregion import ConfigError, explain, load_preset
from trustregion.metrics import BUCKET_NAMES
from trustregion.presets import read_preset

RADII = (0.03, 0.05, 0.10)  # BandPO's
BALLS = {"band_kl": "Band-KL", "band_tv": "Band-TV", "band_chi2": "Band-χ²"}
SHADES = ("#9ecae1", "#4292c6", "#08519c")  # small radius to large
COLOURS = (GREY, "#000000", BLUE, "#56B4E9", GREEN, "#8C6D1F", ORANGE, "#E69F00", PURPLE)  # as many as methods in a study
CAUSES = {
    "region": ("trust/blocked_by_region", ORANGE),
    "entropy": ("trust/blocked_by_entropy", GREEN),
    "dual clip": ("trust/blocked_by_dual_clip", PURPLE),
}
P = (np.linspace(-8, 7, 400), (0.001, 0.01, 0.1, 0.5, 0.9, 0.99))  # log-odds that are drawn, probabilities that are labelled


def draw_all(folder: Path, jobs: list[Job], with_bounds: bool = True) -> list[Path]:
    """Writes the PNG files of what the runs have recorded into `folder`, and returns them."""
    figures = {
        "bounds": bounds() if with_bounds else None,
        "clip_high": clip_high(jobs),
        "entropy": entropy(jobs),
        "blocked": blocked(jobs),
        "entropy_ratio": entropy_ratio(jobs),
        "moves": moves(jobs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        (folder / f"{name}.png").unlink(missing_ok=True)
        if figure is not None:
            FigureCanvasAgg(figure)
            figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
            written.append(folder / f"{name}.png")
    return written


# ---- of the methods themselves ---------------------------------------------------------------------------------------
def bounds() -> Figure:
    """The interval of ratios that Band leaves a token of probability p, by divergence and radius, beside the fixed clips."""
    figure, panels = _grid(
        len(BALLS), "How far Band lets a token move", "Interval of the ratio q/p by the token's probability p, for each radius δ"
    )
    probabilities = 1 / (1 + np.exp(-P[0]))
    for axes, (name, title) in zip(panels, BALLS.items(), strict=True):
        axes.fill_between(probabilities, 1 / probabilities, 1e4, color="#eeeeee", linewidth=0)
        for baseline, dashes, colour in (("grpo", (1, 1.5), GREY), ("clip_higher", (4, 2), ORANGE)):
            fixed = explain.explain(load_preset(baseline), [0.5])[0]
            label = f"{baseline}: {fixed.lower:g} to {fixed.upper:g}"
            axes.axhline(fixed.upper, color=colour, linewidth=1.2, dashes=dashes, label=label)
            axes.axhline(fixed.lower, color=colour, linewidth=1.2, dashes=dashes)
        for delta, colour in zip(RADII, SHADES, strict=True):
            rows = explain.explain(load_preset(name, delta=delta), probabilities.tolist())
            axes.plot(probabilities, [min(row.upper, 1 / row.p) for row in rows], color=colour, linewidth=2, label=f"δ = {delta:.2f}")
            axes.plot(probabilities, [max(row.lower, 1e-3) for row in rows], color=colour, linewidth=2)
        axes.set_yscale("log")
        axes.set_ylim(0.04, 25)
        _ticks(axes.yaxis, (0.1, 0.3, 1, 3, 10))
        _probability_axis(axes, "p of the token, anchor policy")
        axes.set_title(title, loc="left", fontsize=11, weight="bold")
    panels[0].text(0.75, 6, "q above 1", color=GREY, fontsize=8.5, ha="center")
    panels[0].set_ylabel("ratio q / p", fontsize=9, color=GREY)
    _legend(figure, panels[0], 5)
    return figure


# ---- over the steps of runs ------------------------------------------------------------------------------------------
def clip_high(jobs: list[Job]) -> Figure | None:
    """Of the tokens in a bucket of probability, those beyond the upper bound and pushed further, over steps."""
    shown = [bucket for bucket in BUCKET_NAMES if any(any(job.get(f"trust/clip_fraction_up/{bucket}").values()) for job in jobs)]
    if not shown:
        return None
    what = f"% of those with that probability under the anchor, {_of(jobs)}"
    columns = 9 if len(shown) > 2 else 5  # of the legend
    figure, panels = _grid(len(shown), "Tokens clipped at the upper bound", what, legend_rows=math.ceil(len(_methods(jobs)) / columns))
    for axes, bucket in zip(panels, shown, strict=True):
        _curves(axes, jobs, f"trust/clip_fraction_up/{bucket}", 100)
        axes.set_ylim(bottom=0)
        axes.set_title(f"p in {bucket}", loc="left", fontsize=11, weight="bold")
    _legend(figure, panels[0], columns)
    return figure


def entropy(jobs: list[Job]) -> Figure | None:
    """The policy's entropy over steps, each method by itself before all others in grey."""
    methods = [method for method in _methods(jobs) if any(job.get("entropy") for job in jobs if job.method == method)]
    if not methods:
        return None
    others = "; grey: the other methods" if len(methods) > 1 else ""
    figure, panels = _grid(len(methods), "Entropy", f"nats a token, {_of(jobs)}{others}", legend_rows=0)
    top = max(value for job in jobs for value in job.get("entropy").values())
    for axes, method in zip(panels, methods, strict=True):
        for other in methods:
            if other != method:
                axes.plot(*_mean([job for job in jobs if job.method == other], "entropy"), color="#cfcfcf", linewidth=1)
        _curves(axes, [job for job in jobs if job.method == method], "entropy", colours={method: _colours(jobs)[method]})
        axes.set_ylim(0, 1.05 * top or 1)
        axes.set_title(method, loc="left", fontsize=11, weight="bold", parse_math=False)
    return figure


def blocked(jobs: list[Job]) -> Figure | None:
    """The share of tokens without gradient, by what blocked them."""
    shown = [method for method in _methods(jobs) if any(job.get(key) for job in jobs for key, _ in CAUSES.values() if job.method == method)]
    if not shown:
        return None
    what = f"% of response tokens, mean over all steps, {_of(jobs, band=False)}"
    figure, (axes,) = _grid(1, "Tokens without gradient, by cause", what, width=7.5, height=0.36 * len(shown) + 1.0)
    height = 0.8 / len(CAUSES)
    for nth, (cause, (key, colour)) in enumerate(CAUSES.items()):
        logged = {method: [value for job in jobs if job.method == method for value in job.get(key).values()] for method in shown}
        values = [100 * float(np.mean(logged[method] or [0])) for method in shown]
        places = np.arange(len(shown)) + (nth - (len(CAUSES) - 1) / 2) * height
        axes.barh(places, values, height, color=colour, label=f"by {cause}" if cause != "region" else "by the region")
        for place, value in zip(places, values, strict=True):
            if value:
                axes.text(value, place, f" {value:.2g}", va="center", fontsize=7, color=GREY)
    axes.set_yticks(range(len(shown)), labels=shown)
    axes.invert_yaxis()
    style(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.margins(x=0.08)
    _legend(figure, axes, 3)
    return figure


# ---- of single tokens ------------------------------------------------------------------------------------------------
def entropy_ratio(jobs: list[Job]) -> Figure | None:
    """ERC's histogram of the entropy ratio of recorded tokens, with the band where a method has one."""
    tokens = {method: rows[rows.entropy_ratio.notna()] for method, rows in _tokens(jobs).items() if rows.entropy_ratio.notna().any()}
    if not tokens:
        return None
    what = "Recorded tokens, share by entropy ratio ρ = H(new) / H(old); beyond the edges: in the last bin"
    figure, panels = _grid(len(tokens), "How an update changes a token's entropy", what)
    edges = np.geomspace(0.5, 2, 61)
    for axes, (method, rows) in zip(panels, tokens.items(), strict=True):
        for is_blocked, colour, label in ((False, BLUE, "kept"), (True, GREEN, "blocked by entropy")):
            mine = rows[rows.cause.str.contains("entropy") == is_blocked]
            weights = 100 * mine.weight / rows.weight.sum()
            axes.hist(mine.entropy_ratio.clip(edges[0], edges[-1] * 0.9999), edges, weights=weights, color=colour, alpha=0.75, label=label)
        band = _field(method, "beta_low"), _field(method, "beta_high")
        if None not in band:
            for edge in (1 - band[0], 1 + band[1]):
                axes.axvline(edge, color="#333333", linewidth=1, dashes=(3, 2))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        _ticks(axes.xaxis, (0.5, 0.7, 0.9, 1.1, 1.5, 2))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("ρ", fontsize=9, color=GREY)
        style(axes)
        axes.set_title(method, loc="left", fontsize=11, weight="bold", parse_math=False)
    panels[0].set_ylabel("% of tokens, a bin", fontsize=9, color=GREY)
    _legend(figure, panels[0], 2)
    return figure


def moves(jobs: list[Job]) -> Figure | None:
    """Recorded tokens in the plane of old and new probability, and the region that the method keeps them to."""
    tokens = _tokens(jobs)
    if not tokens:
        return None
    what = "Recorded tokens by old and new probability; shaded: the region, where it is an interval"
    figure, panels = _grid(len(tokens), "Where tokens move", what)
    for axes, (method, rows) in zip(panels, tokens.items(), strict=True):
        _draw_region(axes, method)
        parts = [("kept", GREY, 3, rows.cause == "")]
        parts += [(f"blocked by {name}", colour, 9, rows.cause.str.contains(name.replace(" ", "_"))) for name, (_, colour) in CAUSES.items()]
        for label, colour, size, chosen in parts:
            p, q = np.exp(rows.log_prob_old[chosen].astype(float)), np.exp(rows.log_prob[chosen].astype(float))
            axes.scatter(p, q, s=size, color=colour, alpha=0.55, linewidths=0, label=label)
        _probability_axis(axes, "p, old")
        axes.set_yscale("logit")
        axes.minorticks_off()
        axes.set_ylim(*(1 / (1 + np.exp(-P[0][[0, -1]]))))
        _ticks(axes.yaxis, P[1])
        axes.set_title(method, loc="left", fontsize=11, weight="bold", parse_math=False)
    for axes in panels[::3]:
        axes.set_ylabel("q, new", fontsize=9, color=GREY)
    _legend(figure, panels[0], 4)
    return figure


def _draw_region(axes: Axes, method: str):
    """Where the method's region is an interval of ratios, or is inside one."""
    probabilities = 1 / (1 + np.exp(-P[0]))
    axes.plot(probabilities, probabilities, color="#bbbbbb", linewidth=0.8)
    try:
        overrides = {"partition": "binary", "K": None} if _field(method, "partition") == "topk" else {}
        rows = explain.explain(load_preset(method, **overrides), probabilities.tolist())
    except ConfigError:
        return
    if rows:
        lower, upper = [max(row.p * row.lower, 1e-9) for row in rows], [min(row.p * row.upper, 1 - 1e-9) for row in rows]
        axes.fill_between(probabilities, lower, upper, color=BLUE, alpha=0.13, linewidth=0)


# ---- parts -----------------------------------------------------------------------------------------------------------
def _methods(jobs: list[Job]) -> list[str]:
    return list(dict.fromkeys(job.method for job in jobs))


def _colours(jobs: list[Job]) -> dict[str, str]:
    return {method: COLOURS[nth % len(COLOURS)] for nth, method in enumerate(_methods(jobs))}


def _tokens(jobs: list[Job]) -> dict[str, pd.DataFrame]:
    """The recorded tokens of all seeds, by method."""
    found = {method: [job.tokens for job in jobs if job.method == method and len(job.tokens)] for method in _methods(jobs)}
    return {method: pd.concat(parts) for method, parts in found.items() if parts}


def _field(method: str, name: str):
    """Of a method's preset; None where it has no such field, or is no preset."""
    try:
        return read_preset(method).get(name)
    except ConfigError:
        return None


def _of(jobs: list[Job], band: bool = True) -> str:
    counts = {sum(job.method == method for job in jobs) for method in _methods(jobs)}
    seeds = str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return "one seed" if seeds == "1" else f"mean of {seeds} seeds" + (", shaded from the lowest to the highest" if band else "")


def _mean(jobs: list[Job], key: str, factor: float = 1.0) -> tuple[list[int], np.ndarray]:
    """Steps that all have, and the smoothed mean."""
    steps = sorted(set.intersection(*(set(job.get(key)) for job in jobs)))
    values = factor * np.mean([[job.get(key)[step] for step in steps] for job in jobs], axis=0)
    return steps, smooth(values, smoothing_window(len(steps))) if steps else values


def _curves(axes: Axes, jobs: list[Job], key: str, factor: float = 1.0, colours: dict[str, str] | None = None):
    for method, colour in (colours or _colours(jobs)).items():
        mine = [job for job in jobs if job.method == method and job.get(key)]
        if not mine:
            continue
        steps, mean = _mean(mine, key, factor)
        axes.plot(steps, mean, color=colour, linewidth=1.7, label=method)
        if len(mine) > 1:
            each = [_mean([job], key, factor) for job in mine]
            kept = [[value for step, value in zip(*one, strict=True) if step in set(steps)] for one in each]
            axes.fill_between(steps, np.min(kept, axis=0), np.max(kept, axis=0), color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    style(axes)
    axes.set_xlabel("step", fontsize=8.5, color=GREY)


def _ticks(axis, values):
    axis.set_ticks(values, labels=[f"{value:g}" for value in values])


def _probability_axis(axes: Axes, label: str):
    axes.set_xscale("logit")
    axes.minorticks_off()
    axes.set_xlim(*(1 / (1 + np.exp(-P[0][[0, -1]]))))
    _ticks(axes.xaxis, P[1])
    axes.set_xlabel(label, fontsize=9, color=GREY)
    style(axes)


def _grid(
    count: int, title: str, subtitle: str, legend_rows: int = 1, width: float = 4.1, height: float = 3.0
) -> tuple[Figure, list[Axes]]:
    """Panels, three in a row at most, below a heading and room for a legend."""
    columns, top = min(3, count), 0.75 + 0.22 * legend_rows  # inches
    rows = math.ceil(count / columns)
    size = max(width * columns, 6.5), height * rows + top
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(rect=(0.005, 0.005, 0.99, 1 - top / size[1]), h_pad=0.08, w_pad=0.1)
    figure.text(0.15 / size[0], 1 - 0.14 / size[1], title, va="top", fontsize=14, weight="bold")
    figure.text(0.15 / size[0], 1 - 0.44 / size[1], subtitle, va="top", fontsize=9, color=GREY)
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def _legend(figure: Figure, axes: Axes, columns: int):
    handles, labels = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    legend = figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.08 / width, 1 - 0.58 / height), ncols=columns,
        frameon=False, fontsize=8.5, handlelength=1.5, columnspacing=1.4, markerscale=2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
