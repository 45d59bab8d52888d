"""Runs vLLM servers, each in a process of its own; grades and keeps what they finish, as it comes."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recipes.errors import UserError
from recipes.evaluation.benchmarks import Problem
from recipes.evaluation.grade import grade
from recipes.evaluation.samples import Samples
from recipes.math_grader import PROCESSES
from recipes.new_lines import NewLines
from recipes.processes import ProcessTree, private_temporary_files

POLL_SECONDS = 0.2
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())


class Interrupted(Exception):
    """By the signal `signum`; what was finished is kept."""

    def __init__(self, signum: int):
        self.signum = signum


@dataclass(frozen=True)
class Job:
    """What one server does, as recipes.evaluation.server reads it, and the environment it does it in."""

    engine: dict
    sampling: dict
    prompts: dict[str, list[int]]
    requests: list[tuple[str, int, int, int]]
    environment: dict[str, str]


def serve(jobs: list[Job], problems: dict[str, Problem], held: dict[str, Samples], folder: Path, console: Console):
    """Does the jobs and adds the graded samples to `held`. Logs go to `folder`/server-<number>.log.

    Raises UserError when a server fails and Interrupted after a signal; the servers are gone either way.
    """
    total = sum(samples.header["problems"] * samples.header["n"] for samples in held.values())
    count = lambda: sum(len(samples.rows) for samples in held.values())  # noqa: E731
    with _signals() as signals, _Grading(problems, held) as grading, Progress(*COLUMNS, console=console, refresh_per_second=2) as bar:
        before = count()
        task = bar.add_task("starting vLLM", total=total, completed=before)
        with _servers(jobs, folder) as servers:
            finished = False
            while not finished:
                codes = [tree.poll() for tree, _ in servers]  # before the rows are read: none is missed at the end
                for _, rows in servers:
                    grading.add([json.loads(line) for line in rows()])
                bar.update(task, completed=count(), description="generating" if count() > before else "starting vLLM")
                if signals:
                    raise Interrupted(signals[0])
                for number, code in enumerate(codes):
                    if code:
                        raise UserError(_failure(folder / f"server-{number}.log", code))
                pending = grading.pending()
                finished = not pending and all(code == 0 for code in codes)
                time.sleep(POLL_SECONDS)
        bar.update(task, completed=count())


class _Grading:
    """Context manager; grades rows of servers, some at a time, and adds them to the samples."""

    def __init__(self, problems: dict[str, Problem], held: dict[str, Samples]):
        self._problems, self._held, self._lock, self._futures = problems, held, threading.Lock(), []
        self._pool = ThreadPoolExecutor(PROCESSES)

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, rows: list[dict]):
        self._futures += [self._pool.submit(self._grade, row) for row in rows]

    def pending(self) -> int:
        """How many are not graded yet. Raises what went wrong in those that are."""
        self._futures = [future for future in self._futures if not future.done() or future.result()]
        return len(self._futures)

    def _grade(self, row: dict):
        problem = self._problems[row["problem"]]
        answer, correct = grade(problem.source, row["text"], problem.truth)
        with self._lock:
            self._held[problem.benchmark].add({**row, "source": problem.source, "truth": problem.truth, "answer": answer, "correct": correct})


@contextlib.contextmanager
def _servers(jobs: list[Job], folder: Path) -> Iterator[list[tuple[ProcessTree, NewLines]]]:
    servers, files = [], []
    with private_temporary_files(dict(os.environ)) as environment:
        try:
            for number, job in enumerate(jobs):
                file, out, log = (folder / f"server-{number}.{ending}" for ending in ("json", "jsonl", "log"))
                files += [file, out]
                for left in (out, log):  # by a process that was killed
                    left.unlink(missing_ok=True)
                file.write_text(json.dumps({**asdict(job), "environment": None, "out": str(out)}), encoding="utf-8")
                command = [sys.executable, "-m", "recipes.evaluation.server", str(file)]
                servers.append((ProcessTree(command, {**environment, **job.environment}, log), NewLines(out)))
            yield servers
        finally:
            for tree, _ in servers:
                tree.end()
            for file in files:
                file.unlink(missing_ok=True)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that have come to end this process, which no longer end it by themselves."""
    signals = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, lambda number, _frame: signals.append(number)) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _failure(log: Path, code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\n".join([f"a vLLM server {how}. What it finished is kept. The end of {log}:", *(f"  {line}" for line in tail)])
