"""shm peers that break the rules: the other side neither crashes nor leaks, and nobody gets in."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import socket
import threading
from pathlib import Path

import pytest
import uvloop
from shm_peer import SEALS, mapped, memfd, raw_session, run, soon

from entresol_daemon.config import LimitsConfig
from entresol_proto import limits, native
from entresol_proto.fabric import registry, shmlink
from entresol_proto.fabric.base import ConnectOptions, Offer, ReadOp, RemoteSpan
from entresol_proto.fabric.memory import (
    F_SEAL_FUTURE_WRITE,
    F_SEAL_GROW,
    F_SEAL_SHRINK,
    HUGE_PAGE_BYTES,
    MemfdBuffer,
)
from entresol_proto.fabric.regions import POOL, POPULATE_BYTES, PeerRegion
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.fabric.shmendpoint import UNMAP_AT_ONCE_BYTES
from entresol_proto.fabric.shmlink import Kind, Message
from entresol_proto.status import FabricError, ProtocolError, Status

MIB = limits.MIB


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


# -- what a peer passes -----------------------------------------------------------------------


def test_a_good_region_from_a_raw_peer_is_read(runner: object, tmp_path: Path) -> None:
    """The control: what the refused ones below differ from."""

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            fd = memfd(MIB)
            peer.expose(5, MIB, fd)
            os.close(fd)
            answer = await peer.hear()
            assert (answer.kind, answer.rkey, answer.status) == (Kind.EXPOSED, 5, Status.OK)
            into = bytearray(7)
            op = ReadOp(RemoteSpan(5, 0, 7), memoryview(into))
            assert await endpoint.read([op], soon()) == [Status.OK]
            assert into == b"content"
            peer.say(Message(Kind.REVOKE, 5).encode())
            assert (await peer.hear()).kind is Kind.REVOKED
            assert await endpoint.read([op], soon()) == [Status.LEASE_EXPIRED]

    run(runner, scenario())


def _shrinkable() -> tuple[int, int]:
    return memfd(MIB, SEALS & ~F_SEAL_SHRINK), MIB


def _with_holes() -> tuple[int, int]:
    """Of huge pages, with none left in the system, a hole is a SIGBUS of who reads there."""
    return memfd(MIB, SEALS & ~F_SEAL_FUTURE_WRITE), MIB


def _never_had() -> tuple[int, int]:
    """Memory without pages: whoever reads one first has it, and is charged for it."""
    fd = memfd(MIB, whole=False)
    os.posix_fallocate(fd, 0, MIB - 4_096)
    return fd, MIB


def _half_of_it() -> tuple[int, int]:
    """As many pages as announced, but others."""
    fd = memfd(2 * MIB, whole=False)
    os.posix_fallocate(fd, MIB, MIB)
    return fd, MIB - 4_096


def _beyond_its_end() -> tuple[int, int]:
    """As many pages as announced, where nobody can read them."""
    fd = memfd(MIB, 0, whole=False)
    os.posix_fallocate(fd, 0, 8_192)
    libc = ctypes.CDLL(None)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    assert libc.fallocate(fd, 0x01, 2 * MIB, 2 * MIB) == 0  # FALLOC_FL_KEEP_SIZE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    assert os.fstat(fd).st_blocks * 512 > MIB
    return fd, MIB


def _may_grow() -> tuple[int, int]:
    """And so may have new pages beyond its end at any time."""
    return memfd(MIB, SEALS & ~F_SEAL_GROW), MIB


def _short() -> tuple[int, int]:
    return memfd(4_096), 4_097


def _empty() -> tuple[int, int]:
    return memfd(4_096), 0


def _device() -> tuple[int, int]:
    return os.open("/dev/zero", os.O_RDONLY), 4_096


def _file() -> tuple[int, int]:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, MIB)
    return fd, MIB


def _folder() -> tuple[int, int]:
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY), 4_096


def _socket() -> tuple[int, int]:
    with socket.socket() as sock:
        return os.dup(sock.fileno()), 4_096


@pytest.mark.parametrize(
    "make",
    [
        _shrinkable,
        _with_holes,
        _never_had,
        _half_of_it,
        _beyond_its_end,
        _may_grow,
        _short,
        _empty,
        _device,
        _file,
        _folder,
        _socket,
    ],
)
def test_descriptors_that_could_hurt_are_refused(
    runner: object, tmp_path: Path, make: object
) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            fd, length = make()  # type: ignore[operator]
            peer.expose(1, length, fd)
            os.close(fd)
            answer = await peer.hear()
            assert (answer.kind, answer.status) == (Kind.EXPOSED, Status.BAD_REQUEST)
            op = ReadOp(RemoteSpan(1, 0, 1), memoryview(bytearray(1)))
            assert await endpoint.read([op], soon()) == [Status.LEASE_EXPIRED]
            assert not endpoint.closed

    run(runner, scenario())


def test_memory_and_regions_of_a_peer_are_bounded(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHM_REGIONS_PER_HOST_MAX", 3)

    async def scenario() -> None:
        async with raw_session(tmp_path, mapped_bytes_max=4 * MIB) as (endpoint, peer):
            fd = memfd(8 * MIB)
            for rkey, length, status in (
                (1, 4 * MIB + 1, Status.BUSY),
                (2, 2**64 - 1, Status.BUSY),
                (3, 4 * MIB, Status.OK),
                (4, 1, Status.BUSY),
            ):
                peer.expose(rkey, length, fd)
                answer = await peer.hear()
                assert (answer.rkey, answer.status) == (rkey, status)
            peer.say(Message(Kind.REVOKE, 3).encode())
            assert (await peer.hear()).kind is Kind.REVOKED
            os.close(fd)
            for rkey in range(10, 15):
                fd = memfd(4_096)
                peer.expose(rkey, 4_096, fd)
                os.close(fd)
            answers = [await peer.hear() for _ in range(5)]
            busy = [Status.BUSY] * 2
            assert sorted(answer.status for answer in answers) == [0, 0, 0, *busy]
            assert not endpoint.closed

    run(runner, scenario())


def test_all_sessions_of_a_daemon_map_less_than_a_process_may() -> None:
    """Mappings, and descriptors of them, are the process's: sessions of one tenant had them all."""
    default = LimitsConfig().sessions_max * limits.SHM_REGIONS_PER_HOST_MAX
    assert default < 65_530 // 2, "of Linux's vm.max_map_count, beside a daemon's own"


