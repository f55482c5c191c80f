"""How a batch of granted blocks is cut for the threads that open it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from entresol_client import opening, storing
from entresol_client.opening import (
    GROUP_BYTES_MAX,
    GROUP_BYTES_MIN,
    Granted,
    OpenContext,
    Wanted,
    open_alone,
    open_blocks,
    open_group,
    plan_groups,
)
from entresol_client.results import RequestFailedError
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from entresol_proto.wire.data import GrantItem, Tier

NEVER = 2**63


def context(threads: int, *, maps: bool = False, workers: Any = None) -> OpenContext:
    endpoint = SimpleNamespace(
        capabilities=SimpleNamespace(maps=maps, lands=False), map_span=lambda _: Status.CORRUPT
    )
    given: dict[str, Any] = {
        "endpoint": endpoint,
        "workers": workers or SimpleNamespace(threads=threads),
        "staging": SimpleNamespace(length_bytes=64 * MIB),
    }
    return OpenContext(namespace_id=bytes(16), at_daemon=False, deadline_ns=2**63, **given)


def batch(count: int, size: int) -> list[Granted]:
    items = [
        GrantItem(at, Tier.MEMORY, RemoteSpan(1, at * size, size), size, bytes(32), bytes(16))
        for at in range(count)
    ]
    return [Granted(cast(Any, None), item, 1, 1) for item in items]


def sizes(groups: list[list[Granted]]) -> list[int]:
    return [sum(one.item.span.length_bytes for one in group) // MIB for group in groups]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("count", [1, 3, 29, 61])
def test_every_block_is_in_one_group_in_order(count: int, last: bool) -> None:
    granted = batch(count, MIB)
    groups = plan_groups(context(2), granted, last=last)
    assert [one for group in groups for one in group] == granted
    assert all(sum(o.item.span.length_bytes for o in g) <= GROUP_BYTES_MAX for g in groups)


def test_the_last_batch_ends_with_small_groups_and_others_do_not() -> None:
    granted = batch(61, MIB)
    ending = sizes(plan_groups(context(2), granted))
    going_on = sizes(plan_groups(context(2), granted, last=False))
    assert min(ending[:-1]) == GROUP_BYTES_MIN // MIB
    assert set(going_on[:-1]) == {GROUP_BYTES_MAX // MIB}
    assert len(going_on) < len(ending)


def test_a_first_part_gives_each_thread_work() -> None:
    assert sizes(plan_groups(context(2), batch(3, MIB), last=False)) == [2, 1]
    assert sizes(plan_groups(context(4), batch(16, MIB), last=False)) == [4, 4, 4, 4]


class Told:
    """Workers that note how many threads a group is worth, and open `calls` times."""

    def __init__(self, threads: int, calls: int, *, late: bool = False) -> None:
        self.threads, self.calls, self.asked, self.late = threads, calls, 0, late
        self.opened_bytes = self.short_bytes = 0

    async def share(self, fn: Callable[[], bool], *, threads: int, until_ns: int = 0) -> bool:
        self.asked = threads
        self.more = [fn() for _ in range(self.calls)]
        return self.late

    def took(self, length_bytes: int, took_ns: int) -> None:
        assert took_ns > 0
        self.opened_bytes += length_bytes

    def is_short(self, length_bytes: int) -> bool:
        return length_bytes <= self.short_bytes


@pytest.mark.parametrize("last", [True, False])
def test_what_is_opened_in_the_daemons_memory_is_one_group(last: bool) -> None:
    """Its threads cut it themselves, block by block."""
    granted = batch(61, MIB)
    assert plan_groups(context(2, maps=True), granted, last=last) == [granted]
    assert plan_groups(context(2, maps=True), [], last=last) == []


@pytest.mark.parametrize(
    ("count", "size", "threads"),
    [(1, MIB, 1), (2, MIB, 1), (3, MIB, 2), (4, MIB, 2), (8, MIB, 4), (32, MIB, 4),
     (1, 16 * MIB, 1), (3, 16 * MIB, 3),
     (128, 16 * KIB, 1), (2048, 16 * KIB, 4), (1024, 16 * KIB, 2)],
)  # fmt: skip
async def test_as_many_threads_as_the_bytes_are_worth(count: int, size: int, threads: int) -> None:
    told = Told(4, calls=1)
    statuses = await open_group(context(4, maps=True, workers=told), batch(count, size))
    assert told.asked == threads
    assert statuses[0] is Status.CORRUPT, "it was opened, or would have been"


async def test_a_turn_is_bounded_and_what_no_thread_came_to_is_told() -> None:
    blocks = batch(20, MIB)
    first = Told(2, calls=1)
    assert (
        await open_group(context(2, maps=True, workers=first), blocks)
        == [Status.CORRUPT] * 8 + [Status.DISCONNECTED] * 12
    )
    every = Told(2, calls=4)
    statuses = await open_group(context(2, maps=True, workers=every), blocks)
    assert statuses == [Status.CORRUPT] * 20
    assert every.more == [True, True, False, False]


async def test_what_no_thread_came_to_by_the_deadline_is_told_so() -> None:
    """Whatever the clock says: timers may be early."""
    told = Told(2, calls=1, late=True)
    statuses = await open_group(context(2, maps=True, workers=told), batch(20, MIB))
    assert statuses == [Status.CORRUPT] * 8 + [Status.DEADLINE] * 12


async def test_an_error_of_ours_costs_its_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_context: Any, one: Granted, *_args: Any, **_named: Any) -> Status:
        if one.item.index == 1:
            raise RuntimeError("a bug")
        return Status.OK

    monkeypatch.setattr(opening, "_open_block", broken)
    told = Told(2, calls=1)
    statuses = await open_group(context(2, maps=True, workers=told), batch(3, MIB))
    assert statuses == [Status.OK, Status.INTERNAL, Status.OK]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestFailedError(Status.DEADLINE), Status.DEADLINE),
        (MemoryError(), Status.BUSY),
        (ZeroDivisionError(), Status.INTERNAL),
    ],
)
async def test_a_part_that_fails_leaves_those_before_it(
    error: Exception, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are opened: whoever is told that they are absent finds them in his buffers."""
    parts: list[int] = []

    async def copied(_: OpenContext, part: list[Granted]) -> list[Status]:
        parts.append(len(part))
        if len(parts) == 2:
            raise error
        return [Status.OK] * len(part)

    monkeypatch.setattr(opening, "_open_copied", copied)
    found = await open_group(context(2), batch(20, MIB))
    assert len(parts) > 2
    first, second = parts[:2]
    assert found[:first] == [Status.OK] * first
    assert found[first : first + second] == [status] * second
    assert set(found[first + second :]) == {Status.OK}
    assert len(found) == 20


