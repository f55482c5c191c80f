"""A pool whose threads are all there: handing work over neither starts one nor half-fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from entresol_proto.status import EntresolError, Status
from entresol_proto.threads import started_pool


def names(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_all_threads_are_there_and_end() -> None:
    pool = started_pool(3, "test-pool")
    assert len(names("test-pool")) == 3
    assert sorted(pool.map(abs, [-1, 2, -3])) == [1, 2, 3]
    assert len(names("test-pool")) == 3
    pool.shutdown(wait=True)
    assert not names("test-pool")


def test_work_needs_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would queue this work, raise, and do it later."""
    pool = started_pool(2, "test-pool")

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    gate = threading.Event()
    jobs = [pool.submit(gate.wait, 30) for _ in range(10)]
    gate.set()
    assert all(job.result(30) for job in jobs)
    pool.shutdown(wait=True)


def niceness(_job: int = 0) -> int:
    """Of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a priority for each thread")


@linux_only
def test_threads_of_a_pool_give_way_and_nobody_else_does() -> None:
    before = niceness()
    gate = threading.Barrier(3)

    def each(_job: int) -> int:
        gate.wait(30)  # so that every thread does one
        return niceness()

    pool, plain = started_pool(3, "test-pool", nice=5), started_pool(1, "test-plain")
    assert list(pool.map(each, range(3))) == [min(before + 5, 19)] * 3
    assert list(plain.map(niceness, range(1))) == [before]
    assert niceness() == before
    pool.shutdown(wait=True)
    plain.shutdown(wait=True)


@linux_only
def test_a_sandbox_that_forbids_priorities_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refused(*call: int) -> None:
        asked.append(call)
        raise PermissionError(1, "Operation not permitted")

    before = niceness()
    monkeypatch.setattr(os, "setpriority", refused)
    pool = started_pool(2, "test-pool", nice=5)
    assert len(names("test-pool")) == len(asked) == 2
    assert list(pool.map(niceness, range(4))) == [before] * 4
    pool.shutdown(wait=True)


def test_threads_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started = []

    def only_two(self: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", only_two)
    with pytest.raises(EntresolError, match="cannot start 4 threads: can't start new thread") as e:
        started_pool(4, "test-pool")
    assert e.value.status is Status.BUSY
    assert e.value.hint
    assert not names("test-pool")


def test_a_real_limit() -> None:
    code = (
        "import resource, sys\n"
        "from entresol_proto.threads import started_pool\n"
        "from entresol_proto.status import EntresolError\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (20 << 20),) * 2)\n"
        "try:\n"
        "    started_pool(64, 'many')\n"
        "except EntresolError as error:\n"
        "    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "refused\n", done.stderr
