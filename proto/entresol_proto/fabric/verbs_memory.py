"""Local memory that reads land in: registered in advance, for one read, or a bounce buffer.

Invariants:
- Only memory its owner named as long-lived (`Registry.add`) stays registered between reads. Foreign
  memory never does: once freed and mapped anew, an old registration would let bytes land on pages
  nobody sees.
- A registration ends only when no read into it is on the wire.
- Nothing here is readable or writable by a peer: LOCAL_WRITE alone.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from entresol_proto import limits
from entresol_proto.fabric.verbs_api import ACCESS_LOCAL_WRITE, Memory
from entresol_proto.status import FabricError, Status

_log = logging.getLogger("entresol.fabric")

_PAGE = mmap.PAGESIZE
_ALIGN = 64


class Domain(Protocol):
    """What registers: `verbs_api.Domain`, one per rail."""

    def register(self, address: int, length_bytes: int, access: int) -> Memory: ...
    def register_dmabuf(self, fd: int, offset: int, length_bytes: int, access: int) -> Memory: ...


def address_of(view: memoryview) -> int:
    """Where a contiguous view's bytes are. It must be kept alive by whoever uses the address."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Landing:
    """A piece of address space that reads may land in.

    Registered per rail and granule when a read first needs it. `device` marks memory that only the
    network card may touch (a GPU's), so that there is no bounce path for it.
    """

    __slots__ = ("_closed", "_domains", "_keys", "_owner", "address",
                 "device", "length_bytes", "users")  # fmt: skip

    def __init__(
        self, domains: Sequence[Domain], address: int, length_bytes: int, owner: object = None
    ) -> None:
        self.address = address
        self.length_bytes = length_bytes
        self.users = 0  # reads on the wire
        self.device = False
        self._owner = owner  # keeps the memory mapped
        self._domains = domains
        self._keys: dict[tuple[int, int], tuple[Memory, int]] = {}
        self._closed = False

    def room(self, address: int) -> int:
        """Bytes from `address` to the end of its granule: one read may not cross it."""
        offset = address - self.address
        return limits.VERBS_GRANULE_BYTES - offset % limits.VERBS_GRANULE_BYTES

    def key(self, rail: int, address: int) -> tuple[int, int]:
        """(local key, address in the device's terms). Raises: FabricError."""
        if self._closed:
            raise FabricError("the memory was given back", status=Status.DISCONNECTED)
        granule = (address - self.address) // limits.VERBS_GRANULE_BYTES
        found = self._keys.get((rail, granule))
        if found is None:
            found = self._register(rail, granule)
            self._keys[rail, granule] = found
        memory, shift = found
        return memory.lkey, address - shift

    def _register(self, rail: int, granule: int) -> tuple[Memory, int]:
        offset = granule * limits.VERBS_GRANULE_BYTES
        size = min(limits.VERBS_GRANULE_BYTES, self.length_bytes - offset)
        memory = self._domains[rail].register(self.address + offset, size, ACCESS_LOCAL_WRITE)
        return memory, 0

    @property
    def is_open(self) -> bool:
        return not self._closed

    def done(self) -> None:
        """One read into it is over."""
        self.users -= 1
        assert self.users >= 0
        if self._closed and not self.users:
            self._release()

    def close(self) -> None:
        """No further reads; deregisters once none is on the wire. Idempotent."""
        self._closed = True
        if not self.users:
            self._release()

    def _release(self) -> None:
        keys, self._keys = self._keys, {}
        self._owner = None
        for memory, _ in keys.values():
            try:
                memory.close()
            except FabricError as error:  # it stays pinned; no read and no peer can reach it
                _log.error("event=landing_not_freed error=%s", error)


