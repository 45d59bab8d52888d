"""What can be known to be wrong before Ray starts: every problem found is named with its key, value and remedy."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.data_check import check_model_folder, check_parquet
from recipes.errors import UserError
from trustregion import ConfigError, MethodConfig

TRAINER_MODE = "trust_region_sync"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # "Qwen/Qwen2.5-7B": looked up by the workers, unless the hub is off


def check(config: DictConfig):
    """Checks the configuration alone. Raises UserError that lists all problems."""
    if not _is_count(workers := config.cluster.workers):  # other keys are computed from it
        raise UserError(f"cluster.workers = {workers!r}: must be a whole number >= 1 (FSDP workers on this machine)")
    try:
        OmegaConf.resolve(config)
        problems = list(_problems(config))
    except (OmegaConfBaseException, AttributeError, TypeError) as error:  # the last two: a node that is null
        raise UserError(f"the configuration cannot be resolved: {error}") from error
    if problems:
        raise UserError("\n       ".join(problems))


def check_files(config: DictConfig):
    """Checks the model folder and the parquet files that the configuration names. Raises UserError."""
    model = config.actor_rollout_ref.model.path
    if not isinstance(model, str):
        raise UserError(f"model.path = {model!r}: must be the folder or the name of a model (model.path=...)")
    offline = str(config.cluster.env.get("HF_HUB_OFFLINE", "0")) == "1"
    if offline or Path(model).expanduser().exists() or not HUB_NAME.fullmatch(model):
        check_model_folder(model)
    for key in ("train_files", "val_files"):
        files = config.data[key]
        if not files:
            raise UserError(f"data.{key} is not set. Give a parquet file (data.{key}=...), or choose one of the data=... presets.")
        for path in [files] if isinstance(files, str) else files:
            check_parquet(path, f"data.{key}", config.data.prompt_key)


def _problems(config: DictConfig) -> Iterator[str]:
    if not isinstance(config.seed, int) or isinstance(config.seed, bool) or not 0 <= config.seed < 2**31:
        yield f"seed = {config.seed!r}: must be a whole number >= 0 and < 2^31"
    for key in ("name", "runs", "run_dir"):
        if not isinstance(config[key], str) or not config[key]:
            yield f"{key} = {config[key]!r}: must be text (quote what looks like a number: {key}='\"...\"')"
    if isinstance(config.name, str) and ("/" in config.name or config.name in (".", "..")):
        yield f"name = {config.name!r}: names a folder in runs={config.runs}, so no path"
    try:
        MethodConfig.from_flat(OmegaConf.to_container(config.method))
    except ConfigError as error:
        yield str(error)
    yield from _trainer_problems(config)
    yield from _device_problems(config)
    yield from _batch_problems(config)


def _trainer_problems(config: DictConfig) -> Iterator[str]:
    if not config.trainer.use_v1:
        yield "trainer.use_v1 = False: verl's legacy trainer can swap the policy loss away; only its v1 trainer is supported. Remove the override."
    mode = config.trainer.v1.trainer_mode
    if mode != TRAINER_MODE:
        yield f"trainer.v1.trainer_mode = {mode!r}: only {TRAINER_MODE!r} (verl's synchronous v1 trainer) is supported. Remove the override."
    sampler = config.trainer.v1.sampler.custom_sampler
    if sampler.path or sampler.name:
        yield f"trainer.v1.sampler.custom_sampler = {sampler.path}, {sampler.name}: would be replaced by our own ordered one. Remove the override."
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss != "trust_region":
        yield f"actor_rollout_ref.actor.policy_loss.loss_mode = {loss!r}: the method is chosen by method=..., through the loss 'trust_region'. Remove the override."
    anchor, bypass = config.method.get("anchor"), config.algorithm.rollout_correction.bypass_mode
    if bypass != (anchor == "rollout"):
        yield f"algorithm.rollout_correction.bypass_mode = {bypass}: contradicts method.anchor = {anchor!r}, which sets it. Remove the override, or change method.anchor."
    if anchor == "rollout" and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield "actor_rollout_ref.rollout.calculate_log_probs = False: method.anchor = 'rollout' needs the rollout engine's log-probs. Remove the override."


def _device_problems(config: DictConfig) -> Iterator[str]:
    workers = config.cluster.workers
    if config.cluster.device not in ("cpu", "cuda"):
        yield f"cluster.device = {config.cluster.device!r}: must be 'cpu' or 'cuda'"
    if config.cluster.device == "cuda":
        # Only this machine can be looked at from here; the others of a cluster report when their workers start.
        found = torch.cuda.device_count()
        if found < workers:
            yield f"cluster.workers = {workers}: this machine has {found} CUDA devices that torch {torch.__version__} can see. Set cluster.workers={found}" if found else (
                f"cluster device 'cuda': torch {torch.__version__} sees no CUDA device on this machine. Use cluster=cpu, or install with `make setup DEVICE=cuda` where there is one."
            )
    if config.cluster.device == "cpu":
        strategy = config.actor_rollout_ref.actor.strategy
        if strategy != "fsdp2":
            yield f"actor_rollout_ref.actor.strategy = {strategy!r}: on a CPU only 'fsdp2' works (FSDP1 refuses CPU parameters)"
        if config.algorithm.adv_estimator == "gae" or config.critic.enable:
            yield "algorithm.adv_estimator = 'gae': verl's critic needs flash attention, so a GPU. Leave critic.enable unset and use group advantages (grpo, rloo, ...) on a CPU."


def _batch_problems(config: DictConfig) -> Iterator[str]:
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    counts = {
        "data.train_batch_size": data.train_batch_size,
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "trainer.nnodes": config.trainer.nnodes,
        "trainer.n_gpus_per_node": config.trainer.n_gpus_per_node,
    }
    if not actor.use_dynamic_bsz:
        counts["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] = actor.ppo_micro_batch_size_per_gpu
    wrong = [f"{key} = {value!r}: must be a whole number >= 1" for key, value in counts.items() if not _is_count(value)]
    steps = config.trainer.total_training_steps
    if steps is not None and not _is_count(steps):
        wrong.append(f"trainer.total_training_steps = {steps!r}: must be a whole number >= 1")
    if wrong:
        yield from wrong
        return

    prompts, mini, workers = data.train_batch_size, actor.ppo_mini_batch_size, config.trainer.nnodes * config.trainer.n_gpus_per_node
    if prompts % mini:
        yield f"data.train_batch_size = {prompts}: must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size = {mini} (prompts an update)"
    sequences = mini * rollout.n
    if sequences % workers:
        yield f"actor_rollout_ref.actor.ppo_mini_batch_size = {mini}: {mini} prompts x {rollout.n} rollouts do not divide over {workers} workers"
    elif not actor.use_dynamic_bsz and (sequences // workers) % actor.ppo_micro_batch_size_per_gpu:
        yield (
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = {actor.ppo_micro_batch_size_per_gpu}: does not divide a worker's share of "
            f"a mini-batch, {mini} prompts x {rollout.n} rollouts / {workers} workers = {sequences // workers} sequences"
        )


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
