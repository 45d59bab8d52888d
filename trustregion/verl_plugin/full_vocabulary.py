"""Statistics over the whole vocabulary for every token, from the logits that verl's engine has in its hands anyway.

verl passes a policy loss nothing but the sampled token's log-probs. ERC needs the entropy of every token, top-K DPPO the
masses of the anchor's K most likely tokens. `FullVocabulary`, mixed into verl's FSDP engine, computes them along with
the log-probs in one `token_stats`: in the anchor's pass, whose results verl's queue carries to the update together with
the tokens; and in the update's pass, at the cells that came with the batch.
"""

import json

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size

from trustregion import token_stats
from trustregion.verl_plugin.positive_nll import assign_token_count
from trustregion.verl_plugin.token_records import CHOSEN, SEQUENCE

# What a pass is asked for, sent along with the batch as JSON: in the anchor's {"entropy": bool, "topk": K}; in the
# updates' {"entropy_every": k, "at_cells": bool, "first_update": how many updates the policy has had before,
# "correct_reward": the reward of correct responses, where their likelihood is asked for, "values": those of scheduled
# fields, "token_records": in steps that are recorded, the keyword arguments of `TokenRecorder.begin`}. JSON, because a
# dict would become tensors on the way.
REQUEST = "trust_region_request"
# Per token, nested like input_ids and shifted like log_probs: [B, T], [B, T, K] and [B, T, K+2].
ENTROPY, CELL_IDS, CELLS = "trust_region_entropy", "trust_region_cell_ids", "trust_region_cell_log_prob"
# Which update of the policy a micro-batch belongs to, from 0.
UPDATE = "trust_region_update"


class FullVocabulary:
    """Mixin in front of verl's `FSDPEngineWithLMHead`."""

    _first_update, _updates = -1, 0

    def train_batch(self, data: TensorDict, loss_function):
        first = read_request(data).get("first_update", 0)
        if first != self._first_update:
            self._first_update, self._updates = first, 0
        tu.assign_non_tensor(data, **{UPDATE: first + self._updates})
        self._updates += 1
        if (correct_reward := read_request(data).get("correct_reward")) is not None:
            assign_token_count(data, correct_reward, self.get_data_parallel_group())
        asked = read_request(data).get("token_records")
        recorder = loss_function.recorder if asked else None
        if recorder:
            responses, masks = data["responses"].unbind(), data["response_mask"].unbind()
            data[CHOSEN] = recorder.begin(self._updates - 1, tu.get(data, SEQUENCE), responses, masks, **asked)
        output = super().train_batch(data, loss_function)
        if recorder:
            recorder.end()
        return output

    def prepare_model_outputs(self, output, output_args, micro_batch: TensorDict, logits_processor_func):
        request = read_request(micro_batch)
        every, topk, at_cells = (request.get(key, 0) for key in ("entropy_every", "topk", "at_cells"))
        entropy_due = every > 0 and tu.get_non_tensor_data(micro_batch, UPDATE, 0) % every == 0
        if not (request.get("entropy") or entropy_due or topk or at_cells):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        _refuse(micro_batch)

        logits, temperature, pad_size = _packed_logits(output, output_args, micro_batch)
        stats = token_stats(
            logits,
            output_args["input_ids_rmpad_rolled"],
            temperature,
            topk=topk,
            cell_ids=self._slice(micro_batch[CELL_IDS].values(), pad_size) if at_cells else None,
            inplace_backward=True,  # nobody else reads the logits, as verl's own log-probs rely on too
        )
        results = {"log_probs": stats.log_prob}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            results["entropy"] = stats.entropy  # verl's own key: differentiable, for its entropy bonus
        if entropy_due:
            results[ENTROPY] = stats.entropy.detach()
        if topk:
            results[CELL_IDS] = stats.cell_ids
        if stats.cell_log_prob is not None:
            results[CELLS] = stats.cell_log_prob.detach()
        offsets = micro_batch["input_ids"].offsets()
        return {
            name: torch.nested.nested_tensor_from_jagged(self._gather_and_unpad_packed(x, pad_size), offsets)
            for name, x in results.items()
        }

    def _slice(self, packed: Tensor, pad_size: int) -> Tensor:
        """This worker's part of what the batch has for the whole packed sequence, [tokens, K], as of the tokens."""
        if pad_size:
            padding = torch.arange(packed.shape[-1], dtype=packed.dtype, device=packed.device)
            packed = torch.cat([packed, padding.expand(pad_size, -1)])
        if not self.use_ulysses_sp:
            return packed
        return packed.chunk(get_ulysses_sequence_parallel_world_size())[get_ulysses_sequence_parallel_rank()]


def read_request(data: TensorDict) -> dict:
    """What the trainer has sent along with a (micro-)batch; empty where it has sent nothing."""
    return json.loads(tu.get_non_tensor_data(data, REQUEST, "{}"))


def _packed_logits(output, output_args, micro_batch) -> tuple[Tensor, Tensor | float, int]:
    """Logits [tokens, V] of all sequences one after the other, their temperatures, and how many at the end are padding."""
    logits = output.logits
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    if tu.get_non_tensor_data(micro_batch, "use_remove_padding", True):
        logits, temperature, pad_size = logits.squeeze(0), output_args["temperature_rmpad"], output_args["pad_size"]
    else:
        lengths = micro_batch["input_ids"].offsets().diff()
        logits = torch.cat([rows[:length] for rows, length in zip(logits, lengths.tolist(), strict=True)])
        temperature, pad_size = output_args["temperature"].repeat_interleave(lengths), 0
    return logits, 1.0 if output_args.get("temperature_is_one") else temperature, pad_size


def _refuse(micro_batch):
    for key, remedy in {
        "use_fused_kernels": "actor_rollout_ref.model.use_fused_kernels=False: fused kernels never make the logits",
        "distillation_use_topk": "a method without entropy band and top-K: distillation takes the logits for itself",
        "calculate_sum_pi_squared": "actor_rollout_ref.actor.calculate_sum_pi_squared=False",
    }.items():
        if tu.get_non_tensor_data(micro_batch, key, False):
            raise NotImplementedError(f"{key} = True with a method that needs the whole vocabulary. Set {remedy}.")
