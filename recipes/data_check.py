"""Checks of the data files that a run is given, before anything expensive starts."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet

from recipes.errors import UserError


def check_prompts(path: str | os.PathLike, key: str = "data.train_files", prompt_key: str = "prompt") -> int:
    """Checks that `path` holds prompts as verl reads them.

    Args:
        path: a parquet file; `~` is expanded. Of JSON files, which verl reads too, only the rows are counted.
        key: the configuration key that the path came from, for the message.
        prompt_key: the column with the chat messages (verl's `data.prompt_key`).

    Returns:
        The number of rows.

    Raises:
        UserError: no such file; damaged, or not of the kind that its name says; a missing or ill-typed column; no rows.
    """
    file = Path(path).expanduser()
    said = f"{key}={path}"
    if file.is_dir():
        raise UserError(f"{said}: is a folder. Name the parquet file in it{_those_in(file)}.")
    if not file.is_file():
        raise UserError(f"{said}: no such file (looked for {file.absolute()}). Correct the path, or choose one of the data=... presets.")
    if file.suffix == ".parquet":
        rows = _parquet_rows(file, said, prompt_key)
    elif file.suffix in (".json", ".jsonl"):
        rows = _json_rows(file, said)
    else:
        raise UserError(f"{said}: verl chooses its reader by the name's ending. Rename the file to end in .parquet, .json or .jsonl.")
    if rows == 0:
        raise UserError(f"{said}: the file has no rows. Write at least one prompt.")
    return rows


def _parquet_rows(file: Path, said: str, prompt_key: str) -> int:
    try:
        table = parquet.ParquetFile(file)
        _check_columns(table.schema_arrow, said, prompt_key)
        # Pages are read too: a file whose middle is damaged still has a whole footer.
        return sum(batch.num_rows for batch in table.iter_batches(columns=["data_source", prompt_key, "reward_model"]))
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{said}: not a readable parquet file ({first_line}). Write or copy it again.") from error


def _json_rows(file: Path, said: str) -> int:
    """The rows of one list of objects, or of one object a line."""
    text = file.read_bytes()
    if not text.lstrip().startswith(b"["):
        return sum(not line.isspace() for line in text.splitlines(keepends=True))
    try:
        return len(json.loads(text))
    except ValueError as error:
        raise UserError(f"{said}: not readable JSON ({error}). Write or copy it again.") from error


def _check_columns(schema: pyarrow.Schema, said: str, prompt_key: str) -> None:
    needed = ("data_source", prompt_key, "reward_model")
    missing = [name for name in needed if name not in schema.names]
    if missing:
        raise UserError(
            f"{said}: lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(schema.names) or 'none'}. "
            "verl needs data_source (text), prompt (chat messages) and reward_model (style, ground_truth); "
            "recipes/assets/arithmetic.py writes an example."
        )
    messages = schema.field(prompt_key).type
    if not (_is_list(messages) and _has_fields(messages.value_type, "role", "content")):
        raise UserError(f"{said}: column {prompt_key} is {messages}; verl needs a list of messages {{role, content}} in each row.")
    reward = schema.field("reward_model").type
    if not _has_fields(reward, "ground_truth"):
        raise UserError(f"{said}: column reward_model is {reward}; verl needs {{style, ground_truth}} in each row.")


def _is_list(kind: pyarrow.DataType) -> bool:
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)


def _has_fields(kind: pyarrow.DataType, *names: str) -> bool:
    return pyarrow.types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in names)


def _those_in(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.parquet"))[:5]
    return f" ({', '.join(found)})" if found else ""
