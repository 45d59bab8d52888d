"""verl's vLLM server, which also returns the most likely tokens of every position it sampled.

verl asks vLLM for the log-prob of the sampled token alone. A request whose `extra_args` hold `TOPK` gets the K most likely
tokens and their log-probs, as the sampler saw them, in the result's `extra_fields`.
"""

from typing import Any

import numpy as np
import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

TOPK = "trust_region_topk"
# In `extra_fields`, for the T sampled tokens: int32 and float32 arrays [T, K], most likely first.
TOP_IDS, TOP_LOG_PROBS = "trust_region_top_ids", "trust_region_top_log_probs"
UNKNOWN = -1  # in place of an id that vLLM has not named; its log-prob is nan


class _Engine:
    """vLLM's engine, all of it, but for what `generate` is asked and what of its answer is kept."""

    def __init__(self, engine):
        self._engine = engine
        self.top_tokens: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # by request, until they are taken

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params, request_id: str, **kwargs):
        topk = (sampling_params.extra_args or {}).get(TOPK)
        if topk:
            sampling_params.logprobs = topk
        output = None
        async for output in self._engine.generate(sampling_params=sampling_params, request_id=request_id, **kwargs):
            yield output
        if topk and output is not None and output.outputs:
            self.top_tokens[request_id] = most_likely(output.outputs[0].logprobs, topk)


class TopKServer(vLLMHttpServer):
    async def run_server(self, args):
        await super().run_server(args)
        self.engine = _Engine(self.engine)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs):
        output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        if top := self.engine.top_tokens.pop(request_id, None):
            output.extra_fields[TOP_IDS], output.extra_fields[TOP_LOG_PROBS] = top
        return output


class TopKReplica(vLLMReplica):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TopKServer)


def most_likely(log_probs: list[dict], topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs [T, K] from vLLM's answer: per token a dict by id of the K best, and of the sampled token."""
    ids = np.full((len(log_probs), topk), UNKNOWN, dtype=np.int32)
    values = np.full((len(log_probs), topk), np.nan, dtype=np.float32)
    for row, by_id in enumerate(log_probs):
        best = sorted((found.rank, found.logprob, token) for token, found in by_id.items() if found.rank <= topk)
        for column, (_, log_prob, token) in enumerate(best[:topk]):
            ids[row, column], values[row, column] = token, log_prob
    return ids, values


def register():
    """Has verl start these servers for `rollout.name=vllm`, in this process."""
    RolloutReplicaRegistry.register("vllm", lambda: TopKReplica)
