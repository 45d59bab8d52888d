"""From a checked configuration to a finished run folder: prepare, start the driver, watch it, clean up, report."""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.text import Text

from recipes.errors import UserError
from recipes.preflight import preflight
from recipes.processes import ProcessTree, private_temporary_files
from recipes.progress import StepLines
from recipes.report import write_report
from recipes.wandb_mode import wandb_mode
from trustregion.verl_plugin.advice import advice

POLL_SECONDS = 0.5
LOCK = Path("/tmp/trustregion-local-cluster.lock")  # beside the sockets that it is about, for all users


def launch(config: DictConfig, command: list[str]):
    """Trains as `config` says. `command` is what the user typed, for the report and for starting again.

    Raises UserError when something is missing or the run fails; exits with 130 (128 + signal) when interrupted.
    """
    console = Console(highlight=False)
    prepare(config, console)
    preflight(config, console)
    if config.preflight == "only":
        say(console, "preflight passed: nothing was found that would keep this run from succeeding")
        return
    with lock_machine(config):
        run_dir = make_run_dir(config)
        environment = set_environment(config, run_dir)
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
        say(console, shlex.join(command), style="bold")
        say(console, f"files: {run_dir}\nlog:   {run_dir / 'log.txt'}")
        for sentence in advice(config):
            say(console, f"note:  {sentence}", style="yellow")
        end = run_driver(run_dir, environment, console, config.trainer.total_training_steps)

    if end.steps:
        write_report(run_dir, console, command)
    if end.signum is not None:
        say(console, how_to_go_on(config, command, end.steps))
        sys.exit(128 + end.signum)
    if end.code != 0:
        raise UserError(f"{failure(run_dir, end.code)}\n{how_to_go_on(config, command, end.steps)}")
    if not end.steps:
        raise UserError(
            f"the run ended without a training step: trainer.total_training_steps = {config.trainer.total_training_steps} and "
            f"trainer.total_epochs = {config.trainer.total_epochs} leave none to do (log: {run_dir / 'log.txt'})"
        )


@dataclass
class Ending:
    code: int  # the driver's exit code
    signum: int | None  # the signal that interrupted it, if one did
    steps: int  # that were finished and shown


def run_driver(run_dir: Path, environment: dict[str, str], console: Console, total_steps: int | None) -> Ending:
    """Runs the driver, shows its steps, and ends with it all that it started."""
    signals = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: signals.append(number))
    rows = NewRows(run_dir / "metrics.jsonl")
    with private_temporary_files(environment) as environment:
        tree = ProcessTree([sys.executable, "-m", "recipes.driver", str(run_dir)], environment, run_dir / "log.txt")
        try:
            with StepLines(console, total_steps) as lines:
                while tree.poll() is None and not signals:
                    lines.show(rows())
                    time.sleep(POLL_SECONDS)
                lines.show(rows())
        finally:
            finished = tree.poll() == 0  # a signal that comes from here on interrupts nothing
            code = tree.end()
    return Ending(code, signals[0] if signals and not finished else None, lines.shown)


def say(console: Console, text: str, style: str = ""):
    """Prints `text` as it is: brackets are no markup, and commands stay on one line, to be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


def prepare(config: DictConfig, console: Console):
    """Makes what the model and data groups say has to be made; quick when it is there already."""
    for group in ("model", "data"):
        recipe = config[group].get("prepare")
        if recipe is not None:
            with console.status(f"preparing {group} ..."):
                try:
                    instantiate(recipe)
                except InstantiationException as error:
                    if isinstance(error.__cause__, UserError):
                        raise error.__cause__ from None
                    raise
    with open_dict(config):
        config.data.pop("prepare", None)  # verl owns this node and knows nothing of it


def lock_machine(config: DictConfig) -> IO:
    """Refuses a second local Ray cluster beside the first; the lock lasts until the returned file is closed.

    verl names its weight-transfer sockets in /tmp by the Ray job's number, and in every local cluster that is 1: of two
    such runs one could load the other's weights.
    """
    with contextlib.suppress(PermissionError):  # another user's, which can be locked all the same
        LOCK.touch(mode=0o666)
        LOCK.chmod(0o666)
    file = open(LOCK)
    if config.ray_kwargs.ray_init.get("address") in (None, "local"):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another run has a local Ray cluster on this machine, and their weight transfers would mix. Wait until it is done."
            ) from None
    return file


def make_run_dir(config: DictConfig) -> Path:
    run_dir = Path(config.run_dir).resolve()
    resumes = config.trainer.resume_mode == "auto"
    try:
        run_dir.mkdir(parents=True, exist_ok=resumes)
    except FileExistsError:
        raise UserError(
            f"name = {config.name!r}: {run_dir} exists and a run never writes over another. "
            "Choose another name=..., or leave it out for one with the time in it."
        ) from None
    except OSError as error:
        raise UserError(f"runs = {config.runs!r}: cannot make {run_dir} ({error.strerror}). Choose a writable runs=...") from error
    if resumes:
        _put_aside(run_dir)
    with open_dict(config):
        config.run_dir = str(run_dir)
    return run_dir


def _put_aside(run_dir: Path):
    """Keeps the metrics of the run that is gone on with, whose file verl's logger would empty, and forgets its error."""
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        metrics.rename(run_dir / f"metrics.{len(list(run_dir.glob('metrics.*.jsonl'))) + 1}.jsonl")
    (run_dir / "error.txt").unlink(missing_ok=True)


def set_environment(config: DictConfig, run_dir: Path) -> dict[str, str]:
    """Gives what the cluster needs of the environment to Ray's workers (in `config`) and to the driver (returned)."""
    needed = {key: str(value) for key, value in config.cluster.env.items()}
    needed["VERL_FILE_LOGGER_PATH"] = str(run_dir / "metrics.jsonl")
    needed["WANDB_DIR"] = str(run_dir)
    if "wandb" in config.trainer.logger:
        needed["WANDB_MODE"] = wandb_mode()
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.env_vars = needed
    return {**os.environ, **needed}


class NewRows:
    """Call it for the rows that verl's file logger has added since the last call."""

    def __init__(self, path: Path):
        self._path, self._offset = path, 0

    def __call__(self) -> list[dict]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            written = file.read()
        whole = written[: written.rfind(b"\n") + 1]  # a half-written line waits for the next call
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def failure(run_dir: Path, code: int) -> str:
    reason = run_dir / "error.txt"
    if reason.exists():
        return f"the run failed: {reason.read_text(encoding='utf-8').strip()}\nlog: {run_dir / 'log.txt'}"
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    tail = (run_dir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\n".join([f"the driver {how}. The end of {run_dir / 'log.txt'}:", *(f"  {line}" for line in tail)])


def how_to_go_on(config: DictConfig, command: list[str], steps: int) -> str:
    """What is kept and the command that goes on from the last whole checkpoint, or starts again where there is none."""
    kept = f"The {steps} finished steps are in {config.run_dir}/metrics.jsonl. " if steps else ""
    if config.trainer.resume_mode == "auto":
        return f"{kept}To go on from the newest checkpoint, if there is one:\n  {shlex.join(command)}"
    again = [part for part in command if not part.startswith("name=")]
    folder = Path(config.trainer.default_local_dir).absolute()
    try:  # verl writes it when a checkpoint is complete
        newest = int((folder / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return f"{kept}To start again:\n  {shlex.join(again)}"
    again = [part for part in again if not part.startswith("trainer.resume_")]
    again += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder / f'global_step_{newest}'}"]
    return f"{kept}To go on from the checkpoint of step {newest}:\n  {shlex.join(again)}"
