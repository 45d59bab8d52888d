"""Evaluates a language model on mathematics, or on the embedded sums:

    python -m recipes.evaluate model=Qwen/Qwen2.5-1.5B benchmarks=[aime24,amc23,math500] n=32
    python -m recipes.evaluate model=runs/band_kl-tiny compare=runs/eval/tiny       # a run's last checkpoint, against another
    python -m recipes.evaluate from_samples=runs/eval/tiny                          # grades and reports anew

All keys are in configs/evaluate.yaml. Samples are kept as they come: killed and started again, it continues.
"""

import fcntl
import re
import shlex
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from recipes.errors import UserError, writing
from recipes.evaluation import models, report
from recipes.evaluation.benchmarks import Benchmark, load
from recipes.evaluation.checks import check
from recipes.evaluation.grade import check_source, grade
from recipes.evaluation.models import Model
from recipes.evaluation.retention import read as read_retention
from recipes.evaluation.retention import retention
from recipes.evaluation.samples import Samples, read_folder, resume
from recipes.evaluation.scores import differences, result
from recipes.evaluation.serve import Interrupted
from recipes.launcher import say
from trustregion.presets import configs_folder

PATHS = ("model", "compare", "from_samples", "name", "runs", "assets", "retention.base", "retention.text")
PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]*")


def evaluate(config: DictConfig, command: list[str], console: Console):
    """Generates what is missing, grades, reports. Raises UserError, and Interrupted after a signal."""
    check(config)
    theirs = read_folder(config.compare, "compare") if config.compare else {}
    if config.from_samples:
        folder = Path(config.from_samples)
        held = read_folder(folder, "from_samples")
        if len(found := {f"n = {one.header['n']} and seed = {one.header['seed']}": one.file.name for one in held.values()}) > 1:
            said = "; ".join(f"{what} in {name}" for what, name in found.items())
            raise UserError(f"from_samples={folder}: {said}: one report is of one n and seed. Part the files.")
        held, changed = regrade(held, f"from_samples={folder}")
        theirs, others = regrade(theirs, f"compare={config.compare}")  # both by one rule
        count = sum(len(samples.rows) for samples in (*held.values(), *theirs.values()))
        say(console, f"graded {count} samples anew: {changed + others} verdicts differ from those kept with them")
        fits = read_retention(folder / "retention.json")
    else:
        folder = Path(config.runs) / (config.name or models.folder_name(config.model.name))
        held, fits = sample(config, command, folder, console)
    found = [result(samples.complete()) for samples in held.values()]
    rows = differences(held, theirs, f"compare={config.compare}") if theirs else []
    settings = {key: value for key, value in next(iter(held.values())).header.items() if key in ("model", "model_sha256", "n", "seed")}
    settings |= {f"{name}: {key}": value for name, samples in held.items() for key, value in samples.header["sampling"].items() if value not in (None, {})}
    title = f"{settings['model']} on {', '.join(held)}"
    report.show(console, title, found, rows, fits)
    with writing(f"from_samples={folder}" if config.from_samples else f"runs={config.runs}"):
        report.write(folder, command, title, settings, found, rows, fits)
    say(console, f"files: {folder}/\n       summary.md  results.csv  {'comparison.csv  ' if rows else ''}samples/")


def sample(config: DictConfig, command: list[str], folder: Path, console: Console) -> tuple[dict[str, Samples], dict]:
    """The complete samples of the model, those in `folder` and those it lacked, and how well it predicts a text if asked."""
    from recipes.evaluation.generate import generate  # imports torch

    say(console, shlex.join(command), style="bold")
    with console.status("preparing model and benchmarks ..."):
        benchmarks = load(config)
        model = models.find(config.model.name, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise UserError(f"runs={config.runs}: cannot make {folder} ({error.strerror}). Choose a writable runs=...") from error
    with open(folder / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another evaluation is writing there. Wait until it is done, or choose another name=...") from None
        held = {one.name: resume(folder / "samples" / f"{one.name}.jsonl", header(one, model, config)) for one in benchmarks}
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
        say(console, f"files: {folder}")
        generate(model, benchmarks, held, config, folder, console)
        fits = retention(model, config, folder / "retention.json") if config.retention.base else {}
    return held, fits


def header(benchmark: Benchmark, model: Model, config: DictConfig) -> dict:
    """What decides the samples."""
    template = {"chat_template": config.chat_template, "chat_template_kwargs": OmegaConf.to_container(config.chat_template_kwargs)}
    return {
        "benchmark": benchmark.name,
        "benchmark_sha256": benchmark.sha256,
        "problems": len(benchmark.problems),
        "n": config.n,
        "seed": config.seed,
        "model": model.name,
        "model_sha256": model.sha256,
        "sampling": {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_tokens or benchmark.max_tokens, **template},
    }


def regrade(held: dict[str, Samples], said: str) -> tuple[dict[str, Samples], int]:
    """Grades all samples anew, in memory; how many verdicts are others than before. Raises UserError where no rule grades one."""
    changed = 0
    for source in {row["source"] for samples in held.values() for row in samples.rows.values()}:
        check_source(source, said)
    for samples in held.values():
        for row in samples.rows.values():
            answer, correct = grade(row["source"], row["text"], row["truth"])
            changed += correct != row["correct"]
            row.update(answer=answer, correct=correct)
    return held, changed


@hydra.main(config_path=str(configs_folder()), config_name="evaluate", version_base="1.3")
def _main(config: DictConfig):
    command = ["python", "-m", "recipes.evaluate", *(text.replace("model.name=", "model=", 1) for text in HydraConfig.get().overrides.task)]
    console = Console(highlight=False)
    try:
        evaluate(config, command, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as interrupted:
        say(console, f"interrupted; the finished samples are kept. To go on:\n  {shlex.join(command)}")
        sys.exit(128 + interrupted.signum)


def main():
    sys.argv[1:] = map(for_hydra, sys.argv[1:])
    _main()


def for_hydra(argument: str) -> str:
    """`model` is a group of configuration files; here any folder and name on the hub are choices too. And Hydra's grammar
    gives a meaning to = ( [ ' and more, which are in the names of a sweep's folders: quotes take it from them."""
    key, equals, value = argument.partition("=")
    if key in PATHS and not PLAIN.fullmatch(value) and value[0] not in "'\"":
        value = "'" + value.replace("'", "\\'") + "'"
    return ("model.name" if key == "model" else key) + equals + value


if __name__ == "__main__":
    main()
