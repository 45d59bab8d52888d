"""In what two configurations of a run differ, as far as it matters."""

from typing import Any

# Of no effect on results: a job that has finished stays finished when these are others.
OF_NO_EFFECT = (
    "dry_run", "preflight", "max_restarts", "restart_without_checkpoint", "trust_checkpoint", "allow_changes",
    "trainer.logger", "trainer.resume_mode", "trainer.save_freq", "trainer.max_actor_ckpt_to_keep",
)  # fmt: skip
# What the launcher changes between a job's configuration and the run's config.yaml.
OF_THE_LAUNCHER = (
    "data.prepare", "run_dir", "ray_kwargs.ray_init.runtime_env.env_vars", "trainer.resume_from_path", "trainer.val_before_train",
)  # fmt: skip
# Besides, of a run that goes on from its own checkpoint: how long it trains, what it looks at and records on the way, where it
# is and what it is called, and how Ray is reached.
OF_ONE_RUN = OF_NO_EFFECT + OF_THE_LAUNCHER + (
    "name", "runs", "trainer.total_training_steps", "trainer.total_epochs",
    "trainer.test_freq", "token_records.every", "token_records.sequences",
    "trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir", "trainer.rollout_data_dir",
    "trainer.validation_data_dir", "ray_kwargs", "cluster.env",
)  # fmt: skip


def differences(before: dict, now: dict, ignored: tuple[str, ...] = OF_NO_EFFECT) -> list[str]:
    """"key = value there, value here" of each key in which two configurations differ, but those that are ignored."""
    there, here = _flat(before, ignored), _flat(now, ignored)
    return [
        f"{key} = {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]


def _flat(config: dict, ignored: tuple[str, ...], above: str = "") -> dict[str, Any]:
    found = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if name not in ignored:
            found |= _flat(value, ignored, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
