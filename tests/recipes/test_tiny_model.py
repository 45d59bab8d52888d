"""The embedded model: an ordinary model folder, repeatable, and about 40 % right before any reinforcement learning."""

import itertools
import json
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.assets.arithmetic import WORDINGS
from recipes.assets.tiny_model import prepare
from recipes.assets.warmup import work_out
from recipes.model_check import check_model_folder
from recipes.rewards import compute_score


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("assets") / "tiny", seed=7, warmup_steps=1)


def test_is_a_whole_model_folder_that_vllm_can_load(folder):
    check_model_folder(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.head_dim in (32, 64)  # vLLM's CPU attention refuses smaller ones
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 300_000 < model.num_parameters() < 1_000_000
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_every_field_is_in_the_recipe_that_is_compared(folder):
    assert json.loads((folder / "asset.json").read_text())["recipe"] == {
        "name": "tiny_model", "version": 2, "seed": 7, "warmup_steps": 1, "batch_size": 48, "stop_early": 0.55, "slip": 0.05,
    }  # fmt: skip


def test_tokenizer_writes_any_text_and_marks_turns(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("3+4+5=", "naïve 数 \n\t \x00", "".join(map(chr, range(1, 256)))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    turns = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<|user|>1+2=<|end|><|assistant|>3<|end|>"
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompt) == "<|user|>1+2=<|end|><|assistant|>" and len(prompt) == 7
    assert tokenizer.decode(tokenizer.encode("12<|end|><|endoftext|>"), skip_special_tokens=True) == "12"


def test_the_seed_decides_every_weight_and_nothing_else_changes(folder, tmp_path, capfd):
    torch.manual_seed(12345)  # whatever the caller did before
    random_before, torch_before = random.getstate(), torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same = prepare(tmp_path / "same", seed=7, warmup_steps=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert (same / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    other = load_file(prepare(tmp_path / "other", seed=8, warmup_steps=1) / "model.safetensors")
    assert all(not torch.equal(other[k], v) for k, v in load_file(folder / "model.safetensors").items() if v.ndim == 2)
    assert random.getstate() == random_before and torch.equal(torch.get_rng_state(), torch_before)
    assert capfd.readouterr() == ("", "")


def test_demonstrations():
    rng, numbers = random.Random(0), (3, 4, 5)
    assert work_out(numbers, rng, stop_early=0, slip=0) == "7+5=12"
    assert work_out(numbers, rng, stop_early=1, slip=0) == "7"
    assert work_out((1, 2, 3, 4), rng, stop_early=0, slip=0) == "3+3+4=6+4=10"
    assert work_out(numbers, rng, stop_early=0, slip=1) in {"8+5=14", "8+5=12", "6+5=12", "6+5=10"}
    right = [compute_score("arithmetic/chain", work_out(numbers, rng, 0.55, 0.05), "12") for _ in range(4000)]
    assert sum(right) / 4000 == pytest.approx(0.45 * (0.95**2 + 0.05**2 / 2), abs=0.03)


@pytest.mark.slow
def test_the_warmed_up_model_is_partly_right(tmp_path):
    folder = prepare(tmp_path / "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    questions = list(itertools.product(range(10), repeat=3))
    messages = [[{"role": "user", "content": WORDINGS["chain"].ask(numbers)}] for numbers in questions]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        said = model.generate(**asked, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=16)[:, asked["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(said, skip_special_tokens=True)
    scores = [compute_score("arithmetic/chain", text, str(sum(n))) for n, text in zip(questions, answers, strict=True)]
    assert 0.30 < sum(scores) / len(scores) < 0.45
    # What is wrong is mostly an answer given too early: it can be learned from reward.
    early = [text == str(a + b) for (a, b, _), text in zip(questions, answers, strict=True)]
    assert 0.4 < sum(early) / len(early) < 0.65
