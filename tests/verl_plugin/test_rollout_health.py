"""A call that waits for a rollout server is given up when a server dies."""

import threading

import pytest

pytest.importorskip("ray")

from trustregion.verl_plugin import rollout_health  # noqa: E402
from trustregion.verl_plugin.rollout_health import RolloutHealth, RolloutServerDied  # noqa: E402


def fails():
    raise KeyError("its own error")


def test_a_call_ends_as_it_would_alone():
    health = RolloutHealth([])
    assert health.guard(lambda: 7) == 7
    with pytest.raises(KeyError, match="its own error"):
        health.guard(fails)


def test_a_call_that_waits_for_the_dead_is_given_up(monkeypatch):
    monkeypatch.setattr(rollout_health, "CHECK_SECONDS", 0.02)
    health, checks = RolloutHealth([]), []

    def check(now=False):
        checks.append(now)
        if len(checks) == 3:
            raise RolloutServerDied("vLLM server 0_0 is dead")

    monkeypatch.setattr(health, "check", check)
    with pytest.raises(RolloutServerDied, match="0_0"):
        health.guard(threading.Event().wait)
    assert len(checks) == 3
