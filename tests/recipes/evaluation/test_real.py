"""Real evaluations of the tiny model by vLLM, on this machine's CPU."""

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
SAMPLES = 64 * 4


def start(runs: Path) -> subprocess.Popen:
    # Few at a time, so that there is a half-way.
    options = ["model=tiny", "benchmarks=[arithmetic]", "problems=64", "n=4", "device=cpu", "engine.max_num_seqs=8"]
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.evaluate", f"runs={runs}", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    return runs / "tiny", finish(start(runs))


def test_an_evaluation_reports_what_it_sampled(uninterrupted):
    folder, output = uninterrupted
    scores = {row["metric"]: float(row["value"]) for row in csv.DictReader((folder / "results.csv").read_text().splitlines())}
    assert 0.25 < scores["mean@4"] < 0.6  # about 40 % right, says configs/model/tiny.yaml
    assert scores["mean@4"] == pytest.approx(scores["pass@1"]) and scores["pass@1"] < scores["pass@2"] < scores["pass@4"]
    assert scores["mean@4"] < scores["best@4(bootstrap)"] < scores["pass@4"]
    assert len((folder / "samples" / "arithmetic.jsonl").read_text().splitlines()) == 1 + SAMPLES
    assert f"{100 * scores['mean@4']:.1f}" in output and "64 problems, 4 samples each" in output
    assert (folder / "summary.md").is_file() and not list(folder.glob("server-*.json*"))


def test_killed_and_started_again_it_reports_the_same(uninterrupted, tmp_path):
    whole, _ = uninterrupted
    process, file = start(tmp_path), tmp_path / "tiny" / "samples" / "arithmetic.jsonl"
    deadline = time.monotonic() + 120
    while not file.exists() or file.read_bytes().count(b"\n") < SAMPLES // 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    servers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(servers, timeout=10)
    assert servers and not alive
    kept = file.read_bytes()
    assert SAMPLES // 4 <= kept.count(b"\n") < SAMPLES
    finish(start(tmp_path))
    assert file.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])  # nothing is made twice
    for name in ("results.csv", "summary.md"):
        found, expected = ((folder / name).read_text().replace(str(folder.parent), "") for folder in (tmp_path / "tiny", whole))
        assert found == expected, name
    assert sorted(file.read_text().splitlines()) == sorted((whole / "samples" / "arithmetic.jsonl").read_text().splitlines())
