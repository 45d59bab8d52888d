"""Folders that are made once: whole or not at all, whoever is killed and however many ask at once."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from recipes.assets.folders import MANIFEST, build_once
from recipes.errors import UserError


class Builder:
    def __init__(self, text="hello"):
        self.calls, self.text = 0, text

    def __call__(self, folder: Path):
        self.calls += 1
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text(self.text)


def in_another_process(body: str, *arguments) -> subprocess.Popen:
    program = "import os, sys, time, signal\nfrom pathlib import Path\nfrom recipes.assets.folders import build_once\n" + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)])


def test_is_made_once(tmp_path):
    build = Builder()
    folder = build_once(tmp_path / "deep" / "x", {"version": 1}, build)
    assert (folder / "sub" / "a.txt").read_text() == "hello"
    assert json.loads((folder / MANIFEST).read_text())["recipe"] == {"version": 1}
    assert build_once(tmp_path / "deep" / "x", {"version": 1}, build) == folder
    assert build.calls == 1


def test_is_made_again_when_the_recipe_changes(tmp_path):
    folder = build_once(tmp_path / "x", {"version": 1}, Builder("old"))
    (folder / "extra").write_text("of the old one")
    build_once(folder, {"version": 2}, Builder("new"))
    assert (folder / "sub" / "a.txt").read_text() == "new" and not (folder / "extra").exists()
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("hel"), lambda file: (file.parent.parent / MANIFEST).write_text('{"rec')])
def test_damage_is_noticed(tmp_path, damage):
    folder = build_once(tmp_path / "x", {}, Builder())
    damage(folder / "sub" / "a.txt")
    if (folder / MANIFEST).read_text() == '{"rec':  # no longer known to be ours
        with pytest.raises(UserError, match=MANIFEST):
            build_once(folder, {}, Builder())
    else:
        build_once(folder, {}, Builder())
        assert (folder / "sub" / "a.txt").read_text() == "hello"


def test_a_failed_build_leaves_nothing_and_keeps_what_was_there(tmp_path):
    def fail(folder):
        (folder / "half").write_text("...")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        build_once(tmp_path / "new", {}, fail)
    folder = build_once(tmp_path / "old", {"version": 1}, Builder())
    with pytest.raises(RuntimeError, match="out of luck"):
        build_once(folder, {"version": 2}, fail)
    assert (folder / "sub" / "a.txt").exists()
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == ["old"]


def test_somebody_elses_folder_is_left_alone(tmp_path):
    mine = tmp_path / "x"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"was not made by this recipe.*model=folder"):
        build_once(mine, {}, Builder())
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("place", ["file/x", "file/y/x", "/proc/x", "/proc/y/x"])
def test_a_place_that_cannot_be_written_to(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"cannot make .*{place}.*assets=\.\.\."):
        build_once(tmp_path / place, {}, Builder())


def test_an_error_of_the_build_is_not_mistaken_for_that(tmp_path):
    with pytest.raises(FileNotFoundError, match="of the build's own"):
        build_once(tmp_path / "x", {}, lambda part: (part / "of the build's own").read_bytes())


def test_killed_midway(tmp_path):
    killed = in_another_process(
        """
        def build(folder):
            (folder / "a.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        build_once(sys.argv[1], {}, build)
        """,
        tmp_path / "x",
    )
    assert killed.wait(30) == -9
    assert not (tmp_path / "x").exists() and len(list(tmp_path.glob(".x.*.part"))) == 1
    (tmp_path / ".x.y.abc.part").mkdir()  # what another process is writing for the folder x.y
    assert (build_once(tmp_path / "x", {}, Builder()) / "sub" / "a.txt").exists()
    assert [p.name for p in tmp_path.glob(".x.*.part")] == [".x.y.abc.part"]


def test_two_processes_at_once(tmp_path):
    body = """
        def build(folder):
            with open(sys.argv[2], "a") as log:
                log.write("built\\n")
            (folder / "a.txt").write_text("whole")
            time.sleep(0.5)
        folder = build_once(sys.argv[1], {}, build)
        assert (folder / "a.txt").read_text() == "whole"
        """
    both = [in_another_process(body, tmp_path / "x", tmp_path / "log") for _ in range(2)]
    assert [process.wait(30) for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"
