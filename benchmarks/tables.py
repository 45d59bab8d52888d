"""Timings and their tables: in turns, medians with their spread, and what they were measured on."""

import csv
import functools
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def measure(runs: dict, clock, device: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds. In turns, so that all meet the same load of the machine."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = {name: [] for name in runs}
    for repeat in range(-1, repeats):  # the first one warms up
        for name, run in runs.items():
            synchronize()
            start = clock()
            run()
            synchronize()
            if repeat >= 0:
                times[name].append(1e3 * (clock() - start))
    return times


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def rows(runs: dict[str, Callable], device: str, repeats: int, **labels) -> list[dict]:
    """One row a run, in milliseconds. Runs take turns, so that all meet the same load of the machine."""
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    found = []
    for way, times in measure(runs, time.perf_counter, device, repeats).items():
        p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
        numbers = {"median_ms": statistics.median(times), "p20_ms": p20, "p80_ms": p80}
        where = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
        found.append(labels | {"way": way} | {key: round(x, 4) for key, x in numbers.items()} | where)
        print(found[-1], flush=True)
    return found


def compiled(function: Callable) -> Callable:
    """The function under torch.compile, compiled already for these arguments once it has run."""
    return functools.wraps(function)(torch.compile(function, dynamic=False))


def write(name: str, table: list[dict]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path


def median(table: list[dict], **labels) -> float:
    (row,) = [row for row in table if all(row[key] == value for key, value in labels.items())]
    return row["median_ms"]
