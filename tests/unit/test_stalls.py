"""A loop that hangs is named while it hangs; a process that could not run is told apart."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from entresol_daemon.stalls import StallWatch

MS = 1_000_000


def hang(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


async def test_a_hanging_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch(stall_ns=100 * MS, look_ns=20 * MS)
    with caplog.at_level(logging.WARNING, logger="entresol.stalls"):
        watch.start(asyncio.get_running_loop())
        try:
            await asyncio.sleep(0.1)
            hang(0.6)
            await asyncio.sleep(0.1)
        finally:
            watch.stop()
    assert watch.stalls == 1, caplog.text  # once per hang, however long
    said = [record.getMessage() for record in caplog.records if "loop_stalled" in record.message]
    assert len(said) == 1
    assert "test_stalls.py" in said[0]
    assert ":hang" in said[0]
    assert 300 * MS < watch.longest_ns < 20_000 * MS
    assert not [t for t in threading.enumerate() if t.name == "entresol-stalls"]
    watch.stop()


async def test_the_longest_delay_is_forgotten_after_two_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("entresol_daemon.stalls.WINDOW_NS", 100 * MS)
    watch = StallWatch(stall_ns=60_000 * MS, look_ns=10 * MS)
    watch.start(asyncio.get_running_loop())
    try:
        await asyncio.sleep(0.02)
        hang(0.4)
        await asyncio.sleep(0.03)
        assert watch.longest_ns > 300 * MS
        for _ in range(500):
            await asyncio.sleep(0.02)
            if watch.longest_ns < 300 * MS:
                break
        assert watch.longest_ns < 300 * MS
    finally:
        watch.stop()


def test_a_stopped_process_is_not_the_loops_fault() -> None:
    code = (
        "import asyncio, logging, sys\n"
        "from entresol_daemon.stalls import StallWatch\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "async def main():\n"
        "    watch = StallWatch()\n"
        "    watch.start(asyncio.get_running_loop())\n"
        "    await asyncio.sleep(0.3)\n"
        "    print('going', flush=True)\n"
        "    while not watch.starved: await asyncio.sleep(0.02)\n"
        "    watch.stop()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "event=process_starved" in err
