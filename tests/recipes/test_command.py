"""`python -m recipes.train` with bad input, as a process: the message, the exit code, nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def command(*overrides: str, path: str = str(ROOT)) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "recipes.train", *overrides],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("group", ["method", "model", "data", "cluster"])
def test_unknown_choices_are_answered_with_those_that_exist(group):
    done = command(f"{group}=nonsense")
    assert done.returncode != 0
    known = {"method": "band_kl", "model": "tiny", "data": "arithmetic", "cluster": "cpu"}[group]
    assert "nonsense" in done.stderr and known in done.stderr and "Traceback" not in done.stderr


def test_a_group_without_a_choice_is_answered_in_one_line():
    done = command("model=null")
    assert done.returncode == 2 and done.stderr.startswith("error: model=null: model must be one of folder, qwen2.5-1.5b, ")
    assert done.stderr.count("\n") == 1 and "_hub" not in done.stderr


def test_the_command_ends_with_2_and_leaves_no_run_folder(tmp_path):
    done = command("method.delta=oops", "name=x", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert done.stderr.startswith("error: method.delta = 'oops'") and "Traceback" not in done.stderr


def test_a_clashing_plugin_ends_the_run_before_ray(tmp_path):
    (tmp_path / "clash_later.py").write_text(
        "from verl.trainer.ppo.core_algos import register_policy_loss\n"
        "@register_policy_loss('trust_region')\n"
        "def theirs(*args, **kwargs): ...\n"
    )
    package = tmp_path / "clash_later-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: clash-later\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[verl.plugins]\nzz = clash_later\n")
    done = command(f"runs={tmp_path / 'runs'}", "name=x", path=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "clash_later.theirs" in done.stderr
    assert "Started a local Ray instance" not in (tmp_path / "runs" / "x" / "log.txt").read_text()
