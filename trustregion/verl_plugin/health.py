"""Notices dead processes. verl alone trains on what is left of a batch when a rollout server dies, and then waits for
the dead one for good; of a dead worker another one's broken connection may be all that it says."""

import os
import threading
import time
from concurrent.futures import Future, wait

import ray

CHECK_SECONDS = 5.0
ANSWER_SECONDS = 45.0
LAST_LOOK_SECONDS = 10.0  # Ray takes a few to notice that a process has gone
NODE_SECONDS = 60.0  # as long as this with a node; its actors cannot be reached meanwhile


class ProcessDied(RuntimeError):
    """A rollout server, its engine, a worker or a node is gone; the message names it, with its pid."""


def how_it_died(error: ray.exceptions.RayActorError) -> str:
    """Ray's own account: the last line, without its guesses at the cause."""
    return str(error).strip().splitlines()[-1].partition(" Some common causes")[0].strip()


def nodes_up() -> set[str]:
    """The ids of Ray's living nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def dead_node(among: set[str] | None = None) -> str | None:
    """What is to be said of the first Ray node that is gone, or None. `among`: ids of those that were there; a cluster that
    outlives its runs lists all that it ever lost."""
    for node in ray.nodes():
        if not node["Alive"] and (among is None or node["NodeID"] in among):
            logs = os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs")
            return f"the Ray node at {node['NodeManagerAddress']} is dead: its raylet has ended. Its logs: {logs}/raylet.* there."
    return None


def node_of_the_lost(error: BaseException, among: set[str] | None = None) -> str | None:
    """Of an actor that cannot be reached: what is to be said of its node, once Ray has noticed that the node is dead; or None."""
    deadline = time.monotonic() + NODE_SECONDS
    while isinstance(error, ray.exceptions.ActorUnavailableError) and time.monotonic() < deadline:
        if node := dead_node(among):
            return node
        time.sleep(1)
    return None


def _engine_is_dead(server) -> bool:
    engine = getattr(server, "engine", None)  # nodes after the first of a replica have none
    return engine is not None and bool(engine.errored)


def _pid(_actor) -> int:
    return os.getpid()


class Health:
    """Asks every rollout server whether its engine lives, and every worker whether it does.

    Args:
        replicas: verl's rollout replicas; each has `.servers`, Ray actors that hold a vLLM engine.
        workers: Ray actors by name.
    """

    def __init__(self, replicas, workers=None):
        servers = {
            f"vLLM server {replica.replica_rank}_{node} at {replica._server_address}": server
            for replica in replicas
            for node, server in enumerate(replica.servers)
        }
        self._servers, self._workers = _with_pids(servers), _with_pids(workers or {})
        self._nodes = nodes_up()
        self._asked = {}  # worker -> the question that it has not answered yet
        self._checked = 0.0

    def check(self, now: bool = False):
        """Raises ProcessDied when an engine or a worker is dead or a server does not answer; every 5 s, or `now`."""
        if not now and time.monotonic() - self._checked < CHECK_SECONDS:
            return
        for name, answer in [(name, s.__ray_call__.remote(_engine_is_dead)) for name, s in self._servers.items()]:
            try:
                dead = ray.get(answer, timeout=ANSWER_SECONDS)
            except ray.exceptions.RayActorError as error:
                raise self._death(name, error) from error
            except ray.exceptions.GetTimeoutError as error:
                raise ProcessDied(f"{name} has not answered for {ANSWER_SECONDS:.0f} s.") from error
            if dead:
                raise ProcessDied(f"{name} is dead: its vLLM engine process was killed or crashed.")
        self._check_workers()
        self._checked = time.monotonic()

    def _check_workers(self):
        """One that is busy does not answer, and is asked again only when it has."""
        for name, worker in self._workers.items():
            answer = self._asked.get(name) or worker.__ray_call__.remote(_pid)
            self._asked[name] = answer
            if ray.wait([answer], timeout=0)[0]:
                del self._asked[name]
                try:
                    ray.get(answer)
                except ray.exceptions.RayActorError as error:
                    raise self._death(name, error) from error

    def _death(self, name: str, error: ray.exceptions.RayActorError) -> ProcessDied:
        node = node_of_the_lost(error, self._nodes) or dead_node(self._nodes)
        return ProcessDied(node or f"{name} is dead: {how_it_died(error)}")

    def name_the_dead(self, error: Exception):
        """Raises ProcessDied from `error` when a node, a server or a worker is gone: then that is the reason."""
        deadline = time.monotonic() + LAST_LOOK_SECONDS
        while time.monotonic() < deadline:
            try:
                if node := dead_node(self._nodes):
                    raise ProcessDied(node)
                self.check(now=True)
            except ProcessDied as death:
                raise death from error
            time.sleep(0.5)

    def guard(self, call):
        """What `call()` returns or raises; given up with ProcessDied when a process dies meanwhile."""
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


def _with_pids(actors: dict) -> dict:
    pids = ray.get([actor.__ray_call__.remote(_pid) for actor in actors.values()]) if actors else []
    return {f"{name} (pid {pid})": actor for (name, actor), pid in zip(actors.items(), pids, strict=True)}
