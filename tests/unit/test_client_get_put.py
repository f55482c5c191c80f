"""Gets and puts through real sessions and fabrics against a small peer that can misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from client_peer import DESCRIPTOR, SECRET, Peer, PeerSession, serving

from entresol_client import (
    AsyncClient,
    Namespace,
    PutBlock,
    UsageError,
    connection,
    namespace,
    storing,
)
from entresol_proto.fabric.base import FabricKind, Offer
from entresol_proto.ids import BadKeyError, EngineKey, pack_token_ids, wire_key
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Reason, Tier

SEED = 20261
BLOCK_BYTES = 96 * 1024  # chunks of 64 KiB: one whole, one part
OK, MISS, GAP, CORRUPT = Status.OK, Status.MISS, Status.GAP, Status.CORRUPT
FABRICS = ["tcp", "tls", "shm"]
OBJECTS = np.array([object()] * 100)
SHARED = np.zeros(16, np.uint8)
KEYS_2 = [bytes(16), bytes(17)]
RECORDS = np.zeros(10, dtype=[("O", "u1"), ("x", "O")])


def key(number: int) -> EngineKey:
    return EngineKey(hashlib.sha256(b"key %d" % number).digest())


def content(number: int, length: int = BLOCK_BYTES) -> np.ndarray[Any, Any]:
    """Bytes that a plane codec shrinks a little, as real activations do."""
    values = np.random.default_rng(SEED + number).standard_normal(length // 4 + 1)
    return values.astype(np.float32).view(np.uint8)[:length].copy()


def empty(count: int, length: int = BLOCK_BYTES) -> list[np.ndarray[Any, Any]]:
    """Buffers with a pattern that shows whether something wrote into them."""
    return [np.full(length, 0xA5, np.uint8) for _ in range(count)]


def is_untouched_or_zero(buffer: np.ndarray[Any, Any]) -> bool:
    return bool((buffer == 0xA5).all() or (buffer == 0).all())


def blocks(count: int) -> list[PutBlock]:
    return [
        PutBlock(key(n), content(n), n, key(n - 1) if n else None, range(n, n + 16))
        for n in range(count)
    ]


def fill(peer: Peer, count: int) -> None:
    for n in range(count):
        peer.add(wire_key(SECRET, key(n)), key(n), content(n).tobytes())


Opened = tuple[Peer, Namespace]


@contextlib.asynccontextmanager
async def opened(
    folder: Path, fabric: str | None = "tcp", *, seal_at_host: bool = True, **changes: Any
) -> AsyncIterator[Opened]:
    async with (
        serving(folder, fabric=fabric, seal_at_host=seal_at_host) as peer,
        await AsyncClient.open(peer.config(**changes)) as client,
    ):
        yield peer, await client.namespace(DESCRIPTOR)


async def all_released(peer: Peer) -> None:
    """Every lease comes back (releases travel a moment after the get)."""
    for _ in range(500):
        if not any(session.leases for session in peer.sessions):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"leases kept: {[s.leases for s in peer.sessions]}")


def reports(peer: Peer) -> list[Status]:
    return [status for session in peer.sessions for _, _, status in session.reports]


@pytest.mark.parametrize(
    ("fabric", "seal_at_host"),
    [("tcp", True), ("tls", True), ("tls", False), ("shm", True), ("shm", False)],
)
async def test_put_then_get_gives_the_exact_bytes(
    tmp_path: Path, fabric: str, seal_at_host: bool
) -> None:
    async with opened(tmp_path, fabric, seal_at_host=seal_at_host) as (peer, ns):
        put = await ns.put(blocks(20))
        assert put.statuses == [OK] * 20
        assert (put.stored, put.existed, put.plain_bytes) == (20, 0, 20 * BLOCK_BYTES)
        into = empty(20)
        got = await ns.get_into([key(n) for n in range(20)], into)
        assert got.statuses == [OK] * 20
        assert got.ok
        assert got.tiers == [Tier.MEMORY] * 20
        for n in range(20):
            assert np.array_equal(into[n], content(n)), f"block {n} differs, seed {SEED}"
        assert got.plain_bytes == 20 * BLOCK_BYTES
        assert 0 < got.wire_bytes < got.plain_bytes
        again = await ns.put(blocks(21))
        assert again.statuses == [Status.EXISTS] * 20 + [OK]
        assert (again.stored, again.existed) == (1, 20)
        assert again.ok
        await all_released(peer)
        assert reports(peer) == []


@pytest.mark.parametrize("fabric", FABRICS)
async def test_large_blocks_in_several_groups(tmp_path: Path, fabric: str) -> None:
    size = 3 * 1024 * 1024 + 5
    async with opened(tmp_path, fabric) as (peer, ns):
        sources = [content(n, size) for n in range(6)]
        put = await ns.put([PutBlock(key(n), sources[n], n) for n in range(6)])
        assert put.ok
        into = empty(6, size)
        assert (await ns.get_into([key(n) for n in range(6)], into)).ok
        assert all(np.array_equal(a, b) for a, b in zip(sources, into, strict=True))
        await all_released(peer)


async def test_a_put_larger_than_the_staging_goes_in_rounds(tmp_path: Path) -> None:
    size = 512 * 1024
    async with opened(tmp_path, staging_bytes_max=4 * 1024 * 1024) as (peer, ns):
        items = [PutBlock(key(n), content(n, size), n) for n in range(16)]  # 8 MiB through 2
        assert (await ns.put(items)).ok
        reserves = [seen for seen in peer.seen if isinstance(seen, data.Reserve)]
        assert len(reserves) == 4
        into = empty(16, size)
        assert (await ns.get_into([key(n) for n in range(16)], into)).ok
        assert all(np.array_equal(content(n, size), into[n]) for n in range(16))
        too_large = await ns.put([PutBlock(key(99), np.zeros(3 * 1024 * 1024, np.uint8))])
        assert too_large.statuses == [Status.TOO_LARGE]


async def test_the_daemon_learns_what_routers_need(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        assert (await ns.put(blocks(2))).ok
        (reserve,) = [seen for seen in peer.seen if isinstance(seen, data.Reserve)]
        first, second = reserve.items
        assert (first.parent, second.parent) == (b"", key(0))
        assert (first.position, second.position) == (0, 1)
        assert second.token_ids_u32le == pack_token_ids(range(1, 17))
        assert second.engine_key == key(1)
        assert second.key == wire_key(SECRET, key(1))
        assert peer.header_of(second.key).meta_bytes > 0


async def test_plaintext_never_leaves_over_plain_tcp(tmp_path: Path) -> None:
    async with opened(tmp_path, "tcp", seal_at_host=False) as (peer, ns):
        put = await ns.put(blocks(2))
        assert put.statuses == [Status.UNSUPPORTED] * 2
        assert not [seen for seen in peer.seen if isinstance(seen, data.Reserve)]


@pytest.mark.parametrize("fabric", FABRICS)
async def test_prefix_stops_at_the_gap(tmp_path: Path, fabric: str) -> None:
    async with opened(tmp_path, fabric) as (peer, ns):
        fill(peer, 3)
        keys = [key(0), key(1), key(77), key(2)]
        into = empty(4)
        got = await ns.get_into(keys, into)
        assert got.statuses == [OK, OK, MISS, GAP]
        assert got.prefix_blocks == 2
        assert is_untouched_or_zero(into[2])
        assert is_untouched_or_zero(into[3])
        got = await ns.get_into(keys, into, prefix=False)
        assert got.statuses == [OK, OK, MISS, OK]
        assert got.prefix_blocks == 2
        assert np.array_equal(into[3], content(2))


@pytest.mark.parametrize("fabric", ["tls", "shm"])
async def test_daemon_opened_reads(tmp_path: Path, fabric: str) -> None:
    async with opened(tmp_path, fabric) as (peer, ns):
        fill(peer, 4)
        into = empty(4)
        got = await ns.get_into([key(n) for n in range(4)], into, open_at="daemon")
        assert got.ok
        assert all(np.array_equal(into[n], content(n)) for n in range(4))
        assert got.wire_bytes == got.plain_bytes
        await all_released(peer)


async def test_a_daemon_opened_block_of_another_engine_key_is_a_conflict(tmp_path: Path) -> None:
    async with opened(tmp_path, "tls") as (peer, ns):
        fill(peer, 2)
        peer.add(wire_key(SECRET, key(1)), key(50), content(1).tobytes())  # two keys, one name
        into = empty(2)
        got = await ns.get_into([key(0), key(1)], into, open_at="daemon")
        assert got.statuses == [OK, Status.CONFLICT]
        assert is_untouched_or_zero(into[1])
        await all_released(peer)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("fabric", FABRICS)
async def test_damage_is_a_miss_and_is_reported(
    tmp_path: Path, fabric: str, one_by_one: bool
) -> None:
    async with opened(tmp_path, fabric) as (peer, ns):
        fill(peer, 5)
        peer.faults.flip = {wire_key(SECRET, key(2))}
        peer.faults.grant_one_by_one = one_by_one
        into = empty(5)
        got = await ns.get_into([key(n) for n in range(5)], into)
        assert got.statuses == [OK, OK, CORRUPT, OK, OK]
        assert got.prefix_blocks == 2
        assert not into[2].any(), "bytes of a corrupt block were left behind"
        assert np.array_equal(into[4], content(4))
        await all_released(peer)
        assert reports(peer) == [CORRUPT]
        assert ns._client.stats()["corrupt"] == 1


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_block_under_another_engine_key_is_a_conflict(tmp_path: Path, fabric: str) -> None:
    async with opened(tmp_path, fabric) as (peer, ns):
        peer.add(wire_key(SECRET, key(0)), key(1), content(1).tobytes())
        into = empty(1)
        got = await ns.get_into([key(0)], into)
        assert got.statuses == [Status.CONFLICT]
        assert not into[0].any()
        await all_released(peer)
        assert reports(peer) == [Status.CONFLICT]


@pytest.mark.parametrize("place", ["host", "daemon"])
@pytest.mark.parametrize("off", [-4, 4])
async def test_another_length_than_the_buffer_is_a_miss(
    tmp_path: Path, place: Any, off: int
) -> None:
    async with opened(tmp_path, "shm") as (peer, ns):
        fill(peer, 1)
        into = empty(1, BLOCK_BYTES + off)
        got = await ns.get_into([key(0)], into, open_at=place)
        assert got.statuses == [Status.BAD_REQUEST]
        assert (into[0] == 0xA5).all()
        await all_released(peer)


async def test_a_grant_that_lies_about_the_length_is_corrupt(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        fill(peer, 1)
        peer.faults.plain_bytes_off = 1
        into = empty(1, BLOCK_BYTES + 1)
        assert (await ns.get_into([key(0)], into)).statuses == [CORRUPT]
        assert not into[0].any()


@pytest.mark.parametrize(
    ("fabric", "place", "expected"),
    [
        ("shm", "host", Status.LEASE_EXPIRED),  # opened in place: the memory may have been reused
        ("shm", "daemon", Status.LEASE_EXPIRED),
        ("tls", "daemon", Status.LEASE_EXPIRED),
        ("tls", "host", OK),  # a private copy that verifies is exact, however late
    ],
)
async def test_an_expired_lease(tmp_path: Path, fabric: str, place: Any, expected: Status) -> None:
    async with opened(tmp_path, fabric) as (peer, ns):
        fill(peer, 2)
        peer.faults.lease_ns = 0
        for count in (1, 2):  # one is opened at once, two by a thread
            into = empty(count)
            got = await ns.get_into([key(n) for n in range(count)], into, open_at=place)
            assert got.statuses == [expected] * count
            for n in range(count):
                wanted = content(n) if expected is OK else np.zeros(BLOCK_BYTES, np.uint8)
                assert np.array_equal(into[n], wanted)
        await all_released(peer)


async def test_a_get_asks_for_as_many_at_once_as_the_daemon_takes(tmp_path: Path) -> None:
    async with serving(tmp_path) as peer:
        peer.blocks_per_fetch_max = 2
        fill(peer, 5)
        async with await AsyncClient.open(peer.config()) as client:
            ns, into = await client.namespace(DESCRIPTOR), empty(5)
            assert (await ns.get_into([key(n) for n in range(5)], into)).ok
            assert all(np.array_equal(into[n], content(n)) for n in range(5))
        fetches = [one for one in peer.seen if isinstance(one, data.Fetch)]
        assert [len(data.split_keys(one.keys)) for one in fetches] == [2, 2, 1]


async def test_a_get_that_finds_no_staging_ends_at_its_deadline(tmp_path: Path) -> None:
    async with opened(tmp_path, "tls") as (peer, ns):
        fill(peer, 2)
        arena = ns._client._links[0].read_staging
        region = await arena.take(arena.length_bytes, 2**62)
        assert region is not None
        got = await ns.get_into([key(0), key(1)], empty(2), deadline_ns=200_000_000)
        assert got.statuses == [Status.DEADLINE] * 2
        region.give_back()
        assert (await ns.get_into([key(0), key(1)], empty(2))).ok
        await all_released(peer)


@pytest.mark.parametrize(("late_s", "expected"), [(0.0, CORRUPT), (0.3, Status.LEASE_EXPIRED)])
async def test_damage_behind_a_grant_that_was_long_on_its_way_is_its_lease(
    tmp_path: Path, late_s: float, expected: Status
) -> None:
    """The daemon's lease began when it sent the grant: the memory may be another block's by now."""
    async with opened(tmp_path, "tls") as (peer, ns):
        fill(peer, 2)
        peer.faults.lease_ns, peer.faults.grant_late_s = 250_000_000, late_s
        peer.faults.flip = {wire_key(SECRET, key(0))}
        into = empty(2)
        got = await ns.get_into([key(0), key(1)], into, prefix=False)
        assert got.statuses == [expected, OK], "a copy that verifies is exact, however late"
        assert not into[0].any()
        assert np.array_equal(into[1], content(1))
        await all_released(peer)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("bad_index", Status.DISCONNECTED),
        ("repeat_grant", Status.DISCONNECTED),
        ("huge_span", Status.BAD_REQUEST),
        ("garbage", Status.DISCONNECTED),
    ],
)
async def test_a_daemon_that_breaks_the_protocol(
    tmp_path: Path, fault: str, expected: Status
) -> None:
    async with opened(tmp_path) as (peer, ns):
        fill(peer, 3)
        setattr(peer.faults, fault, True)
        peer.faults.grant_one_by_one = fault == "repeat_grant"
        into = empty(3)
        got = await ns.get_into([key(n) for n in range(3)], into)
        assert set(got.statuses) <= {OK, expected}
        assert expected in got.statuses
        for n, status in enumerate(got.statuses):
            if status is OK:
                assert np.array_equal(into[n], content(n))
            else:
                assert is_untouched_or_zero(into[n])
        setattr(peer.faults, fault, False)
        for _ in range(500):  # a new session comes by itself
            if (await ns.get_into([key(n) for n in range(3)], into)).ok:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(ns._client.shards())


@pytest.mark.parametrize("status", [Status.QUOTA, Status.FORBIDDEN, Status.LOCKED, Status.BUSY])
async def test_a_refused_request_is_its_status_per_block(tmp_path: Path, status: Status) -> None:
    async with opened(tmp_path) as (peer, ns):
        peer.faults.refuse = {data.Fetch: status, data.Reserve: status}
        assert (await ns.get_into([key(0), key(1)], empty(2))).statuses == [status] * 2
        assert (await ns.put(blocks(2))).statuses == [status] * 2
        assert ns._client.shards()[0].breaker == "closed"


async def test_no_data_path(tmp_path: Path) -> None:
    async with opened(tmp_path, None) as (peer, ns):
        fill(peer, 2)
        assert (await ns.get_into([key(0)], empty(1))).statuses == [Status.FABRIC_ERROR]
        assert (await ns.put(blocks(1))).statuses == [Status.FABRIC_ERROR]
        assert (await ns.exists([key(0), key(5)])).present == [True, False]
        assert ns._client.shards()[0].fabric == "none"


async def test_fabric_choice_falls_back_and_says_why(tmp_path: Path) -> None:
    async with serving(tmp_path, fabric="shm") as peer:
        dead = Offer(FabricKind.SHM, b"\1" + bytes(16) + b"/nonexistent/fabric.sock")
        peer.fabrics[0].offer = lambda: dead
        async with await AsyncClient.open(peer.config()) as client:
            report = client.shards()[0]
            assert report.fabric == "tcp"
            assert "not shm" in report.fabric_reason
        async with await AsyncClient.open(peer.config(fabric="shm", fallback=False)) as client:
            assert client.shards()[0].fabric == "none"
        async with await AsyncClient.open(peer.config(fabric="tcp")) as client:
            assert client.shards()[0].fabric_reason == "chosen by setting"


async def test_the_small_requests(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        fill(peer, 11)
        keys = [key(n) for n in range(11)] + [key(500), key(3)]
        exists = await ns.exists(keys)
        assert exists.present == [True] * 11 + [False, True]
        assert exists.prefix_blocks == 11
        assert exists.complete
        assert (await ns.touch(keys)).count == 12
        staged = await ns.stage(keys)
        assert staged.statuses == [OK] * 11 + [MISS, OK]
        assert staged.prefix_blocks == 11
        explained = await ns.explain(keys)
        assert [e.reason for e in explained] == [Reason.IN_MEMORY] * 11 + [
            Reason.NEVER_STORED, Reason.IN_MEMORY,
        ]  # fmt: skip
        assert explained[0].shard == "shard0"
        assert (await ns.forget([key(0), key(500)])).count == 1
        assert (await ns.exists(keys[:2])).present == [False, True]


async def test_nothing_asked_is_nothing_done(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, ns):
        assert (await ns.get_into([], [])).ok
        assert (await ns.put([])).ok
        assert (await ns.exists([])).prefix_blocks == 0


async def test_tokens_that_fit_no_block_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a block is stored and found; only routers never hear of it, and nothing said so."""
    async with opened(tmp_path) as (_, ns):
        for number, count in enumerate((0, ns.descriptor.block_tokens, 3, 5)):
            told = "token_ids_do_not_fit" in caplog.text
            assert told is (number > 2)
            assert (await ns.put([PutBlock(key(number), b"x" * 64, token_ids=range(count))])).ok
    said = [line for line in caplog.messages if "token_ids_do_not_fit" in line]
    assert len(said) == 1
    assert "given=3 block_tokens=16" in said[0]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda ns: ns.get_into([b"short"], [bytearray(8)]), "5 bytes"),
        (lambda ns: ns.get_into([bytes(65)], [bytearray(8)]), "65 bytes"),
        (lambda ns: ns.get_into([bytes(16)], []), "1 keys and 0 buffers"),
        (lambda ns: ns.get_into(bytes(16), [bytearray(8)]), "one key, not a sequence"),
        (lambda ns: ns.get_into(["k" * 16], [bytearray(8)]), "str, not bytes"),
        (lambda ns: ns.get_into([bytes(16)], [bytes(8)]), "read-only"),
        (lambda ns: ns.get_into([bytes(16)], [bytearray(8)], deadline_ns=0), "deadline_ns is 0"),
        (lambda ns: ns.get_into([bytes(16)], [bytearray(8)], open_at="gpu"), "open_at is 'gpu'"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x")], ack="soon"), "ack is 'soon'"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x", parent_key=b"p")]), "1 bytes"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x", token_ids=[-1])]), "token ids must be"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x", position=-1)]), "position and token"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x", token_ids=range(2049))]), "2049 token ids"),
        (lambda ns: ns.get_into([bytes(16)], [bytearray(8)], deadline_ns=5e9), "not an integer"),
        (lambda ns: ns.stage([bytes(16)], hold_ns=1.5), "not an integer"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x", position=1.0)]), "must be integers"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x", token_ids=(1.0,))]), "must be integers"),
        (lambda ns: ns.stage([bytes(16)], hold_ns=0), "hold_ns is 0"),
        (lambda ns: ns.exists([bytes(16)] * 65_537), "65537 keys"),
        (lambda ns: ns.put([(bytes(16), b"x")]), "a tuple, not a PutBlock"),
        (lambda ns: ns.put(PutBlock(bytes(16), b"x")), "one PutBlock, not a sequence"),
        (lambda ns: ns.put(None), "NoneType, not a sequence"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x", parent_key="p" * 16)]), "str, not bytes"),
        (lambda ns: ns.put([PutBlock(bytes(16), b"x")], ack=None), "ack is None"),
        (lambda ns: ns.put([PutBlock(bytes(16), OBJECTS)]), "Python objects"),
        (lambda ns: ns.put([PutBlock(bytes(16), memoryview(OBJECTS))]), "Python objects"),
        (lambda ns: ns.put([PutBlock(bytes(16), RECORDS)]), "Python objects"),
        (lambda ns: ns.get_into([bytes(16)], [OBJECTS]), "Python objects"),
        (lambda ns: ns.get_into([bytes(16)], None), "buffers is a NoneType"),
        (lambda ns: ns.get_into([bytes(16)], [bytearray(8)], open_at=None), "open_at is None"),
        (lambda ns: ns.get_into([bytes(16)], [bytearray(8)], open_at=1), "open_at is 1"),
        (lambda ns: ns.get_into([bytes(16)], [bytearray(8)], deadline_ns=True), "is True, not an"),
        (lambda ns: ns.get_into([bytes(16)], [bytearray(8)], prefix="no"), "prefix is 'no'"),
        (lambda ns: ns.get_into([bytes(16)], [(2**70, 10)]), "a raw buffer cannot be at"),
        (lambda ns: ns.get_into([bytes(16)], [(4096, 2**70)]), "a raw buffer cannot be at"),
        (lambda ns: ns.put([PutBlock(bytes(16), (2**63 - 4, 10))]), "a raw buffer cannot be at"),
        (lambda ns: ns.quote([bytes(16)], prefix=None), "prefix is None"),
        (lambda ns: ns.exists(None), "keys is a NoneType"),
        (lambda ns: ns.exists({bytes(16)}), "keys is a set, not a sequence"),
        (lambda ns: ns.exists(np.array([b"k" * 15 + b"\0"])), "keys is a numpy array"),
        (lambda ns: ns.exists(np.array([], "S16")), "keys is a numpy array"),
        (lambda ns: ns.exists([*np.array([b"k" * 15 + b"\0"])]), "a key is bytes_, not bytes"),
        (lambda ns: ns.put([PutBlock(np.bytes_(bytes(16)), b"x")]), "a key is bytes_, not bytes"),
        (lambda ns: ns.put({PutBlock(bytes(16), b"x")}), "items is a set, not a sequence"),
        (lambda ns: ns.get_into(KEYS_2, [bytearray(8)] * 2), "two buffers share memory"),
        (lambda ns: ns.get_into(KEYS_2, [SHARED[4:12], SHARED[:5]]), "two buffers share memory"),
        (lambda ns: ns._client.namespace("demo"), "by a NamespaceDescriptor, not by a str"),
    ],
)
async def test_mistakes_raise_at_once(
    tmp_path: Path, call: Callable[[Namespace], Any], reason: str
) -> None:
    async with opened(tmp_path) as (peer, ns):
        count = len(peer.seen)
        with pytest.raises((UsageError, BadKeyError), match=reason):
            await call(ns)
        assert not [s for s in peer.seen[count:] if isinstance(s, (data.Fetch, data.Reserve))]


