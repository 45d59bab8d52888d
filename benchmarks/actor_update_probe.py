"""In a worker of `benchmarks.actor_update`: runs the first mini-batch's update over and over, as each method in turn."""

import itertools
import json
import os
import time
from pathlib import Path

import torch
from verl.utils import tensordict_utils as tu

from trustregion import PolicyLoss
from trustregion.verl_plugin.full_vocabulary import REQUEST, FullVocabulary, read_request

REPEATS = int(os.environ["PROBE_REPEATS"])
# What the trainer asks the engine for with each method.
METHODS = {
    "grpo": {"entropy_every": 0, "at_cells": False},
    "erc_dapo": {"entropy_every": 1, "at_cells": False},
    "dppo_topk_tv": {"entropy_every": 0, "at_cells": True},
}
_train_batch = FullVocabulary.train_batch


def train_batch(self, data, loss_function):
    if PROBE.exists():
        return _train_batch(self, data, loss_function)
    policy_loss, request = loss_function._policy_loss, read_request(data)
    original, rows = policy_loss._initial, []
    for repeat, method in itertools.product(range(REPEATS + 1), METHODS):
        set_initial(policy_loss, PolicyLoss.from_preset(method))
        mini_batch = data.copy()
        tu.assign_non_tensor(mini_batch, **{REQUEST: json.dumps(request | METHODS[method] | {"values": {}})})
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from what is resident now
        resident, start = memory("VmRSS"), time.perf_counter()
        _train_batch(self, mini_batch, loss_function)
        seconds, grown = time.perf_counter() - start, memory("VmHWM") - resident
        if repeat:  # the first round warms up
            rows.append({"method": method, "seconds": seconds, "grown_mib": grown})
    lengths = data["input_ids"].offsets().diff()
    vocabulary = self.module.config.vocab_size
    PROBE.write_text(json.dumps({
        "rows": rows, "sequences": len(lengths), "tokens": int(lengths.sum()), "vocabulary": vocabulary,
        "threads": torch.get_num_threads(),
    }))  # fmt: skip
    set_initial(policy_loss, original)
    return _train_batch(self, data, loss_function)


def set_initial(policy_loss, loss: PolicyLoss):
    object.__setattr__(policy_loss, "_initial", loss)  # verl's configurations refuse plain assignment


def memory(key: str) -> float:
    """VmRSS or VmHWM of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


PROBE = Path(os.environ["PROBE_TO"])
FullVocabulary.train_batch = train_batch
