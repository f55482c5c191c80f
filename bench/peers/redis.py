"""Redis 7, without persistence: pipelined GET and SET in its own protocol.

Two clients of the same server: `redis` reads replies straight into the caller's memory, which no
published client does; `hiredis` is the C parser of the usual client, whose bytes objects are copied
into the caller's memory.
"""

from __future__ import annotations

import socket

from bench.peers.base import Client, Peer, Server, Work


def command(*words: bytes) -> bytes:
    """A command in RESP (redis.io/docs/reference/protocol-spec)."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class RawClient(Client):
    """Its protocol over one connection, replies received in place."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._region = work.open_region()
        self.sock = socket.create_connection(("127.0.0.1", work.ports["redis"]))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line = bytearray(16)

    def put(self, generation: int) -> None:
        size = self._work.block_bytes
        keys = self._work.keys(generation)
        for key, block in zip(keys, self._region.blocks(self._region.source), strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key.encode(), size)
            self.sock.sendall(head)
            self.sock.sendall(block)
            self.sock.sendall(b"\r\n")
        self._receive(memoryview(bytearray(5 * len(keys))), b"+OK\r\n" * len(keys))

    def get(self, generation: int) -> None:
        keys = self._work.keys(generation)
        self.sock.sendall(b"".join(command(b"GET", key.encode()) for key in keys))
        head = b"$%d\r\n" % self._work.block_bytes
        line, end = memoryview(self._line)[: len(head)], memoryview(bytearray(2))
        for block in self._region.blocks(self._region.into):
            self._receive(line, head)
            self._receive(block)
            self._receive(end, b"\r\n")

    def close(self) -> None:
        self.sock.close()

    def _receive(self, view: memoryview, expected: bytes | None = None) -> None:
        at = 0
        while at < len(view):
            got = self.sock.recv_into(view[at:])
            if not got:
                raise ConnectionError("redis closed the connection")
            at += got
        if expected is not None and bytes(view) != expected:
            replies = bytes(view).split(b"\r\n")
            other = next((one for one in replies if one != b"+OK"), b"")
            raise ValueError(f"redis answered {other[:60]!r}")


class Redis(Peer):
    name = "redis"
    about = "Redis 7 over TCP, its raw protocol received in place"
    debs = ("redis-server",)
    ports = ("redis",)

    def servers(self, work: Work) -> list[Server]:
        port = work.ports["redis"]
        settings = [
            "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no",
            # All sizes of blocks are kept, and its allocator rounds up.
            "--maxmemory", str(10 * work.generations * work.plain_bytes), "--dir", work.folder,
        ]  # fmt: skip
        return [Server("redis-server", ["redis-server", *settings], port)]

    def client(self, work: Work) -> Client:
        return RawClient(work)


PEER = Redis()
