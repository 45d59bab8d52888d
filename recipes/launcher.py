"""From a checked configuration to a finished run folder: prepare, start the driver, watch it, clean up, report."""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
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
from recipes.resume import choose_start, goes_on, newest_sealed
from recipes.run_files import FINISHED, read_metrics
from recipes.run_metrics import METRICS, RunMetrics
from recipes.wandb_mode import wandb_mode
from trustregion.verl_plugin.advice import advice
from trustregion.verl_plugin.checkpoints import step_of, write_whole

POLL_SECONDS = 0.5
LAST_LINES = 15
PID = re.compile(r"\bpid:? (\d+)")  # ours and Ray's way of naming a process
COLOUR = re.compile(r"\x1b\[[\d;]*m")  # Ray colours what it puts before a line
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
        say(console, shlex.join(command), style="bold")
        say(console, f"files: {run_dir}\nlog:   {run_dir / 'log.txt'}")
        if config.trainer.resume_mode == "auto" and not any(part.lstrip("+").startswith(("name=", "run_dir=")) for part in command):
            say(console, f"note:  only name={config.name} finds this run again: without name=..., each has the time in its name", style="yellow")
        for sentence in advice(config):
            say(console, f"note:  {sentence}", style="yellow")
        try:
            end = run_attempts(config, run_dir, console)
        except UserError:  # nothing to start from
            with contextlib.suppress(OSError):
                run_dir.rmdir()  # where nothing is in it: the corrected command may have the name
            raise
        except BrokenPipeError:  # of the terminal, not of a disk
            raise
        except OSError as error:
            steps = len(read_metrics(run_dir / METRICS).steps)
            raise UserError(
                f"cannot write to {run_dir} ({error.strerror}), so the run was ended. Make room there, if that is it.\n"
                f"{how_to_go_on(config, command, steps)}"
            ) from error

    metrics = read_metrics(run_dir / METRICS)
    if metrics.steps:
        write_report(run_dir, console, command)
    if end.signum is not None:
        say(console, how_to_go_on(config, command, len(metrics.steps)))
        sys.exit(128 + end.signum)
    if end.code != 0:
        raise UserError(f"{failure(run_dir, end.code)}\n{how_to_go_on(config, command, len(metrics.steps))}")
    if not metrics.steps:
        raise UserError(
            f"the run ended without a training step: trainer.total_training_steps = {config.trainer.total_training_steps} and "
            f"trainer.total_epochs = {config.trainer.total_epochs} leave none to do (log: {run_dir / 'log.txt'})"
        )
    finished = {"steps": metrics.steps[-1], "time": datetime.now().astimezone().isoformat(timespec="seconds")}
    write_whole(run_dir / FINISHED, json.dumps(finished) + "\n")


