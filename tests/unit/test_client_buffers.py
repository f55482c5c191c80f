"""Callers' buffers as views, and the staging allocator."""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import itertools
import mmap
import time
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_client.buffers import UsageError, as_view, check_apart, copy
from entresol_client.registered import RegisteredMemory
from entresol_client.staging import Arena, PrivateMemory, Region, shared_memory
from entresol_proto import limits
from entresol_proto.fabric.memory import is_readers_only
from entresol_proto.seal.wiping import zero

KIB4 = 4096


class FakeDevice:
    def __init__(self, kind: str) -> None:
        self.type = kind


class FakeTensor:
    """What the client uses of a torch tensor; torch itself is too large for this suite."""

    def __init__(self, content: np.ndarray[Any, Any], device: str = "cpu") -> None:
        self.content = content
        self.device = FakeDevice(device)

    def data_ptr(self) -> int:
        return int(self.content.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.content.flags.c_contiguous)

    def numel(self) -> int:
        return int(self.content.size)

    def element_size(self) -> int:
        return int(self.content.itemsize)


class EmptiedTensor(FakeTensor):
    """After `tensor.untyped_storage().resize_(0)`: as long as before, and nowhere."""

    def data_ptr(self) -> int:
        return 0


def test_views_alias_the_callers_memory() -> None:
    text = bytearray(b"abcdefgh")
    words = array.array("I", [1, 2])
    grid = np.arange(6, dtype=np.float16).reshape(2, 3)
    raw = ctypes.create_string_buffer(8)
    tensor = FakeTensor(np.zeros((2, 4), dtype=np.float32))
    with mmap.mmap(-1, 16) as mapped:
        for buffer, size in [
            (text, 8),
            (memoryview(text)[2:6], 4),
            (words, 8),
            (grid, 12),
            (raw, 8),
            (mapped, 16),
            (tensor, 32),
            ((ctypes.addressof(raw), 4), 4),
        ]:
            view = as_view(buffer, writable=True)
            assert (view.format, view.ndim, view.nbytes, view.readonly) == ("B", 1, size, False)
            view[size - 1] = 0x5A
            assert as_view(buffer, writable=False)[size - 1] == 0x5A
            view.release()
        del view
    assert text[5] == text[7] == 0x5A
    assert tensor.content.view(np.uint8)[-1, -1] == 0x5A


def test_dtypes_without_a_buffer_format_work() -> None:
    strange: Any = np.zeros(4, dtype=np.dtype("M8[ns]"))  # memoryview() refuses this one
    with pytest.raises(ValueError, match="include dtype"):
        memoryview(strange)
    assert as_view(strange, writable=True).nbytes == 32


def test_a_view_keeps_its_owner_alive() -> None:
    tensor = FakeTensor(np.arange(8, dtype=np.uint8))
    gone = weakref.ref(tensor)
    view = as_view(tensor, writable=True)
    del tensor
    gc.collect()
    assert gone() is not None
    assert bytes(view) == bytes(range(8))
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [
        (b"bytes", "read-only"),
        (np.zeros(0), "0 bytes"),
        (bytearray(), "0 bytes"),
        ((4096, 0), "0 bytes"),
        (np.zeros((4, 4))[:, 1], "not contiguous"),
        (np.zeros((4, 4), order="F"), "not contiguous"),
        (memoryview(bytearray(8))[::2], "not contiguous"),
        (FakeTensor(np.zeros(4), device="cuda"), "'cuda'"),
        (FakeTensor(np.zeros((4, 4))[:, 1]), "not contiguous"),
        (EmptiedTensor(np.zeros(4)), "no memory"),
        ("text", "not a buffer"),
        (None, "not a buffer"),
        (7, "not a buffer"),
        ((0, 8), "cannot be at"),
        ((4096, -1), "cannot be at"),
        ((4096, 8, 1), "a raw buffer is"),
        ((4096, "8"), "a raw buffer is"),
        ((4096, limits.BLOCK_BYTES_MAX + 1), "67108865 bytes"),
    ],
)
def test_unusable_buffers_are_refused_with_the_reason(buffer: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        as_view(buffer, writable=True)
    if "67108865" not in reason:  # of any length
        with pytest.raises(UsageError):
            RegisteredMemory(buffer)


def test_the_largest_block_is_allowed() -> None:
    with mmap.mmap(-1, limits.BLOCK_BYTES_MAX) as mapped:
        as_view(mapped, writable=True).release()


def test_read_only_is_fine_for_sources() -> None:
    assert bytes(as_view(b"source", writable=False)) == b"source"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5))
def test_buffers_that_share_memory_are_found(spans: list[tuple[int, int]]) -> None:
    whole = memoryview(bytearray(64))
    cells = [at for begin, length in spans for at in range(begin, begin + length)]
    views = [whole[begin : begin + length] for begin, length in spans]
    if len(cells) == len(set(cells)):
        check_apart(views)
    else:
        with pytest.raises(UsageError, match="share memory"):
            check_apart(views)


