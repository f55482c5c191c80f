"""NIXL with its UCX backend over TCP: one-sided READ and WRITE between the memory of two agents.

There is no store behind it: the other process registers memory and says where it is. `UCX_TLS=tcp`,
because two processes of one machine would otherwise copy through shared memory and no connection
would be measured. A transfer is prepared once per generation and posted again for each get.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import socket
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from bench.peers.base import Client, Peer, Server, Work

ANSWER_BYTES_MAX = 1 << 20


def address_of(view: Any) -> int:
    """Where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def finish(agent: Any, handle: Any) -> None:
    """Post a prepared transfer and wait for its end. Raises: RuntimeError."""
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"transfer ended as {state}")


class UcxClient(Client):
    """Reads and writes the other agent's memory."""

    def __init__(self, work: Work) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._work = work
        self._region = region = work.open_region()
        self._agent = nixl_agent("client", nixl_agent_config(backends=["UCX"]))
        both = [
            (address_of(view), region.plain_bytes, 0, "") for view in (region.source, region.into)
        ]
        self._agent.register_memory(both, "DRAM", backends=["UCX"])
        with socket.create_connection(("127.0.0.1", work.ports["nixl"])) as sock:
            told = sock.makefile("rb").read(ANSWER_BYTES_MAX)
        offer = json.loads(told)
        self._far = int(offer["address"])
        self._peer = self._agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        self._ready: dict[tuple[str, int], Any] = {}

    def put(self, generation: int) -> None:
        finish(self._agent, self._transfer("WRITE", generation))

    def get(self, generation: int) -> None:
        finish(self._agent, self._transfer("READ", generation))

    def _transfer(self, operation: str, generation: int) -> Any:
        which = generation % self._work.generations
        key = (operation, which)
        if key not in self._ready:
            region, size = self._region, self._work.block_bytes
            side = region.source if operation == "WRITE" else region.into
            near = [(address_of(block), size, 0) for block in region.blocks(side)]
            start = self._far + which * region.plain_bytes
            far = [(start + at, size, 0) for at in range(0, region.plain_bytes, size)]
            self._ready[key] = self._agent.initialize_xfer(
                operation, self._agent.get_xfer_descs(near, "DRAM"),
                self._agent.get_xfer_descs(far, "DRAM"), self._peer, backends=["UCX"],
            )  # fmt: skip
        return self._ready[key]

    def close(self) -> None:
        for handle in self._ready.values():
            self._agent.release_xfer_handle(handle)
        self._agent.remove_remote_agent(self._peer)


class NixlUcx(Peer):
    name = "nixl_ucx"
    about = "NIXL, UCX backend over TCP: bare one-sided transfers, no store"
    wheels = ("nixl==1.5.1", "nixl-cu12==1.5.1", "numpy==2.4.6")
    environment: ClassVar[Mapping[str, str]] = {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "NIXL_LOG_LEVEL": "ERROR",
    }
    ports = ("nixl",)

    def servers(self, work: Work) -> list[Server]:
        return [Server("nixl", self.driver("serve"), work.ports["nixl"])]

    def serve(self, work: Work) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent("server", nixl_agent_config(backends=["UCX"]))
        length = work.generations * work.plain_bytes
        memory = mmap.mmap(-1, length)
        memory[:] = bytes(length)
        address = address_of(memory)
        agent.register_memory([(address, length, 0, "")], "DRAM", backends=["UCX"])
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        offer = json.dumps({"address": address, "metadata": metadata}).encode()
        with socket.create_server(("127.0.0.1", work.ports["nixl"])) as listener:
            while True:  # the progress thread of the agent does the rest
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(offer)
                time.sleep(0)

    def client(self, work: Work) -> Client:
        return UcxClient(work)


PEER = NixlUcx()
