"""One side of one session over verbs: what it exposes, what its peer exposed, and their end.

Invariants:
- Memory is exposed for reading only, in a protection domain of this session alone; `revoke` asks
  the peer to finish and then deregisters, whether it answered or not.
- A queue pair that failed ends the data path: every rail is destroyed before anybody is told, so no
  byte lands and none is read after that.
- What registers or frees much memory does it in small steps: every verbs call holds up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from entresol_proto import limits
from entresol_proto.fabric.base import (
    Capabilities,
    Exposure,
    FabricKind,
    ReadOp,
    Registration,
    RemoteSpan,
    SharedBuffer,
    check_ops,
)
from entresol_proto.fabric.verbs_api import ACCESS_MW_BIND, ACCESS_REMOTE_READ, Memory
from entresol_proto.fabric.verbs_memory import DeviceLanding, Landing, address_of
from entresol_proto.fabric.verbs_messenger import Messenger
from entresol_proto.fabric.verbs_rail import OTHERS_MAX, RailLink
from entresol_proto.fabric.verbs_reader import PeerRegion, Reader
from entresol_proto.fabric.verbs_windows import Window
from entresol_proto.fabric.verbs_wire import Kind, Message
from entresol_proto.status import FabricError, ProtocolError, Status

_log = logging.getLogger("entresol.fabric")

_FREED_PER_TURN = 8
_REVOKED_KEPT = 4 * limits.REGIONS_PER_SESSION_MAX


@dataclass(slots=True, eq=False)
class _Shown:
    """One exposure of ours."""

    view: memoryview | None  # keeps the buffer mapped
    memories: list[Memory] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    gone: asyncio.Future[None] | None = None  # set while it is being revoked

    def close(self) -> None:
        """The fence: no key of it works any more. Idempotent. Raises: FabricError."""
        self.close_windows()
        for memory in self.memories:
            memory.close()
        self.view = None

    def close_windows(self) -> None:
        """The faster half of it. Raises: FabricError."""
        for window in self.windows:
            window.close()


class VerbsEndpoint:
    """Made by `VerbsFabricServer.accept` or `connect`."""

    kind = FabricKind.VERBS

    def __init__(
        self,
        links: Sequence[RailLink],
        *,
        private: bool,
        windows: bool = False,
        on_closed: Callable[[VerbsEndpoint], None] | None = None,
    ) -> None:
        """Takes over the connected links. Raises: FabricError; the links are the caller's then."""
        self.capabilities = Capabilities(
            revokes=True, private=private, same_host=False, maps=False, registers=True
        )
        self._links = list(links)
        for number, link in enumerate(self._links):
            link.number = number
        self._on_closed = on_closed
        self._windows = windows
        self._binding = asyncio.Semaphore(OTHERS_MAX)
        self._messenger = Messenger(links[0], len(links))
        self._reader = Reader(links, region_free=self._region_free)
        self._shown: dict[int, _Shown] = {}
        self._regions: dict[int, PeerRegion] = {}
        self._leaving: set[int] = set()  # rkeys whose REVOKED waits for reads on the wire
        self._ended: dict[int, None] = {}  # rkeys revoked lately, oldest first
        self._news: set[asyncio.Future[None]] = set()  # readers waiting for an announcement
        self._loop = asyncio.get_running_loop()
        self._standing: asyncio.Future[None] = self._loop.create_future()
        self._expiry: asyncio.TimerHandle | None = None
        self._silent = False  # the peer let a revocation pass unanswered
        self._closed = False
        self._closing = False
        self._release_task: asyncio.Task[None] | None = None

    # -- set-up -------------------------------------------------------------------------------

    def start(self, *, welcome: bool, lifetime_ns: int = 0) -> None:
        """Put it on the loop. The daemon's side says WELCOME; the host's waits for it, for
        `lifetime_ns`, before it sends anything."""
        for number, link in enumerate(self._links):
            link.watch(self, spare_receive=number > 0)
        if welcome:
            self._guarded(lambda: self._messenger.send(Message(Kind.WELCOME)))
            self._stand()
        else:
            self._expiry = self._loop.call_later(
                lifetime_ns / 1e9, self._end, Status.DISCONNECTED, "the daemon did not come"
            )

    def _stand(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if not self._standing.done():
            self._standing.set_result(None)
        self._guarded(self._messenger.start)

    @property
    def closed(self) -> bool:
        """See `base.Endpoint.closed`."""
        return self._closed or self._closing

    @property
    def rails(self) -> list[str]:
        """The local ports in use, for logs."""
        return [link.port.label for link in self._links]

    # -- exposing -----------------------------------------------------------------------------

    async def expose(self, buffer: memoryview | SharedBuffer) -> Exposure:
        """See `base.Endpoint.expose`. When it returns, the announcement is on its way."""
        if self.closed:
            raise FabricError("the session is gone", status=Status.DISCONNECTED)
        if len(self._shown) >= limits.REGIONS_PER_SESSION_MAX:
            raise FabricError("too many exposed regions", status=Status.BUSY)
        view = buffer if isinstance(buffer, memoryview) else buffer.view
        if not view.nbytes or not view.c_contiguous:
            raise FabricError("only contiguous bytes can be exposed", status=Status.BAD_REQUEST)
        address = address_of(view)
        shown = _Shown(view.toreadonly())
        try:
            rkeys = await self._show(shown, address, view.nbytes)
            if self.closed:
                raise FabricError("the session is gone", status=Status.DISCONNECTED)
            if len(self._shown) >= limits.REGIONS_PER_SESSION_MAX:  # others came meanwhile
                raise FabricError("too many exposed regions", status=Status.BUSY)
            self._messenger.send(Message(Kind.EXPOSED, rkeys, address, view.nbytes))
        except BaseException:
            shown.close()
            raise
        self._shown[rkeys[0]] = shown
        return Exposure(rkeys[0], address, view.nbytes)

    async def _show(self, shown: _Shown, address: int, length_bytes: int) -> tuple[int, ...]:
        """Register on every rail, behind windows where they are used; the rkeys for the peer."""
        access = ACCESS_MW_BIND if self._windows else ACCESS_REMOTE_READ
        for link in self._links:
            shown.memories.append(link.domain.register(address, length_bytes, access))
        if not self._windows:
            return tuple(memory.rkey for memory in shown.memories)
        async with self._binding:
            for link, memory in zip(self._links, shown.memories, strict=True):
                shown.windows.append(await Window.bind(link, memory, address, length_bytes))
        return tuple(window.rkey for window in shown.windows)

    async def revoke(self, exposure: Exposure) -> None:
        """See `base.Endpoint.revoke`. The peer gets REVOKE_DEADLINE_NS to finish its reads."""
        shown = self._shown.get(exposure.rkey)
        if shown is None:
            return
        if shown.gone is not None:  # somebody else is at it
            await asyncio.wait((shown.gone,))
            return
        shown.gone = self._loop.create_future()
        try:
            if not self._closed and self._messenger.open:
                self._messenger.send(Message(Kind.REVOKE, (exposure.rkey,)))
                # Who let one pass unanswered gets no time for the next ones: else many exposures of
                # a silent peer would hold up whoever ends its leases.
                timeout = 0 if self._silent else limits.REVOKE_DEADLINE_NS / 1e9
                done, _ = await asyncio.wait((shown.gone,), timeout=timeout)
                if not done and not self._silent:
                    self._silent = True
                    _log.warning("event=revoke_cut fabric=verbs reason='the peer does not answer'")
        except FabricError as error:
            self._end(error.status, str(error))
        finally:
            self._fence(shown)
            if self._shown.get(exposure.rkey) is shown:
                del self._shown[exposure.rkey]
            if not shown.gone.done():
                shown.gone.set_result(None)

    def _fence(self, shown: _Shown) -> None:
        """Close an exposure; where the kernel refuses, its queue pairs go instead."""
        try:
            shown.close()
        except FabricError as error:
            self._end(Status.FABRIC_ERROR, str(error))

    # -- reading ------------------------------------------------------------------------------

    def register(self, buffer: memoryview | SharedBuffer) -> Registration:
        """See `base.RegisteringEndpoint.register`."""
        view = buffer if isinstance(buffer, memoryview) else buffer.view
        if self.closed:
            raise FabricError("the session is gone", status=Status.DISCONNECTED)
        if view.readonly or not view.c_contiguous or not view.nbytes:
            raise FabricError("only writable, contiguous memory can be read into",
                              status=Status.BAD_REQUEST)  # fmt: skip
        domains = [link.domain for link in self._links]
        landing = Landing(domains, address_of(view), view.nbytes, owner=view)
        self._reader.registry.add(landing)
        return landing

    def register_device_memory(
        self, address: int, length_bytes: int, *, dmabuf_fd: int | None = None, offset: int = 0
    ) -> Registration:
        """Name GPU memory that reads will land in; `ReadOp.into` are views at its addresses.

        By its dma-buf (`dmabuf_fd`, in which the memory starts at `offset`) or, without one,
        through the driver's peer-memory interface. Registered and pinned now, as a whole; there is
        no other way to read into it.

        Raises: FabricError; status UNSUPPORTED where driver or device cannot.
        """
        if self.closed:
            raise FabricError("the session is gone", status=Status.DISCONNECTED)
        domains = [link.domain for link in self._links]
        landing = DeviceLanding(domains, address, length_bytes, dmabuf_fd=dmabuf_fd, offset=offset)
        try:
            self._reader.registry.add(landing)
        except FabricError:
            landing.close()
            raise
        return landing

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        """See `base.Endpoint.read`. When the deadline or a cancellation comes while the device is
        writing, it may take VERBS_DRAIN_NS more."""
        check_ops(ops)
        if self.closed:
            return [Status.DISCONNECTED] * len(ops)
        if not ops:
            return []
        if time.monotonic_ns() >= deadline_ns:
            return [Status.DEADLINE] * len(ops)
        await self._known(ops, deadline_ns)
        if self.closed:
            return [Status.DISCONNECTED] * len(ops)
        left_ns = deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            return [Status.DEADLINE] * len(ops)
        regions = [self._resolve(op.span) for op in ops]
        try:
            return await self._reader.run(ops, regions, left_ns / 1e9, self._cut)
        except FabricError as error:  # a rail refused
            self._end(error.status, str(error))
            return [Status.DISCONNECTED] * len(ops)

    def _resolve(self, span: RemoteSpan) -> PeerRegion | Status:
        region = self._regions.get(span.rkey)
        if region is None:
            return Status.LEASE_EXPIRED
        status = region.status_of(span.address, span.length_bytes)
        return region if status is Status.OK else status

    async def _known(self, ops: Sequence[ReadOp], deadline_ns: int) -> None:
        """Wait until every rkey was announced or has certainly ended, at most VERBS_ANNOUNCE_NS
        after the last announcement.

        Announcements race with the control stream that names the rkeys, and nearly always win.
        """
        if not self._standing.done():
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            await asyncio.wait((self._standing,), timeout=max(0.0, left_s))
        until_ns = min(deadline_ns, time.monotonic_ns() + limits.VERBS_ANNOUNCE_NS)
        unknown = {op.span.rkey for op in ops} - self._regions.keys() - self._ended.keys()
        if unknown:
            self._links[0].drain()
        while unknown := unknown - self._regions.keys() - self._ended.keys():
            left_ns = until_ns - time.monotonic_ns()
            if left_ns <= 0 or self.closed:
                return
            news: asyncio.Future[None] = self._loop.create_future()
            self._news.add(news)
            try:
                heard, _ = await asyncio.wait((news,), timeout=left_ns / 1e9)
            finally:
                self._news.discard(news)
            if heard:
                until_ns = min(deadline_ns, time.monotonic_ns() + limits.VERBS_ANNOUNCE_NS)

    # -- messages -----------------------------------------------------------------------------

    def received(self, link: RailLink, slot: int, length_bytes: int) -> None:
        """See `verbs_rail.Owner`."""
        if link is not self._links[0]:
            self._end(Status.FABRIC_ERROR, "a message on the wrong rail")
            return
        try:
            message = self._messenger.take(slot, length_bytes)
            self._silent = False
            if message is not None:
                self._on_message(message)
        except ProtocolError as error:
            self._end(Status.FABRIC_ERROR, str(error))
        except FabricError as error:
            self._end(error.status, str(error))

    def _on_message(self, message: Message) -> None:
        match message.kind:
            case Kind.WELCOME:
                self._stand()
            case Kind.EXPOSED:
                self._peer_exposed(message)
            case Kind.REVOKE:
                self._peer_revokes(message.rkeys[0])
            case Kind.REVOKED:
                shown = self._shown.get(message.rkeys[0])
                if shown is not None and shown.gone is not None and not shown.gone.done():
                    shown.gone.set_result(None)
            case Kind.GOODBYE:
                self._end(Status.DISCONNECTED, "")
            case Kind.TAKEN:
                raise AssertionError("handled by the messenger")

    def _peer_exposed(self, message: Message) -> None:
        rkey = message.rkeys[0]
        if rkey in self._regions or len(self._regions) >= limits.REGIONS_PER_SESSION_MAX:
            raise ProtocolError("a region was exposed twice, or too many are")
        self._ended.pop(rkey, None)
        self._regions[rkey] = PeerRegion(message.rkeys, message.address, message.length_bytes)
        self._tell()

    def _peer_revokes(self, rkey: int) -> None:
        self._ended[rkey] = None
        if len(self._ended) > _REVOKED_KEPT:
            del self._ended[next(iter(self._ended))]
        region = self._regions.pop(rkey, None)
        self._tell()
        if region is not None:
            region.revoked = True
            if region.users:
                return
        self._messenger.send(Message(Kind.REVOKED, (rkey,)))

    def _region_free(self, region: PeerRegion) -> None:
        """The last read of a revoked region has left the wire."""
        self._guarded(lambda: self._messenger.send(Message(Kind.REVOKED, (region.rkeys[0],))))

    def _tell(self) -> None:
        for news in self._news:
            if not news.done():
                news.set_result(None)

    # -- ending -------------------------------------------------------------------------------

    def turn_ended(self) -> None:
        """See `verbs_rail.Owner`."""
        self._guarded(self._messenger.flush)
        self._guarded(self._reader.pump)

    def rail_failed(self, link: RailLink, status: Status, reason: str) -> None:
        """See `verbs_rail.Owner`."""
        self._end(status, f"{link.port.label}: {reason}")

    def _guarded(self, call: Callable[[], None]) -> None:
        """Run what may find a rail broken."""
        if self._closed:
            return
        try:
            call()
        except FabricError as error:
            self._end(error.status, str(error))

    def _cut(self) -> None:
        self._end(Status.DISCONNECTED, "reads did not finish after their deadline")

    def _end(self, status: Status, reason: str) -> None:
        """End the data path now. Queue pairs first: afterwards no byte moves either way."""
        if self._closed:
            return
        self._closed = True
        if reason and not self._closing:
            _log.warning("event=verbs_session_lost status=%s reason=%r", status.label, reason)
        if self._expiry is not None:
            self._expiry.cancel()
        for shown in self._shown.values():
            with contextlib.suppress(FabricError):  # then the queue pairs' end is the fence
                shown.close_windows()
        for link in self._links:
            try:
                link.destroy(Status.DISCONNECTED)
            except Exception as error:  # of pyverbs; the kernel destroys it with the process
                _log.error("event=queue_pair_not_destroyed error=%s", error)
        if not self._standing.done():
            self._standing.set_result(None)
        broken = status if status is Status.FABRIC_ERROR else Status.DISCONNECTED
        self._reader.abort(broken)
        self._tell()
        for shown in self._shown.values():
            if shown.gone is not None and not shown.gone.done():
                shown.gone.set_result(None)
        self._regions.clear()
        self._release_task = self._loop.create_task(self._release())
        if self._on_closed is not None:
            self._on_closed(self)

    async def _release(self) -> None:
        """Free everything, a little per turn of the loop."""
        freed = 0
        while self._shown:
            rkey = next(iter(self._shown))
            self._fence(self._shown.pop(rkey))
            freed += 1
            if freed % _FREED_PER_TURN == 0:
                await asyncio.sleep(0)
        for landing in self._reader.registry.clear():
            landing.close()
            await asyncio.sleep(0)
        # Batches that were on the wire close their own landings; wait for them.
        while self._reader.busy:
            await asyncio.sleep(0)
        self._messenger.close()
        for link in self._links:
            link.release()

    async def close(self) -> None:
        """See `base.Endpoint.close`. Tells the peer, if that takes no longer than
        VERBS_GOODBYE_NS."""
        if not self._closed and not self._closing and self._messenger.open:
            self._closing = True
            left: asyncio.Future[None] = self._loop.create_future()

            def gone() -> None:
                if not left.done():
                    left.set_result(None)

            try:
                self._messenger.send(Message(Kind.GOODBYE), gone)
                await asyncio.wait((left,), timeout=limits.VERBS_GOODBYE_NS / 1e9)
            except FabricError:
                pass  # it is not there any more
            finally:
                self.discard()
        self.discard()
        assert self._release_task is not None
        await asyncio.shield(self._release_task)

    def discard(self) -> None:
        """`close` without a word, and without waiting for memory to be freed."""
        self._end(Status.DISCONNECTED, "")

    @property
    def released(self) -> asyncio.Task[None] | None:
        """The task that frees what a closed endpoint held."""
        return self._release_task
