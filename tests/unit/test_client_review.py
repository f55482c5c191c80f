"""What a review of the client found: links that died of a bug, threads that stayed, bare errors."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import mmap
import signal
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import leaks
import pytest
from client_peer import DESCRIPTOR, serving

from entresol_client import (
    AsyncClient,
    Client,
    ClientConfig,
    client,
    placement,
    shard_link,
    staging,
)
from entresol_client import tracing as tracing_module
from entresol_client.config import BreakerSettings, ShardAddress, TlsFiles
from entresol_client.placement import Placement
from entresol_client.relay import chain, publisher, wire
from entresol_client.relay.chain import Mirror, Removed, Stored
from entresol_client.results import RequestFailedError
from entresol_client.surroundings import Surroundings
from entresol_client.tracing import Tracing
from entresol_proto.ids import EngineKey
from entresol_proto.status import ConfigError, EntresolError, FabricError, Status

FILES = TlsFiles(Path("a"), Path("b"), Path("c"))


async def until(what: Any, name: str) -> None:
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never happened: {name}")


# Finding 2: the background task.


async def test_a_bug_in_connecting_costs_an_attempt_and_not_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No thread for the resolver: a RuntimeError, which nothing expects."""
    real, broken = shard_link.connect, [True]

    async def connect(*args: Any) -> Any:
        if broken:
            raise RuntimeError("can't start new thread")
        return await real(*args)

    monkeypatch.setattr(shard_link, "connect", connect)
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as one:
        (report,) = one.shards()
        assert not report.connected
        assert report.last_error == "bug: RuntimeError"
        assert any(row.levelno == logging.CRITICAL and row.exc_info for row in caplog.records)
        broken.clear()
        await until(lambda: one.shards()[0].connected, "the shard is used")


async def test_a_bug_after_connecting_ends_that_session(tmp_path: Path) -> None:
    seen: list[Any] = []

    def on_session(_shard: str, opened: Any) -> None:
        seen.append(opened)
        if len(seen) == 1:
            raise ZeroDivisionError

    async with serving(tmp_path) as peer:
        around = Surroundings(on_session=on_session)
        async with await AsyncClient.open(peer.config(), around=around) as one:
            await until(lambda: one.shards()[0].connected, "the shard is used")
            assert seen[0].connection.lost.done()
            assert seen[0].endpoint.closed


