"""The control channel of the shm fabric: small messages and file descriptors over a Unix socket.

Invariant: one message is one packet (SOCK_SEQPACKET), of fixed size, with at most one descriptor;
anything else ends the link. There is room for all descriptors that a packet can have, because the
kernel drops the others here and now; each that arrives is either handed on or closed where that may
take its time (closing.py), and so is the socket. What the kernel cannot take at once waits in a
bounded queue with a duplicate of its descriptor.
"""

from __future__ import annotations

import array
import asyncio
import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from entresol_proto import limits
from entresol_proto.fabric.closing import CLOSER, close_socket
from entresol_proto.fabric.serving import ServingTurns, Turn
from entresol_proto.status import ProtocolError

VERSION = 1
MAGIC = 0x4D544E45  # "ENTM", little-endian
_MESSAGE = struct.Struct("<BBHIQ")  # type, status, zero, rkey, length
_PACKET_ANSWERS = 16  # what a packet takes of a turn of the loop, which all links share
_RECEIVE_BYTES = 64  # more than any packet: a longer one shows as cut
_FDS_BYTES = socket.CMSG_LEN(253 * array.array("i").itemsize)  # SCM_MAX_FD of Linux
_PAUSE_S = 0.01  # without receiving, while too much waits to be closed


class Kind(enum.IntEnum):
    """Wire numbers of the messages."""

    HELLO = 1
    WELCOME = 2
    EXPOSE = 3
    EXPOSED = 4
    REVOKE = 5
    REVOKED = 6


@dataclass(frozen=True, slots=True)
class Message:
    """`rkey` names a region; `length_bytes` and `fd` (owned by the receiver) come with EXPOSE."""

    kind: Kind
    rkey: int = 0
    status: int = 0
    length_bytes: int = 0
    fd: int = -1

    def encode(self) -> bytes:
        return _MESSAGE.pack(self.kind, self.status, 0, self.rkey, self.length_bytes)


def hello(ticket: bytes) -> bytes:
    """The first packet of a connecting side."""
    return _MESSAGE.pack(Kind.HELLO, VERSION, 0, MAGIC, len(ticket)) + ticket


def parse_hello(packet: bytes) -> bytes:
    """The ticket in a first packet. Raises: ProtocolError."""
    ticket = packet[_MESSAGE.size :]
    if len(ticket) != limits.TICKET_BYTES or packet != hello(ticket):
        raise ProtocolError("this is not an entresol shm peer")
    return ticket


def welcome() -> bytes:
    """The first packet of the accepting side."""
    return _MESSAGE.pack(Kind.WELCOME, VERSION, 0, MAGIC, 0)


def parse(packet: bytes, fds: list[int]) -> Message:
    """Decode a packet. The descriptors stay the caller's if it raises. Raises: ProtocolError."""
    if len(packet) != _MESSAGE.size:
        raise ProtocolError(f"shm message of {len(packet)} bytes")
    number, status, zero, rkey, length = _MESSAGE.unpack(packet)
    if zero or not Kind.EXPOSE <= number <= Kind.REVOKED:
        raise ProtocolError(f"shm message {number} is not allowed here")
    kind = Kind(number)
    if len(fds) != (1 if kind is Kind.EXPOSE else 0):
        raise ProtocolError(f"shm message {kind.name} with {len(fds)} descriptors")
    return Message(kind, rkey, status, length, fds[0] if fds else -1)


