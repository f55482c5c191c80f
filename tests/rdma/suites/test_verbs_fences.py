"""What a hostile peer can reach over verbs: only what is exposed to it, only for reading, only now.

The reader's own checks are bypassed here, so that it is the device that refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
from pathlib import Path
from typing import Any

import pytest
from fabrics import FABRICS, Pair, filled, join, serving, session, soon

from entresol_proto import limits
from entresol_proto.fabric import verbs_api
from entresol_proto.fabric.base import Exposure, ReadOp, RemoteSpan
from entresol_proto.fabric.verbs import VerbsFabricServer
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.fabric.verbs_queue import READS_PER_POST_MAX
from entresol_proto.fabric.verbs_reader import PeerRegion
from entresol_proto.fabric.verbs_wire import MESSAGE_BYTES
from entresol_proto.status import FabricError, Status
from tests.rdma.evidence import trying

pytestmark = pytest.mark.timeout(300)

VERBS = FABRICS["verbs"]
REFUSED = {Status.LEASE_EXPIRED, Status.FABRIC_ERROR, Status.DISCONNECTED}
REFUSED_S = 20.0
_PAINT = b"\xa5"
_RDMA_WRITE, _FETCH_AND_ADD, _SIGNALED = 0, 6, 2  # infiniband/verbs.h


def endpoint(side: object) -> VerbsEndpoint:
    assert isinstance(side, VerbsEndpoint)
    return side


async def heard(reader: object, owner: object) -> VerbsEndpoint:
    """The reader, once it has taken everything its peer has sent."""
    mine, peer = endpoint(reader), endpoint(owner)
    async with asyncio.timeout(20):
        while mine._messenger._taken < peer._messenger._sent:
            await asyncio.sleep(0.005)
    return mine


async def steal(reader: object, owner: object, span: RemoteSpan) -> tuple[Status, bytes]:
    """Read a span that the reader believes is exposed to it; the status and what landed."""
    mine = await heard(reader, owner)
    mine._regions[span.rkey] = PeerRegion((span.rkey,), 0, 2**63)
    into = bytearray(_PAINT * span.length_bytes)
    [status] = await mine.read([ReadOp(span, memoryview(into))], soon(20))
    return status, bytes(into)


async def ends(*sides: object) -> None:
    """Wait until the data path is gone on these sides."""
    async with asyncio.timeout(10):
        while not all(endpoint(side).closed for side in sides):
            await asyncio.sleep(0.01)


async def assert_refused(pair: Pair, span: RemoteSpan, fault: str | None = None) -> None:
    """The device refuses it, and both know: the session reconnects. Counted as a `fault`."""
    with trying(fault) if fault else contextlib.nullcontext() as trial:
        with trial.within(REFUSED_S) if trial else contextlib.nullcontext():
            status, landed = await steal(pair.host, pair.daemon, span)
        if trial:
            trial.same(landed, _PAINT * span.length_bytes)
        assert status in REFUSED
        assert landed == _PAINT * span.length_bytes
        await ends(pair.host, pair.daemon)


async def test_an_honest_read_by_the_same_means_works(tmp_path: Path) -> None:
    """Else the refusals below would prove nothing."""
    async with session(VERBS, tmp_path) as pair:
        with filled(b"s" * 8192) as buffer:
            exposure = await pair.daemon.expose(buffer)
            assert await steal(pair.host, pair.daemon, exposure.span(0, 8192)) == (
                Status.OK,
                b"s" * 8192,
            )


async def test_an_rkey_is_dead_once_revoked(tmp_path: Path) -> None:
    async with session(VERBS, tmp_path) as pair:
        with filled(b"s" * 4096) as buffer:
            exposure = await pair.daemon.expose(buffer)
            await pair.daemon.revoke(exposure)
            await assert_refused(pair, exposure.span(0, 4096), "rkey after lease end")


async def test_an_rkey_of_another_session_is_refused(tmp_path: Path) -> None:
    async with serving(VERBS, tmp_path) as server:
        mine, other = await join(VERBS, server), await join(VERBS, server)
        with filled(b"s" * 4096) as buffer:
            theirs = await other.daemon.expose(buffer)
            await assert_refused(mine, theirs.span(0, 4096), "rkey of another session")
            # The other session is not disturbed.
            into = bytearray(4096)
            statuses = await other.host.read(
                [ReadOp(theirs.span(0, 4096), memoryview(into))], soon(20)
            )
            assert statuses == [Status.OK]
            assert into == b"s" * 4096
        await mine.host.close()
        await other.host.close()


@pytest.mark.parametrize(
    ("before", "length"), [(1, 4096), (0, 4097), (-4096, 1), (-4000, 97), (1 << 20, 1)]
)
async def test_a_read_past_the_exposure_is_refused(
    tmp_path: Path, before: int, length: int
) -> None:
    """Its neighbours on the same pages are another tenant's business."""
    async with session(VERBS, tmp_path) as pair:
        with filled(b"s" * 3 * 4096) as buffer:
            inner = buffer.view[4096:8192]
            exposure = await pair.daemon.expose(inner)
            span = RemoteSpan(exposure.rkey, exposure.address - before, length)
            await assert_refused(pair, span, "out-of-bounds read")
            inner.release()


