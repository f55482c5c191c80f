"""Overwriting memory that was freed: what held a copy of a secret must not keep it.

Keys are wiped where they are held (`seal.wiping`); a frame on its way to a host, or an argument in
a call, is a copy that is freed without that. `sweep` takes the freed memory of this process once,
fills it with zeros and gives it back: small objects size by size, as the interpreter keeps them,
and larger ones from large to small, as the C library does.

Invariant: at most SWEEP_BYTES_MAX are held at a time, and each step is short enough for an event
loop. It is a best effort: stacks, registers and what other threads freed are not reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat, starmap
from typing import cast

from entresol_daemon.keys import pool_ends
from entresol_daemon.keys.pool_ends import (
    POOL_BYTES,
    POOL_HEAD_BYTES,
    SMALL_BYTES_MAX,
    SMALL_STEP_BYTES,
)

SWEEP_BYTES_MAX = 64 * 1024 * 1024  # held at a time
BATCH_BYTES = 1024 * 1024  # about a millisecond, and more than Linux is wrong by about a size
NEW_BATCHES = 2  # in a row by which the process grew: what was free is taken
BLIND_BYTES = 8 * 1024 * 1024  # taken of each size where the process cannot see its own size
FREE_POOL_BYTES = 480  # objects of this size leave the last 16 bytes of a pool only
CACHED_BYTES_MAX = 1040  # glibc keeps freed pieces up to here aside, by their exact size
CACHED_COUNT = 64  # per size; it keeps 7 unless it was tuned
LARGE_BYTES = (64 * 1024, 16 * 1024, 4096, 2048, 1024, 640)
ALONE_S = 0.1  # a step ends long before another thread makes it give way
_OBJECT_BYTES = bytes.__basicsize__
_M_PERTURB, _M_ARENA_MAX = -6, -8  # malloc.h of glibc


log = logging.getLogger("entresol.keys")


def clear_on_free() -> None:
    """Make the C library overwrite what it is given back, from now on: frames that carried keys,
    buffers of compressed blocks. Objects of the interpreter's own pools are not its business.

    M_PERTURB of mallopt(3), glibc. Pieces up to CACHED_BYTES_MAX that it keeps for the next caller
    are not overwritten; `sweep` takes those. Threads that begin later share one arena: what one
    frees is then in reach of another's sweep, and what is free can be given back to the system,
    which the library does not do with the ends of threads' own arenas.
    """
    try:
        libc = ctypes.CDLL(None)
        done = libc.mallopt(_M_PERTURB, 0xFF)  # to zeros when new, to 0xFF when freed
        libc.mallopt(_M_ARENA_MAX, 1)
    except AttributeError:
        done = 0
    if not done:
        log.warning("event=freed_memory_kept hint='this C library cannot clear it'")


def sweep() -> Iterator[None]:
    """Take and zero free memory; run it to its end, with other work between the steps.

    The interpreter keeps objects of a size in pools of their own. What is free in a pool that is in
    use is taken by objects of its size, however small: a pool that held larger objects keeps what
    was in them where the few small ones it was given to have not come to lie. Pools that are free
    as a whole are taken before and after, since they come into use and go out of it meanwhile. The
    end of a pool, behind its last object, is reached by none: `pool_ends` clears those.

    What was taken is given back to the system at the end: the process is not left larger for it.
    Small objects are held within one step only, in which no other thread runs. What others were
    given meanwhile would lie in new memory and keep it: the interpreter gives back nothing smaller
    than its arenas.
    """
    _trim()
    yield
    with _statm() as statm, _patient() as usual_s:
        until = time.monotonic() + usual_s
        while time.monotonic() < until:  # who waits already asks as soon as it would have before
            yield
        yield from _sweep(statm)
    _trim()


def _sweep(statm: int) -> Iterator[None]:
    _take(FREE_POOL_BYTES, SWEEP_BYTES_MAX, statm)
    yield
    yield from pool_ends.clear()  # before the rest: what it keeps meanwhile is freed then
    for size in range(SMALL_STEP_BYTES, SMALL_BYTES_MAX + 1, SMALL_STEP_BYTES):
        _take_from_used_pools(size, statm)
        yield
    _take(FREE_POOL_BYTES, SWEEP_BYTES_MAX, statm)
    yield
    held: list[list[object]] = []  # freed again, they would be the next one's
    for size in range(SMALL_BYTES_MAX + 8, CACHED_BYTES_MAX + 1, 16):
        held.append(_objects(size, CACHED_COUNT))
    yield
    for size in LARGE_BYTES:
        held += _take(size, SWEEP_BYTES_MAX // len(LARGE_BYTES), statm)
        yield


def _trim() -> None:
    """Give whole pages of freed memory back to the system."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _objects(size_bytes: int, count: int) -> list[object]:
    """New objects of one size, each of them written whole."""
    if size_bytes == 16:
        return list(starmap(object, repeat((), count)))
    if size_bytes == 32:
        return list(range(2**30, 2**30 + count))  # of two digits each, as the interpreter has them
    length = size_bytes - _OBJECT_BYTES
    return [b"\0" * length for _ in range(count)]


