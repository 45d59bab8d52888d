"""Train a language model with a trust-region method:

    python -m recipes.train method=band_kl method.delta=0.03 cluster=cpu model=tiny

`method`, `model`, `data`, `reward` and `cluster` name files under configs/, `experiment` a paper's choice of all of them,
`sweep` several runs (recipes/sweep.py); any key of verl's own configuration can be set beside them
(`data.train_batch_size=32 trainer.save_freq=10`). This process composes and checks the configuration, prepares models and
data, starts the driver that runs verl's trainer, shows its progress and cleans up after it. With --dry-run it only checks,
and prints the configuration.
"""

import faulthandler
import importlib.util
import sys
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from recipes.checks import check
from recipes.dry_run import dry_run
from recipes.errors import UserError
from recipes.launcher import launch
from recipes.sweep import is_job, run_job
from trustregion.config import unknown_name
from trustregion.presets import configs_folder

CONFIGS = configs_folder()
GROUPS = ("method", "model", "data", "reward", "cluster", "experiment", "sweep")


def register_resolvers():
    """What configs/*.yaml may write in ${...}."""
    # Found without importing verl: the environment that it reads on import is set for the driver only.
    verl = importlib.util.find_spec("verl")
    if verl is None:
        raise UserError("verl is not installed in this Python. Run `make setup`.")
    verl_configs = Path(verl.submodule_search_locations[0]) / "trainer" / "config"
    OmegaConf.register_new_resolver("verl_config_dir", lambda: str(verl_configs), replace=True)
    OmegaConf.register_new_resolver("configs_dir", lambda: str(CONFIGS), replace=True)
    OmegaConf.register_new_resolver("equal", lambda a, b: a == b, replace=True)
    OmegaConf.register_new_resolver("choose", lambda condition, a, b: a if condition else b, replace=True)
    OmegaConf.register_new_resolver("at_least", lambda a, b: max(a, b or 0), replace=True)
    OmegaConf.register_new_resolver("add", lambda *terms: sum(terms), replace=True)
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("divide", lambda a, b: a // b, replace=True)


def check_choices(arguments: list[str]):
    """Raises UserError unless each group that is named has one choice, and one that exists: of none or several Hydra or
    OmegaConf says only later, and by a traceback, what is missing then."""
    parser = OverridesParser.create()
    for argument in arguments:
        try:
            (override,) = parser.parse_overrides([argument])
        except OverrideParseException:
            continue  # an option such as --cfg, or a mistake that Hydra explains itself
        group = override.key_or_group
        if group not in GROUPS or argument in ("experiment=null", "sweep=null"):
            continue
        choices = choices_of(group)
        if isinstance(override.value(), Glob | IntervalSweep):
            continue  # it finds what exists; the sweep says what is wrong with an interval
        for value in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
            if not isinstance(value, str):
                raise UserError(f"{argument}: {group} must be one of {', '.join(choices)}")
            if value and value not in choices:
                raise UserError(unknown_name(f"{argument}: no such {group}", value, choices))


def choices_of(group: str) -> list[str]:
    """What a group can be set to. Files whose names start with an underscore are parts of others."""
    files = (CONFIGS / group).rglob("*.yaml")
    return sorted(str(file.relative_to(CONFIGS / group))[: -len(".yaml")] for file in files if not file.name.startswith("_"))


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that `python -m recipes.train OVERRIDES` would train with, for programs and tests."""
    register_resolvers()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = hydra.compose("train", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    OmegaConf.resolve(config.chosen)  # while Hydra still knows: it keeps the choices of the last composition only
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    OmegaConf.set_struct(config, True)
    return config


@hydra.main(config_path=str(CONFIGS), config_name="train", version_base="1.3")
def _main(config: DictConfig):
    try:
        if is_job():
            return run_job(config)
        command = ["python", "-m", "recipes.train", *HydraConfig.get().overrides.task]
        check(config)
        (dry_run if config.dry_run else launch)(config, command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while preparing; a run that has started is ended in order
        print("interrupted before the run started: nothing to clean up", file=sys.stderr)
        sys.exit(130)


def main():
    # configs/hydra/launcher/submitit_slurm.yaml and its plugin's are of one name, and composed as meant.
    warnings.filterwarnings("ignore", message="(?s).*is validated against ConfigStore schema with the same name")
    sys.argv = ["dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv]
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))  # argparse wants overrides in one piece
    try:
        register_resolvers()
        check_choices(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        _main()
    except KeyboardInterrupt:  # before the first job of a sweep, between two, or while waiting for Slurm
        print("interrupted: the same command goes on with the jobs that have not finished", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    faulthandler.enable()  # a crash in native code says where
    main()
