"""Staging memory: where sealed bytes lie between the fabric and the caller's buffers.

One arena is one piece of address space of the configured size; pages become real when first used,
and since extents are taken from the bottom, a host that moves little holds little.

Invariants: a region belongs to one taker until it is given back; takers are served in order, so a
large one is not starved by small ones; nobody waits past the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections import deque
from typing import Protocol

from entresol_proto import limits
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.status import ConfigError

_ALIGN = limits.ALIGN_BYTES


class Memory(Protocol):
    """What an arena is made of: `view` is writable and zeroed."""

    @property
    def view(self) -> memoryview: ...
    def close(self) -> None: ...


class PrivateMemory:
    """Anonymous memory, on huge pages where the system has them (cheap first touch)."""

    def __init__(self, length_bytes: int) -> None:
        """Raises: ConfigError when the system does not give so much."""
        try:
            mapping = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"{length_bytes} bytes of staging memory cannot be had: {error.strerror or error}",
                hint="lower staging_bytes_max, half of which is taken at once for each shard",
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapping)

    def close(self) -> None:
        """Drop our reference; the pages go when the last view cut from it does."""
        self.view = memoryview(b"")


def shared_memory(length_bytes: int) -> MemfdBuffer:
    """Memory that every fabric can expose, shm included; the daemon can only read it."""
    memory = MemfdBuffer(length_bytes, name="entresol-put")
    memory.seal_for_readers()
    return memory


class Region:
    """A taken extent. `view` is exactly as long as asked for. Give it back exactly once."""

    __slots__ = ("_arena", "_held_bytes", "offset", "view")

    def __init__(self, arena: Arena, offset: int, asked_bytes: int, held_bytes: int) -> None:
        self._arena: Arena | None = arena
        self._held_bytes = held_bytes
        self.offset = offset  # in the arena's memory
        self.view = arena.memory.view[offset : offset + asked_bytes]

    def give_back(self) -> None:
        """End of use. Asserts that it is the first time."""
        assert self._arena is not None, "a region was given back twice"
        arena, self._arena = self._arena, None
        self.view = memoryview(b"")
        arena._join(self.offset, self._held_bytes)


class Arena:
    """First-fit allocator over one memory, with a waiting line."""

    def __init__(self, memory: Memory, length_bytes: int) -> None:
        self.memory = memory
        self.length_bytes = length_bytes // _ALIGN * _ALIGN
        self._free: list[tuple[int, int]] = [(0, self.length_bytes)]  # (offset, size), sorted
        self._waiting: deque[tuple[int, asyncio.Future[Region]]] = deque()
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Memory in the hands of takers."""
        return self.length_bytes - sum(size for _, size in self._free)

    @property
    def closed(self) -> bool:
        return self._closed

    def fits(self, length_bytes: int) -> bool:
        """True when a region of this length could ever be had."""
        return _rounded(length_bytes) <= self.length_bytes

    async def take(self, length_bytes: int, deadline_ns: int) -> Region | None:
        """A region, or None at the deadline, when the arena is closed, or if it can never fit."""
        if self._closed or not self.fits(length_bytes):
            return None
        if not self._waiting and (region := self._cut(length_bytes)) is not None:
            return region
        loop, caller = asyncio.get_running_loop(), asyncio.current_task()
        before = caller.cancelling() if caller else 0  # in its clean-up it may take again
        waiter: asyncio.Future[Region] = loop.create_future()
        self._waiting.append((length_bytes, waiter))
        timer = loop.call_later(
            max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9), self._give_up, waiter
        )
        try:
            # Shielded: a cancelled caller must not lose a region that was just handed to it.
            await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if waiter.cancelled() and not (caller and caller.cancelling() > before):
                return None  # the deadline or `close`
            if waiter.done() and not waiter.cancelled():
                waiter.result().give_back()
            else:
                self._give_up(waiter)
            raise
        finally:
            timer.cancel()
        return waiter.result()

    def close(self) -> None:
        """Fail all takers; regions still out stay valid until dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _, waiter in self._waiting:
            waiter.cancel()
        self._waiting.clear()
        self.memory.close()

    def _cut(self, length_bytes: int) -> Region | None:
        need = _rounded(length_bytes)
        for index, (offset, size) in enumerate(self._free):
            if size >= need:
                rest = (offset + need, size - need)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return Region(self, offset, length_bytes, need)
        return None

    def _join(self, offset: int, length_bytes: int) -> None:
        """Take an extent back, merge it with its neighbours, serve who waits."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, length_bytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                assert not merged or sum(merged[-1]) < start, "an extent was given back twice"
                merged.append((start, size))
        self._free = merged
        self._serve()

    def _serve(self) -> None:
        while self._waiting and not self._closed:
            length_bytes, waiter = self._waiting[0]
            if not waiter.done():
                region = self._cut(length_bytes)
                if region is None:
                    return
                waiter.set_result(region)
            self._waiting.popleft()

    def _give_up(self, waiter: asyncio.Future[Region]) -> None:
        waiter.cancel()
        self._serve()  # it may have been the one that blocked the line


def _rounded(length_bytes: int) -> int:
    return -(-max(1, length_bytes) // _ALIGN) * _ALIGN
