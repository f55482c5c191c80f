"""Pools of threads that are all there from the start.

The library's pool starts a thread when work is handed over. Where that fails (no memory, a limit on
processes) it raises after it queued the work, which another thread may still do: into a buffer that
its owner believes to be his own again.

Invariant: handing work to a pool made here never starts a thread, so that it raises only when the
pool is closed, and nothing of what raised is ever run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from entresol_proto.status import EntresolError, Status

START_SECONDS_MAX = 30.0


def started_pool(threads: int, name: str, *, nice: int = 0) -> ThreadPoolExecutor:
    """A pool of so many running threads. Raises: EntresolError (BUSY) when they cannot be had.

    `nice`: how far they give way to the other threads of the process where processors are short
    (Linux has a priority per thread); left as it is where a sandbox forbids to change it.
    """
    pool = ThreadPoolExecutor(threads, name, _give_way, (nice,))
    # Each waits until all are there, so that none is given two of these.
    gate = threading.Barrier(threads + 1)
    waits = []
    try:
        for _ in range(threads):
            waits.append(pool.submit(gate.wait, START_SECONDS_MAX))
        gate.wait(START_SECONDS_MAX)
    except (RuntimeError, MemoryError) as error:  # BrokenBarrierError is one
        gate.abort()
        pool.shutdown(wait=True, cancel_futures=True)
        for wait in waits:
            if not wait.cancelled():
                wait.exception()  # the broken barrier
        raise EntresolError(
            f"cannot start {threads} threads: {error or 'no time'}",
            hint="raise the limits on memory and processes, or configure fewer threads",
            status=Status.BUSY,
        ) from None
    return pool


def _give_way(nice: int) -> None:
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
