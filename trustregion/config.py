"""A method's configuration, typed and validated: flat as in the presets and on the command line, or nested.

    flat:    {"region": "divergence_ball", "divergence": "kl", "delta": 0.05, "surrogate": "clip", "anchor": "old"}
    nested:  {"region": {"type": "divergence_ball", "divergence": "kl", "delta": 0.05}, "surrogate": {"type": "clip"}}

A list of regions is their conjunction. Types are looked up by name in `REGIONS`, `SURROGATES` and `SCHEDULES`: nothing
that a configuration names is ever imported.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trustregion.fields import ConfigError
from trustregion.regions import REGIONS, All, Region, parts_of
from trustregion.schedules import SCHEDULES, Schedule, Scheduler
from trustregion.surrogates import SURROGATES, Surrogate

ANCHORS = ("old", "rollout")
ON_INVALID = ("raise", "drop")
_OWN_KEYS = ("anchor", "on_invalid", "schedule")  # of a method, beside its region's and its surrogate's


@dataclass(frozen=True)
class MethodConfig:
    """A method: region x surrogate x anchor.

    Args:
        region, surrogate: what `PolicyLoss` is made of.
        anchor: which policy `log_prob_old` belongs to: `old`, recomputed by the trainer before the first update, or
            `rollout`, as the inference engine sampled.
        on_invalid: `raise` or `drop`, as in `PolicyLoss`.
        schedule: how fields change over training, by name, from the value they have here (`schedules.py`).

    Raises:
        ConfigError: the surrogate cannot use the region, a name is unknown, or a schedule leaves its field's range.
    """

    region: Region
    surrogate: Surrogate
    anchor: str = "old"
    on_invalid: str = "raise"
    schedule: Mapping[str, Schedule] = field(default_factory=dict)

    def __post_init__(self):
        check_fit(self.region, self.surrogate)
        if not isinstance(self.anchor, str) or self.anchor not in ANCHORS:
            raise ConfigError(
                f"anchor = {self.anchor!r}: must be one of {', '.join(ANCHORS)} (old: log-probs that the trainer "
                "recomputes; rollout: log-probs that the inference engine sampled with)"
            )
        if self.anchor == "rollout" and "entropy" in self.region.requires(update=0):
            raise ConfigError(
                "anchor = 'rollout': an entropy band needs the anchor's entropy, and the inference engine returns none; "
                "use anchor 'old'"
            )
        check_on_invalid(self.on_invalid)
        for name, schedule in self.schedule.items():
            with _prefixed("schedule."):
                start = field_value((self.region, self.surrogate), name)
                if name == "alpha" or not math.isfinite(start):
                    raise ConfigError(f"{name} = {start!r}: only a finite radius, bound or weight can change over training")
                for value in schedule.extremes(name, start):
                    replace_fields((self.region, self.surrogate), {name: value})

    @property
    def topk(self) -> int:
        """How many of the anchor's most likely tokens the region needs named; 0 for none."""
        return max(getattr(part, "K", None) or 0 for part in parts_of(self.region))

    @property
    def entropy_every_k_steps(self) -> int:
        """In which updates the region needs entropies: every k-th; 0 for none."""
        return max(getattr(part, "every_k_steps", 0) for part in parts_of(self.region))

    def scheduler(self) -> Scheduler:
        """The method's schedules, at their start."""
        start = {name: field_value((self.region, self.surrogate), name) for name in self.schedule}
        return Scheduler(self.schedule, start)

    @classmethod
    def from_flat(cls, config: Mapping[str, Any]) -> "MethodConfig":
        """From one mapping of `region`, `surrogate`, `anchor` and the fields of both. A null field counts as not set.

        A field that two regions of a conjunction share is given to both.

        Raises ConfigError, whose message starts with `method.<key>`.
        """
        _check_mapping("method", config)
        with _prefixed("method."):
            return cls._from_flat(config)

    @classmethod
    def _from_flat(cls, config: Mapping[str, Any]) -> "MethodConfig":
        several = config.get("region")
        names = several if isinstance(several, Sequence) and not isinstance(several, str) else [several]
        regions = [_lookup("region", name, REGIONS) for name in names]
        if not regions:
            raise ConfigError("region = []: must name at least one region")
        if len(set(regions)) < len(regions):
            raise ConfigError(f"region = {several!r}: names a region twice, and their fields could not be told apart")
        surrogate = _lookup("surrogate", config.get("surrogate"), SURROGATES)
        used = ["region", "surrogate", *_OWN_KEYS]
        used += dict.fromkeys(name for kind in (*regions, surrogate) for name in _names(kind))
        known = {name for kind in (*REGIONS.values(), *SURROGATES.values()) for name in _names(kind)}
        for key, value in config.items():
            if key in used or (key in known and value is None):
                continue
            if key in known:
                raise ConfigError(
                    f"{key} = {value!r}: not a field of region {several!r} or surrogate "
                    f"{config['surrogate']!r}; remove it or set it to null. Allowed: {', '.join(used)}"
                )
            raise _unknown(key, used)
        given = {key: value for key, value in config.items() if value is not None}

        def build(kind: type) -> Any:
            return _build(kind, {name: given[name] for name in _names(kind) if name in given})

        built = [build(kind) for kind in regions]
        return cls(
            region=built[0] if len(built) == 1 else All(built),
            surrogate=build(surrogate),
            **_own(given),
        )

    @classmethod
    def from_nested(cls, config: Mapping[str, Any]) -> "MethodConfig":
        """From `{"region": {"type": ..., **fields}, "surrogate": {"type": ..., **fields}, "anchor": ...}`.

        `region` may be a list of such mappings. Raises ConfigError, whose message starts with the key's path.
        """
        _check_mapping("config", config)
        for key in config:
            if key not in ("region", "surrogate", *_OWN_KEYS):
                raise _unknown(key, ("region", "surrogate", *_OWN_KEYS))
        several = config.get("region")
        if isinstance(several, Sequence) and not isinstance(several, str):
            region = All([_build_nested(f"region[{i}]", part, REGIONS) for i, part in enumerate(several)])
        else:
            region = _build_nested("region", several, REGIONS)
        return cls(region, _build_nested("surrogate", config.get("surrogate"), SURROGATES), **_own(config))


