"""A run leaves no process, no shared-memory segment and no temporary file behind."""

import os
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from recipes.processes import SHARED_MEMORY, ProcessTree, private_temporary_files, sweep_shared_memory

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


@pytest.fixture
def segment():
    """segment(name) -> the path of a new segment that nobody has mapped."""
    made = []

    def segment(name: str) -> Path:
        made.append(SHARED_MEMORY / name)
        made[-1].write_bytes(b"x")
        return made[-1]

    yield segment
    for path in made:
        path.unlink(missing_ok=True)


@needs_shm
def test_only_new_unused_segments_are_swept(segment):
    old = segment("verl_weights_trustregion_old")
    os.utime(old, (time.time() - 100, time.time() - 100))
    stale, noted, other = segment("verl_weights_trustregion"), segment("psm_trustregion_noted"), segment("psm_trustregion_other")
    used = shared_memory.SharedMemory(name="psm_trustregion_used", create=True, size=16)
    try:
        swept = sweep_shared_memory(time.time() - 10, {str(noted), str(SHARED_MEMORY / used.name)})
        assert set(swept) == {stale, noted} and not stale.exists() and not noted.exists()
        assert old.exists() and other.exists() and (SHARED_MEMORY / used.name).exists()
    finally:
        used.close()
        used.unlink()


# Makes a segment as vLLM does, which nothing removes when the process is killed; writes its name; then sleeps.
LEAKS = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
segment = shared_memory.SharedMemory(create=True, size=16)
resource_tracker.unregister(segment._name, "shared_memory")
Path(sys.argv[1]).write_text(segment.name)
time.sleep(60)
"""


@needs_shm
@pytest.mark.parametrize("seen_by", ["poll", "end"])
def test_segments_of_the_tree_are_swept_and_those_of_other_programs_are_not(tmp_path, segment, seen_by):
    theirs = segment("psm_trustregion_bystander")
    tree = ProcessTree([sys.executable, "-c", LEAKS, str(tmp_path / "name")], dict(os.environ), tmp_path / "log.txt")
    ours = SHARED_MEMORY / wait_for(tmp_path / "name")
    if seen_by == "poll":
        assert tree.poll() is None
        tree.main.kill()
        tree.main.wait()
    assert ours.exists()
    tree.end()
    assert not ours.exists() and theirs.exists()


def test_temporary_files_go_when_the_run_does(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    code = "import tempfile; print(tempfile.mkstemp()[1])"
    with private_temporary_files({**os.environ, "RAY_TMPDIR": "/mine"}) as environment:
        left = Path(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip())
        assert left.exists() and left.is_relative_to(environment["TMPDIR"])
        assert environment["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/torch") and environment["RAY_TMPDIR"] == "/mine"
        assert len(f"{environment['TMPDIR']}/{uuid.uuid4()}") <= 107
    assert not left.parent.exists()
    with private_temporary_files({}) as environment:
        assert environment["RAY_TMPDIR"] == "/tmp"


def test_no_path_of_a_socket_becomes_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 10)))
    (tmp_path / ("long" * 10)).mkdir()
    with private_temporary_files({"A": "b"}) as environment:
        assert environment == {"A": "b"}
