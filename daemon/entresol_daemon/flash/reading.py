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
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from entresol_daemon.flash.checking import RecordCheck
from entresol_daemon.flash.device import Check
from entresol_daemon.flash.runs import Reads, Run
from entresol_proto.jobs import Home
from entresol_proto.native import Kernel, Look, Taken, Wanted
from entresol_proto.threads import Outside, Pool

NO_MEMORY_S = 0.01  # until it is tried again


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
        self._calling = threading.Lock()  # two loops may be woken, and one may close this
        try:
            read, judge, settle = self._native.next, self._judge, self._native.settle
            for _ in range(threads):
                pool.post(_serve, Taken(), read, judge, settle)
        except BaseException:
            self._native.close()  # those that came are let go
            raise

    async def read(self, reads: Reads, runs: Sequence[Run], check: Check | None) -> None:
        """Have these runs read, at least one; `reads.came` is given those that are not found good.

        Ends as `Job.outcome`: cancelled, it waits for what is being read, and the rest is not.
        Raises: RuntimeError once this is closed, MemoryError; nothing is read then.
        """
        wanted = _wanted(runs, check)
        key, payloads = b"", False
        if isinstance(check, RecordCheck):
            key, payloads = check.key, check.payloads
        job = self._pool.expect(self._collect)
        number = -1
        try:
            number = next(self._numbers)
            wake_fd = self._wake_of(job.home)
            batch = self._under_way[number] = _Batch(reads, runs, job)
            # No lambda: CPython 3.12 and 3.13 crash where there is no memory to make one.
            ended = job.outcome(functools.partial(self._drop, number))
            try:
                self._native.add(number, wake_fd, wanted, key, payloads=payloads)
            except BaseException:
                batch.job = None
                ended.close()
                raise
        except BaseException:
            self._under_way.pop(number, None)
            job.give_back()
            raise
        del job, batch  # they have the error, which will have this frame
        await ended

    def close(self) -> None:
        """What was asked for is read, and then there are no threads any more. Once."""
        self._native.close()
        self._pool.close()
        while True:
            try:
                self._collect()
                break
            except MemoryError:
                time.sleep(NO_MEMORY_S)
        with self._calling:
            self._native.free()
        for fd in self._wakes.values():
            os.close(fd)

    def _wake_of(self, home: Home) -> int:
        """One for each loop that ever read: a thread may be about to write to it, though all that
        the loop waited for was told already."""
        found = self._wakes.get(home)
        if found is None:
            found = self._wakes[home] = home.duplicate()
        return found

    def _drop(self, number: int) -> None:
        """What no thread has begun of a batch is not read. From any thread."""
        with self._calling:
            self._native.drop(number)

    def _collect(self) -> None:
        """On a loop: tell those whose batches have ended, of whichever loop they are. Begun again,
        it goes on where there was no memory for more."""
        if not self._under_way:
            return
        with self._calling:
            while (number := self._native.ended()) is not None:
                batch = self._under_way.get(number)
                if batch is not None and batch.job is not None:
                    batch.job.end(batch.error)
                    # Each has the other: its error has frames, which have this batch.
                    batch.job = batch.error = None
                self._under_way.pop(number, None)
                self._native.forget()

    def _judge(self, taken: Taken) -> None:
        """In a thread: a run that was not found good. What else fails than the device ends the
        batch."""
        number = taken.batch_number
        if not self._under_way[number].came(taken.number, taken.got_bytes):
            with contextlib.suppress(MemoryError):
                self._drop(number)


def _serve(
    taken: Taken,
    read: Callable[[Taken], bool],
    judge: Callable[[Taken], None],
    settle: Callable[[Taken], None],
) -> None:
    """In a thread: one run after the other, until the queue is closed. Where there is no memory for
    a step it is tried again: who waits for a run is told. All that this needs was made before."""
    has_one = is_judged = False
    while True:
        try:
            if not has_one:
                if not read(taken):
                    return
                has_one = True
            if not is_judged:
                judge(taken)
                is_judged = True
            settle(taken)
            has_one = is_judged = False
        except MemoryError:
            time.sleep(NO_MEMORY_S)


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
