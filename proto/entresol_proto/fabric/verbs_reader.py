"""Batched reads over the rails of a session: cutting, spreading, posting, and ending them safely.

Invariants:
- A caller gets its memory back only when no read into it is on the wire. A batch that ends early
  (deadline, cancellation) waits for those that are, VERBS_DRAIN_NS at most; then the session is
  cut, which destroys the queue pairs and with them every read. Reads that go through the bounce
  buffer do not touch the caller's memory, so nobody waits for those.
- A status is OK only if every piece of the op completed well.
- Pieces are posted in the order of their batches, each to the rail with the least on the wire; at
  most VERBS_READS_QUEUED_MAX wait, an op beyond that is BUSY.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entresol_proto import limits
from entresol_proto.fabric.base import ReadOp
from entresol_proto.fabric.verbs_memory import Landing, Registry, address_of, group
from entresol_proto.fabric.verbs_rail import RailLink
from entresol_proto.status import FabricError, Status


@dataclass(slots=True, eq=False)
class PeerRegion:
    """Memory the peer exposed. `users` counts pieces on the wire."""

    rkeys: tuple[int, ...]  # one per rail
    address: int
    length_bytes: int
    users: int = 0
    revoked: bool = False

    def status_of(self, address: int, length_bytes: int) -> Status:
        """How it answers a span."""
        offset = address - self.address
        if length_bytes <= 0 or offset < 0 or offset + length_bytes > self.length_bytes:
            return Status.BAD_REQUEST
        return Status.OK


class Batch:
    """One call of `read`."""

    __slots__ = ("_idle", "direct", "done", "ended", "left", "pieces_left", "statuses")

    def __init__(self, loop: asyncio.AbstractEventLoop, ops: int) -> None:
        self.statuses = [Status.OK] * ops
        self.left = [0] * ops  # pieces of each op
        self.pieces_left = 0
        self.direct = 0  # pieces on the wire into the caller's memory
        self.ended = False
        self.done: asyncio.Future[None] = loop.create_future()
        self._idle: asyncio.Future[None] | None = None

    def end(self, status: Status) -> None:
        """No further piece is begun; ops that are not complete get `status`. Idempotent."""
        if self.ended:
            return
        self.ended = True
        for index, left in enumerate(self.left):
            if left and self.statuses[index] is Status.OK:
                self.statuses[index] = status
        if not self.done.done():
            self.done.set_result(None)

    def piece_over(self, index: int, status: Status) -> None:
        """One piece is finished, or will never be begun."""
        if self.ended:
            return
        if status is not Status.OK and self.statuses[index] is Status.OK:
            self.statuses[index] = status
        self.left[index] -= 1
        self.pieces_left -= 1
        if not self.pieces_left:
            self.end(Status.INTERNAL)

    def left_wire(self) -> None:
        """A direct piece is no longer on the wire."""
        self.direct -= 1
        if not self.direct and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def idle(self, timeout_ns: int) -> None:
        """Until nothing is on the wire into the caller's memory, or the time is over."""
        if self.direct:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._idle,), timeout=timeout_ns / 1e9)


