"""What is known of each job of a sweep: one file a job, SWEEP/jobs/NAME.json, beside its run folder SWEEP/NAME.

Written by the process that runs the job, wherever that is, with NAME.lock locked for as long: files are all that jobs, the
process that started them and the table have in common.
"""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from trustregion.verl_plugin.checkpoints import write_whole

WAITING, RUNNING, FINISHED, FAILED, INTERRUPTED, KILLED = "waiting", "running", "finished", "failed", "interrupted", "killed"
KINDS = {"status": str, "varied": dict, "config": dict, "error": str, "command": list}


@dataclass(frozen=True)
class JobRecord:
    """One job.

    Args:
        sweep: the sweep's folder.
        name: of the job, and of its run folder in the sweep's.
    """

    sweep: Path
    name: str

    @property
    def folder(self) -> Path:
        return self.sweep / self.name

    @property
    def path(self) -> Path:
        return self.sweep / "jobs" / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        """status, varied (key -> value), config, error, command; those that are known, {} for a job that never was."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict) or any(not isinstance(found[key], kind) for key, kind in KINDS.items() if key in found):
            return {}  # not as it was written here
        if found.get("status") == FINISHED and "config" not in found:
            return {}
        if found.get("status") == RUNNING and not self._is_locked():
            found["status"] = KILLED  # its process is gone and could not say so
        return found

    def write(self, **values):
        """Replaces these values and keeps the others."""
        known = self.read() | values
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(known, indent=1))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Raises UserError where another process has the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._lock, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.folder} is being written by another process. Wait for it, or end it.") from None
            yield

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".lock")

    def _is_locked(self) -> bool:
        try:
            with open(self._lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def read_records(sweep: Path) -> list[JobRecord]:
    return [JobRecord(sweep, path.stem) for path in sorted((sweep / "jobs").glob("*.json"))]
