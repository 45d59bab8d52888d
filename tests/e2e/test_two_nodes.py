"""Two Ray nodes that share neither network nor memory, by scripts/ray_cluster.sh; see two_nodes.sh."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]
WORLD = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc"]


def why_not() -> str | None:
    """What this machine lacks or forbids."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "pgrep") if shutil.which(name) is None]:
        return f"no {', '.join(missing)} here"
    tried = subprocess.run([*WORLD, "ip", "link", "add", "va", "type", "veth", "peer", "name", "vb"], capture_output=True, text=True)
    return f"network namespaces are not allowed here ({tried.stderr.strip()})" if tried.returncode else None


@pytest.fixture
def on_two_nodes(tmp_path):
    """on_two_nodes("python", ...) -> the finished process, whose command ran on the first of two nodes."""
    if reason := why_not():
        pytest.skip(reason)

    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(ROOT / "tests/e2e/two_nodes.sh"), str(tmp_path), *command],
            env={**os.environ, "PYTHON": sys.executable}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
        )  # fmt: skip

    return run


def responses(run: Path) -> list[str]:
    return sorted(json.loads(line)["output"] for line in (run / "samples" / "1.jsonl").open())


def test_two_nodes_compute_what_two_workers_compute(train, on_two_nodes, tmp_path):
    one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=16"  # so that the first update sees the same sequences
    common = [one_update, "trainer.total_training_steps=5"]
    one = train(*common, "cluster.workers=2", name="one_node")
    done = on_two_nodes(sys.executable, "-m", "recipes.train", f"runs={tmp_path}", "name=two_nodes", "cluster=cpu_2x1", *common)
    assert done.returncode == 0, done.stdout
    two = tmp_path / "two_nodes"
    log = (two / "log.txt").read_text(errors="replace")
    assert "TrustRegionWorker" in log and "ip=10.77.0.2" in log  # of what the second node had to say
    rows = [json.loads(line)["data"] for line in (two / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-5
    assert responses(two) == responses(one.folder)
    for key in ("actor/pg_loss", "actor/grad_norm"):
        assert rows[0][key] == pytest.approx(one.rows[0][key], rel=1e-5), key
