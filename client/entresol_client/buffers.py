"""Callers' memory as plain byte views: numpy, bytearray, memoryview, CPU tensors, raw addresses.

Invariant: a view covers exactly the caller's bytes, without a copy, and keeps their owner alive
(raw addresses excepted: their owner is the caller). What cannot be viewed that way is refused at
once with a `UsageError`, before anything is sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import operator
import sys
from collections.abc import Iterator, Sequence
from ctypes import addressof
from typing import Any

import numpy as np

from entresol_proto import limits
from entresol_proto.status import EntresolError, Status

log = logging.getLogger("entresol.client")

_Byte = ctypes.c_char
_CONTIGUOUS = "pass C-contiguous memory"
_OBJECTS = frozenset({"O", "<O", ">O"})  # formats of pointers, which mean nothing elsewhere


class UsageError(EntresolError):
    """The caller broke the API: wrong key, buffer or argument. Never raised for an outage."""

    status = Status.BAD_REQUEST


def as_view(buffer: Any, *, writable: bool) -> memoryview:
    """A one-dimensional `memoryview` of unsigned bytes over the caller's memory. No copy.

    Takes anything with the buffer protocol, numpy arrays of any dtype, CPU tensors (by their
    `data_ptr()`, without importing torch) and `(address, length_bytes)` pairs. The memory must stay
    alive and unmoved until the call that uses it has returned.

    Raises: UsageError for non-contiguous, read-only (when `writable`), empty, oversized or
        unsupported buffers, and for tensors that are not on the CPU or have no memory.
    """
    view = view_of(buffer)
    if writable and view.readonly:
        raise UsageError("the buffer is read-only", hint="pass memory that can be written")
    if not limits.BLOCK_BYTES_MIN <= view.nbytes <= limits.BLOCK_BYTES_MAX:
        raise UsageError(
            f"the buffer has {view.nbytes} bytes",
            hint=f"blocks are {limits.BLOCK_BYTES_MIN} to {limits.BLOCK_BYTES_MAX} bytes",
        )
    return view


def view_of(buffer: Any) -> memoryview:
    """As `as_view`, of any length, writable or not. Raises: UsageError."""
    if isinstance(buffer, tuple):
        return _from_address(buffer)
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError):
        if isinstance(buffer, np.ndarray):
            # Dtypes such as bfloat16 do not export the buffer protocol; their bytes do.
            if not buffer.flags.c_contiguous:
                raise UsageError("the buffer is not contiguous", hint=_CONTIGUOUS) from None
            return _bytes_of(buffer.reshape(-1).view(np.uint8))
        if hasattr(buffer, "data_ptr"):
            return _from_tensor(buffer)
        raise UsageError(
            f"{type(buffer).__name__} is not a buffer",
            hint="pass a numpy array, bytearray, memoryview, CPU tensor or (address, length)",
        ) from None
    if view.format != "B" and (view.format in _OBJECTS or _has_objects(view.obj)):
        raise UsageError(
            "the buffer holds Python objects: its bytes are pointers",
            hint="give the array a dtype of numbers, such as np.uint8",
        )
    if not view.c_contiguous:
        raise UsageError("the buffer is not contiguous", hint=_CONTIGUOUS)
    if view.nbytes == 0:
        return memoryview(bytearray())
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _has_objects(owner: object) -> bool:
    return isinstance(owner, np.ndarray) and owner.dtype.hasobject


def _from_tensor(tensor: Any) -> memoryview:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise UsageError(
            f"the tensor is on {device!r}", hint="pass a CPU tensor; copy to the device afterwards"
        )
    if not tensor.is_contiguous():
        raise UsageError("the tensor is not contiguous", hint=_CONTIGUOUS)
    length_bytes = tensor.numel() * tensor.element_size()
    address = int(tensor.data_ptr())
    if address == 0 and length_bytes:  # numpy would give memory of its own
        raise UsageError("the tensor has no memory", hint="its storage was resized away")
    return _at(address, length_bytes, owner=tensor)


def _from_address(pair: tuple[Any, ...]) -> memoryview:
    if len(pair) != 2 or not all(type(part) is int for part in pair):
        raise UsageError("a raw buffer is (address, length_bytes), both int")
    address, length_bytes = pair
    if address <= 0 or length_bytes < 0 or address + length_bytes > sys.maxsize:
        raise UsageError(f"a raw buffer cannot be at {address} with {length_bytes} bytes")
    return _at(address, length_bytes, owner=None)


def _at(address: int, length_bytes: int, owner: object) -> memoryview:
    if length_bytes == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * length_bytes).from_address(address)
    memory._owner = owner  # the view keeps `memory` alive, and `memory` its owner
    return _bytes_of(np.frombuffer(memory, dtype=np.uint8))


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array)


def check_apart(views: Sequence[memoryview]) -> None:
    """Raises: UsageError where two of these (writable) share memory: each would be told to hold its
    block, and one of them would not."""
    if len(views) < 2:
        return
    begins = [addressof(_Byte.from_buffer(view)) for view in views]
    order = sorted(begins)
    if min(map(operator.sub, order[1:], order)) >= max(map(len, views)):
        return  # as a rule: of one length, or far apart
    end = 0
    for begin, length in sorted(zip(begins, map(len, views), strict=True)):
        if begin < end:
            raise UsageError("two buffers share memory", hint="give each block memory of its own")
        end = begin + length


@contextlib.contextmanager
def lent(views: list[memoryview]) -> Iterator[None]:
    """A call uses these. Once it is over its caller may resize, unmap or free the memory, whatever
    still has the views: an error that is kept, a cycle that waits for the garbage collector."""
    try:
        yield
    finally:
        for view in views:
            try:
                view.release()
            except BufferError:  # somebody is still at it, against our contract
                log.error("event=memory_in_use where=call")


def copy(source: memoryview, into: memoryview) -> None:
    """Copy between views of equal length; releases the GIL, which slice assignment does not."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
