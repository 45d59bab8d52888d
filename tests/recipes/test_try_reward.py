"""A reward function is tried before the run that needs it."""

import math
import re

import numpy as np
import pytest
import torch

from recipes.try_reward import problem_of, wrong_result

ROW = {"data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}}


def tried(tmp_path, body: str, name: str = "compute_score", **kwargs) -> str | None:
    (tmp_path / "mine.py").write_text(body)
    return problem_of(str(tmp_path / "mine.py"), name, kwargs, [ROW])


@pytest.mark.parametrize("fine", [1, 0.5, True, -2, np.float32(3), torch.tensor(1.0), {"score": 0.0, "acc": "text"}])
def test_finite_numbers_pass(fine):
    assert wrong_result(fine) is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, None, "1.0", b"1", [1.0, 2.0], {"score": None}, {"acc": 1.0}, {}])
def test_what_is_no_finite_number_does_not(wrong):
    assert wrong_result(wrong)


@pytest.mark.parametrize(
    "body",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return float(extra_info['index'] == 3 and extra_info['num_turns'] > 0)",
        "async def compute_score(**_):\n    return {'score': 1.0}",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: float = 0.0\ndef compute_score(**_):\n    return A().x",
    ],
)
def test_functions_as_verl_calls_them_pass(tmp_path, body):
    assert tried(tmp_path, body) is None


@pytest.mark.parametrize(
    "body, message",
    [
        ("def compute_score(:", r"cannot be loaded \(SyntaxError"),
        ("import no_such_thing", r"cannot be loaded \(ModuleNotFoundError: No module named 'no_such_thing'"),
        ("raise SystemExit", r"cannot be loaded \(SystemExit"),
        ("def score(**_): return 0", "has no function compute_score"),
        ("compute_score = 3", "has no function compute_score"),
        ("def compute_score(a, b): return 0", "raises TypeError: .*unexpected keyword"),
        ("def compute_score(**_): raise KeyError('bug')", "raises KeyError: 'bug' at data_source = 'mine', ground_truth = '4' and the response ''"),
        ("def compute_score(solution_str, **_): return 1 / (solution_str != '4')", "raises ZeroDivisionError: .* the response '4'"),
        ("def compute_score(**_): return float('nan')", "returns nan at .*; it must be a finite number"),
        ("def compute_score(**_): return 'right'", "returns 'right' at"),
        ("def compute_score(**_): pass", "returns None at"),
        ("def compute_score(**_): return {'acc': 1}", r"returns a dictionary without `score` \(it has acc\)"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, body, message):
    assert re.search(message, tried(tmp_path, body))


def test_the_configured_arguments_are_given(tmp_path):
    body = "def compute_score(best, **_):\n    return best"
    assert "missing 1 required" in tried(tmp_path, body)
    assert tried(tmp_path, body, best=2.0) is None
    assert "returns 'high'" in tried(tmp_path, body, best="high")
