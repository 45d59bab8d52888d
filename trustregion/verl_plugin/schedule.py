"""A method's schedules in the trainer: values for each step, and their state beside verl's checkpoint."""

import json
from pathlib import Path

from trustregion import MethodConfig

FILE = "trust_region.json"


class TrainerSchedule:
    """`trustregion.Scheduler` of the run's method, with a file."""

    def __init__(self, method: MethodConfig):
        self._scheduler = method.scheduler()

    def values(self, step: int) -> dict[str, float]:
        return self._scheduler.values(step)

    def observe(self, metrics: dict[str, float]) -> dict[str, float]:
        """Takes in a step's `trust/*` metrics. Returns the values that the step has used, as metrics of their own."""
        used = {f"trust/{name}": value for name, value in self._scheduler.state_dict()["values"].items()}
        self._scheduler.observe(metrics)
        return used

    def save(self, folder: str | Path):
        """Writes the state into a checkpoint's folder."""
        (Path(folder) / FILE).write_text(json.dumps(self._scheduler.state_dict()))

    def load(self, folder: str | Path):
        """Goes on from a checkpoint's folder. One without our file, from another trainer, starts the schedules anew."""
        file = Path(folder) / FILE
        if file.exists():
            self._scheduler.load_state_dict(json.loads(file.read_text()))
