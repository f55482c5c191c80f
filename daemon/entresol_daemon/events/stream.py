"""Asyncio around a subscription: an iterator of batches, and the snapshot that precedes it.

Invariant: the shard's publishing path never waits for a stream; a stream only remembers that there
is something to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from entresol_daemon.events.log import EventLog, Subscription
from entresol_daemon.events.types import Event, Gap, Kind, Position
from entresol_proto.ids import TenantName

SnapshotProvider = Callable[[TenantName], AsyncIterator[Event | None]]
"""Yields what a tenant has stored as STORED events with `seq` 0, in any order. It may run while the
index changes: every block must be listed that is stored from before its start to after its end;
blocks that come or go meanwhile may or may not be, but none that was gone when the one before it
was yielded. A block in several media is listed once per medium. None says that it goes on looking,
for whoever reads the log meanwhile."""


class EventStream:
    """Async iterator of non-empty event batches; the last item may be a Gap, then it ends.

    Use as an async context manager, or call `close`. One consumer at a time.

    Raises (constructor): QuotaError, EntresolError as `EventLog.subscribe`.
    """

    def __init__(
        self, log: EventLog, tenant: TenantName | None, *, after: Position | None = None
    ) -> None:
        self._news = asyncio.Event()
        self._news.set()
        self._subscription = log.subscribe(tenant, after=after, wake=self._news.set)

    @property
    def position(self) -> Position | None:
        """After the last event given out; None when following all tenants."""
        return self._subscription.position

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> list[Event] | Gap:
        while not self._subscription.closed:
            self._news.clear()
            got = self._subscription.poll()
            if got:
                return got
            await self._news.wait()
        raise StopAsyncIteration

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream; a consumer waiting in it wakes up and finishes. Idempotent."""
        self._subscription.close()
        self._news.set()


async def snapshot_batches(
    log: EventLog,
    provider: SnapshotProvider,
    tenant: TenantName,
    *,
    batch_events: int,
    follow: bool = False,
) -> AsyncGenerator[Position | list[Event] | Gap, None]:
    """First the position to follow from, then batches of STORED events (`seq` 0).

    Complete when it ends without an exception. The position is taken before the provider starts,
    which is what makes snapshot + replay exact (see EVENTS.md).

    With `follow` the batches also have what was published since, in order: a reader needs no
    replay, and falls off the ring only by reading too slowly. The log is read between one block
    and the next, so what ends a block is never before it. It is not complete where the last item is
    a Gap, or a batch with TENANT_ERASED.
    """
    tail = log.tail(tenant)
    yield log.position(tenant)
    found = provider(tenant)
    batch: list[Event] = []
    more = True
    try:
        while more:
            try:
                event = await anext(found)
            except StopAsyncIteration:
                more, event = False, None
            if event is not None:
                assert event.tenant == tenant, "a snapshot never leaves its tenant"
                batch.append(event)
            for news in _until_now(log, tail) if follow else ():
                if isinstance(news, Gap):
                    if batch:
                        yield batch
                    yield news
                    return
                batch += news
                if any(each.kind is Kind.TENANT_ERASED for each in news):
                    yield batch
                    return
                if len(batch) >= batch_events:
                    yield batch
                    batch = []
            if len(batch) >= batch_events:
                yield batch
                batch = []
    finally:
        if isinstance(found, AsyncGenerator):  # also when the reader leaves half-way
            await found.aclose()
    if batch:
        yield batch


def _until_now(log: EventLog, tail: Subscription) -> Iterator[list[Event] | Gap]:
    """What a tail has not given yet. Not what comes while that is sent: of a busy tenant there is
    always more, and the snapshot would not get on."""
    assert tail.tenant is not None, "a snapshot is of one tenant"
    last_seq = log.position(tail.tenant).seq
    while not tail.closed and tail.position is not None and tail.position.seq < last_seq:
        yield tail.poll()
