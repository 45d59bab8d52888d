"""verl's single-turn rollout with a sampling seed of its own for each request."""

import hashlib
import re
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

TRAINING_UID = re.compile(r"\d{8}-\d{6}")  # as the trainer makes them


def request_seed(run_seed: int, prompt: str, session: int) -> int:
    """A seed in [0, 2^56) from the run's seed, what names the prompt and the number of the rollout."""
    key = f"{run_seed}/{session}/{prompt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


class SeededSingleTurn(SingleTurnAgentLoop):
    """vLLM draws unseeded requests from one shared generator, in the order in which they happen to be scheduled.

    With a seed a request, the samples of a run depend on its seed alone, also after a resume.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs):
        # The trainer's uids are numbers of step and prompt; in validation verl draws random ones, so the text counts.
        uid = str(kwargs["uid"])
        prompt = uid if TRAINING_UID.fullmatch(uid) else f"{kwargs.get('global_steps')}/{kwargs['raw_prompt']}"
        seed = request_seed(self.rollout_config.seed, prompt, int(kwargs["session_id"]))
        return await super().run(dict(sampling_params, seed=seed), **kwargs)
