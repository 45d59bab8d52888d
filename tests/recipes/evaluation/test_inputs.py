"""What an evaluation is given: benchmarks, models, values; and what it says when they are not there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import save_file

from recipes.errors import UserError
from recipes.evaluate import for_hydra
from recipes.evaluation import benchmarks, models
from recipes.evaluation.checks import check
from recipes.evaluation.grade import check_source, grade
from recipes.prepare_data import prepare
from trustregion.presets import configs_folder


def complaint(call, *arguments) -> str:
    with pytest.raises(UserError) as raised:
        call(*arguments)
    return str(raised.value)


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("n=0", "n = 0: must be a whole number >= 1"),
        ("n=1.5", "n = 1.5"),
        ("problems=-1", "problems = -1"),
        ("seed=-1", "seed = -1"),
        ("temperature=hot", "temperature = 'hot'"),
        ("top_p=0", "top_p = 0"),
        ("max_tokens=0", "max_tokens = 0"),
        ("servers=0", "servers = 0"),
        ("device=tpu", "device = 'tpu'"),
        ("model.name=null", "model = None"),
        ("compare=3", "compare = 3"),
        ("runs=null", "runs = None: must be a folder"),
        ("retention.base=3", "retention.base = 3: must be text, or null"),
        ("benchmarks=3", "benchmarks = 3: must be a name, or a list of names"),
        ("benchmarks=[arithmetic,3]", "benchmarks = ['arithmetic', 3]: must be"),
        ("engine=null", "engine = None: must be keys and values, engine.<key>=<value>"),
        ("+sets.mine={file: x}", "sets.mine = {'file': 'x'}: must be {file: <a parquet file>, max_tokens: <a whole number>}"),
    ],
)
def test_values_are_checked(configure, override, message):
    check(configure())
    assert message in complaint(check, configure(override))


def test_all_that_is_wrong_is_said_at_once(configure):
    assert complaint(check, configure("n=0", "top_p=2", "servers=x")).count("\n") == 2


@pytest.mark.parametrize("name", ["tiny", "/a/method=grpo+seed=0", "a b", "it's", "<b>ü%(1)", "{a,[b]}"])
def test_folders_may_have_any_name(configure, name):
    assert (configure(for_hydra(f"model={name}")).model.name, configure(for_hydra(f"compare={name}")).compare) == (name, name)


def test_what_is_no_folder_is_left_to_hydra():
    for argument in ("n=[1", "compare=null", "compare='a=b'", "--help", "model.name=a=b"):
        assert for_hydra(argument) == argument


# ---- benchmarks ------------------------------------------------------------------------------------------------------
def test_every_set_can_be_had(configure):
    known = yaml.safe_load((configs_folder() / "datasets.yaml").read_text())
    for entry in configure().sets.values():
        assert entry.max_tokens > 0
        assert entry.get("dataset") in known or (configs_folder() / "data" / f"{entry.data}.yaml").is_file()


def test_the_sums_are_those_that_training_has_not_seen(configure):
    (sums,) = benchmarks.load(configure("seed=3"))
    assert len(sums.problems) == 128 and sums.problems[5].id == "arithmetic/5" and sums.problems[5].benchmark == "arithmetic"
    train = pd.read_parquet(configure().assets + "/arithmetic-3/train.parquet")
    asked = {problem.messages[0]["content"] for problem in sums.problems}
    assert not asked & {messages[0]["content"] for messages in train["prompt"]}
    (fewer,), (other,) = benchmarks.load(configure("seed=3", "problems=8")), benchmarks.load(configure("seed=4"))
    assert fewer.problems == sums.problems[:8] and len({sums.sha256, fewer.sha256, other.sha256}) == 3


def test_prepared_data_sets_are_read(configure, tmp_path):
    pd.DataFrame([{"problem": f"{n}+1?", "answer": n + 1} for n in range(30)]).to_parquet(tmp_path / "aime.parquet")
    prepare("aime24", tmp_path / "assets", source=str(tmp_path / "aime.parquet"))
    (aime,) = benchmarks.load(configure("benchmarks=aime24"))
    assert aime.max_tokens == 4096 and (aime.problems[2].source, aime.problems[2].truth) == ("math/aime24", "3")
    mine = f"+sets.mine={{file: {tmp_path}/assets/aime24/data.parquet, max_tokens: 9}}"
    (mine,) = benchmarks.load(configure("benchmarks=[mine]", mine))
    assert mine.max_tokens == 9 and mine.problems[2].id == "mine/2" and mine.problems[2].messages == aime.problems[2].messages


def test_gsm8k_is_evaluated_on_its_test_set(configure):
    assert configure().sets.gsm8k.dataset == "gsm8k_test"


def test_what_is_not_there_is_said_with_the_file_and_where_it_goes(configure, tmp_path, monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    said = complaint(benchmarks.load, configure("benchmarks=[amc23]"))
    assert f"benchmarks=amc23: {tmp_path}/assets/amc23/data.parquet is not there" in said
    assert "copy math-ai/amc23 and give source=" in said and "recipes.prepare_data dataset=amc23" in said
    assert "Did you mean 'aime24'" in complaint(benchmarks.load, configure("benchmarks=[aime4]"))
    assert "must name one or more of aime24" in complaint(benchmarks.load, configure("benchmarks=[]"))
    assert "each once" in complaint(benchmarks.load, configure("benchmarks=[arithmetic,arithmetic]"))
    assert "1 problem: intervals are over problems" in complaint(benchmarks.load, configure("problems=1"))
    none = f"+sets.mine={{file: {tmp_path}/none.parquet, max_tokens: 9}}"
    assert "no such file" in complaint(benchmarks.load, configure("benchmarks=[mine]", none))


# ---- grading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "text", "truth", "answer", "correct"),
    [
        ("arithmetic/chain", "7+5=12", "12", "12", True),
        ("arithmetic/chain", "7+5=012", "12", "012", False),
        ("arithmetic/chain", "7+5=", "12", None, False),
        ("arithmetic/calculate", "3 + 4 = 7.0", "7", "7", True),
        ("arithmetic/calculate", "seven", "7", None, False),
        ("math/aime24", "Answer: 1,000", "1000", "1000", True),
        ("math/aime24", r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", r"\frac{2}{4}", True),
        ("math/aime24", "it is 12", "12", None, False),
        ("openai/gsm8k", "so\n#### 1,234.0", "1234", "1234", True),
        ("openai/gsm8k", "1234", "1234", None, False),
    ],
)
def test_answers_and_verdicts(source, text, truth, answer, correct):
    check_source(source, "here")
    assert grade(source, text, truth) == (answer, correct)


def test_data_that_no_rule_grades_are_refused():
    assert "here: data_source = 'alpaca': no rule grades it" in complaint(check_source, "alpaca", "here")


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def weights():
    """weights(folder) -> the folder, with what a Hugging Face model has."""

    def weights(folder, value: float = 0.0):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / "tokenizer.json").write_text("{}")
        save_file({"w": torch.full((1 << 20,), value), "x": torch.zeros(1 << 21)}, folder / "model.safetensors")
        return folder

    return weights


def test_a_model_is_a_folder_a_checkpoint_or_the_last_one_of_a_run(configure, weights, tmp_path):
    run = tmp_path / "run"
    newest = weights(run / "checkpoints" / "global_step_20" / "actor" / "huggingface")
    weights(run / "checkpoints" / "global_step_10" / "actor" / "huggingface", 1.0)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    for name in (newest, newest.parent, newest.parents[1], run):
        assert models.find(str(name), configure()).folder == newest
    other = models.find(str(run / "checkpoints" / "global_step_10"), configure())
    assert other.sha256 != models.find(str(run), configure()).sha256
    shutil.move(newest, tmp_path / "moved")
    assert models.find(str(tmp_path / "moved"), configure()).sha256 == models.find(str(tmp_path / "moved"), configure("seed=1")).sha256


def test_small_changes_of_a_large_file_change_the_hash(configure, weights, tmp_path):
    """12 MB, of which a third is looked at: training changes all weights, by little."""
    a, b = weights(tmp_path / "a", 0.5), weights(tmp_path / "b", 0.5 + 2**-20)
    assert models.find(str(a), configure()).sha256 != models.find(str(b), configure()).sha256


def test_runs_without_weights_say_how_to_get_them(configure, weights, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert "the run has no checkpoint. Train with trainer.save_freq" in complaint(models.find, str(run), configure())
    merged = weights(run / "checkpoints" / "global_step_5" / "actor" / "huggingface")
    (merged / "model.safetensors").unlink()
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    said = complaint(models.find, str(run), configure())
    assert f"merge --backend fsdp --local_dir {merged.parent} --target_dir {merged}" in said and "hf_model" in said
    (tmp_path / "empty").mkdir()
    assert "is neither a Hugging Face folder" in complaint(models.find, str(tmp_path / "empty"), configure())


def test_names_that_are_no_model(configure, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert "Did you mean 'tiny'" in complaint(models.find, "tinny", configure())
    assert "base=some/model: no such folder, and the hub does not give it (ConnectionError" in complaint(models.find, "some/model", configure(), "base")
    assert "give the folder itself, model=/models/my-model" in complaint(models.find, "folder", configure())


def test_names_of_folders():
    assert [models.folder_name(name) for name in ("tiny", "Qwen/Qwen2.5-1.5B", "/models/x/", "..")] == ["tiny", "Qwen-Qwen2.5-1.5B", "models-x", "model"]


def test_model_names_are_hashed_by_content_only(configure, weights, tmp_path):
    a = weights(tmp_path / "a")
    before = models.find(str(a), configure()).sha256
    (a / "asset.json").write_text(json.dumps({"recipe": {}, "files": {}}))
    assert models.find(str(a), configure()).sha256 == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["benchmarks=[aime4]"], "benchmarks=aime4: no such benchmark. Did you mean 'aime24'?"),
        (["n=0"], "n = 0: must be a whole number >= 1"),
        (["problems=1"], "benchmarks=arithmetic: 1 problem: intervals are over problems"),
        (["from_samples=none"], "from_samples=none: has no samples"),
    ],
)
def test_the_command_ends_with_2_and_one_line(tmp_path, arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "recipes.evaluate", f"runs={tmp_path / 'eval'}", f"assets={tmp_path / 'assets'}", *arguments],
        cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "eval").exists()