class _Patience:
    """How long a thread waits for the interpreter before it makes the one that has it let go."""

    def __init__(self) -> None:
        self._sweeps = 0  # under way
        self._usual_s = 0.0

    def begin(self) -> float:
        """A sweep begins. What it is else."""
        if not self._sweeps:
            self._usual_s = sys.getswitchinterval()
            sys.setswitchinterval(ALONE_S)
        self._sweeps += 1
        return self._usual_s

    def end(self) -> None:
        """It is over."""
        self._sweeps -= 1
        if not self._sweeps:
            sys.setswitchinterval(self._usual_s)


_patience = _Patience()


@contextlib.contextmanager
def _patient() -> Iterator[float]:
    """Who begins to wait for the interpreter does so for longer than a step takes. Nothing in a
    step may give the interpreter up: who has it then would keep it for as long."""
    usual_s = _patience.begin()
    try:
        yield usual_s
    finally:
        _patience.end()


def _take_from_used_pools(size_bytes: int, statm: int) -> None:
    """Objects of one size, until some fill a pool from end to end: it was free as a whole, and such
    a pool is not begun while one in use has room. By the growth of the process where none does."""
    whole = (POOL_BYTES - POOL_HEAD_BYTES) // size_bytes
    batch_max = BATCH_BYTES // size_bytes
    count = min(3 * whole, batch_max)
    taken: list[list[object]] = []
    seen = 0
    while seen * size_bytes < BLIND_BYTES:
        taken.append(_objects(size_bytes, count))
        pools = Counter([id(one) // POOL_BYTES for one in taken[-1][-3 * whole :]])
        if whole in pools.values():
            # Also pools in which there is nothing that the collector knows.
            pool_ends.clear_those_of(size_bytes, taken)
            return
        seen += count
        count = min(2 * count, batch_max)
    taken += _take(size_bytes, SWEEP_BYTES_MAX - seen * size_bytes, statm)


def _take(size_bytes: int, bytes_max: int, statm: int) -> list[list[object]]:
    """Objects of one size, until they come from memory that is new to the process."""
    count = max(1, BATCH_BYTES // size_bytes)
    taken: list[list[object]] = []
    new = seen = 0
    while seen < bytes_max:
        before = _resident_bytes(statm)
        taken.append(_objects(size_bytes, count))
        seen += count * size_bytes
        new = new + 1 if _resident_bytes(statm) - before > BATCH_BYTES // 2 else 0
        if new == NEW_BATCHES or (not before and seen > BLIND_BYTES):
            break
    return taken


@contextlib.contextmanager
def _statm() -> Iterator[int]:
    """Where this process may read its own size; -1 when it may not know."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        fd = -1
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _resident_bytes(statm: int) -> int:
    """Memory this process has, or 0 when it may not know. The interpreter is not given up for it,
    as by `os.pread`: between two batches every other thread would have a turn."""
    found = ctypes.create_string_buffer(128)
    length = _pread(statm, found, len(found) - 1, 0) if statm >= 0 else 0
    return int(found.value.split()[1]) * mmap.PAGESIZE if length > 0 else 0


def _find_pread() -> Callable[[int, ctypes.Array[ctypes.c_char], int, int], int]:
    call = ctypes.PyDLL(None).pread
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64)
    call.restype = ctypes.c_ssize_t
    return cast("Callable[[int, ctypes.Array[ctypes.c_char], int, int], int]", call)


_pread = _find_pread()
