"""The files that a configuration names are checked before Ray starts."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from hydra.utils import instantiate

from recipes.file_checks import file_problems

ROW = {
    "data_source": "arithmetic/chain",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.fixture(scope="module")
def tiny_model(configure, tmp_path_factory) -> Path:
    config = configure(f"assets={tmp_path_factory.mktemp('assets')}", "+model.prepare.warmup_steps=0")
    return Path(instantiate(config.model.prepare))


@pytest.fixture
def files(configure, tiny_model, tmp_path):
    """files("data.val_files=...", ...) -> a configuration whose files are in order where the overrides do not say otherwise."""
    shutil.copytree(tiny_model, tmp_path / "model")
    pd.DataFrame([ROW] * 20).to_parquet(tmp_path / "20.parquet")
    named = [f"data.{key}={tmp_path / '20.parquet'}" for key in ("train_files", "val_files")]
    return lambda *overrides: configure(*named, f"model.path={tmp_path / 'model'}", *overrides)


def complaint(config) -> str:
    (problem,) = file_problems(config)
    return problem


def check_files(config):
    assert file_problems(config) == []


def change(file: Path, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_whole_files_pass(files):
    check_files(files())


def test_the_key_of_a_bad_file_is_named(files, tmp_path):
    said = complaint(files(f"data.train_files={tmp_path / 'none.parquet'}"))
    assert "data.train_files" in said and "no such file" in said
    bad = tmp_path / "bad.parquet"
    bad.write_bytes((tmp_path / "20.parquet").read_bytes()[:-20])
    said = complaint(files(f"data.val_files=[{tmp_path / '20.parquet'},{bad}]"))
    assert "data.val_files" in said and "bad.parquet: not a readable parquet file" in said


def test_less_than_a_batch_of_prompts(files, tmp_path):
    said = complaint(files("data.train_batch_size=24"))
    assert "data.train_batch_size = 24" in said and "20.parquet gives 20 prompts, less than one batch" in said
    assert "gives 9 prompts (data.train_max_samples = 9)" in complaint(files("data.train_max_samples=9"))
    (tmp_path / "15.jsonl").write_text(f"{json.dumps(ROW)}\n" * 15)
    assert "gives 15 prompts" in complaint(files(f"data.train_files={tmp_path / '15.jsonl'}"))
    check_files(files("data.train_batch_size=40", f"data.train_files=[{tmp_path / '20.parquet'},{tmp_path / '20.parquet'}]"))


def test_tokenizers_are_tried(files, tmp_path):
    (tmp_path / "model" / "chat_template.jinja").rename(tmp_path / "template")
    assert f"model.path={tmp_path / 'model'}: the tokenizer has no chat template" in complaint(files())
    check_files(files("actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'"))
    shutil.copytree(tmp_path / "model", tmp_path / "tokenizer")
    elsewhere = files(f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'tokenizer'}")
    assert f"model.tokenizer_path={tmp_path / 'tokenizer'}: the tokenizer has no" in complaint(elsewhere)
    (tmp_path / "template").rename(tmp_path / "tokenizer" / "chat_template.jinja")
    check_files(elsewhere)


def test_sequences_longer_than_the_model(files):
    said = complaint(files("data.max_prompt_length=100", "data.max_response_length=413"))
    assert "data.max_prompt_length = 100 and data.max_response_length = 413: 513 tokens" in said and "positions for 512" in said
    check_files(files("data.max_prompt_length=100", "data.max_response_length=412"))


def test_prompts_that_are_all_too_long(files):
    said = complaint(files("data.max_prompt_length=4", "data.max_response_length=4"))
    assert "data.max_prompt_length = 4: the first 20 prompts of data.train_files" in said and "tokens each" in said


def test_some_prompts_that_are_too_long_are_left_to_verl(files, tmp_path):
    long = ROW | {"prompt": [{"role": "user", "content": "1+" * 100}]}
    pd.DataFrame([long] * 19 + [ROW]).to_parquet(tmp_path / "20.parquet")
    check_files(files("data.max_prompt_length=30"))


def test_prompts_that_the_chat_template_fails_at(files, tmp_path):
    parts = ROW | {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]}
    pd.DataFrame([parts] * 20).to_parquet(tmp_path / "parts.parquet")
    said = complaint(files(f"data.val_files=[{tmp_path / '20.parquet'},{tmp_path / 'parts.parquet'}]"))
    assert f"data.val_files={tmp_path / 'parts.parquet'}: the tokenizer's chat template fails at prompt in row 0, counted from 0 (TypeError" in said


def test_models_that_see_are_refused_on_a_cpu(files, tmp_path):
    change(tmp_path / "model" / "config.json", vision_config={})
    assert f"model.path={tmp_path / 'model'}: is a vision-language model" in complaint(files())
    check_files(files("cluster.device=cuda"))


def test_names_on_a_hub_are_left_to_the_workers_unless_the_hub_is_off(files):
    assert "model.path=Qwen/Qwen3-8B: no such folder" in complaint(files("model.path=Qwen/Qwen3-8B"))
    check_files(files("model.path=Qwen/Qwen3-8B", "cluster.env.HF_HUB_OFFLINE=0"))


def test_reward_functions_and_models_are_looked_for(files, tmp_path):
    function = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    assert f"{function}: no such file" in complaint(files("reward=function", function))
    (tmp_path / "mine.py").write_text("def compute_score(**_): return 0.0\n")
    check_files(files("reward=function", function))
    (tmp_path / "mine.py").write_text("print('hello')\ndef compute_score(**_):\n    print('calculating')\n    return 'good'\n")
    assert f"{function}: compute_score returns 'good' at data_source = 'arithmetic/chain'" in complaint(files("reward=function", function))
    assert "reward.reward_model.model_path=none: no such folder" in complaint(files("reward=model", "reward.reward_model.model_path=none"))
    check_files(files("reward=model", f"reward.reward_model.model_path={tmp_path / 'model'}"))


def test_a_reward_that_needs_a_package_that_is_not_there(files, monkeypatch):
    monkeypatch.setattr("recipes.file_checks.NEEDED", {"math": "no_such_package"})
    assert "reward.custom_reward_function.name=math: no_such_package is not installed" in complaint(files("reward=math"))
    check_files(files("reward=gsm8k"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os\ndef compute_score(**_):\n    print('alas', flush=1)\n    os._exit(3)", "its process ended with 3 before all was scored (alas)"),
        ("import os\nprint('\\nnull', flush=True)\nos._exit(0)", "its process ended with 0 before all was scored (null)"),
        ("import atexit\natexit.register(print, 'null')\ndef compute_score(**_): return 'good'", "compute_score returns 'good' at"),
        ("import atexit, os\natexit.register(os._exit, 3)\ndef compute_score(**_): return 1", None),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(50,)).start()\ndef compute_score(**_): return 1", None),
        ("import subprocess\nsubprocess.Popen(['sleep', '50'])\ndef compute_score(**_): return 1", None),
    ],
    ids=["dies", "leaves", "prints at its end", "dies at its end", "has a thread", "has a process"],
)
def test_only_an_answer_is_an_answer(files, tmp_path, monkeypatch, body, said):
    monkeypatch.setattr("recipes.file_checks.REWARD_SECONDS", 40)
    (tmp_path / "mine.py").write_text(body)
    config = files("reward=function", f"reward.custom_reward_function.path={tmp_path / 'mine.py'}")
    if said:
        assert f"mine.py: {said}" in complaint(config)
    else:
        check_files(config)


def test_a_reward_that_takes_for_ever(files, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.file_checks.REWARD_SECONDS", 3)
    (tmp_path / "mine.py").write_text("import time\ndef compute_score(**_):\n    time.sleep(60)\n")
    said = complaint(files("reward=function", f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"))
    assert "compute_score has not scored 4 responses in 3 s" in said


def test_ids_of_the_tokenizer_and_the_model(files, tmp_path):
    change(tmp_path / "model" / "config.json", vocab_size=100)
    assert f"model.path={tmp_path / 'model'}: the tokenizer has ids up to 260" in complaint(files())


def test_the_named_tokens_leave_a_rest(files):
    check_files(files("method=dppo_topk_tv"))
    assert "method.K = 261: model.path=" in complaint(files("method=dppo_topk_tv", "method.K=261"))


def test_a_problem_of_each_kind_is_named_at_once(files, tmp_path):
    wrong = ["model.path=none", f"data.val_files={tmp_path / 'none.parquet'}", "reward=function", "reward.custom_reward_function.path=none.py"]
    problems = file_problems(files(*wrong))
    assert [problem.partition("=")[0] for problem in problems] == ["model.path", "data.val_files", "reward.custom_reward_function.path"]


@pytest.mark.parametrize(
    ("heads", "shared", "override", "expected"),
    [
        (12, 12, "rollout.tensor_model_parallel_size=8", "rollout.tensor_model_parallel_size = 8: model.path="),
        (12, 2, "actor.ulysses_sequence_parallel_size=8", "has 12 attention heads"),
        (24, 8, "rollout.tensor_model_parallel_size=6", "has 8 key and value heads"),
        (28, 4, "rollout.tensor_model_parallel_size=4", None),
        (28, 4, "rollout.tensor_model_parallel_size=2", None),
        (32, 4, "actor.ulysses_sequence_parallel_size=8", None),
    ],
)
def test_gpus_that_share_heads_divide_them(files, tmp_path, heads, shared, override, expected):
    change(tmp_path / "model" / "config.json", num_attention_heads=heads, num_key_value_heads=shared)
    config = files(f"actor_rollout_ref.{override}")
    if expected is None:
        check_files(config)
    else:
        assert expected in complaint(config)
