"""What a response answers and whether that is right, by the rules of recipes/rewards.py."""

import importlib.util

from recipes.errors import UserError
from recipes.rewards import compute_score, gsm8k, stated_answer

GSM8K = "openai/gsm8k"


def check_source(source: str, said: str):
    """Raises UserError unless there is a rule for this `data_source`, which `said` brings."""
    if source != GSM8K and not source.startswith(("math/", "arithmetic/")):
        raise UserError(f"{said}: data_source = {source!r}: no rule grades it. Write math/<name>, arithmetic/chain, arithmetic/calculate or {GSM8K}.")
    if source.startswith("math/") and importlib.util.find_spec("math_verify") is None:
        raise UserError(f"{said}: math-verify, which grades it, is not installed: pip install 'trustregion[eval]'")


def grade(source: str, text: str, truth: str) -> tuple[str | None, bool]:
    """The answer that `text` states, None when it states none, and the verdict. Takes up to 10 s; safe in threads."""
    score = gsm8k(source, text, truth) if source == GSM8K else compute_score(source, text, truth)
    correct = score["acc"] if isinstance(score, dict) else score
    return stated_answer(source, text), correct == 1.0
