"""Scheduled fields: from the trainer into the workers' loss, and through a checkpoint."""

import json

import pytest
import torch

from trustregion import MethodConfig
from trustregion.presets import read_preset

pytest.importorskip("verl")
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.metric import AggregationType, Metric  # noqa: E402

from trustregion.verl_plugin.config import TrustRegionLossConfig  # noqa: E402
from trustregion.verl_plugin.full_vocabulary import REQUEST  # noqa: E402
from trustregion.verl_plugin.schedule import FILE, TrainerSchedule  # noqa: E402
from trustregion.verl_plugin.worker_loss import WorkerLoss  # noqa: E402

TARGET = {"type": "target_clip_fraction", "target": 0.2, "smallest": 0.01, "largest": 1.0}
METHOD = {**read_preset("band_kl"), "schedule": {"delta": TARGET}}


def trainer_schedule(method=METHOD) -> TrainerSchedule:
    return TrainerSchedule(MethodConfig.from_flat(method))


def test_a_checkpoint_carries_the_state(tmp_path):
    first = trainer_schedule()
    for step in (1, 2, 3):
        assert first.values(step)
        used = first.observe({"trust/clip_fraction": 0.0})
    assert used == {"trust/delta": pytest.approx(0.05 * torch.tensor(-0.2).exp().item())}
    first.save(tmp_path)
    second = trainer_schedule()
    second.load(tmp_path)
    assert second.values(4) == first.values(4) != trainer_schedule().values(4)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_checkpoint_of_another_trainer_starts_anew(tmp_path):
    schedule = trainer_schedule()
    schedule.load(tmp_path)
    assert schedule.values(1) == {"delta": 0.05}


def test_a_method_without_schedules_has_no_values():
    schedule = trainer_schedule(read_preset("grpo"))
    assert schedule.values(1) == {} and schedule.observe({}) == {}


def test_the_worker_computes_with_the_values_that_came_with_the_batch():
    config = TrustRegionLossConfig(method=METHOD)
    seen = []

    def verls_loss(model_output, data, dp_group):
        seen.append(config.loss.region.delta)
        return torch.zeros(()), Metric.from_dict({"trust_sum/tokens": 2.0}, aggregation=AggregationType.MEAN)

    loss = WorkerLoss(verls_loss, config)
    data = tu.get_tensordict({"x": torch.zeros(2)})
    tu.assign_non_tensor(data, **{REQUEST: json.dumps({"values": {"delta": 0.01}})})
    _, metrics = loss({}, data)
    loss({}, tu.get_tensordict({"x": torch.zeros(2)}))  # none came: the configured value
    assert seen == [0.01, 0.05]
    assert metrics["trust_sum/tokens"].aggregation == AggregationType.SUM
