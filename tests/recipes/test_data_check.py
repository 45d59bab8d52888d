"""Files a user may bring, whole and broken: the message names the key, the value and the remedy."""

import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from safetensors.numpy import save_file

from recipes.assets.arithmetic import SCHEMA, prepare
from recipes.data_check import check_model_folder, check_parquet
from recipes.errors import UserError


@pytest.fixture
def table(tmp_path):
    return parquet.read_table(prepare(tmp_path / "data", train_size=50) / "train.parquet")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(1000, np.float32)}, folder / "model.safetensors")
    return folder


def complaint(check, *arguments) -> str:
    with pytest.raises(UserError) as raised:
        check(*arguments)
    return str(raised.value)


def test_whole_files_pass(table, model, tmp_path):
    parquet.write_table(table, tmp_path / "a.parquet")
    check_parquet(tmp_path / "a.parquet")
    check_parquet(str(tmp_path / "a.parquet"), "data.val_files")
    parquet.write_table(table.rename_columns(["data_source", "question", *table.column_names[2:]]), tmp_path / "b.parquet")
    check_parquet(tmp_path / "b.parquet", prompt_key="question")
    (tmp_path / "c.jsonl").write_text("{}")
    check_parquet(tmp_path / "c.jsonl")
    check_model_folder(model)


def test_no_such_parquet(tmp_path):
    said = complaint(check_parquet, tmp_path / "gone.parquet", "data.val_files")
    assert f"data.val_files={tmp_path / 'gone.parquet'}: no such file" in said and "data=..." in said
    assert "data.train_files is not set" in complaint(check_parquet, None)
    (tmp_path / "train.parquet").touch()
    assert "is a folder" in complaint(check_parquet, tmp_path) and "(train.parquet)" in complaint(check_parquet, tmp_path)
    (tmp_path / "x.csv").write_text("a,b")
    assert "Rename" in complaint(check_parquet, tmp_path / "x.csv")


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "middle"])
def test_damaged_parquet(table, tmp_path, damage):
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    whole = path.read_bytes()
    broken = {"cut": whole[:-100], "empty": b"", "text": b"hello", "middle": whole[:4] + b"\xff" * 300 + whole[304:]}
    path.write_bytes(broken[damage])
    assert f"data.train_files={path}: not a readable parquet file" in complaint(check_parquet, path)


def test_columns_that_verl_needs(table, tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(table.drop_columns(["data_source", "reward_model"]), path)
    assert "lacks the columns data_source, reward_model; it has prompt, ability, extra_info" in complaint(check_parquet, path)
    parquet.write_table(pyarrow.table({}), path)
    assert "it has none" in complaint(check_parquet, path)
    plain = table.set_column(1, "prompt", pyarrow.array(["3+4="] * len(table)))
    parquet.write_table(plain, path)
    assert "column prompt is string; verl needs a list of messages" in complaint(check_parquet, path)
    answers = table.set_column(3, "reward_model", pyarrow.array([{"style": "rule"}] * len(table)))
    parquet.write_table(answers, path)
    assert "ground_truth" in complaint(check_parquet, path)
    parquet.write_table(SCHEMA.empty_table(), path)
    assert "has no rows" in complaint(check_parquet, path)


def test_no_such_model(tmp_path):
    assert "model.path=Qwen/Qwen3-8B: no such folder" in complaint(check_model_folder, "Qwen/Qwen3-8B")
    assert "model.path is not set" in complaint(check_model_folder, None)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "not a readable JSON object"),
        ("config.json", "[]", "not a readable JSON object"),
        ("config.json", "{}", "has no model_type"),
        ("tokenizer.json", None, "has no tokenizer .*tokenizer.save_pretrained"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors.index.json", "{", "not a readable index"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"w": "part-2.safetensors"}}), "not there: part-2.safetensors"),
    ],
)
def test_incomplete_model(model, name, text, message):
    if text is None:
        (model / name).unlink()
    else:
        (model / name).write_text(text)
    with pytest.raises(UserError, match=rf"model\.path={model}: .*{message}"):
        check_model_folder(model)


def test_damaged_weights(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors is damaged or cut short" in complaint(check_model_folder, model)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538090408\n")
    assert "model.safetensors is damaged or cut short" in complaint(check_model_folder, model)


def test_sharded_and_pickled_weights_pass(model):
    shutil.copy(model / "model.safetensors", model / "part-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part-1.safetensors"}}))
    check_model_folder(model)
    for file in model.glob("*safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").touch()
    check_model_folder(model)
