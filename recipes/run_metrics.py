"""metrics.jsonl of a run that may be stopped at any moment and gone on with: each step once, in order.

verl's logger empties its file when it opens it. So it is given another, and whole rows are taken over from there.
"""

import json
from pathlib import Path

from recipes.new_lines import NewLines
from trustregion.verl_plugin.checkpoints import write_whole

METRICS, LOGGED = "metrics.jsonl", "metrics.new.jsonl"


class RunMetrics:
    """`run_dir`/metrics.jsonl, with what a launcher that was killed had not yet taken over.

    `steps` are those of its rows. Before verl's logger opens its file (`logged`) again, make another of these.
    """

    def __init__(self, run_dir: Path):
        self.logged, self._path = run_dir / LOGGED, run_dir / METRICS
        text = self._path.read_bytes() if self._path.exists() else b""
        rows = _each_once(_whole_rows(text.splitlines(keepends=True)))
        if text != b"".join(rows):  # cut by a kill, or not only ours
            self._write(rows)
        self.steps, self._new = [_step(row) for row in rows], NewLines(self.logged)
        self.take_over()
        self.logged.unlink(missing_ok=True)
        self._new = NewLines(self.logged)

    def take_over(self) -> list[dict]:
        """Appends what the logger has written since the last call, and returns it. A row replaces those of its own and
        of all later steps: they are being trained again."""
        rows = _whole_rows(self._new())
        for row in rows:
            if self.steps and _step(row) <= self.steps[-1]:
                before = _whole_rows(self._path.read_bytes().splitlines(keepends=True))
                self._write([old for old in before if _step(old) < _step(row)])
                self.steps = [step for step in self.steps if step < _step(row)]
            with open(self._path, "ab") as file:
                file.write(row)
            self.steps.append(_step(row))
        return [json.loads(row) for row in rows]

    def _write(self, rows: list[bytes]):
        write_whole(self._path, b"".join(rows).decode())


def _whole_rows(lines: list[bytes]) -> list[bytes]:
    rows = []
    for line in lines:
        try:
            _step(line)
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        if line.endswith(b"\n"):
            rows.append(line)
    return rows


def _each_once(rows: list[bytes]) -> list[bytes]:
    """In order of their steps; of one that is there twice, the later row."""
    return [row for _, row in sorted({_step(row): row for row in rows}.items())]


def _step(row: bytes) -> int:
    return int(json.loads(row)["step"])