class DeviceLanding(Landing):
    """GPU memory, registered as a whole: by its dma-buf, else through the peer-memory interface."""

    __slots__ = ("_dmabuf", "_offset")

    def __init__(
        self,
        domains: Sequence[Domain],
        address: int,
        length_bytes: int,
        *,
        dmabuf_fd: int | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__(domains, address, length_bytes)
        self.device = True
        self._dmabuf = dmabuf_fd
        self._offset = offset
        try:
            for rail in range(len(domains)):
                self.key(rail, address)
        except FabricError:
            self.close()
            raise

    def room(self, address: int) -> int:
        """One registration covers it all."""
        return self.address + self.length_bytes - address

    def key(self, rail: int, address: int) -> tuple[int, int]:
        """See `Landing.key`."""
        found = self._keys.get((rail, 0))
        if found is None:
            found = self._keys[rail, 0] = self._register(rail, 0)
        memory, shift = found
        return memory.lkey, address - shift

    def _register(self, rail: int, granule: int) -> tuple[Memory, int]:
        domain = self._domains[rail]
        if self._dmabuf is not None:
            memory = domain.register_dmabuf(
                self._dmabuf, self._offset, self.length_bytes, ACCESS_LOCAL_WRITE
            )
            return memory, self.address - self._offset
        try:
            return domain.register(self.address, self.length_bytes, ACCESS_LOCAL_WRITE), 0
        except FabricError as error:
            raise FabricError(
                f"the device cannot reach this GPU memory: {error}",
                hint="load nvidia-peermem, or pass the memory's dma-buf",
                status=Status.UNSUPPORTED,
            ) from None


class Registry:
    """The long-lived landings of one session, found by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._landings: list[Landing] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, landing: Landing) -> None:
        """Raises: FabricError (BUSY) at VERBS_REGISTRATIONS_MAX, (BAD_REQUEST) for an overlap."""
        self._sweep()
        if len(self._starts) >= limits.VERBS_REGISTRATIONS_MAX:
            raise FabricError("too many registered buffers", status=Status.BUSY)
        at = bisect.bisect(self._starts, landing.address)
        before, after = self._landings[at - 1 : at], self._landings[at : at + 1]
        if any(one.address + one.length_bytes > landing.address for one in before) or any(
            landing.address + landing.length_bytes > one.address for one in after
        ):
            raise FabricError("the memory is registered already", status=Status.BAD_REQUEST)
        self._starts.insert(at, landing.address)
        self._landings.insert(at, landing)

    def find(self, address: int, length_bytes: int) -> Landing | None:
        """The open landing that holds all of these bytes."""
        at = bisect.bisect(self._starts, address) - 1
        if at < 0:
            return None
        found = self._landings[at]
        end = found.address + found.length_bytes
        return found if found.is_open and address + length_bytes <= end else None

    def _sweep(self) -> None:
        self._landings = [landing for landing in self._landings if landing.is_open]
        self._starts = [landing.address for landing in self._landings]

    def clear(self) -> list[Landing]:
        """Forget all and return them, for their closing."""
        landings, self._landings, self._starts = self._landings, [], []
        return landings


def group(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge (address, length) ranges that lie on the same or on adjacent pages.

    What lies between two merged ranges is on pages that both touch, so it exists.
    """
    merged: list[tuple[int, int]] = []
    for address, length in sorted(ranges):
        if merged:
            start, size = merged[-1]
            if address // _PAGE <= (start + size - 1) // _PAGE + 1:
                merged[-1] = (start, max(size, address + length - start))
                continue
        merged.append((address, length))
    return merged


class Bounce:
    """A ring of registered memory for reads into small foreign memory, first in first out."""

    def __init__(self, domain: Domain, length_bytes: int = limits.VERBS_BOUNCE_BYTES) -> None:
        self._map = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        self._address = address_of(self._view)
        self._length = length_bytes
        self._memory = domain.register(self._address, length_bytes, ACCESS_LOCAL_WRITE)
        self._taken: deque[tuple[int, int]] = deque()  # (start, end) in order

    @property
    def lkey(self) -> int:
        return self._memory.lkey

    def take(self, length_bytes: int) -> int | None:
        """The address of free bytes, or None when there is no room now."""
        size = -(-length_bytes // _ALIGN) * _ALIGN
        start = 0
        if self._taken:
            head, tail = self._taken[0][0], self._taken[-1][1]
            if tail > head and tail + size <= self._length:
                start = tail
            elif tail > head:
                if size >= head:
                    return None
            elif tail + size < head:
                start = tail
            else:
                return None
        elif size > self._length:
            return None
        self._taken.append((start, start + size))
        return self._address + start

    def give(self, address: int, length_bytes: int, into: memoryview | None) -> None:
        """Give the oldest taken bytes back, copying them out first if `into` is given."""
        start, _ = self._taken.popleft()
        assert start == address - self._address, "the ring is given back out of order"
        if into is not None:
            into[:] = self._view[start : start + length_bytes]

    def close(self) -> None:
        """Deregister and release. No read into it is on the wire any more."""
        self._memory.close()
        self._view.release()
        self._map.close()
