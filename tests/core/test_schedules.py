"""Fields that change over training: their values, their limits, and going on from a checkpoint."""

import json
import math
import re

import pytest
import torch

from trustregion import ConfigError, MethodConfig, PolicyLoss, TokenBatch, load_preset

LINEAR = {"type": "linear", "end": 0.01, "steps": 10}
TARGET = {"type": "target_clip_fraction", "target": 0.2, "smallest": 0.001, "largest": 1.0}


def values(schedule: dict, steps, preset: str = "band_kl") -> list[float]:
    scheduler = load_preset(preset, schedule=schedule).scheduler()
    return [next(iter(scheduler.values(step).values())) for step in steps]


def test_linear_goes_from_the_fields_value_to_the_end_and_stays():
    assert values({"delta": LINEAR}, (1, 6, 11, 500)) == pytest.approx([0.05, 0.03, 0.01, 0.01])


def test_cosine_is_slow_at_either_end():
    found = values({"delta": {**LINEAR, "type": "cosine"}}, (1, 2, 6, 11, 12))
    assert found == pytest.approx([0.05, 0.05 - 0.04 * (0.5 - 0.5 * math.cos(math.pi / 10)), 0.03, 0.01, 0.01])


def test_constant_is_the_fields_value():
    assert values({"delta": {"type": "constant"}}, (1, 7)) == [0.05, 0.05]


def test_one_side_alone():
    method = load_preset("band_kl", delta_high=0.05, schedule={"delta_high": LINEAR})
    loss = PolicyLoss.from_method(method).with_values(method.scheduler().values(11))
    assert (loss.region.delta, loss.region.delta_high, loss.region.delta_low) == (0.05, 0.01, None)
    tv = load_preset("band_tv", delta=0.1, schedule={"delta": {**LINEAR, "end": 1.0, "steps": 7}})
    for step in range(10):  # never a rounding error above the largest total variation
        PolicyLoss.from_method(tv).with_values(tv.scheduler().values(step))
    erc = load_preset("band_kl_erc", schedule={"beta_low": {"type": "linear", "end": 0.5, "steps": 1}})
    band = PolicyLoss.from_method(erc).with_values(erc.scheduler().values(2)).region.regions[1]
    assert (band.beta_low, band.beta_high) == (0.5, 0.05)


@pytest.mark.slow
def test_the_controller_holds_a_clip_fraction():
    """On tokens whose log-ratios do not change it has to find the radius at which a fifth of them is clipped."""
    generator = torch.Generator().manual_seed(0)
    log_prob_old = -torch.rand(1, 4000, generator=generator) * 3 - 0.1
    log_prob = (log_prob_old + 0.3 * torch.randn(1, 4000, generator=generator)).clamp(max=-1e-3)
    batch = TokenBatch(log_prob, log_prob_old, (log_prob - log_prob_old).sign(), torch.ones(1, 4000))
    for start in (0.001, 0.9):
        method = load_preset("band_kl", delta=start, schedule={"delta": TARGET})
        scheduler = method.scheduler()
        for step in range(1, 200):
            summary = PolicyLoss.from_method(method).with_values(scheduler.values(step))(batch).metrics.summarize()
            scheduler.observe(summary)
        assert summary["trust/clip_fraction"] == pytest.approx(0.2, abs=0.01)


def test_the_controller_looks_at_its_own_side():
    for preset, field, metric in (
        ("erc_dapo", "beta_low", "entropy_lost_fraction"),
        ("erc_dapo", "beta_high", "entropy_gained_fraction"),
        ("grpo", "eps_low", "clip_fraction_down"),
        ("grpo", "eps_high", "clip_fraction_up"),
    ):
        scheduler = load_preset(preset, schedule={field: TARGET}).scheduler()
        (start,) = scheduler.values(1).values()
        scheduler.observe({f"trust/{metric}": 0.4})
        assert scheduler.values(2)[field] == pytest.approx(start * math.exp(0.1))
        scheduler.observe({f"trust/{metric}": 0.1})
        assert scheduler.values(3)[field] == pytest.approx(start * math.exp(0.1 - 0.05))


