"""Data files a user may bring, whole and broken: the message names the key, the value and the remedy."""

import pyarrow
import pyarrow.parquet as parquet
import pytest

from recipes.assets.arithmetic import SCHEMA, prepare
from recipes.data_check import check_prompts, first_rows
from recipes.errors import UserError


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


@pytest.mark.parametrize("text, rows", [("{}", 1), ('{"a": 1}\n{"a": 2}\n\n', 2), ('\n [{"a": 1},\n {"a": 2},\n {"a": 3}]', 3)])
def test_rows_of_json_files_are_counted(tmp_path, text, rows):
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(text)
        assert check_prompts(tmp_path / name) == rows


@pytest.mark.parametrize("text, message", [("", "has no rows"), (" \n", "has no rows"), ("[]", "has no rows"), ('[{"a": 1}', "not readable JSON")])
def test_damaged_json(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    assert f"data.train_files={tmp_path / 'a.json'}: " in complaint(check_prompts, tmp_path / "a.json")
    assert message in complaint(check_prompts, tmp_path / "a.json")


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
        ("data_source", None, "data_source is empty in row 7"),
        ("reward_model", None, "reward_model.ground_truth is empty in row 7"),
        ("reward_model", {"style": "rule", "ground_truth": None}, "reward_model.ground_truth is empty in row 7"),
    ],
)
def test_rows_that_lack_something(table, tmp_path, column, value, message):
    rows = table.to_pylist()
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
