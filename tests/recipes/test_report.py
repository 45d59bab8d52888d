"""The report of a run, from real files: what it says must follow from metrics.jsonl, whatever state that is in."""

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from recipes.report import write_report
from recipes.run_files import read_metrics
from recipes.series import smooth

COMMAND = ["python", "-m", "recipes.train", "method=band_kl", "name=my run"]
CONFIG = {
    "name": "my run",
    "chosen": {"method": "band_kl"},
    "seed": 3,
    "method": {"region": "divergence_ball", "divergence": "kl", "delta": 0.03, "anchor": "old"},
    "data": {"train_batch_size": 16},
    "trainer": {"total_training_steps": 20, "device": "cpu"},
}


def step(number: int, **others) -> dict:
    data = {
        "critic/rewards/mean": number / 100,
        "actor/entropy": 1.0,
        "trust/clip_fraction": 0.004,
        "trust/clip_fraction_up": 0.003,
        "trust/clip_fraction_down": 0.0,
        "actor/grad_norm": 0.5,
        "timing_s/step": 90.0 if number == 1 else 2.0 + number / 10,
        "training/rollout_probs_diff_mean": 2e-7 * number,
        "training/rollout_probs_diff_max": 5e-6,
        "actor/perf/cpu_memory_used_gb": 9.5 if number == 2 else 8.0,
    }
    return {"step": number, "data": data | others}


def write_run(folder: Path, lines: list | None, config: dict | None = CONFIG) -> Path:
    """`lines`: rows, or raw text of lines. None: no such file."""
    folder.mkdir()
    if lines is not None:
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def report(folder: Path, command: list[str] = COMMAND) -> tuple[str, str]:
    """What the terminal, 80 columns wide, and summary.md say."""
    console = Console(file=StringIO(), width=80)
    write_report(folder, console, command)
    summary = folder / "summary.md"
    return console.file.getvalue(), summary.read_text(encoding="utf-8") if summary.exists() else ""


def cells(text: str, label: str) -> list[str]:
    """The cells of the row that starts with `label`, in the terminal's table or in Markdown."""
    (row,) = [line for line in text.splitlines() if line.strip("| ").startswith(label)]
    return re.split(r"\s*\|\s*|\s{2,}", row.strip("| "))[1:]


@pytest.fixture
def without_plots(monkeypatch):
    monkeypatch.setitem(sys.modules, "recipes.plots", None)  # importing it fails, and drawing takes no time


def test_first_and_last_steps_are_averaged_in_both_tables(tmp_path, without_plots):
    run = write_run(tmp_path / "run", [step(i) for i in range(1, 21)])
    for text in report(run):
        assert "first 5 steps" in text and "last 5 steps" in text
        assert cells(text, "reward") == ["0.030", "0.180", "+0.150"]
        assert cells(text, "entropy, nats") == ["1.000", "1.000", "0"]
        assert cells(text, "clipped tokens, %") == ["0.400", "0.400", "0"]
        assert cells(text, "at the upper bound, %") == ["0.300", "0.300", "0"]
        assert cells(text, "at the lower bound, %") == ["0", "0", "0"]  # an exact 0, not a small number
        assert "20 of 20 steps" in text
        assert "3.1, median after the first, which took 90.0" in text
        assert "mean 2.1e-06, worst step 4.0e-06, worst token 5.0e-06" in text
        assert "9.5 GiB" in text


def test_ends_of_a_short_run_do_not_overlap(tmp_path, without_plots):
    text, _ = report(write_run(tmp_path / "three", [step(i) for i in (1, 2, 3)]))
    assert "first step " in text
    assert cells(text, "reward") == ["0.010", "0.030", "+0.020"]
    text, _ = report(write_run(tmp_path / "one", [step(1)]))
    assert cells(text, "reward") == ["0.010"] and "change" not in text and "median" not in text


def test_summary_says_what_was_run_and_where(tmp_path, without_plots):
    _, summary = report(write_run(tmp_path / "run", [step(i) for i in range(1, 11)]))
    assert summary.startswith("# band_kl, seed 3: 10 of 20 steps\n")
    assert "python -m recipes.train method=band_kl 'name=my run'" in summary  # can be pasted into a shell
    for text in ("delta: 0.03", "- prompts a step: 16", "one seed"):
        assert text in summary
    for name in ("torch", "verl", "vllm", "ray", "cores that the run may use"):
        assert re.search(rf"^- {name}: \S+", summary, re.MULTILINE)


