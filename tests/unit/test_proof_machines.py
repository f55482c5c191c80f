"""Two machines in one simulation: neither waits for the other's work, nothing comes before it was
sent, and the same seed gives the same story."""

from __future__ import annotations

import asyncio

import pytest

from tests.proof.machines import BusyLoop, busy, on, run
from tests.simloop import SimDeadlockError

LATENCY_S = 30e-6


def test_a_host_goes_on_while_the_daemon_is_busy() -> None:
    daemon = BusyLoop(1)

    async def story() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        daemon.call_at(0.001, lambda: busy(1.0))
        for _ in range(5):
            await asyncio.sleep(0.01)
        mine = loop.time()
        await on(daemon, asyncio.sleep(0))
        return mine, loop.time()

    mine, theirs = run(story(), 1, daemon)
    assert mine == pytest.approx(0.05)
    assert theirs == pytest.approx(1.001), "what it is asked meanwhile it does afterwards"


def test_nothing_comes_before_it_was_sent() -> None:
    daemon = BusyLoop(2)
    seen: list[tuple[str, float, float]] = []

    async def story() -> None:
        hosts = asyncio.get_running_loop()
        everything = asyncio.Event()

        def at_daemon(sent: float, count: int) -> None:
            seen.append(("daemon", sent, daemon.time()))
            busy(200e-6)
            answered = daemon.time()
            hosts.call_at(answered + LATENCY_S, at_host, answered, count)

        def at_host(sent: float, count: int) -> None:
            assert asyncio.get_running_loop() is hosts
            seen.append(("host", sent, hosts.time()))
            if count:
                daemon.call_at(hosts.time() + LATENCY_S, at_daemon, hosts.time(), count - 1)
            else:
                everything.set()

        for number in range(8):
            daemon.call_at(number * 1e-6, at_daemon, number * 1e-6 - LATENCY_S, 10)
        await everything.wait()

    run(story(), 2, daemon)
    assert all(came >= sent + LATENCY_S - 1e-12 for _, sent, came in seen)
    at_hosts = [came for who, _, came in seen if who == "host"]
    assert at_hosts == sorted(at_hosts), "each machine's time goes one way"
    waits = [came - sent - LATENCY_S for who, sent, came in seen if who == "host"]
    assert max(waits) < 1e-9, "a host has nothing else to do"
    late = [came - sent - LATENCY_S for who, sent, came in seen if who == "daemon"]
    assert max(late) > 1e-3, "eight at a time wait for each other at the daemon"


def test_what_is_done_over_there_returns_raises_and_is_cancelled() -> None:
    daemon = BusyLoop(3)
    ended: list[str] = []

    async def fails() -> None:
        raise KeyError("over there")

    async def waits() -> None:
        assert asyncio.get_running_loop() is daemon
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def story() -> str:
        with pytest.raises(KeyError):
            await on(daemon, fails())
        task = asyncio.create_task(on(daemon, waits()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await on(daemon, asyncio.sleep(0.5, "done"))

    assert run(story(), 3, daemon) == "done"
    assert ended == ["cancelled"]


def test_generators_over_there_end_over_there() -> None:
    daemon = BusyLoop(4)
    where: list[asyncio.AbstractEventLoop] = []

    async def numbers():  # type: ignore[no-untyped-def]
        try:
            yield 1
        finally:
            where.append(asyncio.get_running_loop())

    async def begins() -> None:
        async for _ in numbers():
            break

    async def story() -> None:
        await on(daemon, begins())
        await asyncio.sleep(1)

    run(story(), 4, daemon)
    assert where == [daemon]


def test_when_nothing_can_happen_on_either_it_is_said() -> None:
    daemon = BusyLoop(5)

    async def story() -> None:
        await on(daemon, asyncio.Event().wait())

    with pytest.raises(SimDeadlockError):
        run(story(), 5, daemon)
