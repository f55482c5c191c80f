"""Reads of a device that no thread waits for the interpreter's lock to begin.

The loop hands runs to the queue of the native kernel. Threads wait in there, and read what comes in
its order; only what was read is looked at in Python. So the drive has work while the loop goes on
planning, and while several threads want the lock. `runs.Reads.work` is the twin, without a kernel.

Invariant: a run is owed to its batch until a thread brought it, or until it was dropped; a batch
ends when it is owed nothing, and then no thread touches its buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Sequence
from itertools import count

from entresol_daemon.flash.runs import Reads, Run
from entresol_proto.native import Kernel, Taken
from entresol_proto.threads import Outside, Pool


class _Batch:
    """The runs of one call."""

    def __init__(self, reads: Reads, job: Outside, owed: int) -> None:
        self.reads = reads
        self.numbers: list[int] = []  # of runs that were asked for
        self._job: Outside | None = job
        self._owed = owed
        self._error: BaseException | None = None  # the first one
        self._lock = threading.Lock()

    def less(self, runs: int = 1, error: BaseException | None = None) -> None:
        """So many runs have come, or will not."""
        with self._lock:
            self._owed -= runs
            self._error, error = self._error or error, None
            if self._owed:
                return
            error, self._error = self._error, None
            job, self._job = self._job, None  # it has the error, whose frames have this batch
        assert job is not None
        job.end(error)


class ReadQueue:
    """Reads of one descriptor by all threads of a pool, in the order of `submit`."""

    def __init__(self, kernel: Kernel, fd: int, at_once: int, pool: Pool, threads: int) -> None:
        """At most so many runs are in service. All `threads` of the pool are taken, which is closed
        with this; the descriptor stays the caller's. Raises: MemoryError."""
        self._native = kernel.reads(fd, at_once)
        self._pool = pool
        self._numbers = count()
        self._under_way: dict[int, tuple[_Batch, Run]] = {}
        for _ in range(threads):
            pool.post(self._serve)

    def submit(self, reads: Reads, runs: Sequence[Run]) -> Awaitable[None]:
        """Have these runs read, and given to `reads.came`. On a loop.

        Ends as `Job.outcome`: cancelled, it waits for what is being read, and the rest is not.
        """
        job = self._pool.expect()
        batch = _Batch(reads, job, len(runs))
        asked = 0
        try:
            for run in runs:
                number = next(self._numbers)
                self._under_way[number] = batch, run
                try:
                    self._native.add(number, run.offset_bytes, run.views)
                except BaseException:
                    del self._under_way[number]
                    raise
                batch.numbers.append(number)
                asked += 1
        except BaseException as error:  # no memory; what was asked for may be read already
            self._give_up(batch)
            batch.less(len(runs) - asked, error)
        return job.outcome(lambda: self._give_up(batch))

    def close(self) -> None:
        """What was asked for is read, and then there are no threads any more. Once."""
        self._native.close()
        self._pool.close()
        self._native.free()

    def _give_up(self, batch: _Batch) -> None:
        """What no thread has begun is not read. From any thread."""
        for number in batch.numbers:
            if self._native.drop(number):
                del self._under_way[number]
                batch.less()

    def _serve(self) -> None:
        """In a thread: one run after the other, until the queue is closed."""
        taken = Taken()
        while self._native.next(taken):
            batch, run = self._under_way.pop(taken.number)
            try:
                batch.reads.came(run, taken.got_bytes)
            except BaseException as error:
                self._give_up(batch)
                # Without this frame, which has the batch.
                batch.less(1, error.with_traceback(getattr(error.__traceback__, "tb_next", None)))
            else:
                batch.less()
            del batch, run  # and with them the buffers
