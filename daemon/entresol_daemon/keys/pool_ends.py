"""The ends of the interpreter's pools, where a copy of a secret outlives all else in a pool.

CPython keeps small objects of one size in a pool (Objects/obmalloc.c, 3.10 to 3.13). What is left
behind the last whole one, less than a size, is given to nobody: there lies what was there when the
pool was of another size, for as long as the pool is in use. A full pool gives nothing new either,
by which it could be found; but an object in it that the collector knows tells where it is, and
between two pools of one arena there are only others of it.

Invariant: only such ends are written to. A pool that an object of ours lives in stays what it is
while we have that; others are looked at and cleared in one call of the native kernel, in which no
other thread runs. Without it, they are left.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import struct
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import cast

from entresol_proto import native

POOL_BYTES = 16 * 1024  # of objects of one size; aligned to as much
POOL_HEAD_BYTES = 48
ARENA_POOLS = 64
SMALL_BYTES_MAX = 512  # objects up to here come from pools, in steps of 16
SMALL_STEP_BYTES = 16
OBJECTS_AT_ONCE = 4_000  # of the collector's, looked at in a step: a quarter of a microsecond each
POOLS_AT_ONCE = 512  # looked at in a step: one to two microseconds each
PROVEN_BY = 4_096  # objects, of which some must have filled a pool
_HEADS_BYTES_MAX = 32  # before an object, of which `sys.getsizeof` tells only the collector's
# Whatever its size, an object of these comes from the interpreter's own allocator.
_IN_POOLS: tuple[type, ...] = (tuple, list, dict, set, FunctionType, MethodType, CellType)
_POOL = struct.Struct("=32xIIII")  # pool_header, behind its pointers
_libc = ctypes.PyDLL(None)  # it keeps the interpreter's lock
_memset = _libc.memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = ctypes.c_void_p
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def clear() -> Iterator[None]:
    """Zeros into the ends of the pools that can be found, in steps; nothing where the interpreter
    keeps its objects in another way. What was taken from the collector (`gc.freeze`) is not found:
    clear before that."""
    if not _are_known():
        return
    found = yield from _pools()
    arenas: dict[int, list[int]] = {}  # the pools of each
    for at, number in enumerate(found):
        arenas.setdefault(_head(number)[0], []).append(number)
        if at % POOLS_AT_ONCE == 0:
            yield
    for numbers in arenas.values():
        low, high = min(numbers), max(numbers)
        if native.KERNEL is not None and high - low < ARENA_POOLS:
            native.KERNEL.clear_pool_ends(low * POOL_BYTES, high - low + 1)
        else:
            for number in numbers:
                _clear_end(number)
        yield


def clear_those_of(size_bytes: int, taken: Iterable[Iterable[object]]) -> None:
    """Zeros into the ends of the pools that these objects are in, all of one size, some of which
    have filled a pool; they live until this returns."""
    if (POOL_BYTES - POOL_HEAD_BYTES) % size_bytes <= SMALL_STEP_BYTES or not _are_known():
        return  # nothing of a secret is that short
    for number in {id(one) // POOL_BYTES for some in taken for one in some}:
        if _size_of(number) == size_bytes:
            _clear_end(number)


def _pools() -> Generator[None, None, dict[int, object]]:
    """The pools, by number, of what the collector knows, and an object in each, which keeps it."""
    objects = gc.get_objects()
    yield
    known = dict.fromkeys(_IN_POOLS, True)
    found: dict[int, object] = {}
    while objects:
        some = objects[-OBJECTS_AT_ONCE:]
        del objects[-OBJECTS_AT_ONCE:]  # not kept longer than they are looked at
        for one in _in_pools(some, known):
            number = id(one) // POOL_BYTES
            # Where the interpreter got no arena, it took memory elsewhere.
            if number not in found and _size_of(number):
                found[number] = one
        del some
        yield
    return found


@functools.cache
def _are_known() -> bool:
    """Whether objects are in pools, and their heads are as we know them: some objects of ours must
    have filled a pool from end to end."""
    if sys.implementation.name != "cpython" or not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return False
    size = SMALL_BYTES_MAX
    whole = (POOL_BYTES - POOL_HEAD_BYTES) // size
    ours = [bytes(size - bytes.__basicsize__) for _ in range(PROVEN_BY)]
    for number, count in Counter([id(one) // POOL_BYTES for one in ours]).items():
        if count == whole:
            return _size_of(number) == size
    return False


def _in_pools(objects: Sequence[object], known: dict[type, bool]) -> Iterator[object]:
    """Those objects that come from the interpreter's allocator; `known` are types so far."""
    size_of = sys.getsizeof
    for one in objects:
        kind = type(one)
        surely = known.get(kind)
        if surely is None:
            surely = known[kind] = all(map(_is_plain, kind.__mro__))
        if surely and size_of(one) <= SMALL_BYTES_MAX - _HEADS_BYTES_MAX:
            yield one


def _is_plain(kind: type) -> bool:
    """Whether a class is written in Python: its objects come from the interpreter's allocator, as
    those of a type of an extension need not."""
    if kind is object:
        return True
    has = vars(kind)
    return "__slots__" in has or any(type(each) is FunctionType for each in has.values())


def _head(number: int) -> tuple[int, int, int, int]:
    """Of a pool: its arena, class of sizes, how far it was given out, and how far it can be."""
    raw = ctypes.string_at(number * POOL_BYTES, _POOL.size)
    return cast(tuple[int, int, int, int], _POOL.unpack(raw))


def _size_of(number: int) -> int:
    """Of the objects in a pool; 0 where its head makes no sense, or there is none."""
    if _madvise(number * POOL_BYTES, mmap.PAGESIZE, mmap.MADV_NORMAL):
        return 0  # no memory of this process: to ask for what is so already tells that
    _, index, _, last = _head(number)
    size = (index + 1) * SMALL_STEP_BYTES
    return size if size <= SMALL_BYTES_MAX and last == POOL_BYTES - size else 0


def _clear_end(number: int) -> None:
    if size := _size_of(number):
        end = POOL_HEAD_BYTES + (POOL_BYTES - POOL_HEAD_BYTES) // size * size
        _memset(number * POOL_BYTES + end, 0, POOL_BYTES - end)
