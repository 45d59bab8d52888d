"""A study: a sweep of methods x seeds that are equal in all else, as tables of means over seeds and differences to a baseline."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from recipes.errors import UserError
from recipes.evaluation.statistics import half_width, paired_difference
from recipes.report import WINDOW
from recipes.results.jobs import Job, read_run
from recipes.results.layout import Table, plus_minus
from recipes.run_files import read_metrics, value_at
from recipes.series import fluctuation, variance
from recipes.sweep_records import FINISHED, JobRecord, read_records
from trustregion.presets import configs_folder, read_preset

BASELINE = "grpo"
# What must be the same in all jobs, by the names under which the table says it.
BUDGET = {
    "model": "chosen.model",
    "prompts a step": "data.train_batch_size",
    "responses a prompt": "actor_rollout_ref.rollout.n",
    "prompts an update": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "steps": "trainer.total_training_steps",
    "learning rate": "actor_rollout_ref.actor.optim.lr",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "longest response": "data.max_response_length",
    "validation responses a prompt": "actor_rollout_ref.rollout.val_kwargs.n",
}


@dataclass(frozen=True)
class Measure:
    """One number of a job, None where its run has not logged what it is made of."""

    name: str  # in the CSV
    title: str
    table: str
    of: Callable[[Job], float | None]


def _mean(key: str, factor: float = 1.0) -> Callable[[Job], float | None]:
    return lambda job: factor * fmean(job.get(key).values()) if job.get(key) else None


def _end(key: str, last: bool = True) -> Callable[[Job], float | None]:
    """Mean of the last steps, or of the first: those that recipes.report compares. None where it was no number in any."""

    def of(job: Job) -> float | None:
        values = [value for step, value in job.get(key).items() if (step > job.steps - _window(job) if last else step <= _window(job))]
        return fmean(values) if values else None

    return of


def _window(job: Job) -> int:
    return max(1, min(WINDOW, job.steps // 2))


def _gain(job: Job) -> float | None:
    last, first = _end("reward")(job), _end("reward", last=False)(job)
    return None if None in (last, first) else last - first


def _kept(job: Job) -> float | None:
    last, first = _end("entropy")(job), _end("entropy", last=False)(job)
    return 100 * last / first if first and last is not None else None


def _spread(key: str, of: Callable[[dict[int, float]], dict[int, float]]) -> Callable[[Job], float | None]:
    """Mean over steps of what recipes.series makes of a metric."""
    return lambda job: fmean(found) if (found := of(job.get(key)).values()) else None


LEARNING, CLIPPED, DYNAMICS = "Learning", "Tokens clipped or blocked, % (means over all steps)", "Dynamics"
MEASURES = (
    Measure("reward_gain", "gain in reward", LEARNING, _gain),
    Measure("reward_last", "reward at the end", LEARNING, _end("reward")),
    Measure("accuracy", "validation accuracy, %", LEARNING, lambda job: None if job.accuracy is None else 100 * float(job.accuracy.mean())),
    Measure("clip_high_0_0.01", "clip-high, p < 0.01", CLIPPED, _mean("trust/clip_fraction_up/0-0.01", 100)),
    Measure("clip_high_0.01_0.2", "clip-high, p 0.01-0.2", CLIPPED, _mean("trust/clip_fraction_up/0.01-0.2", 100)),
    Measure("clipped", "all tokens", CLIPPED, _mean("trust/clip_fraction", 100)),
    Measure("by_region", "blocked by region", CLIPPED, _mean("trust/blocked_by_region", 100)),
    Measure("by_entropy", "by entropy", CLIPPED, _mean("trust/blocked_by_entropy", 100)),
    Measure("by_dual_clip", "by dual clip", CLIPPED, _mean("trust/blocked_by_dual_clip", 100)),
    Measure("entropy_last", "entropy at the end", DYNAMICS, _end("entropy")),
    Measure("entropy_kept", "entropy kept, %", DYNAMICS, _kept),
    Measure("entropy_fluctuation", "entropy's fluctuation, %", DYNAMICS, _spread("entropy", fluctuation)),
    Measure("grad_norm_variance", "variance of the gradient's norm", DYNAMICS, _spread("actor/grad_norm", variance)),
    Measure("log_ratio", "mean abs. log ratio", DYNAMICS, _mean("trust/log_ratio_abs_mean")),
    Measure("divergence", "divergence", DYNAMICS, _mean("trust/divergence_mean")),
)
NOTES = f"""Means over seeds ± half of their 95 % interval by Student's t over seeds; a mean alone is of one seed, or the same in all.
Differences are paired by seed, which decides what is trained and tested on, in which order, and all sampling: bold where the
interval leaves out 0, without correction for the number of comparisons. "Accuracy, over problems" pairs the validation problems
of all seeds instead, in brackets the 95 % bootstrap interval: how far other problems would be from these, of these trained models.

