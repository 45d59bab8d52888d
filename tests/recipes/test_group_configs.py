"""The model and data groups: what a choice brings with it, and that what they say can be made."""

from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from hydra.utils import instantiate
from transformers import AutoTokenizer

from recipes.assets.tiny_tokenizer import tiny_tokenizer
from recipes.data_check import check_prompts
from recipes.model_check import check_model_folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, train_file, length, temperature",
    [
        ([], "arithmetic-0/train.parquet", 16, 1.0),
        (["model=smollm2_135m"], "calculate-0/train.parquet", 48, 0.6),
        (["model=smollm2_135m", "data=arithmetic"], "arithmetic-0/train.parquet", 16, 0.6),
        (["data=calculate", "seed=3"], "calculate-3/train.parquet", 48, 1.0),
        (["model=smollm2_135m", "data.max_response_length=7"], "calculate-0/train.parquet", 7, 0.6),
        (["model=folder", "data.train_files=x.parquet"], "x.parquet", 4096, 1.0),
    ],
)
def test_a_model_brings_its_task_unless_another_is_chosen(configure, overrides, train_file, length, temperature):
    config = configure("assets=", *overrides)
    assert config.data.train_files.lstrip("/") == train_file
    assert config.data.max_response_length == length
    assert config.actor_rollout_ref.rollout.temperature == temperature
    assert config.data.prompt_key == "prompt"  # verl's own keys are there beside ours


@pytest.mark.parametrize("chosen", [[], ["data=calculate"]])
def test_data_is_made_where_training_looks_for_it_and_fits(configure, tmp_path, chosen):
    config = configure(f"assets={tmp_path}", "seed=5", *chosen)
    instantiate(config.data.prepare)
    for key in ("train_files", "val_files"):
        check_prompts(config.data[key], f"data.{key}")
    if not chosen:  # the tiny model's own
        tokenizer = tiny_tokenizer(512)
        rows = parquet.read_table(config.data.train_files).to_pylist()
        lengths = [len(tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False)) for r in rows]
        assert max(lengths) <= config.data.max_prompt_length
        assert len(tokenizer.encode("18+9=27<|end|>")) <= config.data.max_response_length


def test_model_is_made_where_training_looks_for_it(configure, tmp_path):
    config = configure(f"assets={tmp_path}", "+model.prepare.warmup_steps=0")
    instantiate(config.model.prepare)
    assert Path(config.actor_rollout_ref.model.path) == tmp_path / "tiny-0"
    check_model_folder(config.actor_rollout_ref.model.path)
    AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
