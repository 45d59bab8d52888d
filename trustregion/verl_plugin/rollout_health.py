"""Notices a dead rollout server. verl alone trains on what is left of the batch and then waits for the dead one for good."""

import threading
import time
from concurrent.futures import Future, wait

import ray

CHECK_SECONDS = 5.0
ANSWER_SECONDS = 45.0


class RolloutServerDied(RuntimeError):
    """A vLLM server or its engine is gone; the message names it."""


def _engine_is_dead(server) -> bool:
    engine = getattr(server, "engine", None)  # nodes after the first of a replica have none
    return engine is not None and bool(engine.errored)


class RolloutHealth:
    """Asks every rollout server whether its engine lives.

    Args:
        replicas: verl's rollout replicas; each has `.servers`, Ray actors that hold a vLLM engine.
    """

    def __init__(self, replicas):
        self._servers = {
            f"vLLM server {replica.replica_rank}_{node} at {replica._server_address}": server
            for replica in replicas
            for node, server in enumerate(replica.servers)
        }
        self._checked = 0.0

    def check(self, now: bool = False):
        """Raises RolloutServerDied when an engine is dead or a server does not answer; asks every 5 s, or `now`."""
        if not now and time.monotonic() - self._checked < CHECK_SECONDS:
            return
        for name, answer in [(name, s.__ray_call__.remote(_engine_is_dead)) for name, s in self._servers.items()]:
            try:
                dead = ray.get(answer, timeout=ANSWER_SECONDS)
            except ray.exceptions.RayActorError as error:
                raise RolloutServerDied(f"{name} is dead: its process has ended. Its last words are in the log.") from error
            except ray.exceptions.GetTimeoutError as error:
                raise RolloutServerDied(f"{name} has not answered for {ANSWER_SECONDS:.0f} s.") from error
            if dead:
                raise RolloutServerDied(
                    f"{name} is dead: its vLLM engine process was killed or crashed. Its last words are in the log."
                )
        self._checked = time.monotonic()

    def guard(self, call):
        """What `call()` returns or raises; given up with RolloutServerDied when a server dies meanwhile."""
        outcome = Future()

        def work():
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=work, daemon=True).start()  # a daemon, as nothing ends a call that waits for the dead
        while not wait([outcome], timeout=CHECK_SECONDS).done:
            self.check()
        return outcome.result()
