"""Weights through a file: from workers that put each tensor together to servers that have devices of their own."""

import asyncio

import pytest
import torch

pytest.importorskip("verl")

from trustregion.verl_plugin.weight_files import FileCheckpointEngine  # noqa: E402


def test_servers_get_what_the_master_has(tmp_path):
    weights = {"a": torch.randn(3, 4).T, "b": torch.arange(5, dtype=torch.bfloat16)}
    workers = [FileCheckpointEngine(is_master=rank == 0, folder=str(tmp_path)) for rank in range(2)]
    servers = [FileCheckpointEngine(folder=str(tmp_path)) for _ in range(2)]
    metadata = [engine.prepare() for engine in workers + servers]
    for engines, kwargs in zip((workers, servers), FileCheckpointEngine.build_topology(2, 2, metadata), strict=True):
        for engine, path in zip(engines, kwargs["path"], strict=True):
            engine.init_process_group(path)

    async def receive(server):
        return {name: tensor async for name, tensor in server.receive_weights()}

    async def exchange():
        receiving = [asyncio.create_task(receive(server)) for server in servers]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in receiving)  # they wait for the whole file
        for worker in workers:
            await worker.send_weights(iter(weights.items()))
        return await asyncio.gather(*receiving)

    for received in asyncio.run(exchange()):
        assert received.keys() == weights.keys()
        assert all(torch.equal(received[name], weights[name]) for name in weights)
    for engine in workers + servers:
        engine.finalize()
    assert list(tmp_path.iterdir()) == []
