"""Leak checks for tests: descriptors, threads and asyncio tasks before and after.

    before = snapshot()
    ...
    await settle(before)       # inside a loop: gives closing a bounded moment
    assert_no_leaks(before)    # AssertionError naming what stayed

Call `snapshot` after the loop exists (a loop owns descriptors of its own) and compare in the same
loop. The garbage collector runs first, so that only what is truly held counts.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a process holds: descriptor → what it points at, thread names by id, running tasks."""

    fds: dict[int, str]
    threads: dict[int, str]
    tasks: frozenset[asyncio.Task[object]]


def snapshot() -> Snapshot:
    """The present state of this process and, if one runs, of this loop."""
    gc.collect()
    try:
        tasks = frozenset(asyncio.all_tasks())
    except RuntimeError:
        tasks = frozenset()
    threads = {t.ident or 0: t.name for t in threading.enumerate()}
    return Snapshot(_fds(), threads, tasks)


def leaks(before: Snapshot, *, ignore_threads: Collection[str] = ()) -> list[str]:
    """What is here now and was not before, in words; empty when nothing is."""
    now = snapshot()
    new_fds = [(fd, name) for fd, name in now.fds.items() if before.fds.get(fd) != name]
    spare = next((fd for fd in new_fds if fd[1] == "/dev/null"), None)
    if spare is not None and _in_loop() and "uvloop" in type(asyncio.get_running_loop()).__module__:
        new_fds.remove(spare)  # libuv keeps one per loop, from its first stream on
    found = [f"fd {fd} -> {name}" for fd, name in new_fds]
    found += [
        f"thread {name}"
        for ident, name in now.threads.items()
        if ident not in before.threads and not name.startswith(tuple(ignore_threads))
    ]
    found += [f"task {task!r}" for task in now.tasks - before.tasks if not task.done()]
    return found


def assert_no_leaks(
    before: Snapshot, *, wait_s: float = 2.0, ignore_threads: Collection[str] = ()
) -> None:
    """Fail if anything stayed. Threads get `wait_s` to end; use `settle` first inside a loop."""
    end = time.monotonic() + wait_s
    found = leaks(before, ignore_threads=ignore_threads)
    while found and time.monotonic() < end and not _in_loop():
        time.sleep(0.01)
        found = leaks(before, ignore_threads=ignore_threads)
    assert not found, "leaked: " + "; ".join(found)


async def settle(
    before: Snapshot, *, wait_s: float = 2.0, ignore_threads: Collection[str] = ()
) -> None:
    """Let the loop run until nothing is left or `wait_s` passed; then `assert_no_leaks`."""
    end = time.monotonic() + wait_s
    # What goes away here has no event to wait for.
    while leaks(before, ignore_threads=ignore_threads) and time.monotonic() < end:
        await asyncio.sleep(0.01)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _fds() -> dict[int, str]:
    found = {}
    for text in os.listdir("/proc/self/fd"):
        try:
            found[int(text)] = os.readlink(f"/proc/self/fd/{text}")
        except OSError:
            continue  # the descriptor of this listing
    return found
