"""Two Ray nodes that share neither network nor memory, by scripts/ray_cluster.sh; see two_nodes.sh."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]
WORLD = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc"]


def why_not() -> str | None:
    """What this machine lacks or forbids."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "pgrep") if shutil.which(name) is None]:
        return f"no {', '.join(missing)} here"
    network = "ip link add switch type bridge && ip link add va type veth peer name vb"
    tried = subprocess.run([*WORLD, "bash", "-c", network], capture_output=True, text=True)
    return f"network namespaces are not allowed here ({tried.stderr.strip()})" if tried.returncode else None


@pytest.fixture
def on_two_nodes(tmp_path):
    """on_two_nodes("python", ...) -> the finished process, whose command ran on the first of two nodes."""
    if reason := why_not():
        pytest.skip(reason)

    def run(*command: str, meanwhile=None, **environment: str) -> subprocess.CompletedProcess:
        process = subprocess.Popen(
            [str(ROOT / "tests/e2e/two_nodes.sh"), str(tmp_path), *command],
            env={**os.environ, "PYTHON": sys.executable, "RAY_DEDUP_LOGS": "0", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            if meanwhile:
                meanwhile(process)
            output, _ = process.communicate(timeout=600)
        finally:
            process.kill()  # and with it both hosts
        return subprocess.CompletedProcess(command, process.returncode, output)

    return run


def cut_power(process: subprocess.Popen, host: str):
    """Ends all that runs on a host, its first process first, and its network without a word to the other."""
    parent = next(p for p in psutil.Process(process.pid).children(recursive=True) if host in p.cmdline() and p.name() == "unshare")
    parent.children()[0].kill()


def responses(run: Path) -> list[str]:
    return sorted(json.loads(line)["output"] for line in (run / "samples" / "1.jsonl").open())


def test_two_nodes_compute_what_two_workers_compute(train, on_two_nodes, tmp_path):
    one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=16"  # so that the first update sees the same sequences
    one = train(one_update, "trainer.total_training_steps=1", "cluster.workers=2", name="one_node").folder
    two = tmp_path / "two_nodes"
    command = [sys.executable, "-m", "recipes.train", f"run_dir={two}", "cluster=cpu_2x1", one_update, "trainer.total_training_steps=5"]
    done = on_two_nodes(*command)
    assert done.returncode == 0, done.stdout
    log = (two / "log.txt").read_text(errors="replace")
    for process in ("WorkerDict", "TopKServer"):  # FSDP's, and vLLM's
        assert re.search(rf"\({process} pid=\d+, ip=10.77.0.2\)", log) and re.search(rf"\({process} pid=\d+\)", log)
    rows = {run: [json.loads(line)["data"] for line in (run / "metrics.jsonl").open()] for run in (one, two)}
    assert len(rows[two]) == 5 and max(row["training/rollout_probs_diff_max"] for row in rows[two]) < 1e-5
    assert responses(two) == responses(one)
    for key in ("actor/pg_loss", "actor/grad_norm"):
        assert rows[two][0][key] == pytest.approx(rows[one][0][key], rel=1e-5), key


def test_a_dead_second_node_ends_the_run_with_its_name(on_two_nodes, leftovers, tmp_path):
    folder, died = tmp_path / "run", []

    def meanwhile(process):
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
        cut_power(process, "hostb")
        died.append(time.monotonic())

    saves = ["trainer.save_freq=1", "trainer.total_training_steps=100"]
    done = on_two_nodes(sys.executable, "-m", "recipes.train", f"run_dir={folder}", "cluster=cpu_2x1", *saves, meanwhile=meanwhile)
    seconds = time.monotonic() - died[0]
    print(f"ended {seconds:.0f} s after the node died:\n{done.stdout[-2000:]}")
    assert done.returncode == 2 and "the Ray node at 10.77.0.2 is dead" in done.stdout
    assert "To go on from the checkpoint of step" in done.stdout
    assert seconds < 120 and leftovers() == []


def test_before_training_nodes_are_compared(on_two_nodes):
    """On the same two: first as the run is, then with a file of one node's own and more nodes than there are."""
    preflight = f"{sys.executable} -m recipes.train cluster=cpu_2x1 preflight=only"
    script = f"{preflight}; echo as it is: $?; cp assets/arithmetic-0/*.parquet /tmp; set -- /tmp/*.parquet; {preflight} data.val_files=$1 trainer.nnodes=4; echo wrong: $?"
    done = on_two_nodes("bash", "-c", script)
    assert "found: cluster: 2 nodes, hosta (10.77.0.1) with 1 GPUs, hostb (10.77.0.2) with 1 GPUs; the same" in done.stdout, done.stdout
    assert "found: one token: vLLM sampled" in done.stdout and "as it is: 0\n" in done.stdout, done.stdout
    wrong = done.stdout.partition("as it is: 0")[2]
    assert "trainer.nnodes = 4" in wrong and "hostb (10.77.0.2): not there: /tmp/" in wrong and "wrong: 2\n" in wrong, wrong
    assert "hosta (10.77.0.1): not there" not in wrong


def test_a_node_with_another_environment_is_named(on_two_nodes):
    command = [sys.executable, "-m", "recipes.train", "cluster=cpu_2x1", "preflight=only"]
    done = on_two_nodes(*command, ON_HOSTB="VERL_USE_EXTERNAL_PLUGINS=none NCCL_ALGO=Ring")
    assert done.returncode == 2 and "hostb (10.77.0.2): verl does not know our policy loss" in done.stdout, done.stdout
    assert "hosta (10.77.0.1): verl" not in done.stdout
    assert re.search(r"\n *VERL_USE_EXTERNAL_PLUGINS +not set +none\n", done.stdout) and "NCCL_ALGO" in done.stdout
