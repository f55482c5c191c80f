"""What every fabric must do, whatever it is made of. See `fabrics.FABRICS` for who is asked."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fabrics import (
    FABRICS,
    LIFETIME_NS,
    SECOND_NS,
    Fabric,
    filled,
    join,
    on_loops,
    refused,
    serving,
    session,
    soon,
)

from entresol_proto import limits
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import (
    Exposure,
    MappedEndpoint,
    ReadOp,
    RegisteringEndpoint,
    RemoteSpan,
)
from entresol_proto.fabric.landing import LandingEndpoint
from entresol_proto.status import FabricError, Status

MIB = limits.MIB
GUARD = 64  # canary bytes around every destination
SEED = 20_260_101


@pytest.fixture(params=list(FABRICS))
def fabric(request: pytest.FixtureRequest) -> Fabric:
    found = FABRICS[request.param]
    if found.missing is not None:
        pytest.skip(f"not run here: {found.missing}")
    return found


class Landing:
    """Destinations with canaries between them, and what should be in them."""

    def __init__(self, spans: Sequence[RemoteSpan]) -> None:
        total = sum(span.length_bytes + GUARD for span in spans) + GUARD
        self.memory = bytearray(b"\xa5" * total)
        self.ops: list[ReadOp] = []
        self.places: list[slice] = []
        view, at = memoryview(self.memory), GUARD
        for span in spans:
            place = slice(at, at + span.length_bytes)
            self.places.append(place)
            self.ops.append(ReadOp(span, view[place]))
            at = place.stop + GUARD

    def __getitem__(self, number: int) -> bytes:
        return bytes(self.memory[self.places[number]])

    def assert_canaries(self) -> None:
        end = 0
        for place in [*self.places, slice(len(self.memory), None)]:
            guard = self.memory[end : place.start]
            assert guard == b"\xa5" * len(guard), f"bytes landed outside the view at {end}"
            end = place.stop or 0


@functools.lru_cache(maxsize=8)
def noise(length: int, seed: int = SEED) -> bytes:
    return random.Random(seed).randbytes(length)


def cut(exposure: Exposure, places: Sequence[tuple[int, int]]) -> list[RemoteSpan]:
    return [exposure.span(offset, length) for offset, length in places]


# -- bytes ------------------------------------------------------------------------------------


@on_loops
async def test_reads_exact_bytes_of_many_sizes_and_offsets(fabric: Fabric, tmp_path: Path) -> None:
    content = noise(9 * MIB)
    sizes = [1, 2, 15, 16, 17, 4095, 4096, 4097, 65_537, MIB - 1, MIB, 4 * MIB + 1, 8 * MIB]
    places = [(offset, size) for size in sizes for offset in (0, 1, 4097, len(content) - size)]
    small, large = places[:-8], places[-8:]  # each way reads half of the large ones
    async with session(fabric, tmp_path) as pair:
        with filled(content) as buffer:
            for way, (owner, reader) in enumerate(pair.ways()):
                exposure = await owner.expose(buffer)
                for some in (small[:32], small[32:], large[way::2]):
                    landing = Landing(cut(exposure, some))
                    assert set(await reader.read(landing.ops, soon(30))) == {Status.OK}
                    for number, (offset, size) in enumerate(some):
                        assert landing[number] == content[offset : offset + size], (offset, size)
                    landing.assert_canaries()
                await owner.revoke(exposure)


@on_loops
async def test_reads_300_spans_of_several_exposures(fabric: Fabric, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    contents = [noise(300_000, seed) for seed in range(3)]
    async with session(fabric, tmp_path) as pair:
        with filled(contents[0]) as a, filled(contents[1]) as b, filled(contents[2]) as c:
            exposures = [await pair.daemon.expose(buffer) for buffer in (a, b, c)]
            picks = []
            for _ in range(300):
                size = rng.choice([1, 100, 5_000, 70_000])
                picks.append((rng.randrange(3), rng.randrange(300_000 - size), size))
            landing = Landing([exposures[n].span(at, size) for n, at, size in picks])
            assert set(await pair.host.read(landing.ops, soon(30))) == {Status.OK}
            for number, (n, at, size) in enumerate(picks):
                assert landing[number] == contents[n][at : at + size], f"seed={SEED} {number}"
            landing.assert_canaries()


@on_loops
async def test_reads_as_many_spans_as_are_allowed_and_no_more(
    fabric: Fabric, tmp_path: Path
) -> None:
    content = noise(limits.SPANS_PER_READ_MAX)
    async with session(fabric, tmp_path) as pair:
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            into = memoryview(bytearray(len(content)))
            ops = [ReadOp(exposure.span(n, 1), into[n : n + 1]) for n in range(len(content))]
            assert set(await pair.host.read(ops, soon(30))) == {Status.OK}
            assert into == content
            with pytest.raises(ValueError, match="spans"):
                await pair.host.read([*ops, ops[0]], soon())


@on_loops
async def test_both_directions_and_many_batches_at_once(fabric: Fabric, tmp_path: Path) -> None:
    contents = (noise(6 * MIB, 1), noise(6 * MIB, 2))
    async with session(fabric, tmp_path) as pair:
        with filled(contents[0]) as a, filled(contents[1]) as b:
            jobs = []
            for (owner, reader), buffer, content in zip(pair.ways(), (a, b), contents, strict=True):
                exposure = await owner.expose(buffer)
                for number in range(12):
                    places = [(number * 1_000 + n * 500_000, 400_000) for n in range(10)]
                    landing = Landing(cut(exposure, places))
                    jobs.append((reader.read(landing.ops, soon(30)), landing, places, content))
            results = await asyncio.gather(*(job[0] for job in jobs))
            for statuses, (_, landing, places, content) in zip(results, jobs, strict=True):
                assert set(statuses) == {Status.OK}
                for number, (at, size) in enumerate(places):
                    assert landing[number] == content[at : at + size]
                landing.assert_canaries()


@on_loops
async def test_reads_into_views_of_other_element_types(fabric: Fabric, tmp_path: Path) -> None:
    content = noise(4_096)
    async with session(fabric, tmp_path) as pair:
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            into = np.zeros((8, 128), np.float32)
            op = ReadOp(exposure.span(0, 4_096), into.data)
            assert await pair.host.read([op], soon()) == [Status.OK]
            assert into.tobytes() == content


# -- refusals ---------------------------------------------------------------------------------


@on_loops
async def test_spans_outside_the_exposure_are_refused_alone(fabric: Fabric, tmp_path: Path) -> None:
    content = noise(10_000)
    async with session(fabric, tmp_path) as pair:
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            rkey, base = exposure.rkey, exposure.address
            spans = [
                RemoteSpan(rkey, base, 10_000),
                RemoteSpan(rkey, base + 1, 10_000),
                RemoteSpan(rkey, base + 10_000, 1),
                RemoteSpan(rkey, base + 9_999, 1),
                RemoteSpan(rkey, base + 2**62, 100),
                RemoteSpan(rkey, base, 0),
                RemoteSpan(rkey, base + 5_000, 5_000),
            ]
            landing = Landing(spans)
            statuses = await pair.host.read(landing.ops, soon())
            good = {0: content, 3: content[9_999:], 6: content[5_000:]}
            for number, status in enumerate(statuses):
                assert status is (Status.OK if number in good else Status.BAD_REQUEST), number
                expected = good.get(number, b"\xa5" * spans[number].length_bytes)
                assert landing[number] == expected
            landing.assert_canaries()


@on_loops
async def test_an_unknown_rkey_is_refused(fabric: Fabric, tmp_path: Path) -> None:
    async with session(fabric, tmp_path) as pair:
        with filled(noise(100)) as buffer:
            exposure = await pair.daemon.expose(buffer)
            others = [exposure.rkey ^ 1, exposure.rkey ^ 0x8000_0000, 0, 2**32 - 1]
            landing = Landing([RemoteSpan(rkey, exposure.address, 100) for rkey in others])
            statuses = await pair.host.read(landing.ops, soon())
            assert set(statuses) == {Status.LEASE_EXPIRED}
            # What one side exposes is not readable at that side.
            mine = Landing([exposure.span(0, 100)])
            assert await pair.daemon.read(mine.ops, soon()) == [Status.LEASE_EXPIRED]


@on_loops
async def test_a_revoked_exposure_is_refused(fabric: Fabric, tmp_path: Path) -> None:
    content = noise(100_000)
    async with session(fabric, tmp_path) as pair:
        with filled(content) as kept, filled(content) as gone:
            stays, ends = await pair.daemon.expose(kept), await pair.daemon.expose(gone)
            await pair.daemon.revoke(ends)
            await pair.daemon.revoke(ends)
            landing = Landing([stays.span(0, 1_000), ends.span(0, 1_000)])
            first, second = await pair.host.read(landing.ops, soon())
            # All our ends are honest, so this holds for shm too (`revokes` false).
            assert first is Status.OK
            assert second in (Status.LEASE_EXPIRED, Status.FABRIC_ERROR)
            again = await pair.daemon.expose(gone)
            assert again.rkey != ends.rkey
            landing = Landing([again.span(0, 1_000)])
            assert await pair.host.read(landing.ops, soon()) == [Status.OK]
            assert landing[0] == content[:1_000]


@on_loops
async def test_nothing_written_after_revoke_returned_is_read(
    fabric: Fabric, tmp_path: Path
) -> None:
    """The rule that plaintext exposures stand on: once revoked, the memory can be reused."""
    content = b"\x11" * (8 * MIB)
    allowed = {Status.OK, Status.LEASE_EXPIRED, Status.FABRIC_ERROR, Status.DISCONNECTED}
    for delay_s in (0.0, 0.001, 0.004):
        folder = tmp_path / str(delay_s)  # a host that is too slow to be fenced is cut off
        folder.mkdir(0o700)
        async with session(fabric, folder) as pair:
            with filled(content) as buffer:
                exposure = await pair.daemon.expose(buffer)
                spans = cut(exposure, [(n * MIB, MIB) for n in range(8)])
                landings = [Landing(spans) for _ in range(4)]
                reads = [
                    asyncio.ensure_future(pair.host.read(landing.ops, soon()))
                    for landing in landings
                ]
                await asyncio.sleep(delay_s)
                await pair.daemon.revoke(exposure)
                buffer.view[:] = b"\xee" * len(content)
                for statuses, landing in zip(await asyncio.gather(*reads), landings, strict=True):
                    assert set(statuses) <= allowed
                    assert b"\xee" not in landing.memory
                    for number, status in enumerate(statuses):
                        if status is Status.OK:
                            assert landing[number] == b"\x11" * MIB
                    landing.assert_canaries()


@on_loops
async def test_the_callers_mistakes_raise(fabric: Fabric, tmp_path: Path) -> None:
    async with session(fabric, tmp_path) as pair:
        span = RemoteSpan(1, 0, 8)
        strided = memoryview(bytearray(16))[::2]
        for view in (memoryview(bytes(8)), memoryview(bytearray(9)), strided):
            with pytest.raises(ValueError, match="view"):
                await pair.host.read([ReadOp(span, view)], soon())
        assert await pair.host.read([], soon()) == []


@on_loops
async def test_exposures_are_bounded(
    fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REGIONS_PER_SESSION_MAX", 5)
    async with session(fabric, tmp_path) as pair:
        with filled(b"x" * 100) as buffer:
            exposures = [await pair.daemon.expose(buffer) for _ in range(5)]
            with pytest.raises(FabricError) as caught:
                await pair.daemon.expose(buffer)
            assert caught.value.status is Status.BUSY
            assert len({exposure.rkey for exposure in exposures}) == 5
            await pair.daemon.revoke(exposures[0])
            await pair.daemon.expose(buffer)


# -- time -------------------------------------------------------------------------------------


@on_loops
async def test_a_deadline_in_the_past_reads_nothing(fabric: Fabric, tmp_path: Path) -> None:
    async with session(fabric, tmp_path) as pair:
        with filled(noise(100)) as buffer:
            exposure = await pair.daemon.expose(buffer)
            landing = Landing([exposure.span(0, 100)])
            assert await pair.host.read(landing.ops, time.monotonic_ns()) == [Status.DEADLINE]
            await asyncio.sleep(0.02)
            assert landing[0] == b"\xa5" * 100


@on_loops
async def test_a_hanging_peer_costs_the_deadline_and_late_bytes_land_nowhere(
    fabric: Fabric, tmp_path: Path
) -> None:
    content = noise(12 * MIB)
    async with session(fabric, tmp_path) as pair:
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            spans = cut(exposure, [(n * MIB, MIB) for n in range(12)])
            fabric.hang(pair.daemon)
            landing = Landing(spans)
            wait_s = 0.15 if fabric.reads_can_hang else 20
            reading = pair.host.read(landing.ops, soon(wait_s))
            statuses = await asyncio.wait_for(reading, wait_s + 3)
            if not fabric.reads_can_hang:
                assert set(statuses) == {Status.OK}
                fabric.unhang(pair.daemon)
                return
            assert set(statuses) == {Status.DEADLINE}
            before = bytes(landing.memory)
            fabric.unhang(pair.daemon)
            for _ in range(5):  # late answers come, are dropped, and the next read is in step
                again = Landing(spans)
                assert set(await pair.host.read(again.ops, soon(30))) == {Status.OK}
                assert [again[n] for n in range(12)] == [
                    content[n * MIB : (n + 1) * MIB] for n in range(12)
                ]
            assert bytes(landing.memory) == before


@on_loops
async def test_a_deadline_or_cancel_in_the_middle_leaves_the_rest_of_the_view_alone(
    fabric: Fabric, tmp_path: Path
) -> None:
    content = noise(16 * MIB)
    async with session(fabric, tmp_path) as pair:
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            spans = cut(exposure, [(n * 2 * MIB, 2 * MIB) for n in range(8)])
            for turn, wait_s in enumerate((0.0005, 0.001, 0.002, 0.003, 0.005)):
                landing = Landing(spans)
                if turn % 2:
                    statuses = await pair.host.read(landing.ops, soon(wait_s))
                    assert set(statuses) <= {Status.OK, Status.DEADLINE}
                else:
                    reading = asyncio.ensure_future(pair.host.read(landing.ops, soon()))
                    await asyncio.sleep(wait_s)
                    reading.cancel()
                    await asyncio.wait([reading])
                before = bytes(landing.memory)
                await asyncio.sleep(0.02)
                assert bytes(landing.memory) == before, "bytes landed late"
                landing.assert_canaries()
            landing = Landing(spans)
            assert set(await pair.host.read(landing.ops, soon(30))) == {Status.OK}
            assert landing[7] == content[14 * MIB :]


# -- endings ----------------------------------------------------------------------------------


@on_loops
@pytest.mark.parametrize("how", ["close", "kill"])
async def test_a_peer_that_goes_ends_pending_reads(
    fabric: Fabric, tmp_path: Path, how: str
) -> None:
    content = noise(16 * MIB)
    async with session(fabric, tmp_path) as pair:
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            spans = cut(exposure, [(n * MIB, MIB) for n in range(16)])
            landings = [Landing(spans) for _ in range(6)]
            reads = [asyncio.ensure_future(pair.host.read(one.ops, soon(20))) for one in landings]
            await asyncio.sleep(0.002)
            if how == "close":
                await pair.daemon.close()
            else:
                fabric.kill(pair.daemon)
            results = await asyncio.wait_for(asyncio.gather(*reads), 5)
            for statuses, landing in zip(results, landings, strict=True):
                assert set(statuses) <= {Status.OK, Status.DISCONNECTED, Status.FABRIC_ERROR}
                for number, status in enumerate(statuses):
                    if status is Status.OK:
                        assert landing[number] == content[number * MIB : (number + 1) * MIB]
            after = Landing(spans[:1])
            for _ in range(200):
                if pair.host.closed:
                    break
                await asyncio.sleep(0.01)
            assert pair.host.closed
            assert await pair.host.read(after.ops, soon()) == [Status.DISCONNECTED]


@on_loops
async def test_close_is_idempotent_and_ends_everything(fabric: Fabric, tmp_path: Path) -> None:
    async with session(fabric, tmp_path) as pair:
        with filled(noise(4 * MIB)) as buffer:
            exposure = await pair.daemon.expose(buffer)
            landing = Landing([exposure.span(0, 4 * MIB)])
            reading = asyncio.ensure_future(pair.host.read(landing.ops, soon()))
            await asyncio.sleep(0)
            await asyncio.gather(pair.host.close(), pair.host.close())
            await pair.host.close()
            assert set(await reading) <= {Status.OK, Status.DISCONNECTED}
            assert pair.host.closed
            assert await pair.host.read(landing.ops, soon()) == [Status.DISCONNECTED]
            with pytest.raises(FabricError) as caught:
                await pair.host.expose(buffer)
            assert caught.value.status is Status.DISCONNECTED
            await pair.daemon.revoke(exposure)
            await pair.daemon.revoke(exposure)


@on_loops
async def test_closing_the_server_closes_its_sessions(fabric: Fabric, tmp_path: Path) -> None:
    async with serving(fabric, tmp_path) as server:
        pairs = [await join(fabric, server) for _ in range(3)]
        server.offer()
        await server.close()
        await server.close()
        with pytest.raises(FabricError):
            server.offer()
        for pair in pairs:
            assert pair.daemon.closed
            await pair.host.close()


@on_loops
async def test_many_sessions_at_once(fabric: Fabric, tmp_path: Path) -> None:
    count = 24
    contents = [noise(200_000, seed) for seed in range(count)]
    async with serving(fabric, tmp_path) as server:
        pairs = await asyncio.gather(*(join(fabric, server) for _ in range(count)))

        async def use(number: int) -> None:
            with filled(contents[number]) as buffer:
                exposure = await pairs[number].daemon.expose(buffer)
                for _ in range(3):
                    landing = Landing(cut(exposure, [(0, 100_000), (100_000, 100_000)]))
                    statuses = await pairs[number].host.read(landing.ops, soon(30))
                    assert set(statuses) == {Status.OK}
                    assert landing[0] + landing[1] == contents[number]
                await pairs[number].daemon.revoke(exposure)

        await asyncio.gather(*(use(number) for number in range(count)))
        rkeys = set()
        with filled(b"x") as buffer:
            for pair in pairs:
                rkeys.add((await pair.daemon.expose(buffer)).rkey)
            assert len(rkeys) == count  # random, not numbered per session
        for pair in pairs:
            await pair.host.close()


# -- opening ----------------------------------------------------------------------------------


@on_loops
async def test_accept_and_connect_run_in_either_order(fabric: Fabric, tmp_path: Path) -> None:
    async with serving(fabric, tmp_path) as server:
        offer = server.offer()
        if fabric.opens_by_reply:  # no choice: the daemon needs the reply
            host, reply = await registry.connect(offer, soon(), options=fabric.options())
            daemon = await server.accept(offer, reply, soon())
        else:
            accepting = asyncio.ensure_future(server.accept(offer, b"", soon()))
            await asyncio.sleep(0.01)
            host, reply = await registry.connect(offer, soon(), options=fabric.options())
            assert reply == b""
            daemon = await accepting
        with filled(b"hello") as buffer:
            exposure = await daemon.expose(buffer)
            landing = Landing([exposure.span(0, 5)])
            assert await host.read(landing.ops, soon()) == [Status.OK]
            assert landing[0] == b"hello"
        await host.close()


@on_loops
async def test_wrong_used_withdrawn_and_expired_tickets_are_refused(
    fabric: Fabric, tmp_path: Path
) -> None:
    lifetime_s = 2 if fabric.opens_by_reply else 1  # making queue pairs takes its time
    async with serving(fabric, tmp_path, lifetime_ns=int(lifetime_s * SECOND_NS)) as server:
        offer = server.offer()
        await refused(fabric, server, fabric.with_ticket(offer, b"\0" * 16))
        host, reply = await registry.connect(offer, soon(), options=fabric.options())
        if not fabric.opens_by_reply:
            await refused(fabric, server, offer)  # used, not yet accepted
        await server.accept(offer, reply, soon())
        await refused(fabric, server, offer)  # used and accepted
        with pytest.raises(FabricError):
            await server.accept(offer, reply, soon())
        withdrawn = server.offer()
        server.withdraw(withdrawn)
        server.withdraw(withdrawn)
        await refused(fabric, server, withdrawn)
        expired = server.offer()
        await asyncio.sleep(lifetime_s + 0.1)
        await refused(fabric, server, expired)
        with pytest.raises(FabricError):
            await server.accept(expired, b"", soon())
        assert not host.closed
        await host.close()


@on_loops
async def test_an_offer_nobody_takes_ends_at_the_deadline(fabric: Fabric, tmp_path: Path) -> None:
    async with serving(fabric, tmp_path) as server:
        offer = server.offer()
        with pytest.raises(FabricError) as caught:
            await server.accept(offer, b"", soon(0.05))
        by_reply = fabric.opens_by_reply  # then an empty reply is malformed, not late
        assert caught.value.status is (Status.BAD_REQUEST if by_reply else Status.DEADLINE)
        await refused(fabric, server, offer)
        # Taken, but never accepted by the daemon: the host is cut off when the offer expires.
    async with serving(fabric, tmp_path, lifetime_ns=SECOND_NS) as server:
        host, _ = await registry.connect(server.offer(), soon(), options=fabric.options())
        for _ in range(1000):
            if host.closed:
                break
            await asyncio.sleep(0.01)
        assert host.closed
        await host.close()


@on_loops
async def test_a_reply_with_content_is_refused(fabric: Fabric, tmp_path: Path) -> None:
    async with serving(fabric, tmp_path) as server:
        offer = server.offer()
        with pytest.raises(FabricError):
            await server.accept(offer, b"unexpected", soon())
        await refused(fabric, server, offer)


@on_loops
async def test_open_offers_are_bounded(fabric: Fabric, tmp_path: Path) -> None:
    async with serving(fabric, tmp_path, lifetime_ns=LIFETIME_NS) as server:
        offers = [server.offer() for _ in range(fabric.offers_max)]
        with pytest.raises(FabricError) as caught:
            server.offer()
        assert caught.value.status is Status.BUSY
        assert len({offer.params for offer in offers}) == len(offers)
        assert offers[0].params.hex() not in repr(offers[0])
        server.withdraw(offers[0])
        server.offer()


@on_loops
async def test_a_server_that_is_gone_is_an_error(fabric: Fabric, tmp_path: Path) -> None:
    async with serving(fabric, tmp_path) as server:
        offer = server.offer()
    await refused(fabric, server, offer)


@on_loops
async def test_junk_from_strangers_does_not_disturb_a_session(
    fabric: Fabric, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    async with serving(fabric, tmp_path, lifetime_ns=SECOND_NS) as server:
        pair = await join(fabric, server)
        content = noise(500_000)
        with filled(content) as buffer:
            exposure = await pair.daemon.expose(buffer)
            junk = [rng.randbytes(rng.choice([1, 15, 16, 32, 1_000, 50_000])) for _ in range(12)]
            throws = [asyncio.ensure_future(fabric.throw(server.offer(), one)) for one in junk]
            for _ in range(5):
                landing = Landing([exposure.span(0, 500_000)])
                assert await pair.host.read(landing.ops, soon()) == [Status.OK], f"seed={SEED}"
                assert landing[0] == content
            await asyncio.gather(*throws)
        await pair.host.close()


@on_loops
async def test_capabilities_tell_the_truth(fabric: Fabric, tmp_path: Path) -> None:
    async with session(fabric, tmp_path) as pair:
        assert pair.daemon.capabilities == pair.host.capabilities
        assert pair.daemon.kind is pair.host.kind is pair.server.kind
        for end in (pair.host, pair.daemon):
            assert isinstance(end, MappedEndpoint) is end.capabilities.maps
            assert isinstance(end, LandingEndpoint) is end.capabilities.lands
            assert isinstance(end, RegisteringEndpoint) is end.capabilities.registers
        if isinstance(pair.host, MappedEndpoint):
            with filled(b"0123456789") as buffer:
                exposure = await pair.daemon.expose(buffer)
                view = pair.host.map_span(exposure.span(2, 5))
                assert isinstance(view, memoryview)
                assert view.readonly
                assert bytes(view) == b"23456"
                buffer.view[2:4] = b"ab"
                assert bytes(view) == b"ab456"
                outside = RemoteSpan(exposure.rkey, exposure.address + 6, 5)
                assert pair.host.map_span(outside) is Status.BAD_REQUEST
                await pair.daemon.revoke(exposure)
                assert pair.host.map_span(exposure.span(0, 1)) is Status.LEASE_EXPIRED
                assert bytes(view) == b"ab456"
                view.release()


@on_loops
async def test_memory_used_in_place_is_given_back_before_its_owner_has_it(
    fabric: Fabric, tmp_path: Path
) -> None:
    async with session(fabric, tmp_path) as pair:
        if not isinstance(pair.host, MappedEndpoint):
            assert not pair.host.capabilities.maps
            assert not hasattr(pair.host, "borrow")
            return
        with filled(b"0123456789") as first, filled(b"abcdefghij") as second:
            one, two = await pair.daemon.expose(first), await pair.daemon.expose(second)
            outside = RemoteSpan(one.rkey, one.address + 6, 5)
            lent = pair.host.borrow([one.span(2, 5), outside, two.span(0, 3)])
            views = [bytes(v) if isinstance(v, memoryview) else v for v in lent.views]
            assert views == [b"23456", Status.BAD_REQUEST, b"abc"]
            revoked = asyncio.ensure_future(pair.daemon.revoke(one))
            while pair.host.map_span(one.span(0, 1)) is not Status.LEASE_EXPIRED:
                await asyncio.sleep(0.001)
            assert not revoked.done(), "its owner has it back while it is in use"
            assert bytes(lent.views[0]) == b"23456"
            ended = lent.give_back()
            assert ended == [Status.LEASE_EXPIRED, Status.BAD_REQUEST, Status.OK]
            await revoked

            lent = pair.host.borrow([two.span(0, 3)])
            await pair.host.close()
            assert bytes(lent.views[0]) == b"abc", "in use, and no longer mapped"
            assert lent.give_back() == [Status.DISCONNECTED]
            assert pair.host.borrow([two.span(0, 3)]).give_back() == [Status.DISCONNECTED]
