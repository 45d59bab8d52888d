"""Rewards by rule: 1.0 for a right answer, 0.0 for any other text.

For verl: reward.custom_reward_function.path=pkg://recipes.rewards
"""

import re

# A sign right after a digit or a bracket is an operator: `10-12` ends in 12, not in -12.
_NUMBER = r"(?:(?<![0-9)])[+-])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?"
_ANY_NUMBER = re.compile(_NUMBER)
_AFTER_EQUALS = re.compile(rf"=\s*({_NUMBER})")


def compute_score(data_source: str, solution_str: str | None, ground_truth: str, extra_info: dict | None = None, **kwargs):
    """Scores one response; the signature is verl's.

    `arithmetic/chain`: what follows the last `=` (the whole response when there is none) must be exactly the answer.
    `arithmetic/calculate`: the number after the first `=`, else the last number, must equal the answer.
    Any other source goes to the rules that verl has (gsm8k, MATH, DAPO, ...).

    Raises:
        NotImplementedError: neither this module nor verl has a rule for `data_source`.
    """
    rule = _RULES.get(data_source)
    if rule is None:
        from verl.utils.reward_score import default_compute_score  # heavy, and needed for other data only

        return default_compute_score(data_source, solution_str, ground_truth, extra_info=extra_info, **kwargs)
    return float(rule(solution_str or "", str(ground_truth)))


def _ends_in(text: str, answer: str) -> bool:
    return text.rpartition("=")[2].strip() == answer


def _states(text: str, answer: str) -> bool:
    stated = _AFTER_EQUALS.search(text)
    number = stated.group(1) if stated else (_ANY_NUMBER.findall(text) or [None])[-1]
    return number is not None and _canonical(number) == _canonical(answer)


def _canonical(number: str) -> str:
    """`+08.0` -> `8`. Text, not int(): Python refuses to convert thousands of digits."""
    whole, _, decimals = number.replace(",", "").lstrip("+").partition(".")
    sign, whole, decimals = "-" * whole.startswith("-"), whole.lstrip("-").lstrip("0") or "0", decimals.rstrip("0")
    return sign + whole + ("." + decimals if decimals else "")


_RULES = {"arithmetic/chain": _ends_in, "arithmetic/calculate": _states}
