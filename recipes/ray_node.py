"""What scripts/ray_cluster.sh has to know of a cluster's configuration and of this machine, as lines for a shell:

    python -m recipes.ray_node CLUSTER [HEAD]      HEAD: the head's host, on the others
"""

import os
import shlex
import socket
import sys

import psutil
from omegaconf import OmegaConf

from recipes.errors import UserError
from recipes.train import check_choices, compose


def settings(cluster: str, head: str | None = None) -> dict[str, str]:
    """The environment that Ray is started with: the cluster's own variables and the network's; and NNODES, NODE_IP and
    RAY_START_OPTIONS. Variables that are set already win over the network's and NODE_IP.

    Raises UserError where the cluster is unknown or this machine's address cannot be found.
    """
    check_choices([f"cluster={cluster}"])
    config = compose([f"cluster={cluster}"])
    options = OmegaConf.to_container(config.cluster.get("ray_start") or OmegaConf.create({}), resolve=True)
    address = os.environ.get("NODE_IP") or address_towards(head)
    network = {"VLLM_HOST_IP": address}
    if interface := interface_of(address):
        network["GLOO_SOCKET_IFNAME"] = interface  # gloo would take that of the host's name, often 127.0.1.1
    return {
        **{key: os.environ.get(key, value) for key, value in network.items()},
        **{key: str(value) for key, value in config.cluster.env.items()},
        "NODE_IP": address,
        "NNODES": os.environ.get("NNODES", str(config.trainer.nnodes)),
        "RAY_START_OPTIONS": " ".join(f"--{key.replace('_', '-')}={value}" for key, value in options.items()),
    }


def address_towards(head: str | None) -> str:
    """This machine's address, as `head` would see it, or (on the head itself) that of its first interface."""
    if head is not None:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((head, 1))  # sends nothing
                return probe.getsockname()[0]
        except OSError as error:
            raise UserError(f"HEAD = {head}: no way there ({error}). Give the head's address, or set NODE_IP to this node's.") from error
    for _interface, address in _addresses():
        if not address.startswith("127."):
            return address
    raise UserError("this machine has no network address. Set NODE_IP.")


def interface_of(address: str) -> str | None:
    return next((interface for interface, own in _addresses() if own == address), None)


def _addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of the interfaces that are up."""
    up = psutil.net_if_stats()
    every = psutil.net_if_addrs().items()
    return [(name, a.address) for name, own in every for a in own if a.family == socket.AF_INET and up[name].isup]


def main(arguments: list[str]) -> int:
    try:
        if not 1 <= len(arguments) <= 2:
            raise UserError("give the name of a cluster, and on the other nodes the head's host: python -m recipes.ray_node CLUSTER [HEAD]")
        found = settings(*arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for key, value in found.items():
        print(f"export {key}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
