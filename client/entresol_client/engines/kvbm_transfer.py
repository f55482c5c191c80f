"""The worker side: blocks between device and staging memory, and between staging and the store.

Invariants:
- what reaches a device block is a whole verified block; a block that failed is never written;
- a request's load is over only when nothing can be written to its device blocks any more;
- a staging row is reused only when neither the device nor the store can touch it any more;
- stores that find no staging free are shed; the engine's thread never waits for the store.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from entresol_client.engines.kvbm_pages import BlockPages
from entresol_client.engines.kvbm_plan import LoadOp, StoreBlock, StoreOp
from entresol_client.engines.store import LoadReply, Space
from entresol_client.results import PutBlock
from entresol_proto import limits

log = logging.getLogger("entresol.engine")

PIECE_BYTES = 32 * limits.MIB
JOIN_SECONDS_MAX = 15.0

Spaces = Callable[[str], Space]


class Arena:
    """Host staging for up to `rows` blocks, pinned on an accelerator.

    `twin` is device memory of the same shape that arenas used on one stream share; None on the CPU.
    One user at a time; it is not locked.
    """

    def __init__(self, pages: BlockPages, rows: int, twin: torch.Tensor | None) -> None:
        self._pages = pages
        self._twin = twin
        shape = (rows, pages.block_bytes)
        self._host = torch.empty(shape, dtype=torch.uint8, pin_memory=twin is not None)
        self.views: list[Any] = list(self._host.numpy())

    def take(self, block_ids: Sequence[int]) -> None:
        """Device blocks into the first rows: on the current stream, not waited for."""
        count = len(block_ids)
        if self._twin is None:
            self._pages.gather(block_ids, self._host[:count])
        else:
            self._pages.gather(block_ids, self._twin[:count])
            self._host[:count].copy_(self._twin[:count], non_blocking=True)

    def give(self, block_ids: Sequence[int]) -> None:
        """The first rows into device blocks: on the current stream, not waited for."""
        source = self._host[: len(block_ids)]
        if self._twin is not None:
            twin = self._twin[: len(block_ids)]
            twin.copy_(source, non_blocking=True)
            source = twin
        self._pages.scatter(block_ids, source)


class _Accelerator:
    """Streams and events of the caches' device; on the CPU nothing, as work there is done at once.

    The part for a GPU has not run in the tests of this repository: they have none.
    """

    def __init__(self, pages: BlockPages) -> None:
        self._pages = pages
        self._device = pages.device
        self._real = pages.device.type != "cpu"
        self._stream = torch.Stream(self._device) if self._real else None

    def twin(self, rows: int) -> torch.Tensor | None:
        """Device memory for `rows` blocks."""
        if not self._real:
            return None
        shape = (rows, self._pages.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def mark(self) -> Any:
        """An event behind what the engine's current stream has been given so far; or None."""
        if not self._real:
            return None
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def run(self, work: Callable[[], None], after: Any) -> None:
        """Run `work` on a stream of its own, behind the event `after`, and wait for its end."""
        if self._stream is None:
            work()
            return
        try:
            with self._stream:
                self._stream.wait_event(after)
                work()
        finally:  # what was queued before it failed still reads and writes
            self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that is over: `failed_blocks` are device blocks that hold nothing of use."""

    op: LoadOp
    failed_blocks: tuple[int, ...]


class Loader:
    """Brings blocks into the device, one request after another, in a thread of its own.

    While one piece is copied to the device the next is under way from the store.
    """

    def __init__(self, pages: BlockPages, spaces: Spaces, staging_bytes: int) -> None:
        """`staging_bytes`: memory for two pieces; at least one block each."""
        rows = _rows(pages, min(PIECE_BYTES, staging_bytes // 2))
        self._device = _Accelerator(pages)
        twin = self._device.twin(rows)
        self._arenas = (Arena(pages, rows, twin), Arena(pages, rows, twin))
        self._rows = rows
        self._spaces = spaces
        self._ops: queue.SimpleQueue[tuple[LoadOp, Any] | None] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="entresol-kvbm-load", daemon=True)
        self._thread.start()

    def start(self, op: LoadOp) -> None:
        """Queue a load; it appears in `over` once, whatever happens."""
        self._ops.put((op, self._device.mark()))

    def over(self) -> Iterator[Loaded]:
        """Loads that have ended since the last call."""
        while True:
            try:
                yield self._over.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """End the thread after what is queued."""
        self._ops.put(None)
        self._thread.join(JOIN_SECONDS_MAX)

    def _run(self) -> None:
        while (queued := self._ops.get()) is not None:
            op, after = queued
            good = 0
            try:
                for blocks in self._pieces(op, after):
                    good += blocks
            except Exception:
                log.exception("event=kvbm_load_failed request=%s", op.request_id)
            self._over.put(Loaded(op, op.device_blocks[good:]))

    def _pieces(self, op: LoadOp, after: Any) -> Iterator[int]:
        """Load piece by piece; yields the blocks put in place, and ends at the first that fails.

        Whatever ends it, no load is under way any more then.
        """
        space = self._spaces(op.tenant)
        starts = range(0, len(op.keys), self._rows)
        under_way: Future[LoadReply] | None = None
        try:
            for number, start in enumerate(starts):
                end = min(start + self._rows, len(op.keys))
                if under_way is None:
                    under_way = self._ask(space, op, number, start, end)
                reply, under_way = under_way.result(), None
                if reply.prefix_blocks == end - start and end < len(op.keys):
                    following = min(end + self._rows, len(op.keys))
                    under_way = self._ask(space, op, number + 1, end, following)
                good = reply.prefix_blocks
                if good:
                    blocks = op.device_blocks[start : start + good]
                    give = functools.partial(self._arenas[number % 2].give, blocks)
                    self._device.run(give, after)
                    yield good
                if good < end - start:
                    return
        finally:
            if under_way is not None:
                under_way.result()

    def _ask(
        self, space: Space, op: LoadOp, number: int, start: int, end: int
    ) -> Future[LoadReply]:
        views = self._arenas[number % 2].views[: end - start]
        return space.load(op.keys[start:end], views, prefix=True)


@dataclass(slots=True)
class _Copy:
    """Blocks of one request on their way out of the device into `arena`."""

    request_id: str
    tenant: str
    blocks: Sequence[StoreBlock]
    arena: Arena
    event: Any  # recorded behind the copy; None on the CPU, where the copy is done already


class Saver:
    """Takes blocks off the device and stores them.

    `keep` is called from the engine's thread, everything else happens in a thread of its own.
    """

    def __init__(self, pages: BlockPages, spaces: Spaces, staging_bytes: int) -> None:
        rows = _rows(pages, min(PIECE_BYTES, staging_bytes // 2))
        count = max(2, staging_bytes // (rows * pages.block_bytes))
        self._rows = rows
        self._device = _Accelerator(pages)
        self._spaces = spaces
        self._free: queue.SimpleQueue[Arena] = queue.SimpleQueue()
        twin = self._device.twin(rows)
        for _ in range(count):
            self._free.put(Arena(pages, rows, twin))
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._lock = threading.Condition()  # over what follows
        self._copying: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="entresol-kvbm-save", daemon=True)
        self._thread.start()

    def keep(self, op: StoreOp) -> None:
        """Copy blocks off the device, behind what the current stream computes; store them later."""
        for start in range(0, len(op.blocks), self._rows):
            blocks = op.blocks[start : start + self._rows]
            try:
                arena = self._free.get_nowait()
            except queue.Empty:  # the blocks behind a gap would be of no use
                self.counts.update(shed_blocks=len(op.blocks) - start)
                return
            try:
                arena.take([block.device_block for block in blocks])
            except Exception:  # no memory left on the device, say: the engine goes on without us
                log.exception("event=kvbm_copy_failed request=%s", op.request_id)
                self.counts.update(shed_blocks=len(op.blocks) - start)
                self._give_back(arena)
                return
            with self._lock:
                self._copying[op.request_id] += 1
            self._copies.put(_Copy(op.request_id, op.tenant, blocks, arena, self._device.mark()))

    def _give_back(self, arena: Arena) -> None:
        """Once what was queued for it before it failed is over; else it is not used again."""
        try:
            event = self._device.mark()
            if event is not None:
                event.synchronize()
            self._free.put(arena)
        except Exception:
            log.exception("event=kvbm_arena_lost")

    def copying(self, request_id: str) -> bool:
        """True while the request's device blocks are still being read."""
        with self._lock:
            return self._copying[request_id] > 0

    def settle(self) -> None:
        """Wait until no device block is being read (before they may be overwritten)."""
        with self._lock:
            self._lock.wait_for(lambda: not +self._copying)

    def close(self) -> None:
        """Hand what was taken off the device to the store, then end the thread."""
        self._copies.put(None)
        self._thread.join(JOIN_SECONDS_MAX)

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            try:
                if copy.event is not None:
                    copy.event.synchronize()
            except Exception:  # the copy may be anything; the engine learns of its device itself
                log.exception("event=kvbm_copy_failed request=%s", copy.request_id)
                copy.blocks = ()
            with self._lock:
                self._copying[copy.request_id] -= 1
                self._copying = +self._copying
                self._lock.notify_all()
            self._store(copy)

    def _store(self, copy: _Copy) -> None:
        if not copy.blocks:
            self._free.put(copy.arena)
            return
        puts = [
            PutBlock(
                key=block.key,
                buffer=copy.arena.views[row],
                position=block.position,
                parent_key=block.parent_key,
                token_ids=block.token_ids,
            )
            for row, block in enumerate(copy.blocks)
        ]
        try:
            done = self._spaces(copy.tenant).store(puts)
        except Exception:
            log.exception("event=kvbm_store_failed request=%s", copy.request_id)
            self._free.put(copy.arena)
            return
        done.add_done_callback(lambda _: self._free.put(copy.arena))


class Arrivals:
    """Merges the ends of KVBM's loads with those of ours: vLLM hears of a request once.

    Pure bookkeeping, used from the engine's thread.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[str]] = {}  # request -> whose load is still under way
        self._failed: dict[str, tuple[int, ...]] = {}

    def expect(self, op: LoadOp) -> None:
        """A load of ours was started."""
        self._waiting[op.request_id] = {"ours", "kvbm"} if op.beside_kvbm else {"ours"}

    def merge(self, kvbm: set[str], ours: Sequence[Loaded]) -> tuple[set[str], set[int]]:
        """Requests whose loads are all over, and the device blocks of them that failed."""
        over = {one for one in kvbm if one not in self._waiting}
        for request_id in kvbm - over:
            self._waiting[request_id].discard("kvbm")
        for one in ours:
            self._failed[one.op.request_id] = one.failed_blocks
            self._waiting[one.op.request_id].discard("ours")
        failed: set[int] = set()
        for request_id in [name for name, parts in self._waiting.items() if not parts]:
            del self._waiting[request_id]
            over.add(request_id)
            failed.update(self._failed.pop(request_id))
        return over, failed


def _rows(pages: BlockPages, length_bytes: int) -> int:
    return max(1, length_bytes // pages.block_bytes)
