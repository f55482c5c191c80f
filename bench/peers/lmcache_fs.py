"""LMCache's file system connector with O_DIRECT: a file per block, its own code for both ways.

The connector asks LMCache for memory to read into; here it is given the caller's, so that nothing
is copied once more. It does not flush what it wrote: its put is no durable one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from bench.peers.base import Client, Peer, Place, Work
from bench.peers.lmcache_server import keys_of

TOKENS = 16


class Slot:
    """A block of the caller's memory, with what the connector asks of a memory object."""

    def __init__(self, view: memoryview) -> None:
        self.byte_array = view

    def ref_count_down(self) -> None:
        """The memory is the caller's."""


class FsClient(Client):
    """FSConnector.put and .get, all blocks of a batch at once."""

    def __init__(self, work: Work) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

        self._work = work
        self._region = work.open_region()
        self._loop = asyncio.new_event_loop()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            extra_config={"fs_connector_use_odirect": True, "save_chunk_meta": False},
        )
        width = work.block_bytes // (2 * 2 * TOKENS)
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(1, 2, TOKENS, 1, width), chunk_size=TOKENS,
        )  # fmt: skip
        self._slots: list[Slot] = []
        memory = SimpleNamespace(config=config, metadata=metadata, allocate=self._allocate)
        self._files: Any = FSConnector(self._loop, memory, config, base_paths_str=work.folder)
        if not self._files.use_odirect:
            raise RuntimeError("its O_DIRECT is off")

    def _allocate(self, *_: object) -> Slot:
        return self._slots.pop()

    def put(self, generation: int) -> None:
        slots = [Slot(block) for block in self._region.blocks(self._region.source)]
        pairs = zip(keys_of(self._work, generation), slots, strict=True)
        self._run([self._files.put(key, slot) for key, slot in pairs])

    def get(self, generation: int) -> None:
        blocks = self._region.blocks(self._region.into)
        keys = keys_of(self._work, generation)

        async def one(key: Any, block: memoryview) -> None:
            path = self._files._get_file_path(key)
            got = await self._loop.run_in_executor(None, self._read, path, block)
            if got is None:
                raise ValueError("a block is not there")

        self._run([one(key, block) for key, block in zip(keys, blocks, strict=True)])

    def _read(self, path: Any, block: memoryview) -> Any:
        """Its own direct read, told which memory: allocation and read are in one thread there."""
        connector = _With(self._files, block)
        return type(self._files)._get_with_odirect(connector, path)

    def _run(self, tasks: list[Any]) -> None:
        async def every() -> None:
            await asyncio.gather(*tasks)

        self._loop.run_until_complete(every())

    def close(self) -> None:
        self._loop.run_until_complete(self._files.close())


class _With:
    """The connector, whose next memory is this block: reads run in several threads at once."""

    def __init__(self, connector: Any, block: memoryview) -> None:
        self._connector = connector
        self.local_cpu_backend = SimpleNamespace(allocate=lambda *_: Slot(block))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)


class LmcacheFs(Peer):
    name = "lmcache_fs"
    about = "LMCache's fs connector, O_DIRECT, a file per block, puts not flushed"
    place: Place = "flash"
    network = False
    engine = "lmcache"
    environment: ClassVar[Mapping[str, str]] = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }

    def client(self, work: Work) -> Client:
        return FsClient(work)


PEER = LmcacheFs()
