"""What can be known to be wrong from the configuration alone: every problem is named with its key, value and remedy."""

import math
from collections.abc import Iterator

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.errors import UserError
from recipes.resume import RESUME_MODES
from trustregion import ConfigError, MethodConfig
from trustregion.verl_plugin.names import AGENT_LOOP, COLOCATE_ASYNC, LOSS_CONFIG, LOSS_NAME, SEPARATE_ASYNC, SYNC

# verl's trackers (verl.utils.tracking); verl itself is not imported in this process.
LOGGERS = ("clearml", "console", "file", "mlflow", "rl_insight", "swanlab", "tensorboard", "trackio", "vemlp_wandb", "wandb")
TRAINER_MODES = (SYNC, COLOCATE_ASYNC, SEPARATE_ASYNC)
# Other keys are computed from these.
FIRST = {
    "cluster.workers": "FSDP workers on this machine",
    "data.max_prompt_length": "tokens",
    "data.max_response_length": "tokens",
}
REMOVE = "Remove the override."


def check(config: DictConfig):
    """Checks the configuration and resolves it. Raises UserError that lists all problems."""
    try:
        problems = [
            f"{key} = {value!r}: must be a whole number >= 1 ({meaning})"
            for key, meaning in FIRST.items()
            if not _is_count(value := OmegaConf.select(config, key))
        ]
        if not problems:
            OmegaConf.resolve(config)
            problems = list(_problems(config))
    except (OmegaConfBaseException, AttributeError, TypeError) as error:  # the last two: a node that is null
        raise UserError(f"the configuration cannot be resolved: {error}") from error
    if problems:
        raise UserError("\n       ".join(problems))


def _problems(config: DictConfig) -> Iterator[str]:
    yield from _run_problems(config)
    yield from _file_problems(config)
    yield from _reward_problems(config)
    yield from _method_problems(config)
    yield from _trainer_problems(config)
    yield from _rollout_problems(config)
    yield from _device_problems(config)
    yield from _batch_problems(config)


def _run_problems(config: DictConfig) -> Iterator[str]:
    if not isinstance(config.seed, int) or isinstance(config.seed, bool) or not 0 <= config.seed < 2**31:
        yield f"seed = {config.seed!r}: must be a whole number >= 0 and < 2^31"
    for key in ("dry_run", "restart_without_checkpoint", "allow_changes", "trust_checkpoint"):
        if not isinstance(config[key], bool):
            yield f"{key} = {config[key]!r}: must be true or false"
    restarts = config.max_restarts
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        yield f"max_restarts = {restarts!r}: must be a whole number >= 0"
    if config.preflight not in (True, False, "only"):
        yield f"preflight = {config.preflight!r}: must be true, false or only"
    records = config.token_records
    if not isinstance(records, DictConfig):
        yield f"token_records = {records!r}: has keys of its own. Set token_records.every and token_records.sequences."
    else:
        if not (records.every == 0 or _is_count(records.every)) or isinstance(records.every, bool):
            yield f"token_records.every = {records.every!r}: must be a whole number of steps >= 1, or 0 for no records"
        if not _is_count(records.sequences):
            yield f"token_records.sequences = {records.sequences!r}: must be a whole number >= 1 (responses of each update)"
    for key in ("name", "runs", "run_dir", "assets"):
        if not _is_text(config[key]):
            yield f"{key} = {config[key]!r}: must be text (quote what looks like a number: {key}='\"...\"')"
    if isinstance(config.name, str) and ("/" in config.name or config.name in (".", "..")):
        yield f"name = {config.name!r}: names a folder in runs={config.runs}, so no path"


def _file_problems(config: DictConfig) -> Iterator[str]:
    model = config.actor_rollout_ref.model.path
    if not _is_text(model):
        yield f"model.path = {model!r}: must be the folder of a model. Give one (model.path=...), or choose one of the model=... presets."
    for key in ("train_files", "val_files"):
        files = config.data[key]
        if not (_is_text(files) or (isinstance(files, ListConfig) and files and all(map(_is_text, files)))):
            yield f"data.{key} = {files!r}: must be a parquet file or a list of them. Give one (data.{key}=...), or choose one of the data=... presets."
    if not _is_text(config.data.prompt_key):
        yield f"data.prompt_key = {config.data.prompt_key!r}: must be the column with the chat messages. {REMOVE}"