async def test_a_put_is_of_what_its_list_held_when_it_was_called(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        items = blocks(2)
        fresh = ns._client._namespace(replace(ns.descriptor, model="another"))  # opened by its put
        put = asyncio.create_task(fresh.put(items))
        while not put.done():
            await asyncio.sleep(0)
            items.clear()  # an engine uses it for the next
        assert (await put).statuses == [Status.OK] * 2
        (reserve,) = [seen for seen in peer.seen if isinstance(seen, data.Reserve)]
        assert [item.position for item in reserve.items] == [0, 1]


async def test_buffers_side_by_side_share_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, ns):
        assert (await ns.put(blocks(3))).ok
        room = np.zeros((3, BLOCK_BYTES), np.uint8)
        views = [room[2], room[0], room[1]]
        assert (await ns.get_into([key(0), key(1), key(2)], views)).ok


async def test_a_closed_client_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, ns):
        await ns._client.close()
        with pytest.raises(UsageError, match="closed"):
            await ns.exists([key(0)])


async def test_a_commit_that_is_not_answered_keeps_its_staging(tmp_path: Path) -> None:
    async with opened(tmp_path, "shm", ping_interval_ns=10**9) as (peer, ns):
        peer.faults.hold_put_done = True
        put = await ns.put(blocks(1), deadline_ns=200_000_000)
        assert put.statuses == [Status.DEADLINE]
        session = ns._client._links[0]._session
        assert session is not None
        arena, _ = await session.put_staging(2**62)
        assert arena.used_bytes > 0, "the daemon may still read it"
        peer.faults.hold_put_done = False
        assert (await ns.put(blocks(3)[1:])).ok
        assert arena.used_bytes > 0


