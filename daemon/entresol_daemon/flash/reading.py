"""Reads of a device that no thread waits for the interpreter's lock to begin, or to look at.

The loop hands runs to the queue of the native kernel. Threads wait in there, read what comes in its
order, and find it good or not; the loop hears of a call once all of it is good. So the drive has
work while the loop goes on planning, and nobody wants the lock but the loop. What was not found
good is judged here, in the same thread. `runs.Reads.work` is the twin, without a kernel.

Invariant: a run is owed to its batch until it was found good, judged or dropped; a batch ends when
it is owed nothing, and then no thread touches its buffers.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar

from entresol_daemon.flash.checking import RecordCheck
from entresol_daemon.flash.device import Check
from entresol_daemon.flash.runs import Reads, Run
from entresol_proto.jobs import Home
from entresol_proto.native import Kernel, Look, Taken, Wanted
from entresol_proto.threads import Outside, Pool

NO_MEMORY_S = 0.01  # until it is tried again

_T = TypeVar("_T")


class _Batch:
    """The runs of one call."""

    __slots__ = ("error", "job", "reads", "runs")

    def __init__(self, reads: Reads, runs: Sequence[Run], job: Outside) -> None:
        self.reads = reads
        self.runs = runs
        self.job: Outside | None = job
        self.error: BaseException | None = None  # the first one that is not the device's

    def came(self, number: int, got_bytes: int) -> bool:
        """In a thread: so much of a run was read. False if something of ours went wrong."""
        try:
            self.reads.came(self.runs[number], got_bytes)
        except BaseException as error:
            # Without this frame, which has the batch.
            self.error = self.error or error.with_traceback(
                getattr(error.__traceback__, "tb_next", None)
            )
            return False
        return True


class ReadQueue:
    """Reads of one descriptor by all threads of a pool, in the order of `submit`."""

    def __init__(self, kernel: Kernel, fd: int, at_once: int, pool: Pool, threads: int) -> None:
        """At most so many runs are in service. All `threads` of the pool are taken, which is closed
        with this; the descriptor stays the caller's. Raises: MemoryError."""
        self._native = kernel.reads(fd, at_once)
        self._pool = pool
        self._numbers = count()
        self._under_way: dict[int, _Batch] = {}
        self._wakes: dict[Home, int] = {}  # descriptors of our own, which outlive the home's
        self._collecting = threading.Lock()  # two loops may be woken
        try:
            for _ in range(threads):
                pool.post(self._serve)
        except BaseException:
            self._native.close()  # those that came are let go
            raise

    def submit(self, reads: Reads, runs: Sequence[Run], check: Check | None) -> Awaitable[None]:
        """Have these runs read, at least one; `reads.came` is given those that are not found good.
        On a loop.

        Ends as `Job.outcome`: cancelled, it waits for what is being read, and the rest is not.
        """
        wanted = _wanted(runs, check)
        job = self._pool.expect(self._collect)
        number = next(self._numbers)
        try:
            self._under_way[number] = _Batch(reads, runs, job)
            wake_fd = self._wake_of(job.home)
            if isinstance(check, RecordCheck):
                key, payloads = check.key, check.payloads
                self._native.add(number, wake_fd, wanted, key, payloads=payloads)
            else:
                self._native.add(number, wake_fd, wanted)
        except BaseException as error:  # no memory: nothing was asked for
            self._under_way.pop(number, None)
            job.end(error)
        return job.outcome(lambda: self._native.drop(number))

    def close(self) -> None:
        """What was asked for is read, and then there are no threads any more. Once."""
        self._native.close()
        self._pool.close()
        _surely(self._collect)
        self._native.free()
        for fd in self._wakes.values():
            os.close(fd)

    def _wake_of(self, home: Home) -> int:
        found = self._wakes.get(home)
        if found is None:
            found = self._wakes[home] = home.duplicate()
        return found

    def _collect(self) -> None:
        """On a loop: tell those whose batches have ended, of whichever loop they are."""
        if not self._under_way:
            return
        with self._collecting:
            while (number := self._native.ended()) is not None:
                batch = self._under_way.pop(number)
                job, batch.job = batch.job, None  # it has the error, whose frames have this batch
                error, batch.error = batch.error, None
                assert job is not None
                job.end(error)

    def _serve(self) -> None:
        """In a thread: one run after the other, until the queue is closed."""
        taken = Taken()
        while _surely(self._native.next, taken):
            batch = _surely(self._under_way.__getitem__, taken.batch_number)
            if not batch.came(taken.number, taken.got_bytes):
                with contextlib.suppress(MemoryError):
                    self._native.drop(taken.batch_number)
            del batch  # and with it the buffers
            _surely(self._native.settle, taken)


def _wanted(runs: Sequence[Run], check: Check | None) -> Wanted:
    """What is to be read, and what the kernel can say of it: nothing of an op that was cut."""
    wanted = Wanted()
    for run in runs:
        if check is None:
            wanted.add(run.offset_bytes, run.views, Look.NO_FURTHER)
        elif isinstance(check, RecordCheck) and not run.has_pieces:
            heads = [check.head(owner) for owner in run.owners]
            wanted.add(run.offset_bytes, run.views, Look.FOR_RECORDS, heads)
        else:
            wanted.add(run.offset_bytes, run.views, Look.ELSEWHERE)
    return wanted


def _surely(call: Callable[..., _T], *args: object) -> _T:
    """Whatever else fails, who waits is told: this does nothing until there is memory for it."""
    while True:
        try:
            return call(*args)
        except MemoryError:
            time.sleep(NO_MEMORY_S)
