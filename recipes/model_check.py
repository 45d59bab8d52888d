"""Checks of the model folder that a run is given, before anything expensive starts."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from recipes.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
# What this and the estimates of memory calculate with.
COUNTS = ("vocab_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "intermediate_size")
REMEDY = "Copy the model again, or save it with save_pretrained()"


def check_model_folder(path: str | os.PathLike, key: str = "model.path", trust_remote_code: bool = False) -> dict:
    """Checks that `path` is a Hugging Face model folder with config, tokenizer and whole weights.

    Args:
        path: the folder; `~` is expanded. Names on a hub are not looked up.
        key: the configuration key that the path came from, for the message.
        trust_remote_code: whether Python files in the folder may define the model.

    Returns:
        What is in its config.json.

    Raises:
        UserError: no such folder, what is missing or damaged in it, or a kind of model that transformers does not know.
    """
    folder = Path(path).expanduser()
    said = f"{key}={path}"
    if not folder.is_dir():
        raise UserError(
            f"{said}: no such folder (looked for {folder.absolute()}). Give the folder of a downloaded model "
            "(names on a hub are not looked up), or choose one of the model=... presets."
        )
    model = _read_config(folder, said)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{said}: has no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Save one beside the weights with tokenizer.save_pretrained()."
        )
    _check_weights(folder, said)
    _check_model_type(model, said, trust_remote_code)
    return model


def check_chat(
    path: str | os.PathLike,
    key: str = "model.path",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    template_key: str = "actor_rollout_ref.model.custom_chat_template",
):
    """Formats one message as verl does: by the tokenizer in the folder `path` and its chat template, or `chat_template`,
    which the configuration has at `template_key`.

    Returns the tokenizer. Raises UserError when it cannot be loaded, or has no chat template that works.
    """
    said, tokenizer = f"{key}={path}", load_tokenizer(path, key, trust_remote_code)
    remedy = f"Choose a model trained for chat, or give a template with {template_key}=..."
    if not (chat_template or tokenizer.chat_template):
        raise UserError(f"{said}: the tokenizer has no chat template, and prompts are chat messages. {remedy}")
    message = [{"role": "user", "content": "1"}]
    try:
        tokens = tokenizer.apply_chat_template(
            message, chat_template=chat_template, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # templates are programs, and raise what they like
        raise UserError(f"{said}: the tokenizer's chat template fails ({first_line(error)}). {remedy}") from error
    if not tokens:
        raise UserError(f"{said}: the tokenizer's chat template makes nothing of a message. {remedy}")
    return tokenizer


def load_tokenizer(path: str | os.PathLike, key: str = "model.path", trust_remote_code: bool = False):
    """The tokenizer in the folder `path`. Raises UserError when transformers cannot load it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            Path(path).expanduser(), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # each kind of tokenizer fails in ways of its own
        raise UserError(
            f"{key}={path}: transformers cannot load the tokenizer ({first_line(error)}). {REMEDY}."
        ) from error


def check_vocabulary(tokenizer, vocabulary: int | None, said: str):
    """Raises UserError when `tokenizer`, of the setting `said`, has ids that an embedding of `vocabulary` rows lacks."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if vocabulary is not None and largest >= vocabulary:
        raise UserError(
            f"{said}: the tokenizer has ids up to {largest} ({token!r}), and the model a vocabulary of {vocabulary} "
            "(vocab_size in config.json). Give the tokenizer that the model was trained with."
        )


def check_same_ids(tokenizer, own, said: str):
    """Raises UserError when `tokenizer`, of the setting `said`, numbers a token otherwise than `own`, the model's."""
    theirs = own.get_vocab()
    moved = {token: id for token, id in tokenizer.get_vocab().items() if theirs.get(token, id) != id}
    if moved:
        token = min(moved, key=moved.get)
        raise UserError(
            f"{said}: numbers {len(moved)} tokens otherwise than the model's own tokenizer ({token!r} is {moved[token]}, "
            f"there {theirs[token]}), so the model would read something else. Leave it out, or give one made from the model's."
        )


def longest_sequence(model: dict) -> int | None:
    """The number of positions that the model of this config.json has; None when it is not said or can be stretched."""
    text = model.get("text_config") or model
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    longest = text.get("max_position_embeddings")
    return None if not isinstance(scaling, dict) or "factor" in scaling or not isinstance(longest, int) else longest


def _read_config(folder: Path, said: str) -> dict:
    try:
        model = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise UserError(f"{said}: has no config.json. Give the folder that save_pretrained() wrote.") from None
    except (ValueError, OSError):
        model = None
    if not isinstance(model, dict):
        raise UserError(f"{said}: config.json is not a readable JSON object. {REMEDY}.")
    text = model.get("text_config") or model
    if not isinstance(text, dict):
        raise UserError(f"{said}: config.json has text_config = {text!r}, which is no object. {REMEDY}.")
    for key in COUNTS:
        value = text.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise UserError(f"{said}: config.json has {key} = {value!r}, which is no whole number. {REMEDY}.")
    return model


def _check_model_type(model: dict, said: str, trust_remote_code: bool):
    named = model.get("model_type")
    if not isinstance(named, str) or not named:
        raise UserError(f"{said}: config.json has no model_type. {REMEDY}.")
    from transformers import CONFIG_MAPPING, __version__  # takes seconds, which a mistake found before need not cost

    if named in CONFIG_MAPPING or (trust_remote_code and "auto_map" in model):
        return
    remedy = "Choose another model, or correct config.json."
    if "auto_map" in model:
        remedy = "It brings Python code of its own: if you trust it, set actor_rollout_ref.model.trust_remote_code=true."
    raise UserError(f"{said}: config.json has model_type = {named!r}, which transformers {__version__} does not know. {remedy}")


def _check_weights(folder: Path, said: str):
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weights = _indexed_weights(index, said)
    else:
        weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        if any(folder.glob("pytorch_model*.bin")):
            return
        raise UserError(f"{said}: has no weights (*.safetensors or pytorch_model*.bin). {REMEDY}.")
    for file in weights:
        try:
            with safe_open(file, framework="np"):  # reads the header, and compares it with the file's length
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{said}: {file.name} is damaged or cut short ({error}). {REMEDY}.") from error


def _indexed_weights(index: Path, said: str) -> list[Path]:
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        named = {None}
    if not all(isinstance(name, str) for name in named):
        raise UserError(f"{said}: {index.name} is not a readable index of weights. {REMEDY}.")
    missing = sorted(name for name in named if not (index.parent / name).is_file())
    if missing:
        raise UserError(f"{said}: {index.name} names weights that are not there: {', '.join(missing)}. {REMEDY}.")
    return [index.parent / name for name in sorted(named)]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
