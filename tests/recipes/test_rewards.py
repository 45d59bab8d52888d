"""What a response earns: mathematics by math-verify, GSM8K, reasoning-gym. Arithmetic's rules are in test_arithmetic.py."""

import json
import threading
import time

import pytest

from recipes import math_grader
from recipes.rewards import compute_score, final_answer, gsm8k, math, reasoning_gym


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3}, no: \boxed{4}", "4"),
        ("Answer: 12", "12"),
        ("**Answer:** $x^2$.", "x^2"),
        ("Answer: 1\nAnswer: 2\nthat is all", "2"),
        (r"Answer: $\boxed{7}$", "7"),
        ("\\boxed{1}\nAnswer: 2", "2"),
        ("Answer: 1\n\\boxed{2}", "2"),
        (r"\boxed{never closed", None),
        (r"so \boxed{ }", None),
        ("12", None),
        ("the answer is 12", None),
        ("Answer:", None),
        ("Answer: $$", None),
        ("", None),
    ],
)
def test_the_last_marked_answer_counts(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [("Answer: 1,000", "1000", True), ("Answer: -0.0", "0", True), ("Answer: -0.5", "0.5", False), ("Answer: 42.0", "42", True), ("Answer: -3", "3", False), ("42", "42", False), (None, "1", False)],
)
def test_plain_numbers_need_no_math_verify(text, truth, right, monkeypatch):
    monkeypatch.setattr(math_grader, "equal", None)
    assert math("math/aime24", text, truth, wrong=-1.0) == {"score": 1.0 if right else -1.0, "acc": float(right)}
    assert compute_score("math/aime24", text, truth, {}) == {"score": float(right), "acc": float(right)}


@pytest.mark.parametrize(
    ("text", "right"),
    [("Answer: 18", False), ("#### 18", True), ("9 * 2 = 18\n#### $18.00", True), ("#### 17\n#### 18", True), ("#### 18\n#### 17", False), ("####", False), (None, False)],
)
def test_gsm8k_takes_the_number_after_the_last_hashes(text, right):
    assert gsm8k("openai/gsm8k", text, "18") == float(right)


def test_reasoning_gym_scores_its_own_items():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=3)[0]
    extra = {"dataset": "chain_sum", "entry": json.dumps(entry)}
    assert reasoning_gym("rg", f"I think <answer>{entry['answer']}</answer>", "", extra) == 1.0
    assert reasoning_gym("rg", entry["answer"], "", extra) < 0.1 and reasoning_gym("rg", "<answer>x</answer>", "", extra) < 0.1


@pytest.mark.slow
class TestMathVerify:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("math_verify")

    @pytest.mark.parametrize(
        ("answer", "truth", "right"),
        [(r"\frac{1}{2}", "0.5", True), ("2x+1", "1+2x", True), (r"2\sqrt{2}", r"\sqrt{8}", True), ("(1,2)", "(1, 2)", True), ("(1,2)", "(2,1)", False), ("x", "y", False), ("}{", "1", False), ("\n", "1", False)],
    )
    def test_expressions_are_compared_by_value(self, answer, truth, right):
        assert math_grader.equal(answer, truth, seconds=60.0) is right

    def test_what_takes_too_long_is_ended_and_the_next_question_answered(self):
        math_grader.equal("x", "y", seconds=60.0)  # the process is there
        began = time.monotonic()
        assert math("math/x", r"\boxed{9^{9^{9^{9}}}}", "3", seconds=1.0)["acc"] == 0.0
        assert time.monotonic() - began < 10
        assert math_grader.equal(r"\frac{2}{4}", r"\frac{1}{2}", seconds=60.0)

    def test_it_is_asked_from_threads_as_in_verls_reward_workers(self):
        questions = [(rf"\frac{{{n}}}{{2}}", rf"\frac{{{2 * n}}}{{4}}" if n % 2 else "x") for n in range(12)]
        found = {}
        threads = [threading.Thread(target=lambda q=q: found.update({q: math_grader.equal(*q, seconds=60.0)})) for q in questions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[question] for question in questions] == [n % 2 == 1 for n in range(12)]

    def test_a_grader_that_dies_gives_nothing_and_is_started_again(self, monkeypatch):
        grader = math_grader._Grader()
        assert grader.ask(["1/2", "0.5"], 60.0)
        grader.process.kill()
        grader.process.wait()
        assert grader.ask(["1/2", "0.5"], 60.0) is False
        assert grader.ask(["1/2", "0.5"], 60.0) is True
        grader.end()
        assert grader.process is None


def test_without_math_verify_the_package_is_named(monkeypatch):
    monkeypatch.setattr(math_grader.importlib.util, "find_spec", lambda name: None)
    math_grader._graders.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        math_grader.equal("x", "y", 1.0)