def check_fit(region: Region, surrogate: Surrogate) -> None:
    """Raises ConfigError where the surrogate cannot use the region, or would ignore one of its fields."""
    name = next((name for name, kind in SURROGATES.items() if kind is type(surrogate)), type(surrogate).__name__)
    for part in parts_of(region):
        if surrogate.needs_interval and not part.has_interval:
            partition = getattr(part, "partition", None)
            what = f"{type(part).__name__}{f' over the partition {partition!r}' if partition else ''}"
            raise ConfigError(
                f"surrogate = {name!r}: needs a region that is an interval of ratios, and {what} is none; "
                "use surrogate 'mask'"
            )
        for ignored in () if surrogate.needs_interval else getattr(part, "interval_only", ()):
            if getattr(part, ignored) is not None:
                raise ConfigError(
                    f"{ignored} = {getattr(part, ignored)!r}: shapes an interval, and surrogate {name!r} uses none; "
                    "remove it (null), or use surrogate 'clip'"
                )


def check_on_invalid(value: Any) -> None:
    """Raises ConfigError where `value` says nothing about what to do with invalid tokens."""
    if not isinstance(value, str) or value not in ON_INVALID:
        raise ConfigError(
            f"on_invalid = {value!r}: must be one of {', '.join(ON_INVALID)} (what to do about live tokens whose "
            "log-probs, advantages or weights are not finite)"
        )


def field_value(parts: Iterable[Any], name: str) -> float:
    """The number that a region or surrogate has in the field `name`. Raises ConfigError when none has one."""
    values = {field_.name: getattr(part, field_.name) for part in _flat(parts) for field_ in dataclasses.fields(part)}
    if name not in values:
        numeric = sorted(key for key, value in values.items() if isinstance(value, float))
        raise ConfigError(unknown_name(f"{name}: no such field to schedule", name, numeric))
    if not isinstance(values[name], float):
        raise ConfigError(f"{name} = {values[name]!r}: only a field that is set to a number can change")
    return values[name]


def replace_fields(parts: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
    """The parts with other values for some fields. Raises ConfigError: no such field, or a value out of range."""
    for name in values:
        field_value(parts, name)

    def replaced(part: Any) -> Any:
        if isinstance(part, All):
            return All([replaced(region) for region in part.regions])
        own = {name: value for name, value in values.items() if name in _names(type(part))}
        return dataclasses.replace(part, **own) if own else part

    return [replaced(part) for part in parts]


def unknown_name(what: str, name: Any, allowed: Iterable[str]) -> str:
    """`what` has no `name`, the nearest name that exists, and all of them."""
    allowed = list(allowed)
    close = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.7)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{what}.{hint} Allowed: {', '.join(allowed)}"


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """A method's own keys, as MethodConfig takes them."""
    schedule = {} if config.get("schedule") is None else config["schedule"]
    if not isinstance(schedule, Mapping):
        raise ConfigError(f'schedule = {schedule!r}: must be a mapping {{<field>: {{"type": ..., <fields>}}}}')
    return {
        "anchor": config.get("anchor", "old"),
        "on_invalid": config.get("on_invalid", "raise"),
        "schedule": {name: _build_nested(f"schedule.{name}", part, SCHEDULES) for name, part in schedule.items()},
    }


def _flat(parts: Iterable[Any]) -> list[Any]:
    return [one for part in parts for one in parts_of(part) if dataclasses.is_dataclass(one)]


def _check_mapping(name: str, config: Any) -> None:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name} = {config!r}: must be a mapping of a method's fields")


def _unknown(key: Any, allowed: Iterable[str]) -> ConfigError:
    return ConfigError(unknown_name(f"{key}: unknown key", key, allowed))


def _lookup(key: str, name: Any, types: Mapping[str, type]) -> type:
    if not isinstance(name, str) or name not in types:
        raise ConfigError(unknown_name(f"{key} = {name!r}: no such type", name, types))
    return types[name]


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _build_nested(path: str, config: Any, types: Mapping[str, type]) -> Any:
    if not isinstance(config, Mapping):
        raise ConfigError(f'{path} = {config!r}: must be a mapping {{"type": ..., <fields>}}')
    with _prefixed(f"{path}."):
        kind = _lookup("type", config.get("type"), types)
        for key in config:
            if key != "type" and key not in _names(kind):
                raise _unknown(key, ("type", *_names(kind)))
        return _build(kind, {key: value for key, value in config.items() if key != "type" and value is not None})


def _build(kind: type, given: Mapping[str, Any]) -> Any:
    for field_ in dataclasses.fields(kind):
        if field_.default is dataclasses.MISSING and field_.name not in given:
            raise ConfigError(f"{field_.name}: missing; must be {field_.metadata['check'].describe()}")
    return kind(**given)


@contextmanager
def _prefixed(path: str) -> Iterator[None]:
    """Puts a path in front of the key that a ConfigError's message starts with."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from None