def _reward_problems(config: DictConfig) -> Iterator[str]:
    function, model = config.reward.custom_reward_function, config.reward.reward_model
    if function.path is not None and not _is_text(function.path):
        yield f"reward.custom_reward_function.path = {function.path!r}: must be the Python file of your reward function. Give one, or choose another reward=..."
    elif function.path and not _is_text(function.name):
        yield f"reward.custom_reward_function.name = {function.name!r}: must be the name of a function in {function.path}"
    if not isinstance(arguments := function.get("reward_kwargs", {}), dict | DictConfig):
        yield f"reward.custom_reward_function.reward_kwargs = {arguments!r}: must be a mapping of the function's further arguments. {REMOVE}"
    if model.enable and not _is_text(model.model_path):
        yield f"reward.reward_model.model_path = {model.model_path!r}: must be the folder of a reward model. Give one, or choose another reward=..."
    if model.enable and not model.enable_resource_pool and config.algorithm.filter_groups.enable:
        yield "algorithm.filter_groups.enable = True: groups are filtered before a reward model on the same GPUs has scored them. Set it to false, or give the model GPUs of its own (reward.reward_model.enable_resource_pool=true)."


def _method_problems(config: DictConfig) -> Iterator[str]:
    try:
        method = MethodConfig.from_flat(OmegaConf.to_container(config.method))
    except ConfigError as error:
        yield str(error)
    else:
        if method.topk or method.entropy_every_k_steps:
            yield from _whole_vocabulary_problems(config)
        if method.topk and method.anchor == "rollout":
            yield from _top_tokens_problems(config, method.topk)
    chosen = config.actor_rollout_ref.actor.policy_loss
    for key, ours in {"_target_": LOSS_CONFIG, "loss_mode": LOSS_NAME, "method": config.method}.items():
        if chosen[key] != ours:
            yield f"actor_rollout_ref.actor.policy_loss.{key} = {chosen[key]!r}: the method is chosen by method=..., which sets this to {ours!r}. {REMOVE}"
    anchor, bypass = config.method.get("anchor"), config.algorithm.rollout_correction.bypass_mode
    if bypass != (anchor == "rollout"):
        yield f"algorithm.rollout_correction.bypass_mode = {bypass}: contradicts method.anchor = {anchor!r}, which sets it. Remove the override, or change method.anchor."
    correction = config.algorithm.rollout_correction
    if anchor == "rollout" and correction.rollout_is is not None:
        yield f"algorithm.rollout_correction.rollout_is = {correction.rollout_is!r}: with method.anchor = 'rollout' the ratio is measured from the rollout policy already, and importance weights would count the difference twice. {REMOVE}"
    if anchor == "rollout" and correction.rollout_rs is not None:
        yield f"algorithm.rollout_correction.rollout_rs = {correction.rollout_rs!r}: verl rejects no samples with method.anchor = 'rollout' (its bypass mode). Remove the override, or set method.anchor=old."
    if anchor == "rollout" and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield f"actor_rollout_ref.rollout.calculate_log_probs = False: method.anchor = 'rollout' needs the rollout engine's log-probs. {REMOVE}"


def _whole_vocabulary_problems(config: DictConfig) -> Iterator[str]:
    """What keeps the engine from seeing all logits of every token."""
    needs = "the method needs statistics of the whole vocabulary"
    if config.actor_rollout_ref.model.use_fused_kernels:
        yield f"actor_rollout_ref.model.use_fused_kernels = True: {needs}, and fused kernels never make the logits. {REMOVE}"
    if config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
        yield f"actor_rollout_ref.actor.strategy = {config.actor_rollout_ref.actor.strategy!r}: {needs}, which verl's FSDP engines alone hand out. Set it to 'fsdp2'."
    if config.get("distillation") and config.distillation.get("enabled"):
        yield f"distillation.enabled = True: {needs}, and distillation takes the logits for itself. {REMOVE}"


def _top_tokens_problems(config: DictConfig, K: int) -> Iterator[str]:
    """What keeps the rollout engine from naming the K most likely tokens of every position."""
    rollout = config.actor_rollout_ref.rollout
    needs = "method.anchor = 'rollout' with method.partition = 'topk' needs vLLM's most likely tokens"
    most = OmegaConf.select(rollout, "engine_kwargs.vllm.max_logprobs")
    if not isinstance(most, int) or K > most:
        yield f"actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs = {most!r}: {needs}, method.K = {K} of them. {REMOVE}"
    if rollout.agent.default_agent_loop != AGENT_LOOP:
        yield f"actor_rollout_ref.rollout.agent.default_agent_loop = {rollout.agent.default_agent_loop!r}: {needs}, which {AGENT_LOOP!r} alone asks for. Remove the override, or set method.anchor=old."


