"""What a client is given of the world beside its event loop: threads, data paths, names, who it is.

Invariant: the client reaches fabrics and threads only through these parts, so a program that brings
its own (no threads, another data path) runs the same code as everybody else.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from entresol_client.resolving import addresses
from entresol_client.workers import ThreadWorkers, Workers
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import ConnectOptions, Endpoint, Offer

if TYPE_CHECKING:
    from entresol_client.handshake import OpenSession


class ConnectFabric(Protocol):
    """Takes an offer of the daemon; see `registry.connect`, which is the default."""

    async def __call__(
        self, offer: Offer, deadline_ns: int, *, options: ConnectOptions
    ) -> tuple[Endpoint, bytes]: ...


@functools.cache
def this_host() -> bytes:
    """This process's place, told in HELLO and compared with the daemon's: one value per process."""
    return registry.same_host_id()


def _this_process() -> str:
    return f"entresol-py/{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """See the module. The defaults are what a process on an ordinary host has."""

    make_workers: Callable[[int], Workers] = ThreadWorkers  # takes the number of threads
    connect_fabric: ConnectFabric = registry.connect
    resolve: Callable[[str, int], Awaitable[list[str]]] = addresses  # of a host, for a port
    host_id: Callable[[], bytes] = this_host
    process_name: Callable[[], str] = _this_process  # told in HELLO, for people
    on_session: Callable[[str, OpenSession], None] | None = None  # told of every one: shard's name


ORDINARY = Surroundings()
