"""Estimates of memory and disk, from shapes."""

import pytest
import torch
from safetensors.torch import save_file

from recipes.checks import check
from recipes.estimates import GiB, count_parameters, disk, memory, read_model

QWEN_7B = {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
PARAMETERS = 7_615_616_512


@pytest.fixture
def of(configure):
    """of("cluster=1x8", ...) -> a configuration that check() has resolved."""

    def of(*overrides: str):
        config = configure("name=x", "dry_run=true", "model=qwen2.5-7b", "data.train_files=a", "data.val_files=a", *overrides)
        check(config)
        return config

    return of


def test_parameters_are_counted_by_the_headers(tmp_path):
    assert count_parameters(tmp_path) is None
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "1.safetensors")
    save_file({"c": torch.zeros(2, 2, 2)}, tmp_path / "2.safetensors")
    assert count_parameters(tmp_path) == 30 and read_model(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    assert read_model(str(tmp_path)) == ({"vocab_size": 9}, 30)


def test_a_7b_model_on_eight_gpus(of):
    found = memory(of("cluster=1x8"), QWEN_7B, PARAMETERS, 80 * GiB)
    assert found.problems == found.warnings == []
    update, rollout = found.facts
    states = PARAMETERS * (4 + 4 + 8) / 8 / GiB
    logits = 3 * 2 * 152064 * 16384 / GiB
    assert f"{states:.1f} weights, gradients and Adam" in update and f"{logits:.1f} logits of 16384 tokens" in update
    assert f"48.0 vLLM + {PARAMETERS * (4 + 8) / 8 / GiB:.1f} that the trainer keeps" in rollout


@pytest.mark.parametrize(
    ("overrides", "gib", "problems", "warnings"),
    [
        ("cluster=1x1", 80, ["memory of a GPU in the update: about 113.5 "], []),
        ("cluster=1x8", 24, ["memory of a GPU in the rollout: about 14.4 vLLM + 10.6"], ["memory of a GPU in the update"]),
        ("cluster=1x8", 34, [], ["memory of a GPU in the update", "memory of a GPU in the rollout"]),
        ("cluster=1x8 actor_rollout_ref.rollout.gpu_memory_utilization=0.1", 80, ["gpu_memory_utilization = 0.1: of 80.0 GiB leaves vLLM 8.0, less than the weights (14.2"], []),
        ("cluster=1x8 actor_rollout_ref.rollout.gpu_memory_utilization=0.1 actor_rollout_ref.rollout.tensor_model_parallel_size=2", 80, [], []),
        ("cluster=1x8 actor_rollout_ref.rollout.gpu_memory_utilization=0.95", 80, ["memory of a GPU in the rollout"], []),
        ("cluster=1x1 actor_rollout_ref.model.lora_rank=32", 80, [], []),
    ],
)  # fmt: skip
def test_what_cannot_or_hardly_fit_is_said(of, overrides, gib, problems, warnings):
    found = memory(of(*overrides.split()), QWEN_7B, PARAMETERS, gib * GiB)
    for said, expected in ((found.problems, problems), (found.warnings, warnings)):
        assert len(said) == len(expected) and all(map(str.startswith, (text.removeprefix("actor_rollout_ref.rollout.") for text in said), expected)), said


def test_checkpoints_against_the_disk(of, tmp_path):
    folder = f"trainer.default_local_dir={tmp_path}/new/checkpoints"
    assert disk(of("cluster=1x8", folder), PARAMETERS).facts == []
    (fact,) = disk(of("cluster=1x8", folder, "trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=2"), 10**6).facts
    assert fact.startswith("disk: 3 checkpoints, the one being written among them of 0.0 GiB each") and str(tmp_path) in fact
    (problem,) = disk(of("cluster=1x8", folder, "trainer.save_freq=10", "trainer.total_training_steps=100"), 10**13).problems
    assert "too little space for 10 checkpoints of 111758.7 GiB each" in problem
    contents = ["trainer.save_freq=10", "actor_rollout_ref.actor.checkpoint.save_contents=[model]"]
    (fact,) = disk(of("cluster=1x8", folder, *contents), GiB).facts
    assert "2 checkpoints, of an unknown number of 4.0 GiB each" in fact
