"""A paper's table: each arm of configs/experiment/<paper>, from the runs that are there, beside what has been published."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from recipes.evaluation.scores import SEED, Score, result
from recipes.evaluation.statistics import average_interval
from recipes.results.layout import Table
from recipes.results.paper_runs import EVALUATION, Run, arms_of
from recipes.results.published import Published
from trustregion.presets import configs_folder

AVERAGE = "average"
CONTENTS = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"  # weights that vLLM can read


@dataclass(frozen=True)
class Paper:
    """How a paper evaluates, and which of the published numbers are shown beside its arms.

    Args:
        sources: the papers, as configs/published_results.csv begins their names.
        sampling: arguments of recipes.evaluate.
        metrics: those that the paper reports, as recipes.evaluate calls them.
        arms: the arm that a published method is, where their names differ. No arm is a method with another setting.
    """

    title: str
    sources: tuple[str, ...]
    benchmarks: tuple[str, ...]
    sampling: dict[str, Any]
    metrics: tuple[str, ...] = ("mean@32",)
    arms: tuple[tuple[str, str], ...] = ()


PAPERS = {
    "bandpo": Paper(
        "BandPO (2603.04918)", ("BandPO",), ("amc23", "aime24", "aime25"),
        {"n": 32, "temperature": 1.0, "top_p": 1.0, "max_tokens": 4096}, ("mean@32", "best@32(bootstrap)"),
    ),
    "dppo": Paper(
        "DPPO (2602.04879)", ("DPPO", "CPPO"), ("aime24", "aime25"), {"n": 32, "temperature": 0.7, "top_p": 0.95, "max_tokens": 16384},
        arms=(("dppo_binary_tv", "stability"), ("dppo_binary_kl", "stability_kl")),
    ),
    "erc": Paper(
        "ERC (2512.05591)", ("ERC", "CE-GPPO"), ("aime24", "aime25", "hmmt25", "math500", "amc23", "olympiadbench"),
        {"n": 32, "temperature": 0.6, "top_p": 0.95, "max_tokens": 32768},
    ),
}  # fmt: skip
NOTES = """Ours is first, where it was run: the mean over seeds, in brackets its 95 % bootstrap interval over problems. The interval says
nothing of other seeds; the values of each are in table.csv. *average*: over the paper's benchmarks, each counting the same.
*published*: by others, for the same model, method, benchmark and metric, with its source in round brackets; table.csv has the
paper's own names. An empty cell: not run here, and published by nobody that we know of. `mean@k` is the papers' avg@k,
`best@k(bootstrap)` what BandPO calls pass@k: draws with replacement."""


Key = tuple[str, str, str, str]  # model, arm, benchmark, metric


# ---- numbers ---------------------------------------------------------------------------------------------------------
def our_numbers(paper: Paper, runs: list[Run]) -> dict[Key, dict[str, Any]]:
    """value, low, high (fractions) and by_seed, of each (model, arm, benchmark, metric) that was evaluated."""
    by_arm: dict[tuple[str, str], dict[int, dict[str, dict[str, Score]]]] = {}
    for run in runs:
        if run.samples:
            scores = {}
            for name, samples in run.samples.items():
                scores[name] = result(samples, {*paper.metrics, f"mean@{samples.header['n']}"}).scores
            by_arm.setdefault((run.model, run.arm), {})[run.seed] = scores
    found = {}
    for (model, arm), seeds in by_arm.items():
        for benchmark in {name for scores in seeds.values() for name in scores}:
            having = {seed: scores[benchmark] for seed, scores in seeds.items() if benchmark in scores}
            for metric in next(iter(having.values())):
                each = [scores[metric].per_problem for scores in having.values()]
                found[model, arm, benchmark, metric] = _number([each], [*having])
        for metric in paper.metrics:
            complete = {seed for seed, scores in seeds.items() if all(metric in scores.get(name, {}) for name in paper.benchmarks)}
            having = {seed: scores for seed, scores in seeds.items() if seed in complete}
            if having:
                each = [[scores[name][metric].per_problem for scores in having.values()] for name in paper.benchmarks]
                found[model, arm, AVERAGE, metric] = _number(each, [*having])
    return found


def _number(by_benchmark: list[list[np.ndarray]], seeds: list[int]) -> dict[str, Any]:
    """Of the values by problem of each seed, benchmark by benchmark."""
    low, high = average_interval([np.mean(of_seeds, axis=0) for of_seeds in by_benchmark], seed=SEED)
    by_seed = {seed: fmean(float(np.mean(of_seeds[nth])) for of_seeds in by_benchmark) for nth, seed in enumerate(seeds)}
    return {"value": fmean(by_seed.values()), "low": low, "high": high, "by_seed": dict(sorted(by_seed.items()))}


def published_key(paper: Paper, one: Published) -> Key:
    """Where a published number belongs, in our names as far as we have one for what it names."""
    presets = _presets()
    arm = dict(paper.arms).get(one.method, one.method)
    benchmark = one.benchmark.lower()
    if benchmark.startswith("average("):
        inside = {text.replace("olympiad", "olympiadbench") for text in benchmark[len("average(") : -1].split(";")}
        benchmark = AVERAGE if inside == set(paper.benchmarks) else one.benchmark
    elif benchmark not in paper.benchmarks:
        benchmark = one.benchmark
    metric = {"avg": paper.metrics[0]}.get(one.metric, one.metric.replace("avg@", "mean@"))
    return presets.get(one.base_model, one.base_model), arm, benchmark, metric


@cache
def _presets() -> dict[str, str]:
    """The names of configs/model by the models' own."""
    files = (configs_folder() / "model").glob("[!_]*.yaml")
    return {Path(str(OmegaConf.to_container(OmegaConf.load(file))["model"]["path"])).name: file.stem for file in files}


