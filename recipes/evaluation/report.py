"""What an evaluation says: tables on the terminal, summary.md, results.csv and comparison.csv."""

import csv
import shlex
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.evaluation.retention import Fit
from recipes.evaluation.scores import Result, Score, headline

NOTES = (
    "Values are per cent, in brackets 95 % bootstrap intervals over problems. "
    "mean@k: how often a sample is right. pass@k: probability that of k samples one is, unbiased. maj@k: how often the answer "
    "that most of k samples state is right. best@k(bootstrap): verl's `best@k/mean`, draws with replacement, below pass@k."
)
COMPARED = (
    "The interval resamples problems in pairs; p is of a test that swaps the two in each problem at random. "
    "No correction for several rows."
)
DIFFERENCES = ["per cent", "metric", "this", "that", "difference", "p"]


def show(console: Console, title: str, results: list[Result], differences: list[dict], fits: dict[str, Fit]):
    """Prints the headline metrics."""
    console.print()
    console.print(Text(title, style="bold"))
    metrics = headline(results[0].n)
    _print(console, ["per cent", *(metric.replace("(bootstrap)", "*") for metric in metrics)], [
        *([[one.benchmark, *map(cell, (one.scores[metric] for metric in metrics))] for one in results]),
        *average(results, metrics),
    ])  # fmt: skip
    if any("best" in metric for metric in metrics):
        console.print(Text("* verl's best@k, drawn with replacement: below the unbiased pass@k", style="dim"))
    for one in results:
        console.print(Text(f"{one.benchmark}: {facts(one)}"), soft_wrap=True)
    if differences:
        console.print()
        _print(console, DIFFERENCES, difference_rows(differences))
    for line in retention_lines(fits):
        console.print(Text(line), soft_wrap=True)


def write(folder: Path, command: list[str], title: str, settings: dict, results: list[Result], differences: list[dict], fits: dict[str, Fit]):
    """Writes the files. The same samples give the same ones."""
    with open(folder / "results.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["benchmark", "metric", "value", "low", "high", "problems", "samples_a_problem"])
        for one in results:
            for score in one.scores.values():
                table.writerow([one.benchmark, score.metric, *(f"{value:.6f}" for value in (score.value, score.low, score.high)), one.problems, one.n])
    comparison = folder / "comparison.csv"
    comparison.unlink(missing_ok=True)
    if differences:
        with open(comparison, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, differences[0], lineterminator="\n")
            table.writeheader()
            table.writerows({key: f"{value:.6f}" if isinstance(value, float) else value for key, value in row.items()} for row in differences)
    metrics = list(results[0].scores)
    parts = [f"# {title}", "", "```sh", shlex.join(command), "```", ""]
    parts += _markdown(["per cent", *(one.benchmark for one in results), *(["average"] if len(results) > 1 else [])], [
        [metric, *(cell(one.scores[metric]) for one in results), *(row[1] for row in average(results, [metric]))] for metric in metrics
    ])  # fmt: skip
    parts += ["", *(f"- {one.benchmark}: {facts(one)}" for one in results), "", NOTES, ""]
    if differences:
        parts += ["## Differences on the same problems", "", *_markdown(DIFFERENCES, difference_rows(differences)), "", COMPARED, ""]
    if fits:
        parts += ["## Retention", "", *(f"- {line}" for line in retention_lines(fits)), ""]
    parts += ["## Setting", "", *(f"- {name}: {value}" for name, value in settings.items()), ""]
    (folder / "summary.md").write_text("\n".join(parts), encoding="utf-8")


def cell(score: Score) -> str:
    return f"{100 * score.value:.1f} [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def average(results: list[Result], metrics: list[str]) -> list[list[str]]:
    """The row of means over benchmarks, each counting the same as in the papers' tables; none for one benchmark."""
    if len(results) < 2:
        return []
    return [["average", *(f"{100 * fmean(one.scores[metric].value for one in results):.1f}" for metric in metrics)]]


def facts(one: Result) -> str:
    return (
        f"{one.problems} problems, {one.n} samples each, {one.tokens:.1f} tokens in the mean; "
        f"{one.cut_off:.1%} cut off at max_tokens, {one.unanswered:.1%} without an answer"
    )


def difference_rows(differences: list[dict]) -> list[list[str]]:
    rows = []
    for row in differences:
        here, there, found, low, high = (f"{100 * row[key]:.1f}" for key in ("here", "there", "difference", "low", "high"))
        rows.append([row["benchmark"], row["metric"], here, there, f"{found} [{low}, {high}]", p_value(row["p_value"])])
    return rows


def p_value(p: float) -> str:
    return f"{p:.4f}" if p >= 1e-4 else "< 0.0001"


def retention_lines(fits: dict[str, Fit]) -> list[str]:
    if not fits:
        return []
    lines = [f"retention, {name} ({fit.model}): perplexity {fit.perplexity:.4g} a token, {fit.bits_per_byte:.4f} bits a byte" for name, fit in fits.items()]
    change = fits["model"].bits_per_byte / fits["base"].bits_per_byte - 1
    return [*lines, f"retention: {change:+.2%} bits a byte against the base model"]


def _print(console: Console, header: list[str], rows: list[list[str]]):
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(Text(name), justify="right" if index else "left")
    for row in rows:
        # Text, not str: square brackets must not be read as markup. The interval goes below its value where it is narrow.
        table.add_row(*(Text(part.replace(" [", "\n[") if len(header) == 5 else part) for part in row))
    console.print(table)


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, [":--"] + ["--:"] * (len(header) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
