"""What the launcher does around a run: folders, the lock, the rows as they come, and how to go on."""

import json
import os
import signal
import sys

import pytest

from recipes import launcher
from recipes.errors import UserError
from recipes.launcher import NewRows, how_to_go_on, launch, lock_machine, make_run_dir
from recipes.processes import ProcessTree

ROW = json.dumps({"step": 1, "data": {"critic/rewards/mean": 0.5}})


def test_a_run_never_writes_over_another(configure, tmp_path):
    make_run_dir(configure("name=x", f"runs={tmp_path}"))
    with pytest.raises(UserError, match="never writes over another"):
        make_run_dir(configure("name=x", f"runs={tmp_path}"))


def test_a_run_that_resumes_goes_on_in_its_folder_and_keeps_the_metrics_there(configure, tmp_path):
    for nth in (1, 2, 3):
        folder = make_run_dir(configure("name=x", f"runs={tmp_path}", "trainer.resume_mode=auto"))
        assert not (folder / "metrics.jsonl").exists() and not (folder / "error.txt").exists()
        (folder / "metrics.jsonl").write_text(str(nth))
        (folder / "error.txt").write_text("of the run before")
    assert [(folder / f"metrics.{nth}.jsonl").read_text() for nth in (1, 2)] == ["1", "2"]


def test_a_second_local_cluster_is_refused(configure, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.launcher.LOCK", tmp_path / "lock")
    config = configure("name=x")
    with lock_machine(config), pytest.raises(UserError, match="another run has a local Ray cluster"):
        lock_machine(config)
    with lock_machine(config):
        lock_machine(configure("name=x", "ray_kwargs.ray_init.address=auto")).close()


def test_rows_are_read_as_they_come_and_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = NewRows(path)
    assert rows() == []
    line = json.dumps({"step": 1, "data": {}})
    path.write_text(line + "\n" + line[:5])
    assert rows() == [{"step": 1, "data": {}}] and rows() == []
    with path.open("a") as file:
        file.write(line[5:] + "\n")
    assert len(rows()) == 1


def test_how_to_go_on_names_the_newest_checkpoint(configure, tmp_path):
    typed = ["python", "-m", "recipes.train", "method=grpo", "name=x", "trainer.logger=[console,file]"]
    config = configure("name=x", f"runs={tmp_path}")
    again = "To start again:\n  python -m recipes.train method=grpo 'trainer.logger=[console,file]'"
    assert again in how_to_go_on(config, typed, 3)
    for step in (2, 10, 12):  # verl names a checkpoint in the file when it is whole: 12 is not
        (tmp_path / "x" / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (tmp_path / "x" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    text = how_to_go_on(config, typed, 12)
    assert "checkpoint of step 10" in text and "/global_step_10" in text and "name=x" not in text


def test_a_run_that_resumes_by_itself_is_started_again_as_it_was(configure, tmp_path):
    typed = ["python", "-m", "recipes.train", "name=x", "trainer.resume_mode=auto"]
    text = how_to_go_on(configure("name=x", f"runs={tmp_path}", "trainer.resume_mode=auto"), typed, 3)
    assert text.endswith("\n  python -m recipes.train name=x trainer.resume_mode=auto")


@pytest.fixture
def launch_driver(configure, tmp_path, monkeypatch):
    """launch_driver(code, at_end) launches with a driver that runs `code`; `at_end` is called when it is about to be ended."""

    def launch_driver(code: str, at_end=lambda: None):
        class Tree(ProcessTree):
            def __init__(self, _command, env, log):
                super().__init__([sys.executable, "-c", f"import os, signal, time\n{code}"], env, log)

            def end(self):
                at_end()
                return super().end(grace_seconds=1.0)

        monkeypatch.setattr(launcher, "ProcessTree", Tree)
        launch(configure("name=x", f"runs={tmp_path}", "trainer.total_training_steps=2"), ["python", "-m", "recipes.train"])

    monkeypatch.setattr(launcher, "LOCK", tmp_path / "lock")
    for name in ("prepare", "preflight", "write_report"):
        monkeypatch.setattr(launcher, name, lambda *_args: None)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield launch_driver
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


TRAINS = f"print({ROW!r}, file=open(os.environ['VERL_FILE_LOGGER_PATH'], 'w'))\n"


def test_a_signal_after_the_last_step_interrupts_nothing(launch_driver, capsys):
    launch_driver(TRAINS, at_end=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert "To start again" not in capsys.readouterr().out


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
    ],
)
def test_how_a_run_failed_is_said(launch_driver, code, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        launch_driver(code)
