"""Runs beside each other: what is measured of them, what differs, and a page that needs nothing else."""

import json
import math
import re

import pytest
import yaml

from recipes.comparison import Run, compare, config_differences, later
from recipes.errors import UserError
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
    folders = [run("a", [1.0], {"x": {"lr": 1, "same": 3}}), run("b", [1.0], {"x": {"lr": 2, "same": 3, "more": [1]}})]
    runs = [Run(folder, folder.name, None, yaml.safe_load((folder / "config.yaml").read_text())) for folder in folders]
    assert config_differences(runs) == [["x.lr", "1", "2"], ["x.more", "-", "[1]"]]  # not run_dir


def test_runs_of_one_step_and_of_the_same_name(run, tmp_path):
    a, b = run("a/x", [1.0]), run("b/x", [math.nan])
    page = compare([a, b], tmp_path / "page").read_text()
    assert str(a) in page and str(b) in page


def test_what_is_no_run_is_said(run, tmp_path, capsys):
    with pytest.raises(UserError, match="none: no finished training step"):
        compare([run("a", [1.0]), tmp_path / "none"], tmp_path / "page")
    assert main([str(tmp_path / "none")]) == 2 and "error: " in capsys.readouterr().err
    assert not (tmp_path / "page").exists()
