"""Data files a user may bring, whole and broken: the message names the key, the value and the remedy."""

import json

import pyarrow
import pyarrow.parquet as parquet
import pytest

from recipes.assets.arithmetic import SCHEMA, prepare
from recipes.data_check import check_prompts, first_rows
from recipes.errors import UserError


ROW = {"data_source": "mine", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}


@pytest.fixture
def table(tmp_path):
    return parquet.read_table(prepare(tmp_path / "data", train_size=50) / "train.parquet")


def complaint(check, *arguments) -> str:
    with pytest.raises(UserError) as raised:
        check(*arguments)
    return str(raised.value)


def test_whole_files_pass_and_their_rows_are_counted(table, tmp_path):
    parquet.write_table(table, tmp_path / "a.parquet")
    assert check_prompts(tmp_path / "a.parquet") == 50
    assert check_prompts(str(tmp_path / "a.parquet"), "data.val_files") == 50
    parquet.write_table(table.rename_columns(["data_source", "question", *table.column_names[2:]]), tmp_path / "b.parquet")
    check_prompts(tmp_path / "b.parquet", prompt_key="question")


@pytest.mark.parametrize("text, rows", [("A", 1), ("A\nA\n\n", 2), ("\n [A,\n A,\n A]", 3)])
def test_rows_of_json_files_are_counted(tmp_path, text, rows):
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(text.replace("A", json.dumps(ROW)))
        assert check_prompts(tmp_path / name) == rows


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no rows"),
        (" \n", "has no rows"),
        ("[]", "has no rows"),
        ('[{"a": 1}', "not readable JSON (the list: "),
        (json.dumps(ROW) + "\n{", "not readable JSON (row 1, counted from 0: "),
    ],
)
def test_damaged_json(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    assert f"data.train_files={tmp_path / 'a.json'}: " in complaint(check_prompts, tmp_path / "a.json")
    assert message in complaint(check_prompts, tmp_path / "a.json")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data_source": None}, "has no data_source"),
        ({"prompt": "1+1="}, "has no prompt, which is a list of messages"),
        ({"prompt": []}, "has no prompt, which is a list of messages"),
        ({"prompt": [None]}, "has no prompt, which is a list of messages"),
        ({"prompt": [{"content": "1+1="}]}, "has no text as prompt.role"),
        ({"prompt": [{"role": "user", "content": None}]}, "has neither text nor a list of parts as prompt.content"),
        ({"prompt": [{"role": "user", "content": 2}]}, "has neither text nor a list of parts as prompt.content"),
        ({"reward_model": "2"}, "has no reward_model.ground_truth"),
        ({"reward_model": {"style": "rule"}}, "has no reward_model.ground_truth"),
        ({"extra_info": "text"}, "has an extra_info that is no object"),
        (None, "is no object"),
    ],
)
def test_rows_of_json_that_lack_something(tmp_path, changes, message):
    rows = [ROW, {**ROW, "extra_info": None}, changes and {**ROW, **changes}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("a.json", "a.jsonl"):
        assert f"{name}: row 2 (counted from 0) {message}" in complaint(check_prompts, tmp_path / name)


@pytest.mark.parametrize("messages", [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], [*ROW["prompt"], CALL]])
def test_parts_and_tool_calls_pass(tmp_path, messages):
    rows = [{**ROW, "prompt": messages}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    assert check_prompts(tmp_path / "a.parquet") == check_prompts(tmp_path / "a.jsonl") == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": [{"role": 1, "content": "1+1="}]}, "prompt.role is int64; verl needs text. Convert it."),
        ({"prompt": [{"role": "user", "content": 2}]}, "prompt.content is int64; verl needs text, or a list of parts. Convert it."),
        ({"prompt": [{"role": "user", "content": {"a": 1}}]}, "prompt.content is struct<a: int64>; verl needs text"),
        ({"prompt": [{"role": "user", "content": None}]}, "prompt.content is empty in row 0"),
        ({"extra_info": "text"}, "column extra_info is string; verl needs a struct in each row, or null"),
        ({"data_source": ["a"]}, "column data_source is list<"),
    ],
)
def test_columns_of_other_types(tmp_path, changes, message):
    parquet.write_table(pyarrow.Table.from_pylist([{**ROW, **changes}]), tmp_path / "a.parquet")
    assert message in complaint(check_prompts, tmp_path / "a.parquet")


