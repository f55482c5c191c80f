"""The facade without asyncio: its life, several threads, interrupts, forks, leaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import leaks
import pytest
from client_peer import DESCRIPTOR, SECRET, Peer, serving

from entresol_client import Client, ClientConfig, PutBlock, UsageError, exits, loopthread
from entresol_client.loopthread import LoopThread
from entresol_client.results import RequestFailedError
from entresol_client.workers import ThreadWorkers
from entresol_proto.ids import BadKeyError, EngineKey, wire_key
from entresol_proto.status import ConfigError, Status

BLOCK = 64 * 1024
OK = Status.OK


def key(number: int) -> EngineKey:
    return EngineKey(hashlib.sha256(b"key %d" % number).digest())


class PeerThread:
    """A peer on a loop and thread of its own, as a daemon would be."""

    def __init__(self, folder: Path, fabric: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._folder = folder
        self._fabric = fabric
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self.peer: Peer
        self._thread = threading.Thread(target=self._run, name="peer")
        self._thread.start()
        assert self._ready.wait(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self) -> None:
        async with serving(self._folder, fabric=self._fabric) as peer:
            self.peer = peer
            self._ready.set()
            await self._end.wait()

    def call(self, what: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(what)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


@pytest.fixture(params=["tcp", "shm"])
def peer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Peer]:
    thread = PeerThread(tmp_path, request.param)
    try:
        yield thread.peer
    finally:
        thread.stop()


@pytest.fixture
def config(peer: Peer) -> ClientConfig:
    return peer.config()


def test_every_method(config: ClientConfig) -> None:
    with Client(config) as client:
        ns = client.namespace(DESCRIPTOR)
        keys = [key(n) for n in range(4)]
        assert ns.put([PutBlock(key(n), bytes([n]) * BLOCK, n) for n in range(4)]).ok
        into = [bytearray(BLOCK) for _ in keys]
        assert ns.get_into(keys, into).ok
        assert all(into[n] == bytes([n]) * BLOCK for n in range(4))
        assert ns.exists([*keys, key(9)]).prefix_blocks == 4
        assert ns.stage(keys).prefix_blocks == 4
        assert ns.touch(keys).count == 4
        assert len(ns.explain(keys)) == 4
        assert ns.forget(keys).count == 4
        assert client.shards()[0].connected
        assert client.stats()["hits"] == {"memory": 4}
        with pytest.raises(BadKeyError, match="5 bytes"):
            ns.exists([b"short"])


def test_nothing_is_left_after_close(config: ClientConfig) -> None:
    with Client(config) as client:  # once before, so that what is cached for good counts as given
        client.namespace(DESCRIPTOR).exists([key(0)])
    before = leaks.snapshot()
    for _ in range(3):
        with Client(config) as client:
            ns = client.namespace(DESCRIPTOR)
            assert ns.put([PutBlock(key(0), bytes(BLOCK))]).ok
            assert ns.get_into([key(0)], [bytearray(BLOCK)]).ok
            ns.forget([key(0)])
        client.close()  # again: idempotent
    # The peer's side of the last sessions goes in its own thread, a moment later.
    leaks.assert_no_leaks(before, wait_s=10.0)
    with pytest.raises(UsageError, match="closed"):
        ns.exists([key(0)])


def test_a_client_that_finds_nobody_leaves_nothing(config: ClientConfig, peer: Peer) -> None:
    gone = peer.config(shards=(type(peer.address())("shard0", port=1),))
    before = leaks.snapshot()
    with Client(gone) as client:
        assert not client.shards()[0].connected
        got = client.namespace(DESCRIPTOR).get_into([key(0)], [bytearray(8)])
        assert got.statuses[0] in {Status.DISCONNECTED, Status.BREAKER_OPEN}
    leaks.assert_no_leaks(before)


def test_many_threads_share_one_client(config: ClientConfig) -> None:
    failures: list[BaseException] = []
    with Client(config) as client:
        ns = client.namespace(DESCRIPTOR)

        def work(worker: int) -> None:
            try:
                for step in range(5):
                    number = worker * 100 + step
                    body = hashlib.sha256(b"%d" % number).digest() * (BLOCK // 32)
                    assert ns.put([PutBlock(key(number), body)]).ok
                    into = bytearray(BLOCK)
                    assert ns.get_into([key(number)], [into]).ok
                    assert into == body
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


def test_an_interrupt_ends_the_call_first(peer: Peer) -> None:
    peer.add(wire_key(SECRET, key(0)), key(0), bytes(BLOCK))
    with Client(peer.config(ping_interval_ns=10**10)) as client:
        ns = client.namespace(DESCRIPTOR)
        peer.faults.silent = True
        into = bytearray(b"\xa5" * BLOCK)
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ns.get_into([key(0)], [into], deadline_ns=60_000_000_000)
        timer.join()
        peer.faults.silent = False
        assert set(into) == {0xA5}
        assert ns.get_into([key(0)], [into]).statuses == [OK]


def test_a_second_interrupt_does_not_leave_the_call_running() -> None:
    """Somebody presses Ctrl-C twice: the buffer may be used again only when nobody writes there."""
    into = bytearray(6)

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.5)  # as long as a thread opens its block
            into[:] = b"landed"

    thread = LoopThread()
    timers = [
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        for after_s in (0.1, 0.2, 0.3)
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        thread.call(work)
    assert into == b"landed"
    for timer in timers:
        timer.join()
    assert thread.call(lambda: asyncio.sleep(0, "goes on")) == "goes on"
    thread.stop()


def test_no_call_is_left_waiting_by_the_end_of_the_loop() -> None:
    """Of many threads some are always on their way in while another one closes."""
    ends: Counter[str] = Counter()

    def keep_calling(thread: LoopThread, between_s: float) -> None:
        try:
            while True:
                assert thread.call(lambda: asyncio.sleep(between_s, "slept")) == "slept"
        except UsageError as error:
            ends[str(error)] += 1

    for attempt in range(20):
        thread = LoopThread()
        callers = [
            threading.Thread(target=keep_calling, args=(thread, between_s), daemon=True)
            for between_s in (0, 0, 0.001)
        ]
        for caller in callers:
            caller.start()
        time.sleep(0.002 * (attempt % 4))
        thread.stop()
        for caller in callers:
            caller.join(20)
            assert not caller.is_alive(), "a caller waits for ever"
    assert ends == {"the client is closed": 60}


@pytest.mark.parametrize("stubborn_s", [0.0, 0.3])
def test_a_call_that_does_not_end_is_cancelled_at_the_end(
    monkeypatch: pytest.MonkeyPatch, stubborn_s: float
) -> None:
    """And the end waits until it has ended: it writes into its caller's memory."""
    monkeypatch.setattr(loopthread, "END_S", 0.1)
    thread, began, ended = LoopThread(), threading.Event(), []

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(stubborn_s)
            ended.append("work")

    def call() -> None:
        with pytest.raises(UsageError, match="closed"):
            thread.call(work)
        ended.append("call")

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert began.wait(20)
    thread.stop()
    caller.join(20)
    assert ended == ["work", "call"]
    for refused in (thread.call, lambda make: thread.begin(make(), print)):
        with pytest.raises(UsageError, match="closed"):
            refused(work)
    thread.stop()


