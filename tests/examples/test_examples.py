"""The examples run, and do what they say."""

import runpy
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


# ---- plain torch -----------------------------------------------------------------------------------------------------
def test_plain_torch_learns_to_count_and_is_clipped_on_the_way(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plain_torch.py"])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLES / "plain_torch.py"), run_name="__main__")
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "reward", "clipped"]
    rewards = [float(row.split()[1]) for row in rows]
    clipped = [float(row.split()[2].rstrip("%")) for row in rows]
    assert rewards[0] < 0.1 and rewards[-1] > 0.9
    assert max(clipped) > 1
