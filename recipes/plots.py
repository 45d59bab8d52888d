"""The training dynamics of one run as one figure of small panels. Needs matplotlib (the extra `plots`)."""

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from recipes.run_files import Metrics
from recipes.series import smooth, smoothing_window

# Okabe and Ito's colours: told apart with any kind of colour blindness.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"


@dataclass(frozen=True)
class Line:
    keys: tuple[str, ...]  # the first one that was logged; without "/": a column of recipes.progress
    label: str = ""
    colour: str = BLUE


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    lines: tuple[Line, ...]
    factor: float = 1.0
    from_zero: bool = False
    log: bool = False
    skip_slow_start: bool = False


PANELS = (
    Panel("Reward", "mean of a step's rollouts", (Line(("reward",)),)),
    Panel("Entropy", "nats a token", (Line(("entropy",)),)),
    Panel("Response length", "mean, tokens", (Line(("response_length/mean",)),)),
    Panel(
        "Clipped tokens",
        "% of response tokens",
        (
            Line(("trust/clip_fraction_up",), "at the upper bound", ORANGE),
            Line(("trust/clip_fraction_down",), "at the lower bound", BLUE),
            Line(("trust/blocked_by_entropy",), "by their entropy", GREEN),
        ),
        factor=100,
        from_zero=True,
    ),
    Panel("Log ratio", "mean |log new/old policy|, nats", (Line(("trust/log_ratio_abs_mean",)),), from_zero=True),
    Panel(
        "Divergence",
        "of a token, new from old policy",
        (Line(("trust/divergence_max",), "worst token", ORANGE), Line(("trust/divergence_mean",), "mean", BLUE)),
        log=True,
    ),
    Panel("Gradient norm", "before clipping", (Line(("actor/grad_norm",)),), from_zero=True),
    Panel(
        "Rollout vs actor",
        "|probability difference| of a token",
        (
            Line(("training/rollout_probs_diff_max",), "worst token", ORANGE),
            Line(("training/rollout_probs_diff_mean",), "mean", BLUE),
        ),
        log=True,
    ),
    Panel(
        "Time a step",
        "seconds",
        (
            Line(("seconds",), "whole step", GREY),
            Line(("timing_s/update_actor",), "update", ORANGE),
            Line(("timing_s/gen",), "generation", BLUE),
            Line(("timing_s/old_log_prob",), "old log-probs", GREEN),
            Line(("timing_s/update_weights",), "weight sync", PURPLE),
        ),
        from_zero=True,
        skip_slow_start=True,
    ),
)


def draw_dynamics(path: Path, metrics: Metrics, title: str, subtitle: str = "") -> None:
    """Writes `dynamics` to `path` (PNG)."""
    figure = dynamics(metrics, title, subtitle)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def dynamics(metrics: Metrics, title: str, subtitle: str = "") -> Figure:
    """The panels that `metrics` has values for."""
    panels = [panel for panel in PANELS if any(metrics.get(*line.keys) for line in panel.lines)]
    columns = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    subtitle_lines = textwrap.wrap(subtitle, 50 * columns + 10)
    top, bottom = 0.6 + 0.19 * len(subtitle_lines), 0.32  # inches for the headings and for the note
    width, height = 4.3 * columns, 2.75 * rows + top + bottom
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(
        rect=(0.005, bottom / height, 0.99, 1 - (top + bottom) / height), h_pad=0.08, w_pad=0.1
    )

    def write(inches_down: float, text: str, **style):
        # parse_math=False: dollar signs in a name make no formula.
        figure.text(0.15 / width, 1 - inches_down / height, text, va="top", parse_math=False, **style)

    window = smoothing_window(len(metrics.steps))
    write(0.16, title, fontsize=15, weight="bold")
    write(0.5, "\n".join(subtitle_lines), fontsize=9, color=GREY, linespacing=1.4)
    note = "Each dot is a step."
    if window > 1:
        note += f" Lines: weighted mean of {window} steps, the nearest weigh most."
    write(height - 0.22, note, fontsize=8.5, color=GREY)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        draw_panel(axes, panel, metrics, window)
        if index + columns >= len(panels):
            axes.set_xlabel("step", fontsize=8.5, color=GREY)
    return figure


def draw_panel(axes: Axes, panel: Panel, metrics: Metrics, window: int) -> None:
    lines = [(line, metrics.get(*line.keys)) for line in panel.lines if metrics.get(*line.keys)]
    slow = slow_start(lines[0][1]) if panel.skip_slow_start else None
    everything = []
    for line, series in lines:
        steps = [step for step in series if step != slow]
        values = [series[step] * panel.factor for step in steps]
        everything += values
        if not values:
            continue  # logged in the step that is not shown only
        if window > 1:
            axes.scatter(steps, values, s=11 if len(steps) <= 200 else 4, color=line.colour, alpha=0.3, linewidths=0)
            axes.plot(steps, smooth(values, window), color=line.colour, linewidth=1.8, label=line.label)
        else:
            axes.plot(steps, values, color=line.colour, linewidth=1.2, marker="o", markersize=4, label=line.label)
    labelled = any(line.label for line, _ in lines)
    scale_y(axes, panel, min(everything), max(everything), legend_rows=math.ceil(len(lines) / 3) if labelled else 0)
    first, last = metrics.steps[0], metrics.steps[-1]
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    if last - first < 6:
        axes.set_xticks(range(first, last + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    style(axes)
    axes.set_title(panel.title, loc="left", fontsize=11, weight="bold")
    unit = panel.unit + (f" (step {slow}, not shown: {lines[0][1][slow]:.0f})" if slow is not None else "")
    axes.set_title(unit, loc="right", fontsize=8.5, color=GREY)
    if labelled:
        axes.legend(
            fontsize=8, frameon=False, ncols=3, loc="upper left", columnspacing=1.2, handlelength=1.4, borderaxespad=0
        )


def scale_y(axes: Axes, panel: Panel, low: float, high: float, legend_rows: int) -> None:
    """Sets the limits so that the legend, at the top, covers no data."""
    headroom = 0.06 + 0.1 * legend_rows
    if panel.log and low > 0:
        # Whole decades, so that there are always two labelled ticks.
        bottom, top = math.floor(math.log10(low)), math.floor(math.log10(high)) + 1
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_ylim(10.0**bottom, 10.0 ** (top + (top - bottom) * headroom))
        return
    span = high - low or abs(high) or 1.0
    bottom = 0.0 if panel.from_zero and low >= 0 else low - 0.06 * span
    top = high if high > bottom else bottom + 1.0
    axes.set_ylim(bottom, top + (top - bottom) * headroom)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
    formatter = ScalarFormatter(useOffset=False)
    formatter.set_powerlimits((-4, 5))
    axes.yaxis.set_major_formatter(formatter)


def style(axes: Axes) -> None:
    axes.tick_params(labelsize=8.5, color="#999999", labelcolor="#333333")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")


def slow_start(series: dict[int, float]) -> int | None:
    """The first step where it would flatten all the others (compilation, empty caches)."""
    first, *later = series.values()
    return next(iter(series)) if later and first > 1.5 * max(later) else None
