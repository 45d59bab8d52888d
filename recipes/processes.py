"""Starting the driver and leaving nothing behind: no process, no shared memory, no temporary file, however the run ends."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = Path("/dev/shm")
WEIGHT_SEGMENTS = "verl_weights_*"  # verl's, each mapped for as long as it is in use
PYTHON_SEGMENTS = "psm_*"  # vLLM's, and those of any other Python program
LOOK_SECONDS = 2.0
LONGEST_FOLDER = 60  # the path of a Unix socket has at most 107 characters, and vLLM adds 37 to the folder's


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
        self._started, self._look_at = time.time(), 0.0
        self._segments: set[str] = set()  # of PYTHON_SEGMENTS: those that a process of the tree had mapped
        with open(log, "ab") as out:
            self.main = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def poll(self) -> int | None:
        """The main process's exit code, or None while it runs. To be called often: it notes what end() has to sweep."""
        if time.monotonic() >= self._look_at:
            self._note_segments()
            self._look_at = time.monotonic() + LOOK_SECONDS
        return self.main.poll()

    def end(self, grace_seconds: float = 5.0) -> int:
        """Ends what is left of the tree and sweeps its shared memory; returns the main process's exit code."""
        self._note_segments()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + grace_seconds
            while self._alive(signum) and time.monotonic() < deadline:
                time.sleep(0.1)
        code = self.main.wait()
        sweep_shared_memory(self._started, self._segments)
        return code

    def _note_segments(self):
        # Another program's segment may be in use at a moment when nobody has it mapped: its name alone says nothing.
        unknown = {str(path) for path in SHARED_MEMORY.glob(PYTHON_SEGMENTS)} - self._segments
        if unknown:
            self._segments |= unknown & _mapped_files([self.main.pid, *(process.pid for process in self._started_since())])

    def _started_since(self) -> list[psutil.Process]:
        """All descendants but those that were there before the tree, and its main process."""
        found = psutil.Process().children(recursive=True)
        return [process for process in found if process not in self._others and process.pid != self.main.pid]

    def _alive(self, signum: int) -> bool:
        """Sends the signal to all that is left; false when nothing is."""
        running = self.main.poll() is None
        if running:
            self.main.send_signal(signum)  # first: it would start others anew
        left = self._started_since()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        psutil.wait_procs(left, timeout=0)  # reaps the orphans among them
        return running or bool(left)


def sweep_shared_memory(since: float, noted: Iterable[str] = ()) -> list[Path]:
    """Removes verl's segments and those `noted` that were made after `since` (seconds since the epoch), belong to this
    user and are used by no process any more. Returns their paths."""
    mapped = _mapped_files(int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    swept = []
    for segment in [*SHARED_MEMORY.glob(WEIGHT_SEGMENTS), *map(Path, noted)]:
        with contextlib.suppress(OSError):
            stat = segment.stat()
            if stat.st_uid == os.getuid() and stat.st_mtime >= since and str(segment) not in mapped:
                segment.unlink()
                swept.append(segment)
    return swept


def _mapped_files(pids: Iterable[int]) -> set[str]:
    """The files in shared memory that one of these processes has mapped."""
    mapped = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            mapped.update(line.split(maxsplit=5)[5].strip() for line in maps if str(SHARED_MEMORY) in line)
    return mapped


@contextlib.contextmanager
def private_temporary_files(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """`environment` with a folder for temporary files that goes when the run does: vLLM and wandb leave theirs behind.

    Ray's logs and torch's compiled code outlive the run, where they would be without this.
    """
    common = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="trustregion-", ignore_cleanup_errors=True) as folder:
        if len(folder) > LONGEST_FOLDER:
            yield environment
        else:
            kept = {"RAY_TMPDIR": common, "TORCHINDUCTOR_CACHE_DIR": f"{common}/torchinductor_{os.getuid()}"}
            yield {**kept, **environment, "TMPDIR": folder}
