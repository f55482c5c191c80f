"""Asyncio around a subscription: an iterator of batches, and the snapshot that precedes it.

Invariant: the shard's publishing path never waits for a stream; a stream only remembers that there
is something to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from entresol_daemon.events.log import EventLog
from entresol_daemon.events.types import Event, Gap, Position
from entresol_proto.ids import TenantName

SnapshotProvider = Callable[[TenantName], AsyncIterator[Event]]
"""Yields what a tenant has stored as STORED events with `seq` 0, in any order. It may run while the
index changes: every block must be listed that is stored from before its start to after its end;
blocks that come or go meanwhile may or may not be. A block in several media is listed once per
medium."""


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
    log: EventLog, provider: SnapshotProvider, tenant: TenantName, *, batch_events: int
) -> AsyncGenerator[Position | list[Event], None]:
    """First the position to follow from, then batches of STORED events (`seq` 0).

    Complete when it ends without an exception. The position is taken before the provider starts,
    which is what makes snapshot + replay exact (see EVENTS.md).
    """
    yield log.position(tenant)
    found = provider(tenant)
    batch: list[Event] = []
    try:
        async for event in found:
            assert event.tenant == tenant, "a snapshot never leaves its tenant"
            batch.append(event)
            if len(batch) >= batch_events:
                yield batch
                batch = []
    finally:
        if isinstance(found, AsyncGenerator):  # also when the reader leaves half-way
            await found.aclose()
    if batch:
        yield batch
