"""Makes data sets in verl's layout, from the Hugging Face hub or from files of yours:

    python -m recipes.prepare_data dataset=gsm8k                         # downloads it
    python -m recipes.prepare_data dataset=gsm8k source=/data/gsm8k      # a copy: one file, or the folder of a download
    python -m recipes.prepare_data dataset=dapo_math_17k config=all rows=17398
    python -m recipes.prepare_data dataset=[aime24,aime25,amc23] folder=/shared/assets

`dataset` is one of configs/datasets.yaml, any key of which can be set beside it; `rows=null` and `sha256=null` leave a
check out. Each becomes <folder>/<dataset>/data.parquet, whole or not at all, and is made anew when a key that is set differs
from what it was made with. A run makes the data sets that it lacks by itself, from the hub.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.assets.arithmetic import SCHEMA
from recipes.assets.folders import build_once, recipe_of
from recipes.errors import UserError
from trustregion.config import unknown_name
from trustregion.presets import configs_folder

VERSION = 1
WHERE = ("hub", "config", "split", "file", "revision", "source", "rows", "sha256", "question", "answer")
WHAT = ("levels", "prompt", "data_source")  # these decide what the result is for; a run that needs it compares them
OPTIONAL = ("config", "file", "revision", "source", "sha256")
READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
# DAPO's own words around a question.
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
PROMPTS = {
    "answer_line": lambda question: BEFORE + question.removeprefix(BEFORE).removesuffix(AFTER).strip() + AFTER,
    "hashes": lambda question: question.strip() + ' Let\'s think step by step and output the final answer after "####".',
    "as_it_is": lambda question: question,
}


def prepare_all(folder: str | os.PathLike, datasets: Iterable[str]):
    """Makes those of `datasets` that are not in `folder` yet, from the hub: what a data group's `prepare` asks for."""
    for name in datasets:
        prepare(name, folder)


def prepare(name: str, folder: str | os.PathLike, key: str = "assets", /, **changes: Any) -> Path:
    """Makes `folder`/`name` unless it is there, made with these changes.

    Args:
        name: one of configs/datasets.yaml.
        folder: where data sets are kept, which the user chose by `key`.
        changes: of its keys; and `source`, the file or folder to read instead of the hub, and `revision`, of the hub's.

    Returns:
        The folder: `data.parquet` and `origin.json` (where it came from, how many rows, their hash).

    Raises:
        UserError: no such data set or key; it cannot be read, or is not what it should be; `folder` cannot be written.
    """
    known = yaml.safe_load((configs_folder() / "datasets.yaml").read_text(encoding="utf-8"))
    if not isinstance(name, str) or name not in known:
        raise UserError(unknown_name(f"dataset={name}: no such data set", name, known))
    for changed, value in changes.items():
        if changed not in (*WHERE, *WHAT):
            raise UserError(unknown_name(f"{changed}={value}: no such key", changed, (*WHERE, *WHAT)))
        if wanted := _wanted(changed, value):
            raise UserError(f"{changed}={value}: must be {wanted}")
    entry = {"data_source": f"math/{name}", **known[name], **changes}
    if entry["prompt"] not in PROMPTS:
        raise UserError(unknown_name(f"prompt={entry['prompt']}: no such prompt", entry["prompt"], PROMPTS))
    recipe = {"name": name, "version": VERSION, **{part: entry.get(part) for part in (*WHAT, *WHERE)}}
    # From where it was made matters only to who says from where.
    there = recipe_of(Path(folder) / name) or {}
    if all(there.get(part) == recipe[part] for part in ("name", "version", *WHAT, *changes)):
        recipe = there
    return build_once(Path(folder) / name, recipe, lambda part: _write(part, name, {**entry, **recipe}), key)


def _wanted(key: str, value: Any) -> str | None:
    """What a key must be, where `value` is not that."""
    if key == "levels":
        fine = value is None or (isinstance(value, list) and value and all(type(level) is int for level in value))
        return None if fine else "a list of whole numbers, or null for all"
    if key == "rows":
        return None if value is None or (type(value) is int and value > 0) else "a whole number >= 1, or null for any"
    fine = (isinstance(value, str) and value) or (value is None and key in OPTIONAL)
    return None if fine else f"text{' or null' * (key in OPTIONAL)} (quote what looks like a number: {key}='\"...\"')"