async def test_a_block_that_was_busy_first_is_what_its_commit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, rounds = PeerSession.on_reserve, 0

    async def choosy(self: PeerSession, request_id: int, message: data.Reserve) -> None:
        nonlocal rounds
        rounds += 1
        if rounds > 1:  # now there is room, and no answer to the COMMIT
            self.peer.faults.hold_put_done = True
            return await honest(self, request_id, message)
        sent: list[data.Reserved] = []
        monkeypatch.setattr(self, "send", lambda reply, _request: sent.append(reply))
        await honest(self, request_id, replace(message, items=message.items[:1]))
        monkeypatch.undo()
        monkeypatch.setattr(PeerSession, "on_reserve", choosy)
        busy = data.Reserved.Item(Status.BUSY)
        self.send(data.Reserved((*sent[0].items, busy)), request_id)

    monkeypatch.setattr(PeerSession, "on_reserve", choosy)
    async with opened(tmp_path) as (_, ns):
        put = await ns.put(blocks(2), deadline_ns=300_000_000)
        assert rounds == 2
        assert put.statuses == [Status.OK, Status.DEADLINE]  # nobody knows of the second


async def test_what_cannot_be_sealed_in_time_is_given_up(tmp_path: Path) -> None:
    async with opened(tmp_path, staging_bytes_max=4 * 1024 * 1024) as (peer, ns):
        size = 1_900_000  # one fits the staging, and its commit is never answered
        peer.faults.hold_put_done = True
        items = [PutBlock(key(n), content(n, size)) for n in range(2)]
        put = await ns.put(items, deadline_ns=300_000_000)
        assert put.statuses == [Status.DEADLINE] * 2
        for _ in range(300):
            if not peer.reserved:
                break
            await asyncio.sleep(0.01)
        assert not peer.reserved
        assert len(peer.store) + len(peer.given_up) >= 1


