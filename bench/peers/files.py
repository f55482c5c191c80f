"""A plain file: what a host that keeps its KV on its own flash does, without any store at all.

One preallocated file per generation, O_DIRECT, a thread per outstanding block; durable after one
`fdatasync` per put. Straight from and into the caller's memory, unsealed and unverified.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.peers.base import Client, Peer, Place, Work

THREADS = 8


class FileClient(Client):
    """preadv and pwritev from a pool of threads."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._region = work.open_region()
        self._pool = ThreadPoolExecutor(THREADS)
        self._files: dict[int, int] = {}

    def put(self, generation: int) -> None:
        fd = self._files.get(generation)
        if fd is None:
            path = Path(self._work.folder) / f"{generation}.data"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, self._work.plain_bytes)
            self._files[generation] = fd
        blocks = list(enumerate(self._region.blocks(self._region.source)))
        size = self._work.block_bytes
        done = self._pool.map(lambda one: os.pwritev(fd, [one[1]], one[0] * size), blocks)
        assert all(count == size for count in done), "short write"
        os.fdatasync(fd)

    def get(self, generation: int) -> None:
        fd = self._files[generation]
        blocks = list(enumerate(self._region.blocks(self._region.into)))
        size = self._work.block_bytes
        done = self._pool.map(lambda one: os.preadv(fd, [one[1]], one[0] * size), blocks)
        assert all(count == size for count in done), "short read"

    def close(self) -> None:
        self._pool.shutdown()
        for fd in self._files.values():
            os.close(fd)


class Files(Peer):
    name = "files"
    about = "a plain file, O_DIRECT, 8 threads"
    place: Place = "flash"
    network = False

    def client(self, work: Work) -> Client:
        return FileClient(work)


PEER = Files()
