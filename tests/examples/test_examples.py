"""The examples in plain torch and in plain verl run, and do what they say."""

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trustregion import PolicyLoss, TokenBatch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


# ---- plain torch -----------------------------------------------------------------------------------------------------
def test_plain_torch_learns_to_count_and_is_clipped_on_the_way(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plain_torch.py"])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLES / "plain_torch.py"), run_name="__main__")
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "reward", "clipped"]
    rewards = [float(row.split()[1]) for row in rows]
    clipped = [float(row.split()[2].rstrip("%")) for row in rows]
    assert rewards[0] < 0.1 and rewards[-1] > 0.9
    assert max(clipped) > 1


# ---- plain verl ------------------------------------------------------------------------------------------------------
def script_overrides(tmp_path, method, *arguments):
    """What examples/verl_plain.sh starts verl's trainer with."""
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
        if [ "$1" = -m ]; then printf '%s\\n' "$@"; else exec {sys.executable} "$@"; fi""")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "METHOD": method}
    command = ["bash", EXAMPLES / "verl_plain.sh", *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    dash_m, program, *overrides = done.stdout.splitlines()
    assert (dash_m, program) == ("-m", "verl.trainer.main_ppo")
    return overrides


def readme_overrides():
    """The three lines of the README's section about plain verl."""
    lines = [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    ours = [line for line in lines if line.lstrip("+").startswith("actor_rollout_ref.actor.policy_loss.")]
    return shlex.split(" ".join(ours))


def actor_config(overrides):
    """verl's own configuration with these overrides, and the actor's part as verl's workers get it."""
    import hydra
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", [*overrides, "algorithm.adv_estimator=grpo"])
    validate_config(config, use_reference_policy=False, use_critic=False)
    return config, omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def verls_loss(config, log_prob_old, log_prob, advantages):
    """verl's ppo_loss on responses of different lengths, each after a prompt of two tokens: one tensor a response."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    def jagged(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    data = TensorDict(
        {
            "prompts": jagged([torch.zeros(2, dtype=torch.long) for _ in log_prob]),
            "responses": jagged([torch.zeros(len(row), dtype=torch.long) for row in log_prob]),
            "response_mask": jagged([torch.ones(len(row), dtype=torch.bool) for row in log_prob]),
            "old_log_probs": jagged(log_prob_old),
            "advantages": jagged(advantages),
        },
        batch_size=len(log_prob),
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    # The model's output is one token ahead: what a position predicts.
    outputs = jagged([torch.cat([torch.zeros(1), row, torch.zeros(1)]) for row in log_prob])
    return ppo_loss(config, {"log_probs": outputs}, data)


def check_loss(actor, expected):
    """verl's ppo_loss with this actor configuration is `expected`, averaged over all tokens."""
    generator = torch.Generator().manual_seed(0)
    old = [-3 * torch.rand(length, generator=generator) - 0.1 for length in (5, 9, 1)]
    new = [(row + 0.5 * torch.randn(len(row), generator=generator)).clamp(max=-0.01).requires_grad_() for row in old]
    advantages = [torch.randn(len(row), generator=generator) for row in old]
    loss, metrics = verls_loss(actor, old, new, advantages)
    loss.backward()
    ours = [torch.cat(rows).detach()[None] for rows in (new, old, advantages)]
    ours[0].requires_grad_()
    out = expected(TokenBatch(*ours, torch.ones(1, 15)))
    out.token_loss.mean().backward()
    torch.testing.assert_close(loss, out.token_loss.mean())
    torch.testing.assert_close(torch.cat([row.grad for row in new]), ours[0].grad[0])
    clipped = out.metrics.summarize()["trust/clip_fraction"]
    assert 0 < clipped < 1
    # Without our trainer the metrics stay what the loss reports: sums, whose quotient is the fraction.
    assert metrics["trust_sum/clipped"].aggregate() / metrics["trust_sum/tokens"].aggregate() == pytest.approx(clipped)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["band_kl", "dppo_binary_tv"])
def test_plain_verl_computes_the_loss_that_the_script_chooses(tmp_path, method):
    pytest.importorskip("verl")
    config, actor = actor_config(
        script_overrides(tmp_path, method, "actor_rollout_ref.actor.policy_loss.method.delta=0.03")
    )
    assert config.algorithm.rollout_correction.bypass_mode == (method == "dppo_binary_tv")
    assert config.trainer.v1.trainer_mode == "sync"  # verl's own
    check_loss(actor, PolicyLoss.from_preset(method, delta=0.03))


@pytest.mark.slow
def test_plain_verl_computes_the_loss_of_the_readme():
    pytest.importorskip("verl")
    _, actor = actor_config([*readme_overrides(), "actor_rollout_ref.actor.use_dynamic_bsz=true"])
    check_loss(actor, PolicyLoss.from_preset("band_kl", ratio_cap=None, dual_clip=None))
