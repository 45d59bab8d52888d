"""What is wrong with the values of an evaluation's configuration by themselves."""

import math

from omegaconf import DictConfig, ListConfig

from recipes.errors import UserError


def check(config: DictConfig):
    """Raises UserError with all that is wrong, a line each."""
    groups = ("engine", "retention", "sets", "chat_template_kwargs")
    wrong = [f"{key} = {config[key]!r}: must be keys and values, {key}.<key>=<value>" for key in groups if not isinstance(config[key], DictConfig)]
    if wrong:
        raise UserError("\n       ".join(wrong))
    wrong = [f"{key} = {value!r}: {rule}" for key, value, right, rule in _values(config) if not right]
    if wrong:
        raise UserError("\n       ".join(wrong))


def _values(config: DictConfig):
    whole = "must be a whole number >= 1"
    for key, value in (("n", config.n), ("servers", config.servers), ("engine.tensor_parallel_size", config.engine.tensor_parallel_size)):
        yield key, value, _is_count(value), whole
    for key in ("problems", "max_tokens"):
        yield key, config[key], config[key] is None or _is_count(config[key]), f"{whole}, or null"
    yield "seed", config.seed, config.seed == 0 or _is_count(config.seed), "must be a whole number >= 0"
    yield "temperature", config.temperature, _is_number(config.temperature) and config.temperature >= 0, "must be a number >= 0"
    yield "top_p", config.top_p, _is_number(config.top_p) and 0 < config.top_p <= 1, "must be a number above 0 and at most 1"
    yield "device", config.device, config.device in (None, "cpu", "cuda"), "must be cpu, cuda or null"
    yield "model", config.model.name, _is_text(config.model.name), "must be a preset, a folder or a name on the hub"
    for key in ("compare", "from_samples", "name"):
        yield key, config[key], config[key] is None or _is_text(config[key]), "must be a folder, or null"
    for key in ("runs", "assets"):
        yield key, config[key], _is_text(config[key]), "must be a folder"
    for key, value in (("chat_template", config.chat_template), *((f"retention.{key}", value) for key, value in config.retention.items())):
        yield key, value, value is None or _is_text(value), "must be text, or null"
    names = config.benchmarks if isinstance(config.benchmarks, ListConfig) else [config.benchmarks]
    yield "benchmarks", config.benchmarks, all(map(_is_text, names)), "must be a name, or a list of names"
    for name, entry in config.sets.items():
        right = isinstance(entry, DictConfig) and {"file", "data", "dataset"} & entry.keys() and _is_count(entry.get("max_tokens"))
        yield f"sets.{name}", entry, right, "must be {file: <a parquet file>, max_tokens: <a whole number>}"


def _is_text(value) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
