"""Studies: what is measured of their jobs, which jobs count, and that the tables can be made again from what is kept."""

import csv
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from recipes.errors import UserError
from recipes.results import study
from recipes.results.jobs import Job, read_jobs, write_jobs
from recipes.sweep_records import JobRecord
from recipes.tables import main

ROOT = Path(__file__).resolve().parents[3]
STEPS = 12  # of conftest's runs


def tables(sweep: Path, out: Path, *more: str) -> int:
    return main(["experiment=tiny_study", f"runs={sweep}", f"out={out}", "figures=false", *more])


def rows(out: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(out / "table.csv", newline="") as file:
        return {(row["method"], row["measure"]): row for row in csv.DictReader(file)}


def test_means_differences_and_intervals_over_seeds(make_study, tmp_path):
    """conftest: rewards rise by .02 a step for grpo, by .03 + .01 x seed for clip_higher; between the means of the first and the
    last five of 12 steps lie seven."""
    assert tables(make_study(), tmp_path / "out") == 0
    found = rows(tmp_path / "out")
    grpo, clip = found["grpo", "reward_gain"], found["clip_higher", "reward_gain"]
    assert float(grpo["mean"]) == pytest.approx(7 * 0.02) and float(grpo["mean_half_width"]) == 0 and grpo["seeds"] == "3"
    assert float(clip["mean"]) == pytest.approx(7 * 0.04) and clip["by_seed"] == "0:0.21 1:0.28 2:0.35"
    # .07 apart: standard deviation .07, over the root of 3, times t of two degrees of freedom.
    assert float(clip["mean_half_width"]) == pytest.approx(4.3027 * 0.07 / 3**0.5, rel=1e-5)
    assert float(clip["difference"]) == pytest.approx(0.14) and clip["pairs"] == "3" and grpo["difference"] == ""
    assert float(found["band_kl", "reward_gain"]["difference"]) == pytest.approx(0.14)
    # Seeds start .1 apart: that is in the interval of the mean and not in the one of the paired difference.
    last = found["band_kl", "reward_last"]
    assert float(last["mean_half_width"]) == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-5) and float(last["difference_half_width"]) == 0
    assert float(found["band_kl", "clipped"]["mean"]) == pytest.approx(2.2) and ("grpo", "by_entropy") not in found
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| `clip_higher` | 3 | 0.28 ± 0.17 |" in text and "| `clip_higher` | +0.14 ± 0.17 |" in text
    assert "prompts an update 1, steps 12" in text and "sweep=tiny_study" in text
    assert text.count("not started") == 27 - 9 and "- dppo_topk_kl, seed 2: not started" in text


def test_accuracy_is_of_the_validation_after_the_last_step(make_study, tmp_path):
    sweep = make_study(("grpo", "band_kl"), seeds=(0,))
    file = sweep / "method=band_kl+seed=0" / "validation" / f"{STEPS}.jsonl"
    lines = [{"input": f"{problem}+1=", "score": score} for problem in range(20) for score in (1.0, 0.0 if problem % 2 else 1.0)]
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    assert tables(sweep, tmp_path / "out") == 0
    found = rows(tmp_path / "out")["band_kl", "accuracy"]
    assert float(found["mean"]) == 75 and found["mean_half_width"] == ""  # one seed
    differences = (tmp_path / "out" / "table.md").read_text().split("## Learning: difference to grpo, same seed")[1]
    line = next(line for line in differences.splitlines() if line.startswith("| `band_kl` |"))
    assert line.split("|")[-2].strip().startswith(f"{float(found['difference']):+.1f} [")
    _, (_, job) = read_jobs(tmp_path / "out")
    by_text = sorted(range(20), key=lambda problem: f"{problem}+1=")
    assert job.correct == tuple(2 - problem % 2 for problem in by_text) and job.samples == 2