def test_no_such_parquet(tmp_path):
    said = complaint(check_prompts, tmp_path / "gone.parquet", "data.val_files")
    assert f"data.val_files={tmp_path / 'gone.parquet'}: no such file" in said and "data=..." in said
    (tmp_path / "train.parquet").touch()
    assert "is a folder" in complaint(check_prompts, tmp_path) and "(train.parquet)" in complaint(check_prompts, tmp_path)
    (tmp_path / "x.csv").write_text("a,b")
    assert "Rename" in complaint(check_prompts, tmp_path / "x.csv")


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "middle"])
def test_damaged_parquet(table, tmp_path, damage):
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    whole = path.read_bytes()
    broken = {"cut": whole[:-100], "empty": b"", "text": b"hello", "middle": whole[:4] + b"\xff" * 300 + whole[304:]}
    path.write_bytes(broken[damage])
    assert f"data.train_files={path}: not a readable parquet file" in complaint(check_prompts, path)


def test_columns_that_verl_needs(table, tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(table.drop_columns(["data_source", "reward_model"]), path)
    assert "lacks the columns data_source, reward_model; it has prompt, ability, extra_info" in complaint(check_prompts, path)
    parquet.write_table(pyarrow.table({}), path)
    assert "it has none" in complaint(check_prompts, path)
    plain = table.set_column(1, "prompt", pyarrow.array(["3+4="] * len(table)))
    parquet.write_table(plain, path)
    assert "column prompt is string; verl needs a list of messages" in complaint(check_prompts, path)
    answers = table.set_column(3, "reward_model", pyarrow.array([{"style": "rule"}] * len(table)))
    parquet.write_table(answers, path)
    assert "ground_truth" in complaint(check_prompts, path)
    parquet.write_table(SCHEMA.empty_table(), path)
    assert "has no rows" in complaint(check_prompts, path)


@pytest.mark.parametrize(
    "column, value, message",
    [
        ("prompt", None, "prompt is empty in row 7"),
        ("prompt", [], "prompt is empty in row 7"),
        ("prompt", [ROW["prompt"][0], None], "prompt.role is empty in row 7"),
        ("prompt", [ROW["prompt"][0], {"role": None, "content": "a"}], "prompt.role is empty in row 7"),
        ("prompt", [ROW["prompt"][0], {"role": "user", "content": None}], "prompt.content is empty in row 7"),
        ("data_source", None, "data_source is empty in row 7"),
        ("reward_model", None, "reward_model.ground_truth is empty in row 7"),
        ("reward_model", {"style": "rule", "ground_truth": None}, "reward_model.ground_truth is empty in row 7"),
    ],
)
def test_rows_that_lack_something(table, tmp_path, column, value, message):
    rows = table.to_pylist()
    rows[3]["prompt"] *= 3
    rows[7][column] = value
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), tmp_path / "a.parquet", row_group_size=5)
    assert message in complaint(check_prompts, tmp_path / "a.parquet")


def test_the_first_row_of_each_source(table, tmp_path):
    rows = table.to_pylist()
    for i, row in enumerate(rows):
        row["data_source"] = "ab"[i > 30]
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), tmp_path / "a.parquet", row_group_size=20)
    found = first_rows(tmp_path / "a.parquet")
    assert [row["prompt"] for row in found] == [rows[0]["prompt"], rows[31]["prompt"]]
    assert found[0]["extra_info"] == rows[0]["extra_info"]
    assert len(first_rows(tmp_path / "a.parquet", most=1)) == 1
    (tmp_path / "a.json").write_text("{}")
    assert first_rows(tmp_path / "a.json") == []
