"""Papers' tables: our numbers and others' in one row, what is missing, and what may not be put together."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.errors import UserError
from recipes.results import paper
from recipes.results.paper import PAPERS, published_key, tabulate
from recipes.results.paper_runs import arms_of, find_runs
from recipes.results.published import read_published
from recipes.tables import main

RNG = np.random.default_rng(0)
SEEDS = [{name: (RNG.random((10, 32)) < np.linspace(0, 1, 10)[:, None]).tolist() for name in ("amc23", "aime24", "aime25")} for _ in range(2)]


def bandpo(tmp_path, *more: str) -> tuple[int, str, list[dict]]:
    """Exit code, table.md and the rows of table.csv."""
    code = main(["experiment=bandpo", f"runs={tmp_path / 'runs' / 'bandpo'}", f"out={tmp_path / 'out'}", "figures=false", *more])
    if code:
        return code, "", []
    with open(tmp_path / "out" / "table.csv", newline="") as file:
        return code, (tmp_path / "out" / "table.md").read_text(), [*csv.DictReader(file)]


def line(text: str, start: str) -> list[str]:
    return [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith(start)).split("|")[1:-1]]


def complaint(tmp_path, capsys) -> str:
    capsys.readouterr()
    assert bandpo(tmp_path)[0] == 2 and not (tmp_path / "out").exists()
    return capsys.readouterr().err


def test_ours_and_the_published_number_stand_beside_each_other(make_arm, tmp_path):
    for seed, verdicts in enumerate(SEEDS):
        make_arm("bandpo/band_kl", seed, verdicts, model="qwen2.5-3b-instruct")
    code, text, rows = bandpo(tmp_path)
    assert code == 0
    cells = line(text, "| qwen2.5-3b-instruct | `band_kl` | 2 |")
    means = {name: 100 * np.mean([seed[name] for seed in SEEDS]) for name in SEEDS[0]}
    assert cells[3].startswith(f"{means['amc23']:.1f} [") and "published" not in cells[3]
    assert cells[6].startswith(f"{np.mean([*means.values()]):.1f} [") and cells[6].endswith("; published 22 (1)")
    assert "1. BandPO 2603.04918; secondary; delta .05; +25.2 % relative" in text
    (row,) = [row for row in rows if (row["model"], row["arm"], row["benchmark"], row["metric"]) == ("qwen2.5-3b-instruct", "band_kl", "aime24", "mean@32")]
    low, value, high = (float(row[key]) for key in ("low", "value", "high"))
    assert low < value < high and value == pytest.approx(means["aime24"], rel=1e-5) and row["seeds"] == "2" and row["published"] == ""
    assert row["by_seed"] == " ".join(f"{nth}:{100 * np.mean(seed['aime24']):.6g}" for nth, seed in enumerate(SEEDS))
    # The average's interval is of 30 problems, three benchmarks of ten each: tighter than one benchmark's.
    (average,) = [row for row in rows if (row["arm"], row["benchmark"], row["metric"], row["seeds"]) == ("band_kl", "average", "mean@32", "2")]
    assert float(average["high"]) - float(average["low"]) < 0.75 * (high - low) and average["published"] == "22"
    assert {row["metric"] for row in rows if row["value"]} == {"mean@32", "best@32(bootstrap)"}


def test_the_same_samples_give_the_same_bytes(make_arm, tmp_path):
    folder = make_arm("bandpo/grpo", 0, SEEDS[0])
    bandpo(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    file = folder / "eval" / "samples" / "amc23.jsonl"
    header, *lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([header, *reversed(lines)]))
    bandpo(tmp_path)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} and before.keys() == {"table.md", "table.tex", "table.csv"}


def test_every_arm_has_a_row_and_a_command_that_exists(configure, tmp_path):
    """With nothing there yet."""
    (tmp_path / "runs" / "bandpo").mkdir(parents=True)
    code, text, rows = bandpo(tmp_path)
    assert code == 0 and not any(row["value"] for row in rows)
    for arm in arms_of("bandpo"):
        assert line(text, f"| r1-distill-qwen-7b | `{arm}` |")[2:] == [""] * 5
        assert f"python -m recipes.train experiment=bandpo/{arm} runs={tmp_path}" in text
    assert "experiment=bandpo/band_kl model=qwen2.5-3b-instruct" in text  # published, for another model than the arm's own
    assert line(text, "| r1-distill-llama-8b | baseline |")[-2:] == ["published 54.8 (5)", ""]
    train, evaluate = paper.missing("bandpo", Path("runs/bandpo"), [], read_published())[:2]
    config = configure(*(word for word in train[3:] if word.startswith("experiment")))
    for override in OverridesParser.create().parse_overrides(train[4:]):
        assert override.key_or_group in ("runs", "name") or override.value() is not None
    assert config.chosen.experiment == "bandpo/band_chi2" and evaluate[3] == "model=runs/bandpo/band_chi2-0" and "runs=runs/bandpo/band_chi2-0" in evaluate


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_the_arms_models_are_those_that_hydra_composes(configure, name):
    arms = arms_of(name)
    for arm in ([*arms][0], [*arms][-1], *[arm for arm in arms if arm == "moe_thinking"]):
        config = configure(f"experiment={name}/{arm}")
        assert (config.chosen.model, config.chosen.experiment) == (arms[arm], f"{name}/{arm}")


def test_published_numbers_find_their_arms():
    by_paper = {name: {published_key(PAPERS[name], one): one for one in read_published() if one.paper.startswith(PAPERS[name].sources)} for name in PAPERS}
    assert by_paper["erc"]["r1-distill-qwen-7b", "erc_dapo", "average", "mean@32"].value == 66.2
    assert by_paper["erc"]["r1-distill-qwen-7b", "dapo", "hmmt25", "mean@32"].source == "CE-GPPO v5, paper Table 1"
    assert by_paper["dppo"]["r1-distill-qwen-1.5b", "stability", "aime24", "mean@32 peak"].value == 40
    # Not the arm stability_grpo, which clips at .2/.2; nor our average, which is without AIME26.
    assert by_paper["dppo"]["r1-distill-qwen-1.5b", "grpo clip-higher", "aime24", "mean@32 peak"].value == 34
    assert ("qwen3-8b-base", "dppo_topk_tv (K=20)", "average(AIME24;25;26)", "mean@16") in by_paper["dppo"]
    assert sum(map(len, by_paper.values())) == len(read_published())  # each in one table, none lost


def test_tables_show_every_published_number():
    for name in PAPERS:
        tables, sources, rows = tabulate(name, [], read_published())
        shown = sum(cell.count("published ") for table in tables for row in table.rows for cell in row)
        assert shown == sum(row["published"] is not None for row in rows) > 0 and sources


# ---- what is half done, or mixed up ------------------------------------------------------------------------------------
def test_what_has_not_finished_is_named_and_left_out(make_arm, tmp_path, capsys):
    unfinished = make_arm("bandpo/grpo", 0, SEEDS[0], finished=False)
    halved = make_arm("bandpo/band_kl", 0, SEEDS[0])
    make_arm("bandpo/clip_higher", 0)
    file = halved / "eval" / "samples" / "aime25.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    code, text, rows = bandpo(tmp_path)
    assert code == 0 and not any(row["value"] for row in rows)
    said = capsys.readouterr().out
    assert f"left out: {unfinished}: has not finished" in said and f"left out: {file}: has 319 of 320 samples" in said
    assert f"- {unfinished}: has not finished" in text
    assert f"recipes.evaluate model={tmp_path}/runs/bandpo/clip_higher-0" in said and "recipes.train experiment=bandpo/clip_higher" not in said
    assert f"recipes.evaluate model={halved}" in said


def test_runs_of_other_papers_are_not_ours(make_arm, tmp_path):
    make_arm("erc/dapo", 0, SEEDS[0])
    (tmp_path / "runs" / "erc").rename(tmp_path / "runs" / "bandpo")
    assert not any(row["value"] for row in bandpo(tmp_path)[2])


def test_samples_in_the_wrong_folder_are_found_out(make_arm, tmp_path, capsys):
    a = make_arm("bandpo/grpo", 0, SEEDS[0])
    make_arm("bandpo/band_kl", 0, SEEDS[1], model_sha256=a.name)
    assert "are samples of the same weights. Remove what was copied" in complaint(tmp_path, capsys)


def test_samples_of_another_model_are_found_out(make_arm, tmp_path, capsys):
    folder = make_arm("bandpo/grpo", 0, SEEDS[0], **{"model": "r1-distill-qwen-7b"})
    for file in (folder / "eval" / "samples").glob("*.jsonl"):
        file.write_text(file.read_text().replace(str(folder), "runs/bandpo/other-0", 1))
    assert f"holds samples of model=runs/bandpo/other-0, and is in the folder of the run {folder.name}" in complaint(tmp_path, capsys)


@pytest.mark.parametrize(("key", "value"), [("sampling", {"temperature": 0.6}), ("benchmark_sha256", "c" * 64)])
def test_one_table_is_sampled_one_way(make_arm, tmp_path, capsys, key, value):
    make_arm("bandpo/grpo", 0, SEEDS[0])
    make_arm("bandpo/band_kl", 0, SEEDS[1], **{key: value})
    said = complaint(tmp_path, capsys)
    assert f"{key} = {value}, and" in said or f", and {tmp_path}" in said and key in said
    assert "Evaluate one of the two runs again" in said


def test_seeds_of_an_arm_have_one_budget(make_arm, tmp_path, capsys):
    make_arm("bandpo/grpo", 0, SEEDS[0])
    other = make_arm("bandpo/grpo", 1, SEEDS[1])
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["trainer"]["total_training_steps"] = 3
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    said = complaint(tmp_path, capsys)
    assert f"{other}: trainer.total_training_steps = 3, and" in said and "has 12: seeds of one arm must have one budget" in said


@pytest.mark.parametrize("text", [None, "[", ""])
def test_runs_that_nobody_can_tell_are_named(make_arm, tmp_path, text):
    file = make_arm("bandpo/grpo", 0) / "config.yaml"
    file.unlink() if text is None else file.write_text(text)
    assert find_runs("bandpo", tmp_path / "runs" / "bandpo") == ([], [f"{file.parent}: config.yaml, which says what was run, is missing or damaged; copy it again"])


def test_a_seed_is_a_number(make_arm, tmp_path):
    file = make_arm("bandpo/grpo", 0) / "config.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: one"))
    with pytest.raises(UserError, match="grpo-0/config.yaml: seed = 'one': must be a whole number"):
        find_runs("bandpo", tmp_path / "runs" / "bandpo")


def test_a_seed_is_there_once(make_arm, tmp_path):
    make_arm("bandpo/grpo", 0)
    make_arm("bandpo/grpo", 0, name="again")
    with pytest.raises(UserError, match="again and .*grpo-0 are both grpo of r1-distill-qwen-7b with seed 0"):
        find_runs("bandpo", tmp_path / "runs" / "bandpo")
