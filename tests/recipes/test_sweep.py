"""Sweeps with a job that takes no time: folders, checks before the start, failures, interrupts, going on."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import OmegaConf

from recipes import sweep, train
from recipes.checks import check
from recipes.config_changes import differences
from recipes.errors import UserError
from recipes.launcher import set_environment
from recipes.run_files import FINISHED as RUN_FINISHED
from recipes.sweep_records import JobRecord, read_records
from recipes.sweep_table import results
from tests.recipes.sweep_files import row, table
from trustregion.verl_plugin.checkpoints import MANIFEST

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TWO = ["-m", "method.delta=0.03,0.10", "name=radii"]
NAMES = ["method.delta=0.03", "method.delta=0.1"]


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
        (folder / RUN_FINISHED).write_text("{}")

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
    """command("-m", ...) -> exit code of `python -m recipes.train -m ... runs=tmp_path`, or of other `runs`.

    What Hydra composes of the same overrides several times, half a second each, is composed once in a test.
    """
    once, compose = {}, ConfigLoaderImpl.load_configuration

    def compose_once(self, config_name, overrides, run_mode, **options):
        key = (*overrides, run_mode)
        if key not in once:
            once[key] = compose(self, config_name, overrides, run_mode, **options)
        return copy.deepcopy(once[key])

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", compose_once)

    def command(*arguments: str, runs: str = str(tmp_path)) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments, f"runs={runs}"])
        try:
            train.main()
        except SystemExit as end:
            return end.code or 0
        return 0

    return command


def test_each_job_has_a_folder_named_after_what_differs_and_a_row(command, jobs, tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    assert command(*TWO) == 0
    assert jobs.started == NAMES and signal.getsignal(signal.SIGINT) is before
    rows = table(tmp_path / "radii")
    assert [(row["method.delta"], row["status"], row["steps"]) for row in rows] == [(d, "finished", "2") for d in ("0.1", "0.03")]
    assert [float(row["reward"]) for row in rows] == pytest.approx([0.15, 0.045])
    assert float(rows[0]["seconds_per_step"]) == 8 and float(rows[0]["clip_fraction"]) == 0.01 and rows[0]["folder"] == NAMES[1]
    said = capsys.readouterr().out
    assert said.index("2 of 2 jobs finished") < said.index("1.000%")


def test_a_job_can_be_run_alone_by_the_command_in_its_summary(command, jobs, tmp_path):
    command("sweep=delta", "method.delta=0.03,0.1", "name=radii")
    name, typed = NAMES[1], jobs.commands[1]
    assert "hydra.mode=RUN" in typed
    alone = train.compose([part for part in typed[3:] if part != "hydra.mode=RUN"])
    assert alone.method.delta == 0.1 and alone.run_dir == str(tmp_path / "radii" / name)
    assert differences(JobRecord(tmp_path / "radii", name).read()["config"], OmegaConf.to_container(alone, resolve=True)) == []


def test_a_failed_job_stops_no_other_and_is_all_that_runs_again(command, jobs, tmp_path, capsys):
    jobs.ends[NAMES[0]] = jobs.failing("no reward\nsecond line")
    assert command(*TWO) == 2 and jobs.started == NAMES
    said = capsys.readouterr()
    assert f"1 of 2 jobs did not finish: {NAMES[0]} failed" in said.err and "no reward" in said.out
    *_, ill = table(tmp_path / "radii")
    assert (ill["method.delta"], ill["status"], ill["error"]) == ("0.03", "failed", "no reward")

    jobs.started.clear(), jobs.ends.clear()
    assert command(*TWO) == 0 and jobs.started == [NAMES[0]]
    assert (tmp_path / "radii" / "earlier" / f"{NAMES[0]}.1" / "metrics.jsonl").exists()
    jobs.started.clear()
    assert command(*TWO) == 0 and jobs.started == []
    assert len(table(tmp_path / "radii")) == 2


def test_an_error_that_is_no_users_is_a_failed_job_too(command, jobs, tmp_path):
    jobs.ends[NAMES[0]] = lambda: [][1]
    assert command(*TWO) == 2 and jobs.started == NAMES
    assert table(tmp_path / "radii")[-1]["error"] == "IndexError: list index out of range"


def test_an_interrupt_ends_the_sweep_and_the_same_command_goes_on(command, jobs, tmp_path, capsys):
    jobs.ends[NAMES[0]] = lambda: sys.exit(130)
    assert command(*TWO) == 130 and jobs.started == NAMES[:1]
    assert f"python -m recipes.train {' '.join(TWO)} runs={tmp_path}" in capsys.readouterr().out
    assert [record.read()["status"] for record in read_records(tmp_path / "radii")] == ["interrupted", "waiting"]
    jobs.started.clear(), jobs.ends.clear()
    assert command(*TWO) == 0 and jobs.started == NAMES


@pytest.mark.parametrize("saved", [True, False])
def test_with_resume_a_job_goes_on_from_its_checkpoint_where_there_is_one(command, jobs, tmp_path, capsys, saved):
    jobs.ends[NAMES[0]] = jobs.failing("killed")
    command(*TWO)
    jobs.ends.clear(), jobs.started.clear(), capsys.readouterr()
    left = tmp_path / "radii" / NAMES[0] / "checkpoints"
    left.mkdir()
    if saved:
        (left / "global_step_2").mkdir()
        (left / "global_step_2" / MANIFEST).write_text("{}")
    assert command(*TWO, "trainer.resume_mode=auto") == 0 and jobs.started == [NAMES[0]]
    assert left.exists() == saved and (tmp_path / "radii" / "earlier").exists() != saved
    assert f"{NAMES[0]}: failed; {'goes on from its checkpoint' if saved else 'starts again'}" in capsys.readouterr().out


def test_jobs_of_another_command_in_the_same_folder_are_in_the_table_and_not_in_the_exit_code(command, jobs, tmp_path):
    jobs.ends[NAMES[0]] = jobs.failing("too small a radius")
    assert command(*TWO) == 2
    assert command("-m", "method.delta=0.05,0.10", "name=radii") == 0
    assert [row["status"] for row in table(tmp_path / "radii")] == ["finished", "finished", "failed"]


def test_a_finished_job_of_another_configuration_is_not_written_over(command, jobs, tmp_path, capsys):
    command(*TWO)
    jobs.started.clear()
    assert command(*TWO, "seed=1") == 2 and jobs.started == []
    assert "holds a finished run of another configuration (" in (said := capsys.readouterr().err) and "seed = 0 there, 1 here" in said


def test_all_jobs_are_checked_before_the_first_starts(command, jobs, tmp_path, capsys):
    assert command("-m", "method.delta=0.03,oops", "data.train_batch_size=30") == 2 and jobs.started == []
    said = capsys.readouterr().err
    assert "method.delta = 'oops'" in said and "data.train_batch_size = 30" in said
    assert "(job method.delta=0.03)" in said and "(job method.delta=oops)" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("methods", ["grpo,band_kl", "band_kl,grpo"])
def test_a_job_that_does_not_compose_is_named_by_its_own_overrides(command, jobs, capsys, methods):
    assert command("-m", f"method={methods}", "method.delta=0.1", "name=two") == 2 and jobs.started == []
    said = capsys.readouterr().err
    assert "method.delta" in said and "(job method=grpo)" in said and "Traceback" not in said


def test_a_name_that_is_forced_is_the_sweeps_too(command, jobs, tmp_path):
    assert command("-m", "method.delta=0.03,0.1", "++name=radii") == 0
    assert (tmp_path / "radii" / NAMES[0]).is_dir()
    assert "++name=radii" not in jobs.commands[0] and f'name="{NAMES[0]}"' in jobs.commands[0]


def test_the_folder_of_a_sweep_may_have_any_name(command, jobs, tmp_path):
    runs = tmp_path / r"""it's "a\b", c=d [e] {f}: (g) $h"""
    assert command(*TWO, runs=QuotedString(str(runs), Quote.single).with_quotes()) == 0
    assert {path.name for path in (runs / "radii").iterdir()} >= {*NAMES, "jobs"}
    alone = train.compose([part for part in jobs.commands[1][3:] if part != "hydra.mode=RUN"])
    assert alone.run_dir == str(runs / "radii" / NAMES[1])


