"""What is wrong with the values of an evaluation's configuration by themselves."""

import math

from omegaconf import DictConfig

from recipes.errors import UserError


def check(config: DictConfig):
    """Raises UserError with all that is wrong, a line each."""
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
    yield "model", config.model.name, isinstance(config.model.name, str) and config.model.name != "", "must be a preset, a folder or a name on the hub"
    for key in ("compare", "from_samples", "name"):
        yield key, config[key], config[key] is None or (isinstance(config[key], str) and config[key] != ""), "must be a folder, or null"


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
