"""Runs that are written to a file and made durable in one call: writes.h."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from entresol_proto.native.reads import out_of_memory

_RUN = struct.Struct("=QQ")  # struct write_run
_PART = struct.Struct("=QQ")  # struct write_part


class Written(ctypes.Structure):
    """How it ended: `struct written` of writes.h. `failed` is an errno or 0, and `flushing` says
    whether that was the flush. With `stop` set, from any thread, no further run is begun, and
    `failed` is ECANCELED."""

    _fields_ = (
        ("write_ns", ctypes.c_uint64),
        ("flush_ns", ctypes.c_uint64),
        ("failed", ctypes.c_int32),
        ("flushing", ctypes.c_int32),
        ("stop", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class Writing:
    """What one call of `write` writes."""

    __slots__ = ("_packed", "_runs", "_views")

    def __init__(self) -> None:
        self._runs = 0
        self._packed = bytearray()
        self._views: list[memoryview] = []  # so long their memory is there

    def add(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """One run more: these views of whole blocks, writable ones, from there on. Their owner
        leaves them alone until the call has returned. Raises: TypeError, MemoryError."""
        self._packed += _RUN.pack(offset_bytes, len(views))
        first = ctypes.c_char.from_buffer
        for view in views:
            self._packed += _PART.pack(ctypes.addressof(first(view)), view.nbytes)
        self._views += views
        self._runs += 1

    @property
    def arguments(self) -> tuple[int, bytes]:
        """Runs, and what is told of them."""
        return self._runs, bytes(self._packed)


class Writes:
    """The call. Made by `Kernel`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._write = library.entresol_write
        self._write.argtypes = (
            ctypes.c_int, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int32,
            ctypes.POINTER(Written),
        )  # fmt: skip
        self._write.restype = None

    @out_of_memory
    def write(
        self, fd: int, writing: Writing, written: Written, *, block_bytes: int, flush: bool
    ) -> None:
        """In a thread: write all runs in their order, in full, then flush the file if that is
        wanted. A write that ends inside a block fails with EIO. Raises: MemoryError."""
        runs, packed = writing.arguments
        self._write(fd, runs, packed, block_bytes, flush, written)
