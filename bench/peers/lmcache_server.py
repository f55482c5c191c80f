"""LMCache's own server (`lm://`): its process, its messages, replies received in place.

The messages are built and read by LMCache's classes; its connector would receive into memory of its
own pool, which costs a copy more. One connection, a block at a time, because the protocol names no
request that a reply belongs to and the connector waits for each.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from bench.peers.base import Client, Peer, Server, Work

MODEL = "bench"


def keys_of(work: Work, generation: int) -> list[Any]:
    """LMCache's keys, one for each block."""
    import torch
    from lmcache.utils import CacheEngineKey

    first = generation * work.count
    return [
        CacheEngineKey(MODEL, 1, 0, first + block, torch.bfloat16) for block in range(work.count)
    ]


class LmClient(Client):
    """PUT and GET of the lm:// protocol."""

    def __init__(self, work: Work) -> None:
        import torch
        from lmcache.v1 import protocol
        from lmcache.v1.memory_management import MemoryFormat

        self._work = work
        self._region = work.open_region()
        self._protocol = protocol
        self._format = MemoryFormat.KV_2LTD
        self._dtype = torch.bfloat16
        self._shape = torch.Size([2, 1, work.block_bytes // 4096, 1024])
        self._sock = socket.create_connection(("127.0.0.1", work.ports["lm"]))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._meta = memoryview(bytearray(protocol.ServerMetaMessage.packlength()))

    def put(self, generation: int) -> None:
        blocks = self._region.blocks(self._region.source)
        for key, block in zip(keys_of(self._work, generation), blocks, strict=True):
            self._ask(self._protocol.ClientCommand.PUT, key, len(block))
            self._sock.sendall(block)
        # It acknowledges no put; what it answers next, it answers after them.
        self._ask(self._protocol.ClientCommand.EXIST, keys_of(self._work, generation)[-1], 0)
        self._answer()

    def get(self, generation: int) -> None:
        blocks = self._region.blocks(self._region.into)
        for key, block in zip(keys_of(self._work, generation), blocks, strict=True):
            self._ask(self._protocol.ClientCommand.GET, key, 0)
            if self._answer().length != len(block):
                raise ValueError("a block of another length")
            self._receive(block)

    def close(self) -> None:
        self._sock.close()

    def _ask(self, word: Any, key: Any, length: int) -> None:
        message = self._protocol.ClientMetaMessage(
            word, key, length, self._format, self._dtype, self._shape
        )
        self._sock.sendall(message.serialize())

    def _answer(self) -> Any:
        self._receive(self._meta)
        meta = self._protocol.ServerMetaMessage.deserialize(bytes(self._meta))
        if meta.code != self._protocol.ServerReturnCode.SUCCESS:
            raise ValueError(f"the server answered {meta.code}")
        return meta

    def _receive(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            got = self._sock.recv_into(view[at:])
            if not got:
                raise ConnectionError("the server closed the connection")
            at += got


class LmcacheServer(Peer):
    name = "lmcache_server"
    about = "LMCache's server, lm://, received in place"
    engine = "lmcache"
    environment: ClassVar[Mapping[str, str]] = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }
    ports = ("lm",)

    def servers(self, work: Work) -> list[Server]:
        port = work.ports["lm"]
        command = ["python", "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
        return [Server("lmcache-server", command, port)]

    def client(self, work: Work) -> Client:
        return LmClient(work)


PEER = LmcacheServer()
