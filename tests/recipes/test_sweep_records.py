"""What is known of a sweep's jobs, and the table that is made of it."""

import json
import os
import sys

import pytest

from recipes import sweep_table
from recipes.config_changes import differences
from recipes.sweep_records import JobRecord, read_records
from recipes.sweep_table import results
from tests.recipes.sweep_files import row, table


def whole(**values) -> bytes:
    return json.dumps({"status": "finished", "error": "", "command": [], "config": {}, "varied": {}} | values).encode()


DAMAGED = [
    b"", b'{"status": "fin', b"\xff\xfe", b"[]", b'"text"', b'{"status": "finished"}',
    whole(config=[]), whole(varied=None), whole(status=1), whole(error={}), whole(command="x"),
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_record_is_not_known(tmp_path, content):
    record = JobRecord(tmp_path, "seed=0")
    record.path.parent.mkdir()
    record.path.write_bytes(content)
    assert record.read() == {} and [(row["status"], row["folder"]) for row in results(tmp_path)] == [(None, "seed=0")]
    record.write(status="waiting")
    assert record.read() == {"status": "waiting"}


def test_a_record_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    record = JobRecord(tmp_path, "seed=0")
    record.write(status="waiting")
    monkeypatch.setattr(os, "fsync", lambda _file: [][1])
    with pytest.raises(IndexError), record.lock():
        record.write(status="running")
    assert record.read() == {"status": "waiting"} and len(read_records(tmp_path)) == 1


def test_the_table_is_made_from_the_folders_alone(tmp_path, monkeypatch, capsys):
    for nth, (status, reward) in enumerate([("finished", 0.2), ("finished", 0.9), ("interrupted", 0.95), ("waiting", None)]):
        record = JobRecord(tmp_path, f"seed={nth}")
        record.write(status=status, config={}, varied={"seed": nth} if reward else {})
        if reward:
            record.folder.mkdir()
            validation = {"val-core/arithmetic/reward/mean@1": reward / 2}
            (record.folder / "metrics.jsonl").write_text(row(1, 0.0) + row(2, 0.0) + "".join(row(step, reward, **validation) for step in range(3, 8)) + '{"st')
    rows = results(tmp_path)
    assert [(row.get("seed"), row["status"], row["steps"]) for row in rows] == [(1, "finished", 7), (0, "finished", 7), (2, "interrupted", 7), (None, "waiting", 0)]
    assert rows[0]["reward"] == pytest.approx(0.9) and rows[0]["val-core/arithmetic/reward/mean@1"] == 0.45 and rows[3]["reward"] is None
    monkeypatch.setattr(sys, "argv", ["sweep_table", str(tmp_path)])
    sweep_table.main()
    said = capsys.readouterr().out
    assert "2 of 4 jobs finished" in said and "0.450" in said
    assert [row["folder"] for row in table(tmp_path)] == ["seed=1", "seed=0", "seed=2", "seed=3"]
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["sweep_table", str(tmp_path / "seed=1")])
        sweep_table.main()


def test_a_key_that_has_the_name_of_a_measured_column_keeps_its_own(tmp_path, capsys):
    for reward in ("math", "gsm8k"):
        record = JobRecord(tmp_path, f"reward={reward}")
        record.write(status="finished", config={}, varied={"reward": reward, "folder": "a"})
        record.folder.mkdir()
        (record.folder / "metrics.jsonl").write_text(row(1, 0.5))
    sweep_table.write_table(tmp_path)
    said = {name: [row[name] for row in table(tmp_path)] for name in ("chosen.reward", "reward", "chosen.folder", "folder")}
    assert said == {"chosen.reward": ["gsm8k", "math"], "reward": ["0.5"] * 2, "chosen.folder": ["a"] * 2, "folder": ["reward=gsm8k", "reward=math"]}
    assert "chosen.reward" in capsys.readouterr().out


def test_configurations_differ_in_what_changes_results():
    before = {"a": {"b": 1, "c": {}}, "trainer": {"logger": ["file"], "resume_mode": "disable"}}
    now = {"a": {"b": 2, "c": {}}, "trainer": {"logger": ["file", "wandb"], "resume_mode": "auto"}, "d": None}
    assert differences(before, now) == ["a.b = 1 there, 2 here"]
    assert differences(before, before | {"a": {"b": 1, "c": {"x": 1}}}) == ["a.c.x = None there, 1 here"]
