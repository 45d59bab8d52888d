"""verl's replay buffers with our order and our counts, over a queue that holds what a test puts into it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from verl.trainer.ppo.v1 import replay_buffer as verls  # noqa: E402

from trustregion.verl_plugin.replay_buffer import POLL_SECONDS, OrderedReplayBuffer  # noqa: E402


@pytest.fixture
def queue(monkeypatch):
    """What verl's queue lists: {"train": {key: tag}}."""
    held = {"train": {}, "val": {}}

    def kv_clear(partition_id, keys):
        for key in keys:
            held[partition_id].pop(key, None)

    monkeypatch.setattr(verls, "tq", SimpleNamespace(kv_list=lambda: held, kv_clear=kv_clear))
    return held


def put(queue, uid: str, status: str = "finished", sessions=(0, 1), partition="train", step: int = 1):
    queue[partition][uid] = {"is_prompt": True, "status": status, "global_steps": step}
    queue[partition].update({f"{uid}_{session}_0": {} for session in sessions})


def adopt(cls=verls.ReplayBuffer, threshold=None, refill=None):
    asked = []
    buffer = cls("sync", {}, threshold, "drop", {}, refill_fn=refill)
    return OrderedReplayBuffer.adopt(buffer, lambda now=False: asked.append(now)), asked


def test_hands_out_by_prompt_and_rollout(queue):
    buffer, asked = adopt()
    for uid in ("00000001-000001", "00000001-000000", "00000001-000002"):
        put(queue, uid, sessions=(10, 2, 0))
    batch, metrics = buffer.sample(1, "train", 2)
    assert batch.keys == [f"00000001-00000{p}_{session}_0" for p in (0, 1) for session in (0, 2, 10)]
    assert metrics["training/rollout_failure/prompts"] == 0 and asked == [True] and buffer.poll_interval == POLL_SECONDS


def test_counts_prompts_that_lost_responses(queue):
    buffer, _ = adopt()
    put(queue, "a", "failure", sessions=(1,), partition="val")
    buffer.sample(1, "val", 1)
    put(queue, "00000001-000000")
    put(queue, "00000001-000001", "failure", sessions=(1,))
    _, metrics = buffer.sample(1, "train", 2)
    assert metrics == {"training/rollout_failure/prompts": 1, "validation/rollout_failure/prompts": 1}
    put(queue, "00000002-000000", step=2)
    _, metrics = buffer.sample(2, "train", 1)
    assert set(metrics.values()) == {0}


def test_says_where_to_look_when_all_failed(queue):
    buffer, _ = adopt()
    put(queue, "00000001-000000", "failure", sessions=())
    with pytest.raises(RuntimeError, match="step 1: every response failed .* reward function"):
        buffer.sample(1, "train", 1)


def test_keeps_what_verl_does_for_asynchronous_trainers(queue):
    """Prompts older than they may be, and those that failed, are replaced; synchronous trainers know neither."""
    refilled = []

    def refill(count):
        refilled.append(count)
        for index in range(count):
            put(queue, f"00000003-00000{index}", step=3)

    buffer, _ = adopt(verls.ReplayBufferAsync, threshold=2, refill=refill)
    put(queue, "00000001-000000", step=1)
    put(queue, "00000003-000009", "failure", sessions=(0,), step=3)
    batch, metrics = buffer.sample(3, "train", 2)
    assert refilled == [2] and {key[:8] for key in batch.keys} == {"00000003"}
    assert metrics["training/off_policy/evicted_samples"] == 1 and metrics["training/rollout_failure/prompts"] == 1
    assert buffer.get_sampleable_count(3, "train") == 0