def _trainer_problems(config: DictConfig) -> Iterator[str]:
    if not config.trainer.use_v1:
        yield f"trainer.use_v1 = False: verl's legacy trainer can swap the policy loss away; only its v1 trainer is supported. {REMOVE}"
    mode = config.trainer.v1.trainer_mode
    if mode not in TRAINER_MODES:
        yield f"trainer.v1.trainer_mode = {mode!r}: must be one of {', '.join(map(repr, TRAINER_MODES))}, verl's v1 trainers of these names with ours in front"
    if mode != SYNC and config.method.get("anchor") == "rollout" and config.method.get("partition") == "topk":
        yield f"trainer.v1.trainer_mode = {mode!r}: interrupts responses, and verl does not keep the most likely tokens of the parts, which method.anchor = 'rollout' with method.partition = 'topk' needs. Set method.anchor=old, or remove the override."
    if mode == SEPARATE_ASYNC:
        yield from _separate_problems(config)
    sampler = config.trainer.v1.sampler.custom_sampler
    if sampler.path or sampler.name:
        yield f"trainer.v1.sampler.custom_sampler = {sampler.path}, {sampler.name}: would be replaced by our own ordered one. {REMOVE}"
    logger = config.trainer.logger
    loggers = [logger] if isinstance(logger, str) else logger
    if not isinstance(loggers, list | ListConfig) or not set(loggers) <= set(LOGGERS):
        yield f"trainer.logger = {logger!r}: must be a list of verl's trackers, which are {', '.join(LOGGERS)}"
    elif "file" not in loggers:
        yield f"trainer.logger = {logger!r}: lacks file, which progress and summary are read from. Add it: trainer.logger=[file,...]"
    yield from _checkpoint_problems(config)
    rate = config.actor_rollout_ref.actor.optim.lr
    if not _is_number(rate) or rate < 0:
        yield f"actor_rollout_ref.actor.optim.lr = {rate!r}: must be a number >= 0"


def _checkpoint_problems(config: DictConfig) -> Iterator[str]:
    trainer = config.trainer
    for key in ("save_freq", "test_freq"):
        if not isinstance(trainer[key], int) or isinstance(trainer[key], bool):
            yield f"trainer.{key} = {trainer[key]!r}: must be a whole number of steps, or -1 for never"
    if not _is_text(trainer.default_local_dir):
        yield f"trainer.default_local_dir = {trainer.default_local_dir!r}: must be the folder for checkpoints. {REMOVE}"
    if trainer.resume_mode not in RESUME_MODES:
        yield f"trainer.resume_mode = {trainer.resume_mode!r}: must be one of {', '.join(RESUME_MODES)}"
    elif (trainer.resume_mode == "resume_path") != _is_text(trainer.resume_from_path):
        yield f"trainer.resume_from_path = {trainer.resume_from_path!r}: must be the folder of a checkpoint with trainer.resume_mode=resume_path, and null otherwise"
    keep = trainer.max_actor_ckpt_to_keep
    if keep is not None and not _is_count(keep):
        yield f"trainer.max_actor_ckpt_to_keep = {keep!r}: must be a whole number >= 1, or null for all"
    if trainer.max_critic_ckpt_to_keep not in (None, keep):
        yield f"trainer.max_critic_ckpt_to_keep = {trainer.max_critic_ckpt_to_keep!r}: checkpoints are kept whole, as many as trainer.max_actor_ckpt_to_keep says. {REMOVE}"
    if trainer.get("remove_previous_ckpt_in_save"):
        yield "trainer.remove_previous_ckpt_in_save = True: removes a checkpoint before the next is whole. Use trainer.max_actor_ckpt_to_keep=1."


def _separate_problems(config: DictConfig) -> Iterator[str]:
    """What verl asserts of its separate trainer, after minutes."""
    rollout, said = config.actor_rollout_ref.rollout, f"trainer.v1.trainer_mode = {SEPARATE_ASYNC!r}"
    for key in ("nnodes", "n_gpus_per_node"):
        if not _is_count(rollout[key]):
            yield f"actor_rollout_ref.rollout.{key} = {rollout[key]!r}: {said} needs devices for the rollouts alone, so at least 1 (on a CPU: cluster=cpu_separate)"
    if rollout.checkpoint_engine.backend == "naive":
        yield f"actor_rollout_ref.rollout.checkpoint_engine.backend = 'naive': {said} sends weights to other processes. Set 'nccl', or 'file' on a CPU (cluster=cpu_separate)."
    prompts, mini, steps = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size, config.trainer.v1.separate_async.parameter_sync_step
    if all(map(_is_count, (prompts, mini))) and (not _is_count(steps) or prompts != mini * steps):
        yield f"trainer.v1.separate_async.parameter_sync_step = {steps!r}: must be data.train_batch_size = {prompts} divided by actor_rollout_ref.actor.ppo_mini_batch_size = {mini}"