def test_zero_and_copy() -> None:
    into = memoryview(bytearray(b"12345678"))
    copy(memoryview(b"abcd"), into[2:6])
    assert bytes(into) == b"12abcd78"
    zero(into[:3])
    assert bytes(into) == b"\0\0\0bcd78"


def arena(length_bytes: int) -> Arena:
    return Arena(PrivateMemory(length_bytes), length_bytes)


def soon(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * KIB4)), max_size=60))
@settings(deadline=None)
def test_regions_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int]]) -> None:
    async def run() -> None:
        made = arena(16 * KIB4)
        held: list[Region] = []
        for take, number in steps:
            if take:
                region = await made.take(number, 0)  # a deadline in the past: now or never
                if region is not None:
                    assert region.view.nbytes == number
                    held.append(region)
            elif held:
                held.pop(number % len(held)).give_back()
            spans = sorted((r.offset, r.offset + r.view.nbytes) for r in held)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        for region in held:
            region.give_back()
        assert made.used_bytes == 0
        whole = await made.take(16 * KIB4, 0)
        assert whole is not None
        made.close()

    asyncio.run(run())


async def test_takers_are_served_in_order() -> None:
    made = arena(4 * KIB4)
    first = await made.take(3 * KIB4, soon(1))
    assert first is not None
    large = asyncio.ensure_future(made.take(4 * KIB4, soon(5)))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(made.take(KIB4, soon(5)))  # would fit, but stands behind
    await asyncio.sleep(0.01)
    assert not small.done()
    first.give_back()
    region = await large
    assert region is not None
    assert not small.done()
    region.give_back()
    last = await small
    assert last is not None
    last.give_back()
    assert made.used_bytes == 0


async def test_waiting_ends_at_the_deadline_and_lets_the_next_one_in() -> None:
    made = arena(4 * KIB4)
    held = await made.take(2 * KIB4, soon(1))
    assert held is not None
    large = asyncio.ensure_future(made.take(4 * KIB4, soon(0.02)))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(made.take(KIB4, soon(5)))
    assert await large is None
    region = await small
    assert region is not None
    assert await made.take(5 * KIB4, soon(5)) is None  # never fits: told at once
    region.give_back()
    held.give_back()


async def test_a_cancelled_taker_loses_nothing() -> None:
    made = arena(KIB4)
    held = await made.take(1, soon(1))
    assert held is not None
    waiting = asyncio.ensure_future(made.take(1, soon(5)))
    await asyncio.sleep(0)
    held.give_back()  # served ...
    waiting.cancel()  # ... and cancelled in the same turn
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert made.used_bytes == 0
    again = await made.take(KIB4, soon(1))
    assert again is not None


async def test_closing_fails_takers_and_a_region_is_given_back_once() -> None:
    made = Arena(shared_memory(KIB4), KIB4)
    held = await made.take(1, soon(1))
    assert held is not None
    waiting = asyncio.ensure_future(made.take(1, soon(3600)))
    await asyncio.sleep(0)
    made.close()
    assert await asyncio.wait_for(waiting, 60) is None, "told now, not at its deadline"
    assert await made.take(1, soon(1)) is None
    held.give_back()
    with pytest.raises(AssertionError, match="twice"):
        held.give_back()


async def test_what_was_given_back_is_not_at_hand_any_more() -> None:
    memory = shared_memory(KIB4)
    assert is_readers_only(memory.fd), "the daemon can only read it"
    arena = Arena(PrivateMemory(KIB4), KIB4)
    region = await arena.take(16, 2**62)
    assert region is not None
    region.view[:] = b"0123456789abcdef"
    region.give_back()
    assert len(region.view) == 0
    for _ in range(2):
        arena.close()
        assert arena.closed
        assert len(arena.memory.view) == 0
        assert await arena.take(16, 2**62) is None
    memory.close()


async def test_a_taker_that_is_cancelled_holds_nothing_and_nobody_up() -> None:
    step, far_ns = limits.ALIGN_BYTES, time.monotonic_ns() + 60 * 10**9
    arena = Arena(PrivateMemory(2 * step), 2 * step)
    held = await arena.take(2 * step, far_ns)
    large = asyncio.create_task(arena.take(2 * step, far_ns))
    small = asyncio.create_task(arena.take(step, far_ns))
    await asyncio.sleep(0)
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    assert held is not None
    held.give_back()
    async with asyncio.timeout(10):
        first, second = await small, await arena.take(step, far_ns)
    assert first is not None
    assert second is not None
    waiting = asyncio.create_task(arena.take(step, far_ns))
    await asyncio.sleep(0)
    first.give_back()  # to who waits, and is cancelled before its turn
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    second.give_back()
    assert arena.used_bytes == 0
    arena.close()
