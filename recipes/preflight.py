"""What is looked at before training, so that a run that cannot succeed takes no GPU-hour: `preflight: true|only|false`.

In order: the files that the configuration names; disk; memory of the GPUs; the nodes of the Ray cluster, where one is
joined; and one token from vLLM, as the run starts it. Ray and vLLM are started in processes of their own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from recipes.driver import validate
from recipes.errors import UserError
from recipes.estimates import Findings, GiB, disk, memory, read_model
from recipes.file_checks import file_problems, files_of
from recipes.processes import ProcessTree, private_temporary_files

POLL_SECONDS = 0.2
SECONDS = 900.0  # for a process: vLLM loads large models, and compiles


def preflight(config: DictConfig, console: Console):
    """Looks at what `config`, which check() has passed, needs. Prints warnings, and all that was found where it matters.

    Raises UserError that lists all problems.
    """
    found = Findings(problems=file_problems(config))
    if config.preflight:
        found += estimates(config)
        if is_joined(config):
            with console.status("looking at the cluster's nodes ..."):
                found += nodes(config)
        if wants_a_token(config) and not found.problems:
            with console.status("asking vLLM for one token ..."):
                found += one_token(config)
    if config.preflight == "only":  # the driver does it before it starts Ray
        found.problems += verl_problems(config)
    for text in found.warnings:
        console.print(Text(f"note:  {text}", style="yellow"), soft_wrap=True)
    if config.preflight == "only" or (config.preflight and config.cluster.device == "cuda"):
        for text in found.facts:
            console.print(Text(f"found: {text}"), soft_wrap=True)
    if found.problems:
        raise UserError("\n       ".join(found.problems))


def estimates(config: DictConfig, stated_only: bool = False) -> Findings:
    """Disk and memory, where the model is here; memory of the GPUs that are visible, else as cluster.gpu_memory states it."""
    model = read_model(config.actor_rollout_ref.model.path)
    if model is None:
        return Findings(facts=["disk and memory: not estimated, the model's safetensors are not on this machine"])
    found = Findings() if stated_only else disk(config, model[1])
    if config.cluster.device == "cuda":
        visible = [] if stated_only else gpu_memory()
        total = min(visible) if visible else int(config.cluster.gpu_memory * GiB)
        found += memory(config, *model, total)
    return found


def gpu_memory() -> list[int]:
    """Bytes of each GPU of this machine, by the driver's own tool; empty where there is none."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) * 2**20 for line in told.stdout.split() if line.isdigit()]


def is_joined(config: DictConfig) -> bool:
    """Whether the run joins a Ray cluster that is up, instead of starting one of this machine alone."""
    return config.ray_kwargs.ray_init.get("address") not in (None, "local")


def nodes(config: DictConfig) -> Findings:
    """Whether the nodes are there, are the same, and have what the run needs."""
    address = config.ray_kwargs.ray_init.address
    modules = ["recipes.rewards"] if str(config.reward.custom_reward_function.path).startswith("pkg://recipes.") else []
    request = {
        "address": os.environ.get("RAY_ADDRESS", address),
        "nodes": config.trainer.nnodes,
        "gpus": config.trainer.n_gpus_per_node,
        "environment": {key: str(value) for key, value in config.cluster.env.items()},
        "paths": files_of(config),
        "imports": modules,
    }
    return in_a_process("ray_cluster", ["check"], json.dumps(request), config, "the cluster's nodes could not be looked at")


def wants_a_token(config: DictConfig) -> bool:
    """On several GPUs, where a run that fails in vLLM has cost most; on a CPU the run itself is there as fast."""
    several = config.trainer.nnodes * config.trainer.n_gpus_per_node > 1
    return config.preflight == "only" or (config.cluster.device == "cuda" and several)


def one_token(config: DictConfig) -> Findings:
    """One token from vLLM on this machine, with the run's model and engine settings."""
    if config.cluster.device == "cuda" and len(gpu_memory()) < config.actor_rollout_ref.rollout.tensor_model_parallel_size:
        return Findings(facts=["one token: not tried, this machine has too few GPUs for a vLLM server"])
    request = {"rollout": config.actor_rollout_ref.rollout, "model": config.actor_rollout_ref.model}
    failed = "vLLM does not start with the run's model and settings (actor_rollout_ref.rollout)"
    return in_a_process("one_token", [], json.dumps(OmegaConf.to_container(OmegaConf.create(request))), config, failed)


def in_a_process(module: str, arguments: list[str], request: str, config: DictConfig, failed: str) -> Findings:
    """What a module of the plugin finds, run with the cluster's environment and, as last argument, a file with `request`.

    It answers by a line of JSON. Leaves nothing behind. Of a process that fails, or takes longer than SECONDS, the problem
    that `failed` names, with the end of what it wrote.
    """
    environment = {**os.environ, **{key: str(value) for key, value in config.cluster.env.items()}}
    with private_temporary_files(environment) as environment, tempfile.TemporaryDirectory() as folder:
        asked, log = Path(folder) / "request.json", Path(folder) / "log.txt"
        asked.write_text(request, encoding="utf-8")
        command = [sys.executable, "-m", f"trustregion.verl_plugin.{module}", *arguments, str(asked)]
        tree = ProcessTree(command, environment, log)
        deadline = time.monotonic() + SECONDS
        try:
            while tree.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        finally:
            late, code = tree.poll() is None, tree.end()
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    answers = [line for line in lines if line.startswith('{"')]
    if code == 0 and answers:
        return Findings(**json.loads(answers[-1]))
    how = f"no answer after {SECONDS:g} s" if late else f"exit code {code}"
    return Findings(problems=["\n".join([f"{failed} ({how}). The end of what was said:", *(f"  {line}" for line in lines[-15:])])])


def verl_problems(config: DictConfig) -> list[str]:
    """What verl itself refuses of `config`. Imports verl, with the cluster's environment, into this process."""
    os.environ.update({key: str(value) for key, value in config.cluster.env.items()})  # verl reads it when imported
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            validate(config)
        except Exception as error:  # assertions, ValueErrors and Hydra's, each with the key in it
            return [f"verl refuses the configuration: {error}"]
    return []
