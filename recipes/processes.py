"""Starting the driver and leaving nothing behind: no process, no shared-memory segment, however the run ends."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_NAMES = ("psm_*", "verl_weights_*")  # vLLM's and verl's


def _prctl(option: int, value: int):
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent():
    """Ask the kernel to end this process when the one that started it is gone. Linux."""
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before we asked
        sys.exit(1)


class ProcessTree:
    """A process in a session of its own, with everything that it starts, daemons included.

    This process becomes the reaper of orphans (Linux), so that a daemon of Ray whose parent has gone is still found
    among its descendants.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path):
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._others = set(psutil.Process().children(recursive=True))
        self._started = time.time()
        with open(log, "ab") as out:
            self.main = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def end(self, grace_seconds: float = 5.0) -> int:
        """Ends what is left of the tree and sweeps its shared memory; returns the main process's exit code."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + grace_seconds
            while self._alive(signum) and time.monotonic() < deadline:
                time.sleep(0.1)
        code = self.main.wait()
        sweep_shared_memory(self._started)
        return code

    def _alive(self, signum: int) -> bool:
        """Sends the signal to all that is left; false when nothing is."""
        running = self.main.poll() is None
        if running:
            self.main.send_signal(signum)  # first: it would start others anew
        left = [p for p in psutil.Process().children(recursive=True) if p not in self._others and p.pid != self.main.pid]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        psutil.wait_procs(left, timeout=0)  # reaps the orphans among them
        return running or bool(left)


def sweep_shared_memory(since: float) -> list[Path]:
    """Removes segments of vLLM and verl that were made after `since` (seconds since the epoch), are ours and are used
    by no process any more. Returns their paths."""
    mapped = _mapped_files()
    swept = []
    for pattern in SEGMENT_NAMES:
        for segment in SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):
                stat = segment.stat()
                if stat.st_uid == os.getuid() and stat.st_mtime >= since and str(segment) not in mapped:
                    segment.unlink()
                    swept.append(segment)
    return swept


def _mapped_files() -> set[str]:
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped.update(line.split(maxsplit=5)[5].strip() for line in maps.open() if str(SHARED_MEMORY) in line)
    return mapped