First and last are means of {WINDOW} steps (of fewer in short runs). *Clip-high*: of the tokens whose probability under the anchor is in
the bucket, those that are beyond the upper bound and pushed further; steps without a token in the bucket count 0. *All tokens*: at
which any constraint binds; GPPO's and CISPO's surrogates keep a gradient there. *Blocked*: without gradient, by cause; causes can
overlap. *Entropy* is measured before a step's updates, and with `anchor: rollout` (DPPO) during them. *Fluctuation*: standard
deviation about the moving average, relative to it. *Divergence* is each region's own, so that it compares only methods of one
divergence; the log ratio compares all. All of them: docs/metrics.md."""


# ---- which jobs ------------------------------------------------------------------------------------------------------
def studies() -> dict[str, list[tuple[str, int]]]:
    """(method, seed) of the jobs of each sweep over methods and seeds in configs/sweep."""
    found = {}
    for file in sorted((configs_folder() / "sweep").glob("*_study.yaml")):
        params = OmegaConf.to_container(OmegaConf.load(file))["hydra"]["sweeper"]["params"]
        found[file.stem] = [*product(params["method"].split(","), map(int, str(params["seed"]).split(",")))]
    return found


def model_of(name: str) -> str:
    """The model that the sweep chooses, or training's own."""
    entries = OmegaConf.to_container(OmegaConf.load(configs_folder() / "sweep" / f"{name}.yaml")).get("defaults", [])
    return next((entry["override /model"] for entry in entries if isinstance(entry, dict) and "override /model" in entry), "tiny")


def collect(name: str, sweep: Path) -> tuple[dict, list[Job], list[str]]:
    """What the study's jobs in a sweep's folder have in common, those that have finished, and what is said of the others.

    Raises UserError: there is no finished job, or jobs have another budget than the others, or are none of the study's.
    """
    records = {}
    for record in read_records(sweep):
        config = record.read().get("config")
        if config is None:
            continue  # waits, or was refused before it started
        key, method = (str(value_at(config, "chosen.method")), value_at(config, "seed")), value_at(config, "method")
        if type(key[1]) is not int or not isinstance(method, dict):
            both = f"seed = {reprlib.repr(key[1])} and method = {reprlib.repr(method)}"
            raise UserError(f"{record.path}: its config has {both}: no job's. Remove the file, and run the job again.")
        if key in records:
            both = f"{records[key].name} and {record.name}"
            raise UserError(f"{sweep}: {both} are both {key[0]} with seed {key[1]}. Move one of them elsewhere.")
        records[key] = record
    wanted = studies()[name]
    if strange := sorted(record.name for key, record in records.items() if key not in wanted):
        raise UserError(
            f"{sweep}: {', '.join(strange)}: no job of sweep={name}. Move it elsewhere, or give the sweep's own folder with runs=..."
        )
    jobs, left_out, budgets = [], [], {}
    for method, seed in wanted:
        record = records.get((method, seed))
        if (status := _status(record)) != FINISHED:
            left_out.append(f"{method}, seed {seed}: {status}")
            continue
        config = record.read()["config"]
        _check_method(record, config["method"])
        budgets[record] = {key: value_at(config, key) for key in BUDGET.values()}
        job = read_run(record.folder, method, seed)
        if job.steps != budgets[record]["trainer.total_training_steps"]:
            asked = budgets[record]["trainer.total_training_steps"]
            left_out.append(f"{method}, seed {seed}: {job.steps} of {asked} steps in metrics.jsonl")
        else:
            jobs.append(job)
            lost = [f"{key} in {job.steps - len(values)}" for key, values in job.series.items() if len(values) < job.steps]
            left_out += [f"{method}, seed {seed}: of {job.steps} steps, {', '.join(lost)}: no finite number there"] if lost else []
    _check_budgets(budgets)
    if not jobs:
        raise UserError(f"{sweep}: no job of sweep={name} has finished. Run them first: python -m recipes.train sweep={name}")
    common = next(iter(budgets.values()))
    return {"study": name, "setting": {title: common[key] for title, key in BUDGET.items()}}, jobs, left_out


def _status(record: JobRecord | None) -> str:
    """FINISHED, or what is said of a job that has not."""
    known = record.read() if record else {}
    if known.get("status") in (None, FINISHED):
        return known.get("status") or "not started"
    steps = read_metrics(record.folder / "metrics.jsonl").steps
    return f"{known['status']} after {steps[-1] if steps else 0} of {value_at(known.get('config', {}), 'trainer.total_training_steps')} steps"