async def test_what_there_is_no_memory_to_plan_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_context: Any, _job: Any) -> int:
        raise MemoryError

    async with opened(tmp_path) as (peer, ns):
        monkeypatch.setattr(storing._SealContext, "room", no_memory)
        put = await ns.put(blocks(3))
        assert put.statuses == [Status.BUSY] * 3
        for _ in range(300):
            if not peer.reserved:
                break
            await asyncio.sleep(0.01)
        assert len(peer.given_up) == 3


async def test_staging_comes_back_where_nothing_of_it_could_be_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(_context: Any, jobs: list[Any], _region: Any, _starts: Any) -> list[Status]:
        return [Status.DEADLINE] * len(jobs)

    monkeypatch.setattr(storing, "seal_blocks", too_late)
    async with opened(tmp_path) as (peer, ns):
        put = await ns.put(blocks(3))
        assert put.statuses == [Status.DEADLINE] * 3
        session = ns._client._links[0]._session
        assert session is not None
        arena, _ = await session.put_staging(2**62)
        assert arena.used_bytes == 0
        assert not peer.store


def test_nothing_is_sealed_after_the_deadline() -> None:
    late = cast(Any, SimpleNamespace(deadline_ns=0))  # the blocks are not even looked at
    assert storing.seal_blocks(late, cast(Any, [None]), memoryview(b""), [0]) == [Status.DEADLINE]


