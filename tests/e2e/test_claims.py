"""What the loop promises beyond running; minutes each (`make test-long`)."""

import json

import pytest

from trustregion import load_preset

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
TIMING = ("timing", "perf/", "throughput")


# benchmarks/every_preset.py does this for all, with one step.
METHODS = {"band_kl": [], "erc_dapo": ["method.beta_low=1e-4", "method.beta_high=1e-4"], "dppo_topk_tv": []}


@pytest.mark.parametrize("method", METHODS)
def test_with_learning_rate_0_nothing_is_clipped(train, method):
    overrides = [f"method={method}", *METHODS[method], "actor_rollout_ref.actor.optim.lr=0"]
    run = train(*overrides, "trainer.total_training_steps=3")
    assert run.column("trust/clip_fraction") == [0.0] * 3  # over several mini-batches
    limit = 1e-5 if load_preset(method).anchor == "rollout" else 0.0  # two engines, that round differently
    assert max(run.column("trust/log_ratio_abs_max")) <= limit
    assert max(run.column("trust/divergence_max")) <= limit
    if method.startswith("erc"):
        assert run.column("trust/entropy_ratio_mean") == [1.0] * 3


def test_same_seed_twice_is_bitwise_the_same(train):
    first, second = (train("trainer.total_training_steps=5", name=name) for name in ("first", "second"))
    for a, b in zip(first.rows, second.rows, strict=True):
        keys = [key for key in a if not any(part in key for part in TIMING)]
        assert len(keys) > 60
        assert {key: a[key] for key in keys} == {key: b[key] for key in keys}
    samples = sorted((first.folder / "samples").glob("*.jsonl"))
    assert len(samples) == 5
    for path in samples:
        assert path.read_text() == (second.folder / "samples" / path.name).read_text()


def test_two_workers_compute_what_one_computes(train):
    one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=16"  # so that the first update sees the same sequences
    runs = [train(one_update, "trainer.total_training_steps=2", f"cluster.workers={n}", name=f"w{n}") for n in (1, 2)]

    def responses(run):
        return sorted(json.loads(line)["output"] for line in (run.folder / "samples" / "1.jsonl").open())

    assert responses(runs[0]) == responses(runs[1])
    for key in ("actor/pg_loss", "actor/grad_norm"):
        one, two = (run.rows[0][key] for run in runs)
        assert two == pytest.approx(one, rel=1e-5), key


def test_two_workers_learn(train):
    run = train("cluster.workers=2", "trainer.total_training_steps=30")
    rewards = run.column("critic/rewards/mean")
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.1
    assert max(run.column("training/rollout_probs_diff_mean")) < 1e-5


def test_kl_to_a_reference_model(train):
    run = train("actor_rollout_ref.actor.use_kl_loss=true", "trainer.total_training_steps=3")
    kl = run.column("actor/kl_loss")
    assert 0 <= kl[0] < kl[-1] < 0.1  # none before the first update, some after


# A field that its schedule moves by what is clipped, so that the checkpoint must hold where it has got to.
STEERED = "{type: target_clip_fraction, target: 0.2, smallest: 0.001, largest: 0.5}"


@pytest.mark.parametrize(("method", "field"), [("erc_dapo", "beta_high"), ("dppo_topk_tv", "delta")])
def test_stopped_and_resumed_is_as_if_it_had_not_been(train, method, field):
    overrides = [f"method={method}", f"+method.schedule={{{field}: {STEERED}}}", "trainer.total_training_steps=4"]
    straight = train(*overrides, "trainer.save_freq=2")
    values = straight.column(f"trust/{field}")
    assert values[0] == getattr(load_preset(method).region, "delta", 0.05) and len(set(values)) == 4
    checkpoint = straight.folder / "checkpoints" / "global_step_2"
    resumed = train(
        *overrides, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}",
        "trust_checkpoint=true", name="resumed",
    )  # fmt: skip
    assert len(resumed.rows) == 2
    for step, row in enumerate(resumed.rows, start=3):
        expected = straight.rows[step - 1]
        keys = [key for key in expected if not any(part in key for part in TIMING)]
        assert len(keys) > 60 and {k: expected[k] for k in keys} == {k: row[k] for k in keys}
        samples = (run.folder / "samples" / f"{step}.jsonl" for run in (straight, resumed))
        assert len({path.read_text() for path in samples}) == 1


def test_pretrained_model_with_a_real_vocabulary(train):
    run = train("model=smollm2_135m")
    rewards = run.column("critic/rewards/mean")
    assert 0.4 <= sum(rewards) / len(rewards) <= 0.75
    assert max(run.column("training/rollout_probs_diff_mean")) < 1e-4


def test_responses_may_go_on_after_an_update(train):
    run = train("trainer.v1.trainer_mode=trust_region_colocate_async", "method=erc_dapo", "trainer.total_training_steps=6")
    assert len(run.rows) == 6 and min(run.column("trust/entropy_looked_at")) == 1
    assert all(0 < x < 0.9 for x in run.column("trust/blocked_by_entropy"))


def test_rollouts_may_go_on_beside_the_updates(train):
    run = train("cluster=cpu_separate", "method=erc_dapo", "trainer.total_training_steps=4")
    # The anchor of a step's later updates is the policy that the step began with, not the one they have made.
    assert len(run.rows) == 4 and min(run.column("trust/log_ratio_abs_max")) > 1e-3
    assert all(0 < x < 0.9 for x in run.column("trust/blocked_by_entropy"))
    assert run.rows[0]["training/rollout_probs_diff_mean"] < 1e-5  # what the servers have come from the file


def test_adapters_are_trained_and_erc_may_look_at_every_second_update(train):
    adapters = [f"actor_rollout_ref.model.{key}" for key in ("lora_rank=8", "lora_alpha=16", "target_modules=all-linear")]
    run = train(*adapters, "method=erc_dapo", "method.every_k_steps=2", "trainer.total_training_steps=6")
    assert all(0.4 < share < 0.6 for share in run.column("trust/entropy_looked_at"))  # of the tokens, in two of four updates
    assert min(run.column("trust/log_ratio_abs_max")) > 1e-3  # the adapters move
    assert max(run.column("training/rollout_probs_diff_mean")) < 1e-5  # in the rollout engine, too


LAYOUTS = {
    "packed": "actor_rollout_ref.model.use_remove_padding=true",
    "dynamic": "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "recomputed": "actor_rollout_ref.model.enable_gradient_checkpointing=true",
}


def test_layouts_compute_the_same(train):
    """How sequences are packed into micro-batches changes neither the cells, the entropies nor the gradient."""
    common = [
        "method=dppo_topk_tv", "method.anchor=old", "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    ]  # fmt: skip
    plain = train(*common, name="plain")
    for name, override in LAYOUTS.items():
        packed = train(*common, override, name=name)
        for key in ("trust/divergence_mean", "trust/divergence_max", "trust/log_ratio_abs_mean", "actor/grad_norm", "actor/entropy"):
            assert packed.rows[0][key] == pytest.approx(plain.rows[0][key], rel=1e-3), (name, key)
