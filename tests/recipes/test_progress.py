"""What the terminal shows of a run."""

import io

from rich.console import Console

from recipes.progress import StepLines


def shown(*rows: dict) -> str:
    text = io.StringIO()
    with StepLines(Console(file=text, width=100), 9) as lines:
        lines.show([{"step": step, "data": data} for step, data in enumerate(rows, start=1)])
    return text.getvalue()


def test_a_line_a_step_and_a_word_about_lost_responses():
    fine = {"critic/rewards/mean": 0.5, "actor/entropy": 0.25, "trust/clip_fraction": 0.01, "timing_s/step": 3.0}
    lost = "training/rollout_failure/prompts"
    text = shown(fine | {lost: 0}, fine | {lost: 2})
    assert "       1/9     0.500     0.250    1.000%       3.0\n" in text
    assert text.count("prompts lack responses") == 1 and "2 training prompts lack responses" in text.partition("2/9")[2]
