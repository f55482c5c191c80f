"""A pool whose threads are all there: handing work over neither starts one nor half-fails."""

from __future__ import annotations

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