class ShmLink:
    """A connected, greeted socket on the loop. Owns the socket.

    `on_message` gets every message and owns its descriptor; it may raise ProtocolError. `on_lost`
    is called once, unless `close` came first, with None when the peer went away in order.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message], None],
        on_lost: Callable[[Exception | None], None],
        turns: ServingTurns,
        peer: Hashable = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._turns = turns
        self._peer = peer
        self._on_message = on_message
        self._on_lost = on_lost
        self._queue: deque[tuple[bytes, int]] = deque()
        self._open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def send(self, packet: bytes, fd: int = -1) -> None:
        """Send or queue one packet; `fd` is borrowed for the call. The link ends if it cannot."""
        if not self._open:
            return
        if not self._queue and self._try_send(packet, fd):
            return
        if len(self._queue) >= limits.SHM_MESSAGES_QUEUED_MAX:
            self._lose(ProtocolError("the peer does not receive its messages"))
        elif self._open:
            try:
                mine = os.dup(fd) if fd >= 0 else -1
            except OSError as error:
                self._lose(error)
                return
            if not self._queue:
                self._loop.add_writer(self._sock, self._writable)
            self._queue.append((packet, mine))

    def close(self) -> None:
        """Close the socket and drop what is queued. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        close_socket(self._sock)
        CLOSER.give(*(fd for _, fd in self._queue if fd >= 0))  # perhaps the last of its memory
        self._queue.clear()
        self._on_message = self._on_lost = _closed  # whose have this: no cycle is left behind

    def _lose(self, error: Exception | None) -> None:
        if self._open:
            on_lost = self._on_lost
            self.close()
            on_lost(error)

    def _try_send(self, packet: bytes, fd: int) -> bool:
        """False when the kernel has no room now. Ends the link on any other failure."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self._sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._lose(error)
        return True

    def _writable(self) -> None:
        while self._queue and self._open:
            packet, fd = self._queue[0]
            if not self._try_send(packet, fd):
                return
            if self._open:
                self._queue.popleft()
                if fd >= 0:
                    os.close(fd)
        if self._open:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        """Something has come. It is received in turn, and nobody looks until it is."""
        self._loop.remove_reader(self._sock)
        self._turns.enter(self, self._peer)

    def serve(self, turn: Turn) -> bool:
        """For the turns: handle what has come; whether there may be more."""
        try:
            while self._open and not turn.is_over:
                turn.answers -= _PACKET_ANSWERS
                if not self._receive_one():
                    return False
        except BaseException:  # of our own, such as no memory: what comes next is heard
            self._go_on()
            raise
        return self._open

    def _receive_one(self) -> bool:
        """Whether there may be more; else somebody looks again, or this is closed."""
        if CLOSER.crowded:
            self._pause()
            return False
        try:
            packet, fds, whole = _receive(self._sock)
        except (BlockingIOError, InterruptedError):
            self._go_on()
            return False
        except OSError as error:
            self._lose(error)
            return False
        if not packet and not fds:
            self._lose(None)
            return False
        try:
            if not whole:
                raise ProtocolError(
                    "an oversized shm message, or no file is left to open (ulimit -n)"
                )
            message = parse(packet, fds)
        except ProtocolError as error:
            CLOSER.give(*fds)
            self._lose(error)
            return False
        try:
            self._on_message(message)
        except ProtocolError as error:
            self._lose(error)
            return False
        return True

    def _pause(self) -> None:
        """What peers pass is not closed as fast as it comes: receive no more for a while."""
        if CLOSER.stuck:
            self._lose(ProtocolError("too much waits to be closed that peers passed"))
            return
        self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._open:
            self._loop.add_reader(self._sock, self._readable)


class Unanswered:
    """Exposures that were given up before the peer answered them.

    The descriptor of each, and so the memory, may lie unreceived in the socket, or in our queue for
    it, as long as the session lasts: of a peer that receives nothing there must not be many whose
    deadline has passed. `on_lost` is told then.
    """

    def __init__(self, on_lost: Callable[[Exception | None], None]) -> None:
        self._on_lost = on_lost
        self._late: dict[int, bool] = {}  # true: its deadline has passed

    def add(self, rkey: int, left_ns: int) -> None:
        """Nobody waits any more, and so long is left to the peer."""
        self._late[rkey] = False
        if left_ns:
            asyncio.get_running_loop().call_later(left_ns / 1e9, self._is_late, rkey)
        else:
            self._is_late(rkey)

    def answered(self, rkey: int) -> None:
        """The peer has received it."""
        self._late.pop(rkey, None)

    def clear(self) -> None:
        """The session has ended."""
        self._late.clear()

    def _is_late(self, rkey: int) -> None:
        if rkey not in self._late:
            return
        self._late[rkey] = True
        if sum(self._late.values()) > limits.SHM_UNANSWERED_MAX:
            self._on_lost(ProtocolError("the peer does not answer what is exposed to it"))


def _closed(_: object) -> None:
    """Nobody listens any more."""


async def first_packet(sock: socket.socket) -> bytes:
    """The first packet of a peer; empty if it came with descriptors or was cut. Raises: OSError."""
    loop = asyncio.get_running_loop()
    while True:
        if CLOSER.crowded:
            return b""  # nor would its descriptors find room
        try:
            packet, fds, whole = _receive(sock)
        except (BlockingIOError, InterruptedError):
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(sock, _note, ready)
            try:
                await ready
            finally:
                loop.remove_reader(sock)
            continue
        CLOSER.give(*fds)
        return packet if whole and not fds else b""


def _note(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _receive(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """One packet, its descriptors (close-on-exec), and whether neither was cut short."""
    packet, ancillary, flags, _ = sock.recvmsg(_RECEIVE_BYTES, _FDS_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return packet, list(fds), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
