"""One rail of a session: its protection domain, queue pair and completions, on one device port.

Invariants:
- Work requests complete in the order they were posted, so one signaled completion answers for all
  before it; what is on the wire is `posted`, oldest first.
- After `destroy` the device touches no memory on behalf of this rail, and every posted work was
  handed back to its owner.
- At most VERBS_READS_POSTED_MAX reads with VERBS_WINDOW_BYTES are on the wire, and on a slow one
  about as many bytes as it moves in VERBS_WINDOW_NS: whoever gives up waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from entresol_proto import limits
from entresol_proto.fabric.verbs_api import Completion, Completions, Device, Domain
from entresol_proto.fabric.verbs_device import Port, path_mtu
from entresol_proto.fabric.verbs_memory import Bounce
from entresol_proto.fabric.verbs_queue import (
    READS_PER_POST_MAX,
    RECV_FLAG,
    QueuePair,
    ReadRequest,
    Receive,
    Route,
)
from entresol_proto.fabric.verbs_status import WR_FLUSH_ERR, name_of, status_of
from entresol_proto.fabric.verbs_wire import Rail
from entresol_proto.status import FabricError, Status

_log = logging.getLogger("entresol.fabric")

_POLL_ENTRIES = 32
_POLLS_PER_TURN = 8  # then other work of the loop gets its turn
_SENDS = limits.VERBS_MESSAGES_IN_FLIGHT_MAX + 8  # messages on the wire, those about credit too
OTHERS_MAX = 32  # memory windows being bound; their binder keeps to it
RECEIVES = limits.VERBS_MESSAGES_IN_FLIGHT_MAX + 4
SEND_SLOTS = _SENDS


class Work(Protocol):
    """Something on the wire."""

    length_bytes: int

    def over(self, link: RailLink, status: Status) -> None:
        """It is done, one way or the other; the device no longer touches its memory."""
        ...


class Read(Work, ReadRequest, Protocol):
    """A read that has its local memory."""


class Owner(Protocol):
    """The endpoint, as its rails see it."""

    def received(self, link: RailLink, slot: int, length_bytes: int) -> None: ...
    def rail_failed(self, link: RailLink, status: Status, reason: str) -> None: ...
    def turn_ended(self) -> None:
        """Completions were handled: there may be room for more."""
        ...


def next_window(window_bytes: int, took_ns: int) -> int:
    """The window after a read that took so long from its posting: doubled when that was short,
    halved when it was long."""
    if took_ns > limits.VERBS_WINDOW_NS:
        return max(limits.VERBS_WINDOW_BYTES_MIN, window_bytes // 2)
    if took_ns < limits.VERBS_WINDOW_NS // 3:
        return min(limits.VERBS_WINDOW_BYTES, window_bytes * 2)
    return window_bytes


class RailLink:
    """See the module. Made in INIT; `connect` makes it usable, `watch` puts it on the loop."""

    def __init__(self, device: Device, port: Port, number: int, mtu_bytes: int | None) -> None:
        """Takes over one use of `device`. Raises: FabricError; nothing is left then."""
        self.number = number
        self.port = port
        self.posted: deque[tuple[int, Work]] = deque()
        self.window_bytes = limits.VERBS_WINDOW_BYTES_START
        self._chains: deque[tuple[int, int]] = deque()  # last number of each, when it was posted
        self.reads_posted = 0
        self.bytes_posted = 0
        self.destroyed = False
        self._device = device
        self._mtu_setting = mtu_bytes
        self._psn = secrets.randbits(24)
        self._sequence = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: Owner | None = None
        self._bounce: Bounce | None = None
        self._spare_receive: Receive | None = None
        self._closers = [device.release]
        try:
            state = device.port_state(port.port)
            path_mtu(state.mtu_bytes, state.mtu_bytes, mtu_bytes)
            self._mtu_bytes = state.mtu_bytes
            self.domain = Domain(device)
            self._closers.append(self.domain.close)
            entries = limits.VERBS_READS_POSTED_MAX + _SENDS + OTHERS_MAX + RECEIVES + 8
            self._completions = Completions(device, entries)
            self._closers.append(self._completions.close)
            self.queue_pair = QueuePair(
                device, self.domain, self._completions,
                sends=limits.VERBS_READS_POSTED_MAX + _SENDS + OTHERS_MAX, receives=RECEIVES,
            )  # fmt: skip
            self._closers.append(self.queue_pair.close)
            self.queue_pair.initialize(port.port)
        except BaseException:
            for closer in reversed(self._closers):
                closer()
            raise
        found = device.limits
        self._rd_atomic = max(1, min(limits.VERBS_RD_ATOMIC_MAX, found.rd_atomic_initiator,
                                     found.rd_atomic_responder))  # fmt: skip

    @property
    def local(self) -> Rail:
        """What the peer must know to connect."""
        return Rail(
            self.number, self.port.infiniband, self._mtu_bytes, self._rd_atomic, self.port.lid,
            self.queue_pair.number, self._psn, self.port.gid.raw,
        )  # fmt: skip

    def connect(self, peer: Rail) -> None:
        """Join the peer's queue pair. Raises: FabricError."""
        if peer.infiniband != self.port.infiniband:
            raise FabricError("InfiniBand and RoCE do not meet", status=Status.BAD_REQUEST)
        if not peer.infiniband and (peer.ipv4 is None) != (self.port.gid.ipv4 is None):
            # It would be looked for in the call below, and could not be asked for ahead of it.
            raise FabricError(
                f"a rail to {peer.gid_text} from {self.port.label}: IPv4 and IPv6 do not meet",
                hint="give both ends an address of one family on this network",
                status=Status.BAD_REQUEST,
            )
        route = Route(
            port=self.port.port,
            gid_index=self.port.gid.index,
            infiniband=peer.infiniband,
            peer_gid=peer.gid_text,
            peer_lid=peer.lid,
            peer_qpn=peer.qpn,
            peer_psn=peer.psn,
            mtu_bytes=path_mtu(self._mtu_bytes, peer.mtu_bytes, self._mtu_setting),
            rd_atomic=min(self._rd_atomic, peer.rd_atomic),
        )
        self.queue_pair.connect(route, self._psn)

    def watch(self, owner: Owner, *, spare_receive: bool) -> None:
        """Begin to handle completions. `spare_receive` posts one receive that no message meets: its
        flush tells that the peer broke the connection."""
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._completions.fd, self._readable)
        if spare_receive:
            self._spare_receive = Receive(RECEIVES, 0, 0, 0)
            self.queue_pair.post_receive(self._spare_receive)

    # -- posting ------------------------------------------------------------------------------

    def has_room(self, length_bytes: int) -> bool:
        """Whether one more read of this length may go on the wire."""
        return self.reads_posted < limits.VERBS_READS_POSTED_MAX and (
            not self.reads_posted or self.bytes_posted + length_bytes <= self.window_bytes
        )

    def reserve(self, length_bytes: int) -> None:
        """Count a read that `post_reads` will be given in this turn."""
        self.reads_posted += 1
        self.bytes_posted += length_bytes

    def read_over(self, length_bytes: int) -> None:
        """Uncount a read; called by its `over`."""
        self.reads_posted -= 1
        self.bytes_posted -= length_bytes

    def post_reads(self, reads: Sequence[Read]) -> None:
        """Post reserved reads as chains, few of them signaled.

        Raises: FabricError; the rail is then unusable, and `destroy` hands all of them back.
        """
        signals: list[bool] = []
        first = self._sequence + 1
        quiet = count = 0  # bytes and reads since the last signaled one
        for work in reads:
            self._sequence += 1
            self.posted.append((self._sequence, work))
            quiet += work.length_bytes
            count += 1
            signaled = (
                quiet >= limits.VERBS_SIGNALED_BYTES or count >= limits.VERBS_READS_SIGNALED_EVERY
            )
            if signaled:
                quiet = count = 0
            signals.append(signaled)
        if reads:
            signals[-1] = True
            self._chains.append((self._sequence, time.monotonic_ns()))
        for at in range(0, len(reads), READS_PER_POST_MAX):
            end = at + READS_PER_POST_MAX
            self.queue_pair.post_reads(first + at, reads[at:end], signals[at:end])

    def post_send(self, work: Work, address: int, lkey: int) -> None:
        """Send `work.length_bytes` from registered memory. Raises: FabricError."""
        self._sequence += 1
        self.posted.append((self._sequence, work))
        self.queue_pair.post_send(self._sequence, address, lkey, work.length_bytes)

    def post_other(self, work: Work, request: Any) -> None:
        """Post a signaled pyverbs work request of another kind (memory windows).

        Raises: FabricError.
        """
        self._sequence += 1
        request.wr_id = self._sequence
        self.posted.append((self._sequence, work))
        self.queue_pair.post(request)

    def bounce(self) -> Bounce:
        """The bounce buffer, made at first use. Raises: FabricError."""
        if self._bounce is None:
            self._bounce = Bounce(self.domain)
        return self._bounce

    # -- completing ---------------------------------------------------------------------------

    def _readable(self) -> None:
        if self.destroyed:
            return
        try:
            self._completions.rearm()
        except FabricError as error:  # the device is gone
            self._failed(Status.DISCONNECTED, str(error))
        self.drain()

    def _failed(self, status: Status, reason: str) -> None:
        if self._owner is not None and not self.destroyed:
            self._owner.rail_failed(self, status, reason)

    def drain(self) -> None:
        """Handle what has completed; what comes later makes the channel readable."""
        for _ in range(_POLLS_PER_TURN):
            if self.destroyed:
                return
            try:
                found = self._completions.poll(_POLL_ENTRIES)
            except FabricError as error:
                self._failed(Status.DISCONNECTED, str(error))
                return
            self._handle(found)
            if len(found) < _POLL_ENTRIES:
                break
        else:
            assert self._loop is not None
            self._loop.call_soon(self.drain)
        if self._owner is not None and not self.destroyed:
            self._owner.turn_ended()

    def _handle(self, found: Sequence[Completion]) -> None:
        failure = 0
        for completion in found:
            if self.destroyed:
                return
            if completion.status:
                if failure in (0, WR_FLUSH_ERR):
                    failure = completion.status
                if not completion.number & RECV_FLAG:
                    self._sent_until(completion.number, status_of(completion.status))
            elif completion.number & RECV_FLAG:
                assert self._owner is not None
                slot = completion.number & ~RECV_FLAG
                self._owner.received(self, slot, completion.length_bytes)
            else:
                self._sent_until(completion.number, Status.OK)
        if failure:
            self._failed(status_of(failure), name_of(failure))

    def _sent_until(self, number: int, last: Status) -> None:
        """All up to `number` are done. A failed one leaves those before it done well, as their own
        failure would have come first; flushed ones prove nothing."""
        before = last if last is Status.DISCONNECTED else Status.OK
        while self._chains and self._chains[0][0] <= number:
            _, posted_ns = self._chains.popleft()
            took_ns = time.monotonic_ns() - posted_ns
            self.window_bytes = next_window(self.window_bytes, took_ns)
        while self.posted and self.posted[0][0] <= number:
            sequence, work = self.posted.popleft()
            work.over(self, last if sequence == number else before)

    # -- ending -------------------------------------------------------------------------------

    def destroy(self, status: Status) -> None:
        """Destroy the queue pair, then hand back everything that was on the wire. Idempotent.

        Raises: FabricError when the device neither destroys nor resets it, and nothing is handed
        back; else the first error of an owner, after all of them had theirs.
        """
        if self.destroyed:
            return
        self.destroyed = True
        if self._loop is not None:
            self._loop.remove_reader(self._completions.fd)
        self._closers.remove(self.queue_pair.close)
        self.queue_pair.close()
        posted, self.posted = self.posted, deque()
        problem: Exception | None = None
        for _, work in posted:
            try:
                work.over(self, status)
            except Exception as error:  # the others wait for their memory
                problem = problem or error
        if problem is not None:
            raise problem

    def release(self) -> None:
        """Free the rest. All memory registered in its domain is deregistered already. Once."""
        assert self.destroyed
        if self._spare_receive is not None:
            self._closers.append(self._spare_receive.close)
        if self._bounce is not None:
            self._closers.append(self._bounce.close)
        while self._closers:
            try:
                self._closers.pop()()
            except Exception as error:  # of pyverbs, for a device that went; the rest must go, too
                _log.error("event=not_freed port=%s error=%s", self.port.label, error)