def _write(folder: Path, name: str, entry: dict):
    with tempfile.TemporaryDirectory() as cache:
        rows = _read(f"dataset={name}", entry, cache)
    if entry.get("rows") is not None and len(rows) != entry["rows"]:
        raise UserError(
            f"dataset={name}: has {len(rows)} rows, and should have {entry['rows']}. Copy or download it again; if this is the "
            f"version that you mean, set rows={len(rows)}."
        )
    made, digest = {}, hashlib.sha256()
    for index, row in enumerate(rows):
        if entry.get("levels") and _level(row) not in entry["levels"]:
            continue
        converted = _convert(row, index, name, entry)
        made.setdefault(converted["prompt"][0]["content"], converted)  # of one that is there twice, the first
    if not made:
        levels = sorted({_level(row) for row in rows} - {None})
        raise UserError(
            f"dataset={name}: none of its {len(rows)} rows is left by levels={entry.get('levels')}; they have "
            f"{', '.join(map(str, levels)) or 'no level'}. Choose some of these, or levels=null for all."
        )
    for question, row in made.items():
        digest.update(json.dumps([question, row["reward_model"]["ground_truth"]]).encode())
    parquet.write_table(pyarrow.Table.from_pylist([*made.values()], SCHEMA), folder / "data.parquet")
    origin = {"from": entry.get("source") or entry["hub"], "config": entry.get("config"), "split": entry["split"]}
    origin |= {"revision": entry.get("revision"), "rows_read": len(rows), "rows": len(made), "sha256_of_rows": digest.hexdigest()}
    (folder / "origin.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def _read(said: str, entry: dict, cache: str) -> list[dict]:
    source, file = entry.get("source"), entry.get("file")
    path = Path(source).expanduser() if source else None
    if path is not None and not path.exists():
        raise UserError(f"{said} source={source}: no such file or folder (looked for {path.absolute()})")
    if path is not None and path.is_dir() and file:
        path = path / file
    try:
        from datasets import load_dataset

        if path is None and file:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(entry["hub"], file, repo_type="dataset", revision=entry.get("revision")))
        if path is None:
            read = load_dataset(entry["hub"], entry.get("config"), split=entry["split"], revision=entry.get("revision"))
        elif path.is_dir():
            read = load_dataset(str(path), entry.get("config"), split=entry["split"], cache_dir=cache)
        else:
            _check_hash(said, path, entry.get("sha256"))
            if path.suffix not in READERS:
                raise UserError(f"{said} source={source}: must end in one of {', '.join(READERS)}")
            read = load_dataset(READERS[path.suffix], data_files=str(path), split="train", cache_dir=cache)
        return read.to_list()
    except UserError:
        raise
    except Exception as error:  # the hub, the network and each format fail in ways of their own
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        remedy = "Copy it again." if source else f"Where there is no network, copy {entry['hub']} and give source=<its folder>."
        raise UserError(f"{said}: cannot be read from {source or 'the hub'} ({reason}). {remedy}") from error


def _check_hash(said: str, path: Path, expected: str | None):
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected is not None and found != expected:
        raise UserError(
            f"{said}: {path} has the SHA-256 {found}, and should have {expected}. Copy or download it again; if this is the "
            f"version that you mean, set sha256={found}."
        )


def _convert(row: dict, index: int, name: str, entry: dict) -> dict:
    question, answer = (_at(row, entry[key], f"dataset={name} {key}={entry[key]}", index) for key in ("question", "answer"))
    if entry["prompt"] == "hashes":
        answer = answer.rpartition("####")[2].replace(",", "")
    return {
        "data_source": entry["data_source"],
        "prompt": [{"role": "user", "content": PROMPTS[entry["prompt"]](question)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.strip().strip("$").strip()},
        "extra_info": {"split": entry["split"], "index": index},
    }


def _at(row: Any, path: str, said: str, index: int) -> str:
    """The text at `path`, as `prompt.0.content`."""
    value = row
    try:
        for key in path.split("."):
            value = value[int(key) if isinstance(value, list) else key]
    except (KeyError, IndexError, TypeError, ValueError):
        value = None
    if value is None or str(value).strip() == "":
        raise UserError(f"{said}: row {index} has none; it has {', '.join(row)}. Name the column that the data set has.")
    return str(value)


def _level(row: dict) -> int | None:
    """3, also of the text `Level 3`."""
    digits = "".join(filter(str.isdigit, str(row.get("level"))))
    return int(digits) if digits else None


def _chosen(arguments: list[str]) -> dict[str, Any]:
    chosen = OmegaConf.create()
    for argument in arguments:
        try:
            chosen = OmegaConf.merge(chosen, OmegaConf.from_cli([argument]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"{argument}: cannot be read ({str(error).splitlines()[0]}). Put text with special characters in quotes.") from error
    return {str(key): value for key, value in OmegaConf.to_container(chosen).items()}


def main(arguments: list[str]) -> int:
    try:
        chosen = _chosen(arguments)
        names, folder = chosen.pop("dataset", None), chosen.pop("folder", "assets")
        if not names:
            raise UserError("dataset=...: missing; must be one of configs/datasets.yaml")
        if not isinstance(folder, str) or not folder:
            raise UserError(f"folder={folder}: must be text (quote what looks like a number: folder='\"...\"')")
        for name in names if isinstance(names, list) else [names]:
            made = prepare(name, folder, "folder", **chosen)
            origin = json.loads((made / "origin.json").read_text(encoding="utf-8"))
            print(f"{made / 'data.parquet'}: {origin['rows']} rows of {origin['from']}, SHA-256 of the rows {origin['sha256_of_rows']}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
