"""The real loop: Ray driver, vLLM rollouts, FSDP2 on gloo, weight sync, on this machine's CPU."""

import json
import signal
import time

import pandas as pd
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
DIFFERENCE = "training/rollout_probs_diff_mean"


def test_trains_shows_progress_and_leaves_a_run_folder(train, leftovers):
    tracking = "trainer.logger=[console,file,wandb]"
    run = train("method=band_kl_erc", "trainer.total_training_steps=4", "token_records.every=2", tracking, env={"WANDB_MODE": "offline"})
    rows = run.rows
    assert len(rows) == 4
    for row in rows:
        assert row[DIFFERENCE] < 1e-5  # vLLM samples with the weights that the actor has
        assert 0 < row["critic/rewards/mean"] < 1 and row["actor/entropy"] > 0 and row["actor/grad_norm"] > 0
        assert row["trust/log_ratio_abs_max"] > 1e-3 and 0 <= row["trust/clip_fraction_up"] < 0.5
        # Entropies of both passes, of all tokens, have reached the loss, and belong to the same tokens.
        assert row["trust/entropy_looked_at"] == 1 and 0 < row["trust/blocked_by_entropy"] < 0.9
        assert 0.7 < row["trust/entropy_ratio_p05"] < row["trust/entropy_ratio_mean"] < row["trust/entropy_ratio_p95"] < 1.5
    for name in ("config.yaml", "summary.md", "dynamics.png", "log.txt"):
        assert (run.folder / name).stat().st_size > 100, name
    assert len(list((run.folder / "samples").glob("*.jsonl"))) == 4
    assert list(run.folder.glob("wandb/offline-run-*/*.wandb"))
    assert sorted(path.name for path in (run.folder / "tokens").iterdir()) == ["1.parquet", "2.parquet", "4.parquet"]
    tokens = pd.read_parquet(run.folder / "tokens" / "4.parquet")
    assert tokens.groupby("update").sequence.nunique().tolist() == [8, 8, 8, 8]  # every response is that of its sample
    outputs = {row["uid"]: row["output"] for row in map(json.loads, (run.folder / "samples" / "4.jsonl").read_text().splitlines())}
    for (_, sequence), rows in tokens.groupby(["update", "sequence"]):
        assert "".join(rows.token).removesuffix("<|end|>") == outputs[sequence]
    on_policy = tokens["update"] == 0
    assert tokens.active[on_policy].all() and (tokens.cause[~on_policy] == "entropy").any()
    assert "4/4" in run.output and "reward" in run.output and str(run.folder) in run.output.replace("\n", "")
    assert "pid=" not in run.output and len(run.output.splitlines()) < 50  # the chatter is in log.txt
    assert leftovers() == []


def test_killed_engine_ends_the_run_with_its_name(start, leftovers):
    run = start("method=dppo_topk_tv", "trainer.total_training_steps=100")
    run.wait_for_steps(2)
    assert all(0 < x < 0.5 for x in run.column("trust/divergence_max"))  # over vLLM's own most likely tokens
    run.child("EngineCore").kill()
    killed = time.monotonic()
    run.wait(timeout=90)
    assert time.monotonic() - killed < 60
    assert run.process.returncode == 2
    assert "vLLM server 0_0 at" in run.output and "is dead" in run.output and "To start again:" in run.output
    assert len(run.rows) >= 2 and leftovers() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_the_steps_and_says_how_to_start_again(start, leftovers, signum):
    run = start("trainer.total_training_steps=100")
    if signum == signal.SIGINT:
        run.wait_for_steps(1)
    else:
        time.sleep(20)  # while Ray and vLLM are starting
    run.process.send_signal(signum)
    run.wait(timeout=60)
    assert run.process.returncode == 128 + signum
    assert "To start again:\n  python -m recipes.train" in run.output
    assert len(run.rows) >= (signum == signal.SIGINT) and leftovers() == []
