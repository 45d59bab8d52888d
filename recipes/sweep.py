"""Several runs from one command, by Hydra's own sweeper:

    python -m recipes.train sweep=delta                               # one of configs/sweep
    python -m recipes.train -m method.delta=0.03,0.05 seed=0,1        # or any keys

This adds to Hydra that all jobs are checked before the first starts, that each has a folder of its own, named after the
keys that differ, that a failed one does not stop the others, that finished ones are not run again, and the table at the end.
"""

import json
import re
import shlex
import shutil
import signal
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.console import Console

from recipes.checks import check
from recipes.errors import UserError
from recipes.launcher import launch, say
from recipes.preflight import verl_problems
from recipes.resume import newest_sealed
from recipes.run_files import FINISHED as RUN_FINISHED
from recipes.sweep_records import FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING, JobRecord, changes
from recipes.sweep_table import write_table

LOCAL_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SweepCallback(Callback):
    """What Hydra calls before the first job and after the last. It turns exceptions in here into warnings: hence sys.exit."""

    def on_multirun_start(self, config: DictConfig, **_kwargs):
        with _or_exit():
            self.records = begin(config)

    def on_multirun_end(self, **_kwargs):
        with _or_exit():
            end(self.records)


@contextmanager
def _or_exit():
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def is_job() -> bool:
    """Whether Hydra runs the task function as one of several jobs."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


# ---- before the first job --------------------------------------------------------------------------------------------
def begin(config: DictConfig) -> list[JobRecord]:
    """Gives the sweep its folder (in `config`, Hydra's for the whole sweep), checks every job, says what
    will be done, and returns the jobs' records.

    Raises UserError that lists what is wrong with which job. Exits where there is nothing to run.
    """
    loader, console = GlobalHydra.instance().config_loader(), Console(highlight=False)
    jobs, varied, same = jobs_of(config, loader)
    sweep = _sweep_folder(config, varied, same)
    _tell_jobs(config, sweep, same)

    local = config.hydra.launcher._target_ == LOCAL_LAUNCHER
    todo, problems = {}, {}
    for overrides in jobs:
        try:
            job = _compose(loader, config, overrides)
            record = record_of(job)
            if record.name in todo:
                raise UserError(f"two jobs would be named {record.name}, and have one folder")
            todo[record.name] = _check(job, record, elsewhere=not local)
        except (UserError, HydraException) as error:
            problem = str(error) or str(error.__cause__)  # Hydra's own may say nothing but what it is from
            problems.setdefault(problem, []).append(_name_of(overrides, same))
    if problems:
        raise UserError("\n       ".join(f"{problem}\n       (job {', '.join(names)})" for problem, names in problems.items()))

    say(console, f"{len(todo)} jobs in {sweep}/", style="bold")
    for name, (_, what) in todo.items():
        say(console, f"  {name}: {what}")
    if config.dry_run:
        say(console, "passed all checks of their configurations; nothing was started")
        sys.exit(0)
    records = [record for record, _ in todo.values()]
    if all(what == FINISHED for _, what in todo.values()):
        end(records)
        sys.exit(0)
    if not local:
        say(console, f"Waiting for the jobs; Ctrl-C leaves them running. Meanwhile: python -m recipes.sweep_table {sweep}")
    try:
        for record, what in todo.values():
            if what != FINISHED:
                record.write(status=WAITING, error="", command=["python", "-m", "recipes.train", *sys.argv[1:]])
    except OSError as error:
        raise UserError(f"runs = {config.runs!r}: cannot write to {sweep} ({error.strerror}). Choose a writable runs=...") from error
    return records


def jobs_of(config: DictConfig, loader: ConfigLoader) -> tuple[list[list[str]], list[str], list[str]]:
    """The overrides of each job, as Hydra's sweeper will make them; the keys that differ between jobs; those that do not."""
    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        raise UserError(f"hydra.sweeper._target_ = {sweeper._target_}: only Hydra's own sweeper, hydra/sweeper=basic, is supported")
    params = [f"{key}={values}" for key, values in (sweeper.params or {}).items()]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides([*params, *config.hydra.overrides.task])
    for override in overrides:
        if override.is_sweep_override() and (problem := _unlisted(override)):
            raise UserError(f"{override.input_line}: {problem}. List the values: {override.key_or_group}=a,b")
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    last = {override.get_key_element(): override for override in overrides}  # as the sweeper has it: the last one wins
    varied = [override.key_or_group for override in last.values() if override.is_sweep_override()]
    same = [override.key_or_group for override in last.values() if not override.is_sweep_override()]
    if not varied:
        raise UserError("no key has several values. Give some (method.delta=0.03,0.05), or leave -m out.")
    return jobs, varied, same


def _unlisted(override: Override) -> str | None:
    """Why the values of an override cannot be listed."""
    try:
        return None if [*override.sweep_string_iterator()] else "has no values"
    except (HydraException, ValueError) as error:
        return str(error)


def _sweep_folder(config: DictConfig, varied: list[str], same: list[str]) -> Path:
    if "run_dir" in (*varied, *same):
        raise UserError("run_dir: each job of a sweep has a folder of its own. Use runs= and name= for the sweep's.")
    if not isinstance(config.get("runs"), str) or not config.runs:
        raise UserError(f"runs = {config.get('runs')!r}: must be text (quote what looks like a number: runs='\"...\"')")
    name = _sweep_name(config, varied, same)
    if "${" in (folder := Path(config.runs) / name).as_posix():
        raise UserError(f"runs = {config.runs!r}, name = {name!r}: a job would read ${{ as the start of a reference. Choose others without it.")
    return folder


def _sweep_name(config: DictConfig, varied: list[str], same: list[str]) -> str:
    """As given by name=, else the same for the same command: a sweep that is started again goes on."""
    if taken := {"name", "runs"} & {*varied}:
        raise UserError(f"{', '.join(sorted(taken))}: is the whole sweep's, in which each job has a folder of its own. Give one value.")
    if "name" in same:
        name = config.get("name")
    else:
        choices = config.hydra.runtime.choices
        groups = () if "experiment" in varied else ("experiment",) if choices["experiment"] else ("method", "model")
        of_all = [choices[group] for group in groups if group not in varied]
        name = _as_file_name("-".join([choices["sweep"] or "+".join(varied), *of_all]))
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise UserError(f"name = {name!r}: names a folder in runs={config.runs}, so no path")
    return name


def _tell_jobs(config: DictConfig, sweep: Path, same: list[str]):
    """Hydra composes each job anew, from its overrides and these: the sweep's folder, and what is not in a job's name."""
    keys = ",".join(map(_quoted, same))
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.sweep.dir = str(sweep)
        config.hydra.overrides.hydra += [
            f"hydra.sweep.dir={_quoted(str(sweep))}",
            f"hydra.job.config.override_dirname.exclude_keys=[{keys}]",
        ]


def _compose(loader: ConfigLoader, config: DictConfig, overrides: list[str]) -> DictConfig:
    """A job's configuration as its launcher will compose it; HydraConfig is the job's from here on."""
    job = loader.load_sweep_config(config, overrides)
    HydraConfig.instance().set_config(job)
    with read_write(job), open_dict(job):
        del job["hydra"]
    return job


def _check(job: DictConfig, record: JobRecord, elsewhere: bool) -> tuple[JobRecord, str]:
    """What will be done with a job; raises UserError where it cannot be."""
    before = record.read()
    dry_run = job.dry_run
    with open_dict(job):
        job.dry_run = dry_run or elsewhere  # this machine's devices say nothing of another's
    check(job)
    if elsewhere and job.trainer.nnodes > 1:
        raise UserError(f"trainer.nnodes = {job.trainer.nnodes}: a Slurm job of a sweep has one node. Choose a cluster of one (cluster=1x8).")
    if dry_run and (problems := verl_problems(job)):
        raise UserError("\n       ".join(problems))
    if before.get("status") == RUNNING:
        raise UserError(f"{record.folder} is being written by another process. Wait for it, or end it.")
    if before.get("status") == FINISHED:
        if differ := changes(before, _as_asked(job)):
            shown = "; ".join(differ[:3]) + ("; ..." if len(differ) > 3 else "")
            raise UserError(f"{record.folder} holds a finished run of another configuration ({shown}). Choose another name=...")
        if "varied" not in before and not dry_run:  # its record was lost
            record.write(config=_as_asked(job), varied=_varied())
        return record, FINISHED
    if not record.folder.exists():
        return record, "to run"
    return record, f"{before.get('status', 'there')}; " + ("goes on from its checkpoint" if _goes_on(job) else "starts again")


def _goes_on(config: DictConfig) -> bool:
    """Whether a job that has not finished resumes."""
    return config.trainer.resume_mode == "auto" and newest_sealed(config) is not None


# ---- a job -----------------------------------------------------------------------------------------------------------
def record_of(config: DictConfig) -> JobRecord:
    """Gives the job its folder (in `config`) and returns its record."""
    record = JobRecord(Path(HydraConfig.get().sweep.dir), _job_name())
    with open_dict(config):
        config.runs, config.name, config.run_dir = str(record.sweep), record.name, str(record.folder)
    return record


def run_job(config: DictConfig):
    """Trains as one job of a sweep; whether it finished or failed is in its record. An interrupt ends the whole sweep."""
    record, console = record_of(config), Console(highlight=False)
    say(console, f"\n== {record.name}", style="bold")
    handlers = {signum: signal.getsignal(signum) for signum in HANDLED}
    before = record.read()  # not as one that holds the lock: after a kill it says running
    with record.lock():
        try:
            check(config)
            asked = _as_asked(config)
            if before.get("status") == FINISHED and not changes(before, asked):
                return say(console, "finished before")
            record.write(status=RUNNING, error="", config=asked, varied=_varied())
            _put_aside(record, config)
            launch(config, _command(record))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            record.write(status=FAILED, error=str(error))
        except Exception as error:
            traceback.print_exc()
            record.write(status=FAILED, error=f"{type(error).__name__}: {error}")
        except (SystemExit, KeyboardInterrupt) as interrupt:
            record.write(status=INTERRUPTED)
            say(console, f"The sweep goes on, with all jobs that have not finished, by:\n  {shlex.join(record.read().get('command', []))}")
            sys.exit(interrupt.code if isinstance(interrupt, SystemExit) else 130)
        else:
            trained = (record.folder / RUN_FINISHED).exists()  # not with preflight=only
            record.write(status=FINISHED if trained else WAITING)
        finally:
            for signum, handler in handlers.items():  # the launcher's own are for one run
                signal.signal(signum, handler)


def _job_name() -> str:
    """"method.beta_low=0.03+method.delta=0.1": the overrides in which the jobs differ."""
    return _as_file_name(HydraConfig.get().job.override_dirname)


def _name_of(overrides: list[str], same: list[str]) -> str:
    """The same, of a job that may not compose."""
    return _as_file_name(get_overrides_dirname(OverridesParser.create().parse_overrides(overrides), same, item_sep="+", kv_sep="="))


def _quoted(text: str) -> str:
    """As a value in Hydra's grammar."""
    return QuotedString(text, Quote.double).with_quotes()


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]", "_", text)


