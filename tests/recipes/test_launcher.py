"""What the launcher does around a run: folders, the lock, the rows as they come, and how to go on."""

import json
import os
import signal
import sys

import pytest

from recipes import launcher
from recipes.errors import UserError
from recipes.launcher import how_to_go_on, launch, lock_machine, make_run_dir
from recipes.processes import ProcessTree
from recipes.run_metrics import RunMetrics
from trustregion.verl_plugin import checkpoints
from trustregion.verl_plugin.checkpoints import seal

ROW = json.dumps({"step": 1, "data": {"critic/rewards/mean": 0.5}})


def test_a_run_never_writes_over_another(configure, tmp_path):
    make_run_dir(configure("name=x", f"runs={tmp_path}"))
    with pytest.raises(UserError, match="never writes over another"):
        make_run_dir(configure("name=x", f"runs={tmp_path}"))


def test_the_key_that_chose_the_folder_is_named(configure, tmp_path):
    config = configure(f"run_dir={tmp_path}")
    with pytest.raises(UserError, match="run_dir = .*Choose another run_dir="):
        make_run_dir(config)


def test_a_start_that_is_refused_leaves_the_name_free(configure, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.launcher.LOCK", tmp_path / "lock")
    monkeypatch.setattr("recipes.launcher.prepare", lambda *_: None)
    monkeypatch.setattr("recipes.launcher.preflight", lambda *_: None)
    nowhere = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_2"]
    with pytest.raises(UserError, match="no such checkpoint"):
        launch(configure("name=x", f"runs={tmp_path}", *nowhere), [])
    assert not (tmp_path / "x").exists()


def test_a_run_that_resumes_goes_on_in_its_folder(configure, tmp_path):
    folder = make_run_dir(configure("name=x", f"runs={tmp_path}"))
    assert make_run_dir(configure("name=x", f"runs={tmp_path}", "trainer.resume_mode=auto")) == folder
    inside = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_2"]
    assert make_run_dir(configure("name=x", f"runs={tmp_path}", *inside)) == folder


def test_a_folder_that_cannot_be_written_to_is_named(configure, tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("recipes.launcher.tempfile.TemporaryFile", refuse)
    with pytest.raises(UserError, match="cannot write to .*x .Read-only file system"):
        make_run_dir(configure("name=x", f"runs={tmp_path}"))


def test_a_second_local_cluster_is_refused(configure, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.launcher.LOCK", tmp_path / "lock")
    config = configure("name=x")
    with lock_machine(config), pytest.raises(UserError, match="another run has a local Ray cluster"):
        lock_machine(config)
    with lock_machine(config):
        lock_machine(configure("name=x", "ray_kwargs.ray_init.address=auto")).close()


def test_how_to_go_on_names_the_newest_checkpoint(configure, tmp_path):
    typed = ["python", "-m", "recipes.train", "method=grpo", "name=x", "trainer.logger=[console,file]"]
    config = configure("name=x", f"runs={tmp_path}")
    again = "To start again:\n  python -m recipes.train method=grpo 'trainer.logger=[console,file]'"
    assert again in how_to_go_on(config, typed, 3)
    for step in (2, 10, 12):  # the manifest says that a checkpoint is whole: 12 is not
        checkpoint = tmp_path / "x" / "checkpoints" / f"global_step_{step}"
        checkpoint.mkdir(parents=True)
        if step < 12:
            seal(checkpoint)
    text = how_to_go_on(config, [*typed, "trainer.resume_mode=resume_path", "trainer.resume_from_path=y"], 12)
    assert "checkpoint of step 10" in text
    assert text.endswith(" method=grpo 'trainer.logger=[console,file]' name=x trainer.resume_mode=auto")


@pytest.fixture
def launch_driver(configure, tmp_path, monkeypatch):
    """launch_driver(code, at_end) launches with a driver that runs `code`; `at_end` is called when it is to be ended."""

    def launch_driver(code: str, at_end=lambda: None, *overrides: str):
        class Tree(ProcessTree):
            def __init__(self, _command, env, log):
                super().__init__([sys.executable, "-c", f"import os, signal, time\n{code}"], env, log)

            def end(self):
                at_end()
                return super().end(grace_seconds=1.0)

        monkeypatch.setattr(launcher, "ProcessTree", Tree)
        config = configure("name=x", f"runs={tmp_path}", "trainer.total_training_steps=2", *overrides)
        config.run_dir = str(tmp_path / "x")
        config.trainer.default_local_dir = str(tmp_path / "x" / "checkpoints")
        launch(config, ["python", "-m", "recipes.train"])

    monkeypatch.setattr(launcher, "LOCK", tmp_path / "lock")
    for name in ("prepare", "preflight", "write_report"):
        monkeypatch.setattr(launcher, name, lambda *_args: None)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield launch_driver
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


TRAINS = f"print({ROW!r}, file=open(os.environ['VERL_FILE_LOGGER_PATH'], 'w'))\n"


DIES = """
open(os.environ['WANDB_DIR'] + '/error.txt', 'w').write('ProcessDied: FSDP worker 1 (pid 7) is dead')
raise SystemExit(1)
"""


def test_a_signal_after_the_last_step_interrupts_nothing(launch_driver, capsys, tmp_path):
    launch_driver(TRAINS, at_end=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert "To start again" not in capsys.readouterr().out
    assert json.loads((tmp_path / "x" / "finished.json").read_text())["steps"] == 1


def test_a_signal_before_it_interrupts(launch_driver, capsys):
    with pytest.raises(SystemExit) as raised:
        launch_driver(TRAINS + "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
    assert raised.value.code == 128 + signal.SIGTERM
    assert "The 1 finished steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (TRAINS + "print('last words'); raise SystemExit(3)", "the driver exited with 3.*last words"),
        (TRAINS + "os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9"),
        ("", "ended without a training step"),
        (
            f"{TRAINS}print('\\x1b[36m(Worker pid=7)\\x1b[0m last words\\n(Other pid=77) fine')\n{DIES}",
            r"ProcessDied: FSDP worker 1 \(pid 7\) is dead\nlog: [^\n]*\nits last[^\n]*\n  \(Worker pid=7\) last words\n[^ ]",
        ),
    ],
)
def test_how_a_run_failed_is_said(launch_driver, code, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        launch_driver(code)


# Trains from where it is told to, saves each step, and fails in the step that it is asked to.
SAVES = """
import runpy, yaml
from pathlib import Path

seal = runpy.run_path(CHECKPOINTS)["seal"]  # alone: the package imports torch, which takes seconds
config = yaml.safe_load((Path(os.environ["WANDB_DIR"]) / "config.yaml").read_text())["trainer"]
first = int(config["resume_from_path"].rpartition("_")[2]) + 1 if config["resume_mode"] == "resume_path" else 1
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(first, 7):
        if step in FAILS_IN and step > first:
            END
        print('{"step": %d, "data": {"critic/rewards/mean": 0.5}}' % step, file=file, flush=True)
        if SAVE:
            folder = Path(config["default_local_dir"]) / f"global_step_{step}"
            folder.mkdir(parents=True)
            (folder / "data.pt").write_bytes(b"data")
            seal(folder)
"""


def saves(fails_in, end="raise SystemExit(3)", save=True):
    return SAVES.replace("CHECKPOINTS", repr(checkpoints.__file__)).replace("FAILS_IN", repr(fails_in)).replace("END", end).replace("SAVE", str(save))


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_fails_goes_on_by_itself(launch_driver, capsys, tmp_path):
    launch_driver(saves([3, 5]), lambda: None, "max_restarts=2")
    said = capsys.readouterr().out
    assert "restart 1 of 2" in said and "goes on from the checkpoint of step 2" in said and "restart 2 of 2" in said
    assert steps_of(tmp_path / "x") == [1, 2, 3, 4, 5, 6] and (tmp_path / "x" / "finished.json").exists()


@pytest.mark.parametrize(
    ("code", "steps", "restarts"),
    [
        (saves([3, 4, 6]), 5, 2),  # once more than it may
        (saves([3], save=False), 2, 0),  # nothing to go on from
        (saves([3]).replace("with open", "if first > 1: raise SystemExit(3)\nwith open"), 2, 1),  # it makes no step
    ],
)
def test_when_it_does_not_go_on_by_itself(launch_driver, capsys, tmp_path, code, steps, restarts):
    with pytest.raises(UserError, match="exited with 3"):
        launch_driver(code, lambda: None, "max_restarts=2")
    assert steps_of(tmp_path / "x") == list(range(1, steps + 1))
    assert capsys.readouterr().out.count("\nrestart ") == restarts
    assert not (tmp_path / "x" / "finished.json").exists()


def test_an_interrupted_run_does_not_go_on_by_itself(launch_driver, capsys):
    interrupt = "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    with pytest.raises(SystemExit):
        launch_driver(saves([3], end=interrupt), lambda: None, "max_restarts=2")
    said = capsys.readouterr().out
    assert "restart" not in said and "To go on from the checkpoint of step 2" in said


@pytest.fixture
def small_disk(tmp_path):
    """small_disk("size=100k") -> the run's folder, on a file system of its own."""

    def mount(options):
        (tmp_path / "x").mkdir(exist_ok=True)
        if os.getuid() != 0 or os.system(f"mount -t tmpfs -o {options} tmpfs {tmp_path / 'x'}"):
            pytest.skip("may not mount")
        return tmp_path / "x"

    yield mount
    os.system(f"umount -l {tmp_path / 'x'} 2>/dev/null")


def test_a_full_disk_is_named_and_the_rows_before_it_stay(launch_driver, small_disk):
    folder = small_disk("size=300k")
    fills = """
with open(os.environ['VERL_FILE_LOGGER_PATH'], 'ab', buffering=0) as file:
    for step in range(1, 1000):
        file.write(b'{"step": %d, "data": {"critic/rewards/mean": 0.5}}' % step + b' ' * 10000 + b'\\n')
        time.sleep(0.05)
"""
    with pytest.raises(UserError, match=r"(?s)(No space left on device|exited with).*The \d+ finished steps are in"):
        launch_driver(fills, lambda: None, "trainer.resume_mode=auto")
    rows = steps_of(folder)
    assert 5 < len(rows) and rows == list(range(1, len(rows) + 1))
    os.system(f"mount -o remount,size=2m {folder}")
    assert RunMetrics(folder).steps[: len(rows)] == rows


def test_a_folder_that_may_only_be_read(launch_driver, small_disk):
    small_disk("ro")
    with pytest.raises(UserError, match="cannot write to .*x .Read-only file system"):
        launch_driver("", lambda: None, "trainer.resume_mode=auto")