def test_a_group_may_be_swept_by_a_pattern(command, jobs, tmp_path):
    assert command("-m", "method=glob([band_kl,band_tv,dapo])", "name=some") == 0
    assert jobs.started == ["method=band_kl", "method=band_tv"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("5", "runs = 5: must be text"),
        ("/dev/null/x", "runs = '/dev/null/x': cannot write to /dev/null/x/radii (Not a directory)"),
        (r"'\${x'", "would read ${ as the start of a reference"),
    ],
)
def test_a_folder_that_cannot_be_is_refused(command, jobs, capsys, runs, message):
    assert command(*TWO, runs=runs) == 2 and jobs.started == []
    assert message in (said := capsys.readouterr().err) and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "method.delta=0.03"], "no key has several values"),
        (["-m", "method=band_kl,band_lk"], "no such method. Did you mean 'band_kl'"),
        (["-m", "method.detla=1,2"], "detla"),
        (["-m", "name=a,b"], "name: is the whole sweep's"),
        *((["-m", f"name={name}", "seed=1,2"], f"name = '{name}': names a folder") for name in ("a/b", "..", ".")),
        (["-m", "name=''", "seed=1,2"], "name = '': names a folder"),
        *((["-m", given, "seed=1,2"], "run_dir: each job of a sweep has a folder of its own") for given in ("run_dir=a", "++run_dir=a", "run_dir=a,b")),
        (["-m", "method.delta=interval(0,1)"], "method.delta=interval(0,1): Can only enumerate"),
        (["-m", "method=interval(0,1)"], "method=interval(0,1): Can only enumerate"),
        (["-m", "method=range(0,2)"], "method=range(0,2): method must be one of band_alpha"),
        (["-m", "seed=range(0,2,0)"], "seed=range(0,2,0): range() arg 3 must not be zero. List the values: seed=a,b"),
        (["-m", "seed=range(2,0)"], "seed=range(2,0): has no values"),
        (["-m", "data.train_files=/a,_a"], "two jobs would be named data.train_files=_a"),
        (["sweep=delta", "cluster=2x8", "hydra/launcher=submitit_slurm"], "a Slurm job of a sweep has one node"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said(command, jobs, capsys, arguments, message):
    assert command(*arguments) == 2 and jobs.started == []
    assert message in (said := capsys.readouterr().err) and "Traceback" not in said


def test_a_dry_run_starts_nothing(command, jobs, tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(sweep, "verl_problems", lambda config: asked.append(config.method.delta) or [])
    assert command("--dry-run", *TWO) == 0 and jobs.started == [] and asked == [0.03, 0.1]
    said = capsys.readouterr().out
    assert all(f"{name}: to run" in said for name in NAMES) and not list(tmp_path.iterdir())


def test_a_job_that_another_process_runs_is_left_alone(command, jobs, tmp_path, capsys):
    command(*TWO)
    record = JobRecord(tmp_path / "radii", NAMES[0])
    with record.lock():
        record.write(status="running")
        assert record.read()["status"] == "running"
        with pytest.raises(UserError, match="written by another process"), record.lock():
            pass
        jobs.started.clear()
        assert command(*TWO) == 2 and jobs.started == []
        assert "is being written by another process" in capsys.readouterr().err
    assert record.read()["status"] == "killed"
    assert command(*TWO) == 0 and jobs.started == [NAMES[0]]


def leave_config(record: JobRecord):
    """As the launcher leaves config.yaml in a run's folder, of the job's own configuration."""
    config = OmegaConf.create(record.read()["config"])
    config.run_dir = str(Path(config.run_dir).resolve())
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", "checkpoints/global_step_1"
    config.data.pop("prepare", None)
    set_environment(config, record.folder, record.folder / "logged.jsonl")
    (record.folder / "config.yaml").write_text(OmegaConf.to_yaml(config))


def test_a_job_whose_record_is_damaged_runs_again_unless_its_folder_shows_that_it_has_finished(command, jobs, tmp_path, capsys):
    command(*TWO)
    records = [JobRecord(tmp_path / "radii", name) for name in NAMES]
    leave_config(records[0])
    for record in records:
        record.path.write_text("[]")
    jobs.started.clear()
    assert command(*TWO, "seed=1") == 2 and "seed = 0 there, 1 here" in capsys.readouterr().err
    assert command(*TWO) == 0 and jobs.started == NAMES[1:]
    assert [(row["method.delta"], row["status"]) for row in table(tmp_path / "radii")] == [("0.1", "finished"), ("0.03", "finished")]


def test_a_job_that_was_killed_when_it_had_finished_has(command, jobs, tmp_path):
    command(*TWO)
    for record in (records := read_records(tmp_path / "radii")):
        leave_config(record)
    records[0].path.write_text(records[0].path.read_text().replace('"finished"', '"running"'))
    records[1].path.unlink()
    jobs.started.clear()
    assert command(*TWO) == 0 and jobs.started == []


@pytest.mark.parametrize(
    ("name", "count", "varied"),
    [
        ("delta", 3, {"method.delta"}),
        ("beta", 4, {"method.beta_low"}),
        ("delta_beta", 9, {"method.delta", "method.beta_low"}),
        ("delta_kl", 9, {"method.delta", "actor_rollout_ref.actor.kl_loss_coef"}),
        ("divergences", 7, {"method"}),
        ("tiny_study", 27, {"method", "seed"}),
        ("smollm2_study", 2, {"method"}),
    ],
)
def test_the_sweeps_of_configs(name, count, varied):
    train.register_resolvers()
    with train.hydra.initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        whole = train.hydra.compose("train", [f"sweep={name}"], return_hydra_config=True)
        assert whole.hydra.mode == RunMode.MULTIRUN
        jobs, differ, _ = sweep.jobs_of(whole, loader)
        assert len(jobs) == count and {*differ} == varied
        for overrides in (jobs[0], jobs[-1]):
            config = sweep._compose(loader, whole, overrides)
            check(config)
            assert config.method.get("beta_high") == config.method.get("beta_low")
            if name.endswith("_study"):  # where recipes.results.jobs looks for them, after the last step alone
                assert config.trainer.validation_data_dir == f"{config.run_dir}/validation"
                assert config.trainer.test_freq == config.trainer.total_training_steps and config.actor_rollout_ref.rollout.val_kwargs.n > 1
            assert config.actor_rollout_ref.actor.use_kl_loss == (name == "delta_kl")


def test_all_sweeps_are_here():
    assert train.choices_of("sweep") == ["beta", "delta", "delta_beta", "delta_kl", "divergences", "smollm2_study", "tiny_study"]


def compose_whole(*overrides: str):
    """With Hydra's own node."""
    train.register_resolvers()
    with train.hydra.initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
        return train.hydra.compose("train", [*overrides], return_hydra_config=True)


def test_slurm_gets_what_the_cluster_needs():
    launcher = compose_whole("cluster=1x8", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu").hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher") and launcher.partition == "gpu"
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (1, 1, 8)


def test_submitit_runs_jobs_in_processes_of_their_own(tmp_path):
    """Each fails for a reason that only the job's own process finds: the model is looked for when a run starts."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'trustregion[sweep]'")
    done = subprocess.run(
        [
            sys.executable, "-m", "recipes.train", "-m", "seed=0,1", "model=folder", f"model.path={tmp_path / 'none'}",
            "data=arithmetic", "name=two", f"runs={tmp_path}", "hydra/launcher=submitit_local",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 2 and "2 of 2 jobs did not finish: seed=0 failed, seed=1 failed" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    rows = results(tmp_path / "two")
    assert [(row["seed"], row["status"]) for row in rows] == [(0, "failed"), (1, "failed")] and str(tmp_path / "none") in rows[0]["error"]


@pytest.mark.filterwarnings("ignore:(?s).*validated against ConfigStore schema")
def test_submitit_asks_slurm_for_a_whole_node(tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'trustregion[sweep]'")
    import submitit

    written = []
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(submitit.AutoExecutor, "map_array", lambda self, *_args: written.append(self._executor._make_submission_file_text("job", "0")) or [])
    whole = compose_whole("cluster=1x8", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", f"hydra.sweep.dir={tmp_path}")
    launcher = train.hydra.utils.instantiate(whole.hydra.launcher)
    assert type(launcher).__name__ == "SlurmLauncher"
    launcher.setup(hydra_context=None, task_function=None, config=whole)
    launcher.launch([["seed=1"]], 0)
    for flag in ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive", "--partition=gpu", "--time=1440"):
        assert f"#SBATCH {flag}\n" in written[0], written[0]
