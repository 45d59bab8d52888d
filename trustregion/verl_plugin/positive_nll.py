"""The negative log-likelihood of correct responses that the ERC scripts add to the loss (Klear-Reasoner, arXiv 2508.07629).

coef x mean of -ln pi over the tokens of all responses in an update whose reward is that of a correct answer. It has a
denominator of its own, so that it does not depend on micro-batches or workers, and is off unless asked for: it is worth
points by itself, and has to be equal in the arms of a comparison.
"""

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

TOKENS = "trust_region_positive_tokens"  # of an update, on all workers


def assign_token_count(data: TensorDict, correct_reward: float, group) -> None:
    """Has an update's micro-batches know how many tokens its correct responses have, over all data-parallel workers."""
    lengths = torch.stack([mask.sum() for mask in data["response_mask"].unbind()])
    count = (lengths * _is_correct(data, correct_reward)).sum()
    if group is not None:
        torch.distributed.all_reduce(count, group=group)
    tu.assign_non_tensor(data, **{TOKENS: count.item()})


def positive_nll(log_probs: Tensor, data: TensorDict, correct_reward: float) -> Tensor:
    """This micro-batch's share of the mean, scaled as verl scales losses: workers are averaged, micro-batches added up.

    Args:
        log_probs: as the engine returns them, nested over prompts and responses.
        data: the micro-batch, after `assign_token_count`.
    """
    log_prob = no_padding_2_padding(log_probs, data)
    mask = data.select("response_mask").to_padded_tensor()["response_mask"] != 0
    counted = mask & _is_correct(data, correct_reward)[:, None]
    tokens = tu.get_non_tensor_data(data, TOKENS, 0)
    # torch.where, not a product: masked positions may hold anything.
    return -torch.where(counted, log_prob, 0.0).sum() / max(tokens, 1) * data["dp_size"]


def _is_correct(data: TensorDict, correct_reward: float) -> Tensor:
    return torch.stack([scores.sum() for scores in data["rm_scores"].unbind()]) >= correct_reward
