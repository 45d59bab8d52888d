"""A method's configuration, typed and validated: flat as in the presets and on the command line, or nested.

    flat:    {"region": "divergence_ball", "divergence": "kl", "delta": 0.05, "surrogate": "clip", "anchor": "old"}
    nested:  {"region": {"type": "divergence_ball", "divergence": "kl", "delta": 0.05}, "surrogate": {"type": "clip"}}

Types are looked up by name in `REGIONS` and `SURROGATES`: nothing that a configuration names is ever imported.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trustregion.fields import ConfigError
from trustregion.regions import REGIONS, Region
from trustregion.surrogates import SURROGATES, Surrogate

ANCHORS = ("old", "rollout")


@dataclass(frozen=True)
class MethodConfig:
    """A method: region x surrogate x anchor.

    Args:
        region, surrogate: what `PolicyLoss` is made of.
        anchor: which policy `log_prob_old` belongs to: `old`, recomputed by the trainer before the first update, or
            `rollout`, as the inference engine sampled.

    Raises:
        ConfigError: the surrogate cannot use the region, or the anchor is unknown.
    """

    region: Region
    surrogate: Surrogate
    anchor: str = "old"

    def __post_init__(self):
        check_fit(self.region, self.surrogate)
        if self.anchor not in ANCHORS:
            raise ConfigError(
                f"anchor = {self.anchor!r}: must be one of {', '.join(ANCHORS)} (old: log-probs that the trainer "
                "recomputes; rollout: log-probs that the inference engine sampled with)"
            )

    @classmethod
    def from_flat(cls, config: Mapping[str, Any]) -> "MethodConfig":
        """From one mapping of `region`, `surrogate`, `anchor` and the fields of both. A null field counts as not set.

        Raises ConfigError, whose message starts with `method.<key>`.
        """
        with _prefixed("method."):
            return cls._from_flat(config)

    @classmethod
    def _from_flat(cls, config: Mapping[str, Any]) -> "MethodConfig":
        region, surrogate = _lookup("region", config, REGIONS), _lookup("surrogate", config, SURROGATES)
        region_fields, surrogate_fields = _names(region), _names(surrogate)
        used = ["region", "surrogate", "anchor", *region_fields, *surrogate_fields]
        known = {name for kind in (*REGIONS.values(), *SURROGATES.values()) for name in _names(kind)}
        for key, value in config.items():
            if key in used or (key in known and value is None):
                continue
            if key in known:
                raise ConfigError(
                    f"{key} = {value!r}: not a field of region {config['region']!r} or surrogate "
                    f"{config['surrogate']!r}; remove it or set it to null. Allowed: {', '.join(used)}"
                )
            raise _unknown(key, used)
        given = {key: value for key, value in config.items() if value is not None}
        return cls(
            region=_build(region, {name: given[name] for name in region_fields if name in given}),
            surrogate=_build(surrogate, {name: given[name] for name in surrogate_fields if name in given}),
            anchor=given.get("anchor", "old"),
        )

    @classmethod
    def from_nested(cls, config: Mapping[str, Any]) -> "MethodConfig":
        """From `{"region": {"type": ..., **fields}, "surrogate": {"type": ..., **fields}, "anchor": ...}`.

        Raises ConfigError, whose message starts with the key's path.
        """
        for key in config:
            if key not in ("region", "surrogate", "anchor"):
                raise _unknown(key, ("region", "surrogate", "anchor"))
        parts = {}
        for part, types in (("region", REGIONS), ("surrogate", SURROGATES)):
            fields = config.get(part)
            if not isinstance(fields, Mapping):
                raise ConfigError(f'{part} = {fields!r}: must be a mapping {{"type": ..., <fields>}}')
            with _prefixed(f"{part}."):
                kind = _lookup("type", fields, types)
                for key in fields:
                    if key != "type" and key not in _names(kind):
                        raise _unknown(key, ("type", *_names(kind)))
                parts[part] = _build(kind, {key: value for key, value in fields.items() if key != "type"})
        return cls(**parts, anchor=config.get("anchor", "old"))


def check_fit(region: Region, surrogate: Surrogate) -> None:
    """Raises ConfigError where the surrogate cannot use the region, or would ignore one of its fields."""
    name = type(surrogate).__name__.lower()
    if surrogate.needs_interval and not region.has_interval:
        raise ConfigError(
            f"surrogate = {name!r}: needs a region that is an interval of ratios, and {type(region).__name__} is none; "
            "use surrogate 'mask'"
        )
    if not surrogate.needs_interval:
        for field in getattr(region, "interval_only", ()):
            if getattr(region, field) is not None:
                raise ConfigError(
                    f"{field} = {getattr(region, field)!r}: shapes an interval, and surrogate {name!r} uses none; "
                    "remove it (null), or use surrogate 'clip'"
                )


def unknown_name(what: str, name: Any, allowed: Iterable[str]) -> str:
    """`what` has no `name`, the nearest name that exists, and all of them."""
    allowed = list(allowed)
    close = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.7)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{what}.{hint} Allowed: {', '.join(allowed)}"


def _unknown(key: Any, allowed: Iterable[str]) -> ConfigError:
    return ConfigError(unknown_name(f"{key}: unknown key", key, allowed))


def _lookup(key: str, config: Mapping[str, Any], types: Mapping[str, type]) -> type:
    name = config.get(key)
    if not isinstance(name, str) or name not in types:
        raise ConfigError(unknown_name(f"{key} = {name!r}: no such type", name, types))
    return types[name]


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _build(kind: type, given: Mapping[str, Any]) -> Any:
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in given:
            raise ConfigError(f"{field.name}: missing; must be {field.metadata['check'].describe()}")
    return kind(**given)


@contextmanager
def _prefixed(path: str) -> Iterator[None]:
    """Puts a path in front of the key that a ConfigError's message starts with."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from None
