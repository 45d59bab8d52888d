"""Whole checkpoints. verl writes the files of `global_step_N` one after the other; a manifest with the size and sha256
of each, written last, says that they are all there. No manifest, no checkpoint. Imports neither verl nor torch."""

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
GIVEN_UP = "manifest-given-up.json"  # of a checkpoint later than the one that the run went on from
RANK_FILE = re.compile(r"(.+)_world_size_(\d+)_rank_(\d+)\.pt")
NAME = re.compile(r"global_step_(\d+)")


class NotWhole(Exception):
    """What is missing or wrong in a checkpoint's folder, in words."""


def step_of(folder: Path) -> int:
    return int(NAME.fullmatch(folder.name)[1])


def checkpoint_folders(root: Path) -> list[Path]:
    """The folders `global_step_N` in `root`, whole or not, the newest first."""
    found = [path for path in root.glob("global_step_*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def is_sealed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def seal(folder: Path):
    """Writes the manifest of a checkpoint whose files are all written, and has the disk keep both.

    Every file is read once, several at a time: about as long as writing them took.
    Raises NotWhole when the file of a worker is missing, as when workers on other nodes wrote to disks of their own.
    """
    paths = _files(folder)
    _check_ranks(folder, paths)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        measured = pool.map(lambda path: _measure(folder / path, sync=True), paths)
        manifest = {"workers": _workers(paths), "files": dict(zip(map(str, paths), measured, strict=True))}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))


def check(folder: Path) -> dict:
    """Compares every file with the manifest, which is returned: `workers`, the number of FSDP workers that wrote it,
    and `files`, path -> [bytes, sha256]. Raises NotWhole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        expected = {path: (int(size), str(digest)) for path, (size, digest) in manifest["files"].items()}
        if not expected or not isinstance(manifest.get("workers"), int | None):
            raise ValueError("no files, or workers that are no number")
    except FileNotFoundError:
        raise NotWhole(f"has no {MANIFEST}: the run was stopped while it was being saved") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotWhole(f"its {MANIFEST} is not readable ({error})") from error
    for path, (size, _) in expected.items():
        if not (folder / path).is_file():
            raise NotWhole(f"lacks {path}")
        if (found := (folder / path).stat().st_size) != size:
            raise NotWhole(f"{path} has {found} bytes instead of {size}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda path: _measure(folder / path), expected)
        for (path, facts), measured in zip(expected.items(), found, strict=True):
            if measured != facts:
                raise NotWhole(f"{path} is damaged: its sha256 is not that of the manifest")
    return manifest


def give_up(folder: Path):
    """Makes a checkpoint count no longer; its files stay."""
    (folder / MANIFEST).rename(folder / GIVEN_UP)


def keep_newest(root: Path, count: int):
    """Removes all folders of checkpoints but the newest `count` whole ones and what is newer than these."""
    sealed = [folder for folder in checkpoint_folders(root) if is_sealed(folder)]
    if len(sealed) < count:
        return
    for folder in checkpoint_folders(root):
        if step_of(folder) < step_of(sealed[count - 1]):
            (folder / MANIFEST).unlink(missing_ok=True)  # first: what is left by a kill from here on is no checkpoint
            shutil.rmtree(folder)


def write_whole(path: Path, content: str | bytes):
    """Writes a small file so that, whatever happens, it is there as a whole or as it was before."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk, which part of a file would keep full
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _files(folder: Path) -> list[Path]:
    ours = (MANIFEST, GIVEN_UP, f"{MANIFEST}.unfinished")
    return sorted(
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name not in ours
    )


def _workers(paths: list[Path]) -> int | None:
    return max((int(match[2]) for path in paths if (match := RANK_FILE.fullmatch(path.name))), default=None)


def _check_ranks(folder: Path, paths: list[Path]):
    expected = set()
    for path in paths:
        if match := RANK_FILE.fullmatch(path.name):
            kind, workers, _ = match.groups()
            expected |= {path.with_name(f"{kind}_world_size_{workers}_rank_{rank}.pt") for rank in range(int(workers))}
    if missing := sorted(map(str, expected - set(paths))):
        raise NotWhole(
            f"the checkpoint {folder} lacks {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}, which other workers wrote: "
            "trainer.default_local_dir must be a folder that all nodes share"
        )


def _measure(path: Path, sync: bool = False) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return file.tell(), digest
