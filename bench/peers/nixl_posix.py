"""NIXL with its POSIX backend: batches of reads and writes of a file, as engines use it for flash.

One preallocated file per generation, opened with O_DIRECT; durable after one `fdatasync` per put.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.base import Client, Peer, Place, Work
from bench.peers.nixl_ucx import address_of, finish


class PosixClient(Client):
    """FILE transfers, prepared once per generation."""

    def __init__(self, work: Work) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._work = work
        self._region = region = work.open_region()
        self._agent = nixl_agent("files", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX")
        both = [
            (address_of(view), region.plain_bytes, 0, "") for view in (region.source, region.into)
        ]
        self._agent.register_memory(both, "DRAM", backends=["POSIX"])
        self._files: dict[int, int] = {}
        self._ready: dict[tuple[str, int], Any] = {}

    def put(self, generation: int) -> None:
        finish(self._agent, self._transfer("WRITE", generation))
        os.fdatasync(self._files[generation])

    def get(self, generation: int) -> None:
        finish(self._agent, self._transfer("READ", generation))

    def _file(self, generation: int) -> int:
        if generation not in self._files:
            path = Path(self._work.folder) / f"{generation}.nixl"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            length = self._work.plain_bytes
            os.posix_fallocate(fd, 0, length)
            self._agent.register_memory([(0, length, fd, "")], "FILE", backends=["POSIX"])
            self._files[generation] = fd
        return self._files[generation]

    def _transfer(self, operation: str, generation: int) -> Any:
        key = (operation, generation)
        if key not in self._ready:
            region, size = self._region, self._work.block_bytes
            fd = self._file(generation)
            side = region.source if operation == "WRITE" else region.into
            near = [(address_of(block), size, 0) for block in region.blocks(side)]
            far = [(at, size, fd) for at in range(0, region.plain_bytes, size)]
            self._ready[key] = self._agent.initialize_xfer(
                operation, self._agent.get_xfer_descs(near, "DRAM"),
                self._agent.get_xfer_descs(far, "FILE"), "files", backends=["POSIX"],
            )  # fmt: skip
        return self._ready[key]

    def close(self) -> None:
        for handle in self._ready.values():
            self._agent.release_xfer_handle(handle)
        for fd in self._files.values():
            os.close(fd)


class NixlPosix(Peer):
    name = "nixl_posix"
    about = "NIXL, POSIX backend: a file, O_DIRECT"
    place: Place = "flash"
    network = False
    wheels = ("nixl==1.5.1", "nixl-cu12==1.5.1", "numpy==2.4.6")
    environment: ClassVar[Mapping[str, str]] = {"NIXL_LOG_LEVEL": "ERROR"}

    def client(self, work: Work) -> Client:
        return PosixClient(work)


PEER = NixlPosix()
