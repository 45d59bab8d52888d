"""Writes docs/experiments.md, what each of configs/experiment sets:  python -m recipes.experiments_table"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.train import choices_of, compose

PAGE = Path(__file__).resolve().parents[1] / "docs" / "experiments.md"
PAPERS = {
    "bandpo": "BandPO ([2603.04918](https://arxiv.org/abs/2603.04918))",
    "dppo": "DPPO ([2602.04879](https://arxiv.org/abs/2602.04879))",
    "erc": "ERC ([2512.05591](https://arxiv.org/abs/2512.05591))",
}
# The columns, by key. Their order is that of the table.
SETTINGS = {
    "model": "chosen.model",
    "LoRA rank": "actor_rollout_ref.model.lora_rank",
    "LoRA alpha": "actor_rollout_ref.model.lora_alpha",
    "method": "chosen.method",
    **{key: f"method.{key}" for key in ("eps_low", "eps_high", "delta", "delta_low", "delta_high", "ratio_cap", "relax_low")},
    **{key: f"method.{key}" for key in ("relax_high", "beta_low", "beta_high", "K", "C", "dual_clip", "anchor")},
    "NLL": "actor_rollout_ref.actor.policy_loss.positive_nll_coef",
    "KL": "actor_rollout_ref.actor.kl_loss_coef",
    "KL estimator": "actor_rollout_ref.actor.kl_loss_type",
    "entropy bonus": "actor_rollout_ref.actor.entropy_coeff",
    "aggregation": "actor_rollout_ref.actor.loss_agg_mode",
    "divided by std": "algorithm.norm_adv_by_std_in_grpo",
    "group filtering": "algorithm.filter_groups.enable",
    "overlong buffer": "reward.reward_kwargs.overlong_buffer_cfg.len",
    "wrong answer": "reward.custom_reward_function.reward_kwargs.wrong",
    "prompt": "data.max_prompt_length",
    "response": "data.max_response_length",
    "prompts a step": "data.train_batch_size",
    "prompts an update": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "n": "actor_rollout_ref.rollout.n",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "warm-up": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "weight decay": "actor_rollout_ref.actor.optim.weight_decay",
    "T": "actor_rollout_ref.rollout.temperature",
    "top-p": "actor_rollout_ref.rollout.top_p",
    "epochs": "trainer.total_epochs",
    "steps": "trainer.total_training_steps",
    "validation n": "actor_rollout_ref.rollout.val_kwargs.n",
    "validation T": "actor_rollout_ref.rollout.val_kwargs.temperature",
    "validation top-p": "actor_rollout_ref.rollout.val_kwargs.top_p",
    "nodes": "trainer.nnodes",
    "GPUs a node": "trainer.n_gpus_per_node",
}
NOTES = {
    "bandpo": "Other models: `model=qwen2.5-3b-instruct`, `r1-distill-qwen-1.5b`, `r1-distill-llama-8b`. About 1,020 "
    "steps are published, so about 26,100 prompts, more than the English problems of DAPO-Math-17k and levels 3 to 5 of MATH "
    "give; `python -m recipes.prepare_data dataset=dapo_math_17k config=all rows=17398`, which adds the Chinese ones, comes near.",
    "dppo": "The paper filters its data to about 13,000 problems, by a rule that is not public: these runs use all of "
    "DAPO-Math-17k. The sanity test (`stability*`) needs problems that the model solves, 1,460 in the paper, as "
    "`assets/math_solvable/data.parquet` or `data.train_files=... data.val_files=...`. Its lengths, and how losses are "
    "aggregated, are not published. Router replay is missing: verl has it for Megatron and VeOmni alone.",
    "erc": "The other model: `model=r1-distill-qwen-1.5b`. The paper validates with responses of 32k tokens; verl has one length "
    "for training and validation.",
}


def settings(config: DictConfig) -> dict[str, Any]:
    """What a configuration sets, by SETTINGS' names; what it does not use is None."""
    found = {name: OmegaConf.select(config, key) for name, key in SETTINGS.items()}
    if not config.actor_rollout_ref.actor.use_kl_loss:
        found["KL"] = found["KL estimator"] = None
    if not found["LoRA rank"]:
        found["LoRA rank"] = found["LoRA alpha"] = None
    if found["warm-up"] < 0:
        found["warm-up"] = None
    return found


def document(experiments: dict[str, DictConfig]) -> str:
    """The page, of composed configurations by the name of their experiment."""
    page = [
        "# The published experiments",
        "Written by `python -m recipes.experiments_table` from configs/experiment. An empty cell: not used, or verl's default.\n"
        "Micro-batches are by tokens (`cluster.tokens`); no result depends on them.",
        "    python -m recipes.train experiment=bandpo/band_kl model.path=/models/DeepSeek-R1-Distill-Qwen-7B --dry-run\n"
        "    scripts/run_bandpo_qwen7b.sh --dry-run",
    ]
    for paper, title in PAPERS.items():
        rows = {name.removeprefix(f"{paper}/"): settings(config) for name, config in experiments.items() if name.startswith(f"{paper}/")}
        differing = [name for name in SETTINGS if len({repr(row[name]) for row in rows.values()}) > 1]
        common = [name for name in SETTINGS if name not in differing and next(iter(rows.values()))[name] is not None]
        first = next(iter(rows.values()))
        table = [f"| experiment={paper}/ | {' | '.join(differing)} |", "|---" * (len(differing) + 1) + "|"]
        table += [f"| {name} | {' | '.join(_text(row[key]) for key in differing)} |" for name, row in rows.items()]
        page += [f"## {title}", "All: " + ", ".join(f"{name} {_text(first[name])}" for name in common) + ".", "\n".join(table), NOTES[paper]]
    return "\n\n".join(page) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main():
    composed = {name: compose([f"experiment={name}", "name=x"]) for name in choices_of("experiment")}
    PAGE.write_text(document(composed), encoding="utf-8")


if __name__ == "__main__":
    main()