@pytest.mark.parametrize("tokens", [False, True])
def test_made_again_from_what_is_kept_it_is_the_same_to_the_byte(make_study, tmp_path, tokens):
    assert tables(make_study(seeds=(0, 1), tokens=tokens), tmp_path / "out") == 0
    kept = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "out", kept)
    for name in ("table.md", "table.tex", "table.csv"):
        (kept / name).unlink()
    assert main(["experiment=tiny_study", f"runs={kept}", "figures=false"]) == 0  # into the same folder
    for file in sorted((tmp_path / "out").iterdir()):
        assert (kept / file.name).read_bytes() == file.read_bytes(), file.name
    assert (kept / "tokens.parquet").exists() == tokens
    assert len(list(kept.iterdir())) == 4 + 6 + tokens  # tables and study.json, six jobs


def test_a_committed_study_is_what_its_files_give(tmp_path):
    kept = sorted((ROOT / "docs" / "studies").glob("*/study.json"))
    assert kept
    for file in kept:
        name = json.loads(file.read_text())["study"]
        assert main([f"experiment={name}", f"runs={file.parent}", f"out={tmp_path / name}", "figures=false"]) == 0
        for table in ("table.md", "table.tex", "table.csv"):
            assert (tmp_path / name / table).read_bytes() == (file.parent / table).read_bytes(), f"{file.parent / table}: make it anew"
        assert sum(path.stat().st_size for path in file.parent.rglob("*") if path.is_file()) < 1_000_000


def test_recorded_tokens_keep_their_weight(make_study, tmp_path):
    assert tables(make_study(("grpo",), seeds=(0,), tokens=True), tmp_path / "out") == 0
    _, (job,) = read_jobs(tmp_path / "out")
    assert job.tokens.weight.sum() == pytest.approx(3000) and job.tokens.entropy_ratio.isna().all()
    blocked = job.tokens.cause == "region"
    assert 0 < blocked.sum() < 400 == (~blocked).sum() and (job.tokens.weight[blocked] == 1).all()
    ratio = (job.tokens.log_prob - job.tokens.log_prob_old)[blocked]
    assert ((ratio > 0.18) | (ratio < -0.22)).all()  # beyond 1.2 or .8, to four digits of either


# ---- which jobs ------------------------------------------------------------------------------------------------------
def test_jobs_that_have_not_finished_are_named_and_left_out(make_study, tmp_path, capsys):
    sweep = make_study(("grpo", "band_kl"), seeds=(0, 1))
    JobRecord(sweep, "method=band_kl+seed=1").write(status="interrupted")
    metrics = sweep / "method=band_kl+seed=0" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-3]))
    JobRecord(sweep, "method=band_tv+seed=0").write(status="waiting")
    assert tables(sweep, tmp_path / "out") == 0
    said, text = capsys.readouterr().out, (tmp_path / "out" / "table.md").read_text()
    for line in ("band_kl, seed 1: interrupted after 12 of 12 steps", "band_kl, seed 0: 9 of 12 steps in metrics.jsonl", "band_tv, seed 0: not started"):
        assert line in said and f"- {line}" in text
    assert "python -m recipes.train sweep=tiny_study" in said and {method for method, _ in rows(tmp_path / "out")} == {"grpo"}
    assert main(["experiment=tiny_study", f"runs={tmp_path / 'out'}", "figures=false"]) == 0 and "- band_kl, seed 1: interrupted" in text


