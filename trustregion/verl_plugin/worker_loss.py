"""What surrounds verl's policy loss in a worker: the step's values of scheduled fields, statistics of the whole
vocabulary where the method needs them, exact metrics, and, where they are asked for, the likelihood of correct responses
and token records."""

from functools import partial

from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from trustregion.verl_plugin.config import TrustRegionLossConfig
from trustregion.verl_plugin.full_vocabulary import CELLS, ENTROPY, UPDATE, read_request
from trustregion.verl_plugin.metrics import reduce_exactly
from trustregion.verl_plugin.positive_nll import positive_nll
from trustregion.verl_plugin.token_records import CHOSEN, TokenRecorder


class WorkerLoss:
    """verl's loss function of a worker, `loss_function`, whose policy loss is configured by `policy_loss`.

    `recorder`: None in workers that have others write what they all see.
    """

    def __init__(self, loss_function, policy_loss: TrustRegionLossConfig, recorder: TokenRecorder | None = None):
        self._loss_function, self._policy_loss, self.recorder = loss_function, policy_loss, recorder

    def __call__(self, model_output, data, dp_group=None):
        self._policy_loss.set_values(read_request(data).get("values", {}))
        self._policy_loss.parts = _parts(model_output, data)  # verl hands a policy loss nothing but log-probs
        self._policy_loss.observe = partial(self.recorder.record, data[CHOSEN]) if CHOSEN in data else None
        loss, metrics = self._loss_function(model_output=model_output, data=data, dp_group=dp_group)
        reduce_exactly(metrics)
        if self._policy_loss.positive_nll_coef:
            nll = positive_nll(model_output["log_probs"], data, self._policy_loss.correct_reward)
            loss = loss + self._policy_loss.positive_nll_coef * nll
            metrics["positive_nll"] = Metric(value=nll.detach(), aggregation=AggregationType.SUM)
        return loss, metrics


def _parts(model_output: dict[str, Tensor], data: TensorDict) -> dict:
    """What a TokenBatch needs beyond log-probs, [B, T] and [B, T, K+2], from this pass's results and the anchor's."""
    parts = {"update": tu.get_non_tensor_data(data, UPDATE, 0)}
    if ENTROPY in model_output:
        parts["entropy"] = no_padding_2_padding(model_output[ENTROPY], data)
        parts["entropy_old"] = data.select("entropy").to_padded_tensor()["entropy"]
    if CELLS in model_output:
        parts["cell_log_prob"] = no_padding_2_padding(model_output[CELLS], data)
        parts["cell_log_prob_old"] = no_padding_2_padding(data[CELLS], data)
    return parts
