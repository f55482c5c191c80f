"""Clients where a process ends, forks or is interrupted: nothing crashes, hangs or is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import leaks
import pytest
from client_peer import DESCRIPTOR, serving
from gated_kernel import build
from test_client_sync import PeerThread, key

from entresol_client import AsyncClient, Client, ClientConfig, UsageError, exits
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore
from entresol_client.loopthread import LoopThread
from entresol_client.surroundings import Surroundings

LATEST_S = 30.0  # liveness only

# A process goes on for a while when its interpreter is gone: destructors of other libraries do so.
LINGERS = """
import asyncio, atexit, ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
getattr(libc, "__cxa_atexit")(libc.usleep, ctypes.c_void_p(600_000), None)
def config():
    import dataclasses
    from entresol_client import ClientConfig
    return dataclasses.replace(ClientConfig.load(sys.argv[1]), ping_interval_ns=100_000_000)
"""


def write_config(config: ClientConfig, path: Path) -> Path:
    tls, (shard,) = config.tls, config.shards
    path.write_text(
        f'cert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n'
        f'trust_domain = "{tls.trust_domain}"\n'
        f'[[shards]]\nname = "{shard.name}"\nhost = "{shard.host}"\nport = {shard.port}\n'
    )
    return path


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerThread]:
    thread = PeerThread(tmp_path, "tcp")
    try:
        yield thread
    finally:
        thread.stop()


@pytest.fixture
def config_file(peer: PeerThread, tmp_path: Path) -> Path:
    return write_config(peer.peer.config(), tmp_path / "client.toml")


def run(program: str, config_file: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINGERS + program, str(config_file)],
        capture_output=True, text=True, timeout=LATEST_S, check=False, env={**os.environ, **env},
    )  # fmt: skip


# The end of the interpreter -----------------------------------------------------------------------

OPENED_BY_AN_EARLIER_EXIT_FUNCTION = """
def late():
    for make in (lambda: Client(config()), lambda: LoopThread()):
        try:
            make()
        except UsageError as error:
            print(error)
atexit.register(late)  # before the client is imported, so that it is called after the client's
from entresol_client import Client, UsageError
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore
from entresol_client.loopthread import LoopThread
"""

OPENED_BY_THREADS_THAT_NOBODY_JOINS = """
from entresol_client import Client
def work():
    while True:
        with Client(config()) as client:
            client.shards()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""

ON_A_LOOP_OF_THE_ENGINES_OWN = """
import uvloop
from entresol_client import AsyncClient
opened = threading.Event()
async def main():
    client = await AsyncClient.open(config())
    opened.set()
    await asyncio.Event().wait()
threading.Thread(target=uvloop.run, args=(main(),), daemon=True).start()
assert opened.wait(20)
"""

OPENED_ON_LOOPS_OF_THREADS_THAT_NOBODY_JOINS = """
import uvloop
from entresol_client import AsyncClient
async def main():
    async with await AsyncClient.open(config()):
        await asyncio.sleep(0.01)
def work():
    while True:
        uvloop.run(main())
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""


def test_no_client_begins_once_the_interpreter_ends(config_file: Path) -> None:
    """Its thread would be called into when that is gone: SIGSEGV."""
    done = run(OPENED_BY_AN_EARLIER_EXIT_FUNCTION, config_file)
    assert (done.returncode, done.stderr) == (0, "")
    told = "the interpreter ends (open and close clients before that)\n"
    assert done.stdout == 2 * told


def test_a_client_on_a_loop_of_somebody_elses_is_closed_at_the_end(config_file: Path) -> None:
    done = run(ON_A_LOOP_OF_THE_ENGINES_OWN, config_file)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "program", [OPENED_BY_THREADS_THAT_NOBODY_JOINS, OPENED_ON_LOOPS_OF_THREADS_THAT_NOBODY_JOINS]
)
def test_threads_may_go_on_opening_clients_at_the_end(config_file: Path, program: str) -> None:
    for _ in range(6):
        assert run(program, config_file).returncode == 0


def test_at_the_end_the_main_thread_may_still_use_loops_of_its_own(config_file: Path) -> None:
    done = run(
        """
def late():
    async def main():
        async with await AsyncClient.open(config()) as client:
            print(client.shards()[0].connected)
    asyncio.run(main())
atexit.register(late)
from entresol_client import AsyncClient
""",
        config_file,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")


# Signal handlers ----------------------------------------------------------------------------------

CLOSED_BY_A_HANDLER = """
from entresol_client import Client
client = Client(config())
inner = client._client.close
async def slow():
    await asyncio.sleep(1.0)  # as with a daemon that hangs
    await inner()