@pytest.mark.parametrize("host", ["", " ", "a b", "a\n", "\0", "a\tb", "x\u202e", "a..b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        ClientConfig((ShardAddress("s", host),), FILES)


# Finding 24: fields of a configuration built by hand.


@pytest.mark.parametrize(
    "change",
    [
        {"shards": None}, {"shards": ("a",)}, {"tls": None}, {"breaker": 3}, {"fabric": 1},
        {"deadline_ns": "1s"}, {"deadline_ns": 1e9}, {"open_threads": True}, {"fallback": 1},
        {"traces": None}, {"tenant_key": "a"}, {"verbs_devices": "mlx5_0"},
        {"shards": (ShardAddress("s", port="7440"),)},  # type: ignore[arg-type]
        {"shards": (ShardAddress("s", weight="1"),)},  # type: ignore[arg-type]
        {"shards": (ShardAddress("s", host=None),)},  # type: ignore[arg-type]
        {"shards": (ShardAddress(5),)},  # type: ignore[arg-type]
        {"tls": dataclasses.replace(FILES, trust_domain=None)},
        {"tls": dataclasses.replace(FILES, cert=Path("a\0"))}, {"tenant_key": Path("a\0")},
        {"breaker": BreakerSettings(failures_to_open="1")},  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_a_configuration_error(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ClientConfig(**{"shards": (ShardAddress("s"),), "tls": FILES, **change})


def test_whole_numbers_do_for_weights_and_absent_paths_for_none() -> None:
    ClientConfig((ShardAddress("s", weight=2),), FILES, tenant_key=Path("x"))


# Finding 8: threads and sessions that stayed.


async def test_a_client_that_cannot_be_made_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_args: Any) -> Any:
        raise ConfigError("no staging memory")

    async with serving(tmp_path) as peer:
        config, before = peer.config(), set(threading.enumerate())
        with pytest.raises(ConfigError):
            AsyncClient(dataclasses.replace(config, traces="bogus"))
        monkeypatch.setattr(client, "ShardLink", link)
        with pytest.raises(ConfigError):
            AsyncClient(config)
        await until(lambda: set(threading.enumerate()) <= before, "the threads end")


async def test_a_client_that_has_no_threads_leaves_none_that_exports_traces(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry", reason="not run here: OpenTelemetry is not installed")

    def none(threads: int) -> Any:
        raise EntresolError(f"cannot start {threads} threads", status=Status.BUSY)

    async with serving(tmp_path) as peer:
        config, before = peer.config(traces="http://127.0.0.1:1"), set(threading.enumerate())
        with pytest.raises(EntresolError, match="threads"):
            AsyncClient(config, around=Surroundings(make_workers=none))
        assert set(threading.enumerate()) <= before


async def test_no_thread_for_traces_is_told_as_none_for_blocks_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry", reason="not run here: OpenTelemetry is not installed")
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("Otel"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with serving(tmp_path) as peer:
        config, before = peer.config(traces="http://127.0.0.1:1"), set(threading.enumerate())
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(EntresolError, match="exports traces") as raised:
            AsyncClient(config)
        assert raised.value.status is Status.BUSY
        await until(lambda: set(threading.enumerate()) <= before, "the threads end")


async def test_a_cancelled_close_goes_on_and_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real = asyncio.Event(), shard_link.ShardLink.close

    async def slow(self: Any) -> None:
        await go_on.wait()
        await real(self)

    monkeypatch.setattr(shard_link.ShardLink, "close", slow)
    async with serving(tmp_path) as peer:
        config = peer.config()
        before = set(threading.enumerate())
        one = await AsyncClient.open(config)
        first = asyncio.ensure_future(one.close())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second, third = asyncio.ensure_future(one.close()), asyncio.ensure_future(one.close())
        await asyncio.sleep(0)
        assert not second.done()
        go_on.set()
        await asyncio.gather(second, third)
        assert not one.shards()[0].connected
        await until(lambda: set(threading.enumerate()) <= before, "the threads end")


def test_an_interrupted_close_still_ends_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates: list[ClientConfig] = []

    async def prepare() -> None:
        async with serving(tmp_path) as peer:
            certificates.append(peer.config())

    asyncio.run(prepare())
    Client(certificates[0]).close()  # so that what is cached for good counts as given
    before = leaks.snapshot()
    one = Client(certificates[0])  # of a daemon that is gone
    one.namespace(DESCRIPTOR)
    close = one._client.close

    async def interrupted() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await close()

    monkeypatch.setattr(one._client, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.close()
    one.close()
    leaks.assert_no_leaks(before, wait_s=10.0)


# Finding 4: traces.


def test_closing_does_not_wait_for_an_exporter_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry", reason="not run here: OpenTelemetry is not installed")
    monkeypatch.setattr(tracing_module, "CLOSE_TIMEOUT_S", 0.01)
    go_on, ended = threading.Event(), threading.Event()
    provider = SimpleNamespace(
        get_tracer=lambda _: None, force_flush=lambda _: go_on.wait(30), shutdown=ended.set
    )
    monkeypatch.setattr(tracing_module, "_provider_of", lambda _: provider)
    one = Tracing("http://localhost:1")
    one.close()
    assert not ended.is_set(), "it waited"
    one.close()
    go_on.set()
    assert ended.wait(30)


# Finding 9: staging memory.


def test_memory_that_the_host_has_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_args: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    with pytest.raises(ConfigError, match="Cannot allocate") as caught:
        staging.PrivateMemory(1 << 40)
    assert "staging_bytes_max" in caught.value.hint


async def test_memory_for_puts_that_is_not_there_is_a_failed_data_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_length_bytes: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shard_link, "shared_memory", none)
    opened: Any = SimpleNamespace(
        connection=None, welcome=None, endpoint=object(), fabric="tcp", fabric_reason=""
    )
    with pytest.raises(FabricError, match="Cannot allocate") as caught:
        await shard_link.Session(opened, 1)._expose_staging()
    assert caught.value.status is Status.FABRIC_ERROR


async def test_a_put_hears_how_its_own_wait_for_memory_ended() -> None:
    """Whoever hears first that it failed may try again before the others have looked."""

    class Endpoint:
        tries = 0

        async def expose(self, _memory: object) -> str:
            self.tries += 1
            first = self.tries == 1
            await asyncio.sleep(0.01)
            if first:
                raise FabricError("no memory for a region")
            return "exposed"

    opened: Any = SimpleNamespace(
        connection=None, welcome=None, endpoint=Endpoint(), fabric="tcp", fabric_reason=""
    )
    session = shard_link.Session(opened, 1 << 20)

    async def once() -> object:
        try:
            return (await session.put_staging(2**62))[1]
        except RequestFailedError as error:
            return error.status

    async def twice() -> list[object]:
        return [await once(), await once()]

    both, other = await asyncio.gather(twice(), once())
    assert both == [Status.FABRIC_ERROR, "exposed"]
    assert other is Status.FABRIC_ERROR
    assert session._put is not None
    session._put.memory.close()


# Finding 10: what waits for a slow reader of a relay.


def change(tokens: int, hashes: int = 1) -> Stored:
    numbers = array("I", [2**32 - 1]) * tokens
    return Stored([b"h" * 32] * hashes, b"p" * 32, numbers, tokens // hashes)


def test_a_batch_has_bounded_bytes_and_loses_nothing() -> None:
    writer = wire.Writer("maps")
    changes: list[Any] = [change(chain.STORED_TOKENS_MAX) for _ in range(40)]
    changes += [change(16) for _ in range(3 * wire.EVENTS_PER_BATCH_MAX)]
    changes += [Removed([b"h" * 32] * (chain.REMOVED_HASHES_MAX + 2048)) for _ in range(9)]
    found = list(wire.batches(changes))
    assert [one for batch in found for one in batch] == changes
    for batch in found:
        assert len(batch) <= wire.EVENTS_PER_BATCH_MAX
        raw = writer.batch([writer.event(one) for one in batch], time_unix_s=1.0, dp_rank=1)
        assert len(raw) <= wire.BATCH_BYTES_MAX
    waiting = publisher.SEND_QUEUE_MESSAGES_MAX * wire.BATCH_BYTES_MAX
    assert waiting <= publisher.SEND_QUEUE_BYTES_MAX
    assert list(wire.batches([])) == []


def test_changes_join_until_they_hold_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "STORED_TOKENS_MAX", 32)
    mirror: Any = Mirror.__new__(Mirror)
    mirror._changes, mirror.told_blocks, mirror.counts = [], 0, {"announced_blocks": 0}
    one: Any = SimpleNamespace(blocks=dict.fromkeys(range(5), 0), parts=1, lora="")
    for number in range(5):
        mirror._announce(one, number, number - 1 if number else None, array("I", range(16)))
    assert [len(found.tokens) for found in mirror._changes] == [32, 32, 16]


# Finding 27: placement.


def test_the_highest_scores_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """(score + 0.5) / 2^64 rounds to 1 for the last 1,024 of them, and ln(1) is 0."""
    for score in (2**64 - 1, 2**64 - 2, 2**64 - 1024, 0):
        monkeypatch.setattr(placement, "placement_hash", lambda *_, found=score: found)
        assert Placement([("a", 1.0), ("b", 2.0)]).owner(bytes(32), EngineKey(b"k" * 8)) == 1
    assert math.log(placement._BELOW_ONE) < 0
