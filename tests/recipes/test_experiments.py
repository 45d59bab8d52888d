"""The experiments are the papers', by the numbers typed here from the papers and their authors' scripts; they compose, pass
all checks, and are what docs/experiments.md says."""

import warnings

import pytest

from recipes import experiments_table
from recipes.checks import check
from recipes.driver import validate
from recipes.experiments_table import document, settings
from recipes.train import choices_of

pytestmark = pytest.mark.slow

BANDPO = {
    "model": "r1-distill-qwen-7b", "anchor": "old", "dual_clip": 10, "NLL": 0, "KL": 1e-3, "KL estimator": "low_var_kl",
    "entropy bonus": 0, "aggregation": "seq-mean-token-mean", "divided by std": True, "group filtering": False, "wrong answer": -1,
    "prompt": 1024, "response": 4096, "prompts a step": 256, "prompts an update": 64, "n": 16, "lr": 1e-6, "weight decay": 0.01,
    "T": 1, "top-p": 1, "epochs": 10, "validation n": 32, "validation T": 1, "validation top-p": 1, "nodes": 1, "GPUs a node": 8,
}  # fmt: skip
BAND = {"delta": 0.05, "ratio_cap": 10}
DPPO = {
    "anchor": "rollout", "NLL": 0, "entropy bonus": 0, "aggregation": "token-mean", "divided by std": False, "group filtering": False,
    "wrong answer": 0, "prompt": 1024, "lr": 1e-6, "weight decay": 0.01, "T": 1, "top-p": 1, "epochs": 30,
    "validation n": 32, "validation T": 0.7, "validation top-p": 0.95, "nodes": 1, "GPUs a node": 8,
}  # fmt: skip
DENSE = {"model": "qwen3-8b-base", "C": 5, "response": 8000, "prompts a step": 128, "prompts an update": 32, "n": 8}
MOE = {
    "model": "qwen3-30b-a3b-base", "method": "dppo_binary_tv", "delta": 0.2, "C": 5, "response": 16384, "prompts a step": 256,
    "prompts an update": 32, "n": 16, "nodes": 4,
}  # fmt: skip
STABILITY = {
    "model": "r1-distill-qwen-1.5b", "response": 8000, "prompts a step": 64, "prompts an update": 16, "n": 8, "epochs": 160, "steps": 3500,
}  # fmt: skip
ERC = {
    "model": "r1-distill-qwen-7b", "anchor": "old", "eps_low": 0.2, "dual_clip": 10, "NLL": 0.1, "entropy bonus": 0,
    "aggregation": "token-mean", "divided by std": True, "group filtering": True, "wrong answer": 0, "prompt": 4096, "response": 16384,
    "prompts a step": 128, "prompts an update": 16, "n": 8, "lr": 1e-6, "warm-up": 10, "weight decay": 0.1, "T": 1, "top-p": 1,
    "epochs": 10, "validation n": 32, "validation T": 0.6, "validation top-p": 0.95, "nodes": 8, "GPUs a node": 8,
}  # fmt: skip
BETAS = {"beta_low": 0.05, "beta_high": 0.05}