class Piece:
    """One RDMA READ: part of one op."""

    __slots__ = ("_reader", "address", "batch", "index", "landing", "length_bytes",
                 "lkey", "local_address", "region", "remote_address", "rkey", "view")  # fmt: skip

    def __init__(
        self, reader: Reader, batch: Batch, index: int, region: PeerRegion, remote_address: int,
        address: int, length_bytes: int, landing: Landing | None, view: memoryview,
    ) -> None:  # fmt: skip
        self._reader = reader
        self.batch = batch
        self.index = index
        self.region = region
        self.remote_address = remote_address
        self.address = address
        self.length_bytes = length_bytes
        self.landing = landing
        self.view = view
        self.local_address = self.lkey = self.rkey = 0  # for the device, once prepared

    def prepare(self, link: RailLink) -> bool:
        """Take local memory for it; False when the bounce buffer is full. Raises: FabricError.

        Nothing is taken unless it returns True; from then on the piece has to be posted.
        """
        self.rkey = self.region.rkeys[link.number]
        landing = self.landing
        if landing is not None:
            try:
                self.lkey, self.local_address = landing.key(link.number, self.address)
            except FabricError:
                if landing.device:
                    raise
                landing = self.landing = None  # no locked memory left, or a file: copy
            else:
                landing.users += 1
                self.batch.direct += 1
        if landing is None:
            bounce = link.bounce()
            at = bounce.take(self.length_bytes)
            if at is None:
                return False
            self.local_address, self.lkey = at, bounce.lkey
        self.region.users += 1
        return True

    def over(self, link: RailLink, status: Status) -> None:
        """See `verbs_rail.Work`."""
        link.read_over(self.length_bytes)
        batch = self.batch
        if self.landing is not None:
            self.landing.done()
            batch.left_wire()
        else:
            wanted = status is Status.OK and not batch.ended
            link.bounce().give(self.local_address, self.length_bytes, self.view if wanted else None)
        batch.piece_over(self.index, status)
        self.region.users -= 1
        if self.region.revoked and not self.region.users:
            self._reader.region_free(self.region)


def _load(link: RailLink) -> int:
    return link.bytes_posted


