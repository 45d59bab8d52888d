"""Checks of the data files that a run is given, before anything expensive starts."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from recipes.errors import UserError


def check_prompts(path: str | os.PathLike, key: str = "data.train_files", prompt_key: str = "prompt") -> int:
    """Checks that `path` holds prompts as verl reads them.

    Args:
        path: a parquet file, or one of JSON, which verl reads too; `~` is expanded.
        key: the configuration key that the path came from, for the message.
        prompt_key: the column with the chat messages (verl's `data.prompt_key`).

    Returns:
        The number of rows.

    Raises:
        UserError: no such file; damaged, or not of the kind that its name says; a missing or ill-typed column; a row that
            lacks its source, its answer, its prompt or a part of that; no rows.
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
        rows = _json_rows(file, said, prompt_key)
    else:
        raise UserError(f"{said}: verl chooses its reader by the name's ending. Rename the file to end in .parquet, .json or .jsonl.")
    if rows == 0:
        raise UserError(f"{said}: the file has no rows. Write at least one prompt.")
    return rows


def first_rows(path: str | os.PathLike, prompt_key: str = "prompt", most: int = 20) -> list[dict]:
    """The first row of each data_source, of the first `most` of them, in a file that check_prompts has passed.

    Of JSON files, whose types verl's reader chooses, none.
    """
    file = Path(path).expanduser()
    if file.suffix != ".parquet":
        return []
    found, table = {}, parquet.ParquetFile(file)
    columns = [name for name in ("data_source", prompt_key, "reward_model", "extra_info") if name in table.schema_arrow.names]
    for batch in table.iter_batches(columns=columns):
        sources = batch.column("data_source").to_pylist()
        for source in list(dict.fromkeys(sources))[:most]:
            if source not in found and len(found) < most:
                found[source] = batch.slice(sources.index(source), 1).to_pylist()[0]
    return list(found.values())


def first_prompts(path: str | os.PathLike, prompt_key: str = "prompt", most: int = 100) -> list[list[dict]]:
    """The chat messages of the first `most` rows of a file that check_prompts has passed; of JSON files none."""
    file = Path(path).expanduser()
    if file.suffix != ".parquet":
        return []
    batch = next(parquet.ParquetFile(file).iter_batches(batch_size=most, columns=[prompt_key]))
    return batch.column(0).to_pylist()


def _parquet_rows(file: Path, said: str, prompt_key: str) -> int:
    try:
        table = parquet.ParquetFile(file)
        _check_columns(table.schema_arrow, said, prompt_key)
        rows = 0
        # Pages are read too: a file whose middle is damaged still has a whole footer.
        for batch in table.iter_batches(columns=["data_source", prompt_key, "reward_model"]):
            _check_rows(batch, rows, said, prompt_key)
            rows += batch.num_rows
        return rows
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{said}: not a readable parquet file ({first_line}). Write or copy it again.") from error


def _json_rows(file: Path, said: str, prompt_key: str) -> int:
    """The rows of one list of objects, or of one object a line."""
    text = file.read_bytes()
    one_list = text.lstrip().startswith(b"[")
    read = 0
    try:
        for row in json.loads(text) if one_list else (json.loads(line) for line in text.splitlines() if line.strip()):
            if wrong := _wrong_object(row, prompt_key):
                raise UserError(f"{said}: row {read} (counted from 0) {wrong}. Correct it, or leave these rows out.")
            read += 1
    except ValueError as error:
        at = "the list" if one_list else f"row {read}, counted from 0"
        raise UserError(f"{said}: not readable JSON ({at}: {error}). Write or copy it again.") from error
    return read


def _wrong_object(row, prompt_key: str) -> str | None:
    """What verl misses in a row of JSON, or None."""
    if not isinstance(row, dict):
        return "is no object"
    reward, messages = row.get("reward_model"), row.get(prompt_key)
    if row.get("data_source") is None:
        return "has no data_source"
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        return "has no reward_model.ground_truth"
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return f"has no {prompt_key}, which is a list of messages {{role, content}}"
    for message in messages:
        if not isinstance(message.get("role"), str):
            return f"has no text as {prompt_key}.role"
        if not (isinstance(message.get("content"), str | list) or message.get("tool_calls")):
            return f"has neither text nor a list of parts as {prompt_key}.content"
    return None if isinstance(row.get("extra_info"), dict | None) else "has an extra_info that is no object"


def _check_columns(schema: pyarrow.Schema, said: str, prompt_key: str) -> None:
    needed = ("data_source", prompt_key, "reward_model")
    missing = [name for name in needed if name not in schema.names]
    if missing:
        raise UserError(
            f"{said}: lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(schema.names) or 'none'}. "
            "verl needs data_source (text), prompt (chat messages) and reward_model (style, ground_truth); "
            "recipes/assets/arithmetic.py writes an example."
        )
    source = schema.field("data_source").type
    if pyarrow.types.is_nested(source):
        raise UserError(f"{said}: column data_source is {source}; verl needs text in each row. Convert it.")
    messages = schema.field(prompt_key).type
    if not (_is_list(messages) and _has_fields(messages.value_type, "role", "content")):
        raise UserError(f"{said}: column {prompt_key} is {messages}; verl needs a list of messages {{role, content}} in each row.")
    for field, wanted, kinds in (("role", "text", (_is_text,)), ("content", "text, or a list of parts", (_is_text, _is_list))):
        kind = messages.value_type.field(field).type
        if not any(fits(kind) for fits in (pyarrow.types.is_null, *kinds)):  # of nulls, _check_rows names the row
            raise UserError(f"{said}: {prompt_key}.{field} is {kind}; verl needs {wanted}. Convert it.")
    reward = schema.field("reward_model").type
    if not _has_fields(reward, "ground_truth"):
        raise UserError(f"{said}: column reward_model is {reward}; verl needs {{style, ground_truth}} in each row.")
    extra = schema.field("extra_info").type if "extra_info" in schema.names else pyarrow.null()
    if not (pyarrow.types.is_struct(extra) or pyarrow.types.is_null(extra)):
        raise UserError(f"{said}: column extra_info is {extra}; verl needs a struct in each row, or null. Convert it, or leave the column out.")


def _check_rows(batch: pyarrow.RecordBatch, before: int, said: str, prompt_key: str) -> None:
    """Raises UserError for the first row that lacks what verl needs; `before`: the rows of the file before this batch."""
    prompts = batch.column(prompt_key)
    messages, row_of = compute.list_flatten(prompts), compute.list_parent_indices(prompts)
    unsaid = compute.struct_field(messages, "content").is_null()
    if _has_fields(messages.type, "tool_calls"):  # a message that calls a tool need not say anything
        unsaid = compute.and_(unsaid, compute.struct_field(messages, "tool_calls").is_null())
    empty = {
        "data_source": batch.column("data_source").is_null(),
        prompt_key: compute.fill_null(compute.equal(compute.list_value_length(prompts), 0), True),
        f"{prompt_key}.role": compute.struct_field(messages, "role").is_null(),
        f"{prompt_key}.content": unsaid,
        "reward_model.ground_truth": compute.struct_field(batch.column("reward_model"), "ground_truth").is_null(),
    }
    for name, missing in empty.items():
        first = compute.index(missing, True).as_py()
        if first >= 0:
            row = before + (row_of[first].as_py() if name.startswith(f"{prompt_key}.") else first)
            raise UserError(f"{said}: {name} is empty in row {row} (counted from 0). Fill it, or leave these rows out.")


def _is_text(kind: pyarrow.DataType) -> bool:
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


def _is_list(kind: pyarrow.DataType) -> bool:
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)


def _has_fields(kind: pyarrow.DataType, *names: str) -> bool:
    return pyarrow.types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in names)


def _those_in(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.parquet"))[:5]
    return f" ({', '.join(found)})" if found else ""
