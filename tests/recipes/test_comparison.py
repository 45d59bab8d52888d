"""Runs beside each other: what is measured of them, what differs, and a page that needs nothing else."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml

from recipes.comparison import Run, _look, compare, config_differences, later
from recipes.errors import UserError
from recipes.page import escape
from recipes.report import main
from recipes.series import fluctuation, variance


@pytest.fixture
def run(tmp_path):
    """run("a", entropy=[...], config={...}) -> its folder."""

    def run(name: str, entropy: list[float], config: dict | None = None):
        folder = tmp_path / name
        (folder / "samples").mkdir(parents=True)
        rows = []
        for step, value in enumerate(entropy, start=1):
            data = {"critic/rewards/mean": step / 10, "actor/entropy": value, "timing_s/step": 9.0 if step == 1 else 2.0, "actor/grad_norm": 1.0}
            data |= {"trust/clip_fraction_up/0-0.01": 0.25, "trust/divergence_p99": 0.001 * step, "trust/clip_fraction_up": 0.0}
            rows.append(json.dumps({"step": step, "data": data}))
        (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        (folder / "config.yaml").write_text(yaml.safe_dump({"run_dir": str(folder), "seed": 0, **(config or {})}))
        for step in (2, 10):
            row = {"input": "3+4=", "output": f"<b>{name}{step}</b>", "score": 1.0}
            (folder / "samples" / f"{step}.jsonl").write_text(json.dumps(row) + "\n" + '{"inp')
        return folder

    return run


def test_fluctuation_is_relative_and_variance_is_not():
    steady = dict.fromkeys(range(20), 2.0)
    restless = {step: 2.0 + 0.2 * (-1) ** step for step in range(20)}
    assert set(fluctuation(steady).values()) == {0.0} == set(variance(steady).values())
    for factor in (1, 10):
        scaled = {step: factor * value for step, value in restless.items()}
        assert fluctuation(scaled)[10] == pytest.approx(10, rel=0.15)  # 0.2 about 2
        assert variance(scaled)[10] == pytest.approx(0.04 * factor**2, rel=0.3)
    drift = {step: 1.0 + step for step in range(20)}  # a trend alone is no fluctuation
    assert max(list(fluctuation(drift).values())[6:14]) < 1e-6
    assert fluctuation({1: 1.0, 2: 2.0}) == {} == variance({1: 1.0, 2: 2.0})
    assert later({1: 9.0, 2: 1.0}) == {2: 1.0} and later({1: 9.0}) == {1: 9.0}


def test_the_page_needs_nothing_else(run, tmp_path, capsys):
    a, b = run("a", [1.0] * 20, {"lr": 1}), run("b", [1.0 + 0.1 * (-1) ** n for n in range(20)], {"lr": 2, "new": None})
    assert main([str(a), str(b), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert str(tmp_path / "page" / "index.html") in capsys.readouterr().out
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|<script", page)
    pictures = {path.stem for path in (tmp_path / "page").glob("*.png")}
    assert {"reward_and_validation", "entropy", "gradient", "clipped_tokens_by_old_probability__upper_bound"} <= pictures
    assert page.count("data:image/png;base64,") == len(pictures)
    assert "p in 0-0.01, % of the bucket</td><td>25.000</td>" in page and "p in 0.8-1" not in page  # what was not logged
    assert "&lt;b&gt;a10&lt;/b&gt;" in page and "b10" in page and "<b>a10" not in page  # of the last step, and as text
    assert "whole step</td><td>2.000</td>" in page


def test_what_differs_between_configurations_is_listed(run, tmp_path):
    """Also what holds the folder's name by chance: here 1 and 2."""
    config = {"name": "1", "x": {"lr": 1, "same": 3, "method": "m1", "files": str(tmp_path / "1" / "samples")}}
    other = {"name": "2", "x": {"lr": 2, "same": 3, "method": "m2", "files": str(tmp_path / "2" / "samples"), "more": [b"1"]}}
    folders = [run("1", [1.0], config), run("2", [1.0], other)]
    runs = [Run(folder, folder.name, None, yaml.safe_load((folder / "config.yaml").read_text())) for folder in folders]
    assert config_differences(runs) == [["x.lr", "1", "2"], ["x.method", '"m1"', '"m2"'], ["x.more", "-", '["b\'1\'"]']]  # not run_dir


def test_runs_of_one_step_and_of_the_same_name(run, tmp_path):
    a, b = run("a/x", [1.0]), run("b/x", [math.nan])
    page = compare([a, b], tmp_path / "page").read_text()
    assert str(a) in page and str(b) in page


