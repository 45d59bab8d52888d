"""Folders that are made once: whole or not at all, by one process at a time, and made again when their recipe changes."""

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from recipes.errors import UserError

MANIFEST = "asset.json"
logger = logging.getLogger(__name__)


def build_once(folder: str | os.PathLike, recipe: dict, build: Callable[[Path], None], key: str = "assets") -> Path:
    """Returns `folder`, made by `build` unless it already holds what this recipe makes.

    `build` writes into a temporary sibling, which then takes the place of `folder` by a rename: a process killed midway
    leaves nothing that looks finished, and of two processes at once the second waits and finds the folder made.

    Args:
        folder: where the asset belongs. A folder there that this function did not make is never touched.
        recipe: name, version and parameters, as JSON values: what is written to `asset.json` and compared.
        build: fills the empty folder that it is given.
        key: what the user sets to choose another place, for the message.

    Raises:
        UserError: something that is not ours stands in the way, or the place cannot be written to.
    """
    folder = Path(folder).expanduser().absolute()
    if _is_made(folder, recipe):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_name(f".{folder.name}.lock"), "w")
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror} ({error.filename}). Choose a writable {key}=...") from error
    with _held(lock, folder):
        if not _is_made(folder, recipe):  # else another process made it while this one waited
            _replace(folder, recipe, build, key)
    return folder


def recipe_of(folder: str | os.PathLike) -> dict | None:
    """The recipe by which `folder` was made; None where build_once made nothing."""
    manifest = _manifest(Path(folder).expanduser())
    return None if manifest is None else manifest["recipe"]


def _is_made(folder: Path, recipe: dict) -> bool:
    manifest = _manifest(folder)
    if manifest is None or manifest["recipe"] != json.loads(json.dumps(recipe)):
        return False
    return all(_size(folder / name) == size for name, size in manifest["files"].items())


def _manifest(folder: Path) -> dict | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and {"recipe", "files"} <= manifest.keys() else None


def _replace(folder: Path, recipe: dict, build: Callable[[Path], None], key: str) -> None:
    _refuse_foreign(folder, key)
    prefix, suffix = f".{folder.name}.", ".part"
    for left in folder.parent.iterdir():  # of a process that was killed: whoever holds the lock is alone
        if left.name.startswith(prefix) and left.name.endswith(suffix) and "." not in left.name[len(prefix) : -len(suffix)]:
            shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=folder.parent))
    try:
        part.chmod(0o755)  # mkdtemp gives 0o700
        build(part)
        files = {str(file.relative_to(part)): _size(file) for file in sorted(part.rglob("*")) if file.is_file()}
        (part / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": files}, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            # A folder that is not empty cannot be renamed over: the old one steps aside first.
            os.replace(folder, old := part.with_name(f"{prefix}old{suffix}"))
            os.replace(part, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    logger.info("made %s", folder)


def _refuse_foreign(folder: Path, key: str) -> None:
    if not folder.exists() or _manifest(folder) is not None:
        return
    if folder.is_dir() and not any(folder.iterdir()):
        return
    raise UserError(
        f"{folder} exists and was not made by this recipe (it has no readable {MANIFEST}), so it is left alone. Move it away, "
        f"choose another {key}=..., or use what is in it with model=folder model.path=... or data=parquet data.train_files=..."
    )


@contextmanager
def _held(file: IO, folder: Path) -> Iterator[None]:
    """The lock on `file`, held by one process at a time; the system lets go of it when the process dies. The file stays."""
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is making %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None