def _varied() -> dict:
    """key -> value of the keys in which the jobs differ; a group's value is the choice."""
    same = set(HydraConfig.get().job.config.override_dirname.exclude_keys)
    return {override.key_or_group: override.value() for override in _overrides() if override.key_or_group not in same}


def _overrides() -> list[Override]:
    """Those of the job that HydraConfig is of."""
    return OverridesParser.create().parse_overrides([*HydraConfig.get().overrides.task])


def _as_asked(config: DictConfig) -> dict:
    """As it will be read from the record."""
    return json.loads(json.dumps(OmegaConf.to_container(config, resolve=True)))


def _put_aside(record: JobRecord, config: DictConfig):
    """Keeps what a run that did not finish has left, where the job is to start again: a run never writes over another."""
    if record.folder.exists() and not _goes_on(config):
        earlier = record.sweep / "earlier"
        earlier.mkdir(exist_ok=True)
        count = len(list(earlier.glob(f"{record.name}.*")))
        shutil.move(record.folder, earlier / f"{record.name}.{count + 1}")


def _command(record: JobRecord) -> list[str]:
    """What runs this job alone."""
    own = [override.input_line for override in _overrides() if override.key_or_group not in ("name", "runs")]
    return ["python", "-m", "recipes.train", *own, "hydra.mode=RUN", f"runs={_quoted(str(record.sweep))}", f"name={_quoted(record.name)}"]


# ---- after the last job ----------------------------------------------------------------------------------------------
def end(records: list[JobRecord]):
    """Writes and prints the table; raises UserError that names the jobs, of this command's, that did not finish."""
    write_table(records[0].sweep)
    states = {record.name: record.read().get("status") for record in records}
    if missing := [f"{name} {status}" for name, status in states.items() if status != FINISHED]:
        raise UserError(f"{len(missing)} of {len(records)} jobs did not finish: {', '.join(missing)}. The same command runs them again.")
