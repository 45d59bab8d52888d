"""verl's single-turn rollout with a sampling seed of its own for each request."""

import hashlib
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


def request_seed(run_seed: int, global_step: int, index: int, session: int) -> int:
    """A seed in [0, 2^56) from the run's seed, the training step, the prompt's index and its rollout number."""
    key = f"{run_seed}/{global_step}/{index}/{session}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


class SeededSingleTurn(SingleTurnAgentLoop):
    """vLLM draws unseeded requests from one shared generator, in the order in which they happen to be scheduled.

    With a seed a request, the samples of a run depend on its seed alone, also after a resume.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs):
        seed = request_seed(
            self.rollout_config.seed,
            int(kwargs.get("global_steps", 0)),
            int(kwargs.get("index", 0)),
            int(kwargs.get("session_id", 0)),
        )
        return await super().run(dict(sampling_params, seed=seed), **kwargs)
