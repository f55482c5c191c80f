"""The relay between real daemons and a router as llm-d is one: what is stored is what it scores.

Relays run in a thread beside the daemons, except where it is about the command. Dynamo's own
indexer reads one in `tests/engines/routers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import signal
import subprocess
import threading
import urllib.request
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from cli_lab import COMMAND, PROCESS_SECONDS_MAX, Cli
from daemon_lab import client_of, shape
from harness import DaemonProcess, Running, eventually, running_daemon

from bench.processes import free_ports
from entresol_client.cli.errors import CliError
from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import ClientConfig, ShardAddress, TlsFiles
from entresol_client.relay import feed, metrics
from entresol_client.relay.service import Options, Relay
from entresol_client.relay.workers import Worker
from entresol_client.results import PutBlock
from entresol_daemon.config import Config
from entresol_daemon.control import devcerts
from entresol_daemon.control.grpc_services import SNAPSHOTS_PER_TENANT_MAX
from entresol_daemon.events.types import GapReason
from entresol_daemon.shard.listing import Listing
from entresol_proto.ids import NamespaceDescriptor, TenantName
from entresol_proto.limits import KIB
from entresol_proto.status import Status
from tests.engines.routers import llmd

MODEL = "lab/model"
TOKENS = 16
DESCRIPTOR = NamespaceDescriptor(model=MODEL, block_tokens=TOKENS, page_layout="vllm:lab")
SECONDS_MAX = 30.0
DEV = TenantName("dev")
HELD = 64  # events, where it is about how few are held
LISTING_S = 0.01  # for each block, likewise


def chain(blocks: int, name: int = 0) -> list[PutBlock]:
    """Blocks of a prompt under keys as vLLM's tier has them."""
    made: list[PutBlock] = []
    for at in range(blocks):
        before = made[-1].key if made else None
        tokens = tuple(1000 * name + TOKENS * at + i for i in range(TOKENS))
        key = hashlib.sha256((before or b"") + repr(tokens).encode()).digest() + bytes(4)
        made.append(PutBlock(key, key * (8 * KIB // 36), at, before, tokens))
    return made


def prompt(blocks: list[PutBlock]) -> list[int]:
    return [token for block in blocks for token in block.token_ids]


class Router:
    """Reads one pod's endpoint into llm-d's index."""

    def __init__(self) -> None:
        self.index = llmd.Index()
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")

    @classmethod
    def of(cls, relay: Relay, at: int = 0) -> Router:
        return cls.at(relay.publisher.endpoints(relay.publisher.outlets[at])[0])

    @classmethod
    def at(cls, place: str, *, bind: bool = False) -> Router:
        router = cls()
        (router.socket.bind if bind else router.socket.connect)(place)
        return router

    def blocks(self, one: list[PutBlock], pod: str = "pod0") -> float:
        """The pod's score for the prompt; a tier without a weight counts 1 for a block."""
        with contextlib.suppress(zmq.Again):
            while True:
                name, _, payload = self.socket.recv_multipart(zmq.NOBLOCK)
                self.index.read(name, payload)
        return self.index.scores(prompt(one), MODEL).get(pod, 0.0)

    async def scores(self, one: list[PutBlock], blocks: int, pod: str = "pod0") -> None:
        await eventually(
            lambda: self.blocks(one, pod) == blocks,
            seconds=SECONDS_MAX,
            what=f"a score of {blocks}",
        )

    def close(self) -> None:
        self.socket.close(linger=0)


@contextlib.asynccontextmanager
async def relaying(
    config: ClientConfig, given: Router | None = None, **more: Any
) -> AsyncIterator[tuple[Relay, Router]]:
    """A relay in a thread, and a router that reads it from the start, or one `given`."""
    workers = (Worker("pod0", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),)
    options = Options(**{"workers": workers, "match": {"model": MODEL}, **more})
    relay = Relay(options, lambda: config, model=MODEL)
    router = given or Router.of(relay)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            relay.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        await eventually(lambda: router.blocks([]) == 0 and relay.publisher.outlets[0].readers > 0)
        yield relay, router
    finally:
        relay.stop()
        await asyncio.to_thread(thread.join)
        if given is None:
            router.close()
            zmq.Context.instance().term()
        assert not failed, failed


@contextlib.asynccontextmanager
async def lab(folder: Path, **more: Any) -> AsyncIterator[tuple[Running, Namespace, Relay, Router]]:
    """A daemon, an engine's namespace, a relay, a router."""
    async with running_daemon(folder, shape()) as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        async with relaying(running.client_config(), **more) as (relay, router):
            yield running, space, relay, router


async def test_a_router_follows_puts_and_forgets(tmp_path: Path) -> None:
    async with lab(tmp_path) as (_, space, relay, router):
        first, second = chain(6, 1), chain(4, 2)
        assert (await space.put(first)).ok
        assert (await space.put(second[1:])).ok
        await router.scores(first, 6)
        assert router.blocks(second) == 0
        assert (await space.put(second[:1])).ok
        await router.scores(second, 4)
        assert (await space.forget([first[2].key])).count == 1
        await router.scores(first, 2)
        assert (await space.put(first[2:3])).ok
        await router.scores(first, 6)
        assert router.index.dropped == 0, "no block came before its parent"
        assert relay.mirror.counts["announced_blocks"] == 11


async def test_a_late_router_without_replay_is_told_everything(tmp_path: Path) -> None:
    async with lab(tmp_path, round_pause_s=0.1) as (_, space, relay, router):
        one = chain(8)
        assert (await space.put(one)).ok
        await router.scores(one, 8)
        late = Router.of(relay)
        try:
            await late.scores(one, 8)
            assert late.index.dropped == 0
            assert (await space.forget([one[7].key])).count == 1
            await late.scores(one, 7)
        finally:
            late.close()


async def test_an_erased_tenant_is_withdrawn(tmp_path: Path) -> None:
    async with lab(tmp_path) as (running, space, relay, router):
        one = chain(5)
        assert (await space.put(one, ack="durable")).ok
        await router.scores(one, 5)
        await running.daemon.admin.tenant_erase(TenantName("dev"))
        await router.scores(one, 0)
        assert relay.mirror.stored_blocks == 0
        await eventually(lambda: relay.shards["dev"].state == "down", seconds=SECONDS_MAX)
        assert "erased" in relay.shards["dev"].reason


@pytest.mark.parametrize("connect", [False, True])
async def test_what_went_while_no_relay_ran_is_taken_back_by_the_next(
    tmp_path: Path, connect: bool
) -> None:
    """A router without replay hears nothing of what was published before it was back."""
    (port,) = free_ports(1)
    place = f"tcp://127.0.0.1:{port}"
    workers = (Worker("pod0", place, connect=connect),)
    async with running_daemon(tmp_path, shape()) as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        router = Router.at(place, bind=connect)
        try:
            one, two = chain(4, 1), chain(3, 2)
            assert (await space.put(one)).ok
            assert (await space.put(two)).ok
            more: dict[str, Any] = {"workers": workers, "round_pause_s": 0.1}
            async with relaying(running.client_config(), router, **more):
                await router.scores(one, 4)
                await router.scores(two, 3)
            assert (await space.forget([one[1].key])).count == 1
            assert router.blocks(one) == 4
            async with relaying(running.client_config(), router, **more):
                await router.scores(one, 1)
                await router.scores(two, 3)
        finally:
            router.close()


async def test_a_tenant_erased_while_the_relay_is_away_is_withdrawn_at_once(tmp_path: Path) -> None:
    """It does not hear of the erasure, only that the daemon refuses it since."""
    async with lab(tmp_path) as (running, space, _, router):
        one = chain(5)
        assert (await space.put(one, ack="durable")).ok
        await router.scores(one, 5)
        assert running.daemon.grpc is not None
        for service in running.daemon.grpc._events:
            for stream in tuple(service._streams):
                stream.close()
        await running.daemon.admin.tenant_erase(TenantName("dev"))
        await router.scores(one, 0)


async def test_blocks_without_tokens_are_counted_and_not_published(tmp_path: Path) -> None:
    async with lab(tmp_path) as (_, space, relay, router):
        bare = [replace(block, token_ids=()) for block in chain(3, 1)]
        assert (await space.put(bare)).ok
        one = chain(2, 2)
        assert (await space.put(one)).ok
        await router.scores(one, 2)
        assert relay.mirror.counts["tokenless_blocks"] == 3
        assert (relay.mirror.told_blocks, relay.mirror.stored_blocks) == (2, 2)


async def test_a_namespace_that_is_opened_later_is_followed(tmp_path: Path) -> None:
    async with lab(tmp_path) as (running, space, _, router):
        one, tuned = chain(2, 1), chain(2, 2)
        assert (await space.put(one)).ok
        await router.scores(one, 2)
        async with client_of(running) as client:
            adapter = await client.namespace(replace(DESCRIPTOR, lora="tuned"))
            assert (await adapter.put(tuned)).ok
            salted = await client.namespace(replace(DESCRIPTOR, cache_salt="grain"))
            assert (await salted.put(chain(2, 3))).ok
            other = await client.namespace(replace(DESCRIPTOR, dtype="fp16"))
            assert (await other.put(chain(2, 4))).ok
        await eventually(
            lambda: (
                router.blocks(one) == 2
                and router.index.scores(prompt(tuned), "tuned") == {"pod0": 2.0}
            ),
            seconds=SECONDS_MAX,
        )
        assert router.blocks(tuned) == router.blocks(chain(2, 3)) == router.blocks(chain(2, 4)) == 0


async def test_a_chain_over_two_shards_is_one(tmp_path: Path) -> None:
    """Keys are placed by hash: neighbours are on different shards, whose events have no order."""
    (tmp_path / "a").mkdir()
    async with running_daemon(tmp_path / "a", shape()) as first:
        pki = devcerts.load(tmp_path / "a" / "pki")
        trust_domain = first.daemon.config.tls.trust_domain
        files = devcerts.issue(
            pki, "second", uris=[f"spiffe://{trust_domain}/shard/second"],
            hosts=("localhost", "127.0.0.1"), server=True,
        )  # fmt: skip

        def second(config: Any) -> Any:
            config = shape()(config)
            tls = replace(config.tls, cert=files.cert, key=files.key, ca=pki.ca)
            return replace(config, shard=replace(config.shard, name="second"), tls=tls)

        async with running_daemon(tmp_path / "b", second) as other:
            shards = (
                *first.client_config().shards,
                replace(other.client_config().shards[0], name="second"),
            )
            both = replace(first.client_config(), shards=shards)
            one = chain(40)
            async with relaying(both, round_pause_s=0.1) as (relay, router):
                async with await AsyncClient.open(both) as client:
                    space = await client.namespace(DESCRIPTOR)
                    for start in (30, 20, 0, 10):
                        assert (await space.put(one[start : start + 10], ack="durable")).ok
                await router.scores(one, 40)
                held = [len(each.daemon.shard.parts.engine.index) for each in (first, other)]
                assert sum(held) == 40
                assert min(held) > 5, "each has a part of the chain"
                late = Router.of(relay)
                try:
                    await late.scores(one, 40)
                    assert router.index.dropped == late.index.dropped == 0
                finally:
                    late.close()


async def test_a_snapshot_that_outlasts_the_events_is_followed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large shard all that the log holds goes by while it is listed: what a relay watched from
    the snapshot's position on began with a gap, each time."""
    turn = Listing._turn

    async def slow(self: Listing, cost: int) -> None:
        await asyncio.sleep(LISTING_S)
        await turn(self, cost)

    monkeypatch.setattr(Listing, "_turn", slow)

    def small(config: Config) -> Config:
        config = shape()(config)
        return replace(config, events=replace(config.events, history_events_max=HELD))

    async with running_daemon(tmp_path, small) as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        listed, gone, new = chain(60, 1), chain(20, 2), chain(20, 3)
        for one in (listed, gone):
            assert (await space.put(one, ack="durable")).ok
        log = running.daemon.shard.parts.events
        gaps = list[GapReason]()
        monkeypatch.setattr(log, "_on_gap", gaps.append)
        busy = True

        async def others() -> None:
            """Blocks come and go, faster than a snapshot lists them."""
            other, number = chain(1, 4)[0], 0
            while busy:
                assert (await space.put([other])).ok
                assert (await space.forget([other.key])).count == 1
                if number < len(gone):
                    assert (await space.forget([gone[-1 - number].key])).count == 1
                    assert (await space.put([new[number]])).ok
                number += 1

        async with relaying(running.client_config(), round_pause_s=0.1) as (relay, router):

            async def followed() -> None:
                await eventually(
                    lambda: relay.shards["dev"].synchronised, seconds=SECONDS_MAX,
                    what="a complete snapshot",
                )  # fmt: skip
                await eventually(lambda: gaps or log.subscriptions_of(DEV), what="a watch")
                assert not gaps

            before = log.position(DEV).seq
            working = asyncio.create_task(others())
            try:
                await followed()
                assert log.position(DEV).seq - before > 2 * HELD, "it was too quick"
                relay.again()  # as for a reader that comes later
                await eventually(lambda: not relay.shards["dev"].synchronised)
                await followed()
                await router.scores(new, len(new))
                await router.scores(listed, len(listed))
                await router.scores(gone, 0)
                assert not gaps
            finally:
                busy = False
                await working
            index = running.daemon.shard.parts.engine.index
            await eventually(
                lambda: relay.mirror.stored_blocks == relay.mirror.told_blocks == len(index),
                seconds=SECONDS_MAX, what="the shard's index",
            )  # fmt: skip


async def test_a_relay_that_waits_for_its_snapshot_goes_on_following(tmp_path: Path) -> None:
    """Others take theirs: until that was over, which may be minutes, routers heard nothing."""
    async with lab(tmp_path, round_pause_s=0.1, clear=False) as (running, space, relay, router):
        one, two = chain(4, 1), chain(3, 2)
        assert (await space.put(one)).ok
        await router.scores(one, 4)
        await eventually(lambda: relay._round_done_s is not None)
        assert running.daemon.grpc is not None
        services = running.daemon.grpc._events
        for service in services:
            service._snapshots[DEV] = dict.fromkeys(range(SNAPSHOTS_PER_TENANT_MAX))
        relay.again()
        await eventually(lambda: relay._round_done_s is None, what="a round")
        cut = relay.snapshots["cut"]
        assert (await space.put(two)).ok
        assert (await space.forget([one[2].key])).count == 1
        await router.scores(two, 3)
        await router.scores(one, 2)
        assert not relay.shards["dev"].synchronised
        for service in services:
            del service._snapshots[DEV]
        await eventually(lambda: relay._round_done_s is not None, seconds=SECONDS_MAX)
        assert relay.shards["dev"].synchronised
        assert (relay.mirror.told_blocks, relay.mirror.waiting_blocks) == (5, 1)
        assert relay.snapshots["cut"] == cut, "what was refused had not begun"


async def test_metrics_tell_what_the_status_tells(tmp_path: Path) -> None:
    async with lab(tmp_path) as (_, space, relay, router):
        one = chain(3)
        assert (await space.put(one)).ok
        await router.scores(one, 3)
        await eventually(lambda: relay.latest["blocks"]["announced"] == 3, seconds=SECONDS_MAX)
        (port,) = free_ports(1)
        stop = metrics.serve(relay, "127.0.0.1", port)
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            url = f"http://127.0.0.1:{port}/metrics"
            text = await asyncio.to_thread(lambda: opener.open(url, timeout=10).read().decode())
        finally:
            await asyncio.to_thread(stop)
        assert "entresol_relay_announced_blocks 3.0" in text
        assert 'entresol_relay_shard_up{shard="dev"} 1.0' in text
        assert 'entresol_relay_readers{pod="pod0"} 1.0' in text
        for name, _, about in metrics.METRICS:
            assert f"# HELP {name} {about}" in text.replace("_total_total", "_total")


def test_a_relay_may_be_stopped_while_it_ends() -> None:
    """The thread that stops it may come between its last look and its end, or long after."""
    config = ClientConfig(
        shards=(ShardAddress("nobody", port=1, grpc_port=1),), tls=TlsFiles(*[Path("none")] * 3)
    )
    relay = Relay(
        Options(workers=(Worker("pod0", "tcp://127.0.0.1:0"),)), lambda: config, model=MODEL
    )
    relay.stop()
    relay.run()
    relay.stop()
    # Still ours: who was about to write to it, a feed or `stop`, does no harm.
    assert os.readlink(f"/proc/self/fd/{relay._wake_fd}") == "anon_inode:[eventfd]"
    gone = weakref.ref(relay)
    del relay
    gc.collect()
    assert gone() is None, "nothing keeps it and its descriptor"


@pytest.mark.parametrize("other", [feed.Up("right"), feed.Down("right", "away")])
def test_a_wrong_shard_ends_a_relay_only_when_no_other_is_right(other: feed.Item) -> None:
    """Which of two shards answered first decided it."""
    shards = (
        ShardAddress("right", port=1, grpc_port=1),
        ShardAddress("wrong", port=1, grpc_port=1),
    )
    config = ClientConfig(shards=shards, tls=TlsFiles(*[Path("none")] * 3))
    relay = Relay(
        Options(workers=(Worker("pod0", "tcp://127.0.0.1:0"),)), lambda: config, model=MODEL
    )
    refused = feed.Down("wrong", "another", CliError("another", status=Status.FORBIDDEN))
    try:
        relay._apply(refused, 0.0)  # the other one may be right
        relay._apply(other, 0.0)
        if isinstance(other, feed.Up):
            relay._apply(refused, 0.0)
        else:
            with pytest.raises(CliError, match="another"):
                relay._apply(refused, 0.0)
    finally:
        relay.close()


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("r") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


@pytest.mark.daemon
def test_the_list_shows_what_could_be_published(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x" * 1000)
    cli(
        "put", str(tmp_path / "in"), "--model", "listed/model", "--lora", "tuned", "--salt", "grain"
    )
    rows = cli("relay", "--list", "--json").lines
    (row,) = [row for row in rows if row["model"] == "listed/model"]
    assert (row["shard"], row["lora"], row["salted"]) == ("dev", "tuned", True)
    assert row["blocks"] >= 1
    assert "grain" not in json.dumps(rows)
    words = cli("relay", "--list").out
    assert "listed/model" in words
    assert "(salted)" in words
    assert cli("relay", "--list", "--match", "model=listed/*", "--json").lines == [row]
    assert cli("relay", "--list", "--match", "dtype=none").out == "nothing is stored\n"


@pytest.mark.daemon
@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((), "no --model"),
        (("--model", "m"), "no --worker"),
        (("--model", "m", "--worker", "pod0"), "--worker 'pod0'"),
        (("--model", "a@b", "--worker", "p=1"), "@ divides it"),
        (("--model", "m", "--worker", "p=1", "--match", "colour=red"), "--match 'colour=red'"),
        (("--model", "m", "--worker", "p=1", "--match", "model=x"), "--match 'model=x'"),
        (("--model", "m", "--worker", "p=tcp://127.0.0.1:0", "--metrics", "x"), "--metrics 'x'"),
        (("--model", "m", "--worker", "p=1", "--medium", "GPU"), "invalid choice"),
        (("--model", "m", "--worker", "p=1", "--withdraw-after", "soon"), "not a time"),
        (("--model", "m", "--worker", "p=1", "--buffer", "0"), "not a number"),
        (("--model", "m", "--worker", "p=1", "--topic", "x"), "unrecognized"),
    ],
)
def test_mistakes_are_refused_before_anything_is_published(
    cli: Cli, words: tuple[str, ...], match: str
) -> None:
    said = cli("relay", *words, code=2)
    assert match in said.err


@pytest.mark.daemon
def test_two_layouts_of_a_model_are_a_question(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x" * 1000)
    for dtype in ("bf16", "fp16"):
        cli("put", str(tmp_path / "in"), "--model", "double", "--dtype", dtype)
    words = ("relay", "--model", "double", "--worker", "p=tcp://127.0.0.1:0")
    said = cli(*words, code=2)
    assert "2 layouts match" in said.err
    assert "dtype=" in said.err
    assert "--match dtype=" in said.err


@pytest.mark.daemon
def test_a_shard_that_is_another_ends_the_command(cli: Cli) -> None:
    text = cli.config.read_text()
    assert 'name = "dev"' in text
    wrong = cli.folder / "wrong.toml"
    wrong.write_text(text.replace('name = "dev"', 'name = "elsewhere"'))
    said = cli("relay", "--model", "m", "--worker", "p=tcp://127.0.0.1:0", config=wrong, code=1)
    assert "elsewhere" in said.err


@pytest.mark.daemon
def test_the_process_tells_what_it_does_and_stops_when_asked(daemon: DaemonProcess) -> None:
    config = daemon.directory / "client.toml"
    command = [
        *COMMAND, "relay", "--model", "m", "--json", "--status", "100ms", "--config", str(config),
        "--worker", "pod0=tcp://127.0.0.1:0,replay=tcp://127.0.0.1:0", "--worker", "pod1=tcp://*:0",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["type"] == "relay"
        assert [row["topic"] for row in first["workers"]] == ["kv@pod0@m", "kv@pod1@m"]
        while json.loads(process.stdout.readline())["shards"][0]["state"] != "up":
            pass
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PROCESS_SECONDS_MAX)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["type"] == "status"
    assert err.count("can read the tenant's token ids") == 1, "only pod1 is open to others"
    assert "no replay" in err
