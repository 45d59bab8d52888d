"""The files that a configuration names are checked before Ray starts."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
from hydra.utils import instantiate

from recipes.checks import check_files
from recipes.errors import UserError

ROW = {
    "data_source": "arithmetic",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.fixture(scope="module")
def tiny_model(configure, tmp_path_factory) -> Path:
    config = configure(f"assets={tmp_path_factory.mktemp('assets')}", "+model.prepare.warmup_steps=0")
    return Path(instantiate(config.model.prepare))


@pytest.fixture
def files(configure, tiny_model, tmp_path):
    """files(train=..., val=..., model=...) -> a configuration that names them; what is not given is in order."""
    shutil.copytree(tiny_model, tmp_path / "model")
    pd.DataFrame([ROW]).to_parquet(tmp_path / "good.parquet")

    def files(train=tmp_path / "good.parquet", val=tmp_path / "good.parquet", model=tmp_path / "model"):
        return configure(f"data.train_files={train}", f"data.val_files={val}", f"actor_rollout_ref.model.path={model}")

    return files


def complaint(config) -> str:
    with pytest.raises(UserError) as raised:
        check_files(config)
    return str(raised.value)


def test_whole_files_pass(files):
    check_files(files())


def test_the_key_of_a_bad_file_is_named(files, tmp_path):
    said = complaint(files(train=tmp_path / "none.parquet"))
    assert "data.train_files" in said and "no such file" in said
    bad = tmp_path / "bad.parquet"
    bad.write_bytes((tmp_path / "good.parquet").read_bytes()[:-20])
    said = complaint(files(val=bad))
    assert "data.val_files" in said and "not a readable parquet file" in said
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert "has no tokenizer" in complaint(files())
