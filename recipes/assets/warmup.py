"""The supervised phase that the tiny model starts from: sums worked out in steps, at first with care, then without."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100  # label of tokens without loss
CAREFUL = 0.7  # of the updates, the first: they see right answers only, which teach sums sooner
logger = logging.getLogger(__name__)


def work_out(numbers: tuple[int, ...], rng: random.Random, stop_early: float, slip: float) -> str:
    """What a demonstration answers to `3+4+5=`: `7+5=12`, each step adding the first two numbers.

    Args:
        numbers: the terms of the sum.
        rng: decides what goes wrong.
        stop_early: probability, at each step but the last, of giving the partial sum as the answer (`7`).
        slip: probability, at each step, of being wrong by one.
    """
    total, rest, steps = numbers[0], list(numbers[1:]), []
    while rest:
        total += rest.pop(0)
        if rng.random() < slip:
            total = max(0, total + rng.choice((-1, 1)))
        if rest and rng.random() < stop_early:
            return "=".join([*steps, str(total)])
        steps.append("+".join(map(str, (total, *rest))))
    return "=".join(steps)


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: dict[tuple[int, ...], str],
    rng: random.Random,
    steps: int,
    batch_size: int,
    stop_early: float,
    slip: float,
) -> None:
    """Trains `model` in place to add, then to answer as carelessly as `work_out` does.

    The same arguments give the same weights, bit for bit.

    Args:
        questions: numbers -> the prompt that asks for their sum.
        rng: chooses questions and what goes wrong in the answers.
        steps: updates.
        batch_size: demonstrations an update.
        stop_early, slip: probabilities, see `work_out`; both are 0 in the first CAREFUL of the updates.
    """
    prompts = {
        numbers: tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for numbers, text in questions.items()
    }
    choices = list(prompts)
    # Not torch.optim.Muon: it computes in bfloat16, which takes most of the time where a processor has no AVX512-bf16.
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step, steps))
    model.train()
    with _one_thread():
        for step in range(steps):
            drawn = [rng.choice(choices) for _ in range(batch_size)]
            wrong = (0.0, 0.0) if step < CAREFUL * steps else (stop_early, slip)
            answers = [work_out(numbers, rng, *wrong) + tokenizer.eos_token for numbers in drawn]
            ids, labels = _batch(tokenizer, [prompts[numbers] for numbers in drawn], answers)
            logits = model(input_ids=ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if (step + 1) % 50 == 0:
                logger.info("warm-up step %d of %d: loss %.3f", step + 1, steps, loss.item())
    model.eval()


def _learning_rate(step: int, steps: int) -> float:
    """Factor on the learning rate: up within 20 steps, then down to a tenth."""
    return min(1.0, (step + 1) / 20) * (1 - 0.9 * step / max(1, steps))


def _batch(tokenizer: PreTrainedTokenizerBase, prompts: list[str], answers: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [batch, length], padded on the right: causal attention never looks there, so no mask."""
    before = tokenizer(prompts)["input_ids"]
    rows = [p + a for p, a in zip(before, tokenizer(answers)["input_ids"], strict=True)]
    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    labels = torch.tensor([
        [IGNORED] * len(p) + row[len(p) :] + [IGNORED] * (length - len(row)) for p, row in zip(before, rows, strict=True)
    ])  # fmt: skip
    return ids, labels


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and on busy cores threads that wait for one another cost minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
