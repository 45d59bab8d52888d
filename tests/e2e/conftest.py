"""Real runs: python -m recipes.train as a user starts it, and what it left behind."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("ray::", "raylet", "gcs_server", "EngineCore", "recipes.driver")


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen
    output: str = ""

    @property
    def rows(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.rows]

    def wait(self, timeout: float = 600) -> "Run":
        self.output, _ = self.process.communicate(timeout=timeout)
        return self

    def ok(self) -> "Run":
        assert self.process.returncode == 0, self.output
        return self

    def wait_until(self, condition, timeout: float = 300):
        deadline = time.monotonic() + timeout
        while not condition(self):
            assert self.process.poll() is None, self.wait().output
            assert time.monotonic() < deadline, f"{len(self.rows)} steps after {timeout} s"
            time.sleep(0.02)

    def wait_for_steps(self, steps: int, timeout: float = 300):
        self.wait_until(lambda run: len(run.rows) >= steps, timeout)

    def children(self, name: str) -> list[psutil.Process]:
        """The processes of this run that have `name` in their command lines."""
        found = [p for p in psutil.Process(self.process.pid).children(recursive=True) if name in " ".join(p.cmdline())]
        assert found, f"no {name} among the run's processes"
        return found

    def child(self, name: str) -> psutil.Process:
        return self.children(name)[0]


@pytest.fixture
def start(tmp_path):
    """start("method=grpo", ...) -> Run, going on; ended when the test ends."""
    runs = []

    def start_run(*overrides: str, name: str = "run", env: dict | None = None) -> Run:
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes.train", f"runs={tmp_path}", f"name={name}", *overrides],
            cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        runs.append(Run(tmp_path / name, process))
        return runs[-1]

    yield start_run
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)


@pytest.fixture
def train(start):
    """train("method=grpo", ...) -> Run, finished with exit code 0."""
    return lambda *overrides, **kwargs: start(*overrides, **kwargs).wait().ok()


@pytest.fixture
def leftovers():
    """leftovers() -> processes and shared-memory segments that appeared during the test and are still there."""
    before = set(_processes_and_segments())
    return lambda: sorted(set(_processes_and_segments()) - before)


def _processes_and_segments() -> list[str]:
    processes = [(p.pid, " ".join(p.info["cmdline"] or [])) for p in psutil.process_iter(["cmdline"])]
    left = [f"{pid} {cmdline[:100]}" for pid, cmdline in processes if any(name in cmdline for name in OURS)]
    return left + [str(p) for pattern in ("psm_*", "verl_weights_*") for p in Path("/dev/shm").glob(pattern)]
