"""How the kernels are built, found and refused: for each, in processes of its own."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trustregion.ops import build

pytestmark = pytest.mark.slow  # each in processes of its own, some of which compile
ROOT = Path(__file__).resolve().parents[2]
USE = "import torch, trustregion; from trustregion import ops; trustregion.band_bounds(torch.zeros(3)); print(ops.describe())"


def python(code: str, package: Path = ROOT, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRUSTREGION_")}
    environment = clean | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "MAX_JOBS": "2"} | environment
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", code], env=environment, cwd=package, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def answer(process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@pytest.fixture
def unbuilt(tmp_path):
    """The package without its libraries."""
    shutil.copytree(ROOT / "trustregion", tmp_path / "trustregion", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def test_without_a_library_everything_is_pure_torch_with_one_warning(unbuilt):
    code, out, err = answer(python(f"{USE}\ntrustregion.band_bounds(torch.zeros(3))", unbuilt))
    assert code == 0, err
    assert "pure torch on cpu (_cpu.so was not built" in out
    assert err.count("UserWarning: trustregion computes in pure torch on cpu") == 1 and "TRUSTREGION_JIT=1" in err


def test_insisting_on_a_library_that_is_not_there_is_an_error(unbuilt):
    code, _, err = answer(python(USE, unbuilt, TRUSTREGION_OPS="native"))
    assert code == 1 and "RuntimeError: TRUSTREGION_OPS = 'native', but there are no kernels for cpu: _cpu.so was not" in err


def test_torch_can_be_chosen_and_nothing_else_is_a_choice(unbuilt):
    code, out, err = answer(python(USE, TRUSTREGION_OPS="torch"))
    assert code == 0 and out.startswith("pure torch, as TRUSTREGION_OPS says") and "Warning" not in err
    code, _, err = answer(python(USE, unbuilt, TRUSTREGION_OPS="cuda"))
    assert code == 1 and "TRUSTREGION_OPS = 'cuda': must be torch or native" in err


def test_a_library_of_other_sources_is_not_used(unbuilt):
    library = ROOT / "trustregion" / "_cpu.so"
    if not library.exists():
        pytest.skip("the kernels are not built")
    shutil.copy(library, unbuilt / "trustregion")
    (unbuilt / "trustregion" / "csrc" / "cuda.h").write_text("// changed\n")
    code, out, _ = answer(python(USE, unbuilt))
    assert code == 0 and "was built from other sources than these: install again" in out


@pytest.mark.parametrize(("wanted", "message"), [
    ("gpu", "must be one of none, cpu, cuda"), ("cuda", "cuda kernels cannot be built: "), ("cpu", "cpu kernels cannot be built: no C++"),
])
def test_the_build_says_what_it_cannot_do(monkeypatch, wanted, message):
    import torch

    if wanted == "cuda" and torch.version.cuda:
        pytest.skip("this torch has CUDA")
    monkeypatch.setenv("TRUSTREGION_BUILD", wanted)
    if wanted == "cpu":
        monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(RuntimeError, match=re.escape(message)):
        build.setup_arguments(ROOT)


def test_what_is_skipped_is_skipped_with_a_reason(monkeypatch, capsys):
    monkeypatch.setenv("TRUSTREGION_BUILD", "none")
    assert build.setup_arguments(ROOT) == {}
    assert capsys.readouterr().err.count("kernels skipped: TRUSTREGION_BUILD is none") == 2
    monkeypatch.delenv("TRUSTREGION_BUILD")
    monkeypatch.setenv("CXX", "/no/compiler")
    assert build.setup_arguments(ROOT) == {}
    assert "cpu kernels skipped: no C++ compiler '/no/compiler' on PATH" in capsys.readouterr().err


def test_a_toolkit_that_does_not_fit_is_named(tmp_path):
    for nowhere in (None, str(tmp_path)):
        assert "no nvcc" in build.toolkit_obstacle(nowhere, "13.0")
    nvcc, headers = tmp_path / "bin" / "nvcc", tmp_path / "targets" / "x86_64-linux" / "include"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    assert "not CUDA's headers: set CUDA_HOME" in build.toolkit_obstacle(str(tmp_path), "12.8")
    headers.mkdir(parents=True)
    (headers / "cuda_runtime_api.h").touch()
    assert "is CUDA 12.4, torch of CUDA 13.0: set CUDA_HOME" in build.toolkit_obstacle(str(tmp_path), "13.0")
    assert build.toolkit_obstacle(str(tmp_path), "12.8") is None


def test_every_source_belongs_to_one_library():
    parts = build.parts()
    assert not set(parts["cpu"]) & set(parts["cuda"])
    assert {*parts["cpu"], *parts["cuda"]} == {f for f in build.SOURCES.iterdir() if f.suffix in (".cpp", ".cu")}
    assert runpy.run_path(str(ROOT / "trustregion" / "ops" / "build.py"))["source_hash"]() == build.source_hash()


@pytest.mark.slow
@pytest.mark.long
def test_many_processes_compile_once_and_a_killed_one_is_no_obstacle(unbuilt):
    cache = unbuilt / "cache"
    settings = {"TRUSTREGION_JIT": "1", "TRUSTREGION_CACHE": str(cache), "TRUSTREGION_OPS": "native", "CXXFLAGS": "-O0"}
    first = python(USE, unbuilt, **settings)
    deadline = time.monotonic() + 120
    while not list(cache.glob("*.so.*/temp/**/*.o*")):  # it is compiling
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    others = [python(USE, unbuilt, **settings) for _ in range(7)]
    time.sleep(2)
    first.send_signal(signal.SIGKILL)
    for process in others:
        code, out, err = answer(process)
        assert code == 0 and out.startswith("native on cpu"), err
    first.communicate()
    libraries = list(cache.glob("*.so"))
    assert len(libraries) == 1
    before = libraries[0].stat().st_mtime_ns
    assert answer(python(USE, unbuilt, **settings, CXX="/no/compiler"))[0] == 0  # from the cache
    assert libraries[0].stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize("ninja", [True, False])
def test_a_failed_compilation_is_an_error_or_a_warning(unbuilt, ninja):
    (unbuilt / "trustregion" / "csrc" / "operators.cpp").write_text("#error no\n")
    settings = {"TRUSTREGION_JIT": "1", "TRUSTREGION_CACHE": str(unbuilt / "cache")}
    if not ninja:
        os.makedirs(unbuilt / "bin")
        for tool in ("c++", "g++", "as", "ld", "which"):
            if shutil.which(tool):
                os.symlink(shutil.which(tool), unbuilt / "bin" / tool)
        settings["PATH"] = str(unbuilt / "bin")
    code, out, err = answer(python(USE, unbuilt, **settings))
    assert code == 0 and "compiling the cpu kernels failed" in out and "UserWarning" in err, out + err
    assert not list((unbuilt / "cache").glob("*.so")) and not list((unbuilt / "cache").glob("*.so.*/"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", sorted(build.SOURCES.glob("*.cu")), ids=lambda file: file.name)
def test_cuda_kernels_compile_without_spills(source, architecture, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    flags = [*build.NVCC_FLAGS, "-std=c++17", "-Xptxas", "-v", "-arch", architecture, "-Werror", "all-warnings"]
    done = subprocess.run(
        ["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "kernels.o")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(spills) >= 1 and set(spills) == {("0", "0")}, done.stderr
