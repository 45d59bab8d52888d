"""What can be known to be wrong from the files that a configuration names, before Ray starts."""

import importlib.util
import re
from pathlib import Path

from omegaconf import DictConfig

from recipes.data_check import check_prompts
from recipes.errors import UserError
from recipes.model_check import check_chat, check_model_folder, longest_sequence

NEEDED = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}  # by the rewards in recipes/rewards.py
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # "Qwen/Qwen2.5-7B": looked up by the workers, unless the hub is off


def file_problems(config: DictConfig) -> list[str]:
    """What is wrong with the model folder, the data files and the reward that `config`, which check() has passed, names."""
    problems = []
    for look in (_check_model, _check_data, _check_reward):
        try:
            look(config)
        except UserError as error:
            problems.append(str(error))
    return problems


def files_of(config: DictConfig) -> list[str]:
    """The files and folders that every node needs. Names on a hub are none."""
    model, data, reward = config.actor_rollout_ref.model, config.data, config.reward
    named = [model.path, model.tokenizer_path]
    named += [reward.reward_model.model_path] if reward.reward_model.enable else []
    files = [path for path in named if path and _is_here(path, config)]
    for some in (data.train_files, data.val_files):
        files += [some] if isinstance(some, str) else some
    function = reward.custom_reward_function.path
    return files + ([function.removeprefix("file://")] if function and not function.startswith("pkg://") else [])


def _is_here(path: str, config: DictConfig) -> bool:
    offline = str(config.cluster.env.get("HF_HUB_OFFLINE", "0")) == "1"
    return offline or Path(path).expanduser().exists() or not HUB_NAME.fullmatch(path)


def _check_model(config: DictConfig):
    if not _is_here(config.actor_rollout_ref.model.path, config):
        return
    chosen, data = config.actor_rollout_ref.model, config.data
    said = f"model.path={chosen.path}"
    model = check_model_folder(chosen.path, trust_remote_code=chosen.trust_remote_code)
    if "vision_config" in model and config.cluster.device == "cpu":
        raise UserError(
            f"{said}: is a vision-language model (its config.json has a vision_config), whose images would be lost on a CPU: "
            "only text models are supported there. Choose another model, or cluster=gpu."
        )
    vocabulary, K = (model.get("text_config") or model).get("vocab_size"), config.method.get("K")
    if vocabulary is not None and K is not None and K >= vocabulary:
        raise UserError(f"method.K = {K}: {said} has a vocabulary of {vocabulary} tokens, and K must leave a rest. Lower it.")
    _check_heads(config, model.get("text_config") or model, said)
    if "vision_config" not in model:  # else verl formats the prompts by the model's processor
        _check_tokenizer(config, vocabulary)
    tokens, longest = data.max_prompt_length + data.max_response_length, longest_sequence(model)
    if longest is not None and tokens > longest:
        raise UserError(
            f"data.max_prompt_length = {data.max_prompt_length} and data.max_response_length = {data.max_response_length}: "
            f"{tokens} tokens together, and {said} has positions for {longest} (max_position_embeddings). Lower one of the two."
        )


def _check_heads(config: DictConfig, model: dict, said: str):
    """GPUs that share a layer, or a sequence, share out its attention heads."""
    chosen = {
        "rollout.tensor_model_parallel_size": config.actor_rollout_ref.rollout.tensor_model_parallel_size,
        "actor.ulysses_sequence_parallel_size": config.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
    }
    heads = model.get("num_attention_heads")
    shared = model.get("num_key_value_heads") or heads
    for key, size in chosen.items():
        if heads and heads % size:
            raise UserError(f"actor_rollout_ref.{key} = {size}: {said} has {heads} attention heads, which it does not divide. Set a divisor.")
        if shared and shared % size and size % shared:
            raise UserError(
                f"actor_rollout_ref.{key} = {size}: {said} has {shared} key and value heads, which neither divide it nor are "
                "divided by it. Set a divisor or a multiple."
            )


def _check_tokenizer(config: DictConfig, vocabulary: int | None):
    model = config.actor_rollout_ref.model
    key, path = "model.path", model.path
    if model.tokenizer_path:
        key, path = "actor_rollout_ref.model.tokenizer_path", model.tokenizer_path
    if _is_here(path, config):
        check_chat(path, key, model.custom_chat_template, model.trust_remote_code, vocabulary)


def _check_data(config: DictConfig):
    data, rows = config.data, {}
    for key in ("train_files", "val_files"):
        files = [data[key]] if isinstance(data[key], str) else data[key]
        rows[key] = sum(check_prompts(path, f"data.{key}", data.prompt_key) for path in files)
    used = min(rows["train_files"], data.train_max_samples) if data.train_max_samples > 0 else rows["train_files"]
    if used < data.train_batch_size:
        limit = f" (data.train_max_samples = {used})" if used < rows["train_files"] else ""
        raise UserError(
            f"data.train_batch_size = {data.train_batch_size}: data.train_files = {data.train_files} gives {used} prompts{limit}, "
            "less than one batch. Lower data.train_batch_size, or give more prompts."
        )


def _check_reward(config: DictConfig):
    key, (path, name) = "reward.custom_reward_function.path", map(config.reward.custom_reward_function.get, ("path", "name"))
    if path == "pkg://recipes.rewards" and name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        raise UserError(
            f"reward.custom_reward_function.name={name}: {NEEDED[name]} is not installed. Install it (pip install --no-deps "
            f"{NEEDED[name].replace('_', '-')}, on each node), or choose another reward=..."
        )
    if path and not path.startswith("pkg://") and not Path(path.removeprefix("file://")).is_file():
        raise UserError(f"{key}={path}: no such file (looked for {Path(path).absolute()}). Correct the path, or choose another reward=...")
    if config.reward.reward_model.enable and _is_here(config.reward.reward_model.model_path, config):
        check_model_folder(config.reward.reward_model.model_path, "reward.reward_model.model_path")
