"""One run, or several beside each other: one page without links to anywhere, and its pictures as PNG files."""

import base64
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipes import page, token_page
from recipes.errors import UserError, writing
from recipes.page import escape, printable, table
from recipes.plots import style
from recipes.report import DIFFERENCE, MEMORY, PARTS_OF_A_STEP, not_finite, number
from recipes.run_files import Metrics, read_config, read_metrics, read_samples, steps_done, value_at, what_ran
from recipes.series import fluctuation, smooth, smoothing_window, variance

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#000000")  # Okabe and Ito's
BUCKETS = ("0-0.01", "0.01-0.2", "0.2-0.5", "0.5-0.8", "0.8-1")
LINES = ("-", "--", ":")  # of as many runs as there are colours, and of those beyond
DRAWN = 1e100  # what is beyond is drawn here: matplotlib computes with squares
LAST = 5  # steps averaged at the end
SHOWN = 3  # prompts whose completions are shown


@dataclass(frozen=True)
class Run:
    """A run's folder as its files have it; `label` tells it from the others."""

    folder: Path
    label: str
    metrics: Metrics
    config: dict


@dataclass(frozen=True)
class Panel:
    """One curve a run: the first of `keys` that was logged, or what `derive` makes of it."""

    section: str
    title: str
    keys: tuple[str, ...]
    factor: float = 1.0
    derive: Callable[[dict[int, float]], dict[int, float]] | None = None
    log: bool = False

    def series(self, run: Run) -> dict[int, float]:
        found = {step: value * self.factor for step, value in run.metrics.get(*self.keys).items()}
        with np.errstate(all="ignore"):  # squares of what is huge
            found = self.derive(found) if self.derive else found
        return {step: value for step, value in found.items() if abs(value) < 1e300}

    def last(self, run: Run) -> str:
        """Mean over the last steps, those without a value left out; of validation, which few steps have, the last value."""
        steps, series = run.metrics.steps[-LAST:], self.series(run)
        values = [*series.values()][-1:] if self.is_validation else [series[step] for step in steps if step in series]
        return number(fmean(values)) if values else "-"

    def is_worth_a_look(self, runs: list[Run]) -> bool:
        """Whether it was logged, and is not 0 because it is of something else: other methods, a GPU that is not there."""
        values = [value for run in runs for value in self.series(run).values()]
        return any(values) or (bool(values) and self.section in ("Reward and validation", "Entropy"))

    @property
    def is_validation(self) -> bool:
        return self.keys[0].startswith("val-core/")


def later(series: dict[int, float]) -> dict[int, float]:
    """All but the first step, which compiles and fills caches; of a run of one step, that."""
    return dict([*series.items()][len(series) > 1 :])


def panels(runs: list[Run]) -> list[Panel]:
    validation = sorted({key for run in runs for key in run.metrics.series if key.startswith("val-core/")})
    return [
        Panel("Reward and validation", "reward", ("reward",)),
        *(Panel("Reward and validation", key.removeprefix("val-core/"), (key,)) for key in validation),
        Panel("Entropy", "entropy, nats a token", ("entropy",)),
        Panel("Entropy", "its fluctuation, % of the moving average", ("entropy",), derive=fluctuation),
        Panel("Gradient", "norm before clipping", ("actor/grad_norm",)),
        Panel("Gradient", "variance of the norm about its moving average", ("actor/grad_norm",), derive=variance, log=True),
        *(Panel("Clipped tokens", f"at the {side} bound, %", (f"trust/clip_fraction_{key}",), 100) for side, key in (("upper", "up"), ("lower", "down"))),
        Panel("Clipped tokens", "by their entropy, %", ("trust/blocked_by_entropy",), 100),
        *(
            Panel(f"Clipped tokens by old probability, {side} bound", f"p in {bucket}, % of the bucket", (f"trust/clip_fraction_{key}/{bucket}",), 100)
            for side, key in (("upper", "up"), ("lower", "down"))
            for bucket in BUCKETS
        ),
        *(
            Panel("Divergence of a token, new from old policy", name, (f"trust/divergence_{key}",), log=True)
            for name, key in (("mean", "mean"), ("99th percentile", "p99"), ("largest", "max"))
        ),
        *(
            Panel("Rollout against trainer, |probability difference|", name, (f"{DIFFERENCE}_{key}",), log=True)
            for name, key in (("mean", "mean"), ("largest", "max"))
        ),
        Panel("Response length", "mean, tokens", ("response_length/mean",)),
        Panel("Response length", "cut off, %", ("response_length/clip_ratio",), 100),
        Panel("Time after the first step, seconds", "whole step", ("seconds",), derive=later),
        *(Panel("Time after the first step, seconds", name, (key,), derive=later) for name, key in PARTS_OF_A_STEP),
        *(Panel("Memory, GiB", name, keys) for name, keys in MEMORY),
    ]