def test_plots_are_drawn_and_linked(tmp_path):
    text, summary = report(write_run(tmp_path / "run", [step(i) for i in range(1, 21)]))
    assert (tmp_path / "run" / "dynamics.png").read_bytes().startswith(b"\x89PNG")
    assert "](dynamics.png)" in summary and "dynamics.png" in text and "No plots" not in text + summary


def drawn(folder: Path, rows: list[dict]) -> dict:
    """The panels of the figure, by title."""
    plots = pytest.importorskip("recipes.plots")
    figure = plots.dynamics(read_metrics(write_run(folder, rows) / "metrics.jsonl"), "title")
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_a_panel_without_values_is_left_out(tmp_path):
    rows = [step(i) for i in range(1, 21)]
    others = {"Reward", "Clipped tokens", "Gradient norm", "Rollout vs actor", "Time a step"}
    assert drawn(tmp_path / "with", rows).keys() == others | {"Entropy"}
    for row in rows:
        del row["data"]["actor/entropy"]
    assert drawn(tmp_path / "without", rows).keys() == others


def test_both_sides_of_clipping_are_drawn_in_percent(tmp_path):
    axes = drawn(tmp_path / "run", [step(i) for i in range(1, 21)])["Clipped tokens"]
    found = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert found == {"at the upper bound": pytest.approx(0.3), "at the lower bound": 0}


def test_slow_first_step_does_not_flatten_the_others(tmp_path):
    once = {"timing_s/gen": 80.0}  # nothing of it is left to be shown
    axes = drawn(tmp_path / "run", [step(1, **once), *(step(i) for i in range(2, 21))])["Time a step"]
    assert axes.get_ylim()[1] < 6
    assert "step 1, not shown: 90" in axes.get_title(loc="right")


def test_smoothing_keeps_constants_and_follows_the_middle():
    assert smooth([2.0] * 9, 7) == pytest.approx([2.0] * 9)
    assert smooth([0, 0, 0, 4, 0, 0, 0], 3) == pytest.approx([0, 0, 1, 2, 1, 0, 0])
    assert smooth([5.0, 5.0], 7) == pytest.approx([5.0, 5.0])  # fewer values than the window


@pytest.mark.slow
def test_odd_values_can_be_drawn(tmp_path):
    odd = {"training/rollout_probs_diff_mean": 0.0, "actor/grad_norm": 1e250, "trust/log_ratio_abs_mean": -1.0}
    report(write_run(tmp_path / "run", [step(1, **odd)]))
    assert (tmp_path / "run" / "dynamics.png").stat().st_size > 10_000
    report(write_run(tmp_path / "nulls", [{"step": 1, "data": dict.fromkeys(step(1)["data"])}]))


def test_no_matplotlib_means_no_plots_but_a_summary(tmp_path):
    run = write_run(tmp_path / "run", [step(1), step(2)])
    # In a process of its own, where matplotlib was never imported.
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path; from rich.console import Console; from recipes.report import write_report\n"
        f"write_report(Path({str(run)!r}), Console(width=80), ['train'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, (run / "summary.md").read_text(encoding="utf-8")):
        assert "pip install 'trustregion[plots]'" in " ".join(text.split())
    assert not (run / "dynamics.png").exists()


