"""Which folder of weights `model=...` means."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes.errors import UserError
from recipes.file_checks import HUB_NAME
from recipes.model_check import check_model_folder
from trustregion.config import unknown_name
from trustregion.presets import configs_folder

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
BLOCKS, BLOCK = 64, 1 << 16  # of a file of weights, looked at: training changes all of them


@dataclass(frozen=True)
class Model:
    """`name` as the user gave it, the Hugging Face `folder`, a `sha256` that tells checkpoints apart, and its config.json."""

    name: str
    folder: Path
    sha256: str
    config: dict


def find(name: str, config: DictConfig, key: str = "model") -> Model:
    """Finds, makes or downloads the model called `name`, and checks its folder.

    Args:
        name: one of configs/model; a Hugging Face folder; a run's folder or one of its checkpoints, verl's, which must hold
            the weights in Hugging Face form; or a name on the hub.
        config: `assets` and `seed` are what presets are made from.

    Raises:
        UserError: there is no such model, or it is not whole.
    """
    said, path = f"{key}={name}", _preset(name, config, key)
    if Path(path).expanduser().is_dir():
        folder = _weights_folder(Path(path).expanduser(), said)
    elif HUB_NAME.fullmatch(path):
        folder = _download(path, said)
    else:
        choices = sorted(file.stem for file in (configs_folder() / "model").glob("[!_]*.yaml"))
        raise UserError(unknown_name(f"{said}: no such folder (looked for {Path(path).expanduser().absolute()}), and no such preset", name, choices))
    config_json = check_model_folder(folder, key)
    return Model(name, folder.absolute(), _sha256(folder), config_json)


def _preset(name: str, config: DictConfig, key: str) -> str:
    file = configs_folder() / "model" / f"{name}.yaml"
    if "/" in name or name.startswith("_") or not file.is_file():
        return name
    model = OmegaConf.load(file).model
    model = OmegaConf.create({"assets": config.assets, "seed": config.seed, "model": model}).model
    if model.path is None:
        raise UserError(f"{key}={name}: give the folder itself, {key}=/models/my-model")
    if model.get("prepare"):
        instantiate(model.prepare)
    return model.path


def _weights_folder(folder: Path, said: str) -> Path:
    """The Hugging Face folder that `folder` is, or that the run or checkpoint there has."""
    if (folder / "config.json").is_file():
        return folder
    if (folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file():
        try:  # verl writes it when a checkpoint is complete
            newest = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):
            raise UserError(f"{said}: the run has no checkpoint. Train with trainer.save_freq=<steps>, and {SAVE}.") from None
        folder = folder / "checkpoints" / f"global_step_{newest}"
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    merged = actor / "huggingface"
    if any(file for pattern in WEIGHTS for file in merged.glob(pattern)):
        return merged
    if merged.is_dir():
        raise UserError(
            f"{said}: {merged} has no weights: the checkpoint holds them in FSDP's form only. Convert them: python -m verl.model_merger "
            f"merge --backend fsdp --local_dir {actor} --target_dir {merged}; or train with {SAVE}."
        )
    raise UserError(f"{said}: is neither a Hugging Face folder (no config.json) nor a run or checkpoint with one (no {merged}).")


SAVE = "'actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]'"


def _download(name: str, said: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*WEIGHTS, *SMALL_FILES]))
    except Exception as error:  # the hub and the network fail in ways of their own
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(f"{said}: no such folder, and the hub does not give it ({reason}). Give the folder of a downloaded model.") from error


def _sha256(folder: Path) -> str:
    """Of the small files and of parts of the weights: the whole of a large model would take a minute to read."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in (*SMALL_FILES, *WEIGHTS) for file in folder.glob(pattern)):
        if file.name == "asset.json":
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            if not any(file.match(pattern) for pattern in WEIGHTS) or size <= BLOCKS * BLOCK:
                digest.update(opened.read())
                continue
            for block in range(BLOCKS):
                opened.seek((size - BLOCK) * block // (BLOCKS - 1))
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()


def folder_name(name: str) -> str:
    """A folder's name for the evaluation of the model called `name`."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