client._client.close = slow
ends = []
def handler(*_):
    client.close()
    ends.append("handler")
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.3)
client.close()
ends.append("main")
print(ends)
"""

CALLED_BY_A_HANDLER = """
from entresol_client import Client
with Client(config()) as client:
    calls = 0
    def handler(*_):
        global calls
        client.stats()
        calls += 1
        again()
    def again():
        signal.setitimer(signal.ITIMER_REAL, 0.0007)
    signal.signal(signal.SIGALRM, handler)
    again()
    while calls < 1000:
        client.shards()
    again = int
    time.sleep(0.01)
print(calls >= 1000)
"""


def test_a_signal_handler_may_close_the_client_that_is_being_closed(config_file: Path) -> None:
    done = run(CLOSED_BY_A_HANDLER, config_file)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['handler', 'main']\n", "")


def test_a_signal_handler_may_call_the_client_that_it_interrupts(config_file: Path) -> None:
    done = run(CALLED_BY_A_HANDLER, config_file)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")


def test_a_handler_that_closes_what_hands_over_a_call_ends_the_call() -> None:
    """It comes between the look whether the loop ends and the hand-over."""
    thread = LoopThread()
    real = thread._loop

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def call_soon_threadsafe(self, step: Callable[[], object]) -> object:
            thread._loop = real
            thread.stop()
            return real.call_soon_threadsafe(step)

    async def never() -> None:
        raise AssertionError("begun")

    thread._loop = Interrupted()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="closed"):
        thread.call(never)


def test_an_interrupt_as_the_client_has_opened_leaves_no_threads(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClientConfig.load(config_file)
    with Client(config):  # what is cached for good counts as given
        pass
    before = leaks.snapshot()
    opens = AsyncClient.open

    async def interrupted(config: ClientConfig) -> AsyncClient:
        client = await opens(config)
        os.kill(os.getpid(), signal.SIGINT)  # the call ends before it can be cancelled
        return client

    monkeypatch.setattr(AsyncClient, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Client(config)
    leaks.assert_no_leaks(before, wait_s=10.0)


# Forks and loops ----------------------------------------------------------------------------------


def forked(work: Callable[[], object]) -> int:
    """What a forked child makes of it: 0 where it is true."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(LATEST_S))  # it hung
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if work() else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_forked_while_another_thread_closes_may_close_too(config_file: Path) -> None:
    client = Client(ClientConfig.load(config_file))
    inner, closing, goes_on = client._client.close, threading.Event(), threading.Event()

    async def slow() -> None:
        closing.set()
        await asyncio.to_thread(goes_on.wait)
        await inner()

    client._client.close = slow  # type: ignore[method-assign]
    closer = threading.Thread(target=client.close)
    closer.start()
    try:
        assert closing.wait(LATEST_S)
        assert forked(lambda: client.close() is None) == 0  # type: ignore[func-returns-value]
    finally:
        goes_on.set()
        closer.join()


def test_a_child_forked_while_a_thread_begins_may_open_clients(config_file: Path) -> None:
    config = ClientConfig.load(config_file)
    holds, goes_on = threading.Event(), threading.Event()

    def begin() -> None:
        holds.set()
        goes_on.wait()

    class Kept:
        forked, gone = False, True

    def opens() -> bool:
        with Client(config) as client:
            return client.shards()[0].connected

    kept: Any = Kept()
    beginner = threading.Thread(target=exits.keep, args=(kept, begin))
    beginner.start()
    try:
        assert holds.wait(LATEST_S)
        assert forked(opens) == 0
    finally:
        goes_on.set()
        beginner.join()
        exits.let_go(kept)


async def test_an_async_client_is_refused_after_fork_and_on_other_loops(tmp_path: Path) -> None:
    """Where it would break its owner's sessions."""
    async with serving(tmp_path, fabric="tcp") as peer:
        client = await AsyncClient.open(peer.config())
        ns = await client.namespace(DESCRIPTOR)

        async def used() -> bool:
            for use in (lambda: ns.exists([key(0)]), lambda: client.namespace(DESCRIPTOR)):
                with pytest.raises(UsageError, match=r"before fork|another event loop"):
                    await use()
            with pytest.raises(UsageError, match=r"before fork|another event loop"):
                client.register(bytearray(8))
            return True

        async def closes() -> bool:
            await client.close()
            return await used()

        def in_child() -> bool:
            asyncio._set_running_loop(None)
            return asyncio.run(closes())

        def elsewhere() -> bool:
            with pytest.raises(UsageError, match="another event loop"):
                asyncio.run(closes())
            with pytest.raises(UsageError, match="another event loop"):
                client.register(bytearray(8))
            return asyncio.run(used())

        assert await asyncio.to_thread(elsewhere)
        assert forked(in_child) == 0
        assert (await ns.exists([key(0)])).complete
        assert client.shards()[0].connects == 1
        await client.close()
        await asyncio.to_thread(lambda: asyncio.run(client.close()))  # again: idempotent