async def test_guessed_rkeys_are_refused(tmp_path: Path) -> None:
    seed = 20_261_121
    rng = random.Random(seed)
    async with serving(VERBS, tmp_path) as server:
        with filled(b"s" * 4096) as buffer:
            for _ in range(8):
                pair = await join(VERBS, server)
                exposure = await pair.daemon.expose(buffer)
                rkey = rng.choice([exposure.rkey ^ 1, exposure.rkey + 256, rng.getrandbits(32)])
                span = RemoteSpan(rkey % 2**32, exposure.address, 4096)
                with trying("forged lease") as trial:
                    status, landed = await steal(pair.host, pair.daemon, span)
                    trial.same(landed, _PAINT * 4096)
                    assert status in REFUSED, f"seed={seed}"
                await pair.host.close()
                await pair.daemon.close()


async def test_memory_read_into_is_not_readable_by_the_peer(tmp_path: Path) -> None:
    """The local keys of landing and message memory, tried as remote ones."""
    async with serving(VERBS, tmp_path) as server:
        for choice in ("landing", "messages", "bounce"):
            pair = await join(VERBS, server)
            daemon = endpoint(pair.daemon)
            memory = mmap.mmap(-1, 1 << 20)
            with filled(b"h" * 4096) as buffer:
                shown = await pair.host.expose(buffer)
                view = memoryview(memory)
                registration = daemon.register(view)
                small = memoryview(bytearray(4096))
                for into in (view[:4096], small):
                    assert await daemon.read([ReadOp(shown.span(0, 4096), into)], soon(20)) == [0]
                if choice == "landing":
                    found = daemon._reader.registry.find(verbs_address(view), 4096)
                    assert found is not None
                    key = found._keys[0, 0][0].rkey
                    address = verbs_address(view)
                elif choice == "messages":
                    key, address = daemon._messenger._memory.rkey, daemon._messenger._address
                else:
                    bounce = daemon._links[0].bounce()
                    key, address = bounce._memory.rkey, bounce._address
                await assert_refused(pair, RemoteSpan(key, address, 64))
                registration.close()
                await pair.host.close()
                await pair.daemon.close()
                del registration, daemon
                view.release()


def verbs_address(view: memoryview) -> int:
    from entresol_proto.fabric.verbs_memory import address_of

    return address_of(view)