# ---- the tables ------------------------------------------------------------------------------------------------------
def tabulate(name: str, runs: list[Run], published: list[Published]) -> tuple[list[Table], list[str], list[dict[str, Any]]]:
    """A table a metric, its sources, and one row a number: what was run, what was published, and the paper's arms."""
    paper, arms = PAPERS[name], arms_of(name)
    ours = our_numbers(paper, runs)
    theirs = {published_key(paper, one): one for one in published if one.paper.startswith(paper.sources)}
    places = (*paper.benchmarks, AVERAGE)
    wanted = [(model, arm, benchmark, metric) for arm, model in arms.items() for benchmark in places for metric in paper.metrics]

    def order(key: Key) -> tuple:
        model, arm, benchmark, metric = key
        return model, arm not in arms, arm, places.index(benchmark) if benchmark in places else len(places), benchmark, metric

    keys = sorted({*wanted, *ours, *theirs}, key=order)
    sources = list(dict.fromkeys(_source(theirs[key]) for key in keys if key in theirs))
    metrics = list(dict.fromkeys([*paper.metrics, *sorted({metric for *_, metric in keys})]))
    tables = []
    for metric in metrics:
        mine = [key for key in keys if key[3] == metric]
        columns = sorted({benchmark for _, _, benchmark, _ in mine}, key=lambda one: order(("", "", one, "")))
        lines = []
        for model, arm in dict.fromkeys((model, arm) for model, arm, *_ in mine):
            of_row = [(model, arm, benchmark, metric) for benchmark in columns]
            seeds = sorted({len(ours[key]["by_seed"]) for key in of_row if key in ours})
            cells = [_cell(ours.get(key), theirs.get(key), sources) for key in of_row]
            lines.append([model, f"`{arm}`" if arm in arms else arm, " to ".join(map(str, {min(seeds), max(seeds)} if seeds else ())), *cells])
        tables.append(Table(f"{paper.title}: {metric}, %", ["model", "arm", "seeds", *columns], lines, left=2))
    return tables, sources, [_row(key, ours.get(key), theirs.get(key)) for key in keys]


def _cell(ours: dict | None, theirs: Published | None, sources: list[str]) -> str:
    parts = [] if ours is None else ["{:.1f} [{:.1f}, {:.1f}]".format(*(100 * ours[name] for name in ("value", "low", "high")))]
    if theirs is not None:
        parts.append(f"published {theirs.value:g} ({sources.index(_source(theirs)) + 1})")
    return "; ".join(parts)


def _source(one: Published) -> str:
    return "; ".join(filter(None, (one.paper, one.provenance, one.note)))


def _row(key: Key, ours: dict | None, theirs: Published | None) -> dict[str, Any]:
    model, arm, benchmark, metric = key
    found = {"model": model, "arm": arm, "benchmark": benchmark, "metric": metric}
    found |= {name: None if ours is None else 100 * ours[name] for name in ("value", "low", "high")}
    found["seeds"] = len(ours["by_seed"]) if ours else None
    found["by_seed"] = " ".join(f"{seed}:{100 * value:.6g}" for seed, value in ours["by_seed"].items()) if ours else None
    found["published"] = theirs.value if theirs else None
    found |= {f"published_{name}": getattr(theirs, name, None) for name in ("paper", "base_model", "method", "benchmark", "metric")}
    return found | {name: getattr(theirs, name, None) for name in ("provenance", "note")}


# ---- what is missing -------------------------------------------------------------------------------------------------
def missing(name: str, folder: Path, runs: list[Run], published: list[Published]) -> list[list[str]]:
    """The commands that make the missing numbers: of all arms, and of the other models for which an arm has been published."""
    paper, arms, presets = PAPERS[name], arms_of(name), {*_presets().values()}
    keys = [published_key(paper, one) for one in published if one.paper.startswith(paper.sources)]
    others = {(arm, model) for model, arm, _, metric in keys if arm in arms and model in presets and metric in paper.metrics}
    commands = []
    for arm, model in [*arms.items(), *sorted(others - {*arms.items()})]:
        mine = [run for run in runs if (run.arm, run.model) == (arm, model)]
        other = [] if model == arms[arm] else [f"model={model}"]
        folders = [run.folder for run in mine if not {*paper.benchmarks} <= {*run.samples}]
        if not mine:
            folders = [folder / "-".join([arm, *([model] if other else []), "0"])]
            options = [f"runs={folder}", f"name={folders[0].name}", "trainer.resume_mode=auto", CONTENTS]
            commands.append(["python", "-m", "recipes.train", f"experiment={name}/{arm}", *other, *options])
        for run in folders:
            options = [f"benchmarks=[{','.join(paper.benchmarks)}]", *(f"{key}={value}" for key, value in paper.sampling.items())]
            commands.append(["python", "-m", "recipes.evaluate", f"model={run}", *options, f"runs={run}", f"name={EVALUATION}"])
    return commands
