"""Rewards by rule: 1.0 for a right answer, 0.0 for any other text.

For verl: reward.custom_reward_function.path=pkg://recipes.rewards, and as its name one of the four functions here.
"""

import json
import re

from recipes import math_grader

# A sign right after a digit or a bracket is an operator: `10-12` ends in 12, not in -12.
_NUMBER = r"(?:(?<![0-9)])[+-])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?"
_ANY_NUMBER = re.compile(_NUMBER)
_AFTER_EQUALS = re.compile(rf"=\s*({_NUMBER})")
_AFTER_HASHES = re.compile(rf"####\s*\$?({_NUMBER})")
_ANSWER_LINE = re.compile(r"answer\W*?:\s*(\S[^\n]*)", re.IGNORECASE)


def compute_score(data_source: str, solution_str: str | None, ground_truth: str, extra_info: dict | None = None, **kwargs):
    """Scores one response; the signature is verl's.

    `arithmetic/chain`: what follows the last `=` (the whole response when there is none) must be exactly the answer.
    `arithmetic/calculate`: the number after the first `=`, else the last number, must equal the answer.
    `math/...`: as `math` below. Any other source goes to the rules that verl has (gsm8k, MATH, DAPO, ...).

    Raises:
        NotImplementedError: neither this module nor verl has a rule for `data_source`.
    """
    rule = _RULES.get(data_source)
    if data_source.startswith("math/"):
        return math(data_source, solution_str, ground_truth, extra_info)
    if rule is None:
        from verl.utils.reward_score import default_compute_score  # heavy, and needed for other data only

        return default_compute_score(data_source, solution_str, ground_truth, extra_info=extra_info, **kwargs)
    return float(rule(solution_str or "", str(ground_truth)))


def math(data_source: str, solution_str: str | None, ground_truth: str, extra_info: dict | None = None, wrong: float = 0.0, seconds: float = 10.0, **kwargs):
    """Mathematics: the last `Answer: ...` or \\boxed{...}, whichever comes last, must equal `ground_truth` by math-verify.

    Args:
        wrong: the reward of anything else (-1 in DAPO).
        seconds: for one comparison; one that takes longer counts as wrong.

    Returns:
        The reward as `score`, and 1.0 or 0.0 as `acc`, which verl validates and filters groups by.
    """
    answer, truth = final_answer(solution_str or ""), str(ground_truth).strip()
    right = answer is not None and _equal(answer, truth, seconds)
    return {"score": 1.0 if right else float(wrong), "acc": float(right)}


def final_answer(text: str) -> str | None:
    """What a response says it answers, without dollars and boxes; None when it does not say."""
    boxed, line = text.rfind(r"\boxed{"), None
    for line in _ANSWER_LINE.finditer(text):
        pass  # the last one
    if line is not None and line.start() > boxed:
        return line.group(1).strip(" \t\r*$.") or None
    return None if boxed < 0 else _in_braces(text, boxed + len(r"\boxed"))


def stated_answer(data_source: str, text: str) -> str | None:
    """What a response answers by the rule for `data_source`; None when it does not say. Equal texts are one vote: numbers
    come in one spelling where the rule compares them as numbers."""
    if data_source == "arithmetic/chain":
        return _ending(text) or None
    if data_source == "arithmetic/calculate":
        answer = _number(text)
    elif data_source.startswith("math/"):
        answer = final_answer(text)
    else:
        answer = (_AFTER_HASHES.findall(text) or [None])[-1]
    return _canonical(answer) if answer is not None and _ANY_NUMBER.fullmatch(answer) else answer


def gsm8k(data_source: str, solution_str: str | None, ground_truth: str, extra_info: dict | None = None, **kwargs) -> float:
    """GSM8K: the number after the last `####` must equal `ground_truth`."""
    stated = _AFTER_HASHES.findall(solution_str or "")
    return float(bool(stated) and _canonical(stated[-1]) == _canonical(str(ground_truth)))


def reasoning_gym(data_source: str, solution_str: str | None, ground_truth: str, extra_info: dict, **kwargs) -> float:
    """reasoning-gym: its own score, from 0 to 1, of what stands in the last <answer>...</answer>.

    Args:
        extra_info: `dataset`, the task's name, and `entry`, the item as reasoning-gym made it, as JSON.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    score = get_score_answer_fn(extra_info["dataset"])
    return float(score(answer=extract_answer(solution_str or ""), entry=json.loads(extra_info["entry"])))


def _equal(answer: str, truth: str, seconds: float) -> bool:
    if answer == truth:
        return True
    if _ANY_NUMBER.fullmatch(answer) and _ANY_NUMBER.fullmatch(truth):  # most are: no need of math-verify
        return _canonical(answer) == _canonical(truth)
    return math_grader.equal(answer, truth, seconds)


def _in_braces(text: str, start: int) -> str | None:
    """What stands in the braces that open at `start`; None when that is nothing, or they do not close."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at].strip() or None
    return None


def _ending(text: str) -> str:
    return text.rpartition("=")[2].strip()


def _ends_in(text: str, answer: str) -> bool:
    return _ending(text) == answer


def _number(text: str) -> str | None:
    stated = _AFTER_EQUALS.search(text)
    return stated.group(1) if stated else (_ANY_NUMBER.findall(text) or [None])[-1]


def _states(text: str, answer: str) -> bool:
    number = _number(text)
    return number is not None and _canonical(number) == _canonical(answer)


def _canonical(number: str) -> str:
    """`+08.0` -> `8`, `-0` -> `0`. Text, not int(): Python refuses to convert thousands of digits."""
    whole, _, decimals = number.replace(",", "").lstrip("+").partition(".")
    sign, whole, decimals = "-" * whole.startswith("-"), whole.lstrip("-").lstrip("0") or "0", decimals.rstrip("0")
    found = whole + ("." + decimals if decimals else "")
    return found if found == "0" else sign + found


_RULES = {"arithmetic/chain": _ends_in, "arithmetic/calculate": _states}
