"""Redis 7 through hiredis, the C parser of its usual Python client (see `redis`)."""

from __future__ import annotations

from bench.peers.base import Client, Work
from bench.peers.redis import RawClient, Redis, command

READ_BYTES = 1 << 20


class HiredisClient(RawClient):
    """Puts as `RawClient`; replies are parsed to bytes objects and copied to the caller."""

    def __init__(self, work: Work) -> None:
        import hiredis

        super().__init__(work)
        self._reader = hiredis.Reader()
        self._read = bytearray(READ_BYTES)

    def get(self, generation: int) -> None:
        keys = self._work.keys(generation)
        self.sock.sendall(b"".join(command(b"GET", key.encode()) for key in keys))
        for block in self._region.blocks(self._region.into):
            block[:] = self._reply()

    def _reply(self) -> bytes:
        reply = self._reader.gets()
        while reply is False:
            got = self.sock.recv_into(self._read)
            if not got:
                raise ConnectionError("redis closed the connection")
            self._reader.feed(self._read, 0, got)
            reply = self._reader.gets()
        if not isinstance(reply, bytes):
            raise ValueError(f"redis answered {reply!r:.80}")
        return reply


class Hiredis(Redis):
    name = "hiredis"
    about = "Redis 7 over TCP, hiredis"
    wheels = ("hiredis==3.5.0",)

    def client(self, work: Work) -> Client:
        return HiredisClient(work)


PEER = Hiredis()
