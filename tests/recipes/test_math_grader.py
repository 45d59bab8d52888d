"""Verdicts on pairs of answers, and on text that no grader should be given.

grading_pairs.csv: `equal` is the right verdict. Where math-verify 0.9 gives the other one, `math_verify` says why;
they are all right answers that it does not accept. When such a row fails, math-verify has learnt it: empty the field.
"""

import csv
import time
from pathlib import Path

import pytest

from recipes import math_grader
from recipes.rewards import math

pytestmark = pytest.mark.slow
PAIRS = list(csv.DictReader(Path(__file__).with_name("grading_pairs.csv").open(encoding="utf-8")))
SIZE = 10_000  # characters
HOSTILE = {
    "open braces": "{" * SIZE,
    "closed braces": "}" * SIZE,
    "brackets": "(" * (SIZE // 2) + "1" + ")" * (SIZE // 2),
    "nested roots": r"\sqrt{" * (SIZE // 8) + "2" + "}" * (SIZE // 8),
    "nested fractions": r"\frac{1}{" * (SIZE // 10) + "2" + "}" * (SIZE // 10),
    "a tower of powers": "9^{" * (SIZE // 4) + "9" + "}" * (SIZE // 4),
    "a large power": "9^{9^{9^{9}}}",
    "a large factorial": "(10^{9})!!",
    "a large polynomial": "(x+y+z+1)^{5000}",
    "a long sum": "+".join(["1"] * (SIZE // 2)),
    "many sums": r"\sum_{n=1}^{10^{9}} n!" * (SIZE // 22),
    "many integrals": r"\int_0^1 e^{x^2}" * (SIZE // 16),
    "many equal signs": "x=" * (SIZE // 2),
    "many commands": r"\left" * (SIZE // 5),
    "many digits": "7" * SIZE + ".5",
    "many commas": "1," * (SIZE // 2),
    "a set of many": r"\{" + ",".join(f"x_{{{i}}}" for i in range(1500)) + r"\}",
    "no text": "\0" * SIZE,
    "half a character": "\ud800" * 100,
    "lines": "\n" * SIZE,
}


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("math_verify")


def is_right(answer: str, truth: str, seconds: float = 60.0) -> bool:
    return math("math/pairs", rf"So it is \boxed{{{answer}}}", truth, seconds=seconds) == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{pair['kind']}-{i}" for i, pair in enumerate(PAIRS, start=2)])
def test_pairs(pair):
    assert pair["equal"] in ("yes", "no") and is_right(pair["answer"], pair["truth"]) == (
        (pair["equal"] == "yes") != bool(pair["math_verify"])
    )


def test_math_verify_accepts_nothing_that_is_wrong():
    assert len(PAIRS) >= 60 and len({(pair["answer"], pair["truth"]) for pair in PAIRS}) == len(PAIRS)
    assert {pair["equal"] for pair in PAIRS if pair["math_verify"]} == {"yes"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_wrong_in_time(name):
    assert math_grader.equal("1/2", "0.5", 60.0)  # the process is there
    seconds, began = 4.0, time.monotonic()
    assert not is_right(HOSTILE[name], "7", seconds)
    assert time.monotonic() - began < seconds + 10


def test_after_hostile_text_the_next_answer_is_right():
    assert not is_right(HOSTILE["a tower of powers"], "7", 1.0)
    assert is_right(r"\frac{2}{4}", r"\frac{1}{2}")
