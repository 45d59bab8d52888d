"""Weights for rollout servers that have devices of their own, through a file: for machines without a GPU.

verl's own ways there need NCCL or RDMA. Chosen by `rollout.checkpoint_engine.backend=file`; verl imports this module where
`rollout.checkpoint_engine.custom_backend_module` names it.
"""

import asyncio
import os
import tempfile
import uuid
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

POLL_SECONDS = 0.02


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """Args, by verl and by `rollout.checkpoint_engine.engine_kwargs.file`:
    bucket_size: of no use here.
    is_master: this worker writes the file.
    folder: a place that the workers and all servers share; the run's temporary folder unless given.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False, folder: str | None = None):
        self._is_master = is_master
        self._folder = Path(folder or tempfile.gettempdir())

    def prepare(self) -> dict:
        return {"path": str(self._folder / f"weights-{uuid.uuid4().hex}.safetensors")} if self._is_master else {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        path = next(entry["path"] for entry in metadata if entry)
        return {"path": [path] * actor_wg_world_size}, {"path": [path] * rollout_world_size}

    def init_process_group(self, path: str):
        self._path = Path(path)

    async def send_weights(self, weights, global_steps=None):
        tensors = {}
        for name, tensor in weights:  # by every worker, as each tensor is put together from the parts of all
            if self._is_master:
                tensors[name] = tensor.detach().contiguous().clone()
        if self._is_master:
            unfinished = self._path.with_suffix(".unfinished")
            save_file(tensors, unfinished)
            os.replace(unfinished, self._path)

    async def receive_weights(self, global_steps=None):
        while not self._path.exists():
            await asyncio.sleep(POLL_SECONDS)
        with safe_open(self._path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)

    def finalize(self):
        if self._is_master:
            self._path.unlink()
