"""What goes out in one group: all there is, or each stream's part of a few milliseconds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
import simloop

from entresol_daemon.compute import InlineCompute
from entresol_daemon.flash import group
from entresol_daemon.flash.device import aligned_buffer
from entresol_daemon.flash.engine import Engine
from entresol_daemon.flash.group import GroupLength, Pending, PendingQueue, fill
from entresol_daemon.flash.model import (
    GROUP_BYTES_MAX,
    GROUP_RECORDS_MAX,
    SHARED_FOR_S,
    SHARED_GROUP_BYTES_MAX,
    SHARED_GROUP_BYTES_MIN,
    SHARED_GROUP_RECORDS_MAX,
    SHARED_GROUP_S,
)
from entresol_daemon.flash.segment import RecordKind
from entresol_daemon.flash.sim import SimDevice
from entresol_proto.status import Status
from tests import flashlab

MIB = 1 << 20
ONE, TWO = b"1" * 16, b"2" * 16


def pending(stream: bytes, length_bytes: int, lsn: int) -> Pending:
    extent = memoryview(bytearray(1))  # only its length is looked at
    record = Pending(
        RecordKind.BLOCK, stream, bytes(16), bytes(16), extent, 0, 0, 0, 0, cast(Any, None), 0,
        lsn, None,
    )  # fmt: skip
    record.extent = cast(Any, _Long(length_bytes))
    return record


class _Long:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_a_stream_alone_writes_all_it_has() -> None:
    length = GroupLength()
    for at in range(1_000):
        length.came(ONE, at / 1e3)
    assert length.shared_bytes_max(1.0) is None
    queue = PendingQueue(pending(ONE, MIB, lsn) for lsn in range(100))
    taken = queue.take(None)
    assert sum(p.extent.nbytes for p in taken) == GROUP_BYTES_MAX
    assert [p.lsn for p in taken] + [p.lsn for p in queue] == list(range(100))


def test_a_group_of_one_streams_tiny_records_is_bounded_by_their_number() -> None:
    queue = PendingQueue(pending(ONE, 4_096, lsn) for lsn in range(GROUP_RECORDS_MAX + 1))
    assert len(queue.take(None)) == GROUP_RECORDS_MAX
    assert len(queue.take(None)) == 1


def test_a_record_longer_than_a_group_goes_alone() -> None:
    queue = PendingQueue([pending(ONE, 2 * GROUP_BYTES_MAX, 0), pending(ONE, 1, 1)])
    assert [p.lsn for p in queue.take(None)] == [0]
    assert len(queue) == 1


def test_streams_share_for_a_while_after_both_came() -> None:
    length = GroupLength()
    length.came(ONE, 1.0)
    assert length.shared_bytes_max(1.0) is None
    length.came(TWO, 2.0)
    assert length.shared_bytes_max(2.0) is not None
    length.came(TWO, 2.0 + SHARED_FOR_S / 2)  # the same one again: nothing new
    assert length.shared_bytes_max(2.0 + SHARED_FOR_S) is None


@pytest.mark.parametrize(
    ("bytes_per_s", "flush_s", "expected"),
    [
        (2e9, 0.0, 2e9 * SHARED_GROUP_S),
        (2e9, 0.005, 2e9 * 0.005),  # as long as a flush: else most of the time would be flushing
        (1e6, 0.0, SHARED_GROUP_BYTES_MIN),
        (1e12, 0.0, SHARED_GROUP_BYTES_MAX),
    ],
)
def test_a_shared_group_is_as_long_as_is_written_in_a_few_milliseconds(
    bytes_per_s: float, flush_s: float, expected: float
) -> None:
    length = GroupLength()
    length.came(ONE, 0.0)
    length.came(TWO, 0.0)
    for _ in range(60):
        length.wrote(SHARED_GROUP_BYTES_MIN, SHARED_GROUP_BYTES_MIN / bytes_per_s, flush_s)
    assert length.shared_bytes_max(0.0) == pytest.approx(expected, rel=0.01)


def test_a_short_group_does_not_make_a_device_look_slow() -> None:
    length = GroupLength()
    length.came(ONE, 0.0)
    length.came(TWO, 0.0)
    for _ in range(60):
        length.wrote(8 * MIB, 0.004, 0.0)
    before = length.shared_bytes_max(0.0)
    length.wrote(4_096, 0.001, 0.0)
    assert length.shared_bytes_max(0.0) == before
    length.wrote(8 * MIB, 0.008, 0.0)
    after = length.shared_bytes_max(0.0)
    assert before is not None
    assert after is not None
    assert after < before


def test_a_group_written_in_no_time_teaches_nothing() -> None:
    length = GroupLength()
    length.came(ONE, 0.0)
    length.came(TWO, 0.0)
    before = length.shared_bytes_max(0.0)
    length.wrote(MIB, 0.0, 0.0)
    assert length.shared_bytes_max(0.0) == before


def test_each_stream_gets_its_part_and_keeps_its_order() -> None:
    queue = PendingQueue([pending(ONE, MIB, lsn) for lsn in range(50)])
    for lsn in range(50, 53):
        queue.append(pending(TWO, MIB, lsn))
    taken = queue.take(8 * MIB)
    assert len(taken) == 8
    assert [p.lsn for p in taken if p.stream == TWO] == [50, 51, 52]
    assert [p.lsn for p in taken if p.stream == ONE] == [0, 1, 2, 3, 4]
    assert [p.lsn for p in queue] == list(range(5, 50))  # nothing lost, order kept


def test_a_shared_group_of_tiny_records_is_bounded_by_their_number() -> None:
    records = [pending(ONE if lsn % 3 else TWO, 4_096, lsn) for lsn in range(1_000)]
    queue = PendingQueue(records)
    assert len(queue.take(SHARED_GROUP_BYTES_MAX)) == SHARED_GROUP_RECORDS_MAX
    assert len(queue) == 1_000 - SHARED_GROUP_RECORDS_MAX


def test_something_is_taken_whatever_the_bound() -> None:
    queue = PendingQueue([pending(ONE, 5 * MIB, 0), pending(TWO, 5 * MIB, 1)])
    assert len(queue.take(1)) == 1
    assert not PendingQueue().take(1)
    assert not PendingQueue().take(None)


def test_a_stream_that_was_left_over_goes_in_the_order_they_came() -> None:
    """Streams share no more, and several still wait."""
    records = [pending((ONE, TWO)[lsn % 2], MIB, lsn) for lsn in range(100)]
    queue = PendingQueue(records)
    assert [p.lsn for p in queue.take(None)] == list(range(GROUP_BYTES_MAX // MIB))
    assert {p.lsn for p in queue} == set(range(GROUP_BYTES_MAX // MIB, 100))
    queue.clear()
    assert not len(queue)
    assert not list(queue)


def test_what_stays_is_not_looked_at() -> None:
    """With 65,536 records of a device that stood still the queue was made anew for each group."""

    class Counted(bytes):
        asked = 0

        def __hash__(self) -> int:
            Counted.asked += 1
            return bytes.__hash__(self)

    streams = Counted(ONE), Counted(TWO)
    queue = PendingQueue(pending(streams[lsn % 2], 4_096, lsn) for lsn in range(10_000))
    Counted.asked = 0
    taken = queue.take(SHARED_GROUP_BYTES_MAX)
    assert len(taken) == SHARED_GROUP_RECORDS_MAX
    assert Counted.asked <= len(taken)


@pytest.mark.parametrize(("records", "threads"), [(1, 0), (15, 0), (16, 1)])
async def test_a_few_records_with_their_hashes_need_no_thread(records: int, threads: int) -> None:
    """The same bytes reach the device either way; the header of a segment counts, too."""
    images: list[bytes] = []
    for known in (True, False):
        fills: list[object] = []

        class Watched(InlineCompute):
            async def run(self, fn: Any, *args: Any) -> Any:
                fills.append(fn)  # noqa: B023
                return await super().run(fn, *args)

        device = SimDevice(flashlab.device_bytes(8, 256 * 1024), seed=1)
        options = replace(flashlab.OPTIONS, segment_bytes=256 * 1024, group_commit_bytes=MIB)
        engine = await Engine.open(
            device, options, compute=Watched(), now_ns=lambda: 1, random_bytes=bytes
        )
        fills.clear()
        acks = []
        for number in range(records):
            record = flashlab.record(flashlab.NAMESPACES[0], flashlab.key_of(number), b"odd" * 333)
            assert record.payload_hash is not None
            record = record if known else replace(record, payload_hash=None)
            acks.append(engine.append(ONE, record)[1])
        assert await asyncio.gather(*acks) == [Status.OK] * records
        assert fills == [fill] * (threads if known else 1)
        await engine.close()
        images.append(bytes(device.image()))
    assert images[0] == images[1]


def test_a_group_of_records_alone_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping was made for each, on the loop, where it waits for whoever finds pages."""
    taken: list[int] = []

    def counted(length_bytes: int) -> memoryview:
        taken.append(length_bytes)
        return aligned_buffer(length_bytes)

    async def life() -> None:
        device = SimDevice(flashlab.device_bytes(4), sleep=asyncio.sleep)
        engine = await flashlab.open_engine(device)
        name = (flashlab.NAMESPACES[0], flashlab.key_of(1))
        _, opens = flashlab.put(engine, name, b"opens a segment")
        assert await opens is Status.OK
        monkeypatch.setattr(group, "aligned_buffer", counted)
        for number in range(2, 5):
            name = (flashlab.NAMESPACES[0], flashlab.key_of(number))
            assert await flashlab.put(engine, name, b"goes into it")[1] is Status.OK
            assert await flashlab.get(engine, name) == (Status.OK, b"goes into it")
        assert not taken
        await engine.close()

    simloop.run(life())
