"""The runs of a paper's arms, with their evaluations, from the folder that they are in.

A run belongs to an arm by `chosen.experiment` in its config.yaml, and its evaluation is in the run's own folder:
RUNS/<run>/eval, as the commands that recipes.results.paper prints have it.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from recipes.errors import UserError
from recipes.evaluation.samples import Samples, read, read_folder
from recipes.launcher import FINISHED
from recipes.results.jobs import Job, read_run
from recipes.results.study import BUDGET
from recipes.run_files import read_config, value_at
from trustregion.presets import configs_folder

EVALUATION = "eval"


@dataclass(frozen=True)
class Run:
    """A finished run of an arm, and the complete samples of its evaluation by benchmark, {} where there is none."""

    folder: Path
    arm: str
    model: str
    seed: int
    config: dict
    samples: dict[str, Samples]


def arms_of(name: str) -> dict[str, str]:
    """The arms of a paper, each with the model that it trains by default."""
    return {file.stem: _model(f"{name}/{file.stem}") for file in sorted((configs_folder() / "experiment" / name).glob("[!_]*.yaml"))}


def _model(experiment: str) -> str | None:
    for entry in reversed(OmegaConf.to_container(OmegaConf.load(configs_folder() / "experiment" / f"{experiment}.yaml"))["defaults"]):
        if isinstance(entry, dict) and "override /model" in entry:
            return entry["override /model"]
        if isinstance(entry, str) and entry.startswith("/experiment/") and (found := _model(entry.removeprefix("/experiment/"))):
            return found
    return None


def find_runs(name: str, folder: Path) -> tuple[list[Run], list[str]]:
    """The finished runs of the paper's arms in `folder`, and what is said of the others.

    Raises UserError: an arm has two runs of one model and seed, or seeds with different budgets; or an evaluation is of
    another model than its folder's, or sampled otherwise than the others.
    """
    runs, left_out = [], []
    for place in sorted({file.parent for name in ("config.yaml", FINISHED) for file in folder.glob(f"*/{name}")}):
        file = place / "config.yaml"
        config = read_config(file)
        if not config:
            left_out.append(f"{place}: config.yaml, which says what was run, is missing or damaged; copy it again")
        paper, _, arm = str(value_at(config, "chosen.experiment")).partition("/")
        if paper != name or arm not in arms_of(name):
            continue
        if not (file.parent / FINISHED).is_file():
            left_out.append(f"{file.parent}: has not finished; the command that started it, with trainer.resume_mode=auto, goes on")
            continue
        seed = value_at(config, "seed") or 0
        if type(seed) is not int:
            raise UserError(f"{file}: seed = {seed!r}: must be a whole number. Correct it, or move the run elsewhere.")
        run = Run(file.parent, arm, str(value_at(config, "chosen.model")), seed, config, {})
        if half := _half_done(run):
            left_out.append(half)
        runs.append(run if half else replace(run, samples=_evaluation(run)))
    _check_seeds(runs)
    _check_samples(runs)
    return runs, left_out


def _half_done(run: Run) -> str:
    """What is said of an evaluation that lacks samples; empty where none does."""
    for file in sorted((run.folder / EVALUATION / "samples").glob("*.jsonl")):
        samples = read(file)
        wanted = samples.header["problems"] * samples.header["n"] if samples else 0
        if not samples or len(samples.rows) < wanted:
            return f"{file}: has {len(samples.rows) if samples else 0} of {wanted or 'all'} samples; the command that made it goes on"
    return ""


def _evaluation(run: Run) -> dict[str, Samples]:
    if not any((run.folder / EVALUATION / "samples").glob("*.jsonl")):
        return {}
    found = read_folder(run.folder / EVALUATION, "evaluation")
    for samples in found.values():
        if run.folder.name not in Path(samples.header["model"]).parts:
            raise UserError(
                f"{samples.file}: holds samples of model={samples.header['model']}, and is in the folder of the run "
                f"{run.folder.name}. Remove it, and evaluate that run."
            )
    return found


def _check_seeds(runs: list[Run]):
    known: dict[tuple, Run] = {}
    for run in runs:
        if (same := known.setdefault((run.arm, run.model, run.seed), run)) is not run:
            raise UserError(
                f"{same.folder} and {run.folder} are both {run.arm} of {run.model} with seed {run.seed}. Move one of them elsewhere."
            )
    for run in runs:
        first = next(other for other in runs if (other.arm, other.model) == (run.arm, run.model))
        for key in BUDGET.values():
            if (here := value_at(run.config, key)) != (there := value_at(first.config, key)):
                raise UserError(
                    f"{run.folder}: {key} = {here}, and {first.folder} has {there}: seeds of one arm must have one budget. "
                    "Move one of them elsewhere, or run it again."
                )


def _check_samples(runs: list[Run]):
    weights: dict[str, Run] = {}
    first: dict[str, Samples] = {}
    for run in runs:
        for benchmark, samples in run.samples.items():
            if (same := weights.setdefault(samples.header["model_sha256"], run)) is not run:
                raise UserError(
                    f"{same.folder}/{EVALUATION} and {run.folder}/{EVALUATION} are samples of the same weights. Remove what was "
                    "copied, and evaluate that run."
                )
            other = first.setdefault(benchmark, samples)
            for key in ("benchmark_sha256", "n", "sampling"):
                if samples.header[key] != other.header[key]:
                    raise UserError(
                        f"{samples.file}: {key} = {samples.header[key]}, and {other.file} has {other.header[key]}: "
                        "one table is of the same problems, sampled the same way. Evaluate one of the two runs again."
                    )


def jobs_of(runs: list[Run]) -> list[Job]:
    """For the figures: an arm by its name, with its model where there are several."""
    several = len({run.model for run in runs}) > 1
    ordered = sorted(runs, key=lambda run: (run.model, run.arm, run.seed))
    return [read_run(run.folder, f"{run.arm} on {run.model}" if several else run.arm, run.seed) for run in ordered]
