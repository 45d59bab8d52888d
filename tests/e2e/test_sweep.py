"""A real sweep: four trainings from one command, one of which fails, and what the same command does after that."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
ILL = "method.beta_low=0.1+method.delta=0.03"
# A reward function of a user's, with a bug that shows in one job only.
REWARD = """
import os
from recipes.rewards import compute_score as whole
def compute_score(*args, **kwargs):
    if "{ill}" in os.environ.get("VERL_FILE_LOGGER_PATH", ""):
        raise ValueError("no reward for this one")
    return whole(*args, **kwargs)
"""


def sweep(tmp_path: Path) -> tuple[int, str, list[dict]]:
    """The exit code, what was said, and the table."""
    done = subprocess.run(
        [
            sys.executable, "-m", "recipes.train", "-m", "sweep=delta_beta", "method.delta=0.03,0.10", "method.beta_low=0.03,0.10",
            "trainer.total_training_steps=2", f"runs={tmp_path}", "name=both", "reward=function",
            f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=850,
    )  # fmt: skip
    print(done.stdout)
    with open(tmp_path / "both" / "sweep_results.csv", newline="") as file:
        return done.returncode, done.stdout, list(csv.DictReader(file))


def test_a_failed_job_stops_no_other_and_is_all_that_is_run_again(tmp_path, leftovers):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format(ill=ILL))
    code, said, rows = sweep(tmp_path)
    assert code == 2 and "1 of 4 jobs did not finish" in said and leftovers() == []
    *well, ill = rows
    assert [row["status"] for row in rows] == ["finished"] * 3 + ["failed"]
    assert ill["folder"] == ILL and ill["method.delta"] == "0.03" and ill["method.beta_low"] == "0.1"
    assert "every response failed with an error in the agent loop or in the reward function" in ill["error"]
    assert "no reward for this one" in (tmp_path / "both" / ILL / "log.txt").read_text()
    assert len({(row["method.delta"], row["method.beta_low"]) for row in rows}) == 4
    rewards = [float(row["reward"]) for row in well]
    assert rewards == sorted(rewards, reverse=True) and all(0 < reward < 1 for reward in rewards)
    for row in well:
        folder = tmp_path / "both" / row["folder"]
        logged = [json.loads(line)["data"]["critic/rewards/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert float(row["reward"]) == pytest.approx(sum(logged) / 2) and row["steps"] == "2" and (folder / "summary.md").exists()
    written = {row["folder"]: (tmp_path / "both" / row["folder"] / "metrics.jsonl").stat().st_mtime for row in well}

    reward.write_text(REWARD.format(ill="none"))
    code, said, rows = sweep(tmp_path)
    assert code == 0 and said.count("finished before") == 3 and said.count("ready and first step done") == 1 and leftovers() == []
    assert [row["status"] for row in rows] == ["finished"] * 4
    assert written == {name: (tmp_path / "both" / name / "metrics.jsonl").stat().st_mtime for name in written}
    assert [path.name for path in (tmp_path / "both" / "earlier").iterdir()] == [f"{ILL}.1"]
