"""Evaluations without a model: configurations, and folders of samples made by a rule."""

import json

import hydra
import pytest
from omegaconf import DictConfig

from recipes.evaluation.samples import Samples, sample_seed
from trustregion.presets import configs_folder

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "chat_template": None, "chat_template_kwargs": {}}


@pytest.fixture
def configure(tmp_path):
    """configure("n=4", ...) -> DictConfig, as `python -m recipes.evaluate` has it; folders in tmp_path."""

    def configure(*overrides: str) -> DictConfig:
        with hydra.initialize_config_dir(str(configs_folder()), version_base="1.3"):
            return hydra.compose("evaluate", [f"runs={tmp_path / 'eval'}", f"assets={tmp_path / 'assets'}", *overrides])

    return configure


@pytest.fixture
def make_samples(tmp_path):
    """make_samples([[True, False], ...], name="a") -> Samples of "arithmetic" with these verdicts, on disk in tmp_path/name;
    right answers are the truth, "7", and wrong ones "6"."""

    def make_samples(correct: list[list[bool]], name: str = "a", **header) -> Samples:
        known = {"benchmark": "arithmetic", "benchmark_sha256": "b" * 64, "problems": len(correct), "n": len(correct[0])}
        known |= {"seed": 0, "model": "tiny", "model_sha256": "m" * 64, "sampling": SAMPLING, **header}
        samples = Samples(tmp_path / name / "samples" / f"{known['benchmark']}.jsonl", known).open()
        for index, verdicts in enumerate(correct):
            for k, right in enumerate(verdicts):
                problem = f"{known['benchmark']}/{index}"
                row = {"problem": problem, "k": k, "seed": sample_seed(known["seed"], problem, k), "text": f"3+4={7 if right else 6}"}
                row |= {"finish": "stop", "tokens": 5, "source": "arithmetic/chain", "truth": "7"}
                samples.add({**row, "answer": "7" if right else "6", "correct": right})
        return samples

    return make_samples


@pytest.fixture
def edit():
    """edit(samples, 3, k=9) changes line 3 of their file."""

    def edit(samples: Samples, number: int, **changes):
        lines = samples.file.read_text().splitlines()
        lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes)
        samples.file.write_text("\n".join(lines) + "\n")

    return edit
