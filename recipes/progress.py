"""What the terminal shows while a run goes on: a spinner until the first step, then one line a step."""

import time

from rich.console import Console

FAILED = {"training": "training/rollout_failure/prompts", "validation": "validation/rollout_failure/prompts"}
COLUMNS = ("step", "reward", "entropy", "clipped", "seconds")


def first_of(data: dict, *keys: str) -> float | None:
    """The value of the first key that the row has."""
    return next((data[key] for key in keys if key in data), None)


def step_values(row: dict) -> dict[str, float | None]:
    """The few figures of one row of metrics.jsonl that the terminal and the summary show, by column."""
    data = row["data"]
    return {
        "step": row["step"],
        "reward": first_of(data, "critic/rewards/mean"),
        "entropy": first_of(data, "actor/entropy", "actor/entropy_loss"),
        "clipped": first_of(data, "trust/clip_fraction"),
        "seconds": first_of(data, "timing_s/step"),
    }


def _format(column: str, value, total: int | None) -> str:
    if value is None:
        return "-"
    match column:
        case "step":
            return f"{value}/{total}" if total else str(value)
        case "clipped":
            return f"{value:.3%}"
        case "seconds":
            return f"{value:.1f}"
    return f"{value:.3f}"


class StepLines:
    """Context manager; `show(rows)` prints those rows of metrics.jsonl that are training steps; `shown` counts them."""

    def __init__(self, console: Console, total_steps: int | None):
        self.shown = 0
        self._console, self._total = console, total_steps
        self._started = time.monotonic()
        self._status = console.status("", refresh_per_second=2)  # a livelier one takes 5 % of two cores

    def __enter__(self):
        self._status.start()
        return self

    def __exit__(self, *_exc):
        self._status.stop()

    def show(self, rows: list[dict]):
        for row in rows:
            values = step_values(row)
            if values["reward"] is None:  # validation before the first step
                continue
            if self.shown == 0:
                waited = time.monotonic() - self._started
                self._console.print(f"ready and first step done after {waited:.0f} s")
                self._console.print("".join(f"{column:>10}" for column in COLUMNS), style="bold")
            self._console.print("".join(f"{_format(c, values[c], self._total):>10}" for c in COLUMNS))
            self.shown += 1
            for what, key in FAILED.items():
                if lost := row["data"].get(key):
                    told = f"{lost:.0f} {what} prompts lack responses: the agent loop or the reward function failed. `Error in _run_prompt` in log.txt says why"
                    self._console.print(told, style="yellow", soft_wrap=True)
        waited = time.monotonic() - self._started
        doing = "training" if self.shown else "starting Ray, FSDP and vLLM (a minute or two)"
        self._status.update(f"{doing} ... {waited:.0f} s")