def _huge_page_memfd() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    try:
        os.ftruncate(fd, HUGE_PAGE_BYTES)
        os.posix_fallocate(fd, 0, HUGE_PAGE_BYTES)
    except OSError as error:
        os.close(fd)
        pytest.skip(f"not run here: no huge page is free ({error})")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def test_a_part_of_a_huge_page_is_unmapped_again(runner: object, tmp_path: Path) -> None:
    """The kernel unmaps whole huge pages only: a mapping of a part of one stayed for ever, and a
    process may have 65,530 of them."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:test")

    fd = _huge_page_memfd()

    async def scenario() -> None:
        async with raw_session(tmp_path) as (_, peer):
            peer.expose(1, 4_096, fd)
            assert (await peer.hear()).status == Status.OK
            assert mappings() == 1
            peer.say(Message(Kind.REVOKE, 1).encode())
            assert (await peer.hear()).kind is Kind.REVOKED
            assert mappings() == 0

    run(runner, scenario())
    os.close(fd)


def test_exposing_and_revoking_in_a_loop_leaks_nothing(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path, mapped_bytes_max=MIB) as (endpoint, peer):
            fd = memfd(64_000)
            loop = asyncio.get_running_loop()
            revoked = 0
            for turn in range(300):
                peer.expose(turn, 64_000, fd)
                peer.say(Message(Kind.REVOKE, turn).encode())
                if turn % 8 == 7:
                    while revoked <= turn:
                        packet = await asyncio.wait_for(loop.sock_recv(peer.sock, 100), 5)
                        revoked += shmlink.parse(packet, []).kind is Kind.REVOKED
            os.close(fd)
            assert endpoint._mapped_bytes == 0
            assert not endpoint._regions
            assert not endpoint.closed

    run(runner, scenario())


class Unmapping:
    """Notes which threads unmap regions, and holds them until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch, *, held: bool) -> None:
        self.threads: list[threading.Thread] = []
        self.go = threading.Event()
        if not held:
            self.go.set()
        unmap = PeerRegion.unmap

        def noted(region: PeerRegion) -> None:
            self.threads.append(threading.current_thread())
            assert self.go.wait(30)
            unmap(region)

        patch.setattr(PeerRegion, "unmap", noted)


