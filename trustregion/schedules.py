"""Radii and bands that change over training: fixed in advance, or steered to hold a clip fraction.

A schedule belongs to one field of a region or surrogate (`delta`, `delta_high`, `beta_low`, ...) and starts from the
value that the field has in the configuration; so one side alone is the field of that side. `Scheduler` keeps the state
of all schedules of a method, from one training step to the next and through a checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trustregion.fields import ConfigError, Validated, number


class Schedule(Protocol):
    """How one field changes. Stateless: what has to be remembered is the field's last value."""

    def extremes(self, field: str, start: float) -> tuple[float, ...]:
        """The most extreme values that the field will take, to be checked before training.

        Raises ConfigError where the schedule does not go with the field or its value.
        """
        ...

    def value(self, step: int, start: float, last: float) -> float:
        """The value at training step `step` (1 is the first). `last`: that of the step before, after `observe`."""
        ...

    def observe(self, field: str, last: float, metrics: Mapping[str, float]) -> float:
        """The value to go on from, given what a step that used `last` has measured (`LossStats.summarize`)."""
        ...


class _Open:
    """A schedule that looks at nothing but the step."""

    def observe(self, field: str, last: float, metrics: Mapping[str, float]) -> float:
        return last


@dataclass(frozen=True)
class Constant(_Open, Validated):
    """The value the field has."""

    def extremes(self, field: str, start: float) -> tuple[float, ...]:
        return (start,)

    def value(self, step: int, start: float, last: float) -> float:
        return start


@dataclass(frozen=True)
class Linear(_Open, Validated):
    """From the field's value at the first step to `end` at step 1 + `steps`, in a straight line.

    Args:
        end: the last value, in the field's range.
        steps: how many training steps it takes, >= 1.
    """

    end: float = number("the value to end at", above=0)
    steps: int = number("training steps until then", above=0, whole=True)

    def extremes(self, field: str, start: float) -> tuple[float, ...]:
        return (start, self.end)

    def value(self, step: int, start: float, last: float) -> float:
        progress = self._progress(step)
        value = (1 - progress) * start + progress * self.end
        return min(max(value, min(start, self.end)), max(start, self.end))  # rounding must not leave the field's range

    def _progress(self, step: int) -> float:
        return min(max((step - 1) / self.steps, 0.0), 1.0)


@dataclass(frozen=True)
class Cosine(Linear):
    """As `Linear`, but along half a cosine: slow at either end."""

    def _progress(self, step: int) -> float:
        return 0.5 - 0.5 * math.cos(math.pi * super()._progress(step))


@dataclass(frozen=True)
class TargetClipFraction(Validated):
    """Widens or narrows the region until a given share of the tokens is clipped (ERC's authors see 15-25 %).

    After each step the value is multiplied by e^(rate error), error = (measured - target) / target within [-1, 1].
    Measured is the share that the field's own side clips: see `MEASURED`.

    Args:
        target: share of tokens, in (0, 1].
        smallest, largest: limits of the value, in the field's range and around the value it starts from.
        rate: how fast; 0.1 changes the value by at most about 10 % a step. In (0, 1].
    """

    target: float = number("the share of tokens to clip, e.g. 0.2", above=0, at_most=1)
    smallest: float = number("the field's smallest value", above=0)
    largest: float = number("the field's largest value", above=0)
    rate: float = number("the largest relative change a step, e.g. 0.1", above=0, at_most=1, default=0.1)

    def extremes(self, field: str, start: float) -> tuple[float, ...]:
        if field not in MEASURED:
            raise ConfigError(
                f"{field}.type = 'target_clip_fraction': this field clips no tokens of its own; it goes with "
                f"{', '.join(MEASURED)}"
            )
        if not self.smallest <= start <= self.largest:
            raise ConfigError(
                f"{field}.smallest, {field}.largest = {self.smallest!r}, {self.largest!r}: must lie around the value "
                f"to start from, {field} = {start!r}"
            )
        return (self.smallest, self.largest)

    def value(self, step: int, start: float, last: float) -> float:
        return last

    def observe(self, field: str, last: float, metrics: Mapping[str, float]) -> float:
        error = (metrics[MEASURED[field]] - self.target) / self.target
        moved = last * math.exp(self.rate * min(max(error, -1.0), 1.0))
        return min(max(moved, self.smallest), self.largest)


# What `TargetClipFraction` looks at, by field.
MEASURED = {
    "delta": "trust/clip_fraction",
    "delta_low": "trust/clip_fraction_down",
    "delta_high": "trust/clip_fraction_up",
    "eps_low": "trust/clip_fraction_down",
    "eps_high": "trust/clip_fraction_up",
    "beta_low": "trust/entropy_lost_fraction",
    "beta_high": "trust/entropy_gained_fraction",
}

SCHEDULES: dict[str, type] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "target_clip_fraction": TargetClipFraction,
}


class Scheduler:
    """The schedules of a method at work.

        scheduler = method.scheduler()
        for step in range(1, steps + 1):
            loss = PolicyLoss.from_method(method).with_values(scheduler.values(step))
            ...
            scheduler.observe(stats.summarize())

    Args:
        schedules: by field, as in `MethodConfig.schedule`.
        start: by field, the value it has in the configuration.
    """

    def __init__(self, schedules: Mapping[str, Schedule], start: Mapping[str, float]):
        self._schedules, self._start = dict(schedules), dict(start)
        self._last = dict(start)

    def values(self, step: int) -> dict[str, float]:
        """The fields' values at training step `step`, which counts from 1. Asking again changes nothing."""
        for name, schedule in self._schedules.items():
            self._last[name] = schedule.value(step, self._start[name], self._last[name])
        return {name: self._last[name] for name in self._schedules}

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Takes in what the step has measured: `LossStats.summarize()` over all its tokens."""
        for name, schedule in self._schedules.items():
            self._last[name] = schedule.observe(name, self._last[name], metrics)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep; JSON will do."""
        return {"values": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint. Fields that are not scheduled any more are left out."""
        self._last |= {name: value for name, value in state["values"].items() if name in self._schedules}
