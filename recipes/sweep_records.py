"""What is known of each job of a sweep: one file a job, SWEEP/jobs/NAME.json, beside its run folder SWEEP/NAME.

Written by the process that runs the job, wherever that is, which locks NAME.lock for as long: files are all that jobs, the
process that started them and the table have in common.
"""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config_changes import OF_NO_EFFECT, OF_THE_LAUNCHER, differences
from recipes.errors import UserError
from recipes.run_files import FINISHED as RUN_FINISHED
from recipes.run_files import read_config

WAITING, RUNNING, FINISHED, FAILED, INTERRUPTED, KILLED = "waiting", "running", "finished", "failed", "interrupted", "killed"
TYPES = {"status": str, "error": str, "command": list, "varied": dict, "config": dict}


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

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(f"{self.name}.lock")

    def read(self) -> dict[str, Any]:
        """status, varied (key -> value), config, error, command; those that are known, {} for a job that never was.

        A run that left both its config.yaml and that it finished has finished, whatever became of its record; config is the
        run's, and varied is missing, where they were lost with it.
        """
        found = self._read()
        if found.get("status") == RUNNING:
            if self._is_locked():
                return found
            found["status"] = KILLED  # its process is gone and could not say so
        if found.get("status") != FINISHED and (self.folder / RUN_FINISHED).is_file() and (config := read_config(self.folder / "config.yaml")):
            found = {"config": config} | found | {"status": FINISHED, "error": ""}
        return found

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        whole = isinstance(found, dict) and all(isinstance(found.get(key, kind()), kind) for key, kind in TYPES.items())
        return found if whole and (found.get("status") != FINISHED or {"config", "varied"} <= found.keys()) else {}

    def write(self, **values):
        """Replaces these values and keeps the others."""
        from trustregion.verl_plugin.checkpoints import write_whole  # here: it takes torch along, 2 s that the table needs not wait

        known = self.read() | values
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(known, indent=1))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Raises UserError where another process has the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._lock_path, "a") as file:  # not the record, which each write replaces
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.folder} is being written by another process. Wait for it, or end it.") from None
            yield

    def _is_locked(self) -> bool:
        try:
            with open(self._lock_path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True


def read_records(sweep: Path) -> list[JobRecord]:
    return [JobRecord(sweep, path.stem) for path in sorted((sweep / "jobs").glob("*.json"))]


def changes(known: dict, config: dict) -> list[str]:
    """In what `config` differs from that with which a job, of which this is known, has finished."""
    return differences(known["config"], config, OF_NO_EFFECT if "varied" in known else OF_NO_EFFECT + OF_THE_LAUNCHER)
