"""Sweeps with a job that takes no time: folders, checks before the start, failures, interrupts, going on, the table."""

import csv
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from recipes import sweep, sweep_table, train
from recipes.errors import UserError
from recipes.sweep_records import JobRecord, differences, read_records
from recipes.sweep_table import results

THREE = ["-m", "method.delta=0.03,0.05,0.10", "name=radii"]
NAMES = ["method.delta=0.03", "method.delta=0.05", "method.delta=0.1"]


def row(step: int, reward: float, **more) -> str:
    values = {"critic/rewards/mean": reward, "actor/entropy": 0.5, "trust/clip_fraction": 0.01, "timing_s/step": 10.0 - step}
    return json.dumps({"step": step, "data": values | more}) + "\n"


class Jobs:
    """In the place of launch(): a job leaves two steps, whose reward is its radius, and does what `ends` has for its name."""

    def __init__(self):
        self.started, self.commands, self.ends = [], [], {}

    def __call__(self, config, command):
        self.started.append(config.name)
        self.commands.append(command)
        folder = Path(config.run_dir)
        folder.mkdir(parents=True, exist_ok=config.trainer.resume_mode == "auto")
        (folder / "metrics.jsonl").write_text("".join(row(step, config.method.delta * step) for step in (1, 2)))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the launcher does, in its way
        self.ends.get(config.name, lambda: None)()

    def failing(self, message: str):
        def fail():
            raise UserError(message)

        return fail


