"""What counts as a whole checkpoint, and which are kept."""

import json
import shutil

import pytest

from trustregion.verl_plugin import checkpoints
from trustregion.verl_plugin.checkpoints import NotWhole, check, checkpoint_folders, is_sealed, keep_newest, seal


@pytest.fixture
def make(tmp_path):
    """make(step, workers=2) -> a folder as verl leaves it."""

    def make(step, workers=2):
        folder = tmp_path / f"global_step_{step}"
        (folder / "actor" / "huggingface").mkdir(parents=True)
        for rank in range(workers):
            for kind in ("model", "optim", "extra_state"):
                (folder / "actor" / f"{kind}_world_size_{workers}_rank_{rank}.pt").write_bytes(b"x" * 3000)
        (folder / "actor" / "huggingface" / "config.json").write_text("{}")
        (folder / "data.pt").write_bytes(b"data")
        return folder

    return make


def test_a_sealed_checkpoint_is_whole(make):
    folder = make(3)
    with pytest.raises(NotWhole, match="stopped while it was being saved"):
        check(folder)
    seal(folder)
    manifest = check(folder)
    assert manifest["workers"] == 2 and len(manifest["files"]) == 8
    assert manifest["files"]["data.pt"][0] == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "data.pt").unlink(), "lacks data.pt"),
        (lambda folder: (folder / "data.pt").write_bytes(b"dat"), "has 3 bytes instead of 4"),
        (lambda folder: (folder / "data.pt").write_bytes(b"dato"), "data.pt is damaged"),
        (lambda folder: shutil.rmtree(folder / "actor"), "lacks actor/"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": '), "not readable"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {"data.pt": 3}}'), "not readable"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not readable"),
        (lambda folder: (folder / "manifest.json").write_text('{"workers": 2, "files": {}}'), "not readable"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {"data.pt": [4]}}'), "not readable"),
        (lambda folder: (folder / "manifest.json").write_text('{"workers": "2", "files": {"data.pt": [4, ""]}}'), "not readable"),
    ],
)
def test_damage_is_found(make, damage, message):
    folder = make(3)
    seal(folder)
    damage(folder)
    with pytest.raises(NotWhole, match=message):
        check(folder)


def test_workers_that_wrote_elsewhere_are_missed(make):
    folder = make(3)
    (folder / "actor" / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(NotWhole, match="optim_world_size_2_rank_1.*default_local_dir must be .* all nodes share"):
        seal(folder)
    assert not is_sealed(folder)


def test_the_last_whole_ones_are_kept(make, tmp_path):
    for step in (2, 10, 30, 100):
        make(step)
    for step in (2, 10, 30):
        seal(tmp_path / f"global_step_{step}")
    keep_newest(tmp_path, 4)
    assert len(checkpoint_folders(tmp_path)) == 4
    keep_newest(tmp_path, 1)
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["global_step_100", "global_step_30"]


def test_a_small_file_is_there_whole_or_as_before(tmp_path, monkeypatch):
    file = tmp_path / "file"
    checkpoints.write_whole(file, "before")
    monkeypatch.setattr(checkpoints.os, "fsync", lambda _fd: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        checkpoints.write_whole(file, "after" * 1000)
    assert file.read_text() == "before"


def test_a_manifest_lists_itself_not(make):
    folder = make(1)
    seal(folder)
    seal(folder)
    assert "manifest.json" not in json.loads((folder / "manifest.json").read_text())["files"]
