"""The results of a sweep, from what its jobs left in its folder:  python -m recipes.sweep_table FOLDER

Prints the table and writes FOLDER/sweep_results.csv; while jobs are running, too, and from another machine.
"""

import argparse
import csv
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from recipes.report import WINDOW, number, print_tables
from recipes.run_files import Metrics, read_metrics
from recipes.sweep_records import FINISHED, JobRecord, read_records

FILE = "sweep_results.csv"
VALIDATION = "val-core/"
HEADERS = {"clip_fraction": "clipped", "seconds_per_step": "s/step"}  # what is printed must fit a terminal


def results(sweep: Path) -> list[dict[str, Any]]:
    """One row a job: the keys that differ, then what came of it. The finished first, best reward first.

    reward, entropy and clip_fraction are means of the last 5 steps, or of as many as there are.
    """
    rows = [_row(record) for record in read_records(sweep)]
    return sorted(rows, key=lambda row: (row["status"] != FINISHED, -row["reward"] if row["reward"] is not None else float("inf")))


def _row(record: JobRecord) -> dict[str, Any]:
    known, metrics = record.read(), read_metrics(record.folder / "metrics.jsonl")
    seconds = metrics.get("seconds")
    later = [value for step, value in seconds.items() if step != metrics.steps[0]] or list(seconds.values())
    measured = {
        "status": known.get("status"),
        "steps": metrics.steps[-1] if metrics.steps else 0,
        "reward": _last(metrics, "reward"),
        **{key: [*metrics.series[key].values()][-1] for key in sorted(metrics.series) if key.startswith(VALIDATION)},
        "entropy": _last(metrics, "entropy"),
        "clip_fraction": _last(metrics, "clipped"),
        "seconds_per_step": median(later) if later else None,  # without the first step, which warms up
        "error": (known.get("error") or "").partition("\n")[0],
        "folder": record.name,
    }
    varied = {f"chosen.{key}" if key in measured else key: value for key, value in known.get("varied", {}).items()}  # reward=
    return varied | measured


def _last(metrics: Metrics, column: str) -> float | None:
    values = metrics.get(column)
    last = [values[step] for step in metrics.steps[-WINDOW:] if step in values]
    return fmean(last) if last else None


def columns(rows: list[dict]) -> list[str]:
    """The keys that differ, in order of their first job, then the others; validation where a job has any."""
    last = ["entropy", "clip_fraction", "seconds_per_step", "error", "folder"]
    names = dict.fromkeys(key for row in rows for key in row if key not in last)
    validation = [name for name in names if name.startswith(VALIDATION)]
    return [*(name for name in names if name not in validation), *validation, *last]


def write_table(sweep: Path):
    """Writes FILE and prints the same."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    rows = results(sweep)
    names = columns(rows)
    with open(sweep / FILE, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    shown = [name for name in names if name not in ("error", "folder")]
    header = [name.removeprefix(VALIDATION) if name.startswith(VALIDATION) else _short(name, shown) for name in shown]
    finished = sum(row["status"] == FINISHED for row in rows)
    heading = f"{sweep.name}: {finished} of {len(rows)} jobs finished"
    notes = [(row["folder"], row["error"]) for row in rows if row["error"]]
    print_tables(console, heading, header, [[_text(name, row.get(name)) for name in shown] for row in rows], notes)
    console.print(f"table: {sweep / FILE}", soft_wrap=True, markup=False)


def _short(name: str, names: list[str]) -> str:
    """method.delta -> delta, where no other column would have that name too."""
    if name in HEADERS:
        return HEADERS[name]
    last = name.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in names].count(last) == 1 else name


def _text(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name == "clip_fraction":
        return f"{value:.3%}"
    if name == "seconds_per_step":
        return f"{value:.1f}"
    measured = name in ("reward", "entropy") or name.startswith(VALIDATION)
    return number(value) if measured else str(value)


def main():
    parser = argparse.ArgumentParser(description="The results of a sweep, from its folder.")
    parser.add_argument("folder", type=Path, help="runs/<name of the sweep>")
    folder = parser.parse_args().folder
    if not read_records(folder):
        print(f"error: {folder} is no sweep's folder: it has no jobs/*.json. Give the folder that the sweep named in its first line, runs/...", file=sys.stderr)
        sys.exit(2)
    write_table(folder)


if __name__ == "__main__":
    main()
