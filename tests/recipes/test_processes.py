"""A run leaves no process and no shared-memory segment behind."""

import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from recipes.processes import SHARED_MEMORY, ProcessTree, sweep_shared_memory

# Starts a daemon as Ray does (own session, parent gone) that ignores SIGTERM; writes its pid; then sleeps.
DAEMON = """
import os, signal, sys, time
from pathlib import Path
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
needs_shm = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm")


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)
    return path.read_text()


def test_daemons_that_ignore_sigterm_are_ended_and_bystanders_are_not(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    tree = ProcessTree([sys.executable, "-c", DAEMON, str(tmp_path / "pid")], dict(os.environ), tmp_path / "log.txt")
    daemon = int(wait_for(tmp_path / "pid"))
    try:
        assert tree.end(grace_seconds=1.0) != 0
        assert not psutil.pid_exists(daemon)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_exit_code_and_output_are_kept(tmp_path):
    tree = ProcessTree([sys.executable, "-c", "print('last words'); raise SystemExit(3)"], dict(os.environ), tmp_path / "log")
    tree.main.wait()
    assert tree.end() == 3 and "last words" in (tmp_path / "log").read_text()


@needs_shm
def test_only_new_unused_segments_of_ours_are_swept():
    old = SHARED_MEMORY / "psm_trustregion_old"
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 100, time.time() - 100))
    other = SHARED_MEMORY / "trustregion_other_name"
    other.write_bytes(b"x")
    stale = SHARED_MEMORY / "verl_weights_trustregion_test"
    stale.write_bytes(b"x")
    used = shared_memory.SharedMemory(name="psm_trustregion_used", create=True, size=16)
    try:
        swept = sweep_shared_memory(since=time.time() - 10)
        assert stale in swept and not stale.exists()
        assert old.exists() and other.exists() and (SHARED_MEMORY / "psm_trustregion_used").exists()
    finally:
        used.close()
        used.unlink()
        for path in (old, other, stale):
            path.unlink(missing_ok=True)
