"""The papers' tables and figures, from runs on this machine, beside the published numbers; and those of small studies:

    python -m recipes.tables experiment=bandpo                      # dppo, erc: from runs/bandpo
    python -m recipes.tables experiment=tiny_study                  # from runs/tiny_study-tiny, which sweep=tiny_study makes
    python -m recipes.tables experiment=tiny_study runs=docs/studies/tiny_study      # anew, from what is kept there

Writes table.md, table.tex, table.csv and figures/; the same inputs give the same tables, byte for byte. What is missing is
named, with the command that makes it; run=true runs these commands first. docs/tables.md explains everything.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.errors import UserError, writing
from recipes.results import paper, study
from recipes.results.jobs import STUDY, Job, read_jobs, write_jobs
from recipes.results.layout import write_tables
from recipes.results.paper import PAPERS
from recipes.results.paper_runs import find_runs, jobs_of
from recipes.results.published import read_published
from trustregion.config import unknown_name


@dataclass
class Options:
    """What can be given, as key=value."""

    experiment: str = MISSING  # of PAPERS and of the studies in configs/sweep
    runs: str | None = None  # the folder of the runs, or one that a study was written to; null: after the experiment
    out: str | None = None  # where the table goes; null: runs/tables/<experiment>, or for a study's own folder that
    run: bool = False  # run what is missing, first
    figures: bool = True


def make(options: Options) -> Path:
    """Writes the table of an experiment and returns its folder. Raises UserError."""
    known = [*PAPERS, *study.studies()]
    if options.experiment not in known:
        raise UserError(unknown_name(f"experiment={options.experiment}: no such experiment", options.experiment, known))
    return (_paper if options.experiment in PAPERS else _study)(options)


# ---- papers ----------------------------------------------------------------------------------------------------------
def _paper(options: Options) -> Path:
    name, folder = options.experiment, Path(options.runs or f"runs/{options.experiment}")
    out = Path(options.out or f"runs/tables/{name}")
    if options.runs and not folder.is_dir() and not options.run:
        raise UserError(f"runs={folder}: no such folder. Leave runs=... out for runs/{name}, or give the folder that the runs are in.")
    published = read_published()
    runs, left_out = find_runs(name, folder)
    commands = paper.missing(name, folder, runs, published)
    if options.run and commands:
        _run(commands)
        runs, left_out = find_runs(name, folder)
        commands = paper.missing(name, folder, runs, published)
    tables, sources, rows = paper.tabulate(name, runs, published)
    lead = [f"Made by `python -m recipes.tables experiment={name}`."]
    cited = "\n".join(["Sources:", "", *(f"{number}. {source}" for number, source in enumerate(sources, start=1))])
    jobs = jobs_of(runs) if options.figures else []
    with writing(f"out={out}"):
        write_tables(out, PAPERS[name].title, lead, tables, [paper.NOTES, cited, *_left_out(left_out), *_missing(commands)], rows)
        _draw(options, out, jobs, with_bounds=name == "bandpo")
    found = sum(row["value"] is not None for row in rows)
    print(f"{name}: {found} numbers of ours, {sum(row['published'] is not None for row in rows)} published, of {len(rows)} in the table")
    _say(left_out, commands)
    return out


# ---- studies ---------------------------------------------------------------------------------------------------------
def _study(options: Options) -> Path:
    name = options.experiment
    command = ["python", "-m", "recipes.train", f"sweep={name}"]
    folder = Path(options.runs) if options.runs else _sweep_folder(name, command, options.run)
    kept = (folder / STUDY).is_file() and not (folder / "jobs").is_dir()  # the runs know more than a table written among them
    if not kept and options.run:
        _run([[*command, f"runs={folder.parent}", f"name={folder.name}"]])
    if kept:
        (about, jobs), left_out, out = read_jobs(folder), [], Path(options.out or folder)
        if about.get("study") != name:
            raise UserError(f"runs={folder}: holds the study {about.get('study')!r}: give that as experiment=..., or another folder.")
        if not isinstance(about.get("setting"), dict) or not isinstance(about.get("left_out"), list):
            raise UserError(f"runs={folder}: {STUDY} is damaged: it lacks setting or left_out. Make it anew from the runs, with runs=<the sweep's folder>.")
        left_out = about["left_out"]
    elif (folder / "jobs").is_dir():
        out = Path(options.out or f"runs/tables/{name}")
        about, jobs, left_out = study.collect(name, folder)
        about["left_out"] = left_out
        with writing(f"out={out}"):
            write_jobs(out, about, jobs)
        about, jobs = read_jobs(out)  # from what is kept, so that it can be made again from there
    else:
        raise UserError(
            f"runs={folder}: no study is there: neither a sweep's folder (jobs/) nor a table's ({STUDY}). To run it: {shlex.join(command)}"
        )
    tables, rows = study.tabulate(jobs)
    setting = ", ".join(f"{key} {value}" for key, value in about["setting"].items())
    lead = [f"`{shlex.join(command)}`, then `python -m recipes.tables experiment={name}`. All jobs: {setting}."]
    with writing(f"out={out}"):
        write_tables(out, name, lead, tables, [study.NOTES, *_left_out(left_out)], rows)
        _draw(options, out, jobs, with_bounds=False)
    print(f"{name}: {len(jobs)} of {len(study.studies()[name])} jobs")
    _say(left_out, [command] if len(jobs) < len(study.studies()[name]) else [])
    return out


def _sweep_folder(name: str, command: list[str], will_run: bool) -> Path:
    found = sorted(path for path in Path("runs").glob(f"{name}-*") if (path / "jobs").is_dir())
    if len(found) > 1:
        raise UserError(f"experiment={name}: {', '.join(map(str, found))} are there. Choose one with runs=...")
    if not found and not will_run:
        raise UserError(f"experiment={name}: nothing is there yet (no runs/{name}-*/jobs). Run it, then this again: {shlex.join(command)}")
    return found[0] if found else Path("runs") / f"{name}-{study.model_of(name)}"


# ---- both ------------------------------------------------------------------------------------------------------------
def _run(commands: list[list[str]]):
    """One after another; all of them can be given again, and go on."""
    for command in commands:
        print(f"$ {shlex.join(command)}", flush=True)
        code = subprocess.run([sys.executable, *command[1:]]).returncode
        if code:
            raise UserError(
                f"run=true: this command ended with exit code {code}, for the reason above:\n  {shlex.join(command)}\n"
                "Run it on a machine that has what it needs, copy the run's folder here, and give the same command without run=true."
            )


def _draw(options: Options, out: Path, jobs: list[Job], with_bounds: bool):
    if not options.figures:
        return
    try:
        from recipes.figures import draw_all
    except ImportError:
        print("no figures: matplotlib is not installed (pip install 'trustregion[plots]')")
        return
    for path in draw_all(out / "figures", jobs, with_bounds):
        print(path)


def _left_out(left_out: list[str]) -> list[str]:
    return ["\n".join(["Left out:", "", *(f"- {text}" for text in left_out)])] if left_out else []


def _missing(commands: list[list[str]]) -> list[str]:
    return ["\n".join(["What makes the missing numbers:", "", "```sh", *map(shlex.join, commands), "```"])] if commands else []


def _say(left_out: list[str], commands: list[list[str]]):
    for text in left_out:
        print(f"left out: {text}")
    if commands:
        print("what is missing is made by:", *(f"  {shlex.join(command)}" for command in commands), sep="\n")


def main(arguments: list[str]) -> int:
    try:
        if wrong := [argument for argument in arguments if "=" not in argument]:
            raise UserError(f"{wrong[0]}: must be key=value. Keys: {', '.join(Options.__annotations__)}")
        try:
            # As it is written, not as YAML: folders may be called 007 or {x.
            given = {key: None if value in ("", "null") else value for key, _, value in (argument.partition("=") for argument in arguments)}
            options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), given))
        except OmegaConfBaseException as error:
            raise UserError(f"{str(error).splitlines()[0]}. Keys: {', '.join(Options.__annotations__)}; experiment= is needed") from error
        print(f"files: {make(options)}/\n       table.md  table.tex  table.csv")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