class Reader:
    """The reading half of an endpoint."""

    def __init__(
        self, links: Sequence[RailLink], *, region_free: Callable[[PeerRegion], None]
    ) -> None:
        self.registry = Registry()
        self.region_free = region_free
        self._links = links
        self._queue: deque[Piece] = deque()
        self._batches: set[Batch] = set()
        self._aborted: Status | None = None

    @property
    def busy(self) -> bool:
        """Whether a batch still holds memory."""
        return bool(self._batches)

    async def run(
        self, ops: Sequence[ReadOp], regions: Sequence[PeerRegion | Status], deadline_s: float,
        cut: Callable[[], None],
    ) -> list[Status]:  # fmt: skip
        """Read every op whose region is known. `cut` destroys the queue pairs: the last resort."""
        if self._aborted is not None:
            return [self._aborted] * len(ops)
        loop = asyncio.get_running_loop()
        batch = Batch(loop, len(ops))
        foreign = self._plan(batch, ops, regions)
        if not batch.pieces_left:
            for landing in foreign:
                landing.close()
            return batch.statuses
        self._batches.add(batch)
        timer = loop.call_later(deadline_s, batch.end, Status.DEADLINE)
        try:
            self.pump()
            await batch.done
        finally:
            timer.cancel()
            batch.end(Status.DISCONNECTED)
            try:
                await self._settle(batch, cut)
            finally:
                self._batches.discard(batch)
                for landing in foreign:
                    landing.close()
        return batch.statuses

    async def _settle(self, batch: Batch, cut: Callable[[], None]) -> None:
        """Return only when the caller's memory is its own again, even if cancelled."""
        self._forget(batch)
        cancelled: asyncio.CancelledError | None = None
        end_ns = limits.VERBS_DRAIN_NS
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while batch.direct:
            left_ns = end_ns - int((loop.time() - begin) * 1e9)
            if left_ns <= 0:
                cut()
                assert not batch.direct, "a destroyed queue pair still has work"
                break
            try:
                await batch.idle(left_ns)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _forget(self, batch: Batch) -> None:
        if any(piece.batch is batch for piece in self._queue):
            self._queue = deque(piece for piece in self._queue if piece.batch is not batch)

    # -- planning -----------------------------------------------------------------------------

    def _plan(
        self, batch: Batch, ops: Sequence[ReadOp], regions: Sequence[PeerRegion | Status]
    ) -> list[Landing]:
        """Cut the ops into pieces and queue them; the landings made for this batch alone."""
        wanted: list[tuple[int, PeerRegion, memoryview, int, Landing | None]] = []
        strangers: list[tuple[int, int]] = []
        for index, (op, region) in enumerate(zip(ops, regions, strict=True)):
            if isinstance(region, Status):
                batch.statuses[index] = region
                continue
            view = op.into
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
            address = address_of(view)
            landing = self.registry.find(address, len(view))
            if landing is None and len(view) > limits.VERBS_BOUNCE_OP_BYTES_MAX:
                strangers.append((address, len(view)))
            wanted.append((index, region, view, address, landing))
        domains = [link.domain for link in self._links]
        made = [Landing(domains, start, size) for start, size in group(strangers)]
        starts = [landing.address for landing in made]
        for index, region, view, address, landing in wanted:
            if landing is None and len(view) > limits.VERBS_BOUNCE_OP_BYTES_MAX:
                landing = made[bisect.bisect(starts, address) - 1]
            self._cut(batch, index, region, view, address, landing, ops[index].span.address)
        return made

    def _cut(
        self, batch: Batch, index: int, region: PeerRegion, view: memoryview, address: int,
        landing: Landing | None, remote_address: int,
    ) -> None:  # fmt: skip
        at, length = 0, len(view)
        pieces: list[Piece] = []
        while at < length:
            take = min(length - at, limits.VERBS_PIECE_BYTES_MAX)
            if landing is not None:
                take = min(take, landing.room(address + at))
            whole = take == length
            pieces.append(
                Piece(self, batch, index, region, remote_address + at, address + at, take, landing,
                      view if whole else view[at : at + take])
            )  # fmt: skip
            at += take
        if len(self._queue) + len(pieces) > limits.VERBS_READS_QUEUED_MAX:
            batch.statuses[index] = Status.BUSY
            return
        self._queue.extend(pieces)
        batch.left[index] += len(pieces)
        batch.pieces_left += len(pieces)

    # -- posting ------------------------------------------------------------------------------

    def pump(self) -> None:
        """Put on the wire what there is room for. Raises: FabricError when a rail is broken."""
        links = [link for link in self._links if not link.destroyed]
        if not links or not self._queue:
            return
        chains: dict[int, list[Piece]] = {}
        try:
            self._prepare(links, chains)
        finally:  # who has local memory goes to a rail, which hands it back, whatever happened
            self._post(links, chains)

    def _prepare(self, links: Sequence[RailLink], chains: dict[int, list[Piece]]) -> None:
        """Take pieces off the queue into the chains of their rails. Raises: FabricError."""
        while self._queue:
            piece = self._queue[0]
            if piece.batch.ended or piece.region.revoked:
                self._queue.popleft()
                piece.batch.piece_over(piece.index, Status.LEASE_EXPIRED)
                continue
            roomy = [link for link in links if link.has_room(piece.length_bytes)]
            if not roomy:
                return
            link = min(roomy, key=_load) if len(roomy) > 1 else roomy[0]
            try:
                ready = piece.prepare(link)
            except FabricError as error:
                self._queue.popleft()
                piece.batch.piece_over(piece.index, error.status)
                if error.status is Status.FABRIC_ERROR:  # no want of memory: the device is broken
                    raise
                continue
            if not ready:
                return
            self._queue.popleft()
            link.reserve(piece.length_bytes)
            chains.setdefault(link.number, []).append(piece)

    def _post(self, links: Sequence[RailLink], chains: dict[int, list[Piece]]) -> None:
        """Give each rail its chain, also behind a rail that refuses. Raises: its error."""
        problem: Exception | None = None
        for link in links:
            if link.number not in chains:
                continue
            try:
                link.post_reads(chains[link.number])
            except Exception as error:  # it has them all the same, until it is destroyed
                problem = problem or error
        if problem is not None:
            raise problem

    def abort(self, status: Status) -> None:
        """The queue pairs are destroyed: every batch ends, now and from here on."""
        self._aborted = status
        self._queue.clear()
        for batch in list(self._batches):
            batch.end(status)
