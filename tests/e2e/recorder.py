"""Writes down what a worker's loss sees, what gradient it sends back, and the weights before some updates.

Workers import this module (`actor_rollout_ref.model.external_lib=recorder`). In the folder RECORD_TO: one file for each
micro-batch that worker r computes in update n, `update-<n>-<r>-<i>.pt`; and `weights-<n>.pt`, the weights that update n
starts from, for the updates that RECORD_WEIGHTS lists.
"""

import os
from pathlib import Path

import torch

from trustregion import PolicyLoss
from trustregion.verl_plugin.full_vocabulary import CELL_IDS, CELLS, FullVocabulary
from trustregion.verl_plugin.worker_loss import WorkerLoss

FOLDER = Path(os.environ["RECORD_TO"])
WEIGHTS_BEFORE = {int(n) for n in os.environ.get("RECORD_WEIGHTS", "").split()}
_now = {"update": -1, "micro_batch": 0}
_sequences: dict = {}

_train_batch, _worker_loss, _policy_loss = FullVocabulary.train_batch, WorkerLoss.__call__, PolicyLoss.__call__


def train_batch(self, data, loss_function):
    _now.update(update=_now["update"] + 1, micro_batch=0)
    if _now["update"] in WEIGHTS_BEFORE:
        weights = {name: _whole(value).clone() for name, value in self.module.state_dict().items()}
        torch.save(weights, FOLDER / f"weights-{_now['update']}.pt")
    return _train_batch(self, data, loss_function)


def worker_loss(self, model_output, data, dp_group=None):
    _sequences.update(
        input_ids=[ids.clone() for ids in data["input_ids"].unbind()],
        response_lengths=[len(ids) for ids in data["responses"].unbind()],
    )
    if CELLS in data:  # by position: the row of a token is that of the token before it
        _sequences.update(
            cell_ids=[ids.clone() for ids in data[CELL_IDS].unbind()],
            cells=[masses.clone() for masses in data[CELLS].unbind()],
        )
    return _worker_loss(self, model_output, data, dp_group)


def policy_loss(self, batch):
    out = _policy_loss(self, batch)
    record = {
        **_sequences,
        **{name: value.detach().clone() for name, value in vars(batch).items() if torch.is_tensor(value)},
        "active": out.active.clone(),
        "token_loss": out.token_loss.detach().clone(),
    }
    path = FOLDER / f"update-{_now['update']}-{torch.distributed.get_rank()}-{_now['micro_batch']}.pt"
    _now["micro_batch"] += 1
    batch.log_prob.register_hook(lambda gradient: torch.save({**record, "gradient": gradient.clone()}, path))
    return out


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


FullVocabulary.train_batch, WorkerLoss.__call__, PolicyLoss.__call__ = train_batch, worker_loss, policy_loss
