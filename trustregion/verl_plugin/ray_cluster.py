"""Looks at a Ray cluster that is up: who is there, what each node has installed, and where they differ.

    python -m trustregion.verl_plugin.ray_cluster status ADDRESS
    python -m trustregion.verl_plugin.ray_cluster wait ADDRESS NODES SECONDS [HOST ...]
    python -m trustregion.verl_plugin.ray_cluster check REQUEST      for recipes.preflight: JSON in, JSON out
"""

import json
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trustregion.verl_plugin import node_probe

PROBE_SECONDS = 180.0  # verl's import takes half a minute on a cold file system

ANSWER_SECONDS = 10.0


class ClusterError(RuntimeError):
    """The cluster cannot be reached, or is not what it has to be. Says what to do."""


def connect(address: str, environment: Mapping[str, str] | None = None):
    """Joins the cluster as a driver, whose tasks get `environment`. Raises ClusterError."""
    try:
        if ":" in address:  # Ray tries for ten minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": dict(environment or {})})
    except Exception as error:  # Ray's own kinds, RuntimeError and ConnectionError
        raise ClusterError(
            f"no Ray cluster at {address} ({_first_line(error)}). Start it with scripts/ray_cluster.sh; all nodes and this "
            "shell need RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN, or ~/.ray/auth_token"
        ) from error


def alive() -> list[dict]:
    """Ray's records of the nodes that are up, by address."""
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])


def name_of(node: dict) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def wait(count: int, seconds: float, expected: Iterable[str] = ()):
    """Returns when `count` nodes are up and those `expected` (host names or addresses) are among them.

    Raises ClusterError that names who came and who did not, after `seconds`.
    """
    expected, deadline = list(expected), time.monotonic() + seconds
    while True:
        nodes = alive()
        known = {text for node in nodes for text in _names(node)}
        missing = [host for host in expected if host not in known and host.partition(".")[0] not in known]
        if len(nodes) >= count and not missing:
            return
        if time.monotonic() > deadline:
            came = f"{len(nodes)} of {count} nodes after {seconds:g} s; these came: {', '.join(map(name_of, nodes))}"
            raise ClusterError(f"{came}{'; these did not: ' + ', '.join(missing) if missing else ''}")
        time.sleep(1.0)


def _names(node: dict) -> set[str]:
    host = node["NodeManagerHostname"]
    return {host, host.partition(".")[0], node["NodeManagerAddress"], node.get("NodeName", "")}


def probe_all(paths: Iterable[str] = (), imports: Iterable[str] = ()) -> dict[str, dict]:
    """Node's name -> its answer (`node_probe.probe`); of a node that does not answer, {"error": why}."""
    cloudpickle.register_pickle_by_value(node_probe)
    task = ray.remote(num_cpus=0, max_retries=0)(node_probe.probe)
    asked = {
        name_of(node): task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(list(paths), list(imports))
        for node in alive()
    }
    answers, deadline = {}, time.monotonic() + PROBE_SECONDS
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference, timeout=max(0.1, deadline - time.monotonic()))
        except Exception as error:
            answers[name] = {"error": _first_line(error)}
    return answers


def differences(answers: dict[str, dict]) -> list[tuple[str, list[str]]]:
    """(what, its value on each node) of versions and variables that are not the same on all nodes that answered."""
    rows = []
    for part in ("versions", "environment"):
        told = [answer[part] for answer in answers.values() if part in answer]
        for key in sorted({key for values in told for key in values}):
            values = [values.get(key, "not set") for values in told]
            if len(set(values)) > 1:
                rows.append((key, values))
    return rows


def check(request: dict) -> dict:
    """What keeps a run from succeeding on this cluster, as `problems`, and what it is, as `facts`: lists of text.

    `request` has the cluster's `address`, the `nodes` wanted and the `gpus` of each, the run's `environment`, and the
    `paths` and `imports` that every node needs.
    """
    try:
        connect(request["address"], request["environment"])
    except ClusterError as error:
        return {"problems": [str(error)]}
    problems, nodes = [], alive()
    enough = [node for node in nodes if node["Resources"].get("GPU", 0) >= request["gpus"]]
    up = ", ".join(f"{name_of(node)} with {node['Resources'].get('GPU', 0):g} GPUs" for node in nodes)
    if len(enough) < request["nodes"]:
        problems.append(
            f"trainer.nnodes = {request['nodes']}, trainer.n_gpus_per_node = {request['gpus']}: the cluster at "
            f"{request['address']} has {up}. Start the others with scripts/ray_cluster.sh worker, or lower the two."
        )
    free, wanted = ray.available_resources().get("GPU", 0), request["nodes"] * request["gpus"]
    if not problems and free < wanted:
        problems.append(f"{wanted} GPUs are wanted and {free:g} are free: another job has the rest. Wait, or end it (ray list actors).")

    answers = probe_all(request["paths"], request["imports"])
    for name, answer in answers.items():
        if "error" in answer:
            problems.append(f"{name}: no answer ({answer['error']})")
            continue
        if answer["plugin"]:
            problems.append(f"{name}: verl does not know our policy loss: {answer['plugin']}")
        if answer["missing"]:
            problems.append(f"{name}: not there: {', '.join(answer['missing'])}. Copy it there, or use a folder that all nodes share.")
    if rows := differences(answers):
        names = [name for name, answer in answers.items() if "error" not in answer]
        compared = table(["", *names], [[key, *values] for key, values in rows])
        problems.append(
            "nodes differ, and all have to be the same. Install the same on all, and start Ray with the same environment "
            f"(scripts/ray_cluster.sh):\n{compared}"
        )
    return {"problems": problems, "facts": [f"cluster: {len(nodes)} nodes, {up}; the same versions, variables and files on all"] if not problems else []}


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def status() -> str:
    """Nodes, resources and versions as a table, nodes side by side."""
    answers = probe_all()
    nodes = {name_of(node): node["Resources"] for node in alive()}
    names = [name for name in answers if name in nodes]
    rows = [[key, *(f"{nodes[name].get(key, 0):g}" for name in names)] for key in ("CPU", "GPU")]
    rows.append(["memory", *(f"{nodes[name].get('memory', 0) / 2**30:.0f} GiB" for name in names)])
    rows.append(["object store", *(f"{nodes[name].get('object_store_memory', 0) / 2**30:.1f} GiB" for name in names)])
    keys = list(next((answer["versions"] for answer in answers.values() if "versions" in answer), {}))
    rows += [[key, *(answers[name].get("versions", {}).get(key, "?") for name in names)] for key in keys]
    rows.append(["plugin", *("no answer" if "error" in answers[name] else answers[name]["plugin"] or "registered" for name in names)])
    text = table(["node", *names], rows)
    for key, _values in differences(answers):
        text += f"\ndiffers: {key}"
    return text


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"


def main(command: str, address: str, *rest: str) -> int:
    if command == "check":
        print(f"\n{json.dumps(check(json.loads(Path(address).read_text())))}")
        return 0
    try:
        connect(address)
        if command == "status":
            print(status())
        else:
            count, seconds, *expected = rest
            wait(int(count), float(seconds), expected)
            print(f"{len(alive())} nodes: {', '.join(map(name_of, alive()))}")
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
