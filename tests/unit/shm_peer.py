"""A shm host made of a plain socket, and a daemon's endpoint for it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import leaks

from entresol_proto import limits
from entresol_proto.fabric import shmlink
from entresol_proto.fabric.mapped import MappedBudget
from entresol_proto.fabric.memory import F_SEAL_FUTURE_WRITE, F_SEAL_GROW, F_SEAL_SHRINK
from entresol_proto.fabric.shm import ShmFabricServer, _Params
from entresol_proto.fabric.shmendpoint import ShmEndpoint
from entresol_proto.fabric.shmlink import Kind, Message
from entresol_proto.status import Status

MIB = limits.MIB


def soon(seconds: float = 5.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def run(runner: object, scenario: object) -> None:
    assert isinstance(runner, asyncio.Runner)
    runner.run(scenario)  # type: ignore[arg-type]


class RawPeer:
    """A host made of a plain socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def say(self, packet: bytes, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([packet], rights)

    def expose(self, rkey: int, length: int, *fds: int) -> None:
        self.say(Message(Kind.EXPOSE, rkey, length_bytes=length).encode(), *fds)

    async def hear(self) -> Message:
        loop = asyncio.get_running_loop()
        packet = await asyncio.wait_for(loop.sock_recv(self.sock, 100), 5)
        return shmlink.parse(packet, [])

    async def cut_off(self) -> None:
        """Wait until the daemon ends the connection."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(loop.sock_recv(self.sock, 100), 5):
                pass


@contextlib.asynccontextmanager
async def raw_session(
    folder: Path, *, mapped_bytes_max: int = 64 * MIB
) -> AsyncIterator[tuple[ShmEndpoint, RawPeer]]:
    """A daemon endpoint whose peer is raw. Fails for anything that leaks."""
    async with raw_server(folder, mapped_bytes_max=mapped_bytes_max) as join:
        yield await join("")


@contextlib.asynccontextmanager
async def raw_server(
    folder: Path, *, mapped_bytes_max: int = 64 * MIB, budget: MappedBudget | None = None
) -> AsyncIterator[Callable[[str], Awaitable[tuple[ShmEndpoint, RawPeer]]]]:
    """A daemon's server and who makes sessions of a tenant at it. Fails for anything that leaks."""
    before = leaks.snapshot()
    server = ShmFabricServer(folder / "run", mapped_bytes_max=mapped_bytes_max, budget=budget)
    await server.start()
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:

        async def join(tenant: str) -> tuple[ShmEndpoint, RawPeer]:
            offer = server.offer(peer=tenant)
            params = _Params.parse(offer.params)
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            await loop.sock_connect(sock, params.path)
            sock.send(shmlink.hello(params.ticket))
            assert await asyncio.wait_for(loop.sock_recv(sock, 100), 5) == shmlink.welcome()
            return await server.accept(offer, b"", soon()), RawPeer(sock)

        yield join
        await server.close()
    await leaks.settle(before, ignore_threads=["asyncio_"])
    leaks.assert_no_leaks(before, ignore_threads=["asyncio_"])


SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE


def memfd(length: int, seals: int = SEALS, *, whole: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    if whole:
        os.posix_fallocate(fd, 0, max(1, length))
    os.pwrite(fd, b"content", 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


async def mapped(peer: RawPeer, rkey: int, length: int) -> None:
    fd = memfd(length)
    peer.expose(rkey, length, fd)
    os.close(fd)
    assert (await peer.hear()).status == Status.OK