EXPECTED = {
    "bandpo/grpo": BANDPO | {"method": "grpo", "eps_low": 0.2, "eps_high": 0.2},
    "bandpo/clip_higher": BANDPO | {"method": "clip_higher", "eps_low": 0.2, "eps_high": 0.28},
    "bandpo/dcpo": BANDPO | {"method": "dcpo", "eps_low": 0.16, "eps_high": 0.2, "ratio_cap": 10},
    "bandpo/band_kl": BANDPO | BAND | {"method": "band_kl"},
    "bandpo/band_tv": BANDPO | BAND | {"method": "band_tv"},
    "bandpo/band_chi2": BANDPO | BAND | {"method": "band_chi2"},
    "bandpo/band_kl_relaxed": BANDPO | BAND | {"method": "band_kl_relaxed", "relax_low": 0.2, "relax_high": 0.28},
    "bandpo/band_kl_delta_03": BANDPO | BAND | {"method": "band_kl", "delta": 0.03},
    "bandpo/band_kl_delta_10": BANDPO | BAND | {"method": "band_kl", "delta": 0.10},
    "bandpo/band_kl_filter_groups": BANDPO | BAND | {"method": "band_kl", "group filtering": True, "epochs": 24},
    "bandpo/dapo_filter_groups": {key: value for key, value in BANDPO.items() if not key.startswith("KL")}
    | {
        "method": "clip_higher", "eps_low": 0.2, "eps_high": 0.28, "group filtering": True, "epochs": 20, "aggregation": "token-mean",
        "overlong buffer": 512, "response": 4096 + 512, "warm-up": 10, "weight decay": 0.1,
    },
    "dppo/dense": DPPO | DENSE | {"method": "dppo_binary_tv", "delta": 0.2},
    "dppo/dense_kl": DPPO | DENSE | {"method": "dppo_binary_kl", "delta": 0.05},
    "dppo/dense_topk_tv": DPPO | DENSE | {"method": "dppo_topk_tv", "delta": 0.2, "K": 20},
    "dppo/dense_topk_kl": DPPO | DENSE | {"method": "dppo_topk_kl", "delta": 0.05, "K": 20},
    "dppo/moe": DPPO | MOE,
    "dppo/moe_thinking": DPPO | MOE | {"model": "qwen3-30b-a3b"},
    "dppo/moe_lora": DPPO | MOE | {
        "LoRA rank": 32, "LoRA alpha": 64, "delta": 0.15, "response": 8000, "prompts a step": 128, "prompts an update": 16, "n": 8,
        "lr": 1e-5, "nodes": 1,
    },
    "dppo/stability": DPPO | STABILITY | {"method": "dppo_binary_tv", "delta": 0.15},
    "dppo/stability_kl": DPPO | STABILITY | {"method": "dppo_binary_kl", "delta": 0.05},
    "dppo/stability_grpo": DPPO | STABILITY | {"method": "grpo", "eps_low": 0.2, "eps_high": 0.2, "dual_clip": 3, "anchor": "old"},
    "dppo/stability_cispo": DPPO | STABILITY | {"method": "cispo", "eps_low": 0.2, "eps_high": 0.28, "anchor": "old"},
    "dppo/stability_unmasked": DPPO | STABILITY | {"method": "dppo_binary_tv", "delta": 1},
    "dppo/stability_worst_only": DPPO | STABILITY | {"method": "dppo_binary_tv", "delta_low": 0.5, "delta_high": 1},
    "erc/dapo": ERC | {"method": "clip_higher", "eps_high": 0.28},
    "erc/erc_dapo": ERC | BETAS | {"method": "erc_dapo", "eps_high": 0.28},
    "erc/gppo": ERC | {"method": "gppo", "eps_high": 0.2},
    "erc/erc_gppo": ERC | BETAS | {"method": "erc_gppo", "eps_high": 0.2},
}  # fmt: skip


def test_all_experiments_are_here():
    assert choices_of("experiment") == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_experiment_is_the_papers_and_verl_takes_it(configure, name):
    config = configure(f"experiment={name}", "name=x", "dry_run=true")
    check(config)
    assert {key: value for key, value in settings(config).items() if value is not None} == EXPECTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate(config)
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "flash_attention_2"
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest
    assert config.trainer.val_before_train == (not name.startswith(("dppo", "erc")))


def test_the_page_is_up_to_date(configure):
    composed = {name: configure(f"experiment={name}", "name=x") for name in choices_of("experiment")}
    assert experiments_table.PAGE.read_text() == document(composed), "run python -m recipes.experiments_table"


def test_what_is_chosen_on_the_command_line_wins(configure):
    config = configure("experiment=bandpo/band_kl", "model=qwen2.5-7b-instruct", "cluster=1x1", "data=gsm8k", "reward=gsm8k", "name=x", "dry_run=true")
    check(config)
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-7B-Instruct" and config.chosen.model == "qwen2.5-7b-instruct"
    assert config.reward.custom_reward_function.name == "gsm8k" and config.data.train_files == ["assets/gsm8k/data.parquet"]
    assert config.trainer.n_gpus_per_node == 1 and config.actor_rollout_ref.actor.fsdp_config.optimizer_offload
    assert config.actor_rollout_ref.actor.kl_loss_coef == 1e-3  # the experiment's all the same


def test_an_advantage_estimator_is_one_that_is_registered(configure, monkeypatch):
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    check(config := configure("algorithm.adv_estimator=grppo", "name=x", "dry_run=true"))
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator = 'grppo': no such estimator. Did you mean 'grpo'\? Allowed: .*rloo"):
        validate(config)
    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "grppo", None)  # a user's own
    validate(config)
