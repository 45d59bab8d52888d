"""What can be known to be wrong from the files that a configuration names, before Ray starts."""

import importlib.util
import itertools
import json
import os
import pickle
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipes.data_check import check_prompts, first_prompts, first_rows
from recipes.errors import UserError
from recipes.model_check import (
    check_chat,
    check_model_folder,
    check_same_ids,
    check_vocabulary,
    first_line,
    load_tokenizer,
    longest_sequence,
)
from recipes.processes import ProcessTree

NEEDED = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}  # by the rewards in recipes/rewards.py
POLL_SECONDS = 0.1
REWARD_SECONDS = 300  # for a response or two of each data source: a judge may be a model elsewhere
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # "Qwen/Qwen2.5-7B": looked up by the workers, unless the hub is off


def file_problems(config: DictConfig) -> list[str]:
    """What is wrong with the model folder, the data files and the reward that `config`, which check() has passed, names."""
    problems, tokenizer = [], None
    with _noted(problems):
        tokenizer = _check_model(config)
    of_reward = []
    with _noted(of_reward):
        _check_reward(config)
    with _noted(problems):
        _check_data(config)
        if tokenizer is not None:
            _check_lengths(config, tokenizer)
        if not of_reward:
            _try_reward(config)
    return problems + of_reward


@contextmanager
def _noted(problems: list[str]):
    try:
        yield
    except UserError as error:
        problems.append(str(error))


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
    """Returns the tokenizer, or None where verl formats the prompts by the model's processor, or takes it from a hub."""
    if not _is_here(config.actor_rollout_ref.model.path, config):
        return None
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
    tokenizer = None if "vision_config" in model else _check_tokenizer(config, vocabulary)
    tokens, longest = data.max_prompt_length + data.max_response_length, longest_sequence(model)
    if longest is not None and tokens > longest:
        raise UserError(
            f"data.max_prompt_length = {data.max_prompt_length} and data.max_response_length = {data.max_response_length}: "
            f"{tokens} tokens together, and {said} has positions for {longest} (max_position_embeddings). Lower one of the two."
        )
    return tokenizer


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
    if not _is_here(path, config):
        return None
    tokenizer = check_chat(path, key, model.custom_chat_template, model.trust_remote_code)
    check_vocabulary(tokenizer, vocabulary, f"{key}={path}")
    if model.tokenizer_path:
        check_same_ids(tokenizer, load_tokenizer(model.path, trust_remote_code=model.trust_remote_code), f"{key}={path}")
    return tokenizer


def _check_data(config: DictConfig):
    data, rows = config.data, {}
    for key in ("train_files", "val_files"):
        rows[key] = sum(check_prompts(path, f"data.{key}", data.prompt_key) for path in _files(config, key))
    used = min(rows["train_files"], data.train_max_samples) if data.train_max_samples > 0 else rows["train_files"]
    if used < data.train_batch_size:
        limit = f" (data.train_max_samples = {used})" if used < rows["train_files"] else ""
        raise UserError(
            f"data.train_batch_size = {data.train_batch_size}: data.train_files = {data.train_files} gives {used} prompts{limit}, "
            "less than one batch. Lower data.train_batch_size, or give more prompts."
        )


def _check_lengths(config: DictConfig, tokenizer):
    """verl leaves out what is longer than data.max_prompt_length, or cuts its beginning off; of all prompts, that is no data."""
    longest, template = config.data.max_prompt_length, config.actor_rollout_ref.model.custom_chat_template
    for key in ("train_files", "val_files"):
        counts = (_prompt_lengths(file, f"data.{key}", config.data.prompt_key, tokenizer, template) for file in _files(config, key))
        tokens = [*itertools.chain.from_iterable(counts)]
        if tokens and min(tokens) > longest:
            raise UserError(
                f"data.max_prompt_length = {longest}: the first {len(tokens)} prompts of data.{key} = {config.data[key]} have "
                f"{min(tokens)} to {max(tokens)} tokens each, and none would be left. Raise it."
            )


def _prompt_lengths(file: str, key: str, prompt_key: str, tokenizer, template: str | None) -> list[int]:
    """The tokens of each of the file's first prompts. verl leaves out, too, what the chat template fails at."""
    tokens = []
    for row, messages in enumerate(first_prompts(file, prompt_key)):
        try:
            ids = tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates are programs, and raise what they like
            raise UserError(
                f"{key}={file}: the tokenizer's chat template fails at {prompt_key} in row {row}, counted from 0 ({first_line(error)}). "
                "Correct the row or leave it out, or give a template with actor_rollout_ref.model.custom_chat_template=..."
            ) from error
        tokens.append(len(ids))
    return tokens


def _files(config: DictConfig, key: str) -> list[str]:
    return [config.data[key]] if isinstance(config.data[key], str) else list(config.data[key])


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


def _try_reward(config: DictConfig):
    path, name = map(config.reward.custom_reward_function.get, ("path", "name"))
    if not path or config.reward.reward_model.enable:  # it may need that model's server
        return
    files = [file for key in ("train_files", "val_files") for file in _files(config, key)]
    rows = [row for file in files for row in first_rows(file, config.data.prompt_key)]
    kwargs = config.reward.custom_reward_function.get("reward_kwargs")
    arguments = (path, name, OmegaConf.to_container(kwargs) if kwargs else {}, rows)
    environment = {**os.environ, **{key: str(value) for key, value in config.cluster.env.items()}}
    said = f"reward.custom_reward_function.path={path}"
    with tempfile.TemporaryDirectory() as folder:
        asked, answer, log = (Path(folder) / file for file in ("arguments.pickle", "answer.json", "log.txt"))
        asked.write_bytes(pickle.dumps(arguments))
        tree = ProcessTree([sys.executable, "-m", "recipes.try_reward", str(asked), str(answer)], environment, log)
        deadline = time.monotonic() + REWARD_SECONDS
        try:
            # With the answer there, nobody waits for threads and workers of the user's that do not end.
            while tree.poll() is None and not answer.exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        finally:
            late, code = tree.poll() is None, tree.end()
        if answer.exists():
            problem = json.loads(answer.read_text(encoding="utf-8"))
        elif late:
            problem = f"{name} has not scored {2 * len(rows)} responses in {REWARD_SECONDS} s"
        else:
            last = (log.read_text(encoding="utf-8", errors="replace").strip() or "no word").splitlines()[-1]
            problem = f"its process ended with {code} before all was scored ({last})"
    if problem and path == "pkg://recipes.rewards":
        raise UserError(f"{said}: {problem}. Choose the reward=... that fits data.train_files and data.val_files, or write a data_source that it knows (docs/data.md)")
    if problem:
        raise UserError(f"{said}: {problem}. Correct the function (it is tried before a run), or choose another reward=...")
