"""The event log of one shard incarnation: per-tenant sequences, bounded rings, gap detection.

Pure: no clock, no asyncio, no I/O; used from one thread (the shard's loop). Invariants owned here:
- A tenant's sequence starts at 1 and has no holes. It is numbered per tenant, so neither a gap nor
  a jump tells one tenant that another was active.
- Publishing never waits and never fails because of a consumer. A subscription is a position in the
  tenant's ring, not a queue: a consumer that falls off the ring gets one `Gap` and is finished.
- Memory is bounded by events and bytes per tenant and by bytes in total. A tenant whose ring is
  below its equal share of the total, by a 256th, never loses events because of another tenant; and
  no event costs a look at all rings, however many there are.
- An erased tenant's earlier events (they carry token ids) are gone when TENANT_ERASED is in.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from entresol_daemon.events.types import Event, Gap, GapReason, Kind, Medium, Position, Reason
from entresol_proto import limits
from entresol_proto.ids import TenantName
from entresol_proto.status import EntresolError, QuotaError, Status

INCARNATION_MAX = 2**64 - 1
SHARE_PARTS = 256  # one of them is given up by all where all hold their share


@dataclass(frozen=True, slots=True)
class EventLimits:
    """Named limits of the log."""

    tenant_events_max: int = 65_536
    tenant_ring_bytes_max: int = 32 * limits.MIB
    total_ring_bytes_max: int = 256 * limits.MIB
    keys_per_event_max: int = 256  # `publish` splits what is longer
    subscriptions_per_tenant_max: int = 16
    subscriptions_max: int = 1_024
    batch_events_max: int = 256  # per `Subscription.poll`

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


class _Ring:
    """The newest events of one tenant, addressed by sequence number in O(1)."""

    __slots__ = ("_events", "_head", "count", "last_seq", "used_bytes")

    def __init__(self) -> None:
        self._events: list[Event | None] = []
        self._head = 0  # index of the oldest event held; entries before it are None
        self.count = 0  # of the events held
        self.last_seq = 0
        self.used_bytes = 0

    @property
    def first_seq(self) -> int:
        """Oldest sequence held; last_seq + 1 when the ring is empty."""
        return self.last_seq - self.count + 1

    def append(self, event: Event) -> int:
        """Hold the next event; returns what it costs."""
        assert event.seq == self.last_seq + 1, "a tenant's sequence has no holes"
        cost = event.cost_bytes
        self._events.append(event)
        self.count += 1
        self.last_seq += 1
        self.used_bytes += cost
        return cost

    def trim_oldest(self) -> int:
        """Drop the oldest event; returns the bytes freed."""
        event = self._events[self._head]
        assert event is not None
        freed = event.cost_bytes
        self._events[self._head] = None
        self._head += 1
        self.count -= 1
        self.used_bytes -= freed
        if self._head * 2 > len(self._events):
            del self._events[: self._head]
            self._head = 0
        return freed

    def read(self, after_seq: int, count_max: int) -> list[Event]:
        """Events after `after_seq`, which must be at least first_seq - 1."""
        start = self._head + (after_seq + 1 - self.first_seq)
        assert start >= self._head, "the caller checks for a gap first"
        return [event for event in self._events[start : start + count_max] if event is not None]


def _used_bytes(ring: _Ring) -> int:
    return ring.used_bytes


def _pieces(event: Event, keys_max: int) -> Iterator[Event]:
    """Of a longer event: at most `keys_max` keys each, numbered on; chain and tokens stay."""
    count = len(event.wire_keys)
    chained = event.kind is Kind.STORED
    tokens_fit = len(event.token_ids_u32le) == 4 * event.block_tokens * count
    size_left_bytes = event.size_bytes
    for start in range(0, count, keys_max):
        stop = min(start + keys_max, count)
        size_bytes = size_left_bytes * (stop - start) // (count - start)
        size_left_bytes -= size_bytes
        parent = event.parent
        if chained and start:
            parent = event.engine_keys[start - 1] if event.engine_keys else b""
        tokens = b""
        if tokens_fit:
            width = 4 * event.block_tokens
            tokens = event.token_ids_u32le[start * width : stop * width]
        yield replace(
            event,
            seq=event.seq + start // keys_max,
            wire_keys=event.wire_keys[start:stop],
            engine_keys=event.engine_keys[start:stop],
            parent=parent,
            position=event.position + (start if chained else 0),
            token_ids_u32le=tokens,
            size_bytes=size_bytes,
        )


class EventLog:
    """All tenants' events since this start of the shard. See the module for the invariants."""

    def __init__(
        self,
        incarnation: int,
        *,
        event_limits: EventLimits | None = None,
        on_gap: Callable[[GapReason], None] | None = None,
        watchers_max: Callable[[TenantName], int] | None = None,
    ) -> None:
        """`incarnation` is a random or boot-time u64, not 0, new with every start.

        `watchers_max` gives a tenant's own `subscriptions_per_tenant_max`.
        `on_gap` is called synchronously, for counters; it must not raise.
        """
        if not 0 < incarnation <= INCARNATION_MAX:
            raise ValueError("incarnation is a u64 and not 0")
        self.incarnation = incarnation
        self.limits = event_limits or EventLimits()
        self.published = dict.fromkeys(Kind, 0)  # events since the start, pieces counted each
        self._on_gap = on_gap
        self._watchers_max = watchers_max
        self._rings: dict[TenantName, _Ring] = {}
        self._used_bytes = 0
        self._subscriptions: dict[TenantName | None, list[Subscription]] = {}
        self._subscriptions_count = 0

    # ------------------------------------------------------------------------------- state

    @property
    def used_bytes(self) -> int:
        """Approximate memory of all rings."""
        return self._used_bytes

    @property
    def subscriptions_count(self) -> int:
        """Open subscriptions of all tenants."""
        return self._subscriptions_count

    def subscriptions_of(self, tenant: TenantName) -> int:
        """Open subscriptions to one tenant's events."""
        return len(self._subscriptions.get(tenant, ()))

    def tenants(self) -> list[TenantName]:
        """Tenants that ever had an event in this incarnation, sorted."""
        return sorted(self._rings)

    def newest(self, count_max: int) -> list[Event]:
        """The newest events of all tenants that are still held, newest first; for people."""

        def ended(ring: _Ring) -> int:
            return ring.read(ring.last_seq - 1, 1)[0].time_unix_ns

        having = (ring for ring in self._rings.values() if ring.count)
        rings = heapq.nlargest(count_max, having, key=ended)
        found = [
            event
            for ring in rings
            for event in ring.read(max(ring.first_seq - 1, ring.last_seq - count_max), count_max)
        ]
        return heapq.nlargest(count_max, found, key=lambda event: (event.time_unix_ns, event.seq))

    def position(self, tenant: TenantName) -> Position:
        """Where `tenant`'s log ends now; take it before reading the index for a snapshot."""
        ring = self._rings.get(tenant)
        return Position(self.incarnation, ring.last_seq if ring else 0)

    def held(self, tenant: TenantName) -> tuple[int, int]:
        """(first_seq, last_seq) of what can be replayed; (0, last_seq) when nothing can."""
        ring = self._rings.get(tenant)
        if ring is None:
            return (0, 0)
        return (ring.first_seq if ring.count else 0, ring.last_seq)

    # ----------------------------------------------------------------------------- publish

    def publish(
        self,
        kind: Kind,
        tenant: TenantName,
        *,
        time_unix_ns: int,
        namespace_id: bytes = b"",
        wire_keys: tuple[bytes, ...] = (),
        engine_keys: tuple[bytes, ...] = (),
        parent: bytes = b"",
        position: int = 0,
        block_tokens: int = 0,
        token_ids_u32le: bytes = b"",
        medium: Medium = Medium.NONE,
        reason: Reason = Reason.NONE,
        size_bytes: int = 0,
        until_unix_ns: int = 0,
    ) -> Event:
        """Append to the tenant's log and wake its consumers. Returns the (last) event, numbered.

        Several keys in STORED are one chain: each is the parent of the next. More keys than
        `keys_per_event_max` become several events. A broken shape (parallel lists of different
        length, keys missing where the kind needs them) is a bug of the caller and fails an
        assertion; token ids that do not fit the keys are left out when an event is split.
        """
        assert not engine_keys or len(engine_keys) == len(wire_keys), "keys are parallel"
        assert len(token_ids_u32le) % 4 == 0, "token ids are packed u32"
        if kind in (Kind.TENANT_ERASED, Kind.CLEARED):
            assert not wire_keys, "this kind names no keys"
        else:
            assert wire_keys, "this kind names keys"
            assert len(namespace_id) == limits.NAMESPACE_ID_BYTES, "keys are in a namespace"
        ring = self._rings.get(tenant)
        if ring is None:
            ring = self._rings[tenant] = _Ring()
        event = Event(
            ring.last_seq + 1,
            time_unix_ns,
            tenant,
            kind,
            namespace_id,
            wire_keys,
            engine_keys,
            parent,
            position,
            block_tokens,
            token_ids_u32le,
            medium,
            reason,
            size_bytes,
            until_unix_ns,
        )
        if kind is Kind.TENANT_ERASED:
            while ring.count:
                self._used_bytes -= ring.trim_oldest()
        if len(wire_keys) <= self.limits.keys_per_event_max:
            self._append(ring, event)
        else:
            for piece in _pieces(event, self.limits.keys_per_event_max):
                event = piece
                self._append(ring, event)
        for key in (tenant, None):
            for subscription in self._subscriptions.get(key, ()):
                subscription.notify()
        return event

    def _append(self, ring: _Ring, event: Event) -> None:
        self._used_bytes += ring.append(event)
        self.published[event.kind] += 1
        most = self.limits
        if (
            ring.count > most.tenant_events_max
            or ring.used_bytes > most.tenant_ring_bytes_max
            or self._used_bytes > most.total_ring_bytes_max
        ):
            self._trim(ring)

    def _trim(self, ring: _Ring) -> None:
        """Bring `ring` and the total back within their limits; the newest event always stays."""
        events_max, bytes_max = self.limits.tenant_events_max, self.limits.tenant_ring_bytes_max
        while ring.count > 1 and (ring.count > events_max or ring.used_bytes > bytes_max):
            self._used_bytes -= ring.trim_oldest()
        total_max = self.limits.total_ring_bytes_max
        while self._used_bytes > total_max:
            trimmable = [other for other in self._rings.values() if other.count > 1]
            if not trimmable:
                return  # one event per tenant is left, and the tenant table is bounded
            largest, share = max(trimmable, key=_used_bytes), total_max // len(self._rings)
            self._used_bytes -= largest.trim_oldest()
            if largest.used_bytes > share * 9 // 8:
                # Down to 7/8 of it at once, so that the search is rare; not below the equal share.
                self._trim_to(largest, max(share, largest.used_bytes * 7 // 8))
                continue
            # All are at about their share: a little of each at once, or every event would search.
            for ring in trimmable:
                self._trim_to(ring, share - share // SHARE_PARTS)

    def _trim_to(self, ring: _Ring, floor_bytes: int) -> None:
        while ring.count > 1 and ring.used_bytes > floor_bytes:
            self._used_bytes -= ring.trim_oldest()

    # --------------------------------------------------------------------------- subscribe

    def subscribe(
        self,
        tenant: TenantName | None,
        *,
        after: Position | None = None,
        wake: Callable[[], None] | None = None,
    ) -> Subscription:
        """Follow one tenant's events, or with None every tenant's (the operator's view).

        `after` asks for a replay of what follows that position; without it the subscription begins
        now. Whether the position can be honoured shows in the first `poll`: if not, it gives a
        Gap. `wake` is called, from `publish`, when a poll has something to give.

        Raises: QuotaError when the tenant or the shard has too many subscriptions, EntresolError
            (BAD_REQUEST) for a replay over all tenants, whose sequences are separate.
        """
        if tenant is None and after is not None:
            raise EntresolError(
                "a position belongs to one tenant",
                hint="name the tenant, or follow all tenants from now",
                status=Status.BAD_REQUEST,
            )
        existing = self._subscriptions.get(tenant, [])
        most = self.limits.subscriptions_per_tenant_max
        if tenant is not None and self._watchers_max is not None:
            most = self._watchers_max(tenant)
        if len(existing) >= most:
            raise QuotaError(
                f"{len(existing)} event subscriptions are open",
                hint="share one subscription between consumers, or close one",
            )
        if self._subscriptions_count >= self.limits.subscriptions_max:
            raise QuotaError("the shard has no event subscription left", status=Status.BUSY)
        subscription = Subscription(self, tenant, after, wake)
        self._subscriptions.setdefault(tenant, []).append(subscription)
        self._subscriptions_count += 1
        return subscription

    def tail(self, tenant: TenantName) -> Subscription:
        """A tenant's events from now on, for who polls by itself: it is not woken, and not counted,
        because something else bounds how many there are."""
        return Subscription(self, tenant, None, None)

    def _unsubscribe(self, subscription: Subscription) -> None:
        peers = self._subscriptions.get(subscription.tenant, [])
        if subscription in peers:
            peers.remove(subscription)
            self._subscriptions_count -= 1
            if not peers:
                del self._subscriptions[subscription.tenant]

    def _gap(self, tenant: TenantName, reason: GapReason, asked_seq: int) -> Gap:
        first_seq, last_seq = self.held(tenant)
        if self._on_gap is not None:
            self._on_gap(reason)
        return Gap(tenant, reason, asked_seq, first_seq, last_seq)

    def _read(self, tenant: TenantName, after_seq: int, count_max: int) -> list[Event] | None:
        """Events after `after_seq`; None when some of them are no longer held."""
        ring = self._rings.get(tenant)
        if ring is None or after_seq >= ring.last_seq:
            return []
        if after_seq < ring.first_seq - 1:
            return None
        return ring.read(after_seq, count_max)


class Subscription:
    """One consumer's place in the log. Not thread-safe; close it when done.

    It holds positions, never events, so a consumer that stops polling costs nothing.
    """

    def __init__(
        self,
        log: EventLog,
        tenant: TenantName | None,
        after: Position | None,
        wake: Callable[[], None] | None,
    ) -> None:
        self.tenant = tenant
        self.closed = False
        self._log = log
        self._wake = wake
        self._fresh = after is not None  # the first poll tells a bad position from slowness
        self._asked = after
        self._after: dict[TenantName, int] = {}
        self._served_last = TenantName("")
        if tenant is None:
            for name in log.tenants():
                self._after[name] = log.position(name).seq
        else:
            self._after[tenant] = log.position(tenant).seq if after is None else after.seq

    @property
    def position(self) -> Position | None:
        """After the last event given out; None for the view of all tenants."""
        if self.tenant is None:
            return None
        return Position(self._log.incarnation, self._after[self.tenant])

    def notify(self) -> None:
        """Called by the log when something was published that this consumer follows."""
        if self._wake is not None:
            self._wake()

    def poll(self) -> list[Event] | Gap:
        """The next events in order (at most `batch_events_max`), [] when there are none yet.

        A Gap is the last thing a subscription gives: it is closed then.
        """
        assert not self.closed, "polled after close or gap"
        if self._asked is not None:
            gap = self._check_asked(self._asked)
            self._asked = None
            if gap is not None:
                return gap
        if self.tenant is None:
            return self._poll_all()
        return self._poll_one(self.tenant, self._log.limits.batch_events_max)

    def _check_asked(self, asked: Position) -> Gap | None:
        assert self.tenant is not None
        _, last_seq = self._log.held(self.tenant)
        if asked.incarnation != self._log.incarnation:
            return self._end(self.tenant, GapReason.INCARNATION, asked.seq)
        if asked.seq > last_seq:
            return self._end(self.tenant, GapReason.AHEAD, asked.seq)
        return None

    def _poll_one(self, tenant: TenantName, count_max: int) -> list[Event] | Gap:
        after_seq = self._after.get(tenant, 0)
        events = self._log._read(tenant, after_seq, count_max)
        if events is None:
            reason = GapReason.TRIMMED if self._fresh else GapReason.SLOW
            return self._end(tenant, reason, after_seq)
        self._fresh = False
        if events:
            self._after[tenant] = events[-1].seq
        return events

    def _poll_all(self) -> list[Event] | Gap:
        batch: list[Event] = []
        for tenant in self._unread():
            room = self._log.limits.batch_events_max - len(batch)
            if room <= 0:
                break
            if batch and self._log._read(tenant, self._after.get(tenant, 0), 1) is None:
                break  # its gap is the last that is given: first what was read of others
            got = self._poll_one(tenant, room)
            if isinstance(got, Gap):
                return got
            batch.extend(got)
            self._served_last = tenant
        return batch

    def _unread(self) -> list[TenantName]:
        """Tenants with news, beginning after the one served last, so that none is starved."""
        names = [
            name
            for name in self._log.tenants()
            if self._log.position(name).seq > self._after.get(name, 0)
        ]
        first = bisect.bisect_right(names, self._served_last)
        return names[first:] + names[:first]

    def _end(self, tenant: TenantName, reason: GapReason, asked_seq: int) -> Gap:
        gap = self._log._gap(tenant, reason, asked_seq)
        self.close()
        return gap

    def close(self) -> None:
        """Leave the log. Idempotent."""
        self.closed = True
        self._log._unsubscribe(self)