@pytest.mark.parametrize("opcode", [_RDMA_WRITE, _FETCH_AND_ADD])
async def test_nothing_can_be_written_remotely(tmp_path: Path, opcode: int) -> None:
    api: Any = verbs_api.load()
    async with session(VERBS, tmp_path) as pair:
        with filled(b"s" * 4096) as buffer:
            exposure = await pair.daemon.expose(buffer)
            into = memoryview(bytearray(4096))
            assert await pair.host.read([ReadOp(exposure.span(0, 4096), into)], soon(20)) == [0]
            host = endpoint(pair.host)
            messages = host._messenger
            sge = api.wr.SGE(messages._address, 8, messages._memory.lkey)
            wr = api.wr.SendWR(opcode=opcode, num_sge=1, sg=[sge], send_flags=_SIGNALED)
            if opcode == _RDMA_WRITE:
                wr.set_wr_rdma(exposure.rkey, exposure.address)
            else:
                wr.set_wr_atomic(exposure.rkey, exposure.address, 1)
            host._links[0].queue_pair.raw.post_send(wr)
            await ends(pair.host, pair.daemon)
            assert bytes(buffer.view) == b"s" * 4096


async def test_no_memory_is_registered_for_remote_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    register = verbs_api.Domain.register

    def noted(self: verbs_api.Domain, address: int, length_bytes: int, access: int) -> Any:
        asked.append(access)
        return register(self, address, length_bytes, access)

    monkeypatch.setattr(verbs_api.Domain, "register", noted)
    async with session(VERBS, tmp_path) as pair:
        with filled(b"s" * (1 << 20)) as buffer:
            for owner, reader in pair.ways():
                exposure = await owner.expose(buffer)
                for size in (100, 1 << 20):
                    into = memoryview(bytearray(size))
                    assert await reader.read([ReadOp(exposure.span(0, size), into)], soon(20)) == [
                        Status.OK
                    ]
    # Each alone: nothing that is readable is writable, not even by ourselves.
    ways = {verbs_api.ACCESS_LOCAL_WRITE, verbs_api.ACCESS_REMOTE_READ, verbs_api.ACCESS_MW_BIND}
    assert set(asked) == ways


async def test_garbage_messages_end_the_session(tmp_path: Path) -> None:
    seed = 20_261_122
    rng = random.Random(seed)
    async with serving(VERBS, tmp_path) as server:
        for turn in range(6):
            pair = await join(VERBS, server)
            with filled(b"s" * 4096) as buffer:
                exposure = await pair.daemon.expose(buffer)
                into = memoryview(bytearray(4096))
                # The session stands on both sides once a read went through.
                assert await pair.host.read([ReadOp(exposure.span(0, 4096), into)], soon(20)) == [0]
                messages = endpoint(pair.host)._messenger
                slot = messages._free[-1] * MESSAGE_BYTES
                messages._view[slot : slot + MESSAGE_BYTES] = rng.randbytes(MESSAGE_BYTES)
                length = MESSAGE_BYTES if turn % 2 else rng.randrange(1, MESSAGE_BYTES)
                sge_work = _Raw(length)
                endpoint(pair.host)._links[0].post_send(
                    sge_work, messages._address + slot, messages._memory.lkey
                )
                await ends(pair.daemon)
            await pair.host.close()
            await pair.daemon.close()


class _Raw:
    """Bytes of our choice on the wire."""

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes

    def over(self, link: object, status: Status) -> None:
        """Nothing to give back."""


async def test_a_thousand_exposures_at_once(tmp_path: Path) -> None:
    count = limits.REGIONS_PER_SESSION_MAX
    async with session(VERBS, tmp_path) as pair:
        content = random.Random(7).randbytes(count * 4096)
        with filled(content) as buffer, trying("1,000 leases at once") as trial:
            exposures: list[Exposure] = []
            for n in range(count):
                exposures.append(await pair.daemon.expose(buffer.view[n * 4096 : n * 4096 + 4000]))
            with pytest.raises(FabricError) as caught:
                await pair.daemon.expose(buffer.view[:1])
            assert caught.value.status is Status.BUSY
            into = memoryview(bytearray(count * 4000))
            ops = [
                ReadOp(one.span(0, 4000), into[n * 4000 : n * 4000 + 4000])
                for n, one in enumerate(exposures)
            ]
            with trial.within(60):
                statuses = await pair.host.read(ops, soon(60))
            assert set(statuses) == {Status.OK}
            assert not pair.daemon.closed
            for n in range(count):
                trial.same(into[n * 4000 : n * 4000 + 4000], content[n * 4096 : n * 4096 + 4000])
            await asyncio.gather(*(pair.daemon.revoke(one) for one in exposures))
            assert set(await pair.host.read(ops[:50], soon(20))) == {Status.LEASE_EXPIRED}
            assert not pair.host.closed