async def test_cancelling_a_get_ends_it_completely(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    async with opened(tmp_path, "tls") as (peer, ns):
        fill(peer, 8)
        keys = [key(n) for n in range(8)]
        for _ in range(30):
            into = empty(8)
            get = asyncio.ensure_future(ns.get_into(keys, into))
            await asyncio.sleep(rng.random() * 0.01)
            get.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await get
            before = [buffer.copy() for buffer in into]
            await asyncio.sleep(0.002)
            assert all(np.array_equal(a, b) for a, b in zip(before, into, strict=True)), (
                f"bytes landed after the call, seed {SEED}"
            )
        await all_released(peer)
        assert ns._client._links[0].read_staging.used_bytes == 0
        assert (await ns.get_into(keys, empty(8))).ok


@pytest.mark.parametrize("fabric", FABRICS)
async def test_closing_ends_calls_under_way(tmp_path: Path, fabric: str) -> None:
    async with opened(tmp_path, fabric) as (peer, ns):
        fill(peer, 8)
        peer.faults.hold_final = True
        keys = [key(n) for n in range(9)]
        into = empty(9)
        waiting = asyncio.ensure_future(ns.get_into(keys, into, deadline_ns=60_000_000_000))
        await asyncio.sleep(0.05)
        await ns._client.close()
        got = await asyncio.wait_for(waiting, 10)
        assert set(got.statuses) <= {OK, Status.DISCONNECTED}
        assert got.statuses[8] is Status.DISCONNECTED
        for n, status in enumerate(got.statuses):
            assert status is not OK or np.array_equal(into[n], content(n))


async def test_many_calls_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, "shm") as (peer, ns):

        async def one(worker: int) -> None:
            numbers = range(worker * 10, worker * 10 + 10)
            items = [PutBlock(key(n), content(n), n) for n in numbers]
            assert (await ns.put(items)).ok
            into = empty(10)
            assert (await ns.get_into([key(n) for n in numbers], into)).ok
            assert all(np.array_equal(content(n), b) for n, b in zip(numbers, into, strict=True))

        await asyncio.gather(*(one(worker) for worker in range(12)))
        await all_released(peer)
        stats = ns._client.stats()
        assert (stats["gets"], stats["puts"]) == (12, 12)
        assert stats["hits"] == {"memory": 120}


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_client_closed_meanwhile_ends_calls_as_disconnected(
    tmp_path: Path, fabric: str
) -> None:
    """Also those that come to the worker threads only when there are none any more."""
    async with opened(tmp_path, fabric) as (peer, ns):
        fill(peer, 2)
        into = empty(2)
        workers = ns._client._workers
        workers.close()
        got = await ns.get_into([key(0), key(1)], into)
        assert set(got.statuses) <= {OK, Status.DISCONNECTED}  # small ones need no thread
        put = await ns.put([PutBlock(key(9), content(9))])
        assert put.statuses == [Status.DISCONNECTED]


