"""What an evaluation leaves: the same files from the same samples; made anew from them; and how a text is predicted."""

import csv
import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.assets.tiny_model import prepare as make_tiny
from recipes.errors import UserError
from recipes.evaluate import evaluate
from recipes.evaluation import report
from recipes.evaluation.models import Model, find
from recipes.evaluation.retention import TEXT, Fit, fit, read, retention
from recipes.evaluation.scores import result

RANDOM = (np.random.default_rng(0).random((20, 4)) < np.linspace(0, 1, 20)[:, None]).tolist()
WORSE = [[right and k > 0 for k, right in enumerate(row)] for row in RANDOM]


def evaluated(config, *command: str) -> str:
    console = Console(file=io.StringIO(), width=100)
    evaluate(config, ["python", "-m", "recipes.evaluate", *command], console)
    return console.file.getvalue()


def read_csv(path) -> list[dict]:
    return [*csv.DictReader(path.read_text().splitlines())]


def test_everything_is_made_anew_from_samples(make_samples, configure, tmp_path):
    a, _ = make_samples(RANDOM, "a"), make_samples(WORSE, "b")
    said = evaluated(configure(f"from_samples={tmp_path}/a", f"compare={tmp_path}/b"))
    mean = result(a).scores["mean@4"]
    assert f"{100 * mean.value:.1f}" in said and "graded 160 samples anew: 0 verdicts differ" in said
    rows = read_csv(tmp_path / "a" / "results.csv")
    assert [row["metric"] for row in rows] == [
        "mean@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "best@2(bootstrap)", "best@4(bootstrap)",
    ]  # fmt: skip
    assert [float(rows[0][key]) for key in ("value", "low", "high")] == pytest.approx([mean.value, mean.low, mean.high], abs=1e-6)
    (row,) = [row for row in read_csv(tmp_path / "a" / "comparison.csv") if row["metric"] == "mean@4"]
    assert float(row["difference"]) == pytest.approx(np.mean(RANDOM) - np.mean(WORSE)) and float(row["p_value"]) < 0.01
    summary = (tmp_path / "a" / "summary.md").read_text()
    assert "## Differences on the same problems" in summary and "| mean@4 |" in summary and "best@4(bootstrap)" in summary
    before = {name: (tmp_path / "a" / name).read_bytes() for name in ("results.csv", "comparison.csv", "summary.md")}
    evaluated(configure(f"from_samples={tmp_path}/a", f"compare={tmp_path}/b"))
    assert before == {name: (tmp_path / "a" / name).read_bytes() for name in before}
    evaluated(configure(f"from_samples={tmp_path}/a"))
    assert not (tmp_path / "a" / "comparison.csv").exists()


def test_samples_are_graded_anew(make_samples, configure, edit, tmp_path):
    samples = make_samples(RANDOM, "a")
    edit(samples, 2, correct=not samples.rows["arithmetic/0", 0]["correct"])
    assert "1 verdicts differ from those kept" in evaluated(configure(f"from_samples={tmp_path}/a"))
    assert result(samples).scores["mean@4"].value == float(read_csv(tmp_path / "a" / "results.csv")[0]["value"])


@pytest.mark.parametrize(("verdicts", "header"), [([[True], [False]], {}), ([[True] * 4] * 2, {"seed": 1})])
def test_one_report_is_of_one_n_and_seed(make_samples, configure, tmp_path, verdicts, header):
    make_samples(RANDOM, "a")
    make_samples(verdicts, "a", benchmark="calculate", **header)
    with pytest.raises(UserError, match="n = 4 and seed = 0 in arithmetic.jsonl; n = . and seed = . in calculate.jsonl: one report is of one n and seed"):
        evaluated(configure(f"from_samples={tmp_path}/a"))


def test_both_are_graded_by_one_rule(make_samples, configure, edit, tmp_path):
    make_samples(RANDOM, "a")
    other = make_samples(RANDOM, "b")
    edit(other, 2, correct=not other.rows["arithmetic/0", 0]["correct"])
    assert "graded 160 samples anew: 1 verdicts differ" in evaluated(configure(f"from_samples={tmp_path}/a", f"compare={tmp_path}/b"))
    assert all(float(row["difference"]) == 0 for row in read_csv(tmp_path / "a" / "comparison.csv"))