def _check_method(record: JobRecord, method: dict):
    preset = read_preset(value_at(record.read()["config"], "chosen.method"))
    for key in sorted(preset.keys() | method.keys()):
        if method.get(key) != preset.get(key):
            raise UserError(
                f"{record.folder}: method.{key} = {method.get(key)!r}, and the preset has {preset.get(key)!r}: "
                "no job of this study. Move it elsewhere, or run the study under another name=..."
            )


def _check_budgets(budgets: dict[JobRecord, dict]):
    for key in BUDGET.values():
        values = {}
        for record, budget in budgets.items():
            values.setdefault(repr(budget[key]), []).append(record.name)
        if len(values) > 1:
            said = "; ".join(f"{value} in {', '.join(names[:3] + ['...'] * (len(names) > 3))}" for value, names in values.items())
            raise UserError(
                f"{key} differs between jobs, which are compared at equal budgets: {said}. Move those that differ elsewhere, and "
                "run the sweep again."
            )


# ---- tables ----------------------------------------------------------------------------------------------------------
def tabulate(jobs: list[Job]) -> tuple[list[Table], list[dict[str, Any]]]:
    """The tables, and the same as one row a number."""
    methods = list(dict.fromkeys(job.method for job in jobs))
    values = {(job.method, measure.name, job.seed): measure.of(job) for job in jobs for measure in MEASURES}
    values = {key: value for key, value in values.items() if value is not None}
    rows = [_row(*key, values) for key in dict.fromkeys(key[:2] for key in values)]
    found = {(row["method"], row["measure"]): row for row in rows}
    tables = []
    for title in dict.fromkeys(measure.table for measure in MEASURES):
        shown = [measure for measure in MEASURES if measure.table == title and measure.name in {row["measure"] for row in rows}]
        names = [measure.title for measure in shown]
        cells = [[f"`{method}`", _seeds(jobs, method), *(_cell(found.get((method, one.name)), "mean") for one in shown)] for method in methods]
        tables.append(Table(title, ["method", "seeds", *names], cells))
        others = [method for method in methods if method != BASELINE]
        if BASELINE not in methods or not others:
            continue
        cells = [[f"`{method}`", *(_cell(found.get((method, one.name)), "difference", "+") for one in shown)] for method in others]
        if title == LEARNING:
            names.append("accuracy, over problems")
            cells = [[*line, _over_problems(jobs, method)] for line, method in zip(cells, others, strict=True)]
        tables.append(Table(f"{title.partition(',')[0]}: difference to {BASELINE}, same seed", ["method", *names], cells))
    return tables, rows


def _row(method: str, measure: str, values: dict[tuple[str, str, int], float]) -> dict[str, Any]:
    """Of `values` by method, measure and seed."""
    mine, base = ({seed: value for (*key, seed), value in sorted(values.items()) if key == [of, measure]} for of in (method, BASELINE))
    paired = [value - base[seed] for seed, value in mine.items() if seed in base] if method != BASELINE else []
    return {
        "method": method,
        "measure": measure,
        "seeds": len(mine),
        "mean": fmean(mine.values()),
        "mean_half_width": _half_width([*mine.values()]),
        "pairs": len(paired),
        "difference": fmean(paired) if paired else None,
        "difference_half_width": _half_width(paired),
        "by_seed": " ".join(f"{seed}:{value:.6g}" for seed, value in mine.items()),
    }


def _half_width(values: list[float]) -> float | None:
    """0 where seeds differ by rounding alone."""
    half = half_width(values)
    return 0.0 if half is not None and half < 1e-9 * max(map(abs, values)) else half


def _cell(row: dict | None, what: str, sign: str = "") -> str:
    if row is None or row[what] is None:
        return "-"
    mean, half = row[what], row[f"{what}_half_width"]
    text = plus_minus(mean, half, sign)
    return f"**{text}**" if what == "difference" and half and abs(mean) > half else text


def _seeds(jobs: list[Job], method: str) -> str:
    return str(sum(job.method == method for job in jobs))


def _over_problems(jobs: list[Job], method: str) -> str:
    base = {job.seed: job.accuracy for job in jobs if job.method == BASELINE and job.samples}
    pairs = [(job.accuracy, base[job.seed]) for job in jobs if job.method == method and job.samples and job.seed in base]
    pairs = [(mine, theirs) for mine, theirs in pairs if len(mine) == len(theirs)]
    if not pairs or sum(len(mine) for mine, _ in pairs) < 2:
        return "-"
    found = paired_difference(*(np.concatenate(side) for side in zip(*pairs, strict=True)))
    return f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"

