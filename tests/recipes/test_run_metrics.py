"""metrics.jsonl holds each step once, in order, whenever the run and its launcher were killed."""

import json

from recipes.run_metrics import RunMetrics


def row(step, value=0.0):
    return json.dumps({"step": step, "data": {"critic/rewards/mean": value}}) + "\n"


def there(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["data"]["critic/rewards/mean"]) for row in rows]


def test_rows_are_taken_over_as_they_come_and_whole(tmp_path):
    metrics = RunMetrics(tmp_path)
    assert metrics.take_over() == [] and metrics.steps == []
    metrics.logged.write_text(row(1) + row(2)[:9])
    assert [r["step"] for r in metrics.take_over()] == [1] and metrics.take_over() == []
    with metrics.logged.open("a") as file:
        file.write(row(2)[9:])
    assert [r["step"] for r in metrics.take_over()] == [2]
    assert there(tmp_path) == [(1, 0.0), (2, 0.0)] and metrics.steps == [1, 2]


def test_steps_that_are_trained_again_replace_the_first_ones_when_they_come(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(map(row, (1, 2, 3, 4))))
    metrics = RunMetrics(tmp_path)
    assert len(there(tmp_path)) == 4
    metrics.logged.write_text(row(3, 0.5))
    metrics.take_over()
    assert there(tmp_path) == [(1, 0.0), (2, 0.0), (3, 0.5)] and metrics.steps == [1, 2, 3]


def test_what_a_killed_launcher_left_is_taken_over_at_the_next_start(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(row(1) + row(2) + row(3)[:7])  # killed while appending the third
    (tmp_path / "metrics.new.jsonl").write_text(row(2) + row(3) + row(4) + row(5)[:7])
    metrics = RunMetrics(tmp_path)
    assert [step for step, _ in there(tmp_path)] == [1, 2, 3, 4] == metrics.steps
    assert not metrics.logged.exists()
    assert RunMetrics(tmp_path).steps == [1, 2, 3, 4]


def test_a_line_that_is_no_row_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(row(1) + "\0\0\0\n" + row(2))
    assert RunMetrics(tmp_path).steps == [1, 2] == [step for step, _ in there(tmp_path)]


def test_a_file_that_was_put_together_by_hand_has_each_step_once_and_in_order(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(row(2) + row(1) + '{"step": 1e999, "data": {}}\n' + row(2, 0.5))
    assert RunMetrics(tmp_path).steps == [1, 2] and there(tmp_path) == [(1, 0.0), (2, 0.5)]
