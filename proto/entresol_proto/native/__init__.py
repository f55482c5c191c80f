"""The native kernel, where the package was built with a C compiler, and its Python twins.

Invariant: with and without the kernel the same bytes come out; only the speed differs. A kernel of
another version, or one that does not load, counts as none. `ENTRESOL_NATIVE=0` turns it off.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from entresol_proto.native.reads import Look, Reads, Taken, Wanted
from entresol_proto.native.writes import Writes, Writing, Written

__all__ = [
    "KERNEL", "Kernel", "Look", "Reads", "Received", "Receiving", "Taken", "Wanted", "Writing",
    "Written", "blake2b_many", "copy",
]  # fmt: skip

_log = logging.getLogger("entresol.native")

LIBRARY = Path(__file__).with_name("_kernel.so")
SOURCE = Path(__file__).with_name("kernel.c")
KERNEL_VERSION = 10  # of `entresol_kernel_version`
# Shorter batches may be read again soon, from the caches that a streamed copy passes by.
STREAM_BYTES_MIN = 2 * 1024 * 1024

BLAKE2B_INPUT_BYTES_MAX = 128

Bytes = npt.NDArray[np.uint8]


LADDER_PROBLEMS = {0: "", 1: "an unknown head", 2: "cut short, or too long", 3: "impossible counts"}


class Received(enum.IntEnum):
    """How `Kernel.receive` ended; below 0 it is an errno, negated."""

    DONE = 0  # the span is complete
    OTHER = 1  # another message begins; its header is in `header`
    STOPPED = 2  # `stop` was set
    ENDED = 3  # by the peer


class Receiving(ctypes.Structure):
    """How far the receiving of one span is: `struct receiving` of kernel.c."""

    _fields_ = (
        ("into", ctypes.c_void_p),
        ("length_bytes", ctypes.c_uint64),
        ("received_bytes", ctypes.c_uint64),
        ("piece_bytes", ctypes.c_uint64),
        ("header_bytes", ctypes.c_uint64),
        ("request", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("stop", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("header", ctypes.c_uint8 * 64),
    )


_TwoPlaces, _TwoSizes = ctypes.c_void_p * 2, ctypes.c_size_t * 2


class Kernel:
    """The loaded library. Calls release the interpreter lock."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError if it does not load, ValueError if it is of another version."""
        self._library = library = ctypes.CDLL(str(path))
        try:
            version = library.entresol_kernel_version()
        except AttributeError:
            version = None
        if version != KERNEL_VERSION:
            raise ValueError(f"kernel of version {version}, {KERNEL_VERSION} is needed")
        self._stream_copy = library.entresol_stream_copy
        self._stream_copy.argtypes = (
            ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip
        self._stream_copy.restype = None
        self._receive = library.entresol_receive
        self._receive.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(Receiving))
        self._receive.restype = ctypes.c_int32
        self._blake2b_many = library.entresol_blake2b_many
        self._blake2b_many.argtypes = (
            ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t,
            ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p,
        )  # fmt: skip
        self._blake2b_many.restype = None
        self._ladder_encode = library.entresol_ladder_encode
        self._ladder_encode.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
        )  # fmt: skip
        self._ladder_encode.restype = ctypes.c_size_t
        self._ladder_pays = library.entresol_ladder_pays
        self._ladder_pays.argtypes = (
            ctypes.c_void_p * 2, ctypes.c_size_t * 2, ctypes.c_int, ctypes.c_int,
        )  # fmt: skip
        self._ladder_pays.restype = ctypes.c_int32
        self._ladder_decode = library.entresol_ladder_decode
        self._ladder_decode.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
        )  # fmt: skip
        self._ladder_decode.restype = ctypes.c_int32
        self.write = Writes(library).write
        self._holding_the_lock = ctypes.PyDLL(str(path))
        self._clear_pool_ends = self._holding_the_lock.entresol_clear_pool_ends
        self._clear_pool_ends.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._clear_pool_ends.restype = None
        self.portable = False  # plain C also where there is something faster: for tests

    def blake2b_many(
        self, inputs: bytes, count: int, *, digest_bytes: int, key: bytes, person: bytes
    ) -> bytes:
        """See `blake2b_many`; `inputs` are `count` of one length, end to end."""
        length_bytes, rest = divmod(len(inputs), count)
        assert rest == 0, "inputs are of one length"
        assert 1 <= length_bytes <= BLAKE2B_INPUT_BYTES_MAX, "an input is one block at most"
        assert 1 <= len(key) <= 64, "BLAKE2b's keys have 1 to 64 bytes"
        assert len(person) == 16, "BLAKE2b's personalisation has 16 bytes"
        assert 1 <= digest_bytes <= 64, "BLAKE2b's digests have 1 to 64 bytes"
        out = ctypes.create_string_buffer(count * digest_bytes)
        self._blake2b_many(key, len(key), person, digest_bytes, count, inputs, length_bytes, out)
        return out.raw

    def copy(self, into: Sequence[memoryview], sources: Sequence[Bytes]) -> None:
        """See `copy`."""
        count = len(into)
        addresses = ctypes.c_void_p * count
        targets = [ctypes.c_char.from_buffer(view) for view in into]  # they hold the memory
        self._stream_copy(
            count,
            addresses(*map(ctypes.addressof, targets)),
            addresses(*[source.__array_interface__["data"][0] for source in sources]),
            (ctypes.c_size_t * count)(*map(len, sources)),
        )

    def receive(self, fd: int, wake_fd: int, state: Receiving) -> int:
        """Receive the DATA messages of one span of a tcp data stream, blocking; see `Received`.

        `fd` is a non-blocking socket nobody else reads from. `state.into` has `length_bytes` of
        memory that outlives the call. To stop it from another thread, set `state.stop`, then make
        `wake_fd` readable. Its twin is `fabric.framing.FrameReader`.
        """
        return int(self._receive(fd, wake_fd, ctypes.byref(state)))

    def ladder_encode(
        self, plain: memoryview, kind: int, by_channel: bool, bytes_max: int
    ) -> memoryview | None:
        """See `seal.codecs.ladder_twin.encode`; the result is memory of its own."""
        out = np.empty(bytes_max, np.uint8).data
        if not bytes_max:
            return None
        made = self._ladder_encode(
            _address(plain), len(plain), kind, by_channel, _address(out), bytes_max, self.portable
        )
        return out[:made] if made else None

    def ladder_pays(self, first: memoryview, last: memoryview, kind: int, by_channel: bool) -> bool:
        """Whether one of two chunks may be worth encoding, by a look at a little of each."""
        places = _TwoPlaces(_address(first), _address(last))
        sizes = _TwoSizes(len(first), len(last))
        return bool(self._ladder_pays(places, sizes, kind, by_channel))

    def ladder_decode(self, stored: memoryview, kind: int, into: memoryview) -> str:
        """See `seal.codecs.ladder_twin.decode_into`; "" or what is wrong with the chunk."""
        if into.readonly:
            raise TypeError("the destination is read-only")
        found = self._ladder_decode(
            _address(stored), len(stored), kind, _address(into), len(into), self.portable
        )
        return LADDER_PROBLEMS[found]

    def clear_pool_ends(self, address: int, count: int) -> None:
        """Zeros behind the last objects of so many of the interpreter's pools, all of one arena,
        from this address on; see pools.h. The interpreter's lock is kept. Without the kernel
        `entresol_daemon.keys.pool_ends` clears those that it holds an object in."""
        self._clear_pool_ends(address, count)

    def reads(self, fd: int, at_once: int) -> Reads:
        """What threads read of `fd`, at most so many pieces at a time; it stays the caller's, and
        open until `Reads.free`. Raises: MemoryError."""
        return Reads(self._library, self._holding_the_lock, fd, at_once)


