"""One side of a session over shared memory: regions both ways, and reads that are copies.

Invariant: `ShmEndpoint` keeps the contract of `base.Endpoint` with `revokes` false: memory once
mapped by a peer cannot be taken back, so revocation depends on an honest peer, and an owner does
not reuse plaintext memory for somebody else. A peer can only ever read what it is given, and cannot
crash the other side with what it gives (regions.py).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from entresol_proto import limits
from entresol_proto.fabric.base import (
    Capabilities,
    Exposure,
    FabricKind,
    ReadOp,
    RemoteSpan,
    SharedBuffer,
    check_ops,
    span_error,
)
from entresol_proto.fabric.closing import CLOSER
from entresol_proto.fabric.mapped import Charge, MappedBudget
from entresol_proto.fabric.memory import is_readers_only
from entresol_proto.fabric.regions import (
    POOL,
    POPULATE_BYTES,
    CopyJob,
    InPlace,
    PeerRegion,
    Piece,
    map_region,
    unmap_all,
)
from entresol_proto.fabric.serving import ServingTurns
from entresol_proto.fabric.shmlink import Kind, Message, ShmLink, Unanswered
from entresol_proto.status import FabricError, ProtocolError, Status
from entresol_proto.threads import Job

_log = logging.getLogger("entresol.fabric")

_INLINE_BYTES_MAX = 512 * limits.KIB  # copied on the loop: a hand-over to a thread costs more
_MAPPED_HINT = (
    "a daemon maps so much of its hosts: fewer sessions, a lower staging_bytes_max, or a higher "
    "[fabric] shm_mapped_bytes_max there"
)
UNMAP_AT_ONCE_BYTES = 4 * limits.MIB  # about 50 us of the loop, while the peer keeps its pages


class ShmEndpoint:
    """One side of one session over shared memory. Made by `ShmFabricServer.accept` or `connect`.

    `lends`: this is the host's side. It has the pages of what it exposes, before it does. The other
    side, which has many peers that it need not trust, maps little of each, of all that `budget`
    allows, no file twice, and nothing less whole.
    """

    kind = FabricKind.SHM
    capabilities = Capabilities(revokes=False, private=True, same_host=True, maps=True)

    def __init__(
        self,
        *,
        mapped_bytes_max: int = limits.MAPPED_BYTES_PER_SESSION_MAX,
        lends: bool = False,
        budget: MappedBudget | None = None,
        peer: object | None = None,
        turns: ServingTurns | None = None,
        on_closed: Callable[[ShmEndpoint], None] | None = None,
    ) -> None:
        self._mapped_bytes_max = mapped_bytes_max
        self._lends = lends
        self._regions_max = (
            limits.REGIONS_PER_SESSION_MAX if lends else limits.SHM_REGIONS_PER_HOST_MAX
        )
        self._budget = budget
        self._peer = peer
        self._turns = turns or ServingTurns()
        self._on_closed = on_closed
        self._link: ShmLink | None = None
        self._exposed: set[int] = set()
        self._unanswered = Unanswered(self._on_lost)
        self._acks: dict[tuple[Kind, int], asyncio.Future[int]] = {}
        self._regions: dict[int, PeerRegion] = {}
        self._mapping: dict[int, bool] = {}  # in a worker now; true: revoked meanwhile
        self._mapped_bytes = 0
        self._files: set[tuple[int, int]] = set()  # of the regions, where none is mapped twice
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: set[CopyJob] = set()
        self._closed = False
        POOL.acquire()

    def start(self, sock: socket.socket, *, greeting: bytes = b"") -> None:
        """Begin to serve on a socket, which the endpoint owns from here on."""
        self._link = ShmLink(sock, self._on_message, self._on_lost, self._turns, self._peer)
        if greeting:
            self._link.send(greeting)

    @property
    def closed(self) -> bool:
        """See `base.Endpoint.closed`."""
        return self._closed

    # -- exposing -----------------------------------------------------------------------------

    async def expose(self, buffer: memoryview | SharedBuffer) -> Exposure:
        """See `base.Endpoint.expose`. Returns once the peer has mapped the buffer."""
        if isinstance(buffer, memoryview):
            raise FabricError("shm exposes only shared buffers", status=Status.UNSUPPORTED)
        if self._closed or self._link is None:
            raise FabricError("the session is gone", status=Status.DISCONNECTED)
        if len(self._exposed) >= limits.REGIONS_PER_SESSION_MAX:
            raise FabricError("too many exposed regions", status=Status.BUSY)
        if not is_readers_only(buffer.fd):
            raise FabricError(
                "the peer could write or shrink this buffer",
                hint="call seal_for_readers() on it first; it needs Linux 5.1",
                status=Status.UNSUPPORTED,
            )
        length = buffer.view.nbytes
        if not length:
            raise FabricError("an empty buffer cannot be exposed", status=Status.BAD_REQUEST)
        if self._lends:
            await self._fill(buffer.fd, length)
        rkey = secrets.randbits(32)
        while rkey in self._exposed:
            rkey = secrets.randbits(32)
        self._exposed.add(rkey)
        try:
            message = Message(Kind.EXPOSE, rkey, length_bytes=length)
            status = await self._ask(message, Kind.EXPOSED, limits.EXPOSE_DEADLINE_NS, fd=buffer.fd)
        except BaseException as error:
            self._exposed.discard(rkey)
            if self._link is not None:
                self._link.send(Message(Kind.REVOKE, rkey).encode())
            cancelled = not isinstance(error, FabricError)  # and the peer may still answer in time
            self._unanswered.add(rkey, limits.EXPOSE_DEADLINE_NS if cancelled else 0)
            raise
        if status != Status.OK:
            self._exposed.discard(rkey)
            known = Status.BUSY if status == Status.BUSY else Status.FABRIC_ERROR
            hint = _MAPPED_HINT if self._lends and known is Status.BUSY else ""
            raise FabricError("the peer did not map the buffer", hint=hint, status=known)
        return Exposure(rkey, 0, length)

    async def _fill(self, fd: int, length_bytes: int) -> None:
        """Have all pages, as a daemon wants it, or fail now.

        Raises: FabricError: BUSY, or DISCONNECTED when the session ends meanwhile.
        """
        mine = -1
        POOL.acquire()  # this may close, and be the last that uses it
        try:
            mine = os.dup(fd)  # the caller may be cancelled, and close its own
            # Not by the thread for pages, which gives way to everybody: the first put waits for
            # this, on a host whose processors an engine may have all to itself. Nor in one piece:
            # copies wait for the same threads.
            for at in range(0, length_bytes, POPULATE_BYTES):
                if self._closed:
                    raise FabricError("the session is gone", status=Status.DISCONNECTED)
                more = min(POPULATE_BYTES, length_bytes - at)
                await POOL.submit(os.posix_fallocate, mine, at, more).outcome()
        except OSError as error:
            memory = error.errno not in (errno.EMFILE, errno.ENFILE)
            missing = "memory" if memory else "descriptor"
            lower = "lower staging_bytes_max, or " if memory else ""
            raise FabricError(
                f"no {missing} for what the daemon is to read: {error.strerror}",
                hint=f"{lower}allow this process more {'memory' if memory else 'open files'}",
                status=Status.BUSY,
            ) from None
        finally:
            POOL.release()
            if mine >= 0:
                os.close(mine)  # no thread is at it: see `Job.outcome`

    async def revoke(self, exposure: Exposure) -> None:
        """See `base.Endpoint.revoke`. Waits for the peer's answer, at most REVOKE_DEADLINE_NS."""
        if exposure.rkey not in self._exposed:
            return
        self._exposed.discard(exposure.rkey)
        try:
            message = Message(Kind.REVOKE, exposure.rkey)
            await self._ask(message, Kind.REVOKED, limits.REVOKE_DEADLINE_NS)
        except FabricError as error:
            if not self._closed:
                _log.warning("event=revoke_unanswered fabric=shm status=%s", error.status.label)

    async def _ask(self, message: Message, answer: Kind, wait_ns: int, *, fd: int = -1) -> int:
        """Send a message and wait for the peer's answer to it. Raises: FabricError."""
        if self._link is None:
            raise FabricError("the session is gone", status=Status.DISCONNECTED)
        ack: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._acks[answer, message.rkey] = ack
        self._link.send(message.encode(), fd)
        try:
            async with asyncio.timeout(wait_ns / 1e9):
                return await ack
        except TimeoutError:
            raise FabricError("the peer does not answer", status=Status.DEADLINE) from None
        finally:
            self._acks.pop((answer, message.rkey), None)

    # -- the peer's regions -------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if message.kind in (Kind.EXPOSED, Kind.REVOKED):
            self._unanswered.answered(message.rkey)
            ack = self._acks.get((message.kind, message.rkey))
            if ack is not None and not ack.done():
                ack.set_result(message.status)
        elif message.kind is Kind.REVOKE:
            self._peer_revoked(message.rkey)
        else:
            self._peer_exposed(message)

    def _peer_exposed(self, message: Message) -> None:
        rkey, length, fd = message.rkey, message.length_bytes, message.fd
        if rkey in self._regions or rkey in self._mapping:
            CLOSER.give(fd)
            raise ProtocolError("a region was exposed twice")
        regions = len(self._regions) + len(self._mapping)
        if regions >= self._regions_max or self._mapped_bytes + length > self._mapped_bytes_max:
            CLOSER.give(fd)
            self._note_refused("a session's regions or bytes are all in use")
            self._send(Message(Kind.EXPOSED, rkey, status=Status.BUSY))
            return
        charge = None if self._budget is None else self._budget.take(self._peer, length)
        if self._budget is not None and charge is None:
            CLOSER.give(fd)
            self._note_refused("the peer's share of what is mapped is in use")
            self._send(Message(Kind.EXPOSED, rkey, status=Status.BUSY))
            return
        self._mapping[rkey] = False
        self._mapped_bytes += length
        whole = not self._lends
        mapping = POOL.submit(functools.partial(map_region, rkey, fd, length, whole=whole))
        self._start(self._map(rkey, fd, length, mapping, charge))

    def _note_refused(self, reason: str) -> None:
        # The peer first, by which floods are told apart.
        peer = str(self._peer or "-")
        _log.warning("event=region_refused peer=%s fabric=shm error=%s", peer, reason)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that may hand work to the pool until it ends, also when this is closed."""
        POOL.acquire()
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _task: POOL.release())

    async def _map(
        self, rkey: int, fd: int, length: int, mapping: Job[PeerRegion], charge: Charge | None
    ) -> None:
        """Wait for a region that a worker maps, and answer. A revocation may come meanwhile."""
        region: PeerRegion | None = None
        status = Status.OK
        try:
            region = await mapping.outcome()
            region.charge = charge
        except FabricError as error:
            status = error.status
            self._note_refused(str(error))
        except asyncio.CancelledError:
            if not mapping.begun:
                CLOSER.give(fd)  # no worker saw it
            raise
        finally:
            if region is None and charge is not None:
                charge.end()
        revoked = self._mapping[rkey]
        again = region is not None and region.file in self._files
        if region is not None and not (revoked or again or self._closed):
            del self._mapping[rkey]
            self._regions[rkey] = region
            if not self._lends:
                self._files.add(region.file)
        else:
            if region is not None:
                await self._unmap(region)  # counted until then
                status = Status.BUSY if again else Status.LEASE_EXPIRED
                if again:
                    self._note_refused("the same memory is mapped already")
            self._mapped_bytes -= length
            revoked = self._mapping.pop(rkey)
        self._send(Message(Kind.EXPOSED, rkey, status=status))
        if revoked:
            self._send(Message(Kind.REVOKED, rkey))
        if rkey in self._regions:  # after the answer, which somebody waits for
            await self._populate(self._regions[rkey])

    async def _populate(self, region: PeerRegion) -> None:
        region.users += 1
        try:
            for at in range(0, region.length_bytes, POPULATE_BYTES):
                if region.revoked or self._closed:
                    return
                await POOL.submit_pages(region.populate, at, at + POPULATE_BYTES).outcome()
        finally:
            self._release([(0, region)])

    def _peer_revoked(self, rkey: int) -> None:
        if rkey in self._mapping:
            self._mapping[rkey] = True
            return
        region = self._regions.pop(rkey, None)
        if region is None:
            self._send(Message(Kind.REVOKED, rkey))
            return
        region.revoked = True
        if not region.users:
            self._drop(region)

    def _drop(self, region: PeerRegion) -> None:
        """Unmap a revoked region nobody copies from and tell the owner."""
        if region.file_bytes <= UNMAP_AT_ONCE_BYTES:
            region.unmap()
            self._dropped(region)
            return

        async def unmap() -> None:
            await self._unmap(region)
            self._dropped(region)

        self._start(unmap())

    def _dropped(self, region: PeerRegion) -> None:
        self._mapped_bytes -= region.length_bytes
        self._files.discard(region.file)
        self._send(Message(Kind.REVOKED, region.rkey))

    async def _unmap(self, region: PeerRegion) -> None:
        """In a worker: where the peer is gone the kernel frees the pages, 300 us for each MiB."""
        await POOL.submit_pages(region.unmap).outcome()

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message.encode())

    def map_span(self, span: RemoteSpan) -> memoryview | Status:
        """See `base.MappedEndpoint.map_span`."""
        if self._closed:
            return Status.DISCONNECTED
        region = self._regions.get(span.rkey)
        status = span_error(span, None if region is None else region.length_bytes)
        if region is None or status is not Status.OK:
            return status
        return region.view(span.address, span.length_bytes)

    def borrow(self, spans: Sequence[RemoteSpan]) -> InPlace:
        """See `base.MappedEndpoint.borrow`."""
        views: list[memoryview | Status] = []
        users: list[tuple[int, PeerRegion]] = []
        for number, span in enumerate(spans):
            views.append(self.map_span(span))
            if isinstance(views[-1], memoryview):
                region = self._regions[span.rkey]
                region.users += 1
                users.append((number, region))
        POOL.acquire()  # its threads unmap what is in use when this closes
        return InPlace(views, users, self.end)

    # -- reading ------------------------------------------------------------------------------

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        """See `base.Endpoint.read`. Short reads are copied on the loop, long ones in a thread."""
        check_ops(ops)
        if self._closed:
            return [Status.DISCONNECTED] * len(ops)
        if time.monotonic_ns() >= deadline_ns:
            return [Status.DEADLINE] * len(ops)
        statuses, pieces, users = self._pieces_of(ops)
        copied = await self._copy(pieces, users, deadline_ns)
        late = Status.DISCONNECTED if self._closed else Status.DEADLINE
        for order, (number, region) in enumerate(users):
            if order >= copied or self._closed:
                statuses[number] = late
            elif region.revoked:
                statuses[number] = Status.LEASE_EXPIRED
        return statuses

    def _pieces_of(
        self, ops: Sequence[ReadOp]
    ) -> tuple[list[Status], list[Piece], list[tuple[int, PeerRegion]]]:
        """What to copy, and for each piece (op, region), which is in use from now on."""
        statuses: list[Status] = []
        pieces: list[Piece] = []
        users: list[tuple[int, PeerRegion]] = []
        for number, op in enumerate(ops):
            span = op.span
            region = self._regions.get(span.rkey)
            status = span_error(span, None if region is None else region.length_bytes)
            statuses.append(status)
            if region is not None and status is Status.OK:
                source = region.array[span.address : span.address + span.length_bytes]
                into = op.into
                if into.format != "B" or into.ndim != 1:
                    into = into.cast("B")
                pieces.append(Piece(into, source))
                users.append((number, region))
                region.users += 1
        return statuses, pieces, users

    async def _copy(
        self, pieces: list[Piece], users: list[tuple[int, PeerRegion]], deadline_ns: int
    ) -> int:
        """Copy pieces and let go of their regions; returns how many were done. When cancelled, it
        goes on to the end of the step it is in. `pieces` is empty afterwards."""
        job = CopyJob(pieces)
        short = sum(len(piece.source) for piece in pieces) <= _INLINE_BYTES_MAX
        if not short:
            POOL.acquire()  # its threads unmap what is in use when this closes
            self._jobs.add(job)
        try:
            if short:
                job.run(deadline_ns)
            else:
                await POOL.submit(job.run, deadline_ns).outcome(on_cancel=job.stop)
        finally:
            pieces.clear()  # who holds one keeps its region mapped
            self._release(users)
            if not short:
                self._jobs.discard(job)
                POOL.release()
        return job.copied

    def end(self, users: Sequence[tuple[int, PeerRegion]]) -> dict[int, Status]:
        """The end of a borrowing: what became of its regions meanwhile."""
        self._release(users)
        POOL.release()
        if self._closed:
            return {number: Status.DISCONNECTED for number, _ in users}
        return {number: Status.LEASE_EXPIRED for number, region in users if region.revoked}

    def _release(self, users: Sequence[tuple[int, PeerRegion]]) -> None:
        """These are not used any more; the last user of one that has ended has it unmapped. Where
        there was an await meanwhile, only with the pool acquired."""
        ended = []
        for _, region in users:
            region.users -= 1
            if not region.users and self._closed:
                ended.append(region)
            elif not region.users and region.revoked:
                self._drop(region)
        if ended:
            POOL.post_pages(unmap_all, ended)

    # -- ending -------------------------------------------------------------------------------

    def _on_lost(self, error: Exception | None) -> None:
        if error is not None:
            _log.warning("event=shm_link_lost error=%s", str(error))
        self.discard()

    def discard(self) -> None:
        """`close` without waiting."""
        if self._closed:
            return
        self._closed = True
        if self._link is not None:
            self._link.close()
        for job in self._jobs:
            job.stop()
        for ack in self._acks.values():
            if not ack.done():
                ack.set_exception(FabricError("the session is gone", status=Status.DISCONNECTED))
        self._exposed.clear()
        self._unanswered.clear()
        regions, self._regions = list(self._regions.values()), {}
        idle = [region for region in regions if not region.users]
        if idle:  # those in use are unmapped with their last user
            POOL.post_pages(unmap_all, idle)
        POOL.release()
        if self._on_closed is not None:
            self._on_closed(self)

    async def close(self) -> None:
        """See `base.Endpoint.close`."""
        self.discard()
        while self._tasks:
            await asyncio.wait(self._tasks)
