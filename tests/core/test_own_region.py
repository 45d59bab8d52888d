"""A region and a surrogate of one's own: the very example of docs/adding_a_region.md."""

import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from trustregion import ConfigError, MethodConfig, PolicyLoss, TokenBatch
from trustregion.regions import REGIONS
from trustregion.surrogates import SURROGATES

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_region.md"


@pytest.fixture
def example(monkeypatch, capsys):
    """What the page's code defines; its entries in the library's tables last for one test."""
    text = PAGE.read_text(encoding="utf-8")
    (code,), (preset,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    for table, name in ((REGIONS, "probability_step"), (SURROGATES, "fade")):
        monkeypatch.setitem(table, name, None)  # undone afterwards, with what the code puts there
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names | {"printed": capsys.readouterr().out, "preset": yaml.safe_load(preset)}


def test_it_prints_and_weighs_what_the_page_says(example):
    assert float(example["printed"]) == pytest.approx(1 / 3)
    # d(-w r A)/d log_prob = -w r A: r = 1.1 inside, r = 1.3 at 0.65 / 0.6 beyond the bound, r = 5 inside.
    beyond = math.exp(-math.log(0.65 / 0.6) / 0.1)
    assert beyond == pytest.approx(0.449, abs=5e-4)
    assert example["new"].grad[0].tolist() == pytest.approx([-1.1, -1.3 * beyond, -5], rel=1e-5)


def test_it_is_configured_like_any_other(example):
    schedule = {"step": {"type": "linear", "end": 0.01, "steps": 5}}
    method = MethodConfig.from_flat({**example["preset"], "schedule": schedule})
    assert method.region == example["ProbabilityStep"](0.1)
    with pytest.raises(ConfigError, match="method.step = 2: must be a number > 0 and <= 1"):
        MethodConfig.from_flat({**example["preset"], "step": 2})


@pytest.mark.parametrize("surrogate", ["fade", "clip", "mask", "preserve", "cispo"])
def test_it_survives_extreme_tokens_under_any_surrogate(example, surrogate):
    edges = torch.tensor([0.0, -1e-9, -1, -100, -1000])
    new, old = (x.flatten()[None] for x in torch.meshgrid(edges, edges, indexing="ij"))
    new = torch.cat([new, torch.full((1, 1), torch.nan)], 1).requires_grad_()
    old = torch.cat([old, torch.full((1, 1), torch.nan)], 1)
    mask = torch.cat([torch.ones(1, 25), torch.zeros(1, 1)], 1)
    surrogate = {"type": surrogate} | ({"width": 0.1} if surrogate == "fade" else {})
    loss = PolicyLoss.from_config({"region": {"type": "probability_step", "step": 0.1}, "surrogate": surrogate})
    for sign in (1, -1):
        out = loss(TokenBatch(new, old, sign * torch.ones(1, 26), mask))
        out.token_loss.sum().backward()
        assert out.token_loss.isfinite().all() and new.grad.isfinite().all()