def compare(folders: list[Path], out: Path) -> Path:
    """Writes `out`/index.html and the pictures in it as PNG files. Returns the page.

    Raises UserError when a folder is no run with a finished step, or given twice, and when `out` cannot be written.
    """
    if twice := [folder for nth, folder in enumerate(folders) if folder.resolve() in [other.resolve() for other in folders[:nth]]]:
        raise UserError(f"{twice[0]}: is given twice. Leave one out.")
    runs = [_read(folder, folders) for folder in folders]
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
    shown = [panel for panel in panels(runs) if panel.is_worth_a_look(runs)]
    said = [[run.label, what_ran(run.config), steps_done(run.metrics.steps, run.config)] for run in runs]
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].label
    body = [f"<h1>{escape(title)}</h1>", table(["", "what", "steps"], said)]
    body += [f"<h2>Means over the last {LAST} steps</h2>", "<p class=faint>Of what was logged, and is not 0 in all runs.</p>", table(["", *(run.label for run in runs)], [
        [f"{panel.section}: {panel.title}{', the last' * panel.is_validation}", *map(panel.last, runs)] for panel in shown
    ])]  # fmt: skip
    keys = {key for panel in panels(runs) for key in panel.keys}
    body += [f"<p class=faint>{escape(run.label)}: not a finite number: {escape(text)}</p>" for run in runs for _, text in not_finite(run.metrics, keys)]
    for section in dict.fromkeys(panel.section for panel in shown):
        picture = out / ("".join(c if c.isalnum() else "_" for c in section.lower()).strip("_") + ".png")
        with writing(f"--out {out}"):
            _draw(picture, [panel for panel in shown if panel.section == section], runs)
        data = base64.b64encode(picture.read_bytes()).decode()
        body.append(f'<h2>{escape(section)}</h2><img alt="{escape(section)}" src="data:image/png;base64,{data}">')
    if len(runs) > 1:
        body += ["<h2>Differences of the configurations</h2>", table(["", *(run.label for run in runs)], config_differences(runs))]
    body += ["<h2>Completions of the last step</h2>", *_completions(runs)]
    body += token_page.token_sections({run.label: run.folder for run in runs})
    path = out / "index.html"
    with writing(f"--out {out}"):
        path.write_text(page.document(title, page.CSS + token_page.CSS, body), encoding="utf-8")
    return path


def config_differences(runs: list[Run]) -> list[list[str]]:
    """Rows of the keys whose values differ, but for names of folders and what other keys repeat."""
    flat = [_flatten(run.config) for run in runs]
    rows = []
    for key in sorted(set().union(*flat)):
        values = [json.dumps(one[key], default=str) if key in one else "-" for one in flat]
        own = all(_is_own(run, key, value) for run, value in zip(runs, values, strict=True))
        if len(set(values)) > 1 and not own and not key.startswith("actor_rollout_ref.actor.policy_loss.method"):
            rows.append([key, *values])
    return rows


