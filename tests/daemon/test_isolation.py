"""Nothing crosses tenants, nothing forged is believed, nothing damaged is served.

Assertions come in pairs: what is refused to one is given to the other, because a test of refusals
alone would pass with the store switched off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_lab import (
    DESCRIPTOR,
    FABRICS,
    Raw,
    Site,
    all_are,
    assert_idle,
    client_of,
    content,
    counts,
    get,
    key_of,
    keys_of,
    put,
    put_item,
    raw_of,
    run_of,
    seed_of,
    shape,
)
from harness import Running, eventually, running_daemon

from entresol_client.results import PutBlock, RequestFailedError
from entresol_daemon.control.admin import TenantQuota
from entresol_daemon.events.types import Kind
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.keys.receipts import verify_receipt
from entresol_proto.fabric.base import Exposure, ReadOp, RemoteSpan
from entresol_proto.ids import EngineKey, TenantName, wire_key
from entresol_proto.limits import KIB
from entresol_proto.seal.block import BlockIdentity, BlockKey, BlockMeta, SealedHeader, seal_into
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import EntresolError, Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg
from entresol_proto.wire.data import Exists, Grant, OpenAt, Reason, Release

pytestmark = pytest.mark.daemon

SIZE = 48 * KIB


@asynccontextmanager
async def lab(directory: Path, fabric: str = "shm", **options: Any) -> AsyncIterator[Running]:
    fabrics = ["shm"] if fabric == "shm" else ["tcp"]
    change = shape(fabrics=fabrics, tcp_tls=fabric == "tls", **options)
    async with running_daemon(directory / "d", change) as running:
        yield running
        await assert_idle(running.daemon)


def events_of(running: Running, tenant: str) -> list[Any]:
    """Everything published for a tenant."""
    log = running.daemon.shard.parts.events
    found = log._read(TenantName(tenant), 0, 100_000)
    assert found is not None
    return found


# -- one tenant and another


@pytest.mark.parametrize("fabric", FABRICS)
async def test_own_tenant_everything_other_tenant_nothing(tmp_path: Path, fabric: str) -> None:
    async with (
        lab(tmp_path, fabric) as running,
        client_of(running, "dev", fabric) as mine,
        client_of(running, "other", fabric) as theirs,
    ):
        # The same model and the same salt: only the certificate differs.
        salted = replace(DESCRIPTOR, cache_salt="shared by mistake")
        own, foreign = await mine.namespace(salted), await theirs.namespace(salted)
        keys = keys_of(40)
        assert (await put(own, keys, SIZE, ack="durable")).ok
        places = ["host"] if fabric == "tcp" else ["host", "daemon"]
        for place in places:
            assert (await get(own, keys, SIZE, open_at=place)).ok
            found = await get(foreign, keys, SIZE, open_at=place)
            assert all_are(found, Status.MISS), counts(found.statuses)
        assert sum((await own.exists(keys)).present) == 40
        assert sum((await foreign.exists(keys)).present) == 0
        assert (await own.stage(keys, hold_ns=200_000_000)).prefix_blocks == 40
        assert set((await foreign.stage(keys, hold_ns=200_000_000)).statuses) == {Status.MISS}
        assert (await own.touch(keys)).count == 40
        assert (await foreign.touch(keys)).count == 0
        assert (await foreign.forget(keys)).count == 0
        assert {row.reason for row in await own.explain(keys)} == {Reason.IN_MEMORY}
        assert {row.reason for row in await foreign.explain(keys)} == {Reason.NEVER_STORED}
        assert (await get(own, keys, SIZE)).ok, "the other tenant's FORGET reached it"
        # Both may store the same keys; each gets its own back.
        assert (await foreign.put(blocks_of(keys, b"theirs"))).ok
        buffers = [bytearray(SIZE) for _ in keys]
        assert (await foreign.get_into(keys, buffers)).ok
        assert all(
            bytes(b) == content(k + b"theirs", SIZE) for k, b in zip(keys, buffers, strict=True)
        )
        assert (await get(own, keys, SIZE)).ok
        assert (await foreign.forget(keys)).count == 40
        assert (await get(own, keys, SIZE)).ok
        for tenant in ("dev", "other"):
            told = events_of(running, tenant)
            assert {event.tenant for event in told} == {tenant}
            assert sum(len(e.wire_keys) for e in told if e.kind is Kind.STORED) == 40
        spaces = [{e.namespace_id for e in events_of(running, t)} for t in ("dev", "other")]
        assert not spaces[0] & spaces[1]


def blocks_of(keys: Sequence[bytes], mark: bytes) -> list[Any]:
    return [PutBlock(key, content(key + mark, SIZE), position=at) for at, key in enumerate(keys)]


async def test_names_differ_between_tenants_and_salts(tmp_path: Path) -> None:
    async with lab(tmp_path) as running:
        seen: dict[str, set[bytes]] = {"id": set(), "secret": set(), "key": set()}
        for tenant in ("dev", "other"):
            async with raw_of(running, tenant) as raw:
                for salt in (None, "a", "b"):
                    opened = await raw.namespace(replace(DESCRIPTOR, cache_salt=salt))
                    seen["id"].add(opened.namespace_id)
                    seen["secret"].add(opened.secret)
                    seen["key"].add(wire_key(opened.secret, EngineKey(key_of(1))))
        assert [len(found) for found in seen.values()] == [6, 6, 6]


async def test_wire_keys_of_another_tenant_name_nothing(tmp_path: Path) -> None:
    """Not even with the very 16 bytes, which a tenant could only have stolen."""
    async with (
        lab(tmp_path) as running,
        raw_of(running) as mine,
        raw_of(running, "other") as theirs,
    ):
        async with client_of(running) as client:
            assert (await put(await client.namespace(DESCRIPTOR), keys_of(8), SIZE)).ok
        own, foreign = await mine.namespace(), await theirs.namespace()
        stolen = run_of(own, keys_of(8))
        assert (await mine.ask(Exists(own.handle, stolen))).prefix_blocks == 8
        assert (await theirs.ask(Exists(foreign.handle, stolen))).prefix_blocks == 0
        for place in OpenAt:
            grants = await theirs.fetch(foreign.handle, stolen, open_at=place)
            assert not any(grant.items for grant in grants)
            grants = await mine.fetch(own.handle, stolen, open_at=place)
            assert sum(len(grant.items) for grant in grants) == 8
            release(mine, grants)


@asynccontextmanager
async def channel_of(running: Running, tenant: str) -> AsyncIterator[grpc.aio.Channel]:
    tls = running.client_config(tenant).tls
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
    )
    address = f"localhost:{running.daemon.grpc.port}"
    async with grpc.aio.secure_channel(address, credentials) as channel:
        yield channel


async def test_events_and_admin_over_grpc(tmp_path: Path) -> None:
    async with (
        lab(tmp_path) as running,
        channel_of(running, "dev") as mine,
        channel_of(running, "other") as theirs,
        client_of(running) as client,
        client_of(running, "other"),
    ):
        watches = [pbg.EventsStub(c).Watch(pb.WatchRequest()) for c in (mine, theirs)]
        for watch in watches:
            await watch.read()  # confirms the position
        keys = keys_of(5)
        assert (await put(await client.namespace(DESCRIPTOR), keys, SIZE)).ok
        seen = 0
        while seen < 5:
            reply = await watches[0].read()
            assert {event.tenant for event in reply.events} == {"dev"}
            seen += len(reply.events)
        more = asyncio.ensure_future(watches[1].read())
        await asyncio.sleep(0.3)
        assert not more.done(), f"the other tenant was told: {more.result()}"
        more.cancel()
        for watch in watches:
            watch.cancel()
        for channel, wanted in ((mine, 5), (theirs, 0)):
            told = [e async for r in pbg.EventsStub(channel).Snapshot(pb.SnapshotRequest())
                    for e in r.events]  # fmt: skip
            assert len(told) == wanted
        stub = pbg.EventsStub(theirs)
        for call in (
            stub.Watch(pb.WatchRequest(tenant="dev")),
            stub.Snapshot(pb.SnapshotRequest(tenant="dev")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        admin = pbg.AdminStub(theirs)
        for call in (
            admin.Stat(pb.StatRequest()),
            admin.TenantList(pb.TenantListRequest()),
            admin.TenantErase(pb.TenantEraseRequest(name="dev")),
            admin.Drain(pb.DrainRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNIMPLEMENTED,
            )
        assert (await get(await client.namespace(DESCRIPTOR), keys, SIZE)).ok


# -- forged numbers


async def read_one(raw: Raw, span: RemoteSpan) -> tuple[Status, bytes]:
    into = bytearray(max(1, span.length_bytes))
    view = memoryview(into)[: span.length_bytes]
    statuses = await raw.endpoint.read([ReadOp(span, view)], _soon())
    return statuses[0], bytes(into)


def _soon() -> int:
    return time.monotonic_ns() + 20_000_000_000


def release(raw: Raw, grants: Sequence[Grant]) -> None:
    for grant in grants:
        if grant.items:
            raw.connection.release(grant.lease_id)


@pytest.mark.parametrize("fabric", FABRICS)
async def test_rkeys_and_spans_of_others_read_nothing(tmp_path: Path, fabric: str) -> None:
    seed = seed_of("rkeys")
    rng = random.Random(seed)
    async with (
        lab(tmp_path, fabric) as running,
        raw_of(running, "dev", fabric) as owner,
        raw_of(running, "dev", fabric) as sibling,
        raw_of(running, "other", fabric) as thief,
    ):
        for tenant in ("dev", "other"):
            async with client_of(running, tenant, fabric) as client:
                assert (await put(await client.namespace(DESCRIPTOR), keys_of(4), SIZE)).ok
        namespace = await owner.namespace()
        places = [OpenAt.HOST] if fabric == "tcp" else list(OpenAt)
        for place in places:
            run = run_of(namespace, keys_of(4))
            grants = await owner.fetch(namespace.handle, run, open_at=place)
            spans = [item.span for grant in grants for item in grant.items]
            assert len(spans) == 4
            for span in spans:
                assert (await read_one(owner, span))[0] is Status.OK
                for stranger in (sibling, thief):
                    status, got = await read_one(stranger, span)
                    assert status is Status.LEASE_EXPIRED, status
                    assert not any(got)
            # Tenants with exposures of their own, so that a wrong table would answer.
            theirs = await thief.namespace()
            more = await thief.fetch(theirs.handle, run_of(theirs, keys_of(4)), open_at=place)
            for span in spans:
                assert (await read_one(thief, span))[0] is Status.LEASE_EXPIRED
            for _ in range(300):
                guess = RemoteSpan(rng.randrange(2**32), rng.randrange(2**20), 4096)
                if guess.rkey not in {i.span.rkey for g in more for i in g.items}:
                    assert (await read_one(thief, guess))[0] is Status.LEASE_EXPIRED
            rkey = spans[0].rkey
            for address, length in ((2**40, 4096), (2**64 - 4096, 4096), (0, 16 << 20), (2**63, 1)):
                status, _ = await read_one(owner, RemoteSpan(rkey, address, length))
                assert status is Status.BAD_REQUEST, (address, length, status)
            release(owner, grants)
            release(thief, more)
        for session in running.daemon.shard.sessions.values():
            pool = running.daemon.shard.parts.residency.pool
            slabs = {slab.number: slab for owned in pool._owned.values() for slab in owned}
            for number in session.exposures:
                assert slabs[number].owner == session.account.stream


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_leases_and_reservations_belong_to_their_session(tmp_path: Path, fabric: str) -> None:
    async with (
        lab(tmp_path, fabric) as running,
        raw_of(running, "dev", fabric) as owner,
        raw_of(running, "dev", fabric) as sibling,
        raw_of(running, "other", fabric) as thief,
    ):
        async with client_of(running, "dev", fabric) as client:
            assert (await put(await client.namespace(DESCRIPTOR), keys_of(4), SIZE)).ok
        namespace = await owner.namespace()
        for stranger in (sibling, thief):
            await stranger.namespace()
        grants = await owner.fetch(namespace.handle, run_of(namespace, keys_of(4)))
        leases = running.daemon.shard.parts.leases
        held = len(leases)
        assert held >= 1
        reserved = await owner.reserve(namespace.handle, [put_item(namespace, key_of(77), SIZE)])
        put_id = reserved.items[0].put_id
        forged = tuple(g.lease_id + d for g in grants for d in (0, 1, -1) if g.lease_id + d >= 0)
        reports = tuple((g.lease_id, i.index, Status.CORRUPT) for g in grants for i in g.items)
        for stranger in (sibling, thief):
            stranger.connection._write(
                stranger.connection.session.send(Release(forged, reports))[1]
            )
            for span in (RemoteSpan(0, 0, 0), RemoteSpan(1, 0, SIZE)):
                for number in (put_id, put_id + 1, 0, 2**64 - 1):
                    with pytest.raises(RequestFailedError) as caught:
                        await stranger.commit([(number, span)])
                    assert caught.value.status is Status.BAD_REQUEST
        assert len(leases) == held, "a stranger released a lease"
        assert running.daemon.shard.puts._reservations, "a stranger gave up a reservation"
        for item in (item for grant in grants for item in grant.items):
            assert (await read_one(owner, item.span))[0] is Status.OK
        release(owner, grants)
        await eventually(lambda: not len(leases), what="release by the owner")
        await owner.commit([(put_id, RemoteSpan(0, 0, 0))])
        assert running.daemon.shard.parts.meters.totals.blocks_corrupt == 0


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_no_number_tells_how_much_others_do(tmp_path: Path, fabric: str) -> None:
    """Counted over all sessions, the ids of puts and leases told each what all others did."""
    async with (
        lab(tmp_path, fabric) as running,
        raw_of(running, "dev", fabric) as mine,
        client_of(running, "other", fabric) as other,
    ):
        async with client_of(running, "dev", fabric) as client:
            assert (await put(await client.namespace(DESCRIPTOR), keys_of(1), SIZE)).ok
        namespace, theirs = await mine.namespace(), await other.namespace(DESCRIPTOR)
        seen: list[int] = []
        for busy in range(3):
            if busy:
                assert (await put(theirs, keys_of(5, f"busy{busy}"), SIZE)).ok
                assert (await get(theirs, keys_of(5, f"busy{busy}"), SIZE)).ok
            item = put_item(namespace, key_of(70 + busy), SIZE)
            seen.append((await mine.reserve(namespace.handle, [item])).items[0].put_id)
            grants = await mine.fetch(namespace.handle, run_of(namespace, keys_of(1)))
            seen += [grant.lease_id for grant in grants]
            release(mine, grants)
        assert seen == list(range(seen[0], seen[0] + 6))
        await mine.commit([(put_id, RemoteSpan(0, 0, 0)) for put_id in seen[::2]])
        await eventually(lambda: not len(running.daemon.shard.parts.leases), what="released")


# -- forged blocks


@dataclass
class Forger:
    """Seals blocks as a host does on tcp, with whatever is wrong in them."""

    raw: Raw
    namespace: Any
    memory: bytearray
    exposure: Exposure

    @classmethod
    async def of(cls, raw: Raw) -> Forger:
        memory = bytearray(256 * KIB)
        exposure = await raw.endpoint.expose(memoryview(memory))
        return cls(raw, await raw.namespace(), memory, exposure)

    async def reserve(self, key: bytes) -> Any:
        item = put_item(self.namespace, key, SIZE)
        reply = await self.raw.reserve(self.namespace.handle, [item])
        assert reply.items[0].status is Status.OK
        return reply.items[0]

    def seal(self, named: bytes, grant: Any, **wrong: Any) -> int:
        """Seal the block of a key into the exposed memory, with some values replaced."""
        plain = content(named, wrong.get("plain_bytes", SIZE))
        engine_key = wrong.get("engine_key", named)
        name = wire_key(self.namespace.secret, EngineKey(named))
        key = BlockKey(wrong.get("key", grant.key), wrong.get("commitment", grant.commitment))
        header = seal_into(
            memoryview(self.memory),
            memoryview(plain),
            identity=BlockIdentity(
                wrong.get("namespace_id", self.namespace.namespace_id),
                wrong.get("wire_key", name),
                engine_key,
                DType.from_name(DESCRIPTOR.dtype),
                wrong.get("dek_version", grant.dek_version),
            ),
            block_key=key,
            salt=wrong.get("salt", grant.salt),
            codec_id=self.namespace.codec_id,
            meta=BlockMeta(b"", 0, DESCRIPTOR.block_tokens, b""),
            chunk_bytes=self.namespace.chunk_bytes,
        )
        return header.sealed_bytes

    async def commit(self, grant: Any, length: int) -> Status:
        return (await self.raw.commit([(grant.put_id, self.exposure.span(0, length))]))[0]


async def test_host_sealed_blocks_with_a_wrong_header_are_refused(tmp_path: Path) -> None:
    seed = seed_of("forged_headers")
    rng = random.Random(seed)
    async with lab(tmp_path, "tcp") as running, raw_of(running, "dev", "tcp") as raw:
        forger = await Forger.of(raw)
        other = await forger.reserve(key_of(500))
        wrongs: list[dict[str, Any]] = [
            {"namespace_id": bytes(16)},
            {"wire_key": bytes(16)},
            {"wire_key": wire_key(forger.namespace.secret, EngineKey(key_of(500)))},
            {"engine_key": key_of(500)},
            {"engine_key": key_of(1)[:8]},
            {"salt": other.salt},
            {"commitment": other.commitment},
            {"salt": other.salt, "commitment": other.commitment, "key": other.key},
            {"dek_version": 2},
            {"dek_version": 0xFFFF},
            {"plain_bytes": SIZE - 1},
            {"plain_bytes": 1},
        ]
        for number, wrong in enumerate(wrongs):
            grant = await forger.reserve(key_of(number))
            status = await forger.commit(grant, forger.seal(key_of(number), grant, **wrong))
            assert status in (Status.CORRUPT, Status.CONFLICT), (wrong, status)
        grant = await forger.reserve(key_of(100))
        length = forger.seal(key_of(100), grant)
        good = bytes(forger.memory[:length])
        header = SealedHeader.parse(good)
        for cut in (1, 16, length - header.header_bytes, length - 1):
            forger.memory[:length] = good
            assert await forger.commit(grant, length - cut) is not Status.OK
            grant = await forger.reserve(key_of(100))
            length = forger.seal(key_of(100), grant)
            good = bytes(forger.memory[:length])
        forger.memory[length : length + 64] = bytes(64)
        assert await forger.commit(grant, length + 64) is not Status.OK
        # One random bit in some bytes of the header (in every one, and much else: proof line S2).
        for at in rng.sample(range(header.header_bytes), 24):
            grant = await forger.reserve(key_of(200 + at))
            length = forger.seal(key_of(200 + at), grant)
            forger.memory[at] ^= 1 << rng.randrange(8)
            status = await forger.commit(grant, length)
            assert status in (Status.CORRUPT, Status.CONFLICT, Status.BAD_REQUEST), (
                seed,
                at,
                status,
            )
        # And the same by the book.
        grant = await forger.reserve(key_of(100))
        assert await forger.commit(grant, forger.seal(key_of(100), grant)) is Status.OK
        with pytest.raises(RequestFailedError):
            await forger.commit(grant, length)  # the same ticket twice
        await raw.commit([(other.put_id, RemoteSpan(0, 0, 0))])
        async with client_of(running, "dev", "tcp") as client:
            space = await client.namespace(DESCRIPTOR)
            keys = keys_of(300 + header.header_bytes)
            found = await get(space, keys, SIZE)
            assert [k for k, s in zip(keys, found.statuses, strict=True) if s is Status.OK] == [
                key_of(100)
            ]


async def test_host_sealed_garbage_is_a_miss_that_the_daemon_finds_out(tmp_path: Path) -> None:
    """A host may seal nonsense for its own tenant; nobody ever gets it as a block."""
    seed = seed_of("forged_chunks")
    rng = random.Random(seed)
    async with lab(tmp_path, "tcp") as running:
        async with raw_of(running, "dev", "tcp") as raw:
            forger = await Forger.of(raw)
            for number in range(24):
                grant = await forger.reserve(key_of(number))
                length = forger.seal(key_of(number), grant)
                start, _ = SealedHeader.parse(bytes(forger.memory[:length])).chunk_span(0)
                forger.memory[rng.randrange(start, length)] ^= 1 << rng.randrange(8)
                await forger.commit(grant, length)
        async with client_of(running, "dev", "tcp") as client:
            space = await client.namespace(DESCRIPTOR)
            found = await get(space, keys_of(24), SIZE)
            assert Status.OK not in found.statuses
            parts = running.daemon.shard.parts
            await eventually(
                lambda: parts.meters.totals.blocks_corrupt == 24, what="the daemon's own verdicts"
            )
            assert (await put(space, keys_of(24), SIZE)).ok
            assert (await get(space, keys_of(24), SIZE)).ok


# -- damage


@pytest.mark.parametrize("place", ["host", "daemon"])
async def test_bits_flipped_on_flash_are_counted_misses(tmp_path: Path, place: str) -> None:
    seed = seed_of("flash_flips")
    rng = random.Random(seed)
    site = Site.prepare(tmp_path / "d")
    keys = keys_of(60)
    spots: list[tuple[int, int]] = []
    async with site.running() as running, client_of(running) as client:
        assert (await put(await client.namespace(DESCRIPTOR), keys, SIZE, ack="durable")).ok
        engine = running.daemon.shard.parts.engine
        index = engine.index
        for slot in index.slots_of(next(iter(index.namespaces()))).tolist():
            base = engine._superblock.segment_at(int(index.m_segment[slot]))
            spots.append(
                (base + int(index.m_offset[slot]) * BLOCK, int(index.m_sealed_bytes[slot]))
            )
    with site.config.flash_path.open("r+b") as file:
        for number, (at, sealed) in enumerate(spots):
            if number % 3 == 0:
                continue  # untouched
            spot = at + RECORD_HEADER_BYTES + rng.randrange(sealed if number % 3 == 1 else 200)
            file.seek(spot)
            byte = file.read(1)[0] ^ (1 << rng.randrange(8))
            file.seek(spot)
            file.write(bytes([byte]))
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        found = await get(space, keys, SIZE, open_at=place)
        assert found.statuses.count(Status.OK) == 20, (seed, counts(found.statuses))
        assert found.statuses.count(Status.CORRUPT) == 40, (seed, counts(found.statuses))
        parts = running.daemon.shard.parts
        await eventually(lambda: parts.meters.totals.blocks_corrupt == 40, what="40 counted")
        told = [e for e in events_of(running, "dev") if e.kind is Kind.CORRUPT]
        assert sum(len(e.wire_keys) for e in told) == 40
        bad = [k for k, s in zip(keys, found.statuses, strict=True) if s is Status.CORRUPT]
        assert all_are(await get(space, bad, SIZE, open_at=place), Status.MISS)
        assert {row.reason for row in await space.explain(bad)} == {Reason.CORRUPT}
        assert (await put(space, bad, SIZE, ack="durable")).ok
        assert (await get(space, keys, SIZE, open_at=place)).ok
        await assert_idle(running.daemon)
    async with site.running() as running, client_of(running) as client:
        assert (await get(await client.namespace(DESCRIPTOR), keys, SIZE)).ok


@pytest.mark.parametrize(
    ("fabric", "place"), [("shm", "host"), ("shm", "daemon"), ("tcp", "host"), ("tls", "daemon")]
)
async def test_bits_flipped_in_memory_are_counted_misses(
    tmp_path: Path, fabric: str, place: str
) -> None:
    seed = seed_of("memory_flips")
    rng = random.Random(seed)
    async with lab(tmp_path, fabric) as running, client_of(running, "dev", fabric) as client:
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(30)
        assert (await put(space, keys, SIZE, ack="durable")).ok
        parts = running.daemon.shard.parts
        hit: set[bytes] = set()
        for resident in list(parts.residency._by_slot.values())[::2]:
            header = SealedHeader.parse(resident.extent.view[RECORD_HEADER_BYTES:])
            end = RECORD_HEADER_BYTES + resident.sealed_bytes
            at = rng.randrange(end - 16 if rng.random() < 0.3 else end - SIZE // 2, end)
            resident.extent.view[at] ^= 1 << rng.randrange(8)
            hit.add(header.engine_key)
        found = await get(space, keys, SIZE, open_at=place)
        for key, status in zip(keys, found.statuses, strict=True):
            assert status is (Status.CORRUPT if key in hit else Status.OK), (seed, status)
        await eventually(lambda: parts.meters.totals.blocks_corrupt == 15, what="15 counted")
        again = await get(space, sorted(hit), SIZE, open_at=place)
        assert all_are(again, Status.MISS), counts(again.statuses)


async def test_a_lying_host_cannot_delete_good_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with lab(tmp_path) as running:
        async with client_of(running) as client:
            assert (await put(await client.namespace(DESCRIPTOR), keys_of(6), SIZE)).ok
        async with raw_of(running) as raw:
            namespace = await raw.namespace()
            keys = run_of(namespace, keys_of(6))
            with caplog.at_level(logging.WARNING, "entresol.get"):
                for status in Status:
                    grants = await raw.fetch(namespace.handle, keys)
                    lies = [(g.lease_id, i.index, status) for g in grants for i in g.items]
                    lies += [(g.lease_id, 5000, status) for g in grants]
                    lies += [(2**63, 0, status), *(lies[:1] * 3000)]
                    frame = Release(tuple(g.lease_id for g in grants if g.items), tuple(lies))
                    raw.connection._write(raw.connection.session.send(frame)[1])
                await raw.ask(Exists(namespace.handle, keys))
                await assert_idle(running.daemon)
        looked = sum("event=report_examined" in record.message for record in caplog.records)
        assert 6 <= looked <= 24, f"{looked} looks for six blocks and two kinds of lies"
        async with client_of(running) as client:
            assert (await get(await client.namespace(DESCRIPTOR), keys_of(6), SIZE)).ok
        assert running.daemon.shard.parts.meters.totals.blocks_corrupt == 0


# -- erasure


async def test_a_receipt_counts_the_leases_of_its_tenant_only(tmp_path: Path) -> None:
    """What others lease meanwhile is theirs: the count was of all, and could go below zero."""
    async with (
        running_daemon(tmp_path / "d", shape()) as running,
        raw_of(running) as mine,
        raw_of(running, "other") as theirs,
        client_of(running) as my_client,
        client_of(running, "other") as their_client,
    ):
        keys = keys_of(3)
        for client in (my_client, their_client):
            assert (await put(await client.namespace(DESCRIPTOR), keys, 4 * KIB)).ok
        own, foreign = await mine.namespace(), await theirs.namespace()
        assert await mine.fetch(own.handle, run_of(own, keys))
        admin = running.daemon.admin
        end_sessions = admin._end_sessions

        async def meanwhile(name: TenantName) -> int:
            for _ in range(4):
                assert await theirs.fetch(foreign.handle, run_of(foreign, keys))
            return await end_sessions(name)

        admin._end_sessions = meanwhile
        receipt = await admin.tenant_erase(TenantName("dev"))
        assert receipt.leases_revoked == 1
        assert len(receipt.digest()) == 32


async def test_an_erased_tenant_is_gone_and_the_other_is_not(tmp_path: Path) -> None:
    site = Site.prepare(tmp_path / "d")
    keys = keys_of(30)
    async with (
        site.running() as running,
        client_of(running) as mine,
        client_of(running, "other") as theirs,
    ):
        own, foreign = await mine.namespace(DESCRIPTOR), await theirs.namespace(DESCRIPTOR)
        for space in (own, foreign):
            assert (await put(space, keys, SIZE, ack="durable")).ok
        told = running.daemon.shard.parts.events.subscribe(TenantName("dev"))
        getting = asyncio.gather(*(get(own, keys, SIZE) for _ in range(4)))
        receipt = await running.daemon.admin.tenant_erase(TenantName("dev"))
        await getting  # bytes or misses; `get` judges them
        assert receipt.blocks_dropped == 30
        public_key = running.daemon.shard.parts.keyring.receipt_public_key
        verify_receipt(json.loads(receipt.signed_receipt), public_key)
        assert receipt.sessions_closed == 1
        assert not (await get(own, keys, SIZE, deadline_ns=1_000_000_000)).prefix_blocks
        assert not (await put(own, keys, SIZE)).stored
        assert (await get(foreign, keys, SIZE)).ok
        last = told.poll()
        assert isinstance(last, list)
        assert last[-1].kind is Kind.TENANT_ERASED
        told.close()
        assert len(running.daemon.shard.parts.engine.index) == 30
        with pytest.raises(EntresolError):
            running.daemon.shard.parts.keyring.get("dev")
    async with site.running() as running, client_of(running, "other") as theirs:
        assert (await get(await theirs.namespace(DESCRIPTOR), keys, SIZE)).ok
        with pytest.raises(RequestFailedError) as caught:
            async with raw_of(running, "dev"):
                pass
        assert caught.value.status is Status.ERASED
        await running.daemon.admin.tenant_add(TenantName("dev"), TenantQuota())
        async with client_of(running) as mine:
            space = await mine.namespace(DESCRIPTOR)
            assert all_are(await get(space, keys, SIZE), Status.MISS)
            assert (await put(space, keys, SIZE, ack="durable")).ok
            assert (await get(space, keys, SIZE)).ok
        await assert_idle(running.daemon)


async def test_rotation_keeps_old_blocks_readable(tmp_path: Path) -> None:
    site = Site.prepare(tmp_path / "d")
    keys = keys_of(40)
    async with site.running() as running, client_of(running, fabric="tcp") as client:
        space = await client.namespace(DESCRIPTOR)
        for at in range(4):
            assert (await put(space, keys[at * 10 : at * 10 + 10], SIZE, ack="durable")).ok
            await running.daemon.admin.tenant_rotate(TenantName("dev"))
            assert (await get(space, keys[: at * 10 + 10], SIZE)).ok
    async with site.running() as running, client_of(running) as client:
        assert (await get(await client.namespace(DESCRIPTOR), keys, SIZE)).ok
