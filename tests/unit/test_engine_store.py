"""The neutral core under the adapters, against the real daemon: futures that always finish."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import mmap
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import leaks
import numpy as np
import pytest
from harness import DaemonProcess, Running, eventually, running_daemon

from bench.processes import free_ports
from entresol_client import PutBlock, UsageError
from entresol_client.demo.media import flip_bit
from entresol_client.engines import store as engine_store
from entresol_client.engines.answer import Answer
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore, Space
from entresol_client.registered import RegisteredMemory
from entresol_daemon.config import Config
from entresol_proto.fabric.base import Capabilities, RegisteringEndpoint
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import ConfigError, FabricError, Status

T = TypeVar("T")
BLOCK = 64 * 1024
DESCRIPTOR = NamespaceDescriptor(model="tiny", block_tokens=32)
OK, MISS = Status.OK, Status.MISS
SOON_S = 5.0  # what a busy machine may make of a fraction of a second
LATEST_S = 20.0  # liveness: far above every deadline here, far below a hang


def key(number: int) -> bytes:
    return hashlib.sha256(b"block %d" % number).digest() + b"\0\0\0\0"


def content(number: int) -> bytes:
    return hashlib.shake_128(b"content %d" % number).digest(BLOCK)


def puts(*numbers: int) -> list[PutBlock]:
    return [PutBlock(key(n), content(n), n) for n in numbers]


async def got(future: Future[T]) -> T:
    """The answer, within a bounded time."""
    return await asyncio.wait_for(asyncio.wrap_future(future), LATEST_S)


@contextlib.asynccontextmanager
async def opened(settings: EngineSettings) -> AsyncIterator[EngineStore]:
    """A store, opened and closed beside the loop: both wait for work on other threads."""
    store = await asyncio.to_thread(EngineStore, settings)
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


def settings_for(running: Running | DaemonProcess, **changes: Any) -> EngineSettings:
    home = running.home.client_toml_of("dev") if isinstance(running, Running) else (
        running.directory / "client.toml"
    )  # fmt: skip
    return replace(EngineSettings(config=str(home)), **changes)


# Futures -----------------------------------------------------------------------------------------


def test_an_answer_is_a_future_like_others() -> None:
    answer, seen = Answer[int](), list[Future[int]]()
    answer.add_done_callback(seen.append)
    assert (answer.running(), answer.done(), answer.cancel(), seen) == (True, False, False, [])
    for ask in (answer.result, answer.exception):
        with pytest.raises(TimeoutError):
            ask(0.01)
    assert not concurrent.futures.wait([answer], 0.01).done
    timer = threading.Timer(0.05, answer.set_result, (7,))
    timer.start()
    assert concurrent.futures.wait([answer], LATEST_S).done == {answer}
    timer.join()
    assert list(concurrent.futures.as_completed([answer], LATEST_S)) == [answer]
    assert (answer.result(), answer.exception(), answer.done()) == (7, None, True)
    answer.add_done_callback(seen.append)
    assert seen == [answer, answer]


def test_a_callback_that_fails_does_not_cost_the_others_theirs() -> None:
    answer, seen = Answer[int](), list[Future[int]]()
    answer.add_done_callback(lambda _: 1 // 0)
    answer.add_done_callback(seen.append)
    answer.set_result(7)
    assert seen == [answer]


# With a daemon -----------------------------------------------------------------------------------


async def test_what_was_stored_is_found_and_loaded(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d") as running:  # noqa: SIM117
        async with opened(settings_for(running)) as store:
            space = store.space(DESCRIPTOR)
            assert await got(space.lookup([key(0), key(1)])) == [False, False]
            assert (await got(space.store(puts(0, 1)))).ok
            assert (await got(space.store(puts(0)))).statuses == (Status.EXISTS,)
            assert await got(space.lookup([key(0), key(9), key(1)])) == [True, False, True]
            into = [bytearray(b"\x5a" * BLOCK) for _ in range(3)]
            reply = await got(space.load([key(0), key(9), key(1)], into))
            assert reply.statuses == (OK, MISS, OK)
            assert (reply.bytes_loaded, reply.prefix_blocks, reply.ok) == (2 * BLOCK, 1, False)
            assert (into[0], into[2]) == (content(0), content(1))
            assert into[1] == b"\x5a" * BLOCK, "a miss leaves the slot alone"
            assert await got(space.touch([key(0), key(9)])) == 1
            found = store.stats()
            assert found["lookups"] == 2
            assert (found["lookup_blocks"], found["lookup_hit_blocks"]) == (5, 2)
            assert (found["stored_blocks"], found["existed_blocks"]) == (2, 1)
            assert (found["load_blocks"], found["load_failed_blocks"]) == (2, 1)
            assert found["backlog_bytes"] == found["lookup_unanswered"] == 0
            assert store.connected()
            assert store.describe().startswith("dev@127.0.0.1:")


async def test_two_tenants_and_two_descriptors_share_nothing(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d") as running:
        mine = settings_for(running)
        others = replace(mine, config=str(running.home.client_toml_of("other")))
        async with opened(mine) as store, opened(others) as other:
            assert (await got(store.space(DESCRIPTOR).store(puts(0)))).ok
            assert await got(other.space(DESCRIPTOR).lookup([key(0)])) == [False]
            elsewhere = replace(DESCRIPTOR, model_revision="w:2")
            assert await got(store.space(elsewhere).lookup([key(0)])) == [False]


async def test_a_corrupt_block_is_a_failed_one_and_the_rest_is_loaded(tmp_path: Path) -> None:
    flash: list[Path] = []

    def note(config: Config) -> Config:
        flash.append(config.flash_path)
        return config

    async with running_daemon(tmp_path / "d", note) as running:
        settings = settings_for(running, durable=True)
        async with opened(settings) as store:
            assert (await got(store.space(DESCRIPTOR).store(puts(*range(4))))).ok
    flip_bit(flash[0], key(2))
    async with running_daemon(tmp_path / "d", note) as running:  # noqa: SIM117
        async with opened(settings_for(running)) as store:
            into = [bytearray(BLOCK) for _ in range(4)]
            keys = [key(n) for n in range(4)]
            reply = await got(store.space(DESCRIPTOR).load(keys, into))
            assert reply.statuses == (OK, OK, Status.CORRUPT, OK)
            assert [bytes(one) for n, one in enumerate(into) if n != 2] == [
                content(n) for n in (0, 1, 3)
            ]
            assert into[2] == bytes(BLOCK)
            assert store.stats()["load_corrupt_blocks"] == 1


async def test_stores_beyond_the_backlog_are_shed_and_loads_are_not(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d") as running:
        async with opened(settings_for(running)) as store:
            assert (await got(store.space(DESCRIPTOR).store(puts(0)))).ok
        narrow = settings_for(running, store_backlog_bytes_max=4 * BLOCK, stores_in_flight_max=1)
        async with opened(narrow) as store:
            space = store.space(DESCRIPTOR)
            futures = [space.store(puts(*range(n, n + 2))) for n in range(10, 30, 2)]
            loads = [space.load([key(0)], [bytearray(BLOCK)]) for _ in range(8)]
            replies = [await got(one) for one in futures]
            assert all([(await got(one)).ok for one in loads])
            assert all(reply.ok for reply in replies[:2]), "what fits is stored"
            shed = [reply for reply in replies if reply.shed]
            assert shed
            assert all(set(reply.statuses) == {Status.BUSY} for reply in shed)
            found = store.stats()
            assert found["shed_stores"] == len(shed)
            assert found["shed_blocks"] == 2 * len(shed)
            assert found["backlog_bytes"] == 0
            huge = puts(*range(40, 46))  # more than the whole backlog: one store always fits
            assert (await got(space.store(huge))).ok


async def test_a_drain_sheds_what_waits_and_waits_for_what_is_under_way(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d") as daemon:
        settings = settings_for(daemon, stores_in_flight_max=1, store_deadline_ms=700)
        async with opened(settings) as store:
            space = store.space(DESCRIPTOR)
            assert (await got(space.store(puts(0)))).ok
            daemon.signal(signal.SIGSTOP)
            try:
                futures = [space.store(puts(n)) for n in range(1, 16)]
                begun = time.monotonic()
                await asyncio.to_thread(store.drain, 0.1)
                took = time.monotonic() - begun
                assert all(one.done() for one in futures), "nothing is under way after a drain"
                assert took < SOON_S, "one deadline at most, not one for each"
                assert store.stats()["shed_blocks"] >= 1
            finally:
                daemon.signal(signal.SIGCONT)
            assert (await got(space.store(puts(7)))).ok, "a drain ends no store begun after it"


async def test_closing_ends_what_is_under_way_and_leaves_nothing(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d") as running:
        async with opened(
            settings_for(running)
        ) as store:  # what is cached for good counts as given
            assert (await got(store.space(DESCRIPTOR).store(puts(0)))).ok
        before = leaks.snapshot()
        store = await asyncio.to_thread(EngineStore, settings_for(running))
        space = store.space(DESCRIPTOR)
        futures: list[Future[Any]] = [space.store(puts(n)) for n in range(1, 9)]
        futures += [space.load([key(0)], [bytearray(BLOCK)])]
        await asyncio.to_thread(store.close)
        assert all(one.done() for one in futures)
        assert all(one.result().ok for one in futures), "it waited for them"
        store.close()  # again: idempotent
        late = space.load([key(0)], [bytearray(BLOCK)])
        assert late.result(timeout=0).statuses == (Status.DISCONNECTED,)
        assert space.lookup([key(0)]).result(timeout=0) == [False]
        assert not space.store(puts(0)).result(timeout=0).ok
        await leaks.settle(before)
        leaks.assert_no_leaks(
            before, ignore_threads=("asyncio_", "entresol-compute", "entresol-io")
        )


# Without one, or with one that does not answer ----------------------------------------------------


async def test_a_stopped_daemon_costs_the_lookup_deadline_and_no_more(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d") as daemon:
        settings = settings_for(daemon, lookup_deadline_ms=200, load_deadline_ms=500)
        async with opened(settings) as store:
            space = store.space(DESCRIPTOR)
            assert (await got(space.store(puts(0)))).ok
            daemon.signal(signal.SIGSTOP)
            try:
                begun = time.monotonic()
                assert await got(space.lookup([key(0)])) == [False]
                assert 0.15 < time.monotonic() - begun < SOON_S
                begun = time.monotonic()
                buffer = bytearray(b"\x5a" * BLOCK)
                reply = await got(space.load([key(0)], [buffer]))
                assert not reply.ok
                assert time.monotonic() - begun < SOON_S
                assert buffer in (b"\x5a" * BLOCK, bytes(BLOCK))
                held = bytes(buffer)
            finally:
                daemon.signal(signal.SIGCONT)
            assert store.stats()["lookup_unanswered"] >= 1
            await found_again(space)
            assert bytes(buffer) == held, "nothing lands after the future is done"


async def found_again(space: Space) -> None:
    until = time.monotonic() + LATEST_S
    while await got(space.lookup([key(0)])) != [True]:
        assert time.monotonic() < until, "the block was not found again"
        await asyncio.sleep(0.02)


async def test_an_absent_daemon_is_absent_blocks_at_once(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def fixed(config: Config) -> Config:
        return replace(config, listen=replace(config.listen, control_port=port))

    async with running_daemon(tmp_path / "d", fixed) as running:
        settings = settings_for(running)
    async with opened(settings) as store:
        space = store.space(DESCRIPTOR)
        begun = time.monotonic()
        assert await got(space.lookup([key(0)])) == [False]
        assert not (await got(space.load([key(0)], [bytearray(BLOCK)]))).ok
        assert not (await got(space.store(puts(0)))).ok
        assert time.monotonic() - begun < SOON_S
        assert not store.connected()
        assert "absent" in store.describe()
        async with running_daemon(tmp_path / "d", fixed):
            await eventually(store.connected, seconds=LATEST_S, what="a connection")
            assert (await got(space.store(puts(0)))).ok
            assert await got(space.lookup([key(0)])) == [True]


def test_without_a_client_configuration_it_does_not_open(tmp_path: Path) -> None:
    before = leaks.snapshot()
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        EngineStore(EngineSettings(config=str(tmp_path / "nowhere.toml")))
    leaks.assert_no_leaks(before)


# Registered memory -------------------------------------------------------------------------------


class Gaining:
    """An endpoint that reads faster into memory it was told of, as verbs is; moves nothing.

    The real one needs a device: tests/rdma/suites/test_verbs_contract.py.
    """

    def __init__(self, refuse: bool = False) -> None:
        self.closed = False
        self.refuse = refuse
        self.capabilities = Capabilities(
            revokes=True, private=True, same_host=False, maps=False, registers=True
        )
        self.held: list[Any] = []

    def register(self, buffer: Any) -> Gaining.Held:
        if self.refuse:
            raise FabricError("too many registered buffers", status=Status.BUSY)
        self.held.append(memoryview(buffer))
        return Gaining.Held(self)

    class Held:
        def __init__(self, endpoint: Gaining) -> None:
            self._endpoint = endpoint

        def close(self) -> None:
            self._endpoint.held.clear()


def test_every_session_is_told_of_registered_memory_and_lets_go_of_it() -> None:
    pool = mmap.mmap(-1, BLOCK)
    view = memoryview(pool)
    memory = RegisteredMemory(view)
    first, second, deaf = Gaining(), Gaining(), Gaining(refuse=True)
    assert isinstance(first, RegisteringEndpoint)
    show: Callable[[Any], None] = memory.show
    for endpoint in (first, second, deaf, None):  # None: a session without a data path
        show(endpoint)
    assert len(first.held) == len(second.held) == 1
    memory.close()
    memory.close()
    assert memory.closed
    assert not first.held
    assert not second.held
    late = Gaining()
    show(late)
    assert not late.held, "a session that opens later hears nothing"
    view.release()
    pool.close()  # raises BufferError while anyone refers to it


async def test_what_is_no_buffer_is_refused_alike_by_loads_and_stores(tmp_path: Path) -> None:
    bad: list[Any] = [None, 7, (8,), (8, "9"), (8, -(2**40)), np.zeros((4, 4))[:, ::2], b""]
    async with running_daemon(tmp_path / "d") as running, opened(settings_for(running)) as store:
        space = store.space(DESCRIPTOR)
        for buffer in bad:
            for job in (
                space.store([PutBlock(key(0), buffer)]),
                space.load([key(0)], [buffer]),
            ):
                assert (await got(job)).statuses == (Status.BAD_REQUEST,), buffer
        assert (await got(space.store(bad[:1]))).statuses == (Status.BAD_REQUEST,)
        assert store.stats()["backlog_bytes"] == 0


def test_only_writable_contiguous_memory_can_be_registered() -> None:
    for bad in (b"constant", memoryview(bytearray(16))[::2], bytearray()):
        with pytest.raises(UsageError, match="contiguous"):
            RegisteredMemory(bad)


async def test_an_engines_pool_can_be_unmapped_after_close(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d") as running:
        pool = mmap.mmap(-1, 8 * BLOCK)
        view = memoryview(pool)
        store = await asyncio.to_thread(EngineStore, settings_for(running))
        await asyncio.to_thread(store.register, view)
        (memory,) = store._registered
        assert not memory.closed
        space = store.space(DESCRIPTOR)
        slots = [view[n * BLOCK : (n + 1) * BLOCK] for n in range(8)]
        assert (await got(space.store(puts(*range(8))))).ok
        assert (await got(space.load([key(n) for n in range(8)], slots))).ok
        assert bytes(view) == b"".join(content(n) for n in range(8))
        await asyncio.to_thread(store.close)
        assert memory.closed
        for slot in slots:
            slot.release()
        view.release()
        pool.close()  # raises BufferError while anyone refers to it


@pytest.mark.parametrize(
    ("keeps_keys", "open_at", "error"),
    [
        (True, "daemon", ConfigError),
        (True, "host", ConnectionRefusedError),
        (False, "daemon", ConnectionRefusedError),
    ],
)
def test_what_no_daemon_can_open_is_not_to_be_opened_by_one(
    keeps_keys: bool, open_at: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(tenant_key=Path("tenant.key") if keeps_keys else None)

    async def opens(_: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(engine_store.ClientConfig, "find", lambda _: config)
    monkeypatch.setattr(engine_store.AsyncClient, "open", opens)
    with pytest.raises(error):
        EngineStore(EngineSettings(open_at=open_at))