def test_the_controller_stays_within_its_limits():
    scheduler = load_preset("band_kl", schedule={"delta": {**TARGET, "smallest": 0.04, "largest": 0.06}}).scheduler()
    for fraction, limit in ((0.0, 0.04), (1.0, 0.06)):
        for step in range(50):
            scheduler.values(step)
            scheduler.observe({"trust/clip_fraction": fraction})
        assert scheduler.values(50) == {"delta": limit}


def test_a_checkpoint_goes_on_where_it_was():
    method = load_preset("band_kl_erc", schedule={"delta": TARGET, "beta_low": {**LINEAR, "end": 0.5}})
    first = method.scheduler()
    for step in range(1, 5):
        first.values(step)
        first.observe({"trust/clip_fraction": 0.3})
    state = json.loads(json.dumps(first.state_dict()))
    second = method.scheduler()
    second.load_state_dict(state)
    assert second.values(5) == first.values(5) != method.scheduler().values(5)


@pytest.mark.parametrize(("schedule", "expected"), [
    ({"delta": {**LINEAR, "end": -1}}, "method.schedule.delta.end = -1: must be a number > 0"),
    ({"delta": {**LINEAR, "steps": 1.5}}, "method.schedule.delta.steps = 1.5: must be a whole number > 0"),
    ({"delta": {"type": "linear", "end": 0.1}}, "method.schedule.delta.steps: missing; must be a whole number"),
    ({"delta": {"type": "sine"}}, "method.schedule.delta.type = 'sine': no such type. Did you mean 'cosine'?"),
    ({"delta": 0.1}, "method.schedule.delta = 0.1: must be a mapping"),
    ({"detla": LINEAR}, "method.schedule.detla: no such field to schedule. Did you mean 'delta'? Allowed: delta, d"),
    ({"delta_low": LINEAR}, "method.schedule.delta_low = None: only a field that is set to a number can change"),
    ({"delta": {**TARGET, "smallest": 0.06}}, "method.schedule.delta.smallest, delta.largest = 0.06, 1.0: must lie arou"),
    ({"dual_clip": TARGET}, "method.schedule.dual_clip.type = 'target_clip_fraction': this field clips no tokens of"),
    ({"ratio_cap": {**LINEAR, "end": 0.5}}, "method.schedule.ratio_cap = 0.5: must be a number > 1"),
    ("linear", "method.schedule = 'linear': must be a mapping"),
])
def test_schedules_are_checked_before_training(schedule, expected):
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        load_preset("band_kl", schedule=schedule)


def test_a_schedule_may_not_leave_its_fields_range():
    with pytest.raises(ConfigError, match=r"^method.schedule.delta = 1.5: must be a number > 0 and <= 1 \(no two"):
        load_preset("band_tv", schedule={"delta": {**LINEAR, "end": 1.5}})


def test_only_what_is_finite_and_a_number_of_its_own_can_change():
    with pytest.raises(ConfigError, match=r"^method.schedule.dual_clip = inf: only a finite"):
        load_preset("grpo", dual_clip=math.inf, schedule={"dual_clip": {**LINEAR, "end": 3}})
    with pytest.raises(ConfigError, match=r"^method.schedule.alpha = 0.5: only a finite"):  # delta's limit hangs on it
        load_preset("band_alpha", schedule={"alpha": {**LINEAR, "end": 2}})


def test_nested_configurations_have_schedules_too():
    nested = {
        "region": {"type": "divergence_ball", "divergence": "kl", "delta": 0.05, "ratio_cap": 10.0},
        "surrogate": {"type": "clip", "dual_clip": 10.0},
        "schedule": {"delta": LINEAR},
    }
    assert MethodConfig.from_nested(nested) == load_preset("band_kl", schedule={"delta": LINEAR})


def test_values_of_unknown_fields_are_refused():
    with pytest.raises(ConfigError, match="no such field"):
        PolicyLoss.from_preset("grpo").with_values({"delta": 0.1})
    with pytest.raises(ConfigError, match="eps_low = 2: must be"):
        PolicyLoss.from_preset("grpo").with_values({"eps_low": 2})
