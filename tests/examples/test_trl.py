"""The loss in TRL's trainer: equal to TRL's own where the two are the same, and it trains."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from trustregion import PolicyLoss

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"


@pytest.fixture(scope="module")
def trl_example():
    """The example's names. TRL is installed apart, as it would break verl: it is on the path for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(sys.prefix) / "trl")
        pytest.importorskip("trl")
        yield runpy.run_path(str(EXAMPLE))
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from recipes.assets.tiny_model import prepare

    return prepare(tmp_path_factory.mktemp("assets") / "tiny", warmup_steps=0)


def digits(completions, **_):
    """A reward that a model with random weights gets some of."""
    return [sum(c.isdigit() for c in completion[0]["content"]) / 16 for completion in completions]


@pytest.mark.slow
def test_grpo_in_trl_equals_trls_own_loss(trl_example, model_folder, tmp_path):
    ours = trl_example["TrustRegionGRPOTrainer"]
    seen = []

    class Both(ours):
        policy_loss = PolicyLoss.from_preset("grpo")

        def _compute_loss(self, model, inputs):
            parameters = list(model.parameters())
            theirs = super(ours, self)._compute_loss(model, inputs)
            gradient = torch.autograd.grad(theirs, parameters)
            loss = super()._compute_loss(model, inputs)
            seen.append((theirs.item(), gradient, loss.item(), torch.autograd.grad(loss, parameters, retain_graph=True)))
            return loss

    # TRL's `delta` is the dual clip.
    same = {"loss_type": "grpo", "epsilon": 0.2, "delta": 3.0, "gradient_accumulation_steps": 2}
    trainer = trl_example["make_trainer"](
        model_folder, Both, digits, max_steps=3, per_device_train_batch_size=32, learning_rate=1e-2, logging_steps=1,
        disable_tqdm=True, output_dir=tmp_path, **same,
    )  # fmt: skip
    trainer.train()
    assert len(seen) == 6
    for theirs, gradient, loss, our_gradient in seen:
        assert loss == pytest.approx(theirs, rel=1e-5, abs=1e-7)
        assert any(g.abs().max() > 1e-3 for g in gradient)
        torch.testing.assert_close(our_gradient, gradient, rtol=1e-4, atol=1e-7)
    rows = trainer.state.log_history[:-1]
    clipped = [row["clip_fraction"] for row in rows]
    assert clipped[0] == 0 and max(clipped) > 0.05  # ratios were 1 at first, and beyond the bounds later
    for ours_says, row in zip(clipped, rows, strict=True):  # TRL does not count what the dual clip stops
        assert -1e-6 < ours_says - row["clip_ratio/region_mean"] < 0.02


@pytest.mark.slow
def test_band_kl_trains_in_trl(trl_example, model_folder, tmp_path):
    trainer = trl_example["make_trainer"](
        model_folder, reward=digits, max_steps=12, per_device_train_batch_size=64, learning_rate=2e-2,
        lr_scheduler_type="constant", disable_tqdm=True, output_dir=tmp_path,
    )  # fmt: skip
    trainer.train()
    rows = trainer.state.log_history[:-1]
    assert rows[0]["reward"] < 0.1 and rows[-1]["reward"] > 0.5
    assert max(row["clip_fraction"] for row in rows) > 0.01
