"""What Ray is started with on a node."""

import pytest

from recipes.errors import UserError
from recipes.ray_node import address_towards, interface_of, main, settings


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("NODE_IP", "NNODES", "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_a_cluster_gives_its_environment_and_its_options():
    found = settings("cpu_2x1", "127.0.0.1")
    assert found["VERL_PLATFORM"] == "cpu" and found["NNODES"] == "2"
    assert found["NODE_IP"] == found["VLLM_HOST_IP"] == "127.0.0.1" and found["GLOO_SOCKET_IFNAME"] == "lo"
    assert found["RAY_START_OPTIONS"] == "--num-cpus=12 --num-gpus=1 --object-store-memory=300000000"


def test_gpus_are_left_to_ray_to_find_and_what_is_set_wins(monkeypatch):
    for key, value in {"NODE_IP": "127.0.0.1", "NNODES": "3", "GLOO_SOCKET_IFNAME": "ib0"}.items():
        monkeypatch.setenv(key, value)
    found = settings("2x8")
    assert found["RAY_START_OPTIONS"] == "" and found["VERL_ENGINE_VENDOR"] == "trustregion"
    assert (found["NODE_IP"], found["NNODES"], found["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "3", "ib0")
    assert interface_of("10.1.2.3") is None


def test_what_is_wrong_is_named():
    with pytest.raises(UserError, match="cluster=3x8: no such cluster"):
        settings("3x8")
    with pytest.raises(UserError, match="HEAD = no.such.host: no way there"):
        address_towards("no.such.host")
    assert main([]) == main(["cpu", "host", "more"]) == 2
