"""The process that starts Ray and runs verl's trainer:  python -m recipes.driver RUN_DIR

Started by recipes.train with the environment of the cluster's configuration. Reads RUN_DIR/config.yaml; when it fails,
RUN_DIR/error.txt says in a few lines why (the whole traceback is in the log).
"""

import re
import sys
from pathlib import Path

from omegaconf import OmegaConf

from recipes.processes import die_with_parent


def main(run_dir: Path):
    die_with_parent()
    try:
        train(OmegaConf.load(run_dir / "config.yaml"))
    except BaseException as error:
        (run_dir / "error.txt").write_text(_reason(error) + "\n", encoding="utf-8")
        raise


def validate(config):
    """Raises what verl raises of a configuration (resolved) that it refuses, or PluginMissing."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from trustregion.config import unknown_name
    from trustregion.verl_plugin.doctor import require_plugin

    require_plugin()
    # Here, as modules that verl loads by itself (VERL_USE_EXTERNAL_MODULES) may add to them.
    if (estimator := config.algorithm.adv_estimator) not in ADV_ESTIMATOR_REGISTRY:
        raise ValueError(unknown_name(f"algorithm.adv_estimator = {estimator!r}: no such estimator", estimator, ADV_ESTIMATOR_REGISTRY))
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    # What verl itself builds later, in its workers: unknown keys are found here.
    omega_conf_to_dataclass(config.algorithm)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    if config.reward.reward_model.enable:
        omega_conf_to_dataclass(config.reward.reward_model)


def train(config):
    """Runs verl's trainer as `config` (resolved) says; returns when the last step is done."""
    import ray
    from verl.trainer.main_ppo import run_ppo

    from trustregion.verl_plugin.task_runner import TrustRegionTaskRunner

    validate(config)
    run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(TrustRegionTaskRunner))


def _reason(error: BaseException) -> str:
    """The error at the bottom of Ray's wrapping; of a process that died while the run was starting, which one."""
    import ray

    from trustregion.verl_plugin.health import how_it_died, node_of_the_lost

    while isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    if node := node_of_the_lost(error):
        return node
    facts = dict(re.findall(r"^\t(\w+): (.*)$", str(error), re.MULTILINE))
    if isinstance(error, ray.exceptions.ActorDiedError) and "pid" in facts:
        return f"{facts['class_name']} (pid {facts['pid']}) at {facts.get('ip')} is dead: {how_it_died(error)}"
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
