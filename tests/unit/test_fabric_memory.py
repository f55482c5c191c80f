"""Shared buffers: readers cannot write or resize, closing never raises, nothing leaks."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import leaks
import numpy as np
import pytest

from entresol_proto.fabric.base import SharedBuffer
from entresol_proto.fabric.memory import MemfdBuffer, is_readers_only, seals_of
from entresol_proto.fabric.regions import STEP_BYTES, CopyJob, Piece
from entresol_proto.status import FabricError, Status


def test_a_buffer_is_zeroed_writable_memory_of_the_length_asked() -> None:
    with MemfdBuffer(5_000) as buffer:
        assert isinstance(buffer, SharedBuffer)
        assert len(buffer.view) == buffer.length_bytes == 5_000
        assert not any(buffer.view)
        buffer.view[4_999] = 7
        assert os.pread(buffer.fd, 1, 4_999) == b"\x07"
        assert os.fstat(buffer.fd).st_size % mmap.PAGESIZE == 0
        assert not os.get_inheritable(buffer.fd)


def test_a_sealed_buffer_can_only_be_read_by_who_gets_the_descriptor() -> None:
    with MemfdBuffer(8_192) as buffer:
        assert not is_readers_only(buffer.fd)
        assert buffer.seal_for_readers()
        assert buffer.seal_for_readers()
        assert is_readers_only(buffer.fd)
        buffer.view[:5] = b"still"
        with pytest.raises(PermissionError):
            os.write(buffer.fd, b"x")
        for size in (0, 4_096, 16_384):
            with pytest.raises(PermissionError):
                os.ftruncate(buffer.fd, size)
        with pytest.raises(PermissionError):
            mmap.mmap(buffer.fd, 8_192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        again = os.open(f"/proc/self/fd/{buffer.fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.write(again, b"x")
        finally:
            os.close(again)
        with mmap.mmap(buffer.fd, 8_192, mmap.MAP_SHARED, mmap.PROT_READ) as reader:
            assert reader[:5] == b"still"
            buffer.view[:5] = b"moves"
            assert reader[:5] == b"moves"


def test_seals_of_files_that_know_none_count_as_none() -> None:
    read_end, write_end = os.pipe()
    try:
        assert seals_of(read_end) == 0
        assert not is_readers_only(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("length", [10_000, 3 * STEP_BYTES])  # in one step, and in several
def test_a_copy_that_is_late_or_stopped_lands_nothing(length: int) -> None:
    source, into = np.full(length, 7, np.uint8), np.zeros(length, np.uint8)
    late, stopped, done = (CopyJob([Piece(memoryview(into), source)]) for _ in range(3))
    late.run(deadline_ns=0)
    stopped.stop()
    stopped.run(deadline_ns=2**63)
    assert late.copied == stopped.copied == 0
    assert not into.any()
    done.run(deadline_ns=2**63)
    assert done.copied == 1
    assert (into == source).all()


def test_close_is_idempotent_and_leaks_nothing() -> None:
    before = leaks.snapshot()
    for _ in range(20):
        buffer = MemfdBuffer(100_000)
        buffer.close()
        buffer.close()
        assert buffer.closed
        assert buffer.fd == -1
    leaks.assert_no_leaks(before)


def test_close_does_not_raise_while_others_hold_views_and_the_last_of_them_ends_it() -> None:
    before = leaks.snapshot()
    buffer = MemfdBuffer(100_000)
    buffer.view[:4] = b"kept"
    piece = buffer.view[:4]
    array = np.frombuffer(buffer.view, np.uint8)
    buffer.close()
    assert bytes(piece) == b"kept"
    assert array[3] == ord("t")
    piece.release()
    del array, buffer
    gc.collect()
    leaks.assert_no_leaks(before)


def test_huge_pages_fall_back_to_ordinary_ones() -> None:
    with MemfdBuffer(3_000_000, huge_pages=True) as buffer:
        buffer.view[-1] = 1
        assert len(buffer.view) == 3_000_000
        assert buffer.seal_for_readers()


def test_without_reserved_huge_pages_the_kernel_is_asked_to_make_some() -> None:
    """`hg` of smaps: the mapping is advised; whether pages come of it is the system's setting."""

    def advised(name: str) -> list[bool]:
        smaps = Path("/proc/self/smaps").read_text().split(f"/memfd:{name} ")[1:]
        flags = [next(x for x in each.splitlines() if x.startswith("VmFlags")) for each in smaps]
        return ["hg" in line.split() for line in flags]

    with (
        MemfdBuffer(3_000_000, name="asked", huge_pages=True) as asked,
        MemfdBuffer(3_000_000, name="not-asked"),
    ):
        if asked.huge:
            pytest.skip("not run here: this system has reserved huge pages to spare")
        if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
            pytest.skip("not run here: this kernel makes no huge pages")
        assert advised("asked") == [True]
        assert advised("not-asked") == [False]


@pytest.mark.parametrize(
    ("length", "status"), [(0, Status.BAD_REQUEST), (-1, Status.BAD_REQUEST), (2**62, Status.BUSY)]
)
def test_impossible_lengths_are_refused_and_leak_nothing(length: int, status: Status) -> None:
    before = leaks.snapshot()
    with pytest.raises(FabricError) as caught:
        MemfdBuffer(length)
    assert caught.value.status is status
    leaks.assert_no_leaks(before)


def test_a_forgotten_buffer_warns() -> None:
    buffer = MemfdBuffer(4_096)
    with pytest.warns(ResourceWarning, match="unclosed"):
        buffer.__del__()
    assert buffer.closed
