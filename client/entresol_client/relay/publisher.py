"""The sockets: one publisher and one replay service per worker, as vLLM has them.

Invariants:
- publishing never waits: a reader that does not keep up loses messages, sees it by their numbers,
  and can ask for what the bounded buffer still holds;
- who asks for replays and reads none takes no memory: payloads in queues are those of the buffer;
- numbers of one endpoint only grow, also over restarts of the relay: they begin at the time of the
  start in microseconds. A reader that saw higher ones would drop all that is new.

Used from one thread. Sockets are XPUB, which any SUB reads: that way a new reader is noticed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from entresol_client.cli.errors import CliError
from entresol_client.relay.wire import (
    BATCH_BYTES_MAX,
    END_OF_REPLAY,
    FRAME_SEQ_BYTES,
    seq_frame,
    topic,
)
from entresol_client.relay.workers import Worker
from entresol_proto.status import Status

PACKAGE_HINT = "pip install 'entresol[relay]'"
BUFFER_BATCHES_DEFAULT = 10_000
BUFFER_BYTES_MAX = 256 * 1024 * 1024
# Per reader; beyond it messages to that reader are dropped. ZeroMQ counts messages, not bytes.
SEND_QUEUE_BYTES_MAX = 512 * 1024 * 1024
SEND_QUEUE_MESSAGES_MAX = SEND_QUEUE_BYTES_MAX // BATCH_BYTES_MAX
REQUESTS_PER_TURN_MAX = 16
NS_PER_US = 1_000


def zmq_module() -> Any:
    """pyzmq. Raises: CliError naming the package to install."""
    try:
        import zmq
    except ImportError as error:
        raise CliError(
            f"this command needs ZeroMQ, which is not installed ({error.name or error})",
            hint=PACKAGE_HINT,
            status=Status.UNSUPPORTED,
        ) from None
    return zmq


def first_seq(unix_ns: int) -> int:
    """The first number of a relay that starts now."""
    return unix_ns // NS_PER_US


@dataclass
class Outlet:
    """One worker's sockets and what was sent on them.

    Attributes:
        next_seq: number of the next message.
        started_at: number of the first message of this relay.
        buffer: (number, payload), oldest first: what a replay can give. A payload is a frame of
            ZeroMQ, which is one in memory for all readers whose queues it is in.
    """

    worker: Worker
    topic: bytes
    pub: Any
    router: Any
    next_seq: int
    started_at: int
    buffer: deque[tuple[int, Any]] = field(default_factory=deque)
    buffer_bytes: int = 0
    readers: int = 0  # subscriptions now


@dataclass(frozen=True, slots=True)
class News:
    """What happened on the sockets: who came, and who needs more than the buffer holds."""

    joined: tuple[Outlet, ...] = ()
    behind: tuple[Outlet, ...] = ()


class Publisher:
    """All workers' outlets. Close it."""

    def __init__(
        self,
        workers: list[Worker],
        model: str,
        *,
        start_seq: int,
        replay_topic: bool = True,
        buffer_batches: int = BUFFER_BATCHES_DEFAULT,
    ) -> None:
        """`model` is the name in the topics. Raises: CliError when a place is taken."""
        self._zmq = zmq_module()
        self._replay_topic = replay_topic
        self._buffer_batches = buffer_batches
        self._buffer_bytes_max = BUFFER_BYTES_MAX // len(workers)
        self._context = self._zmq.Context()
        self.counts: Counter[str] = Counter()
        self.outlets: list[Outlet] = []
        try:
            for worker in workers:
                self.outlets.append(self._open(worker, model, start_seq))
        except BaseException:
            self.close()
            raise

    def _open(self, worker: Worker, model: str, start_seq: int) -> Outlet:
        zmq = self._zmq
        pub = self._context.socket(zmq.XPUB)
        pub.set_hwm(SEND_QUEUE_MESSAGES_MAX)
        pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._attach(pub, worker.endpoint, connect=worker.connect)
        router = None
        if worker.replay:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reader that is gone is an error, told
            # ZeroMQ counts what a reader took in steps of half of this: room for two whole replays.
            router.set_hwm(3 * (self._buffer_batches + 2))
            self._attach(router, worker.replay, connect=False)
        return Outlet(worker, topic(worker.pod, model), pub, router, start_seq, start_seq)

    def _attach(self, socket: Any, place: str, *, connect: bool) -> None:
        socket.setsockopt(self._zmq.LINGER, 0)
        try:
            if connect:
                socket.connect(place)
            else:
                socket.bind(place)
        except self._zmq.ZMQError as error:
            socket.close()
            raise CliError(
                f"cannot use {place}: {error.strerror or error}",
                hint="another program may have it; give another endpoint",
                status=Status.CONFLICT,
            ) from None

    def register(self, register: Callable[[Any], object]) -> None:
        """Give every socket to a poller."""
        for outlet in self.outlets:
            register(outlet.pub)
            if outlet.router is not None:
                register(outlet.router)

    def endpoints(self, outlet: Outlet) -> tuple[str, str]:
        """Where an outlet really is: (publisher, replay or empty); port 0 was any free one."""
        last = self._zmq.LAST_ENDPOINT
        places = [outlet.pub, outlet.router]
        found = ["" if one is None else one.getsockopt_string(last) for one in places]
        return (outlet.worker.endpoint if outlet.worker.connect else found[0], found[1])

    def publish(self, encode: Callable[[int | None], bytes]) -> None:
        """Send one batch to all; `encode` gives the payload for a data-parallel rank."""
        payloads: dict[int | None, bytes] = {}
        for outlet in self.outlets:
            rank = outlet.worker.dp_rank
            if rank not in payloads:
                payloads[rank] = encode(rank)
            self._send(outlet, payloads[rank])

    def publish_to(self, outlet: Outlet, encode: Callable[[int | None], bytes]) -> None:
        """Send one batch to one worker's readers only."""
        self._send(outlet, encode(outlet.worker.dp_rank))

    def _send(self, outlet: Outlet, payload: bytes) -> None:
        seq = outlet.next_seq
        outlet.next_seq = seq + 1
        with memoryview(payload) as given:  # ended, it keeps no second copy in memory
            shared = self._zmq.Frame(given, copy=True)
        outlet.pub.send_multipart((outlet.topic, seq_frame(seq), shared), copy=True)
        self.counts["messages"] += 1
        outlet.buffer.append((seq, shared))
        outlet.buffer_bytes += len(payload)
        while (
            len(outlet.buffer) > self._buffer_batches
            or outlet.buffer_bytes > self._buffer_bytes_max
        ):
            outlet.buffer_bytes -= len(outlet.buffer.popleft()[1])

    def serve(self) -> News:
        """Take what waits on the sockets: subscriptions and replay requests. Never waits."""
        joined: list[Outlet] = []
        behind: list[Outlet] = []
        for outlet in self.outlets:
            if self._take_subscriptions(outlet):
                joined.append(outlet)
            if outlet.router is not None and self._take_requests(outlet):
                behind.append(outlet)
        return News(tuple(joined), tuple(behind))

    def _take_subscriptions(self, outlet: Outlet) -> bool:
        """True when somebody subscribed to something that this topic is part of."""
        came = False
        while True:
            try:
                frame = outlet.pub.recv(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return came
            if frame[:1] not in (b"\x00", b"\x01") or not outlet.topic.startswith(frame[1:]):
                continue
            if frame[0]:
                outlet.readers += 1
                self.counts["subscriptions"] += 1
                came = True
            else:
                outlet.readers = max(0, outlet.readers - 1)

    def _take_requests(self, outlet: Outlet) -> bool:
        """True when a reader asked for messages of this relay that are not held any more."""
        behind = False
        for _ in range(REQUESTS_PER_TURN_MAX):
            try:
                frames = outlet.router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            if len(frames) != 3 or frames[1] or len(frames[2]) != FRAME_SEQ_BYTES:
                self.counts["replay_refused"] += 1
                continue
            asked = int.from_bytes(frames[2], "big")
            oldest = outlet.buffer[0][0] if outlet.buffer else outlet.next_seq
            behind |= asked < oldest and outlet.started_at < oldest
            self._replay(outlet, frames[0], asked)
        return behind

    def _replay(self, outlet: Outlet, reader: bytes, asked: int) -> None:
        head = (outlet.topic,) if self._replay_topic else ()
        tail = (b"",) if self._replay_topic else ()
        try:
            for seq, payload in outlet.buffer:
                if seq >= asked:
                    frames = (reader, b"", *head, seq_frame(seq), payload)
                    outlet.router.send_multipart(frames, self._zmq.NOBLOCK)
                    self.counts["replayed_messages"] += 1
            frames = (reader, b"", *tail, END_OF_REPLAY, b"")
            outlet.router.send_multipart(frames, self._zmq.NOBLOCK)
            self.counts["replays"] += 1
        except self._zmq.ZMQError:  # it is gone, or asks faster than it reads
            self.counts["replay_refused"] += 1

    def state(self) -> list[Mapping[str, Any]]:
        """For the status line: a row per worker."""
        rows: list[Mapping[str, Any]] = []
        for outlet in self.outlets:
            place, replay = self.endpoints(outlet)
            rows.append(
                {
                    "pod": outlet.worker.pod,
                    "topic": outlet.topic.decode(),
                    "endpoint": place,
                    "replay": replay or None,
                    "readers": outlet.readers,
                    "next_seq": outlet.next_seq,
                    "buffered": len(outlet.buffer),
                }
            )
        return rows

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for outlet in self.outlets:
            outlet.pub.close()
            if outlet.router is not None:
                outlet.router.close()
        self.outlets = []
        self._context.destroy(linger=0)
