"""python -m recipes.tables: what it is given, and what it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes import tables
from recipes.tables import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=bandp"], "experiment=bandp: no such experiment. Did you mean 'bandpo'? Allowed: bandpo, dppo, erc, smollm2_study, tiny_study"),
        ([], "missing mandatory value: experiment"),
        (["bandpo"], "bandpo: must be key=value. Keys: experiment, runs, out, run, figures"),
        (["experiment=bandpo", "fork=1"], "Key 'fork' not in"),
        (["experiment=bandpo", "run=perhaps"], "Value 'perhaps' is not a valid bool"),
        (["experiment=bandpo", "runs=none"], "runs=none: no such folder. Leave runs=... out for runs/bandpo"),
        (["experiment=tiny_study"], "nothing is there yet (no runs/tiny_study-*/jobs). Run it, then this again: python -m recipes.train sweep=tiny_study"),
        (["experiment=tiny_study", "runs=none"], "runs=none: no study is there: neither a sweep's folder (jobs/) nor a table's (study.json)"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_study_is_found_by_its_name_unless_there_are_two(make_study, tmp_path, monkeypatch, capsys):
    sweep = make_study(("grpo",), seeds=(0,))
    monkeypatch.chdir(tmp_path)
    assert main(["experiment=tiny_study", "figures=false"]) == 0 and (tmp_path / "runs" / "tables" / "tiny_study" / "table.md").is_file()
    (sweep.parent / "tiny_study-other" / "jobs").mkdir(parents=True)
    assert main(["experiment=tiny_study"]) == 2
    assert "runs/tiny_study-other, runs/tiny_study-tiny are there. Choose one with runs=..." in capsys.readouterr().err


def test_one_study_is_not_taken_for_another(make_study, tmp_path, capsys):
    main(["experiment=tiny_study", f"runs={make_study(('grpo',), seeds=(0,))}", f"out={tmp_path / 'out'}", "figures=false"])
    assert main(["experiment=smollm2_study", f"runs={tmp_path / 'out'}"]) == 2
    assert "holds the study 'tiny_study': give that as experiment=..." in capsys.readouterr().err


def test_a_table_among_the_runs_does_not_hide_them(make_study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = make_study(("grpo",), seeds=(0,))
    assert main(["experiment=tiny_study", f"runs={sweep}", f"out={sweep}", "figures=false"]) == 0
    make_study(("band_kl",), seeds=(0,))
    assert main(["experiment=tiny_study", f"runs={sweep}", "figures=false"]) == 0 and "tiny_study: 2 of 27 jobs" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["007", "1e5", "{x", "a: b", "a=b", "it's", "<b>ü", "[x]", "~", "-"])
def test_folders_of_any_name(make_study, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    make_study(("grpo",), seeds=(0,), tokens=True).rename(tmp_path / name)
    assert main(["experiment=tiny_study", f"runs={name}", f"out={name}/out", "figures=false"]) == 0
    assert (tmp_path / name / "out" / "table.md").is_file()


@pytest.mark.parametrize("out", ["file", "file/below", "table", "figures"])
@pytest.mark.parametrize("experiment", ["bandpo", "tiny_study"])
def test_what_cannot_be_written_is_named(make_study, tmp_path, capsys, monkeypatch, experiment, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "table" / "table.md").mkdir(parents=True)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "figures").touch()
    make_study(("grpo",), seeds=(0,))
    assert main([f"experiment={experiment}", f"out={out}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: out={out}: cannot write {out}")


@pytest.fixture
def ran(monkeypatch):
    """The commands that were run; they end with `ran.code` and do nothing."""

    class Ran(list):
        code = 0

        def __call__(self, command):
            self.append(command)
            return subprocess.CompletedProcess(command, self.code)

    found = Ran()
    monkeypatch.setattr(tables.subprocess, "run", found)
    return found


def test_run_runs_what_is_missing_and_only_that(make_arm, ran, tmp_path, capsys):
    make_arm("bandpo/grpo", 0)
    assert main(["experiment=bandpo", f"runs={tmp_path / 'runs' / 'bandpo'}", f"out={tmp_path / 'out'}", "figures=false", "run=true"]) == 0
    said = [" ".join(command[1:]) for command in ran]
    assert {command[0] for command in ran} == {sys.executable}
    assert not any("recipes.train experiment=bandpo/grpo runs" in command for command in said)
    assert any(f"recipes.evaluate model={tmp_path}/runs/bandpo/grpo-0 benchmarks=[amc23,aime24,aime25] n=32" in command for command in said)
    assert sum("recipes.train experiment=bandpo/band_kl " in command for command in said) == 3  # its own model, and two of published numbers


def test_run_stops_at_what_this_machine_cannot_do(ran, tmp_path, capsys):
    ran.code = 2
    assert main(["experiment=erc", f"runs={tmp_path / 'erc'}", f"out={tmp_path / 'out'}", "run=true"]) == 2
    said = capsys.readouterr().err
    assert len(ran) == 1 and "ended with exit code 2, for the reason above" in said and "Run it on a machine that has what it needs" in said


def test_run_of_a_study_is_its_sweep(ran, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["experiment=smollm2_study", "run=true"]) == 2  # nothing has come of it
    assert ran == [[sys.executable, "-m", "recipes.train", "sweep=smollm2_study", "runs=runs", "name=smollm2_study-smollm2_135m"]]


@pytest.mark.slow
def test_without_matplotlib_there_are_tables(make_study, tmp_path):
    sweep = make_study(("grpo", "band_kl"), seeds=(0,))
    code = (  # in a process of its own, where matplotlib was never imported
        "import sys; sys.modules['matplotlib'] = None\nfrom recipes.tables import main\n"
        f"sys.exit(main(['experiment=tiny_study', 'runs={sweep}', 'out={tmp_path / 'out'}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert "no figures: matplotlib is not installed (pip install 'trustregion[plots]')" in done.stdout
    assert (tmp_path / "out" / "table.md").is_file()
