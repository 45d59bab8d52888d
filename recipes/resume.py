"""From which checkpoint a run starts: none, the last whole one of its own, or one that it is given."""

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.config_changes import OF_ONE_RUN, differences
from recipes.errors import UserError
from recipes.run_files import read_config, value_at
from trustregion.verl_plugin.checkpoints import NAME, NotWhole, check, checkpoint_folders, give_up, is_sealed, step_of

RESUME_MODES = ("auto", "disable", "resume_path")
SHOWN = 10  # changes of a configuration


def checkpoints_of(config: DictConfig) -> Path:
    return Path(config.trainer.default_local_dir).absolute()


def newest_sealed(config: DictConfig) -> Path | None:
    """The newest checkpoint that has a manifest, unchecked."""
    return next(filter(is_sealed, checkpoint_folders(checkpoints_of(config))), None)


def goes_on(config: DictConfig) -> bool:
    """Whether the run may find its folder there, with what it did before."""
    trainer = config.trainer
    return trainer.resume_mode == "auto" or (
        trainer.resume_mode == "resume_path" and _is_own(config, Path(trainer.resume_from_path))
    )


def choose_start(config: DictConfig, steps: list[int], say: Callable[[str], None]):
    """Sets what verl is to start from, as `config.trainer.resume_mode` (auto, disable or resume_path) says.

    `steps` are those that the run's folder has rows of metrics for. Tells `say` which checkpoint was chosen, and which
    newer ones were not and why. Raises UserError where the run would start from step 0 by accident, or from a checkpoint
    that is damaged, that other workers or another configuration wrote, or that is not in the run's folder.
    """
    mode = config.trainer.resume_mode
    if mode == "disable":
        return
    if mode == "auto":
        checkpoint, manifest = _last_whole(config, steps, say)
    else:
        checkpoint = Path(config.trainer.resume_from_path).absolute()
        manifest = _given(config, checkpoint, say)
    if checkpoint is None:
        _start_from(config, None)
        return
    workers, wrote = config.trainer.nnodes * config.trainer.n_gpus_per_node, (manifest or {}).get("workers")
    if wrote not in (None, workers):
        raise UserError(
            f"cluster.workers = {config.cluster.workers}: the checkpoint {checkpoint} was written by {wrote} workers, and verl "
            f"reads it with as many only; here there would be {workers}. Set cluster.workers (and nodes) as they were."
        )
    if _is_own(config, checkpoint):
        _check_changes(config, say)
        for later in checkpoint_folders(checkpoints_of(config)):
            if step_of(later) > step_of(checkpoint) and is_sealed(later):
                give_up(later)  # else the next resume would take it, when its steps have been trained again
        with open_dict(config):
            config.trainer.val_before_train = False  # the row of this step is there, validation or not
    say(f"goes on from the checkpoint of step {step_of(checkpoint)}: {checkpoint}")
    _start_from(config, checkpoint)


def _start_from(config: DictConfig, checkpoint: Path | None):
    with open_dict(config):
        config.trainer.resume_mode = "resume_path" if checkpoint else "disable"
        config.trainer.resume_from_path = str(checkpoint) if checkpoint else None


def _last_whole(config: DictConfig, steps: list[int], say) -> tuple[Path | None, dict | None]:
    root, skipped = checkpoints_of(config), []
    for folder in checkpoint_folders(root):
        try:
            manifest = check(folder)
        except NotWhole as problem:
            skipped.append(f"{folder.name} {problem}")
            continue
        _refuse_foreign(config, folder)
        for text in skipped:
            say(f"skipped: {text}")
        return folder, manifest
    trained = [step for step in steps if step > 0]
    if (trained or skipped) and not config.restart_without_checkpoint:
        there = f"has {len(trained)} steps of metrics, but no whole checkpoint in {root}"
        raise UserError("\n       ".join([
            f"trainer.resume_mode = 'auto': {config.run_dir} {there}, so training would start from step 0. "
            "If it may, set restart_without_checkpoint=true, or choose another name=...",
            *skipped,
        ]))  # fmt: skip
    if trained or skipped:
        say("starts from step 0, as no checkpoint is whole (restart_without_checkpoint=true)")
    return None, None


def _given(config: DictConfig, checkpoint: Path, say) -> dict | None:
    said = f"trainer.resume_from_path = {str(checkpoint)!r}"
    if not checkpoint.is_dir() or not NAME.fullmatch(checkpoint.name):
        raise UserError(f"{said}: no such checkpoint. Give a folder .../global_step_N that is there, or set trainer.resume_mode=auto.")
    _refuse_foreign(config, checkpoint)
    try:
        return check(checkpoint)
    except NotWhole as problem:
        if _is_own(config, checkpoint) or is_sealed(checkpoint):
            raise UserError(f"{said}: {problem}. Give another, or set trainer.resume_mode=auto for the last whole one.") from None
        say(f"note: {checkpoint} has no manifest, so whether it is whole is not known")
        return None


def _refuse_foreign(config: DictConfig, checkpoint: Path):
    if not (_is_own(config, checkpoint) or config.trust_checkpoint):
        raise UserError(
            f"the checkpoint {checkpoint} is outside the run's folder, {config.run_dir}, and loading one runs what code there is "
            "in its pickles. If you trust whoever wrote it, set trust_checkpoint=true."
        )


def _check_changes(config: DictConfig, say):
    """Refuses to go on as another run than the one that wrote config.yaml, unless that is meant."""
    before = read_config(Path(config.run_dir) / "config.yaml")
    if not before:
        return say("note: config.yaml cannot be read, so whether the configuration is another than it was is not known")
    changed = differences(before, OmegaConf.to_container(config, resolve=True), OF_ONE_RUN)
    if changed and not config.allow_changes:
        raise UserError("\n       ".join([
            f"{config.run_dir} holds a run of another configuration, from whose checkpoint this one would go on. Give it the same "
            "values, or set allow_changes=true if the change is meant, or choose another name=... for a new run:",
            *changed[:SHOWN],
            *[f"and {len(changed) - SHOWN} others"] * (len(changed) > SHOWN),
        ]))  # fmt: skip
    for text in changed:
        say(f"changed: {text}")


def _is_own(config: DictConfig, checkpoint: Path) -> bool:
    """Whether it is in the run's folder, or in the one where this run, as its config.yaml says, has saved before."""
    run_dir, root = Path(config.run_dir), checkpoints_of(config)
    saved_to = value_at(read_config(run_dir / "config.yaml"), "trainer.default_local_dir")
    return _is_inside(checkpoint, run_dir) or (saved_to is not None and Path(saved_to).absolute() == root and _is_inside(checkpoint, root))


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
