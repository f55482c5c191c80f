"""The queue of the native kernel, and what it says of records, without a device around it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from entresol_daemon.flash.checking import Expected, RecordCheck
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_proto import native
from entresol_proto.native import Look, Taken, Wanted
from tests.unit.gated_kernel import KEY, Gate, record


class Asked:
    """The kernel's queue over a file, one read at a time; what ended, and how often it woke us."""

    def __init__(self, fd: int) -> None:
        assert native.KERNEL is not None
        self.queue = native.KERNEL.reads(fd, 1)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.taken = Taken()

    def add(
        self, number: int, *pieces: tuple[int, list[memoryview]], look: Look = Look.ELSEWHERE
    ) -> None:
        wanted = Wanted()
        for offset, views in pieces:
            wanted.add(offset, views, look)
        self.queue.add(number, self.wake_fd, wanted)

    def next(self) -> tuple[int, int, int] | None:
        """Batch, piece and what came of it; settled."""
        if not self.queue.next(self.taken):
            return None
        taken = self.taken
        self.queue.settle(taken)
        return taken.batch_number, taken.number, taken.got_bytes

    def ended(self) -> list[int]:
        found: list[int] = []
        while (number := self.queue.ended()) is not None:
            assert self.queue.ended() == number, "until it is forgotten"
            self.queue.forget()
            found.append(number)
        return found

    def woken(self) -> int:
        try:
            return os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self.queue.close()
        while self.next() is not None:
            pass
        self.queue.free()
        os.close(self.wake_fd)


@pytest.fixture
def reads(tmp_path: Path, gate: Gate) -> Iterator[Asked]:
    path = tmp_path / "data"
    path.write_bytes(random.Random(2).randbytes(4 * BLOCK + 100))
    fd = os.open(path, os.O_RDONLY)
    asked = Asked(fd)
    gate.open(100)
    yield asked
    asked.close()
    os.close(fd)


def test_what_was_read_lies_where_it_was_wanted(tmp_path: Path, reads: Asked) -> None:
    data = (tmp_path / "data").read_bytes()
    views = [memoryview(bytearray(n)) for n in (1, 4096, 77, 3000)]
    reads.add(1 << 40, (10, views))
    assert reads.next() == (1 << 40, 0, 7174)
    assert b"".join(views) == data[10:7184]
    assert (reads.ended(), reads.woken()) == ([1 << 40], 1)


def test_what_is_missing_is_told(reads: Asked) -> None:
    """Also where it would not be looked at any further."""
    view = memoryview(bytearray(200))
    for number, look in enumerate(Look):
        reads.add(number, (4 * BLOCK, [view]), (5 * BLOCK, [view]), look=look)
        assert reads.next() == (number, 0, 100)
        assert reads.ended() == []
        assert reads.next() == (number, 1, 0)
        assert reads.ended() == [number]


def test_an_error_is_told(gate: Gate) -> None:
    out, into = os.pipe()
    asked = Asked(out)
    gate.open(1)
    view = memoryview(bytearray(10))
    asked.add(3, (0, [view]), look=Look.NO_FURTHER)
    found = asked.next()
    assert found is not None
    assert (found[0], os.strerror(-found[2])) == (3, "Illegal seek")
    asked.close()
    os.close(out)
    os.close(into)


def test_a_read_only_view_is_refused(reads: Asked) -> None:
    with pytest.raises((TypeError, BufferError)):
        reads.add(1, (0, [memoryview(bytes(10))]))


def test_what_is_not_looked_at_any_further_brings_nobody_back(reads: Asked) -> None:
    """A batch ends once, when all of it is there; who asked for it is woken once for each."""
    views = [memoryview(bytearray(BLOCK)) for _ in range(4)]
    reads.add(1, *((n * BLOCK, [view]) for n, view in enumerate(views)), look=Look.NO_FURTHER)
    reads.add(2, (0, [views[0]]), look=Look.NO_FURTHER)
    reads.add(3, (0, [views[0]]))
    assert reads.next() == (3, 0, BLOCK)
    assert reads.ended() == [1, 2, 3]
    assert reads.woken() == 3
    assert reads.ended() == []


def test_what_was_dropped_is_not_read_and_the_others_are(reads: Asked, gate: Gate) -> None:
    views = [memoryview(bytearray(BLOCK)) for _ in range(5)]
    for number, view in enumerate(views):
        reads.add(number, (number * BLOCK, [view]), (BLOCK, [view]))
    for number in (0, 4, 2, 2, 9):
        reads.queue.drop(number)
    assert (reads.ended(), reads.woken()) == ([0, 4, 2], 3)
    reads.add(5, (BLOCK, [views[0]]))  # behind the one that became the last
    assert [reads.next() for _ in range(3)] == [(1, 0, BLOCK), (1, 1, BLOCK), (3, 0, BLOCK)]
    reads.queue.drop(3)  # the rest of it
    assert reads.ended() == [1, 3]
    assert reads.next() == (5, 0, BLOCK)
    reads.queue.drop(5)
    assert reads.ended() == [5]
    reads.queue.close()
    assert reads.next() is None
    assert gate.begun == [BLOCK, BLOCK, 3 * BLOCK, BLOCK]


