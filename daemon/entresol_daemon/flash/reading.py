"""Reads of a device that no thread waits for the interpreter's lock to begin.

The loop hands runs to the queue of the native kernel. Threads wait in there, and read what comes in
its order; only what was read is looked at in Python. So the drive has work while the loop goes on
planning, and while several threads want the lock. `runs.Reads.work` is the twin, without a kernel.

Invariant: a run is owed to its batch until a thread brought it, or until it was dropped; a batch
ends when it is owed nothing, and then no thread touches its buffers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Awaitable, Sequence
from itertools import count

from entresol_daemon.flash.runs import Reads, Run
from entresol_proto.native import Kernel, Taken
from entresol_proto.threads import Outside, Pool

NO_MEMORY_S = 0.01  # until it is tried again


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

    def came(self, run: Run, got_bytes: int) -> BaseException | None:
        """In a thread: so much of a run was read. What went wrong, if it was not the device."""
        try:
            self.reads.came(run, got_bytes)
        except BaseException as error:
            # Without this frame, which has the batch.
            return error.with_traceback(getattr(error.__traceback__, "tb_next", None))
        return None


class ReadQueue:
    """Reads of one descriptor by all threads of a pool, in the order of `submit`."""

    def __init__(self, kernel: Kernel, fd: int, at_once: int, pool: Pool, threads: int) -> None:
        """At most so many runs are in service. All `threads` of the pool are taken, which is closed
        with this; the descriptor stays the caller's. Raises: MemoryError."""
        self._native = kernel.reads(fd, at_once)
        self._pool = pool
        self._numbers = count()
        self._under_way: dict[int, tuple[_Batch, Run]] = {}
        try:
            for _ in range(threads):
                pool.post(self._serve)
        except BaseException:
            self._native.close()  # those that came are let go
            raise

    def submit(self, reads: Reads, runs: Sequence[Run]) -> Awaitable[None]:
        """Have these runs read, and given to `reads.came`. On a loop.

        Ends as `Job.outcome`: cancelled, it waits for what is being read, and the rest is not.
        """
        job = self._pool.expect()
        batch = _Batch(reads, job, len(runs))
        try:
            for run in runs:
                self._ask(batch, run)
        except BaseException as error:  # no memory; what was asked for may be read already
            self._give_up(batch)
            batch.less(len(runs) - len(batch.numbers), error)
        return job.outcome(lambda: self._give_up(batch))

    def close(self) -> None:
        """What was asked for is read, and then there are no threads any more. Once."""
        self._native.close()
        self._pool.close()
        self._native.free()

    def _ask(self, batch: _Batch, run: Run) -> None:
        """Its number is among the batch's if it was asked for, and only then."""
        number = next(self._numbers)
        batch.numbers.append(number)
        try:
            self._under_way[number] = batch, run
            self._native.add(number, run.offset_bytes, run.views)
        except BaseException:
            batch.numbers.pop()
            self._under_way.pop(number, None)
            raise

    def _give_up(self, batch: _Batch) -> None:
        """What no thread has begun is not read, unless there is no memory to say so. From any
        thread."""
        with contextlib.suppress(MemoryError):
            for number in batch.numbers:
                if self._native.drop(number):
                    del self._under_way[number]
                    batch.less()

    def _serve(self) -> None:
        """In a thread: one run after the other, until the queue is closed."""
        taken = Taken()
        while self._next(taken):
            batch, run = self._took(taken)
            error = batch.came(run, taken.got_bytes)
            if error is not None:
                self._give_up(batch)
            batch.less(1, error)
            del batch, run, error  # and with them the buffers

    def _next(self, taken: Taken) -> bool:
        while True:
            try:
                return self._native.next(taken)
            except MemoryError:  # before anything was taken
                time.sleep(NO_MEMORY_S)

    def _took(self, taken: Taken) -> tuple[_Batch, Run]:
        """Whatever else fails, who waits for it is told."""
        while True:
            try:
                return self._under_way.pop(taken.number)
            except MemoryError:
                time.sleep(NO_MEMORY_S)