def test_half_a_line_counts_as_no_step(tmp_path, without_plots):
    whole = json.dumps(step(3))
    text, _ = report(write_run(tmp_path / "run", [step(1), step(2), whole[: len(whole) // 2]]))
    assert "2 of 20 steps" in text


@pytest.mark.parametrize("lines", [None, [], ['{"step": 1, "da'], [{"step": 0, "data": {"val-core/x": 0.5}}]])
def test_without_a_training_step_nothing_is_written(tmp_path, lines):
    text, summary = report(write_run(tmp_path / "run", lines))
    assert "No training step was finished" in text
    assert not summary and not (tmp_path / "run" / "dynamics.png").exists()


@pytest.mark.parametrize("config", ["", "[1, 2]", "a: [", "method: null\ntrainer: 3\nname: null", "\x00", None])
def test_damaged_or_missing_config_is_survived(tmp_path, config, without_plots):
    run = write_run(tmp_path / "run", [step(1), step(2)], config=None)
    if config is not None:
        (run / "config.yaml").write_text(config, encoding="utf-8")
    assert cells(report(run)[1], "reward") == ["0.010", "0.020", "+0.010"]


def test_values_that_are_not_finite_are_left_out_and_told(tmp_path, without_plots):
    rows = [step(i) for i in range(1, 21)]
    rows[3]["data"]["actor/grad_norm"] = float("nan")
    rows[4]["data"]["actor/grad_norm"] = None  # how verl's logger writes NaN
    rows[5]["data"]["actor/grad_norm"] = float("inf")
    for row in rows:
        row["data"] |= {"actor/entropy": None, "response_length/mean": "nine"}
    for text in report(write_run(tmp_path / "run", rows)):
        assert cells(text, "gradient norm") == ["0.500", "0.500", "0"]
        assert "actor/grad_norm in 3 of 20 steps, first in step 4" in " ".join(text.split())
        assert "entropy, nats" not in text


def test_of_a_step_logged_twice_the_later_row_counts(tmp_path):
    rows = [step(1), step(2), step(2, **step(9)["data"]), "[]\n", '{"step": 7, "data": [1]}\n']
    metrics = read_metrics(write_run(tmp_path / "run", rows) / "metrics.jsonl")
    assert metrics.steps == [1, 2]
    assert metrics.get("reward") == {1: 0.01, 2: 0.09}


def test_validation_rows_are_no_training_steps(tmp_path, without_plots):
    key = "val-core/arithmetic/acc/mean@1"
    rows = [{"step": 0, "data": {key: 0.25}}, step(1), step(2), step(3, **{key: 0.75})]
    text, _ = report(write_run(tmp_path / "run", rows))
    assert "3 of 20 steps\n" in text
    assert "arithmetic/acc/mean@1: 0.250 at step 0, 0.750 at step 3" in " ".join(text.split())


def test_resumed_run_tells_its_own_steps(tmp_path, without_plots):
    text, _ = report(write_run(tmp_path / "run", [step(i) for i in range(11, 21)]))
    assert "20 of 20 steps (10 in this run, from step 11)" in text


def test_entropy_of_bypass_mode_is_found(tmp_path, without_plots):
    rows = [step(1), step(2)]
    for row in rows:
        row["data"]["actor/entropy_loss"] = row["data"].pop("actor/entropy") + 1
    assert cells(report(write_run(tmp_path / "run", rows))[0], "entropy, nats") == ["2.000", "2.000", "0"]


def test_names_are_not_taken_for_markup_and_lines_fit_the_terminal(tmp_path, without_plots):
    config = CONFIG | {"chosen": {"method": "[/bold]odd", "model": "$x$"}}
    run = write_run(tmp_path / ("long" * 20), [step(i, **{"val-core/[red]": 1.0}) for i in range(1, 21)], config)
    text, _ = report(run)
    assert "[/bold]odd on $x$" in text and "[red]: 1.000" in text
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("files:"))
    assert f"files: {run}/\n" in text  # in one piece, to be copied


def test_unwritable_summary_does_not_hide_how_the_run_ended(tmp_path, without_plots):
    console, run = Console(file=StringIO(), width=80), write_run(tmp_path / "run", [step(1), step(2)])
    (run / "summary.md").mkdir()
    write_report(run, console, COMMAND)
    assert "The summary could not be written" in console.file.getvalue()


def test_recorded_steps_are_told_and_missing_ones_named(tmp_path, without_plots):
    config = CONFIG | {"token_records": {"every": 3, "sequences": 8}}
    run = write_run(tmp_path / "run", [step(i) for i in range(1, 8)], config)
    (run / "tokens").mkdir()
    for name in ("1", "6-0", "6-1", "9"):  # 9 is of steps that are being trained again
        (run / "tokens" / f"{name}.parquet").touch()
    for text in report(run):
        told = " ".join(text.split())
        assert "of 2 steps, which python -m recipes.report shows; missing: 3, and log.txt says why" in told
    (run / "tokens" / "3.parquet").touch()
    assert "missing" not in report(run)[0] and "tokens/" in report(run)[0]
    off = write_run(tmp_path / "off", [step(1)], CONFIG | {"token_records": {"every": 0}})
    assert "token records" not in report(off)[0]