def _is_own(run: Run, key: str, value: str) -> bool:
    """Whether it is the run's name, or a path in its folder, which may be relative in one place and absolute in another."""
    place = "/".join(Path(str(value_at(run.config, "run_dir"))).parts[-2:])
    return key.rpartition(".")[2] in ("name", "experiment_name") or place in value


def _read(folder: Path, folders: list[Path]) -> Run:
    try:
        metrics = read_metrics(folder / "metrics.jsonl")
    except OSError as error:
        raise UserError(f"{folder}: metrics.jsonl cannot be read ({error.strerror}). Give yourself the right to.") from error
    if not metrics.steps:
        raise UserError(f"{folder}: no finished training step in metrics.jsonl (looked for {folder.absolute()}). Give the folder of a run.")
    name, *names = (Path(os.path.abspath(one)).name for one in (folder, *folders))  # "." has none of its own
    return Run(folder, printable(name if names.count(name) == 1 else str(folder)), metrics, read_config(folder / "config.yaml"))


def _draw(path: Path, chosen: list[Panel], runs: list[Run]):
    columns = min(3, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure = Figure(figsize=(4.3 * columns, 2.7 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for index, panel in enumerate(chosen):
        axes = figure.add_subplot(rows, columns, index + 1)
        for nth, run in enumerate(runs):
            series = panel.series(run)
            steps, values = [*series], np.clip([*series.values()], -DRAWN, DRAWN)
            window, look = smoothing_window(len(values)), _look(nth)
            smoothed = window > 1 and panel.derive not in (fluctuation, variance)
            if smoothed:
                axes.scatter(steps, values, s=6, color=look["color"], alpha=0.25, linewidths=0)
            axes.plot(steps, smooth(values, window) if smoothed else values, **look, linewidth=1.6, marker="o" if len(values) < 3 else None)
        values = [min(value, DRAWN) for run in runs for value in panel.series(run).values()]
        if panel.log and min(values) > 1e-300:
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.set_ylim(10.0 ** math.floor(math.log10(min(values))), 10.0 ** (math.floor(math.log10(max(values))) + 1))
        style(axes)
        axes.set_title(printable(panel.title), loc="left", fontsize=10, parse_math=False)
    handles = [figure.axes[0].plot([], [], **_look(nth))[0] for nth, _ in enumerate(runs)]
    legend = figure.legend(handles, [run.label for run in runs], loc="outside upper left", ncols=3, frameon=False, fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(path, dpi=110)


def _look(nth: int) -> dict[str, str]:
    """Of the n-th run's line."""
    return {"color": COLOURS[nth % len(COLOURS)], "linestyle": LINES[nth // len(COLOURS) % len(LINES)]}


def _flatten(config: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in config.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _completions(runs: list[Run]) -> list[str]:
    """The first response of each run to the same prompts, where they have some in common."""
    last = [_last_samples(run) for run in runs]
    common = [prompt for prompt in last[0] if all(prompt in mine for mine in last)][:SHOWN]
    parts = []
    for prompt in common:
        parts.append(f"<p><b>{escape(prompt)}</b></p>")
        parts += [_completion(run.label, mine[prompt]) for run, mine in zip(runs, last, strict=True)]
    if common:
        return parts
    for run, mine in zip(runs, last, strict=True):
        parts.append(f"<h3>{escape(run.label)}</h3>")
        parts += [_completion(prompt, row) for prompt, row in [*mine.items()][:SHOWN]]
    return parts


def _completion(name: str, row: dict) -> str:
    return f"{escape(name)}, reward {escape(row['score'])}<pre>{escape(row['output'])}</pre>"


def _last_samples(run: Run) -> dict[str, dict]:
    """By prompt; the first of each."""
    files = sorted((file for file in (run.folder / "samples").glob("*.jsonl") if file.stem.isdecimal()), key=lambda file: int(file.stem))
    found = {}
    for row in read_samples(files[-1]).values() if files else []:
        found.setdefault(str(row["input"]), row)
    return found