def test_nothing_finished_is_said(make_study, tmp_path, capsys):
    sweep = make_study(("grpo",), seeds=(0,))
    JobRecord(sweep, "method=grpo+seed=0").write(status="failed")
    assert tables(sweep, tmp_path / "out") == 2
    assert "no job of sweep=tiny_study has finished. Run them first: python -m recipes.train sweep=tiny_study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer__total_training_steps": 13}, "13 in"),
        ({"data__train_batch_size": 8}, "data.train_batch_size differs between jobs, which are compared at equal budgets: 16 in .*; 8 in "),
        ({"actor_rollout_ref__actor__optim__lr": 1e-3}, "optim.lr differs between jobs"),
        ({"chosen__model": "smollm2_135m"}, "chosen.model differs between jobs"),
        ({"method__eps_low": 0.1}, "method.eps_low = 0.1, and the preset has 0.2: no job of this study"),
        ({"method__schedule": {"eps_low": {}}}, "method.schedule = "),
        ({"seed": "1"}, "seed=1.json: its config has seed = '1' and method = {.*}: no job's"),
        ({"seed": {}}, "its config has seed = {} and"),
        ({"method": None}, "its config has seed = 1 and method = None: no job's"),
        ({"chosen__method": ["grpo"]}, "method=grpo.seed=1: no job of sweep=tiny_study"),
        ({"seed": 7}, "method=grpo.seed=1: no job of sweep=tiny_study"),
        ({"seed": 0}, "method=grpo.seed=0 and method=grpo.seed=1 are both grpo with seed 0"),
    ],
)
def test_jobs_that_cannot_be_compared_are_refused(make_study, tmp_path, capsys, change, message):
    sweep = make_study(("grpo", "band_kl"), seeds=(0, 1), change={("grpo", 1): change})
    with pytest.raises(UserError, match=message):
        study.collect("tiny_study", sweep)
    assert tables(sweep, tmp_path / "out") == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "a", "score": 1.0}\n{"input": "a", "score": 0.0}\n{"input": "b", "score": 0.0}\n', "has 1 to 2 responses a prompt"),
        ('{"input": "a", "sco', "line 1: is no validation sample"),
        ("", "has 0 to 0 responses a prompt"),
        ("\udcff", "line 1: is no validation sample .UnicodeDecodeError"),
        ("[" * 100_000, "line 1: is no validation sample .RecursionError"),
    ],
)
def test_damaged_validation_is_refused(make_study, text, message):
    sweep = make_study(("grpo",), seeds=(0,))
    (sweep / "method=grpo+seed=0" / "validation" / f"{STEPS}.jsonl").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=message):
        study.collect("tiny_study", sweep)


def test_responses_may_have_any_separator_of_lines(make_study):
    sweep = make_study(("grpo",), seeds=(0,))
    line = json.dumps({"input": "a", "output": "a\u2028b\x85c", "score": 1.0}, ensure_ascii=False)  # as verl writes it
    (sweep / "method=grpo+seed=0" / "validation" / f"{STEPS}.jsonl").write_text(line + "\n", encoding="utf-8")
    assert study.collect("tiny_study", sweep)[1][0].correct == (1,)


