"""Messages between the two endpoints of a session, in slots of registered memory.

Invariant: never more than VERBS_MESSAGES_IN_FLIGHT_MAX messages are sent that the peer has not
taken, and as many receives are always posted, so that the device never finds none (RNR). TAKEN
messages are outside that count and have receives of their own: a side sends one per half window. A
peer that sends more of either is cut off.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable

from entresol_proto import limits
from entresol_proto.fabric.verbs_api import ACCESS_LOCAL_WRITE
from entresol_proto.fabric.verbs_memory import address_of
from entresol_proto.fabric.verbs_queue import Receive
from entresol_proto.fabric.verbs_rail import RECEIVES, SEND_SLOTS, RailLink
from entresol_proto.fabric.verbs_wire import MESSAGE_BYTES, Kind, Message
from entresol_proto.status import FabricError, ProtocolError, Status

_TELL_EVERY = limits.VERBS_MESSAGES_IN_FLIGHT_MAX // 2
_COUNT = 2**32


class _Sent:
    """A message on the wire."""

    __slots__ = ("_done", "_free", "_slot", "length_bytes")

    def __init__(self, free: list[int], slot: int, done: Callable[[], None] | None) -> None:
        self.length_bytes = MESSAGE_BYTES
        self._free = free
        self._slot = slot
        self._done = done

    def over(self, link: RailLink, status: Status) -> None:
        """See `verbs_rail.Work`."""
        self._free.append(self._slot)
        if self._done is not None:
            self._done()


class Messenger:
    """Sends and takes messages over one rail. Made while the queue pair is in INIT."""

    def __init__(self, link: RailLink, rails: int) -> None:
        """Raises: FabricError."""
        self.rails = rails
        self.open = False  # whether the peer is known to be there
        self._link = link
        self._map = mmap.mmap(-1, (RECEIVES + SEND_SLOTS) * MESSAGE_BYTES,
                              mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # fmt: skip
        self._view = memoryview(self._map)
        self._address = address_of(self._view)
        self._memory = link.domain.register(self._address, len(self._view), ACCESS_LOCAL_WRITE)
        self._receives = [
            Receive(slot, self._address + slot * MESSAGE_BYTES, self._memory.lkey, MESSAGE_BYTES)
            for slot in range(RECEIVES)
        ]
        self._free = list(range(RECEIVES, RECEIVES + SEND_SLOTS))
        self._queue: deque[tuple[Message, Callable[[], None] | None]] = deque()
        self._sent = self._acknowledged = 0
        self._taken = self._told = 0
        for receive in self._receives:
            link.queue_pair.post_receive(receive)

    def send(self, message: Message, done: Callable[[], None] | None = None) -> None:
        """Send now or when there is room; `done` is called once the peer's device has it, or the
        rail has failed. Raises: FabricError when too many wait or the rail does not take it."""
        if len(self._queue) >= limits.VERBS_MESSAGES_QUEUED_MAX:
            raise FabricError("the peer takes no messages", status=Status.DISCONNECTED)
        self._queue.append((message, done))
        self.flush()

    def start(self) -> None:
        """The peer is there: what waits may go. Raises: FabricError."""
        self.open = True
        self.flush()

    def flush(self) -> None:
        """Send what the peer has room for. Raises: FabricError."""
        while self._queue and self.open and self._free and not self._link.destroyed:
            if self._sent - self._acknowledged >= limits.VERBS_MESSAGES_IN_FLIGHT_MAX:
                return
            message, done = self._queue.popleft()
            self._sent += 1
            self._post(message, done)

    def _post(self, message: Message, done: Callable[[], None] | None) -> None:
        slot = self._free.pop()
        at = slot * MESSAGE_BYTES
        self._told = self._taken
        self._view[at : at + MESSAGE_BYTES] = message.encode(self._taken)
        work = _Sent(self._free, slot, done)
        self._link.post_send(work, self._address + at, self._memory.lkey)

    def take(self, slot: int, length_bytes: int) -> Message | None:
        """The message that landed in a slot, which is posted again; None for bookkeeping.

        Raises: ProtocolError, FabricError.
        """
        if slot >= RECEIVES or length_bytes != MESSAGE_BYTES:
            raise ProtocolError(f"verbs message of {length_bytes} bytes")
        at = slot * MESSAGE_BYTES
        message, taken = Message.parse(bytes(self._view[at : at + MESSAGE_BYTES]), self.rails)
        outstanding = (self._sent - taken) % _COUNT
        if outstanding > self._sent - self._acknowledged:
            raise ProtocolError("the peer took messages that were not sent")
        news = self._sent - outstanding - self._acknowledged
        self._acknowledged += news
        if message.kind is Kind.TAKEN and not news:  # a side says so once per half window
            raise ProtocolError("a count of messages that tells nothing new")
        if message.kind is not Kind.TAKEN:
            self._taken += 1
            if self._taken - self._told > limits.VERBS_MESSAGES_IN_FLIGHT_MAX:
                raise ProtocolError("the peer sends more messages than it may")
        self._link.queue_pair.post_receive(self._receives[slot])
        if self._taken - self._told >= _TELL_EVERY and self._free and self.open:
            self._post(Message(Kind.TAKEN), None)
        self.flush()
        return None if message.kind is Kind.TAKEN else message

    def close(self) -> None:
        """Release the memory; the queue pair is gone."""
        self._queue.clear()
        for receive in self._receives:
            receive.close()
        with contextlib.suppress(FabricError):  # of a device that went
            self._memory.close()
        self._view.release()
        self._map.close()
