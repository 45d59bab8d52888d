"""Runs that are killed and gone on with, as a user would: nothing lost, nothing twice, and what died is named."""

import contextlib
import json
import os
import random
import time

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.launcher import FINISHED
from trustregion.verl_plugin.checkpoints import checkpoint_folders, is_sealed, step_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
KILLS = int(os.environ.get("KILLS", 10))
TIMING = ("timing", "perf/", "throughput")
SAVES = ["trainer.save_freq=1", "trainer.resume_mode=auto"]


def kill_all(run):
    """SIGKILL to the launcher and all that it has started, at once."""
    tree = [run.process.pid, *(p.pid for p in psutil.Process(run.process.pid).children(recursive=True))]
    for pid in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    run.process.wait(30)


def logged(run, file: str = "metrics.jsonl") -> list[int]:
    path = run.folder / file
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def has_trained(run, since: float) -> bool:
    """Whether it has logged a step; the file of the run that was killed is there until it starts."""
    new = run.folder / "metrics.new.jsonl"
    return new.exists() and new.stat().st_mtime > since and logged(run, new.name) != []


def newest_step(run) -> int:
    return max(map(step_of, checkpoint_folders(run.folder / "checkpoints")), default=0)


def without_timing(row: dict) -> dict:
    kept = {key: value for key, value in row.items() if not any(part in key for part in TIMING)}
    assert len(kept) > 60
    return kept


@pytest.mark.timeout(300 * (KILLS + 2))
def test_killed_at_any_moment_it_goes_on(start):
    """Random moments of a step, and those while a checkpoint is being written."""
    steps, moments = 6 * KILLS, random.Random(0)
    overrides = [*SAVES, f"trainer.total_training_steps={steps}", "trainer.max_actor_ckpt_to_keep=2"]
    reached = 0
    for kill in range(KILLS):
        started, run = time.time(), start(*overrides)
        run.wait_until(lambda run, started=started: has_trained(run, started))
        if kill % 2:
            time.sleep(moments.uniform(0, 6))
        else:
            before = newest_step(run)
            run.wait_until(lambda run, before=before: newest_step(run) != before)  # it is being saved
            time.sleep(moments.uniform(0, 0.06))
        kill_all(run)
        newest, *_ = checkpoint_folders(run.folder / "checkpoints")
        reached = logged(run)[-1]
        print(f"kill {kill + 1}: {reached} rows, newest checkpoint {step_of(newest)}, whole: {is_sealed(newest)}")
        assert logged(run) == list(range(1, reached + 1)) and reached < steps
    run = start(*overrides).wait().ok()
    assert "goes on from the checkpoint of step" in run.output
    assert logged(run) == list(range(1, steps + 1))
    assert len(list((run.folder / "samples").glob("*.jsonl"))) == steps
    assert json.loads((run.folder / FINISHED).read_text())["steps"] == steps
    assert len(checkpoint_folders(run.folder / "checkpoints")) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_gone_on_with_is_as_if_it_had_not_been(start, train, workers):
    overrides = [*SAVES, f"cluster.workers={workers}", "trainer.total_training_steps=5"]
    straight = train(*overrides, name="straight")
    killed = start(*overrides, name="killed")
    killed.wait_for_steps(3)
    kill_all(killed)
    resumed = train(*overrides, name="killed")
    assert logged(resumed) == [1, 2, 3, 4, 5]
    for step, (expected, row) in enumerate(zip(straight.rows, resumed.rows, strict=True), start=1):
        assert without_timing(row) == without_timing(expected), step
        samples = (run.folder / "samples" / f"{step}.jsonl" for run in (straight, resumed))
        assert len({path.read_text() for path in samples}) == 1
    models = (AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints" / "final") for run in (straight, resumed))
    one, other = (model.state_dict() for model in models)
    assert all(one[name].dtype == torch.float32 and torch.equal(one[name], other[name]) for name in one | other)


def test_a_dead_worker_is_named_and_the_run_goes_on_by_itself(start, leftovers):
    run = start(*SAVES, "cluster.workers=2", "trainer.total_training_steps=6", "max_restarts=1")
    run.wait_for_steps(2)
    worker = sorted(run.children("ray::WorkerDict"), key=lambda process: process.pid)[1]
    worker.kill()
    run.wait(timeout=300).ok()
    assert "FSDP worker" in run.output and f"(pid {worker.pid}) is dead" in run.output
    assert "restart 1 of 1" in run.output
    assert logged(run) == [1, 2, 3, 4, 5, 6] and leftovers() == []


@pytest.mark.parametrize("process, name", [("ray::TopKServer", "vLLM server 0_0 at"), ("ray::WorkerDict", "FSDP worker 0 of 1")])
def test_what_dies_is_named_within_two_minutes(start, leftovers, process, name):
    run = start(*SAVES, "trainer.total_training_steps=100")
    run.wait_for_steps(2)
    run.child(process).kill()
    killed = time.monotonic()
    run.wait(timeout=180)
    print(f"{name}: ended after {time.monotonic() - killed:.0f} s")
    assert time.monotonic() - killed < 120 and run.process.returncode == 2
    assert name in run.output and "is dead" in run.output and "last lines there" in run.output
    assert "To go on from the checkpoint of step" in run.output and leftovers() == []


def test_a_reward_that_fails_at_times_is_told(start, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, **kwargs):\n"
        "    if solution_str not in ('', ground_truth) and ground_truth.endswith('7'):\n"  # not when it is tried
        "        raise KeyError('sevens')\n"
        "    return float(solution_str == ground_truth)\n"
    )
    run = start("reward=function", f"reward.custom_reward_function.path={tmp_path}/mine.py", "trainer.total_training_steps=2")
    run.wait().ok()
    assert all(0 < lost < 16 for lost in run.column("training/rollout_failure/prompts"))
    assert "training prompts lack responses" in run.output and "KeyError: 'sevens'" in (run.folder / "log.txt").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system")
def test_a_full_disk_ends_the_run_and_costs_nothing(start, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    if os.system(f"mount -t tmpfs -o size=13m tmpfs {folder}"):
        pytest.skip("may not mount")
    try:
        early = start(*SAVES, "trainer.total_training_steps=4").wait(timeout=60)
        assert early.process.returncode == 2 and "trainer.default_local_dir" in early.output and not early.rows
        run = start(*SAVES, "trainer.total_training_steps=4", "preflight=false").wait(timeout=280)
        assert run.process.returncode == 2
        assert "global_step_3 could not be written" in run.output and "GiB are free there" in run.output
        assert "To go on from the checkpoint of step 2" in run.output and 2 <= len(run.rows) <= 3
        assert [step_of(f) for f in checkpoint_folders(folder)] == [2, 1]
    finally:
        os.system(f"umount -l {folder}")