@contextlib.contextmanager
def ending(
    program: str,
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes], IO[bytes]]]:
    """A process whose interpreter ends now, and its pipes; closing its input lets go the rest."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ends\n"
        yield process, process.stdin, process.stdout, process.stderr


AT_EXIT = """
import asyncio, ctypes, time
from entresol_client.loopthread import LoopThread
from entresol_proto.threads import Pool

async def work():
    while True:  # not before the interpreter is gone, and then
        await asyncio.sleep(0.3)

async def close():
    await pool.run(time.sleep, 0.05)
    print("closed", flush=True)

thread, pool = LoopThread(), Pool(1, "worker")
thread.begin(work(), print)
thread.call(lambda: pool.run(time.sleep, 0.05))
thread.at_exit = close
libc = ctypes.CDLL(None)  # the process goes on when the interpreter is gone: others' destructors do
getattr(libc, "__cxa_atexit")(libc.getchar, None, None)
print("ends", flush=True)
"""


def test_a_loop_that_nobody_stopped_does_not_outlive_the_interpreter() -> None:
    with ending(AT_EXIT) as (process, stdin, stdout, stderr):
        assert stdout.readline() == b"closed\n"
        time.sleep(0.6)
        stdin.close()
        assert process.wait(20) == 0
        assert stderr.read() == b""


STUBBORN_AT_EXIT = """
import asyncio, atexit, ctypes, os, signal, threading, time
from entresol_client.loopthread import LoopThread

async def hang():
    while True:
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            pass

threads = [LoopThread() for _ in range(4)]
for thread in threads:
    thread.at_exit = hang
