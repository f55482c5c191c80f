"""What goes out in one group: all there is, or each stream's part of a few milliseconds."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest

from entresol_daemon.flash.group import GroupLength, Pending, take_records
from entresol_daemon.flash.model import (
    GROUP_BYTES_MAX,
    SHARED_FOR_S,
    SHARED_GROUP_BYTES_MAX,
    SHARED_GROUP_BYTES_MIN,
    SHARED_GROUP_RECORDS_MAX,
    SHARED_GROUP_S,
)
from entresol_daemon.flash.segment import RecordKind

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
    queue = deque(pending(ONE, MIB, lsn) for lsn in range(100))
    taken = take_records(queue, None)
    assert sum(p.extent.nbytes for p in taken) == GROUP_BYTES_MAX
    assert [p.lsn for p in taken] + [p.lsn for p in queue] == list(range(100))


def test_a_record_longer_than_a_group_goes_alone() -> None:
    queue = deque([pending(ONE, 2 * GROUP_BYTES_MAX, 0), pending(ONE, 1, 1)])
    assert [p.lsn for p in take_records(queue, None)] == [0]


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
    queue = deque([pending(ONE, MIB, lsn) for lsn in range(50)])
    queue.extend(pending(TWO, MIB, lsn) for lsn in range(50, 53))
    taken = take_records(queue, 8 * MIB)
    assert len(taken) == 8
    assert [p.lsn for p in taken if p.stream == TWO] == [50, 51, 52]
    assert [p.lsn for p in taken if p.stream == ONE] == [0, 1, 2, 3, 4]
    assert [p.lsn for p in queue] == list(range(5, 50))  # nothing lost, order kept


def test_a_shared_group_of_tiny_records_is_bounded_by_their_number() -> None:
    queue = deque(pending(ONE if lsn % 3 else TWO, 4_096, lsn) for lsn in range(1_000))
    assert len(take_records(queue, SHARED_GROUP_BYTES_MAX)) == SHARED_GROUP_RECORDS_MAX
    assert len(queue) == 1_000 - SHARED_GROUP_RECORDS_MAX


def test_something_is_taken_whatever_the_bound() -> None:
    queue = deque([pending(ONE, 5 * MIB, 0), pending(TWO, 5 * MIB, 1)])
    assert len(take_records(queue, 1)) == 1
    assert not take_records(deque(), 1)
    assert not take_records(deque(), None)