# Stores -------------------------------------------------------------------------------------------

AFTER_THE_LOOP = """
def late():
    space_ = space
    began = time.monotonic()
    assert space_.lookup([b"k" * 32]).result(timeout=0) == [False]
    into = bytearray(8)
    assert space_.load([b"k" * 32], [into]).result(timeout=0).statuses == (Status.DISCONNECTED,)
    for _ in range(2):
        assert not space_.store([PutBlock(b"k" * 32, b"x" * 64)]).result(timeout=0).ok
    assert store.stats()["backlog_bytes"] == 0
    store.drain(3)
    store.close(3)
    print(time.monotonic() - began < 1.5)
if not hasattr(sys, "forks"):
    atexit.register(late)
from entresol_client import PutBlock
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status
store = EngineStore(EngineSettings(config=sys.argv[1]))
space = store.space(NamespaceDescriptor(model="tiny", dtype="bf16"))
if hasattr(sys, "forks"):
    pid = os.fork()
    if pid == 0:
        late()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    store.close()
"""


# Python 3.12 and later warn of a fork beside threads, which this is about.
FORKS = "import warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\nsys.forks = True\n"


@pytest.mark.parametrize("where", ["", FORKS], ids=["exit", "fork"])
def test_a_store_whose_loop_has_ended_answers_that_nothing_is_there(
    config_file: Path, where: str
) -> None:
    done = run(where + AFTER_THE_LOOP, config_file)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")


def test_a_job_that_the_end_comes_before_is_ended_too(config_file: Path) -> None:
    """It was handed over, and is cancelled before its first step."""
    store = EngineStore(EngineSettings(config=str(config_file)))
    lets_go = threading.Event()

    async def busy() -> None:
        lets_go.wait(LATEST_S)  # so that what is handed over meanwhile begins all at once

    async def cancel_others() -> None:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    async def work() -> str:
        raise AssertionError("begun")

    store._thread.begin(busy(), print)
    store._thread.begin(cancel_others(), print)
    future = store.start(work(), str)
    lets_go.set()
    assert future.result(timeout=LATEST_S) == "closed"
    store.close()


STORE_CALLED_BY_A_HANDLER = """
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore
from entresol_proto.ids import NamespaceDescriptor
store = EngineStore(EngineSettings(config=sys.argv[1]))
space = store.space(NamespaceDescriptor(model="tiny", dtype="bf16"))
calls = 0
def handler(*_):
    global calls
    store.count(handled=1)
    space.lookup([b"k" * 32]).result()
    calls += 1
    again()
def again():
    signal.setitimer(signal.ITIMER_REAL, 0.0007)
signal.signal(signal.SIGALRM, handler)
again()
while calls < 300:
    space.lookup([b"k" * 32])
    while store.stats()["backlog_bytes"] == 0 and store._pending:
        store.count(counted=1)
again = int
time.sleep(0.01)
def last(*_):
    store.close()
    print(calls >= 300)
signal.signal(signal.SIGALRM, last)
signal.setitimer(signal.ITIMER_REAL, 0.001)
store.close()
time.sleep(0.1)
"""


def test_a_signal_handler_may_call_the_store_that_it_interrupts(config_file: Path) -> None:
    done = run(STORE_CALLED_BY_A_HANDLER, config_file)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")


STORE_ASKED_BY_A_HANDLER_AT_EVERY_LINE = """
import faulthandler
faulthandler.dump_traceback_later(20, exit=True)
from interrupting import at_line
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore
from entresol_proto.ids import NamespaceDescriptor
store = EngineStore(EngineSettings(config=sys.argv[1]))
space = store.space(NamespaceDescriptor(model="tiny", dtype="bf16"))
def interrupt(ask):
    lines = 0
    while True:
        ends = asyncio.Event()
        def end():
            store._thread._loop.call_soon_threadsafe(ends.set)
        def handler():  # what is asked about ends meanwhile
            end()
            space.lookup([b"k" * 32]).result()
        late = threading.Timer(0.05, end)  # where nobody came in between
        late.start()
        future = store.start(ends.wait(), bool)
        came = at_line(lines, lambda: ask(future), handler)
        late.cancel()
        end()
        assert future.result() is True
        if not came:
            return lines
        lines += 1
called = []
for ask in (lambda future: future.result(), lambda future: future.exception(10),
            lambda future: (future.done(), future.running(), future.cancel(), future.cancelled(),
                            repr(future)),
            lambda future: future.add_done_callback(called.append)):
    lines = interrupt(ask)
    assert lines > 1, lines
print(len(called) - lines, len(set(called)) - lines)
store.close()
"""


