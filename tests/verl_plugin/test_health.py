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


class Actor:
    """Answers with each of `answers` in turn."""

    def __init__(self, *answers):
        self.answers = [*answers]
        self.__ray_call__ = self

    def remote(self, _):
        return self.answers.pop(0)


NODE = "the Ray node at 10.0.0.2 is dead"


@pytest.mark.parametrize("then", [NODE, None])
def test_one_that_cannot_be_reached_is_waited_for_until_ray_knows(monkeypatch, then):
    def get(answer, timeout):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(health.ray, "get", get)
    monkeypatch.setattr(health.time, "sleep", lambda seconds: None)
    lost = health.ray.exceptions.ActorUnavailableError("no route", actor_id=None)
    monkeypatch.setattr(health, "dead_node", lambda: None)
    health._raise_if_dead("worker 1", Actor(lost, 7), lost)  # it was the network
    nodes = iter([None])
    monkeypatch.setattr(health, "dead_node", lambda: next(nodes, then))
    with pytest.raises(ProcessDied, match=then or "worker 1 is dead"):
        health._raise_if_dead("worker 1", Actor(lost, health.ray.exceptions.ActorDiedError()), lost)