def order(peer: Peer) -> list[str]:
    """What came: fetches, and releases with how many leases."""
    return [
        "fetch" if isinstance(seen, data.Fetch) else f"release {len(seen.lease_ids)}"
        for seen in peer.seen
        if isinstance(seen, (data.Fetch, data.Release))
    ]


@pytest.mark.parametrize("behind_bytes_max", [0, connection.RELEASE_BEHIND_BYTES_MAX])
async def test_a_large_lease_goes_with_the_next_request_a_small_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind_bytes_max: int
) -> None:
    """The daemon reads in order: what comes before a request makes it wait."""
    monkeypatch.setattr(connection, "RELEASE_DELAY_S", 2.0)
    monkeypatch.setattr(connection, "RELEASE_BEHIND_BYTES_MAX", behind_bytes_max)
    async with opened(tmp_path) as (peer, ns):
        fill(peer, 8)
        for _ in range(2):
            assert (await ns.get_into([key(0)], empty(1))).ok
        assert order(peer) == ["fetch", "fetch"]
        assert (await ns.get_into([key(n) for n in range(8)], empty(8))).ok  # much
        assert order(peer) == ["fetch"] * 3
        assert (await ns.get_into([key(0)], empty(1))).ok
        last = ["fetch", "release 3"] if behind_bytes_max else ["release 3", "fetch"]
        assert order(peer) == ["fetch"] * 3 + last
        await all_released(peer)


