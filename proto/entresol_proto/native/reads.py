"""Pieces of a file that are read in the order they were asked for, by the threads that are in
`next`: the queue of reads.h.

What is asked for, and what has ended, is said in batches. A thread comes back only with a piece
that is not known to be good.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import functools
import struct
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

HEAD_BYTES = 96  # of a record: RECORD_HEAD_BYTES of record.h
NO_HEAD = bytes(HEAD_BYTES)
_WANTED = struct.Struct("=QII")  # struct wanted
_PART = struct.Struct("=QQ96s")  # struct wanted_part


class Look(enum.IntEnum):
    """When a piece is good, that was read in full: `enum look` of reads.h."""

    ELSEWHERE = 0  # whoever is in `next` says so
    NO_FURTHER = 1  # at once
    FOR_RECORDS = 2  # when each part is the record whose head was given


def out_of_memory(call: Callable[P, R]) -> Callable[P, R]:
    """Raises MemoryError where there is none for an argument: ctypes says so in its own way, before
    the call. Nothing is done after a call that was made, where there may be no memory for it."""

    @functools.wraps(call)
    def told(*args: P.args, **named: P.kwargs) -> R:
        try:
            return call(*args, **named)
        except ctypes.ArgumentError as error:
            if "MemoryError" in str(error):
                raise MemoryError from None
            raise

    return told


class Taken(ctypes.Structure):
    """What `Reads.next` came back with: `struct taken` of reads.h. `got_bytes` is as of preadv(2),
    perhaps fewer than were asked for, or an errno, negated; `number` is the piece's in its batch,
    from 0; `batch` is for `settle`."""

    _fields_ = (
        ("batch", ctypes.c_void_p),
        ("batch_number", ctypes.c_uint64),
        ("got_bytes", ctypes.c_int64),
        ("number", ctypes.c_uint64),
    )


class Wanted:
    """What one call of `Reads.add` asks for."""

    __slots__ = ("packed", "pieces")

    def __init__(self) -> None:
        self.pieces = 0
        self.packed = bytearray()

    def add(
        self,
        offset_bytes: int,
        views: Sequence[memoryview],
        look: Look,
        heads: Sequence[bytes] = (),
    ) -> None:
        """One piece more: the bytes from there on, into writable views, at most IOV_MAX, whose
        owner keeps them until the batch has ended. `heads` are of records, one for each view."""
        self.packed += _WANTED.pack(offset_bytes, len(views), look)
        first = ctypes.c_char.from_buffer  # of what can be written to; it raises TypeError
        for number, view in enumerate(views):
            head = heads[number] if heads else NO_HEAD
            self.packed += _PART.pack(ctypes.addressof(first(view)), view.nbytes, head)
        self.pieces += 1


class Reads:
    """See the module, and reads.h. Made by `Kernel.reads`."""

    def __init__(
        self, library: ctypes.CDLL, holding_the_lock: ctypes.PyDLL, fd: int, at_once: int
    ) -> None:
        self._next = library.entresol_reads_next
        self._next.argtypes = (ctypes.c_void_p, ctypes.POINTER(Taken))
        self._next.restype = ctypes.c_int32
        # So short that to give the interpreter's lock up, and to get it again, would take longer.
        short = holding_the_lock
        self._add = short.entresol_reads_add
        self._add.argtypes = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t,
            ctypes.c_int32, ctypes.c_uint32, ctypes.c_char_p,
        )  # fmt: skip
        self._add.restype = ctypes.c_int32
        self._drop, self._settle = short.entresol_reads_drop, short.entresol_reads_settle
        self._drop.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self._settle.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._ended = short.entresol_reads_ended
        self._ended.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))
        self._ended.restype = ctypes.c_int32
        self._forget = short.entresol_reads_forget
        self._close, self._free = short.entresol_reads_close, short.entresol_reads_free
        for each in (self._forget, self._close, self._free):
            each.argtypes = (ctypes.c_void_p,)
        for each in (self._drop, self._settle, self._forget, self._close, self._free):
            each.restype = None
        opened = short.entresol_reads_open
        opened.argtypes, opened.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_void_p
        self._found = ctypes.c_uint64()
        self._place = opened(fd, at_once)
        if not self._place:
            raise MemoryError

    @out_of_memory
    def add(
        self, number: int, wake_fd: int, wanted: Wanted, check_key: bytes = b"", *,
        payloads: bool = False,
    ) -> None:  # fmt: skip
        """Ask for a batch, of one piece at least. When all of it was found good, settled or
        dropped `ended` tells of it, and then `wake_fd` is written to: an eventfd, which its owner
        keeps until `free`. `check_key` is of the records, if there are any; `payloads` says
        whether they are hashed. Raises: MemoryError, or RuntimeError once this is closed; then
        nothing is asked for."""
        failed = self._add(
            self._place, number, wake_fd, check_key, len(check_key), payloads, wanted.pieces,
            bytes(wanted.packed),
        )  # fmt: skip
        if not failed:
            return
        if failed == -errno.ESHUTDOWN:
            raise RuntimeError("the queue of reads is closed")
        raise MemoryError

    @out_of_memory
    def next(self, taken: Taken) -> bool:
        """In a thread: read what there is, until a piece is not known to be good, and has to be
        settled. False: closed, and no more."""
        return bool(self._next(self._place, taken))

    @out_of_memory
    def settle(self, taken: Taken) -> None:
        """A piece that `next` came back with is done with."""
        self._settle(self._place, taken.batch)

    @out_of_memory
    def drop(self, number: int) -> None:
        """What no thread has begun of a batch is not read, then. From any thread."""
        if self._place is None:
            return
        self._drop(self._place, number)

    @out_of_memory
    def ended(self) -> int | None:
        """The first batch that has ended, until `forget`. For one thread at a time."""
        found = self._found
        if self._place is None:
            return None
        return found.value if self._ended(self._place, found) else None

    @out_of_memory
    def forget(self) -> None:
        """What `ended` tells is known."""
        self._forget(self._place)

    def close(self) -> None:
        """Whoever is in `next`, or comes, gets what is left, and then nothing."""
        self._close(self._place)

    def free(self) -> None:
        """After `close`, when no thread is in any call, nor will be."""
        place, self._place = self._place, None
        self._free(place)