libc = ctypes.CDLL(None)
getattr(libc, "__cxa_atexit")(libc.getchar, None, None)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
atexit.register(print, "ends", flush=True)
"""


def test_the_end_of_the_interpreter_waits_for_all_loops_at_once_interrupted_or_not() -> None:
    with ending(STUBBORN_AT_EXIT) as (process, stdin, _, stderr):
        began = time.monotonic()
        time.sleep(exits.EXIT_S + 1)
        stdin.close()
        assert process.wait(20) == 0
        assert time.monotonic() - began < 3 * exits.EXIT_S
        assert b"KeyboardInterrupt" in stderr.read()


async def test_work_that_waits_for_a_thread_ends_with_its_deadline_and_with_the_client() -> None:
    workers, ran = ThreadWorkers(1), []
    try:
        holds = threading.Event()
        busy = asyncio.create_task(workers.run(holds.wait, 20))
        await asyncio.sleep(0.02)
        soon_ns = time.monotonic_ns() + 20_000_000
        with pytest.raises(RequestFailedError) as late:
            await workers.run(ran.append, 1, until_ns=soon_ns)
        assert late.value.status is Status.DEADLINE
        later = [workers.run_later(ran.append, n, until_ns=soon_ns + 10**8) for n in (4, 5)]
        puts = await asyncio.gather(*later, return_exceptions=True)
        assert [each.status for each in puts] == [Status.DEADLINE] * 2  # type: ignore[union-attr]
        async with workers._later:
            assert workers._later.locked(), "a turn that never came was given back"
        left = asyncio.create_task(workers.run(ran.append, 2, until_ns=soon_ns + 20 * 10**9))
        own = asyncio.create_task(workers.run(ran.append, 3))
        await asyncio.sleep(0.02)
        own.cancel()
        with pytest.raises(asyncio.CancelledError):
            await own
        asyncio.get_running_loop().call_later(0.05, holds.set)
        await asyncio.to_thread(workers.close)
        with pytest.raises(RequestFailedError) as closed:
            await left
        assert closed.value.status is Status.DISCONNECTED
        assert await busy
        assert not ran
    finally:
        holds.set()
        workers.close()


def test_after_fork_it_refuses_instead_of_hanging(config: ClientConfig) -> None:
    with Client(config) as client:
        ns = client.namespace(DESCRIPTOR)
        pid = os.fork()
        if pid == 0:  # the child: only exit codes leave it
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    ns.exists([key(0)])
                except UsageError as error:
                    code = 0 if "fork" in str(error) else 2
                client.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert ns.exists([key(0)]).complete  # the parent's goes on


def test_a_client_opened_after_fork_serves(config: ClientConfig) -> None:
    """What one opened before fork tells to do. The parent's threads are not in the child."""
    with Client(config) as client:
        ns = client.namespace(DESCRIPTOR)
        assert ns.put([PutBlock(key(0), b"7" * BLOCK)]).ok
        assert ns.get_into([key(0)], [bytearray(BLOCK)]).ok
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # it hung
            code = 1
            with contextlib.suppress(BaseException), Client(config) as own:
                into = bytearray(BLOCK)
                result = own.namespace(DESCRIPTOR).get_into([key(0)], [into])
                code = 0 if result.ok and into == b"7" * BLOCK else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert ns.get_into([key(0)], [bytearray(BLOCK)]).ok


def test_forgetting_to_close_is_warned_about(config: ClientConfig) -> None:
    client = Client(config)
    kept = client._thread, client._client
    client._client = None  # type: ignore[assignment]
    with pytest.warns(ResourceWarning, match="was not closed"):
        del client
    thread, inner = kept
    thread.call(inner.close)
    thread.stop()


def test_a_bad_certificate_raises_and_leaves_nothing(config: ClientConfig, peer: Peer) -> None:
    tls = type(config.tls)(Path("/no/cert"), config.tls.key, config.tls.ca, config.tls.trust_domain)
    before = leaks.snapshot()
    with pytest.raises(Exception, match="there is no file"):
        Client(peer.config(tls=tls))
    with pytest.raises(ConfigError, match=r"not of a str .ClientConfig.load"):
        Client("client.toml")  # type: ignore[arg-type]
    leaks.assert_no_leaks(before)


def test_deadlines_hold_without_a_loop(peer: Peer) -> None:
    with Client(peer.config(ping_interval_ns=10**10)) as client:
        ns = client.namespace(DESCRIPTOR)
        peer.faults.silent = True
        begun = time.monotonic()
        got = ns.get_into([key(0)], [bytearray(8)], deadline_ns=100_000_000)
        assert got.statuses == [Status.DEADLINE]
        assert time.monotonic() - begun < 5.0
