"""The problems of a benchmark, from the parquet file that recipes.prepare_data or recipes.assets.arithmetic makes."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as parquet
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes.data_check import check_prompts
from recipes.errors import UserError
from recipes.evaluation.grade import check_source
from recipes.prepare_data import prepare
from trustregion.config import unknown_name
from trustregion.presets import configs_folder


@dataclass(frozen=True)
class Problem:
    """One row: `id` is "<benchmark>/<row>", `messages` the chat that asks, `source` what chooses the rule that grades."""

    id: str
    messages: list[dict[str, str]]
    source: str
    truth: str

    @property
    def benchmark(self) -> str:
        return self.id.rpartition("/")[0]


@dataclass(frozen=True)
class Benchmark:
    """`max_tokens`: of a response, where the evaluation does not say."""

    name: str
    problems: list[Problem]
    max_tokens: int

    @property
    def sha256(self) -> str:
        """Of what is asked and what is right."""
        return hashlib.sha256(json.dumps([asdict(problem) for problem in self.problems]).encode()).hexdigest()


def load(config: DictConfig) -> list[Benchmark]:
    """The benchmarks that `config` names; those that are not there yet are made, from the hub if need be.

    Raises:
        UserError: no such benchmark; its file is missing, damaged or graded by no rule; fewer than two problems.
    """
    names = [config.benchmarks] if isinstance(config.benchmarks, str) else list(config.benchmarks or [])
    if not names or len(set(names)) < len(names):
        raise UserError(f"benchmarks = {names}: must name one or more of {', '.join(config.sets)}, each once")
    for name in names:
        if name not in config.sets:
            raise UserError(unknown_name(f"benchmarks={name}: no such benchmark", name, config.sets))
    return [_read(name, config) for name in names]


def _read(name: str, config: DictConfig) -> Benchmark:
    entry, said = config.sets[name], f"benchmarks={name}"
    file = _file(said, entry, config)
    check_prompts(file, said)
    rows = parquet.read_table(file).to_pylist()[: config.problems]
    if len(rows) < 2:
        raise UserError(f"{said}: {len(rows)} problem: intervals are over problems, so give at least two (problems = {config.problems})")
    problems = []
    for index, row in enumerate(rows):
        messages = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
        problems.append(Problem(f"{name}/{index}", messages, row["data_source"], str(row["reward_model"]["ground_truth"])))
    for source in {problem.source for problem in problems}:
        check_source(source, said)
    return Benchmark(name, problems, entry.max_tokens)


def _file(said: str, entry: DictConfig, config: DictConfig) -> Path:
    if "file" in entry:
        return Path(entry.file)
    if "data" in entry:
        group = OmegaConf.load(configs_folder() / "data" / f"{entry.data}.yaml")
        data = OmegaConf.create({"assets": config.assets, "seed": config.seed, "data": group}).data
        instantiate(data.prepare)
        return Path(data.val_files)
    file = Path(config.assets) / entry.dataset / "data.parquet"
    if not file.is_file():
        try:
            prepare(entry.dataset, config.assets)
        except UserError as error:
            raise UserError(
                f"{said}: {file} is not there, and could not be made: {error} Or copy it from a machine that has it, where "
                f"`python -m recipes.prepare_data dataset={entry.dataset}` makes it."
            ) from error
    return file
