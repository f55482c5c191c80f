"""Verbs when the other end or the wire fails: bounded time, no wrong byte, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fabrics import FABRICS, filled, join, serving, session, soon

from entresol_proto import limits
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import (
    ConnectOptions,
    Endpoint,
    Exposure,
    FabricKind,
    Offer,
    ReadOp,
    VerbsSettings,
)
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.verbs import VerbsFabricServer
from entresol_proto.fabric.verbs_device import find_ports
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.status import FabricError, Status
from tests.rdma import wire
from tests.rdma.evidence import Trial, trying

pytestmark = pytest.mark.timeout(300)

VERBS = FABRICS["verbs"]
MIB = limits.MIB
_PEER = Path(__file__).with_name("remote_peer.py")
# A queue pair's own patience, and room for an emulated machine that has other things to do.
GIVES_UP_S = 15.0
DRAIN_S = limits.VERBS_DRAIN_NS / 1e9


def devices() -> list[str]:
    return os.environ["ENTRESOL_RDMA_DEVICE"].split(",")


@pytest.fixture
def pair_of_devices() -> None:
    """There is no wire between the ends of a loopback."""
    if len(devices()) < 2:
        pytest.skip("not run here: one device only (the suites run with --net pair)")


def batch(exposure: Exposure, into: memoryview, size: int = MIB) -> list[ReadOp]:
    """Read an exposure piece by piece, over and over until `into` is full."""
    ops = []
    for at in range(0, len(into), size):
        offset = at % exposure.length_bytes
        ops.append(ReadOp(exposure.span(offset, size), into[at : at + size]))
    return ops


class Peer:
    """`remote_peer.py` and our session with it."""

    def __init__(self, child: asyncio.subprocess.Process, host: Endpoint) -> None:
        self.child = child
        self.host = host
        self.exposure = Exposure(0, 0, 0)
        self.refused = ""

    async def line(self) -> str:
        assert self.child.stdout is not None
        async with asyncio.timeout(60):
            return (await self.child.stdout.readline()).decode().strip()

    def tell(self, word: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{word}\n".encode())


@contextlib.asynccontextmanager
async def peer(size: int, *, memlock: int | None = None) -> AsyncIterator[Peer]:
    """A daemon's end in a process of its own, exposing `size` bytes of "k"."""
    words = [sys.executable, str(_PEER), devices()[-1], str(size)]
    child = await asyncio.create_subprocess_exec(
        *words, *([] if memlock is None else [str(memlock)]),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    host: Endpoint | None = None
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        async with asyncio.timeout(60):
            params = bytes.fromhex((await child.stdout.readline()).decode())
        options = ConnectOptions(verbs=VerbsSettings(devices=(devices()[0],)))
        host, reply = await registry.connect(
            Offer(FabricKind.VERBS, params), soon(30), options=options
        )
        found = Peer(child, host)
        found.tell(reply.hex())
        first = await found.line()
        if first.startswith("refused"):
            found.refused, size = first, 4096
            first = await found.line()
        rkey, address = map(int, first.split())
        found.exposure = Exposure(rkey, address, size)
        yield found
    finally:
        if host is not None:
            await host.close()
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
            child.kill()
        await child.wait()


async def read_until_it_fails(
    host: Endpoint, ops: list[ReadOp], content: bytes, trial: Trial
) -> list[Status]:
    """Whatever was read well has the right content."""
    while True:
        statuses = await host.read(ops, soon(60))
        for op, status in zip(ops, statuses, strict=True):
            if status is Status.OK:
                trial.same(op.into, content[: len(op.into)])
            op.into[:] = bytes(len(op.into))
        if any(statuses):
            return statuses


async def test_a_killed_peer_ends_the_reads(tmp_path: Path) -> None:
    async with peer(16 * MIB) as other:
        with trying("peer killed") as trial:
            ops = batch(other.exposure, memoryview(bytearray(16 * MIB)))
            reading = asyncio.ensure_future(read_until_it_fails(other.host, ops, b"k" * MIB, trial))
            await asyncio.sleep(0.3)
            assert not reading.done()
            other.child.kill()
            with trial.within(GIVES_UP_S):
                statuses = await asyncio.wait_for(reading, GIVES_UP_S)
            # The kernel may take a dying process's memory regions before its queue pairs.
            ended = {Status.DISCONNECTED, Status.FABRIC_ERROR, Status.LEASE_EXPIRED}
            assert set(statuses) <= {Status.OK, *ended}
            assert other.host.closed


async def test_a_stopped_peer_is_read_all_the_same() -> None:
    """One-sided: its process does nothing for our reads."""
    async with peer(8 * MIB) as other:
        into = memoryview(bytearray(8 * MIB))
        assert set(await other.host.read(batch(other.exposure, into), soon(60))) == {Status.OK}
        other.child.send_signal(signal.SIGSTOP)
        for _ in range(3):
            into[:] = bytes(len(into))
            statuses = await other.host.read(batch(other.exposure, into), soon(60))
            assert set(statuses) == {Status.OK}
            assert into == b"k" * len(into)
        assert not other.host.closed


async def test_a_stopped_reader_cannot_hold_up_a_revocation() -> None:
    """Its loop stands still while the daemon takes its memory back."""
    async with peer(4 * MIB) as other:
        into = memoryview(bytearray(4 * MIB))
        assert set(await other.host.read(batch(other.exposure, into), soon(60))) == {Status.OK}
        VERBS.hang(other.host)
        other.tell("revoke")
        word, seconds = (await other.line()).split()
        assert word == "revoked"
        assert float(seconds) < limits.REVOKE_DEADLINE_NS / 1e9 + GIVES_UP_S
        # It has been overwritten by now; our end, unaware, still believes in its rkey.
        statuses = await _read_unaware(other, into)
        assert Status.OK not in statuses
        assert b"\xee" not in into.tobytes()


async def _read_unaware(other: Peer, into: memoryview) -> list[Status]:
    into[:] = bytes(len(into))
    reading = asyncio.ensure_future(other.host.read(batch(other.exposure, into), soon(30)))
    await asyncio.sleep(0)  # it looks the rkey up, and posts
    VERBS.unhang(other.host)
    return await asyncio.wait_for(reading, 30)


CUTS: dict[str, Callable[[], None]] = {
    "our end down": lambda: wire.cut("rxe_host"),
    "their end down": lambda: wire.cut("rxe_dpu"),
    "silence": lambda: wire.loss("rxe_host", 100),
}


@pytest.mark.usefixtures("pair_of_devices")
@pytest.mark.parametrize("how", list(CUTS))
async def test_a_cut_wire_ends_the_reads_and_a_new_session_works(tmp_path: Path, how: str) -> None:
    content = random.Random(5).randbytes(MIB)
    with wire.whole_afterwards("rxe_host", "rxe_dpu"), trying("link cut mid-read") as trial:
        async with serving(VERBS, tmp_path) as server:
            pair = await join(VERBS, server)
            with filled(content) as buffer:
                exposure = await pair.daemon.expose(buffer)
                ops = batch(exposure, memoryview(bytearray(16 * MIB)))
                reading = asyncio.ensure_future(read_until_it_fails(pair.host, ops, content, trial))
                await asyncio.sleep(0.3)
                assert not reading.done()
                CUTS[how]()
                with trial.within(GIVES_UP_S):
                    statuses = await asyncio.wait_for(reading, GIVES_UP_S)
                assert set(statuses) <= {Status.OK, Status.DISCONNECTED, Status.FABRIC_ERROR}
                assert pair.host.closed
                wire.heal("rxe_host")
                wire.heal("rxe_dpu")
                await pair.host.close()
                await pair.daemon.close()
                again = await join(VERBS, server)
                shown = await again.daemon.expose(buffer)
                into = memoryview(bytearray(MIB))
                assert await again.host.read(batch(shown, into), soon(60)) == [Status.OK]
                trial.same(into, content)
                await again.host.close()


@pytest.mark.usefixtures("pair_of_devices")
@pytest.mark.parametrize("how", ["deadline", "cancel"])
@pytest.mark.parametrize("memory", ["foreign", "registered"])
async def test_bytes_held_up_by_the_wire_land_nowhere_later(
    tmp_path: Path, how: str, memory: str
) -> None:
    """The reads are on the wire when the caller gives up; then the wire comes back."""
    content = b"\x11" * (8 * MIB)
    with wire.whole_afterwards("rxe_host", "rxe_dpu"):
        async with session(VERBS, tmp_path) as pair:
            with filled(content) as buffer:
                exposure = await pair.daemon.expose(buffer)
                into = memoryview(bytearray(8 * MIB))
                if memory == "registered":
                    pair.host.register(into)  # type: ignore[attr-defined]
                first = [ReadOp(exposure.span(0, MIB), into[:MIB])]
                assert await pair.host.read(first, soon(60)) == [Status.OK]
                into[:] = b"\xa5" * len(into)
                ops = batch(exposure, into)
                wire.loss("rxe_dpu", 60)  # some bytes arrive, most do not
                begin = time.monotonic()
                if how == "deadline":
                    statuses = await pair.host.read(ops, soon(0.1))
                    assert Status.DEADLINE in statuses or Status.DISCONNECTED in statuses
                else:
                    reading = asyncio.ensure_future(pair.host.read(ops, soon(60)))
                    await asyncio.sleep(0.1)
                    reading.cancel()
                    await asyncio.wait([reading])
                assert time.monotonic() - begin < 0.1 + DRAIN_S + GIVES_UP_S
                after = into.tobytes()
                wire.heal("rxe_dpu")
                for _ in range(5):
                    await asyncio.sleep(0.1)
                    assert into == after, "bytes landed after the read had returned"
                for number in range(8):  # whole bytes of the source or none, even in the rest
                    part = after[number * MIB : (number + 1) * MIB]
                    assert not part.strip(b"\x11\xa5")


@pytest.mark.usefixtures("pair_of_devices")
async def test_a_lossy_wire_costs_time_and_no_byte(tmp_path: Path) -> None:
    content = random.Random(6).randbytes(4 * MIB)
    with wire.whole_afterwards("rxe_host", "rxe_dpu"):
        async with session(VERBS, tmp_path) as pair:
            with filled(content) as buffer:
                exposure = await pair.daemon.expose(buffer)
                wire.loss("rxe_dpu", 2)
                wire.loss("rxe_host", 2)
                into = memoryview(bytearray(4 * MIB))
                statuses = await pair.host.read(batch(exposure, into, 65_536), soon(100))
                for number, status in enumerate(statuses):
                    at = number * 65_536
                    if status is Status.OK:
                        assert into[at : at + 65_536] == content[at : at + 65_536]
                assert Status.OK in statuses


async def test_too_little_locked_memory_is_an_error_with_a_hint() -> None:
    """The daemon's process may lock 1 MiB; exposing 32 MiB fails, the session lives."""
    with trying("memlock too small") as trial:
        async with peer(32 * MIB, memlock=MIB) as other:
            assert "locked memory" in other.refused
            assert "busy" in other.refused
            into = memoryview(bytearray(4096))
            with trial.within(GIVES_UP_S):
                found = await other.host.read(batch(other.exposure, into, 4096), soon(60))
            assert found == [Status.OK]
            trial.same(into, b"k" * 4096)


async def test_huge_pages_are_exposed_and_read_into(tmp_path: Path) -> None:
    reserved = Path("/proc/sys/vm/nr_hugepages")
    reserved.write_text("4")
    try:
        content = random.Random(8).randbytes(3 * MIB)
        async with session(VERBS, tmp_path) as pair:
            with (
                MemfdBuffer(3 * MIB, huge_pages=True) as source,
                MemfdBuffer(3 * MIB, huge_pages=True) as target,
            ):
                if not (source.huge and target.huge):
                    pytest.skip("not run here: the guest has no huge pages to spare")
                source.view[:] = content
                exposure = await pair.daemon.expose(source)
                assert isinstance(pair.host, VerbsEndpoint)
                registration = pair.host.register(target)
                statuses = await pair.host.read(batch(exposure, target.view), soon(60))
                assert set(statuses) == {Status.OK}
                assert target.view == content
                registration.close()
                await pair.daemon.revoke(exposure)
    finally:
        reserved.write_text("0")


async def test_sessions_that_never_come_leave_nothing(tmp_path: Path) -> None:
    """The kernel's count of objects is compared by the suites' conftest."""
    async with serving(VERBS, tmp_path, lifetime_ns=10**9) as server:
        hosts = []
        for _ in range(5):
            server.offer()
            host, _ = await registry.connect(server.offer(), soon(), options=VERBS.options())
            hosts.append(host)
        async with asyncio.timeout(20):
            while not all(host.closed for host in hosts):
                await asyncio.sleep(0.05)
        for host in hosts:
            await host.close()


async def test_memory_of_another_device_that_cannot_be_reached(tmp_path: Path) -> None:
    """What a GPU pointer meets where no driver shares it: an error, and the session goes on."""
    async with session(VERBS, tmp_path) as pair:
        assert isinstance(pair.host, VerbsEndpoint)
        with pytest.raises(FabricError) as caught:
            pair.host.register_device_memory(0x10_0000_0000, MIB)
        assert caught.value.status is Status.UNSUPPORTED
        assert "nvidia-peermem" in caught.value.hint
        nothing = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(FabricError) as caught:
            pair.host.register_device_memory(0x10_0000_0000, MIB, dmabuf_fd=nothing, offset=4096)
        os.close(nothing)
        assert caught.value.status is Status.UNSUPPORTED
        with filled(b"g" * 4096) as buffer:
            exposure = await pair.daemon.expose(buffer)
            into = memoryview(bytearray(4096))
            assert await pair.host.read(batch(exposure, into, 4096), soon(60)) == [Status.OK]


async def test_a_device_that_goes_away(tmp_path: Path) -> None:
    """As far as it can be emulated: its network interface is removed under a session, which ends;
    the kernel drops the device once nobody has it open."""
    link, device = "gone0", "rxe_gone"
    _make_device(link, device, "10.9.0.1")
    settings = VerbsSettings(devices=(device,))
    remover: asyncio.subprocess.Process | None = None
    server = VerbsFabricServer(settings)
    try:
        await _until(lambda: _has_ipv4(device))
        await server.start()
        offer = server.offer()
        host, reply = await registry.connect(
            offer, soon(30), options=ConnectOptions(verbs=settings)
        )
        daemon = await server.accept(offer, reply, soon(30))
        with filled(b"d" * MIB) as buffer, trying("device removed") as trial:
            exposure = await daemon.expose(buffer)
            into = memoryview(bytearray(MIB))
            assert await host.read(batch(exposure, into), soon(60)) == [Status.OK]
            remover = await asyncio.create_subprocess_exec("ip", "link", "del", link)
            await _read_until_it_is_gone(host, exposure, into, trial)
            with contextlib.suppress(FabricError):
                server.offer()
            with trial.within(GIVES_UP_S):
                async with asyncio.timeout(GIVES_UP_S):
                    await host.close()
                    await daemon.close()
    finally:
        async with asyncio.timeout(GIVES_UP_S):
            await server.close()
        if remover is None:
            remover = await asyncio.create_subprocess_exec("ip", "link", "del", link)
        async with asyncio.timeout(60):
            await remover.wait()
    await _until(lambda: not Path("/sys/class/infiniband", device).exists())


async def _read_until_it_is_gone(
    host: Endpoint, exposure: Exposure, into: memoryview, trial: Trial
) -> None:
    """It may go on for a while; it may not hang or bring wrong bytes."""
    for _ in range(100):
        into[:] = bytes(len(into))
        with trial.within(GIVES_UP_S):
            async with asyncio.timeout(GIVES_UP_S):
                [status] = await host.read(batch(exposure, into), soon(5))
        if status is not Status.OK:
            break
        trial.same(into, b"d" * len(into))
    else:
        pytest.fail("reads went on without the device")
    async with asyncio.timeout(GIVES_UP_S):
        while not host.closed:
            assert await host.read(batch(exposure, into), soon(5)) != [Status.OK]


def _make_device(link: str, device: str, address: str) -> None:
    for command in (
        f"ip link add {link} type dummy",
        f"ip link set {link} mtu 4200 up",
        f"ip addr add {address}/24 dev {link}",
        f"rdma link add {device} type rxe netdev {link}",
    ):
        subprocess.run(command.split(), check=True)


def _has_ipv4(device: str) -> bool:
    with contextlib.suppress(FabricError):
        return find_ports(VerbsSettings(devices=(device,)))[0].gid.ipv4 is not None
    return False


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.05)