def test_what_was_no_number_at_the_end_has_no_end(make_study, tmp_path):
    sweep = make_study(("grpo",), seeds=(0,))
    file = sweep / "method=grpo+seed=0" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[STEPS // 2 :]:
        line["data"]["actor/entropy"] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tables(sweep, tmp_path / "out") == 0
    found = rows(tmp_path / "out")
    assert "- grpo, seed 0: of 12 steps, entropy in 6: no finite number there" in (tmp_path / "out" / "table.md").read_text()
    assert ("grpo", "entropy_last") not in found and ("grpo", "entropy_kept") not in found and ("grpo", "reward_last") in found


@pytest.mark.parametrize("text", ["[]", "3", "[" * 100_000])
def test_records_of_another_kind_are_none(make_study, text):
    sweep = make_study(("grpo", "band_kl"), seeds=(0,))
    (sweep / "jobs" / "method=grpo+seed=0.json").write_text(text)
    assert [job.method for job in study.collect("tiny_study", sweep)[1]] == ["band_kl"]


@pytest.mark.parametrize(("column", "value"), [("step", "x"), ("log_prob", "x"), ("advantage", None)])
def test_token_records_of_another_kind_are_named(make_study, column, value):
    sweep = make_study(("grpo",), seeds=(0,), tokens=True)
    file = sweep / "method=grpo+seed=0" / "tokens" / "2.parquet"
    pd.read_parquet(file).assign(**{column: value}).to_parquet(file, index=False)
    with pytest.raises(UserError, match="grpo.seed=0/tokens: .* Remove the damaged file"):
        study.collect("tiny_study", sweep)


def test_damaged_token_records_are_named(make_study):
    sweep = make_study(("grpo",), seeds=(0,), tokens=True)
    (sweep / "method=grpo+seed=0" / "tokens" / "2.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="grpo.seed=0/tokens: .* Remove the damaged file, or run the job again"):
        study.collect("tiny_study", sweep)


def test_without_validation_there_is_no_accuracy(make_study, tmp_path):
    sweep = make_study(("grpo", "band_kl"), seeds=(0, 1))
    for folder in sweep.glob("*/validation"):
        shutil.rmtree(folder)
    assert tables(sweep, tmp_path / "out") == 0
    assert ("grpo", "accuracy") not in rows(tmp_path / "out") and "accuracy, %" not in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize("damage", ["grpo-seed0.csv", "study.json", "tokens.parquet"])
def test_damaged_files_are_named(make_study, tmp_path, capsys, damage):
    tables(make_study(("grpo",), seeds=(0,), tokens=True), tmp_path / "out")
    (tmp_path / "out" / damage).write_text("{")
    if damage == "grpo-seed0.csv":
        (tmp_path / "out" / damage).unlink()
    assert main(["experiment=tiny_study", f"runs={tmp_path / 'out'}", "figures=false"]) == 2
    assert f"{tmp_path / 'out'}: its files are damaged or not all there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept.pop("setting"),
        lambda kept: kept.update(left_out=3),
        lambda kept: kept.update(jobs=[]),
        lambda kept: kept["jobs"].append(kept["jobs"][0]),
        lambda kept: kept["jobs"][0].update(steps=None),
        lambda kept: kept["jobs"][0].update(steps=13),
        lambda kept: kept["jobs"][0].update(samples=0),
    ],
)
def test_a_changed_study_is_refused(make_study, tmp_path, capsys, change):
    tables(make_study(("grpo",), seeds=(0,)), tmp_path / "out")
    file = tmp_path / "out" / "study.json"
    kept = json.loads(file.read_text())
    change(kept)
    file.write_text(json.dumps(kept))
    assert main(["experiment=tiny_study", f"runs={tmp_path / 'out'}", "figures=false"]) == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("change", [lambda text: text[:-30], lambda text: text.replace("0.32", "nan", 1), lambda text: text[:-1] + ",9\n", lambda text: ""])
def test_a_changed_series_is_refused(make_study, tmp_path, change):
    tables(make_study(("grpo",), seeds=(0,)), tmp_path / "out")
    file = tmp_path / "out" / "grpo-seed0.csv"
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match="grpo-seed0.csv has "):
        read_jobs(tmp_path / "out")


def test_what_is_kept_is_read_again(tmp_path):
    job = Job("grpo", 3, 2, {"reward": {1: 0.5, 2: 1 / 3}, "entropy": {2: 1e-7}}, (0, 8, 3), 8)
    write_jobs(tmp_path, {"study": "x"}, [job])
    about, (found,) = read_jobs(tmp_path)
    assert about == {"study": "x"} and found.correct == (0, 8, 3) and found.accuracy.tolist() == [0, 1, 0.375]
    assert found.series == {"reward": {1: 0.5, 2: 0.333333}, "entropy": {2: 1e-7}} and found.tokens.empty
    write_jobs(tmp_path, {}, [Job("grpo", 4, 0, {})])
    assert not (tmp_path / "grpo-seed3.csv").exists()  # no job of another study stays behind
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "my-seed1.csv").touch()
    write_jobs(tmp_path / "elsewhere", {}, [job])
    assert (tmp_path / "elsewhere" / "my-seed1.csv").exists()


def test_the_studies_are_the_sweeps_that_are_called_so():
    found = study.studies()
    assert found.keys() == {"tiny_study", "smollm2_study"} and len(found["tiny_study"]) == 27
    assert found["tiny_study"][:2] == [("grpo", 0), ("grpo", 1)] and found["smollm2_study"] == [("grpo", 0), ("band_kl", 0)]
    assert [study.model_of(name) for name in ("tiny_study", "smollm2_study")] == ["tiny", "smollm2_135m"]
