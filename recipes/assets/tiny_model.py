"""A language model of 0.4 million parameters for machines without a GPU, made in seconds and with no download.

It is a real Qwen3 (vLLM, FSDP and transformers load it as any other) and it can add, but it has last learned from careless
demonstrations (warmup.py): sampled at temperature 1 it answers about 40 % of the sums of recipes/assets/arithmetic.py
right, because it often stops half-way or is wrong by one. That is what reinforcement learning then mends.
"""

import itertools
import logging
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from recipes.assets.arithmetic import WORDINGS
from recipes.assets.folders import build_once
from recipes.assets.quiet import no_progress_bars
from recipes.assets.tiny_tokenizer import tiny_tokenizer
from recipes.assets.warmup import warm_up

VERSION = 2
MAX_LENGTH = 512  # tokens, prompt and response
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """What decides the weights: the same values give the same ones, bit for bit.

    Args:
        seed: of the weights and of the demonstrations.
        warmup_steps: updates of the supervised phase; 250 take about 20 s on one core. 0 leaves the weights random.
        batch_size: demonstrations an update.
        stop_early, slip: how often a demonstration of the last ones stops half-way or is wrong by one
            (warmup.work_out): how often the model will.
    """

    seed: int = 0
    warmup_steps: int = 250
    batch_size: int = 48
    stop_early: float = 0.55
    slip: float = 0.05


def prepare(folder: str | os.PathLike, **chosen) -> Path:
    """Makes the model, its tokenizer and generation config in `folder` (float32), unless they are there already.

    Args:
        folder: where it goes.
        chosen: the fields of `Recipe`.

    Raises:
        UserError: `folder` holds something else, or cannot be written.
    """
    recipe = Recipe(**chosen)

    def build(part: Path) -> None:
        tokenizer = tiny_tokenizer(MAX_LENGTH)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
            torch.manual_seed(recipe.seed)
            model = _new_model(tokenizer)
            questions = {numbers: WORDINGS["chain"].ask(numbers) for numbers in itertools.product(range(10), repeat=3)}
            rng = random.Random(recipe.seed)
            warm_up(model, tokenizer, questions, rng, recipe.warmup_steps, recipe.batch_size, recipe.stop_early, recipe.slip)
        with no_progress_bars():
            tokenizer.save_pretrained(part)
            model.save_pretrained(part)
        _verify(part, tokenizer, questions)

    return build_once(folder, {"name": "tiny_model", "version": VERSION, **asdict(recipe)}, build)


def _new_model(tokenizer: Qwen2Tokenizer) -> Qwen3ForCausalLM:
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention has
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1/sqrt(hidden_size); from the usual 0.02 the warm-up takes nearly twice the updates
        dtype="float32",
        **special,
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(**special)
    return model


def _verify(folder: Path, tokenizer: Qwen2Tokenizer, questions: dict[tuple[int, ...], str]) -> None:
    """Reads the tokenizer back as every other program will: by AutoTokenizer, which chooses the class by itself."""
    again = AutoTokenizer.from_pretrained(folder)
    some = list(questions.values())[::37]  # all are made of the same few characters
    texts = [*some, *tokenizer.all_special_tokens, "Any text: naïve, 数, \n\t<|user|>!"]
    if len(again) != len(tokenizer) or any(again.encode(t) != tokenizer.encode(t) or again.decode(again.encode(t)) != t for t in texts):
        raise RuntimeError(f"the tokenizer in {folder} does not read back as it was written: transformers has changed")
