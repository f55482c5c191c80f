"""One shard's events, as a thread that never ends by itself: snapshot, then watch, and again.

Invariants: it hands over events in the shard's order; a snapshot is between `Begin` and `End`, with
what happens meanwhile, and an `End` that is not complete was cut short; nothing is skipped
silently: after a lost connection it goes on behind the last number seen, after a gap it takes a
snapshot.

The inbox is bounded: a relay that is slower than the daemon makes this thread wait, the daemon's
stream with it, and in the end gets a gap instead of growing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from entresol_client.cli import rpc
from entresol_client.cli.errors import Unreachable
from entresol_client.config import ClientConfig
from entresol_client.relay.layouts import MATCH_FIELDS, NamespaceInfo
from entresol_proto.status import EntresolError, Status

log = logging.getLogger("entresol.relay")

INBOX_ITEMS_MAX = 256  # of at most one reply each, about 1 MiB
BACKOFF_S_MIN = 0.25
BACKOFF_S_MAX = 5.0
PUT_WAIT_S = 0.5
SNAPSHOT_BUSY_S = 1.0


@dataclass(frozen=True, slots=True)
class Spaces:
    """All namespaces of the shard, as of now."""

    shard: str
    found: tuple[NamespaceInfo, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """A snapshot begins."""

    shard: str


@dataclass(frozen=True, slots=True)
class End:
    """A snapshot is over."""

    shard: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Events:
    """Events in order (protobuf messages)."""

    shard: str
    events: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Up:
    """The shard answers."""

    shard: str


@dataclass(frozen=True, slots=True)
class Down:
    """The shard does not answer, or refuses; `fatal` when trying again cannot help. `erased`: it
    says that the tenant was."""

    shard: str
    reason: str
    fatal: EntresolError | None = None
    erased: bool = False


Item = Spaces | Begin | End | Events | Up | Down


class Inbox:
    """A bounded queue from the feeds to the relay; `wake` is called after every put."""

    def __init__(self, wake: Callable[[], None], items_max: int = INBOX_ITEMS_MAX) -> None:
        self._wake = wake
        self._items: deque[Item] = deque()
        self._items_max = items_max
        self._room = threading.Condition()
        self._closed = False

    def put(self, item: Item) -> bool:
        """Hand over, waiting for room; False when nobody reads any more."""
        with self._room:
            while len(self._items) >= self._items_max and not self._closed:
                self._room.wait(PUT_WAIT_S)
            if self._closed:
                return False
            self._items.append(item)
        self._wake()
        return True

    def take(self) -> list[Item]:
        """All that is there."""
        with self._room:
            items = list(self._items)
            self._items.clear()
            self._room.notify_all()
        return items

    def close(self) -> None:
        """Nobody reads any more; whoever waits goes on."""
        with self._room:
            self._closed = True
            self._items.clear()
            self._room.notify_all()


class _Stopped(Exception):
    """The relay is closing."""


class ShardFeed(threading.Thread):
    """Follows one shard. `configuration` is read at every connection: a dev daemon's ports move."""

    def __init__(self, shard: str, configuration: Callable[[], ClientConfig], inbox: Inbox) -> None:
        super().__init__(name=f"relay-{shard}", daemon=True)
        self.shard = shard
        self._configuration = configuration
        self._inbox = inbox
        self._place: tuple[int, int] | None = None  # incarnation, last number seen
        self._due = True  # a snapshot is; until one can be had, what is followed goes on
        self._known: set[bytes] = set()  # namespace ids that were told
        self._stopping = threading.Event()
        self._again = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._grpc, self._pb, self._stubs = rpc.modules()

    def again(self) -> None:
        """Take a snapshot as soon as possible (any thread)."""
        self._again.set()
        self._cancel()

    def stop(self) -> None:
        """End the thread soon (any thread); join it."""
        self._stopping.set()
        self._cancel()

    def _cancel(self) -> None:
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def run(self) -> None:
        """The thread."""
        backoff_s = BACKOFF_S_MIN
        while not self._stopping.is_set():
            try:
                began_s = time.monotonic()
                self._connection()
                if time.monotonic() - began_s > BACKOFF_S_MAX:
                    backoff_s = BACKOFF_S_MIN
                self._stopping.wait(BACKOFF_S_MIN)
                continue
            except _Stopped:
                return
            except EntresolError as error:
                fatal = error if _is_fatal(error) else None
                erased = error.status is Status.ERASED
                self._put(Down(self.shard, Exception.__str__(error), fatal, erased))
            except Exception as error:
                log.error("event=relay_feed_failed shard=%s", self.shard, exc_info=error)
                self._put(Down(self.shard, f"{type(error).__name__}: {error}"))
            self._stopping.wait(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)

    def _put(self, item: Item) -> None:
        if not self._inbox.put(item):
            self._stopping.set()

    def _connection(self) -> None:
        """Follow over one connection until it ends. Raises: EntresolError, _Stopped."""
        config = self._configuration()
        shard = next((one for one in config.shards if one.name == self.shard), None)
        if shard is None:
            raise Unreachable(f"the configuration has no shard {self.shard} any more")
        with rpc.tenant_channel(config, shard) as channel:
            stub = self._stubs.EventsStub(channel)
            try:
                self._tell_spaces(stub)
                self._put(Up(self.shard))
                while not self._stopping.is_set():
                    if self._again.is_set():
                        self._again.clear()
                        self._due = True
                    busy = self._due and not self._snapshot(stub)
                    if self._due and not busy:
                        continue  # it was cut short
                    if self._place is None:
                        self._stopping.wait(SNAPSHOT_BUSY_S)
                    elif not self._watch(stub, SNAPSHOT_BUSY_S if busy else None):
                        return
            except self._grpc.RpcError as error:
                if self._stopping.is_set():
                    raise _Stopped from None
                if error.code() is self._grpc.StatusCode.CANCELLED and self._again.is_set():
                    return
                raise rpc.translate(error) from None

    def _stream(self, call: Any) -> Any:
        """The replies of a stream, which `again` and `stop` can end."""
        with self._lock:
            self._call = call
        try:
            if self._stopping.is_set() or self._again.is_set():
                return
            yield from call
        finally:
            with self._lock:
                self._call = None
            call.cancel()

    def _tell_spaces(self, stub: Any) -> None:
        request = self._pb.NamespacesRequest()
        reply = stub.Namespaces(request, timeout=rpc.CALL_DEADLINE_S)
        # Of what hosts sealed themselves no daemon can tell routers anything.
        told = (one for one in reply.namespaces if not one.host_sealed)
        found = tuple(namespace_info(self.shard, one) for one in told)
        self._known.update(one.namespace_id for one in found)
        self._put(Spaces(self.shard, found))

    def _hand_over(self, stub: Any, events: Sequence[Any]) -> None:
        """Events, and before them what their namespaces are."""
        if not events:
            return
        unknown = {one.namespace_id for one in events if one.namespace_id} - self._known
        if unknown:
            self._tell_spaces(stub)
            self._known.update(unknown)  # also one whose record does not open: asked for once
        self._put(Events(self.shard, events))

    def _snapshot(self, stub: Any) -> bool:
        """Hand over what is stored and what happens meanwhile; no more is due when it is complete.
        False when none can be had now, because others take theirs.

        What happens meanwhile is not left for the watch: of a large shard the snapshot may take
        longer than events are held, and so may the next one. An older daemon tells none of it.
        """
        place: tuple[int, int] | None = None
        complete = False
        try:
            for reply in self._stream(stub.Snapshot(self._pb.SnapshotRequest(follow=True))):
                if reply.HasField("position"):
                    place, self._place = (reply.position.incarnation, reply.position.seq), None
                    self._put(Begin(self.shard))
                self._hand_over(stub, reply.events)
                seen = max((event.seq for event in reply.events), default=0)  # 0: listed only
                if place is not None and seen:
                    place = (place[0], seen)
                complete = complete or reply.complete
        except self._grpc.RpcError as error:
            if rpc.translate(error).status is not Status.BUSY:
                raise
            if place is None:
                return False
            self._stopping.wait(SNAPSHOT_BUSY_S)  # it was cut short
        finally:
            if place is not None:
                self._put(End(self.shard, complete))
        if complete and place is not None:
            self._place, self._due = place, False
        return True

    def _watch(self, stub: Any, seconds_max: float | None) -> bool:
        """Follow from the position; True when to go on with a snapshot, False to reconnect."""
        assert self._place is not None
        request = self._pb.WatchRequest()
        request.after.incarnation, request.after.seq = self._place
        try:
            for reply in self._stream(stub.Watch(request, timeout=seconds_max)):
                if reply.HasField("gap"):
                    self._place, self._due = None, True
                    return True
                if reply.events:
                    self._hand_over(stub, reply.events)
                    self._place = (reply.incarnation, reply.events[-1].seq)
        except self._grpc.RpcError as error:
            if seconds_max is None or error.code() is not self._grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return self._due or self._again.is_set()


def _is_fatal(error: EntresolError) -> bool:
    """What a person must repair: wrong files, or a daemon that refuses this tenant."""
    if isinstance(error, Unreachable):
        return False
    return error.status in (Status.FORBIDDEN, Status.BAD_REQUEST, Status.UNSUPPORTED)


def namespace_info(shard: str, message: Any) -> NamespaceInfo:
    """A namespace as the daemon tells it (a protobuf message)."""
    return NamespaceInfo(
        shard=shard,
        namespace_id=message.namespace_id,
        layout=tuple(getattr(message, name) for name in MATCH_FIELDS),
        lora=message.lora,
        salted=message.salted,
        tp_rank=message.tp_rank,
        pp_rank=message.pp_rank,
        blocks=message.blocks,
    )
