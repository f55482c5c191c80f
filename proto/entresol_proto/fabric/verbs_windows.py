"""Type-2 memory windows: a second fence around an exposure, where a device can be trusted with it.

A window has a key of its own, which works over one queue pair only and dies with the window; the
region's deregistration stays the fence that counts. Soft-RoCE checks the region's bounds instead of
the window's, so every device is asked first (`examine`): one that lets a peer read past a window
gets none.

Invariants: a region behind a window is not remotely readable by its own key (MW_BIND alone); a
window is closed before its region and before its queue pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from entresol_proto.fabric.verbs_api import (
    ACCESS_LOCAL_WRITE,
    ACCESS_MW_BIND,
    ACCESS_REMOTE_READ,
    Memory,
    failed,
    load,
    open_device,
)
from entresol_proto.fabric.verbs_device import Port
from entresol_proto.fabric.verbs_memory import address_of
from entresol_proto.fabric.verbs_rail import RailLink
from entresol_proto.status import FabricError, Status

_log = logging.getLogger("entresol.fabric")

_TYPE_2 = 2
_BIND = 8
_SIGNALED = 2
_ANSWER_S = 2.0
_LOOK_S = 0.001


class _Posted:
    """Something on its way, and who waits for it."""

    length_bytes = 0

    def __init__(self, done: asyncio.Future[Status]) -> None:
        self._done = done

    def over(self, link: RailLink, status: Status) -> None:
        """See `verbs_rail.Work`."""
        if not self._done.done():
            self._done.set_result(status)


class _Trial(_Posted):
    """A read of 64 bytes."""

    length_bytes = 64

    def __init__(
        self, done: asyncio.Future[Status], into: int, lkey: int, remote: int, rkey: int
    ) -> None:
        super().__init__(done)
        self.local_address = into
        self.lkey = lkey
        self.remote_address = remote
        self.rkey = rkey


class Window:
    """A bound window over registered memory. `rkey` is what the peer is told."""

    def __init__(self, raw: Any, rkey: int) -> None:
        self._raw = raw
        self.rkey = rkey

    @classmethod
    async def bind(cls, link: RailLink, memory: Memory, address: int, length_bytes: int) -> Window:
        """Bind a window for remote reading to part of `memory` (ACCESS_MW_BIND).

        Raises: FabricError when the device has none left or refuses.
        """
        api = load()
        done: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        try:
            raw = api.mr.MW(link.domain.raw, _TYPE_2)
        except api.error as problem:
            raise failed("no memory window", problem) from None
        window = cls(raw, 0)
        try:
            info = api.mr.MWBindInfo(memory.raw, address, length_bytes, ACCESS_REMOTE_READ)
            with _request(_BIND) as wr:
                wr.set_bind_wr(raw, info)
                window.rkey = wr.rkey
                link.post_other(_Posted(done), wr)
            status = await done
            if status is not Status.OK:
                raise FabricError("the device refused to bind a window", status=status)
        except BaseException:
            window.close()
            raise
        return window

    def close(self) -> None:
        """End its key and free it; before its memory region is closed. Idempotent.

        Raises: FabricError when the kernel does not do it.
        """
        raw, self._raw = self._raw, None
        if raw is not None:
            try:
                raw.close()
            except load().error as problem:
                raise failed("a memory window stays", problem) from None


@contextlib.contextmanager
def _request(opcode: int) -> Iterator[Any]:
    wr = load().wr.SendWR(opcode=opcode, send_flags=_SIGNALED)
    try:
        yield wr
    finally:
        wr.close()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether windows of a device are used, and why not."""

    usable: bool
    reason: str


async def examine(port: Port) -> Verdict:
    """Ask a device, over a loop of two queue pairs on one port: read inside a window, then past it.

    Never raises for what a device does: whatever goes wrong means no windows.
    """
    links: list[RailLink] = []
    try:
        for _ in range(2):
            links.append(RailLink(open_device(port.device), port, 0, None))
        owner, reader = links
        owner.connect(reader.local)
        reader.connect(owner.local)
        verdict = await _try_window(owner, reader)
    except FabricError as error:
        verdict = Verdict(False, str(error))
    finally:
        for link in links:
            link.destroy(Status.DISCONNECTED)
            link.release()
    _log.info("event=memory_windows port=%s usable=%s reason=%r", port.label, verdict.usable,
              verdict.reason)  # fmt: skip
    return verdict


async def _try_window(owner: RailLink, reader: RailLink) -> Verdict:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 4 * page) as area, memoryview(area) as view:
        view[:] = b"\x11" * (4 * page)
        base = address_of(view)
        shown = owner.domain.register(base, 3 * page, ACCESS_MW_BIND)
        landing = reader.domain.register(base + 3 * page, page, ACCESS_LOCAL_WRITE)
        window: Window | None = None
        try:
            binding = asyncio.ensure_future(Window.bind(owner, shown, base + page, page))
            while not binding.done():
                owner.drain()
                await asyncio.sleep(_LOOK_S)
            window = await binding
            places = (base + page, base)  # inside; then inside the region, outside the window
            inside, outside = [
                await _read(reader, at, window.rkey, base + 3 * page, landing) for at in places
            ]
            if inside is not Status.OK:
                return Verdict(False, f"a read inside a window failed: {inside.label}")
            if outside is Status.OK:
                return Verdict(False, "the device does not honour a window's bounds")
            if outside is Status.DEADLINE:
                return Verdict(False, "a read past a window got no answer")
            return Verdict(True, "a read past a window was refused")
        finally:
            # The window before its queue pair: soft-RoCE's waits 50 s for it otherwise.
            reader.destroy(Status.DISCONNECTED)
            if window is not None:
                window.close()
            owner.destroy(Status.DISCONNECTED)
            shown.close()
            landing.close()


async def _read(link: RailLink, remote: int, rkey: int, into: int, memory: Memory) -> Status:
    """One read of 64 bytes, its completion looked for now and then."""
    done: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    link.post_reads([_Trial(done, into, memory.lkey, remote, rkey)])
    end = time.monotonic() + _ANSWER_S
    while not done.done() and time.monotonic() < end:
        link.drain()
        await asyncio.sleep(_LOOK_S)
    return done.result() if done.done() else Status.DEADLINE
