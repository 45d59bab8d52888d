"""A call that waits for a rollout server is given up when a server dies."""

import threading

import pytest

pytest.importorskip("ray")

from trustregion.verl_plugin import health  # noqa: E402
from trustregion.verl_plugin.health import Health, ProcessDied  # noqa: E402


@pytest.fixture(autouse=True)
def no_nodes(monkeypatch):
    monkeypatch.setattr(health.ray, "nodes", lambda: [])


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


@pytest.mark.parametrize("known, told", [({"two"}, "the Ray node at 10.0.0.2 is dead"), ({"one"}, None), (None, "the Ray node at 10.0.0.2 is dead")])
def test_of_one_that_cannot_be_reached_the_node_is_waited_for(monkeypatch, known, told):
    """Ray notices a dead node at the third look; one that was lost before the run is none of its."""
    looks = iter([True, True])
    now = iter(range(1000))
    monkeypatch.setattr(health.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(health.time, "sleep", lambda seconds: None)
    node = {"NodeID": "two", "NodeManagerAddress": "10.0.0.2"}
    monkeypatch.setattr(health.ray, "nodes", lambda: [{**node, "Alive": next(looks, False)}])
    lost = health.ray.exceptions.ActorUnavailableError("no route", actor_id=None)
    found = health.node_of_the_lost(lost, known)
    assert found is None if told is None else found.startswith(told)
    assert health.node_of_the_lost(health.ray.exceptions.ActorDiedError(), None) is None  # Ray knows: the process alone


def test_of_one_that_died_with_its_node_the_node_is_named(monkeypatch):
    """Ray may call an actor dead only when its node is, and then it is no longer one that cannot be reached."""
    node = {"NodeID": "two", "NodeManagerAddress": "10.0.0.2", "Alive": True}
    monkeypatch.setattr(health.ray, "nodes", lambda: [node])
    mine, error = Health([]), health.ray.exceptions.ActorDiedError()
    assert str(mine._death("FSDP worker 1", error)).startswith("FSDP worker 1 is dead: ")
    node["Alive"] = False
    assert str(mine._death("FSDP worker 1", error)).startswith("the Ray node at 10.0.0.2 is dead")
