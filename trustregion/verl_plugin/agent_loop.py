"""verl's single-turn rollout with a sampling seed of its own for each request, and the most likely tokens on demand."""

import hashlib
import re
from typing import Any

import numpy as np
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from trustregion.verl_plugin.config import method_of
from trustregion.verl_plugin.rollout_cells import WithTopTokens
from trustregion.verl_plugin.rollout_server import TOP_IDS, TOP_LOG_PROBS, TOPK

TRAINING_UID = re.compile(r"\d{8}-\d{6}")  # as the trainer makes them


def request_seed(run_seed: int, prompt: str, session: int) -> int:
    """A seed in [0, 2^56) from the run's seed, what names the prompt and the number of the rollout."""
    key = f"{run_seed}/{session}/{prompt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


class SeededSingleTurn(SingleTurnAgentLoop):
    """vLLM draws unseeded requests from one shared generator, in the order in which they happen to be scheduled.

    With a seed a request, the samples of a run depend on its seed alone, also after a resume. Where the method's top-K
    cells are the rollout engine's own, it is asked for them with the sample.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        method = method_of(self.config)
        self._topk = method.topk if method.anchor == "rollout" else 0

    async def run(self, sampling_params: dict[str, Any], **kwargs):
        # The trainer's uids are numbers of step and prompt; in validation verl draws random ones, so the text counts.
        uid = str(kwargs["uid"])
        prompt = uid if TRAINING_UID.fullmatch(uid) else f"{kwargs.get('global_steps')}/{kwargs['raw_prompt']}"
        seed = request_seed(self.rollout_config.seed, prompt, int(kwargs["session_id"]))
        sampling_params = dict(sampling_params, seed=seed)
        if not self._topk:
            return await super().run(sampling_params, **kwargs)
        output = await super().run(dict(sampling_params, extra_args={TOPK: self._topk}), **kwargs)
        none = np.empty((0, self._topk))
        for name, dtype in ((TOP_IDS, np.int32), (TOP_LOG_PROBS, np.float32)):
            output.extra_fields.setdefault(name, none.astype(dtype))
        return WithTopTokens(**{name: getattr(output, name) for name in output.model_fields_set | {"extra_fields"}})
