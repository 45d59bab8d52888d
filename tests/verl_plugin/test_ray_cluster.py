"""What nodes say of themselves, and how their answers are compared."""

import pytest

from trustregion.verl_plugin.node_probe import probe, source
from trustregion.verl_plugin.ray_cluster import differences, table

pytestmark = pytest.mark.slow


def answer(**environment):
    return {"versions": {"torch": environment.pop("torch", "2.11.0"), "ray": "2.60.0"}, "environment": environment}


def test_only_what_differs_is_named():
    assert differences({"a": answer(VLLM_X="1"), "b": answer(VLLM_X="1")}) == []
    answers = {"a": answer(torch="2.11.0", VLLM_X="1"), "b": {"error": "gone"}, "c": answer(torch="2.12.0")}
    assert differences(answers) == [("torch", ["2.11.0", "2.12.0"]), ("VLLM_X", ["1", "not set"])]


def test_columns_are_aligned():
    assert table(["", "a"], [["torch", "1"], ["x", "22"]]) == "       a\ntorch  1\nx      22"


def test_a_node_says_what_it_has(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_X", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    said = probe([str(tmp_path), str(tmp_path / "none")], ["recipes.rewards", "recipes.none"])
    assert said["plugin"] == "" and said["versions"]["verl"] == "0.9.1"
    assert said["environment"]["VLLM_X"] == "1" and "NCCL_SOCKET_IFNAME" not in said["environment"]
    assert said["missing"] == [str(tmp_path / "none"), "module recipes.none"]


def test_the_source_is_told_apart_by_its_content(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert source("some_package") == "not found"
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("x = 1")
    first = source("some_package")
    (tmp_path / "some_package" / "__init__.py").write_text("x = 2")
    assert len(first) == 8 and first != source("some_package")