def _rollout_problems(config: DictConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        yield f"actor_rollout_ref.rollout.name = {rollout.name!r}: only 'vllm' is supported. {REMOVE}"
    if not _is_number(rollout.temperature) or rollout.temperature <= 0:
        yield (
            f"actor_rollout_ref.rollout.temperature = {rollout.temperature!r}: must be a number > 0: training samples from the policy, "
            "and divides its logits by this (greedy validation is actor_rollout_ref.rollout.val_kwargs.do_sample=false)"
        )
    validating = rollout.val_kwargs.temperature
    if not _is_number(validating) or validating < 0:
        yield f"actor_rollout_ref.rollout.val_kwargs.temperature = {validating!r}: must be a number >= 0 (0: greedy)"
    for key in ("gpu_memory_utilization", "top_p", "val_kwargs.top_p"):
        if not _is_number(part := OmegaConf.select(rollout, key)) or not 0 < part <= 1:
            yield f"actor_rollout_ref.rollout.{key} = {part!r}: must be a number > 0 and <= 1"


def _device_problems(config: DictConfig) -> Iterator[str]:
    workers, environment = config.cluster.workers, config.cluster.env
    if not isinstance(environment, DictConfig) or not all(map(_is_text, environment)):
        yield f"cluster.env = {environment!r}: must be a mapping of environment variables to their values ({{}} for none)"
    if config.cluster.device not in ("cpu", "cuda"):
        yield f"cluster.device = {config.cluster.device!r}: must be 'cpu' or 'cuda'"
    if config.cluster.device == "cuda" and not config.dry_run:
        # Only this machine can be looked at from here; the others of a cluster report when their workers start.
        found = torch.cuda.device_count()
        if found < workers:
            yield f"cluster.workers = {workers}: this machine has {found} CUDA devices that torch {torch.__version__} can see. Set cluster.workers={found}" if found else (
                f"cluster device 'cuda': torch {torch.__version__} sees no CUDA device on this machine. Where there is one, install with `make setup DEVICE=cuda`; here, look at the configuration with --dry-run, or use cluster=cpu."
            )
    if config.cluster.device == "cpu":
        strategy, parallel = config.actor_rollout_ref.actor.strategy, config.actor_rollout_ref.rollout.tensor_model_parallel_size
        if strategy != "fsdp2":
            yield f"actor_rollout_ref.actor.strategy = {strategy!r}: on a CPU only 'fsdp2' works (FSDP1 refuses CPU parameters)"
        if parallel != 1:
            yield f"actor_rollout_ref.rollout.tensor_model_parallel_size = {parallel!r}: on a CPU each worker has a vLLM server of its own, so 1. {REMOVE}"
        for key in ("actor.ulysses_sequence_parallel_size", "actor.fsdp_config.ulysses_sequence_parallel_size"):
            if (sharing := OmegaConf.select(config.actor_rollout_ref, key)) != 1:
                yield f"actor_rollout_ref.{key} = {sharing!r}: workers share a sequence through flash attention, which has no CPU kernel. {REMOVE}"
        if config.algorithm.adv_estimator == "gae" or config.critic.enable:
            yield "algorithm.adv_estimator = 'gae': verl's critic needs flash attention, so a GPU. Leave critic.enable unset and use group advantages (grpo, rloo, ...) on a CPU."


def _batch_problems(config: DictConfig) -> Iterator[str]:
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    prompts, mini, micro = config.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
    counts = {
        "data.train_batch_size": prompts,
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.rollout.val_kwargs.n": rollout.val_kwargs.n,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "trainer.nnodes": trainer.nnodes,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        "trainer.total_epochs": trainer.total_epochs,
    }
    if not actor.use_dynamic_bsz:
        counts["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] = micro
    if trainer.total_training_steps is not None:
        counts["trainer.total_training_steps"] = trainer.total_training_steps
    if config.data.val_batch_size not in (None, 0):  # for verl both mean all rows
        counts["data.val_batch_size"] = config.data.val_batch_size
    if config.data.train_max_samples != -1:
        counts["data.train_max_samples"] = config.data.train_max_samples
    wrong = [f"{key} = {value!r}: must be a whole number >= 1" for key, value in counts.items() if not _is_count(value)]
    if wrong:
        yield from wrong
        return

    if trainer.n_gpus_per_node != config.cluster.workers:
        yield f"trainer.n_gpus_per_node = {trainer.n_gpus_per_node}: contradicts cluster.workers = {config.cluster.workers}, which sets it. Remove the override, or change cluster.workers."
    if trainer.nnodes > 1 and config.ray_kwargs.ray_init.get("address") == "local":
        yield f"trainer.nnodes = {trainer.nnodes}: a Ray cluster of this machine alone has one node (ray_kwargs.ray_init.address = 'local'). Set cluster.nodes={trainer.nnodes} on GPUs, or the address of a cluster that is up."
    workers = trainer.nnodes * trainer.n_gpus_per_node
    yield from _placement_problems(config, workers)
    yield from _length_problems(config)
    sharing = actor.ulysses_sequence_parallel_size
    if not _is_count(sharing) or workers % sharing:
        yield f"actor_rollout_ref.actor.ulysses_sequence_parallel_size = {sharing!r}: must divide the number of workers, {workers}"
        return
    if prompts % mini:
        yield f"data.train_batch_size = {prompts}: must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size = {mini} (prompts an update)"
    elif prompts * rollout.n % workers:
        yield f"data.train_batch_size = {prompts}: {prompts} prompts x {rollout.n} rollouts do not divide over {workers} workers"
    groups = workers // sharing  # of workers that share their sequences
    sequences, over = mini * rollout.n, f"{groups} {'workers' if sharing == 1 else f'groups of {sharing} workers'}"
    if sequences % groups:
        yield f"actor_rollout_ref.actor.ppo_mini_batch_size = {mini}: {mini} prompts x {rollout.n} rollouts do not divide over {over}"
    elif not actor.use_dynamic_bsz and (sequences // groups) % micro:
        yield (
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = {micro}: does not divide a worker's share of "
            f"a mini-batch, {mini} prompts x {rollout.n} rollouts / {over} = {sequences // groups} sequences"
        )


def _placement_problems(config: DictConfig, workers: int) -> Iterator[str]:
    """Which GPUs shards and vLLM servers are on."""
    rollout, sharded, gpus = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.fsdp_config.fsdp_size, config.trainer.n_gpus_per_node
    parallel = rollout.tensor_model_parallel_size
    if workers % parallel:
        yield f"actor_rollout_ref.rollout.tensor_model_parallel_size = {parallel}: must divide the number of workers, {workers}"
    elif gpus % parallel and parallel % gpus:
        yield f"actor_rollout_ref.rollout.tensor_model_parallel_size = {parallel}: does not divide the {gpus} GPUs of a node, so that a vLLM server would lie across two. Set a divisor of {gpus}."
    if sharded != -1 and (not _is_count(sharded) or workers % sharded):
        yield f"actor_rollout_ref.actor.fsdp_config.fsdp_size = {sharded!r}: must divide the number of workers, {workers}, or be -1 (all of them)"


def _length_problems(config: DictConfig) -> Iterator[str]:
    """What is too short for one prompt and one response."""
    everything, longest = config.actor_rollout_ref, config.data.max_prompt_length + config.data.max_response_length
    need = f"data.max_prompt_length + data.max_response_length = {longest} tokens"
    budgets = {
        "actor.ppo_max_token_len_per_gpu": (everything.actor.use_dynamic_bsz, everything.actor.ulysses_sequence_parallel_size),
        "rollout.log_prob_max_token_len_per_gpu": (everything.rollout.log_prob_use_dynamic_bsz, everything.actor.ulysses_sequence_parallel_size),
        "ref.log_prob_max_token_len_per_gpu": (everything.ref.log_prob_use_dynamic_bsz, everything.ref.ulysses_sequence_parallel_size),
    }
    seen = set()
    for key, (used, sharing) in budgets.items():
        tokens = OmegaConf.select(everything, key)
        if used and tokens not in seen and (not _is_count(tokens) or tokens * (sharing or 1) < longest):
            yield f"actor_rollout_ref.{key} = {tokens!r}: must hold one sequence, {need}"
        seen.add(tokens)  # the others are the first's where they are not set
    if (limit := everything.rollout.max_model_len) is not None and (not _is_count(limit) or limit < longest):
        yield f"actor_rollout_ref.rollout.max_model_len = {limit!r}: must hold {need}. {REMOVE}"


def _is_text(value) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
