"""A call that waits for a rollout server is given up when a server dies."""

import threading

import pytest

pytest.importorskip("ray")

from trustregion.verl_plugin import health  # noqa: E402
from trustregion.verl_plugin.health import Health, ProcessDied  # noqa: E402


def fails():
    raise KeyError("its own error")


def test_a_call_ends_as_it_would_alone():
    health = Health([])
    assert health.guard(lambda: 7) == 7
    with pytest.raises(KeyError, match="its own error"):
        health.guard(fails)


def test_a_call_that_waits_for_the_dead_is_given_up(monkeypatch):
    monkeypatch.setattr(health, "CHECK_SECONDS", 0.02)
    patient, checks = Health([]), []

    def check(now=False):
        checks.append(now)
        if len(checks) == 3:
            raise ProcessDied("vLLM server 0_0 is dead")

    monkeypatch.setattr(patient, "check", check)
    with pytest.raises(ProcessDied, match="0_0"):
        patient.guard(threading.Event().wait)
    assert len(checks) == 3
