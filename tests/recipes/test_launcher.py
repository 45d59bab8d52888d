"""What the launcher does around a run: folders, the lock, the rows as they come, and how to go on."""

import json

import pytest

from recipes.errors import UserError
from recipes.launcher import NewRows, how_to_go_on, lock_machine, make_run_dir


def test_a_run_never_writes_over_another(configure, tmp_path):
    make_run_dir(configure("name=x", f"runs={tmp_path}"))
    with pytest.raises(UserError, match="never writes over another"):
        make_run_dir(configure("name=x", f"runs={tmp_path}"))


def test_a_second_local_cluster_is_refused(configure, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.launcher.LOCK", tmp_path / "lock")
    config = configure("name=x")
    with lock_machine(config), pytest.raises(UserError, match="another run has a local Ray cluster"):
        lock_machine(config)
    with lock_machine(config):
        lock_machine(configure("name=x", "ray_kwargs.ray_init.address=auto")).close()


def test_rows_are_read_as_they_come_and_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = NewRows(path)
    assert rows() == []
    line = json.dumps({"step": 1, "data": {}})
    path.write_text(line + "\n" + line[:5])
    assert rows() == [{"step": 1, "data": {}}] and rows() == []
    with path.open("a") as file:
        file.write(line[5:] + "\n")
    assert len(rows()) == 1


def test_how_to_go_on_names_the_newest_checkpoint(configure, tmp_path):
    typed = ["python", "-m", "recipes.train", "method=grpo", "name=x", "trainer.logger=[console,file]"]
    config = configure("name=x", f"runs={tmp_path}")
    again = "To start again:\n  python -m recipes.train method=grpo 'trainer.logger=[console,file]'"
    assert again in how_to_go_on(config, typed, 3)
    for step in (2, 10, 12):  # verl names a checkpoint in the file when it is whole: 12 is not
        (tmp_path / "x" / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (tmp_path / "x" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    text = how_to_go_on(config, typed, 12)
    assert "checkpoint of step 10" in text and "/global_step_10" in text and "name=x" not in text
