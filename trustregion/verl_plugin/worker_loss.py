"""What surrounds verl's policy loss in a worker: the step's values of scheduled fields, and exact metrics."""

import json

from verl.utils import tensordict_utils as tu

from trustregion.verl_plugin.config import TrustRegionLossConfig
from trustregion.verl_plugin.metrics import reduce_exactly

# The trainer sends the values along with the batch, as JSON: a dict would become tensors on the way.
VALUES = "trust_region_values"


class WorkerLoss:
    """verl's loss function of a worker, `loss_function`, whose policy loss is configured by `policy_loss`."""

    def __init__(self, loss_function, policy_loss: TrustRegionLossConfig):
        self._loss_function, self._policy_loss = loss_function, policy_loss

    def __call__(self, model_output, data, dp_group=None):
        self._policy_loss.set_values(json.loads(tu.get_non_tensor_data(data, VALUES, "{}")))
        loss, metrics = self._loss_function(model_output=model_output, data=data, dp_group=dp_group)
        reduce_exactly(metrics)
        return loss, metrics
