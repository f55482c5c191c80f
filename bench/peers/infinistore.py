"""InfiniStore over TCP, if its server starts: it registers its memory with a verbs device first.

That registration is not optional, even for clients that come by TCP, so that on a machine without
one the server ends and the peer is not run. Its client hands out arrays of its own; they are copied
into the caller's memory.
"""

from __future__ import annotations

import asyncio

from bench.peers.base import Client, Peer, Server, Work
from bench.peers.nixl_ucx import address_of

GIB = 1 << 30


class InfinistoreClient(Client):
    """tcp_write_cache and tcp_read_cache, a call per block: there is no batch over TCP."""

    def __init__(self, work: Work) -> None:
        import infinistore

        self._work = work
        self._region = work.open_region()
        config = infinistore.ClientConfig(
            host_addr="127.0.0.1", service_port=work.ports["service"], log_level="error",
            connection_type=infinistore.TYPE_TCP,
        )  # fmt: skip
        self._store = infinistore.InfinityConnection(config)
        self._store.connect()

    def put(self, generation: int) -> None:
        keys = self._work.keys(generation)
        for key, block in zip(keys, self._region.blocks(self._region.source), strict=True):
            self._store.tcp_write_cache(key, address_of(block), self._work.block_bytes)

    def get(self, generation: int) -> None:
        keys = self._work.keys(generation)
        for key, block in zip(keys, self._region.blocks(self._region.into), strict=True):
            block[:] = memoryview(self._store.tcp_read_cache(key)).cast("B")

    def forget(self, generation: int) -> None:
        self._store.delete_keys(self._work.keys(generation))

    def close(self) -> None:
        self._store.close()


class Infinistore(Peer):
    name = "infinistore"
    about = "InfiniStore over TCP"
    wheels = ("infinistore==0.2.35", "numpy==2.4.6", "uvloop==0.23.0")
    ports = ("service", "manage")

    def servers(self, work: Work) -> list[Server]:
        return [Server("infinistore", self.driver("serve"), work.ports["service"])]

    def serve(self, work: Work) -> None:
        import infinistore
        import uvloop

        config = infinistore.ServerConfig(
            service_port=work.ports["service"], manage_port=work.ports["manage"],
            log_level="error", dev_name="", link_type="Ethernet",
            prealloc_size=1 + 4 * work.generations * work.plain_bytes // GIB,
        )  # fmt: skip
        config.verify()
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        infinistore.register_server(loop, config)
        loop.run_forever()

    def client(self, work: Work) -> Client:
        return InfinistoreClient(work)


PEER = Infinistore()
