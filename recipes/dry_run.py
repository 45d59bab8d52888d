"""`dry_run=true`, or --dry-run: says what a run would do, and whether it could, where there are no GPUs, models or data."""

import os
import shlex
import sys
import warnings
from contextlib import redirect_stdout

from omegaconf import DictConfig, OmegaConf

from recipes.driver import validate
from recipes.errors import UserError
from trustregion.verl_plugin.advice import advice


def dry_run(config: DictConfig, command: list[str]):
    """Has verl check `config`, which check() has passed, and prints it as YAML with the rest in comments.

    Raises UserError when verl refuses it.
    """
    ask_verl(config)
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    print(f"# {shlex.join(part for part in command if part not in ('--dry-run', 'dry_run=true'))}")
    print(f"# files: {config.run_dir}")
    print(f"# {workers} workers on {config.trainer.nnodes} nodes; Ray: {config.ray_kwargs.ray_init.get('address')}")
    for sentence in advice(config):
        print(f"# note: {sentence}")
    print("# passed all checks of the configuration. Not looked at: GPUs, Ray, the model, data files and reward function.")
    print(OmegaConf.to_yaml(config, resolve=True), end="")


def ask_verl(config: DictConfig):
    """Raises UserError when verl refuses `config`."""
    os.environ.update({key: str(value) for key, value in config.cluster.env.items()})  # verl reads it when imported
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            validate(config)
        except Exception as error:  # assertions, ValueErrors and Hydra's, each with the key in it
            raise UserError(f"verl refuses the configuration: {error}") from error