def test_a_large_region_is_unmapped_off_the_loop(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile, and the owner is told once it is unmapped, not before."""
    large = UNMAP_AT_ONCE_BYTES + 1

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            await mapped(peer, 1, large)
            unmapping = Unmapping(monkeypatch, held=True)
            peer.say(Message(Kind.REVOKE, 1).encode())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_recv(peer.sock, 100), 0.2)
            assert [one is threading.main_thread() for one in unmapping.threads] == [False]
            assert endpoint._mapped_bytes == large, "it still counts"
            op = ReadOp(RemoteSpan(1, 0, 1), memoryview(bytearray(1)))
            assert await endpoint.read([op], soon()) == [Status.LEASE_EXPIRED]
            unmapping.go.set()
            answer = await peer.hear()
            assert (answer.kind, answer.rkey) == (Kind.REVOKED, 1)
            assert endpoint._mapped_bytes == 0

    run(runner, scenario())


def test_a_region_at_the_limit_is_unmapped_at_once(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (_, peer):
            await mapped(peer, 1, UNMAP_AT_ONCE_BYTES)
            unmapping = Unmapping(monkeypatch, held=False)
            peer.say(Message(Kind.REVOKE, 1).encode())
            assert (await peer.hear()).kind is Kind.REVOKED
            assert unmapping.threads == [threading.main_thread()]

    run(runner, scenario())


def test_a_small_region_of_a_large_file_is_unmapped_off_the_loop(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its owner is gone, what its end frees is the whole file."""

    async def scenario() -> None:
        async with raw_session(tmp_path) as (_, peer):
            fd = memfd(UNMAP_AT_ONCE_BYTES + 1)
            peer.expose(1, 4_096, fd)
            os.close(fd)
            assert (await peer.hear()).status == Status.OK
            unmapping = Unmapping(monkeypatch, held=False)
            peer.say(Message(Kind.REVOKE, 1).encode())
            assert (await peer.hear()).kind is Kind.REVOKED
            assert [one is threading.main_thread() for one in unmapping.threads] == [False]

    run(runner, scenario())


@pytest.mark.parametrize("use", ["its pages are found", "it is read", "a revoked one is read"])
def test_a_region_in_use_is_unmapped_off_the_loop_when_its_session_ends(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """A host that dies then left up to a GiB for the loop to unmap, and to free."""
    go, busy = threading.Event(), threading.Event()
    left: list[tuple[bool, int]] = []  # on the loop's thread, and how many mappings afterwards
    unmap, populate, copy = PeerRegion.unmap, PeerRegion.populate, native.copy

    def held(*_: object) -> None:
        busy.set()
        assert go.wait(10)

    def noted(region: PeerRegion) -> None:
        unmap(region)
        mappings = Path("/proc/self/maps").read_text().count("/memfd:test")
        left.append((threading.current_thread() is threading.main_thread(), mappings))

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            if use == "its pages are found":
                monkeypatch.setattr(PeerRegion, "populate", lambda *of: (held(), populate(*of))[0])
            await mapped(peer, 1, 2 * UNMAP_AT_ONCE_BYTES)
            reading = None
            if use != "its pages are found":
                monkeypatch.setattr(native, "copy", lambda *of: (held(), copy(*of))[0])
                op = ReadOp(RemoteSpan(1, 0, 2 * MIB), memoryview(bytearray(2 * MIB)))
                reading = asyncio.create_task(endpoint.read([op], soon()))
            while not busy.is_set():
                await asyncio.sleep(0.001)
            if use == "a revoked one is read":
                peer.say(Message(Kind.REVOKE, 1).encode())
            monkeypatch.setattr(PeerRegion, "unmap", noted)
            await asyncio.sleep(0.05)
            peer.sock.close()
            while not endpoint.closed:
                await asyncio.sleep(0.001)
            assert not left
            go.set()
            if reading is not None:
                assert await reading == [Status.DISCONNECTED]
            async with asyncio.timeout(5):
                while not left:
                    await asyncio.sleep(0.001)
            assert left == [(False, 0)]

    run(runner, scenario())


def test_closing_waits_for_a_region_that_is_being_unmapped(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            await mapped(peer, 1, 2 * UNMAP_AT_ONCE_BYTES)
            unmapping = Unmapping(monkeypatch, held=True)
            peer.say(Message(Kind.REVOKE, 1).encode())
            while not unmapping.threads:
                await asyncio.sleep(0.001)
            closing = asyncio.create_task(endpoint.close())
            await asyncio.sleep(0.05)
            assert endpoint.closed
            assert not closing.done()
            unmapping.go.set()
            await asyncio.wait_for(closing, 5)
            assert endpoint._mapped_bytes == 0

    run(runner, scenario())


def test_copies_do_not_wait_for_pages_that_another_has_found_or_freed(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One peer's regions, exposed and revoked without end, kept both threads from the others."""
    go, busy = threading.Event(), threading.Event()

    def populate(_region: PeerRegion, _begin: int, _end: int) -> None:
        busy.set()
        assert go.wait(10)

    async def scenario() -> None:
        async with raw_session(tmp_path / "a") as (_, greedy):
            monkeypatch.setattr(PeerRegion, "populate", populate)
            for rkey in range(3):
                await mapped(greedy, rkey, 4_096)
            while not busy.is_set():
                await asyncio.sleep(0.001)
            async with raw_session(tmp_path / "b") as (endpoint, peer):
                await mapped(peer, 1, 2 * MIB)
                op = ReadOp(RemoteSpan(1, 0, 2 * MIB), memoryview(bytearray(2 * MIB)))
                assert await endpoint.read([op], soon()) == [Status.OK]
                go.set()

    run(runner, scenario())


@pytest.mark.parametrize("how", ["ends", "is revoked", "its session closes"])
def test_a_region_is_answered_for_and_read_before_its_pages_are_there(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Finding the pages of a fresh slab takes seconds on a busy machine: nobody waits for them."""
    go, asked = threading.Event(), []

    def populate(_region: PeerRegion, begin: int, end: int) -> None:
        asked.append((begin, end))
        assert go.wait(10)

    async def scenario() -> None:
        async with raw_session(tmp_path, mapped_bytes_max=256 * MIB) as (endpoint, peer):
            monkeypatch.setattr(PeerRegion, "populate", populate)
            await mapped(peer, 1, 3 * POPULATE_BYTES)
            into = memoryview(bytearray(b"\xa5" * 64))
            op = ReadOp(RemoteSpan(1, 0, 64), into)
            assert await endpoint.read([op], soon()) == [Status.OK]
            assert bytes(into) == b"content".ljust(64, b"\0")
            while not asked:
                await asyncio.sleep(0.001)
            if how == "is revoked":
                peer.say(Message(Kind.REVOKE, 1).encode())
                await asyncio.sleep(0.05)
                assert endpoint._mapped_bytes, "its pages are being touched"
            closing = asyncio.create_task(endpoint.close()) if "closes" in how else None
            await asyncio.sleep(0.01)
            go.set()
            if how == "is revoked":
                assert (await peer.hear()).kind is Kind.REVOKED
            while how == "ends" and len(asked) < 3:
                await asyncio.sleep(0.001)
            if closing is not None:
                await asyncio.wait_for(closing, 5)
            steps = [
                (at, at + POPULATE_BYTES) for at in range(0, 3 * POPULATE_BYTES, POPULATE_BYTES)
            ]
            assert asked == (steps if how == "ends" else steps[:1])

    run(runner, scenario())


BAD_PACKETS = {
    "short": b"\x03",
    "long": Message(Kind.REVOKE, 1).encode() + b"\0",
    "longer than any": bytes(5_000),
    "no type": bytes(16),
    "type past the end": b"\x07" + bytes(15),
    "greeting": shmlink.hello(bytes(16)),
    "welcome": shmlink.welcome(),
    "reserved bytes": b"\x05\0\x01\0" + bytes(12),
}


@pytest.mark.parametrize("how", list(BAD_PACKETS))
def test_bad_packets_end_the_session(runner: object, tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            peer.say(BAD_PACKETS[how])
            await peer.cut_off()
            assert endpoint.closed

    run(runner, scenario())


@pytest.mark.parametrize("how", ["none", "two", "many", "unexpected", "twice", "oversized"])
def test_a_wrong_number_of_descriptors_ends_the_session_and_leaks_none(
    runner: object, tmp_path: Path, how: str
) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            fd = memfd(4_096)
            if how == "none":
                peer.expose(1, 4_096)
            elif how == "two":
                peer.expose(1, 4_096, fd, fd)
            elif how == "many":
                peer.expose(1, 4_096, *[fd] * 200)
            elif how == "unexpected":
                peer.say(Message(Kind.REVOKE, 1).encode(), fd)
            elif how == "oversized":
                peer.say(bytes(500), fd)
            else:
                peer.expose(1, 4_096, fd)
                await peer.hear()
                peer.expose(1, 4_096, fd)
            os.close(fd)
            await peer.cut_off()
            assert endpoint.closed

    run(runner, scenario())


def test_random_packets_end_only_that_session(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        rng = random.Random(5)
        for _ in range(10):
            async with raw_session(tmp_path) as (endpoint, peer):
                with contextlib.suppress(OSError):  # cut off in the middle
                    for _ in range(50):
                        peer.say(rng.randbytes(rng.choice([1, 15, 16, 16, 16, 17, 64, 65])))
                await peer.cut_off()
                assert endpoint.closed

    run(runner, scenario())


def test_answers_nobody_waits_for_are_ignored(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            for kind in (Kind.EXPOSED, Kind.REVOKED):
                peer.say(Message(kind, 77, status=0).encode())
            peer.say(Message(Kind.REVOKE, 77).encode())
            assert (await peer.hear()).kind is Kind.REVOKED
            assert not endpoint.closed

    run(runner, scenario())


def test_a_peer_that_does_not_receive_its_answers_is_cut_off(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHM_MESSAGES_QUEUED_MAX", 50)

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            for _ in range(200_000):
                if endpoint.closed:
                    break
                try:
                    peer.say(Message(Kind.REVOKE, 1).encode())
                except BlockingIOError:
                    await asyncio.sleep(0.001)
                except OSError:
                    break
            await asyncio.sleep(0.01)
            assert endpoint.closed

    run(runner, scenario())


# -- what a peer gets -------------------------------------------------------------------------


def test_a_peer_can_only_read_what_it_is_given(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            with MemfdBuffer(8_192) as buffer:
                buffer.seal_for_readers()
                exposing = asyncio.ensure_future(endpoint.expose(buffer))
                await asyncio.sleep(0.02)
                packet, fds, _, _ = socket.recv_fds(peer.sock, 100, 4)
                message = shmlink.parse(packet, list(fds))
                assert message.length_bytes == 8_192
                with pytest.raises(PermissionError):
                    os.write(message.fd, b"x")
                with pytest.raises(PermissionError):
                    os.ftruncate(message.fd, 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(message.fd, 8_192, mmap.MAP_SHARED, mmap.PROT_WRITE)
                os.close(message.fd)
                peer.say(Message(Kind.EXPOSED, message.rkey).encode())
                assert (await exposing).rkey == message.rkey

    run(runner, scenario())


def test_buffers_a_peer_could_change_are_not_exposed(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, _):
            with MemfdBuffer(4_096) as buffer:
                for what in (buffer, memoryview(bytearray(10))):
                    with pytest.raises(FabricError) as caught:
                        await endpoint.expose(what)
                    assert caught.value.status is Status.UNSUPPORTED

    run(runner, scenario())


@pytest.mark.parametrize("answer", [None, Status.BUSY, Status.BAD_REQUEST, Status.OK])
def test_a_peer_that_hangs_or_refuses_fails_the_expose_only(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Status | None
) -> None:
    monkeypatch.setattr(limits, "EXPOSE_DEADLINE_NS", 100_000_000)
    monkeypatch.setattr(limits, "REVOKE_DEADLINE_NS", 100_000_000)

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            with MemfdBuffer(4_096) as buffer:
                buffer.seal_for_readers()
                exposing = asyncio.ensure_future(endpoint.expose(buffer))
                await asyncio.sleep(0.02)
                packet, fds, _, _ = socket.recv_fds(peer.sock, 100, 4)
                rkey = shmlink.parse(packet, list(fds)).rkey
                os.close(fds[0])
                if answer is None:
                    with pytest.raises(FabricError) as caught:
                        await exposing
                    assert caught.value.status is Status.DEADLINE
                    assert (await peer.hear()).kind is Kind.REVOKE  # taken back
                elif answer is Status.OK:
                    peer.say(Message(Kind.EXPOSED, rkey, status=0).encode())
                    exposure = await exposing
                    await asyncio.wait_for(endpoint.revoke(exposure), 2)  # no answer: goes on
                else:
                    peer.say(Message(Kind.EXPOSED, rkey, status=answer).encode())
                    with pytest.raises(FabricError) as caught:
                        await exposing
                    busy = answer is Status.BUSY
                    assert caught.value.status is (Status.BUSY if busy else Status.FABRIC_ERROR)
            assert not endpoint.closed

    run(runner, scenario())


# -- the socket -------------------------------------------------------------------------------


async def test_only_this_user_can_reach_the_socket(tmp_path: Path) -> None:
    server = ShmFabricServer(tmp_path / "new" / "run")
    await server.start()
    path = tmp_path / "new" / "run" / "fabric.sock"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    await server.close()
    assert not path.exists()


async def test_a_group_can_be_let_in(tmp_path: Path) -> None:
    server = ShmFabricServer(tmp_path / "run", group=os.getgid())
    await server.start()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o710
    assert (tmp_path / "run" / "fabric.sock").stat().st_mode & 0o777 == 0o660
    await server.close()


async def test_a_folder_of_a_group_lets_the_group_in(tmp_path: Path) -> None:
    """As tmpfiles makes it: the daemon gives nothing away, the socket inherits."""
    folder = tmp_path / "hosts"
    folder.mkdir()
    groups = [one for one in os.getgroups() if one != os.getegid()]
    group = 54_321 if os.geteuid() == 0 else groups[0] if groups else os.getegid()
    os.chown(folder, -1, group)
    folder.chmod(0o2750)
    servers = [ShmFabricServer(folder, name=f"{name}.sock") for name in ("a", "b")]
    for server in servers:
        await server.start()
    for name in ("a", "b"):
        found = (folder / f"{name}.sock").stat()
        assert (found.st_mode & 0o777, found.st_gid) == (0o660, group)
    for server in servers:
        await server.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770, 0o720])
async def test_a_directory_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(FabricError, match="chmod"):
        await ShmFabricServer(folder).start()


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match="shorter"):
        await ShmFabricServer(tmp_path / ("x" * 108)).start()


async def test_a_dead_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(folder / "fabric.sock"))
    first = ShmFabricServer(folder)
    await first.start()
    with pytest.raises(FabricError, match="listens"):
        await ShmFabricServer(folder).start()
    offer = first.offer()
    host, _ = await registry.connect(offer, soon())
    await first.accept(offer, b"", soon())
    await host.close()
    await first.close()
    (folder / "fabric.sock").write_text("not a socket")
    with pytest.raises(FabricError):
        await ShmFabricServer(folder).start()


async def test_an_offer_from_another_host_is_refused(tmp_path: Path) -> None:
    server = ShmFabricServer(tmp_path / "run")
    await server.start()
    offer = server.offer()
    moved = Offer(offer.kind, offer.params[:1] + bytes(16) + offer.params[17:])
    with pytest.raises(FabricError) as caught:
        await registry.connect(moved, soon())
    assert caught.value.status is Status.UNSUPPORTED
    await server.close()


async def test_the_host_bounds_what_it_maps_of_the_daemon(tmp_path: Path) -> None:
    server = ShmFabricServer(tmp_path / "run")
    await server.start()
    offer = server.offer()
    host, _ = await registry.connect(offer, soon(), options=ConnectOptions(mapped_bytes_max=8_192))
    daemon = await server.accept(offer, b"", soon())
    with MemfdBuffer(8_192) as fits, MemfdBuffer(1) as too_much:
        assert fits.seal_for_readers()
        assert too_much.seal_for_readers()
        exposure = await daemon.expose(fits)
        with pytest.raises(FabricError) as caught:
            await daemon.expose(too_much)
        assert caught.value.status is Status.BUSY
        await daemon.revoke(exposure)
        await daemon.expose(too_much)
    await host.close()
    await server.close()


async def test_what_a_host_exposes_does_not_wait_for_the_thread_that_gives_way(
    tmp_path: Path,
) -> None:
    """It runs when nobody else wants a processor, on a busy host for seconds never, and a host's
    first put waits for its pages: others' puts of the same blocks were refused meanwhile."""
    go = threading.Event()
    server = ShmFabricServer(tmp_path / "run")
    await server.start()
    offer = server.offer()
    host, _ = await registry.connect(offer, soon())
    daemon = await server.accept(offer, b"", soon())
    starved = POOL.submit_pages(go.wait, 10)
    with MemfdBuffer(3 * MIB) as buffer:
        assert buffer.seal_for_readers()
        exposure = await asyncio.wait_for(host.expose(buffer), 5)
        assert os.fstat(buffer.fd).st_blocks * 512 == 3 * MIB
        go.set()
        assert await starved.outcome()
        await host.revoke(exposure)
    await host.close()
    await daemon.close()
    await server.close()


def test_hello_is_exact() -> None:
    ticket = bytes(range(16))
    good = shmlink.hello(ticket)
    assert shmlink.parse_hello(good) == ticket
    for bad in (b"", good[:-1], good + b"x", b"\x02" + good[1:], good[:1] + b"\x02" + good[2:]):
        with pytest.raises(ProtocolError):
            shmlink.parse_hello(bad)