def test_several_benchmarks_have_an_average(make_samples, configure, tmp_path):
    one, other = result(make_samples(RANDOM, "a")), result(make_samples(WORSE, "a", benchmark="calculate"))
    assert report.average([one, other], ["mean@4"]) == [["average", f"{50 * (np.mean(RANDOM) + np.mean(WORSE)):.1f}"]]
    assert report.average([one], ["mean@4"]) == []
    said = evaluated(configure(f"from_samples={tmp_path}/a"))
    assert "average" in said and "average" in (tmp_path / "a" / "summary.md").read_text()


def test_no_p_value_is_zero():
    assert [report.p_value(p) for p in (1.0, 0.0312, 0.00005)] == ["1.0000", "0.0312", "< 0.0001"]


def test_bad_samples_end_in_one_line(make_samples, configure, edit, tmp_path):
    make_samples([[True, False]], "one")
    edit(make_samples(RANDOM, "other"), 3, source="alpaca")
    for name, message in (("one", "has 1 problem"), ("none", "has no samples"), ("other", "other: data_source = 'alpaca': no rule grades it")):
        with pytest.raises(UserError, match=message):
            evaluated(configure(f"from_samples={tmp_path}/{name}"))


# ---- retention -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny", warmup_steps=0)
    return Model("tiny", folder, "t", json.loads((folder / "config.json").read_text()))


@pytest.mark.slow
def test_every_token_but_the_first_is_predicted_once(tiny, monkeypatch):
    text = TEXT.read_text()[:300]
    whole = fit(tiny, text, "cpu")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tiny.folder)(text).input_ids])
    network = AutoModelForCausalLM.from_pretrained(tiny.folder)

    def nats(ids: torch.Tensor) -> float:
        with torch.no_grad():
            return -network(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum().item()

    assert (whole.tokens, whole.bytes) == (299, 300) and whole.nats == pytest.approx(nats(ids), rel=1e-5)
    monkeypatch.setattr("recipes.evaluation.retention.WINDOW", 2)
    parts = fit(tiny, text, "cpu")
    assert parts.tokens == 299 and parts.nats == pytest.approx(nats(ids[0].unfold(0, 2, 1)), rel=1e-5)


@pytest.mark.slow
def test_retention_is_measured_once_and_again_when_something_changes(tiny, configure, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("How now, brown cow.")
    config, file = configure(f"retention.base={tiny.folder}", f"retention.text={tmp_path}/text", "device=cpu"), tmp_path / "retention.json"
    model = find(str(tiny.folder), config)
    fits = retention(model, config, file)
    assert fits["model"].nats == fits["base"].nats == fit(tiny, "How now, brown cow.", "cpu").nats and read(file) == fits
    assert "+0.00% bits a byte" in report.retention_lines(fits)[-1]
    monkeypatch.setattr("recipes.evaluation.retention.fit", lambda *_args: pytest.fail("measured again"))
    assert retention(model, config, file) == fits
    (tmp_path / "text").write_text("changed")
    with pytest.raises(pytest.fail.Exception):
        retention(model, config, file)
    config.retention.text = str(tmp_path / "none")
    with pytest.raises(UserError, match="retention.text=.*none: not a readable text"):
        retention(model, config, file)


def test_perplexity_and_bits():
    one = Fit("x", nats=10 * math.log(8), tokens=10, bytes=30)
    assert (one.perplexity, one.bits_per_byte) == (pytest.approx(8), pytest.approx(1))


def test_the_text_is_there():
    assert len(TEXT.read_text().split()) > 600


@pytest.mark.parametrize("name", ["results.csv", "comparison.csv", "summary.md"])
def test_what_cannot_be_written_is_named(make_samples, configure, tmp_path, name):
    make_samples(RANDOM, "a")
    (tmp_path / "a" / name).mkdir()
    with pytest.raises(UserError, match=f"from_samples={tmp_path}/a: cannot write {tmp_path}/a/{name} .Is a directory"):
        evaluated(configure(f"from_samples={tmp_path}/a"))


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"model": "a"}}', '{"base": 1, "model": {"model": "a", "nats": 1.0, "tokens": 1, "bytes": 1}}'])
def test_a_damaged_retention_is_named(make_samples, configure, tmp_path, text):
    make_samples(RANDOM, "a")
    (tmp_path / "a" / "retention.json").write_text(text)
    with pytest.raises(UserError, match="retention.json: is damaged .* Remove it"):
        evaluated(configure(f"from_samples={tmp_path}/a"))


def test_the_perplexity_of_a_broken_model_is_infinite():
    assert Fit("a", 1e6, 10, 10).perplexity == math.inf and Fit("a", 0.0, 10, 10).perplexity == 1
