"""Validated fields for the frozen dataclasses that describe a method: each says what it means and what it may be.

A dataclass whose fields come from `number()` and `choice()` and that inherits from `Validated` checks itself on
construction, so a value is checked the same way whether it comes from Python, a preset or the command line.
"""

import dataclasses
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used. The message starts with the key and says what is allowed and what to do."""


@dataclasses.dataclass(frozen=True)
class _Number:
    meaning: str
    above: float
    at_most: float
    infinity_ok: bool
    whole: bool

    def describe(self) -> str:
        kind = "whole number" if self.whole else "number"
        limit = f" and <= {self.at_most:g}" if self.at_most < math.inf else ""
        infinity = ", .inf allowed" if self.infinity_ok else ""
        return f"a {kind} > {self.above:g}{limit} ({self.meaning}{infinity})"

    def parse(self, value: Any) -> float | int | None:
        """The value as a float (an int where it has to be whole), or None where it is not an allowed number."""
        if isinstance(value, bool) or not isinstance(value, Real):  # True is no radius, "0.1" no number
            return None
        try:
            parsed = float(value)
        except OverflowError:  # an integer beyond the float range
            return None
        in_range = self.above < parsed <= self.at_most  # false for nan
        if not in_range or not (self.infinity_ok or math.isfinite(parsed)) or (self.whole and not parsed.is_integer()):
            return None
        return int(parsed) if self.whole else parsed


@dataclasses.dataclass(frozen=True)
class _Choice:
    meaning: str
    options: tuple[str, ...]

    def describe(self) -> str:
        return f"one of {', '.join(self.options)} ({self.meaning})"

    def parse(self, value: Any) -> str | None:
        return value if isinstance(value, str) and value in self.options else None


def number(
    meaning: str,
    *,
    above: float,
    at_most: float = math.inf,
    infinity_ok: bool = False,
    whole: bool = False,
    default: Any = dataclasses.MISSING,
) -> Any:
    """A numeric dataclass field in (above, at_most]. With `default=None` the field may be left out (null in YAML)."""
    check = _Number(meaning, above, at_most, infinity_ok, whole)
    return dataclasses.field(default=default, metadata={"check": check})


def choice(meaning: str, options: Sequence[str], *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that holds one of a few names."""
    return dataclasses.field(default=default, metadata={"check": _Choice(meaning, tuple(options))})


class Validated:
    """Base of a frozen dataclass of `number()` and `choice()` fields. Raises ConfigError on construction."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check, value = field.metadata["check"], getattr(self, field.name)
            if value is None and field.default is None:
                continue
            parsed = check.parse(value)
            if parsed is None:
                or_null = ", or null" if field.default is None else ""
                raise ConfigError(f"{field.name} = {value!r}: must be {check.describe()}{or_null}")
            object.__setattr__(self, field.name, parsed)