def test_what_is_no_run_is_said(run, tmp_path, capsys):
    with pytest.raises(UserError, match="none: no finished training step"):
        compare([run("a", [1.0]), tmp_path / "none"], tmp_path / "page")
    assert main([str(tmp_path / "none")]) == 2 and "error: " in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


def test_the_last_steps_are_those_of_the_run(run, tmp_path):
    """The entropy is lost after step 12: there is no mean of the last five, and the page says so."""
    folder = run("a", [1.0] * 12 + [math.nan] * 8)
    with open(folder / "metrics.jsonl", "a") as file:
        for step, value in ((0, 0.25), (10, 0.75)):
            file.write(json.dumps({"step": step, "data": {"val-core/x": value}}) + "\n")
    text = compare([folder], tmp_path / "page").read_text()
    assert "Entropy: entropy, nats a token</td><td>-</td>" in text and "validation: x, the last</td><td>0.750</td>" in text
    assert "a: not a finite number: actor/entropy in 8 of 20 steps, first in step 13; left out" in text


def test_rewards_of_0_are_shown(run, tmp_path):
    folder = run("a", [0.0] * 3)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "data": {"critic/rewards/mean": 0.0, "val-core/x": 0}}) + "\n" for n in (1, 2)))
    text = compare([folder], tmp_path / "page").read_text()
    assert "validation: reward</td><td>0</td>" in text and "validation: x, the last</td><td>0</td>" in text


def test_ten_runs_have_ten_lines():
    assert len({tuple(_look(nth).items()) for nth in range(10)}) == 10


@pytest.mark.parametrize("value", [1e299, -1e299, 1e-320, "a", True])
def test_numbers_of_any_size_are_drawn(run, tmp_path, value):
    folder = run("a", [1.0, 2.0] * 8)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        row["data"] |= dict.fromkeys(("critic/rewards/mean", "actor/grad_norm", "trust/divergence_p99", "val-core/\ud800"), value)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare([folder], tmp_path / "page").is_file()


@pytest.mark.parametrize("output", ["a\ud800b", "\x00\x1b[31m\u202egnorw", "</pre><script>alert(1)</script>", None])
def test_completions_are_shown_as_text(run, tmp_path, output):
    folder = run("a", [1.0])
    (folder / "samples" / "11.jsonl").write_text(json.dumps({"input": "p", "output": output, "score": 1.0}) + "\n" + "[" * 100_000 + "\n")
    (folder / "samples" / "12\u00b2.jsonl").touch()
    text = compare([folder], tmp_path / "page").read_text(encoding="utf-8")
    shown = {None: "None", "a\ud800b": "a\\ud800b"}.get(output) or ("\\x00\\x1b[31m\\u202egnorw" if "gnorw" in output else "&lt;script&gt;")
    assert shown in text and "<script" not in text


@pytest.mark.parametrize("config", ["chosen: {method: [1]}", 'chosen: {method: "\\ud800"}', "[" * 3000, "3", "x: !!binary aGk="])
def test_any_configuration_will_do(run, tmp_path, config):
    folders = [run("a", [1.0]), run("b", [1.0])]
    (folders[0] / "config.yaml").write_text(config)
    assert compare(folders, tmp_path / "page").is_file()


@pytest.mark.parametrize("name", ["a'b", "100%", "<b>", "$x_$", "_a", b"\xff"])
def test_folders_of_any_name(run, tmp_path, monkeypatch, name):
    folder = run("first", [1.0]).rename(tmp_path / os.fsdecode(name))
    monkeypatch.chdir(folder)
    text = compare([Path(".")], tmp_path / "page").read_text()
    assert f"<h1>{escape(folder.name)}</h1>" in text


def test_a_run_that_is_given_twice_is_refused(run, tmp_path):
    folder = run("a", [1.0])
    with pytest.raises(UserError, match=r"a/\.\./a: is given twice"):
        compare([folder, folder / ".." / "a"], tmp_path / "page")


@pytest.mark.parametrize("out", ["file", "file/below", "page"])
def test_a_page_that_cannot_be_written(run, tmp_path, capsys, out):
    folder = run("a", [1.0])
    (tmp_path / "file").touch()
    (tmp_path / "page" / "index.html").mkdir(parents=True)
    assert main([str(folder), "--out", str(tmp_path / out)]) == 2
    assert f"error: --out {tmp_path / out}: cannot write" in capsys.readouterr().err