class _Buffer(ctypes.Structure):
    """`Py_buffer`, which is part of Python's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def _address(view: memoryview) -> int:
    """Where contiguous bytes are; they must outlive the use of it.

    0.5 us for writable memory and 1.2 for other, where numpy takes 3.4: a chunk is coded in 25.
    """
    if not len(view):
        return 0
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    buffer = _Buffer()
    place = ctypes.addressof(buffer)
    _get_buffer(view, place, 0)  # raises BufferError unless contiguous
    found: int = buffer.buf
    _release_buffer(place)
    return found


def _load() -> Kernel | None:
    if os.environ.get("ENTRESOL_NATIVE") == "0" or not LIBRARY.exists():
        return None
    try:
        return Kernel(LIBRARY)
    except (OSError, ValueError) as error:
        _log.warning("event=kernel_refused reason=%s", error)
        return None


KERNEL = _load()


def copy(into: Sequence[memoryview], sources: Sequence[Bytes]) -> None:
    """Copy each source into the view of the same number.

    Views are writable, contiguous bytes, as long as their source, and overlap none. They may be
    used again on return. A batch of `STREAM_BYTES_MIN` and more goes past the caches.
    """
    if KERNEL is not None and sum(map(len, sources)) >= STREAM_BYTES_MIN:
        KERNEL.copy(into, sources)
        return
    for view, source in zip(into, sources, strict=True):
        np.copyto(np.frombuffer(view, np.uint8), source)


def blake2b_many(
    inputs: bytes, count: int, *, digest_bytes: int, key: bytes, person: bytes
) -> bytes:
    """Keyed BLAKE2b (RFC 7693) of `count` inputs of one length (1 to 128 bytes), given end to end.

    Returns the digests end to end. `person` has up to 16 bytes, as hashlib takes it.
    """
    if count == 0:
        return b""
    if KERNEL is not None:
        padded = person.ljust(16, b"\0")
        return KERNEL.blake2b_many(inputs, count, digest_bytes=digest_bytes, key=key, person=padded)
    length = len(inputs) // count
    keyed = hashlib.blake2b(digest_size=digest_bytes, key=key, person=person)
    digests = []
    for start in range(0, len(inputs), length):
        one = keyed.copy()
        one.update(inputs[start : start + length])
        digests.append(one.digest())
    return b"".join(digests)
