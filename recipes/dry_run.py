"""`dry_run=true`, or --dry-run: says what a run would do, and whether it could, where there are no GPUs, models or data."""

import shlex

from omegaconf import DictConfig, OmegaConf

from recipes.errors import UserError
from recipes.preflight import estimates, verl_problems
from trustregion.verl_plugin.advice import advice


def dry_run(config: DictConfig, command: list[str]):
    """Has verl check `config`, which check() has passed, and prints it as YAML with the rest in comments.

    Raises UserError when verl refuses it, or no GPU of cluster.gpu_memory could hold it.
    """
    found = estimates(config, stated_only=True)
    if problems := verl_problems(config) + found.problems:
        raise UserError("\n       ".join(problems))
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    print(f"# {shlex.join(part for part in command if part not in ('--dry-run', 'dry_run=true'))}")
    print(f"# files: {config.run_dir}")
    print(f"# {workers} workers on {config.trainer.nnodes} nodes; Ray: {config.ray_kwargs.ray_init.get('address')}")
    for sentence in advice(config):
        print(f"# note: {sentence}")
    for sentence in found.warnings or found.facts:
        print(f"# {sentence}")
    print("# passed all checks of the configuration. Not looked at: GPUs, Ray, the model, data files and reward function.")
    print(OmegaConf.to_yaml(config, resolve=True), end="")