async def test_leases_go_first_while_others_hold_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RELEASE_DELAY_S", 2.0)
    async with opened(tmp_path) as (peer, ns):
        fill(peer, 8)
        keys = [key(n) for n in range(8)]
        (link,) = ns._client._links
        assert (await ns.get_into(keys, empty(8))).ok
        stream = link.admit().connection
        held = stream.held_bytes
        assert held > 500_000
        monkeypatch.setattr(connection, "RELEASE_BEHIND_BYTES_MAX", held)
        assert (await ns.get_into(keys, empty(8))).ok
        assert order(peer) == ["fetch", "fetch", "release 1"]
        stream.held_bytes += 1  # of another get
        assert (await ns.get_into(keys, empty(8))).ok
        assert order(peer) == ["fetch", "fetch", "release 1", "release 1", "fetch"]
        stream.held_bytes -= 1
        await all_released(peer)
        stream._flush_releases()
        assert stream.held_bytes == 0


async def test_a_get_that_fails_after_it_was_asked_gives_its_leases_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (peer, ns):
        fill(peer, 8)
        keys = [key(n) for n in range(8)]

        def broken(*_args: Any) -> Any:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(namespace._Batch, "wanted", broken)
            got = await ns.get_into(keys, empty(8))
            assert got.statuses == [Status.BUSY] * 8
        assert (await ns.get_into(keys, empty(8))).ok
        await all_released(peer)


async def test_what_was_found_damaged_is_told_before_the_next_request(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        fill(peer, 8)
        peer.faults.flip = {wire_key(SECRET, key(3))}
        got = await ns.get_into([key(n) for n in range(8)], empty(8))
        assert got.statuses[3] is CORRUPT
        assert (await ns.get_into([key(0)], empty(1))).ok
        assert order(peer) == ["fetch", "release 1", "fetch"]
        await all_released(peer)


async def test_many_small_leases_go_with_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RELEASE_DELAY_S", 2.0)
    monkeypatch.setattr(connection, "RELEASE_AHEAD_COUNT", 2)
    async with opened(tmp_path) as (peer, ns):
        peer.add(wire_key(SECRET, key(0)), key(0), bytes(64))
        for _ in range(3):
            assert (await ns.get_into([key(0)], [bytearray(64)])).ok
        assert order(peer) == ["fetch", "fetch", "fetch", "release 2"]
        await all_released(peer)