@pytest.fixture
def jobs(monkeypatch):
    found = Jobs()
    monkeypatch.setattr(sweep, "launch", found)
    return found


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command("-m", ...) -> exit code of `python -m recipes.train -m ... runs=tmp_path`."""

    def command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments, f"runs={tmp_path}"])
        try:
            train.main()
        except SystemExit as end:
            return end.code or 0
        return 0

    return command


def table(folder: Path) -> list[dict]:
    with open(folder / "sweep_results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_each_job_has_a_folder_named_after_what_differs_and_a_row(command, jobs, tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    assert command(*THREE) == 0
    assert jobs.started == NAMES and signal.getsignal(signal.SIGINT) is before
    rows = table(tmp_path / "radii")
    assert [(row["method.delta"], row["status"], row["steps"]) for row in rows] == [(d, "finished", "2") for d in ("0.1", "0.05", "0.03")]
    assert [float(row["reward"]) for row in rows] == pytest.approx([0.15, 0.075, 0.045])
    assert float(rows[0]["seconds_per_step"]) == 8 and float(rows[0]["clip_fraction"]) == 0.01 and rows[0]["folder"] == NAMES[2]
    said = capsys.readouterr().out
    assert said.index("3 of 3 jobs finished") < said.index("1.000%")


def test_a_job_can_be_run_alone_by_the_command_in_its_summary(command, jobs, tmp_path):
    command("sweep=delta", "name=radii")
    for nth, name in enumerate(NAMES):
        alone = train.compose([part for part in jobs.commands[nth][3:] if part != "hydra.mode=RUN"])
        assert "hydra.mode=RUN" in jobs.commands[nth] and alone.run_dir == str(tmp_path / "radii" / name)
        record = JobRecord(tmp_path / "radii", name).read()
        from omegaconf import OmegaConf

        assert differences(record["config"], OmegaConf.to_container(alone, resolve=True)) == []


def test_a_failed_job_stops_no_other_and_is_all_that_runs_again(command, jobs, tmp_path, capsys):
    jobs.ends[NAMES[1]] = jobs.failing("no reward\nsecond line")
    assert command(*THREE) == 2 and jobs.started == NAMES
    said = capsys.readouterr()
    assert f"1 of 3 jobs did not finish: {NAMES[1]} failed" in said.err and "no reward" in said.out
    *_, ill = table(tmp_path / "radii")
    assert (ill["method.delta"], ill["status"], ill["error"]) == ("0.05", "failed", "no reward")

    jobs.started.clear(), jobs.ends.clear()
    assert command(*THREE) == 0 and jobs.started == [NAMES[1]]
    assert (tmp_path / "radii" / "earlier" / f"{NAMES[1]}.1" / "metrics.jsonl").exists()
    jobs.started.clear()
    assert command(*THREE) == 0 and jobs.started == []
    assert len(table(tmp_path / "radii")) == 3


def test_an_error_that_is_no_users_is_a_failed_job_too(command, jobs, tmp_path):
    jobs.ends[NAMES[0]] = lambda: [][1]
    assert command(*THREE) == 2 and jobs.started == NAMES
    assert table(tmp_path / "radii")[-1]["error"] == "IndexError: list index out of range"


def test_an_interrupt_ends_the_sweep_and_the_same_command_goes_on(command, jobs, tmp_path, capsys):
    jobs.ends[NAMES[1]] = lambda: sys.exit(130)
    assert command(*THREE) == 130 and jobs.started == NAMES[:2]
    assert f"python -m recipes.train {' '.join(THREE)} runs={tmp_path}" in capsys.readouterr().out
    states = {record.name: record.read()["status"] for record in read_records(tmp_path / "radii")}
    assert states == dict(zip(NAMES, ("finished", "interrupted", "waiting"), strict=True))
    jobs.started.clear(), jobs.ends.clear()
    assert command(*THREE) == 0 and jobs.started == NAMES[1:]


def test_with_resume_a_job_goes_on_in_its_folder(command, jobs, tmp_path):
    jobs.ends[NAMES[1]] = jobs.failing("killed")
    command(*THREE)
    jobs.ends.clear(), jobs.started.clear()
    (tmp_path / "radii" / NAMES[1] / "checkpoint").touch()
    assert command(*THREE, "trainer.resume_mode=auto") == 0 and jobs.started == [NAMES[1]]
    assert (tmp_path / "radii" / NAMES[1] / "checkpoint").exists() and not (tmp_path / "radii" / "earlier").exists()


def test_a_finished_job_of_another_configuration_is_not_written_over(command, jobs, tmp_path, capsys):
    command(*THREE)
    jobs.started.clear()
    assert command(*THREE, "seed=1") == 2 and jobs.started == []
    assert "holds a finished run of another configuration (" in (said := capsys.readouterr().err) and "seed = 0 there, 1 here" in said


def test_all_jobs_are_checked_before_the_first_starts(command, jobs, tmp_path, capsys):
    assert command("-m", "method.delta=0.03,oops", "data.train_batch_size=30,32") == 2 and jobs.started == []
    said = capsys.readouterr().err
    assert "method.delta = 'oops'" in said and "data.train_batch_size = 30" in said
    assert "(job data.train_batch_size=30+method.delta=0.03)" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "method.delta=0.03"], "no key has several values"),
        (["-m", "method=band_kl,band_lk"], "no such method. Did you mean 'band_kl'"),
        (["-m", "method.detla=1,2"], "detla"),
        (["-m", "name=a,b"], "name: is the whole sweep's"),
        (["-m", "name=a/b", "seed=1,2"], "name = 'a/b': names a folder"),
        (["-m", "data.train_files=/a,_a"], "two jobs would be named data.train_files=_a"),
        (["sweep=delta", "cluster=2x8", "hydra/launcher=submitit_slurm"], "a Slurm job of a sweep has one node"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said(command, jobs, capsys, arguments, message):
    assert command(*arguments) == 2 and jobs.started == []
    assert message in (said := capsys.readouterr().err) and "Traceback" not in said


def test_a_dry_run_starts_nothing(command, jobs, tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(sweep, "ask_verl", lambda config: asked.append(config.method.delta))
    assert command("--dry-run", *THREE) == 0 and jobs.started == [] and asked == [0.03, 0.05, 0.1]
    assert all(f"{name}: to run" in capsys.readouterr().out or True for name in NAMES) and not list(tmp_path.iterdir())


def test_a_job_that_another_process_runs_is_left_alone(command, jobs, tmp_path, capsys):
    command(*THREE)
    record = JobRecord(tmp_path / "radii", NAMES[0])
    with record.lock():
        record.write(status="running")
        assert record.read()["status"] == "running"
        with pytest.raises(UserError, match="written by another process"), record.lock():
            pass
        jobs.started.clear()
        assert command(*THREE) == 2 and jobs.started == []
        assert "is being written by another process" in capsys.readouterr().err
    assert record.read()["status"] == "killed"
    assert command(*THREE) == 0 and jobs.started == [NAMES[0]]


@pytest.mark.parametrize(
    ("name", "count", "varied"),
    [
        ("delta", 3, {"method.delta"}),
        ("beta", 4, {"method.beta_low"}),
        ("delta_beta", 9, {"method.delta", "method.beta_low"}),
        ("delta_kl", 9, {"method.delta", "actor_rollout_ref.actor.kl_loss_coef"}),
        ("divergences", 7, {"method"}),
    ],
)
def test_the_sweeps_of_configs(command, monkeypatch, tmp_path, name, count, varied):
    configs = []
    monkeypatch.setattr(sweep, "launch", lambda config, _command: configs.append(config))
    assert command(f"sweep={name}") == 0 and len(configs) == count
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"{name}-") and all({*record.read()["varied"]} == varied for record in read_records(folder))
    for config in configs:
        assert config.method.get("beta_high") == config.method.get("beta_low")
        assert config.actor_rollout_ref.actor.use_kl_loss == (name == "delta_kl")
    assert len({json.dumps(dict(config.method) | {"kl": config.actor_rollout_ref.actor.kl_loss_coef}, default=str) for config in configs}) == count


def test_all_sweeps_are_here():
    assert train.choices_of("sweep") == ["beta", "delta", "delta_beta", "delta_kl", "divergences"]


def test_slurm_gets_what_the_cluster_needs():
    config = train.compose(["cluster=1x8"])
    with train.hydra.initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
        whole = train.hydra.compose("train", ["cluster=1x8", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"], return_hydra_config=True)
    launcher = whole.hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher") and launcher.partition == "gpu"
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (1, 1, config.trainer.n_gpus_per_node)


def test_the_table_is_made_from_the_folders_alone(tmp_path, monkeypatch, capsys):
    for nth, (status, reward) in enumerate([("finished", 0.2), ("finished", 0.9), ("interrupted", 0.95), ("waiting", None)]):
        record = JobRecord(tmp_path, f"seed={nth}")
        record.write(status=status, varied={"seed": nth} if reward else {})
        if reward:
            record.folder.mkdir()
            (record.folder / "metrics.1.jsonl").write_text(row(1, 0.0) + row(2, 0.0))
            validation = {"val-core/arithmetic/reward/mean@1": reward / 2}
            (record.folder / "metrics.jsonl").write_text("".join(row(step, reward, **validation) for step in range(2, 8)) + '{"st')
    rows = results(tmp_path)
    assert [(row.get("seed"), row["status"], row["steps"]) for row in rows] == [(1, "finished", 7), (0, "finished", 7), (2, "interrupted", 7), (None, "waiting", 0)]
    assert rows[0]["reward"] == pytest.approx(0.9) and rows[0]["val-core/arithmetic/reward/mean@1"] == 0.45 and rows[3]["reward"] is None
    monkeypatch.setattr(sys, "argv", ["sweep_table", str(tmp_path)])
    sweep_table.main()
    said = capsys.readouterr().out
    assert "2 of 4 jobs finished" in said and "0.450" in said
    assert [row["folder"] for row in table(tmp_path)] == ["seed=1", "seed=0", "seed=2", "seed=3"]
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["sweep_table", str(tmp_path / "seed=1")])
        sweep_table.main()


def test_configurations_differ_in_what_changes_results():
    before = {"a": {"b": 1, "c": {}}, "trainer": {"logger": ["file"], "resume_mode": "disable"}}
    now = {"a": {"b": 2, "c": {}}, "trainer": {"logger": ["file", "wandb"], "resume_mode": "auto"}, "d": None}
    assert differences(before, now) == ["a.b = 1 there, 2 here"]
    assert differences(before, before | {"a": {"b": 1, "c": {"x": 1}}}) == ["a.c.x = None there, 1 here"]


SUBMITIT = os.environ.get("SUBMITIT_LIBRARY")  # for its test alone: a folder that `pip install --target` has filled
