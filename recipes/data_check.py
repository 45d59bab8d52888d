"""Checks of the files a run is given, before anything expensive starts."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
from safetensors import SafetensorError, safe_open

from recipes.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
WEIGHTS_REMEDY = "Copy the model again, or save it with save_pretrained()"


def check_parquet(path: str | os.PathLike | None, key: str = "data.train_files", prompt_key: str = "prompt") -> None:
    """Checks that `path` holds prompts as verl reads them.

    Args:
        path: a parquet file; `~` is expanded. JSON files, which verl reads too, are only checked to exist and hold something.
        key: the configuration key that the path came from, for the message.
        prompt_key: the column with the chat messages (verl's `data.prompt_key`).

    Raises:
        UserError: no path; no such file; not parquet, or damaged; a missing or ill-typed column; no rows.
    """
    if not path:
        raise UserError(f"{key} is not set. Give a parquet file ({key}=...), or choose one of the data=... presets.")
    file = Path(path).expanduser()
    said = f"{key}={path}"
    if file.is_dir():
        raise UserError(f"{said}: is a folder. Name the parquet file in it{_those_in(file)}.")
    if not file.is_file():
        raise UserError(f"{said}: no such file (looked for {file.absolute()}). Correct the path, or choose one of the data=... presets.")
    if file.suffix in (".json", ".jsonl"):
        if file.stat().st_size == 0:
            raise UserError(f"{said}: the file is empty. Write at least one row.")
        return
    if file.suffix != ".parquet":
        raise UserError(f"{said}: verl chooses its reader by the name's ending. Rename the file to end in .parquet, .json or .jsonl.")
    try:
        table = parquet.ParquetFile(file)
        schema = table.schema_arrow
        _check_columns(schema, said, prompt_key)
        # Pages are read too: a file whose middle is damaged still has a whole footer.
        rows = sum(batch.num_rows for batch in table.iter_batches(columns=["data_source", prompt_key, "reward_model"]))
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{said}: not a readable parquet file ({first_line}). Write or copy it again.") from error
    if rows == 0:
        raise UserError(f"{said}: the file has no rows. Write at least one prompt.")


def check_model_folder(path: str | os.PathLike | None, key: str = "model.path") -> None:
    """Checks that `path` is a Hugging Face model folder with config, tokenizer and whole weights.

    Args:
        path: the folder; `~` is expanded. Names on a hub are not looked up.
        key: the configuration key that the path came from, for the message.

    Raises:
        UserError: no path, no such folder, or what is missing or damaged in it.
    """
    if not path:
        raise UserError(f"{key} is not set. Give the folder of a model ({key}=...), or choose one of the model=... presets.")
    folder = Path(path).expanduser()
    said = f"{key}={path}"
    if not folder.is_dir():
        raise UserError(
            f"{said}: no such folder (looked for {folder.absolute()}). Give the folder of a downloaded model "
            "(names on a hub are not looked up), or choose one of the model=... presets."
        )
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"{said}: has no config.json. Give the folder that save_pretrained() wrote.")
    try:
        named = json.loads(config.read_bytes()).get("model_type")
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"{said}: config.json is not a readable JSON object ({error}). {WEIGHTS_REMEDY}.") from error
    if not named:
        raise UserError(f"{said}: config.json has no model_type. {WEIGHTS_REMEDY}.")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{said}: has no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Save one beside the weights with tokenizer.save_pretrained()."
        )
    _check_weights(folder, said)


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


def _check_weights(folder: Path, said: str) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{said}: {index.name} is not a readable index of weights. {WEIGHTS_REMEDY}.") from error
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{said}: {index.name} names weights that are not there: {', '.join(missing)}. {WEIGHTS_REMEDY}.")
        weights = [folder / name for name in shards]
    else:
        weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        if any(folder.glob("pytorch_model*.bin")):
            return
        raise UserError(f"{said}: has no weights (*.safetensors or pytorch_model*.bin). {WEIGHTS_REMEDY}.")
    for file in weights:
        try:
            with safe_open(file, framework="np"):  # reads the header, and compares it with the file's length
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{said}: {file.name} is damaged or cut short ({error}). {WEIGHTS_REMEDY}.") from error


def _is_list(kind: pyarrow.DataType) -> bool:
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)


def _has_fields(kind: pyarrow.DataType, *names: str) -> bool:
    return pyarrow.types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in names)


def _those_in(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.parquet"))[:5]
    return f" ({', '.join(found)})" if found else ""
