"""The gradient of a batch does not depend on how it is cut into micro-batches, padded, or spread over workers."""

import pytest
import torch

from trustregion.presets import read_preset

pytest.importorskip("verl")
from verl.workers.config import ActorConfig  # noqa: E402

from trustregion.verl_plugin.config import TrustRegionLossConfig  # noqa: E402
from trustregion.verl_plugin.policy_loss import trust_region_loss  # noqa: E402

AGG_MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SEQUENCES, LENGTH = 24, 40


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(SEQUENCES, LENGTH, generator=generator)

    old = -torch.rand(SEQUENCES, LENGTH, generator=generator) * 4
    lengths = torch.randint(0, LENGTH + 1, (SEQUENCES, 1), generator=generator)
    lengths[3], lengths[7] = 0, LENGTH  # a sequence without live tokens, and a full one
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.4 * normal()).clamp(max=0),
        "advantages": normal(),
        "response_mask": torch.arange(LENGTH) < lengths,
        "rollout_is_weights": torch.rand(SEQUENCES, LENGTH, generator=generator) * 2,
    }


def gradient(whole: dict, groups: list[list[list[int]]], mode: str, method: str, crop: bool) -> torch.Tensor:
    """d loss / d log_prob of the whole batch: `groups` says which sequences each worker's micro-batches hold.

    FSDP averages over workers and adds up micro-batches. `crop`: micro-batches are only as wide as they need to be.
    """
    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_scale_factor=LENGTH,
        policy_loss=TrustRegionLossConfig(method=read_preset(method)),
    )
    total = torch.zeros(SEQUENCES, LENGTH)
    config.global_batch_info.update(
        dp_size=len(groups), batch_num_tokens=whole["response_mask"].sum(),
        global_batch_size=SEQUENCES, loss_scale_factor=LENGTH,
    )
    for micro_batches in groups:
        for rows in micro_batches:
            width = max(int(whole["response_mask"][rows].sum(-1).max()), 1) if crop else LENGTH
            part = {name: x[rows][:, :width].clone() for name, x in whole.items()}
            part["log_prob"].requires_grad_()
            loss, _ = trust_region_loss(**part, loss_agg_mode=mode, config=config)
            loss.backward()
            total[rows, :width] += part["log_prob"].grad / len(groups)
    return total


def split(rows: list[int], sizes: list[int]) -> list[list[int]]:
    return [chunk.tolist() for chunk in torch.tensor(rows).split(sizes)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["band_kl", "dppo_binary_tv", "gppo", "cispo"])
@pytest.mark.parametrize("mode", AGG_MODES)
def test_every_split_gives_the_same_gradient(mode, method):
    whole = batch(seed=1)
    rows = list(range(SEQUENCES))
    expected = gradient(whole, [[rows]], mode, method, crop=False)
    assert expected.abs().sum() > 0
    shuffled = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(2)).tolist()
    layouts = {
        "one sequence each": [split(rows, [1] * SEQUENCES)],
        "uneven": [split(shuffled, [1, 2, 5, 16])],
        "two workers": [split(shuffled[:12], [3, 9]), split(shuffled[12:], [6, 6])],
        "four workers": [split(shuffled[i * 6 : i * 6 + 6], [i + 1, 5 - i]) for i in range(4)],
    }
    for name, groups in layouts.items():
        for crop in (False, True):
            found = gradient(whole, groups, mode, method, crop)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, msg=lambda text: f"{name}, {crop=}: {text}")


def test_the_norm_mode_refuses_a_width_that_depends_on_padding():
    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True,
        policy_loss=TrustRegionLossConfig(method=read_preset("grpo")),
    )
    with pytest.raises(ValueError, match="actor.loss_scale_factor"):
        trust_region_loss(**batch(3), loss_agg_mode="seq-mean-token-sum-norm", config=config)