def test_a_signal_handler_may_wait_for_the_store_wherever_it_interrupts_it(
    config_file: Path,
) -> None:
    """Also where it interrupts one that asks about a future, which the loop is to end meanwhile."""
    folder = str(Path(__file__).parent)
    done = run(STORE_ASKED_BY_A_HANDLER_AT_EVERY_LINE, config_file, PYTHONPATH=folder)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "1 1\n")


# Names --------------------------------------------------------------------------------------------

RESOLVES = """
from dataclasses import replace
from entresol_client import AsyncClient, Client, UsageError
def named(host, **changes):
    made = config()
    return replace(made, shards=(replace(made.shards[0], host=host),), **changes)
"""

A_RESOLVER_THAT_HANGS = """
began = time.monotonic()
with Client(named("slow.test", connect_deadline_ns=200_000_000)) as client:
    print(client.shards()[0].last_error)
print(time.monotonic() - began < 8)
left = Client(named("slow.test", connect_deadline_ns=200_000_000))
time.sleep(1)
print(sum(thread.name == "entresol-resolve" for thread in threading.enumerate()))
print("ends", flush=True)
"""

A_NAME_OF_TWO_ADDRESSES = """
with Client(named("two", fabric="tcp")) as client:
    (shard,) = client.shards()
    print(shard.connected, shard.address.split(":")[0], shard.fabric)
    print(threading.active_count() <= 4)
"""


@pytest.fixture(scope="module")
def slow_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("names"), "slow_names")


def test_nothing_waits_for_a_resolver_that_hangs(config_file: Path, slow_names: Path) -> None:
    """Neither `close` nor the interpreter's end."""
    began = time.monotonic()
    done = run(RESOLVES + A_RESOLVER_THAT_HANGS, config_file, LD_PRELOAD=str(slow_names))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout == "no answer in time\nTrue\n2\nends\n"  # one of each client's loop
    assert time.monotonic() - began < 15


def test_the_addresses_of_a_name_are_tried_in_turn(config_file: Path, slow_names: Path) -> None:
    done = run(RESOLVES + A_NAME_OF_TWO_ADDRESSES, config_file, LD_PRELOAD=str(slow_names))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "True two tcp\nTrue\n"


OF_A_DATA_PATH = """
began = time.monotonic()
with Client(named("127.0.0.1", fabric="tcp", connect_deadline_ns=1_000_000_000)) as client:
    (shard,) = client.shards()
    print(shard.connected, shard.fabric, shard.last_error)
print(time.monotonic() - began < 8)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("slow.test", "False  no answer in time"),
        ("two", "True tcp "),
        ("two..dots", "True none "),
    ],
)
def test_a_name_of_a_data_path_is_resolved_as_one_of_a_shard(
    name: str, told: str, peer: PeerThread, config_file: Path, slow_names: Path
) -> None:
    """The daemon's `data_advertise` is a name: neither `close` nor the loop waits for it."""
    peer.peer.fabrics[0]._advertise = name
    done = run(RESOLVES + OF_A_DATA_PATH, config_file, LD_PRELOAD=str(slow_names))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout == f"{told}\nTrue\n"


@pytest.mark.parametrize("name", ["nowhere.invalid", "two.test"])
async def test_why_a_name_leads_nowhere_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, fabric="tcp") as peer:
        config = peer.config()  # whom nobody serves any more
    config = replace(config, shards=(replace(config.shards[0], host=name),))
    around, told = Surroundings(), "Name or service not known"
    if name == "nowhere.invalid":

        async def nowhere(*_: object) -> list[str]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        around = Surroundings(resolve=nowhere)
    else:
        loop = asyncio.get_running_loop()
        connects = loop.create_connection

        async def resolve(*_: object) -> list[str]:
            return ["127.0.0.1", "::1"]

        async def create_connection(*args: Any, **options: Any) -> Any:
            if args[1] == "::1":
                raise OSError(errno.EHOSTUNREACH, "")
            return await connects(*args, **options)

        monkeypatch.setattr(loop, "create_connection", create_connection)
        around, told = Surroundings(resolve=resolve), "127.0.0.1: .* refused; ::1: No route to host"
    async with await AsyncClient.open(config, around=around) as client:
        assert re.search(told, client.shards()[0].last_error)