def test_nothing_is_asked_for_once_it_is_closed(reads: Asked, gate: Gate) -> None:
    view = memoryview(bytearray(BLOCK))
    reads.add(1, (0, [view]))
    reads.queue.close()
    with pytest.raises(RuntimeError, match="closed"):
        reads.add(2, (BLOCK, [view]))
    assert reads.next() == (1, 0, BLOCK)
    assert reads.next() is None
    assert (reads.ended(), gate.begun) == ([1], [0])


@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("look", [Look.ELSEWHERE, Look.NO_FURTHER])
def test_all_threads_are_let_go_at_the_end(
    gate: Gate, tmp_path: Path, waiting: bool, look: Look
) -> None:
    """Those that wait for a piece, and those that wait because as many as may are in service."""
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * BLOCK))
    fd = os.open(path, os.O_RDONLY)
    asked = Asked(fd)
    numbers: list[int] = []

    def work() -> None:
        taken = Taken()
        while asked.queue.next(taken):
            numbers.append(taken.batch_number)
            asked.queue.settle(taken)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for one in threads:
        one.start()
    view = memoryview(bytearray(BLOCK))
    for number in range(0 if waiting else 4):
        asked.add(number, (0, [view]), look=look)
    if not waiting:
        gate.wait(1)
    asked.queue.close()
    gate.open(4)
    for one in threads:
        one.join(30)
        assert not one.is_alive()
    assert sorted(asked.ended()) == ([] if waiting else [0, 1, 2, 3])
    assert len(numbers) == (0 if waiting or look is Look.NO_FURTHER else 4)
    asked.close()
    os.close(fd)


# Of the records that the kernel looks at ----------------------------------------------------------


class Judges:
    """What the kernel and its twin say of a record that lies on flash."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "record", os.O_RDWR | os.O_CREAT, 0o600)
        self._asked = Asked(self._fd)

    def say(
        self, expected: Expected, raw: bytes, *, key: bytes = KEY, payloads: bool = True
    ) -> bool:
        """Whether it is good. Both say the same, but for what the kernel leaves to its twin."""
        os.pwrite(self._fd, raw, 0)
        view = memoryview(bytearray(len(raw)))
        check = RecordCheck([(expected, view)], key, payloads)
        wanted = Wanted()
        wanted.add(0, [view], Look.FOR_RECORDS, [check.head(0)])
        self._asked.queue.add(1, self._asked.wake_fd, wanted, key, payloads=payloads)
        mark, byte = Wanted(), memoryview(bytearray(1))
        mark.add(0, [byte], Look.ELSEWHERE)
        self._asked.queue.add(2, self._asked.wake_fd, mark)
        found = self._asked.next()
        assert found is not None
        by_kernel = found[0] == 2  # the first that brings anybody back
        if not by_kernel:
            assert self._asked.next() == (2, 0, 1)
        assert self._asked.ended() == [1, 2]
        by_twin = check(0)
        if payloads and expected.sealed_bytes <= 240:
            assert not by_kernel, "the kernel has no hash for so little"
        else:
            assert by_kernel == by_twin
        return by_twin

    def close(self) -> None:
        self._asked.close()
        os.close(self._fd)


@pytest.fixture
def judges(tmp_path: Path, gate: Gate) -> Iterator[Judges]:
    gate.open(10_000)
    made = Judges(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "sealed_bytes",
    [1, 240, 241, 256, 257, 1000, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 4000, 4001, 100_000],
)
def test_a_record_is_good_for_the_kernel_as_for_its_twin(judges: Judges, sealed_bytes: int) -> None:
    expected, raw = record(sealed_bytes)
    assert judges.say(expected, raw)
    assert judges.say(expected, raw, payloads=False)
    assert not judges.say(expected, raw, key=bytes(32))
    for seed in range(4):
        assert not judges.say(record(sealed_bytes, 2 + seed)[0], raw)


def test_the_head_of_a_longer_record_is_good_where_nobody_hashes_it(judges: Judges) -> None:
    expected, raw = record(100_000)
    assert judges.say(expected, bytes(raw[:BLOCK]), payloads=False)


def test_no_flipped_bit_of_a_record_is_good(judges: Judges) -> None:
    expected, raw = record(700)
    rng = random.Random(3)
    for at in range(RECORD_HEADER_BYTES + 700):
        raw[at] ^= (bit := 1 << rng.randrange(8))
        assert not judges.say(expected, raw)
        # Of a header nothing passes; of a payload all, where nobody hashes it.
        assert judges.say(expected, raw, payloads=False) == (at >= RECORD_HEADER_BYTES)
        raw[at] ^= bit
    raw[-1] ^= 1  # padding is nobody's
    assert judges.say(expected, raw)


@pytest.mark.parametrize(
    "field",
    ["sequence", "offset", "namespace_id", "wire_key", "sealed_bytes", "plain_bytes", "position"],
)
def test_a_good_record_of_another_place_is_not_the_one_asked_for(
    judges: Judges, field: str
) -> None:
    expected, raw = record(700)
    value = getattr(expected, field)
    setattr(expected, field, value + 1 if isinstance(value, int) else value[:-1] + b"?")
    assert not judges.say(expected, raw)
