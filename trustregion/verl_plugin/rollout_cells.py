"""The rollout engine's most likely tokens as the anchor's cells, in the layout in which verl's engine computes them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from trustregion.verl_plugin.rollout_server import TOP_IDS, TOP_LOG_PROBS, UNKNOWN


class WithTopTokens(AgentLoopOutput):
    """An agent loop's output whose most likely tokens travel as tensors [T, K], like every other value of a token."""

    def as_dict(self) -> dict[str, Any]:
        output = super().as_dict()
        length = len(output["responses"])
        for name, unknown in ((TOP_IDS, UNKNOWN), (TOP_LOG_PROBS, np.nan)):
            values = output["extra_fields"].pop(name)[:length]
            # An error here would be lost: verl pads the batch and goes on. The trainer refuses what is unknown.
            missing = np.full((length - len(values), values.shape[1]), unknown, values.dtype)
            output[name] = torch.from_numpy(np.concatenate([values, missing]))
        return output


def anchor_cells(
    top_ids: list[Tensor],
    top_log_probs: list[Tensor],
    log_probs: list[Tensor],
    responses: list[Tensor],
    prompt_lengths: list[int],
) -> tuple[Tensor, Tensor]:
    """Cells of whole sequences, from what the rollout engine said about their responses.

    Args, by sequence with T response tokens:
        top_ids, top_log_probs: the K most likely tokens, [T, K].
        log_probs: of the sampled tokens, [T]. responses: the sampled tokens, [T].
        prompt_lengths: how many tokens come before them, P.

    Returns:
        cell_ids (int32) and cell_log_prob (float32), nested [B, P+T, K] and [B, P+T, K+2]; the row of a token is that of
        the position that predicts it, one to the left. Prompts have rows that nothing looks at.

    Raises:
        RuntimeError: the rollout engine has not named K tokens everywhere.
    """
    unknown = sum(int((top[: len(response)] == UNKNOWN).any(-1).sum()) for top, response in zip(top_ids, responses, strict=True))
    if unknown:
        raise RuntimeError(
            f"{unknown} of {sum(map(len, responses))} sampled tokens came without their {top_ids[0].shape[-1]} most likely "
            "tokens, which method.partition = 'topk' with method.anchor = 'rollout' needs: a response that was "
            "interrupted and continued, or one of several turns, lacks some, and vLLM names no more than "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs. Set method.anchor=old, use one turn, or raise that."
        )
    ids, cells = [], []
    for top, named, sampled, response, prompt in zip(
        top_ids, top_log_probs, log_probs, responses, prompt_lengths, strict=True
    ):
        length, K = len(response), top.shape[-1]
        top, named = top[:length], named[:length].double()  # sequences that only fill up a batch are cut short
        among = (top == response[:, None]).any(-1)
        sampled = sampled[:length].double().masked_fill(among, -torch.inf)[:, None]
        # Only log-probs are known here: the rest's mass is what is left of 1, as exactly as float32 tells.
        rest = (1 - named.exp().sum(-1, keepdim=True) - sampled.exp()).clamp(min=0).log()
        at_tokens = slice(prompt - 1, prompt - 1 + length)
        ids.append(torch.arange(K, dtype=torch.int32).repeat(prompt + length, 1))
        ids[-1][at_tokens] = top.to(torch.int32)
        cells.append(torch.zeros(prompt + length, K + 2))
        cells[-1][at_tokens] = torch.cat([named, sampled, rest], -1).float()
    return tuple(torch.nested.as_nested_tensor(rows, layout=torch.jagged) for rows in (ids, cells))
