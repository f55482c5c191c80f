"""Mooncake Store over TCP: a master, a store process that owns the memory, and our client.

The client mounts no memory of its own, so that every block lies in the other process and crosses
the loopback, as it would between two machines; its transfers are zero-copy, out of and into the
caller's registered memory. Replies and placement go through the master.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Mapping
from typing import ClassVar

from bench.peers.base import Client, Peer, Server, Work

SEGMENT_MIN = 256 << 20
LOCAL_BUFFER_BYTES = 16 << 20
CLIENT_TTL_S = 3600  # nobody is dead who only waits for the next turn


def _setup(store: object, work: Work, memory_bytes: int, port: str) -> None:
    """Join the cluster. Raises: RuntimeError."""
    code = store.setup(  # type: ignore[attr-defined]
        f"127.0.0.1:{work.ports[port]}", f"http://127.0.0.1:{work.ports['metadata']}/metadata",
        memory_bytes, LOCAL_BUFFER_BYTES, "tcp", "", f"127.0.0.1:{work.ports['master']}",
    )  # fmt: skip
    if code:
        raise RuntimeError(f"setup gave {code}")


def address_of(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class MooncakeClient(Client):
    """batch_put_from and batch_get_into."""

    def __init__(self, work: Work) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._work = work
        self._region = work.open_region()
        self._store = MooncakeDistributedStore()
        _setup(self._store, work, 0, "client")
        region, size = self._region, work.block_bytes
        for view in (region.source, region.into):
            if self._store.register_buffer(address_of(view), len(view)):
                raise RuntimeError("register_buffer failed")
        self._from = [address_of(block) for block in region.blocks(region.source)]
        self._into = [address_of(block) for block in region.blocks(region.into)]
        self._sizes = [size] * work.count
        self._config = ReplicateConfig()
        self._config.replica_num = 1

    def put(self, generation: int) -> None:
        keys = self._work.keys(generation)
        codes = self._store.batch_put_from(keys, self._from, self._sizes, self._config)
        if any(codes):
            raise RuntimeError(f"batch_put_from gave {codes}")

    def get(self, generation: int) -> None:
        codes = self._store.batch_get_into(self._work.keys(generation), self._into, self._sizes)
        if any(code != self._work.block_bytes for code in codes):
            raise RuntimeError(f"batch_get_into gave {codes}")

    def forget(self, generation: int) -> None:
        for key in self._work.keys(generation):
            self._store.remove(key, True)  # by force: a get's lease is still out

    def close(self) -> None:
        self._store.close()


class Mooncake(Peer):
    name = "mooncake"
    about = "Mooncake Store over TCP, zero-copy into registered memory"
    wheels = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
    environment: ClassVar[Mapping[str, str]] = {
        "MC_FORCE_TCP": "1",
        "MC_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "2",
    }
    own_network = True  # master and transfer engine listen on 0.0.0.0 whatever --rpc_address says
    ports = ("master", "metadata", "metrics", "owner", "client", "ready")

    def servers(self, work: Work) -> list[Server]:
        ports = work.ports
        master = [
            "mooncake_master", f"--rpc_port={ports['master']}", "--rpc_address=127.0.0.1",
            f"--metrics_port={ports['metrics']}", "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={ports['metadata']}",
            "--enable_metric_reporting=false", f"--client_ttl={CLIENT_TTL_S}",
        ]  # fmt: skip
        return [
            Server("master", master, ports["master"]),
            Server("owner", self.driver("serve"), ports["ready"]),
        ]

    def serve(self, work: Work) -> None:
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        memory = max(SEGMENT_MIN, 2 * (work.generations + 2) * work.plain_bytes)
        _setup(store, work, memory, "owner")
        with socket.create_server(("127.0.0.1", work.ports["ready"])):
            while True:
                time.sleep(3600)

    def client(self, work: Work) -> Client:
        return MooncakeClient(work)


PEER = Mooncake()