def run_attempts(config: DictConfig, run_dir: Path, console: Console) -> "Ending":
    """Trains; after a failure again from the last whole checkpoint, `config.max_restarts` times at most."""
    for restarts in itertools.count(1):
        metrics = RunMetrics(run_dir)
        with console.status("reading the checkpoints ..."):
            choose_start(config, metrics.steps, lambda text: say(console, text))
        for name in ("error.txt", FINISHED):
            (run_dir / name).unlink(missing_ok=True)
        environment = set_environment(config, run_dir, metrics.logged)
        write_whole(run_dir / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
        end = run_driver(run_dir, environment, console, config.trainer.total_training_steps, metrics)
        failed = end.code != 0 and end.signum is None
        # One that made no step would fail the same way again; one that left no checkpoint has nothing to go on from.
        if not (failed and end.steps and restarts <= config.max_restarts and newest_sealed(config)):
            return end
        say(console, f"{failure(run_dir, end.code)}\nrestart {restarts} of {config.max_restarts}", style="yellow")
        config.trainer.resume_mode = "auto"


@dataclass
class Ending:
    code: int  # the driver's exit code
    signum: int | None  # the signal that interrupted it, if one did
    steps: int  # that it finished


def run_driver(
    run_dir: Path, environment: dict[str, str], console: Console, total_steps: int | None, metrics: RunMetrics
) -> Ending:
    """Runs the driver, takes over and shows its steps, and ends with it all that it started."""
    signals = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: signals.append(number))
    with private_temporary_files(environment) as environment:
        tree = ProcessTree([sys.executable, "-m", "recipes.driver", str(run_dir)], environment, run_dir / "log.txt")
        with StepLines(console, total_steps) as lines:
            try:
                while tree.poll() is None and not signals:
                    lines.show(metrics.take_over())
                    time.sleep(POLL_SECONDS)
            finally:
                finished = tree.poll() == 0  # a signal that comes from here on interrupts nothing
                code = tree.end()
            lines.show(metrics.take_over())
    metrics.logged.unlink(missing_ok=True)
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
    by_name = Path(config.run_dir) == Path(config.runs) / config.name
    key, parent = ("name", "runs") if by_name else ("run_dir", "run_dir")
    try:
        run_dir.mkdir(parents=True, exist_ok=goes_on(config))
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except FileExistsError:
        raise UserError(
            f"{key} = {config[key]!r}: {run_dir} exists and a run never writes over another. Choose another {key}=..., or leave it "
            "out for one with the time in it; or go on with the run that is there by trainer.resume_mode=auto."
        ) from None
    except OSError as error:
        said = f"{parent} = {config[parent]!r}: cannot write to {run_dir} ({error.strerror})"
        raise UserError(f"{said}. Choose a writable {parent}=...") from error
    with open_dict(config):
        config.run_dir = str(run_dir)
    return run_dir


def set_environment(config: DictConfig, run_dir: Path, logged: Path) -> dict[str, str]:
    """Gives what the cluster needs of the environment to Ray's workers (in `config`) and to the driver (returned)."""
    needed = {key: str(value) for key, value in config.cluster.env.items()}
    needed["VERL_FILE_LOGGER_PATH"] = str(logged)
    needed["WANDB_DIR"] = str(run_dir)
    if "wandb" in config.trainer.logger:
        needed["WANDB_MODE"] = wandb_mode()
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.env_vars = needed
    return {**os.environ, **needed}


def failure(run_dir: Path, code: int) -> str:
    """What ended the run, and the last lines in the log of the process that died, where one is named by its pid."""
    log, reason = run_dir / "log.txt", run_dir / "error.txt"
    lines = COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace")).splitlines()
    if not reason.exists():
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        return "\n".join([f"the driver {how}. The end of {log}:", *(f"  {line}" for line in lines[-LAST_LINES:])])
    text = reason.read_text(encoding="utf-8").strip()
    said = [f"the run failed: {text}", f"log: {log}"]
    if pid := PID.search(text):
        tail = [line for line in lines if re.search(rf"\bpid={pid[1]}\b", line)][-LAST_LINES:]
        said += ["its last lines there:", *(f"  {line}" for line in tail)] if tail else ["it has said nothing there"]
    return "\n".join(said)


def how_to_go_on(config: DictConfig, command: list[str], steps: int) -> str:
    """What is kept and the command that goes on from the last whole checkpoint, or starts again where there is none."""
    kept = f"The {steps} finished steps are in {config.run_dir}/{METRICS}. " if steps else ""
    again = [part for part in command if not part.startswith("name=")]
    newest = newest_sealed(config)
    if newest is None:
        return f"{kept}To start again:\n  {shlex.join(again)}"
    again = [part for part in again if not part.startswith("trainer.resume_")]
    name = config.name if re.fullmatch(r"[\w.-]+", config.name) else f'"{config.name}"'  # as Hydra wants it
    again += [f"name={name}", "trainer.resume_mode=auto"]
    return f"{kept}To go on from the checkpoint of step {step_of(newest)}:\n  {shlex.join(again)}"
