"""What is looked at before training, without a cluster; with one: tests/e2e/test_two_nodes.py."""

import json

import pytest
from rich.console import Console

from recipes.errors import UserError
from recipes.preflight import in_a_process, is_joined, preflight, wants_a_token


@pytest.fixture
def quiet():
    return Console(quiet=True)


def test_problems_of_all_kinds_are_named_at_once(configure, quiet, tmp_path):
    config = configure("name=x", f"model.path={tmp_path}/none", f"data.train_files={tmp_path}/none.parquet")
    with pytest.raises(UserError) as raised:
        preflight(config, quiet)
    assert "model.path=" in str(raised.value) and "data.train_files=" in str(raised.value)


def test_when_vllm_is_asked_for_a_token(configure):
    assert not wants_a_token(configure("cluster=cpu")) and wants_a_token(configure("cluster=cpu", "preflight=only"))
    assert wants_a_token(configure("cluster=1x8")) and not wants_a_token(configure("cluster=1x1"))


def test_which_clusters_are_joined(configure):
    joined = {name: is_joined(configure(f"cluster={name}")) for name in ("cpu", "cpu_2x1", "1x8", "2x8")}
    assert joined == {"cpu": False, "cpu_2x1": True, "1x8": False, "2x8": True}


@pytest.mark.slow
def test_a_process_that_fails_is_quoted(configure):
    (problem,) = in_a_process("no_such_module", [], "{}", configure("cluster=cpu"), "it does not start").problems
    assert problem.startswith("it does not start (exit code 1). The end of what was said:\n")
    assert "No module named trustregion.verl_plugin.no_such_module" in problem


@pytest.mark.slow
def test_a_cluster_that_is_not_there(configure):
    request = {"address": "127.0.0.1:1", "nodes": 2, "gpus": 1, "environment": {}, "paths": [], "imports": []}
    (problem,) = in_a_process("ray_cluster", ["check"], json.dumps(request), configure("cluster=cpu"), "not looked at").problems
    assert problem.startswith("no Ray cluster at 127.0.0.1:1 (") and "scripts/ray_cluster.sh" in problem