async def test_chains_of_every_length(tmp_path: Path) -> None:
    """Work requests are reused and relinked from post to post."""
    seed = 20_261_123
    rng = random.Random(seed)
    content = rng.randbytes(1 << 20)
    counts = list(range(1, 2 * READS_PER_POST_MAX + 3))
    rng.shuffle(counts)
    async with session(VERBS, tmp_path) as pair:
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            for count in counts:
                places = [(rng.randrange(len(content) - 999), 999) for _ in range(count)]
                into = memoryview(bytearray(999 * count))
                ops = [
                    ReadOp(exposure.span(*place), into[n * 999 : n * 999 + 999])
                    for n, place in enumerate(places)
                ]
                assert set(await pair.host.read(ops, soon(20))) == {Status.OK}, f"seed={seed}"
                expected = b"".join(content[at : at + size] for at, size in places)
                assert into == expected, f"seed={seed} count={count}"


async def test_memory_never_touched_before_it_is_exposed(tmp_path: Path) -> None:
    """Pinned while it was still the shared zero page, it would stay zero for the peer."""
    async with session(VERBS, tmp_path) as pair:
        for kind in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
            memory = mmap.mmap(-1, 1 << 20, kind | mmap.MAP_ANONYMOUS)
            view = memoryview(memory)
            exposure = await pair.daemon.expose(view)
            view[:] = b"n" * len(view)
            into = bytearray(len(view))
            op = ReadOp(exposure.span(0, len(view)), memoryview(into))
            assert await pair.host.read([op], soon(20)) == [Status.OK]
            assert into == view
            await pair.daemon.revoke(exposure)
            view.release()
            memory.close()


async def test_soft_roce_fails_the_examination_of_windows(tmp_path: Path) -> None:
    """It checks the region's bounds, not the window's: so windows are not used on it."""
    async with serving(VERBS, tmp_path) as server:
        assert isinstance(server, VerbsFabricServer)
        assert "does not honour" in server.windows_verdict
        pair = await join(VERBS, server)
        assert not endpoint(pair.daemon)._windows
        await pair.host.close()


async def test_exposures_behind_windows(tmp_path: Path) -> None:
    """What a device that passes would do, with the examination overruled."""
    content = random.Random(3).randbytes(3 * 4096)
    with filled(content) as buffer:
        server = VERBS.server(tmp_path)
        assert isinstance(server, VerbsFabricServer)
        server._windows = True
        await server.start()
        try:
            assert server.windows_verdict == "on by setting"
            pair = await join(VERBS, server)
            exposures = await asyncio.gather(
                *(pair.daemon.expose(buffer.view[n * 4096 :][:4096]) for n in range(3))
            )
            into = memoryview(bytearray(len(content)))
            ops = [
                ReadOp(one.span(0, 4096), into[n * 4096 :][:4096])
                for n, one in enumerate(exposures)
            ]
            assert set(await pair.host.read(ops, soon(20))) == {Status.OK}
            assert into == content
            shown = endpoint(pair.daemon)._shown[exposures[1].rkey]
            assert shown.memories[0].rkey != exposures[1].rkey
            await pair.daemon.revoke(exposures[0])
            assert await pair.host.read(ops[1:2], soon(20)) == [Status.OK]
            # The region's own key gives nothing, and a revoked window's neither.
            span = RemoteSpan(shown.memories[0].rkey, exposures[1].address, 64)
            await assert_refused(pair, span)
            await pair.host.close()
            again = await join(VERBS, server)
            gone = await again.daemon.expose(buffer.view[:4096])
            await again.daemon.revoke(gone)
            await assert_refused(again, gone.span(0, 4096))
            await again.host.close()
        finally:
            await server.close()