def test_an_error_of_ours_in_one_block_leaves_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes: list[Any] = [Status.OK, MemoryError(), ZeroDivisionError(), Status.OK]

    def opened(*_: Any, **__: Any) -> Status:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Status)
        return outcome

    monkeypatch.setattr(opening, "open_into", opened)
    item = GrantItem(0, Tier.MEMORY, RemoteSpan(1, 0, 8), 8, bytes(32), bytes(16))
    group = [Granted(Wanted(0, b"", b"", memoryview(bytearray(8))), item, NEVER, NEVER)] * 4
    sources = [memoryview(bytes(8))] * 4
    found = open_blocks(context(2), group, sources, in_place=False)
    assert found == [Status.OK, Status.BUSY, Status.INTERNAL, Status.OK]


def test_one_short_block_is_opened_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And how long good ones took is remembered; of bad ones that says nothing."""
    status = Status.OK
    monkeypatch.setattr(opening, "_open_block", lambda *_args, **_named: status)
    told = Told(2, calls=1)
    here = context(2, maps=True, workers=told)
    assert open_alone(here, batch(1, MIB)) is None, "nobody knows yet that it is short"
    told.short_bytes = 2 * MIB
    assert open_alone(here, batch(1, MIB)) == [Status.OK]
    assert told.opened_bytes == MIB
    assert open_alone(here, batch(1, 3 * MIB)) is None
    assert open_alone(here, batch(2, MIB)) is None, "threads may share them"
    assert open_alone(context(2, workers=told), batch(1, MIB)) is None, "it is to be read first"
    status = Status.CORRUPT
    assert open_alone(here, batch(1, MIB)) == [Status.CORRUPT]
    assert told.opened_bytes == MIB
    assert told.asked == 0


@pytest.mark.parametrize(
    ("in_place", "found", "lease_until_ns", "doubtful_ns", "told"),
    [
        (True, Status.OK, NEVER, 0, Status.OK),  # the grant was long in coming, and good since
        (True, Status.OK, 0, 0, Status.LEASE_EXPIRED),  # another block may lie there by now
        (False, Status.OK, 0, 0, Status.OK),  # of a copy, which is exact, however late
        (True, Status.CORRUPT, NEVER, 0, Status.LEASE_EXPIRED),
        (False, Status.CORRUPT, NEVER, 0, Status.LEASE_EXPIRED),
        (False, Status.CORRUPT, NEVER, NEVER, Status.CORRUPT),
    ],
)
def test_what_a_lease_that_ended_says_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
    in_place: bool,
    found: Status,
    lease_until_ns: int,
    doubtful_ns: int,
    told: Status,
) -> None:
    monkeypatch.setattr(opening, "open_into", lambda *_args, **_named: found)
    into = bytearray(b"x" * 16)
    one = batch(1, 16)[0]
    one.wanted = Wanted(0, bytes(16), b"engine key", memoryview(into))
    one.lease_until_ns, one.doubtful_ns = lease_until_ns, doubtful_ns
    source = memoryview(bytes(16))
    assert open_blocks(context(1), [one], [source], in_place=in_place) == [told]
    if told is Status.LEASE_EXPIRED:
        assert not any(into)


def test_what_a_fabric_could_land_and_does_not_is_cut_for_the_threads() -> None:
    """Over TLS, without the native kernel, or while another read has the stream."""
    cannot = context(2)
    cast(Any, cannot.endpoint).capabilities.lands = True
    cast(Any, cannot.endpoint).can_land = lambda spans: False
    granted = batch(61, MIB)
    assert plan_groups(cannot, granted) == plan_groups(context(2), granted)
    cast(Any, cannot.endpoint).can_land = lambda spans: len(spans) == 61
    assert plan_groups(cannot, granted) == [granted]


@pytest.mark.parametrize(
    ("blocks", "staging_mib", "wanted"),
    [
        (16, 48, [8, 8]),  # one is prepared while the daemon has the other
        (12, 48, [6, 6]),
        (9, 48, [5, 4]),
        (8, 48, [4, 4]),
        (5, 48, [4, 1]),
        (3, 48, [3]),
        (16, 16, [4, 4, 4, 4]),  # no more than a quarter of the staging memory
        (40, 48, [8, 8, 8, 8, 8]),
    ],
)
def test_a_put_leaves_in_two_groups_that_are_neither_short_nor_long(
    blocks: int, staging_mib: int, wanted: list[int]
) -> None:
    plain = memoryview(bytes(MIB))
    jobs = [cast(Any, SimpleNamespace(block=SimpleNamespace(plain=plain))) for _ in range(blocks)]
    bytes_max = staging_mib * MIB // 4
    groups = storing._groups(jobs, storing._group_bytes(jobs, bytes_max, at_host=False))
    assert [len(group) for group in groups] == wanted
    assert storing._group_bytes(jobs, bytes_max, at_host=True) == 4 * MIB, "sent once it is sealed"
    assert [job for group in groups for job in group] == jobs
