"""Spans that land on a thread: exact, once, whatever the peer does, and never after their time."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import uvloop
from tcp_peer import BAD_ANSWERS, RawPeer, raw_session, run, soon, target

from entresol_proto import native
from entresol_proto.fabric import framing, registry
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.fabric.framing import EVERY_INDEX, SPAN
from entresol_proto.fabric.landing import SPAN_BYTES_MAX, Lander
from entresol_proto.fabric.tcp import TcpEndpoint, TcpFabricServer
from entresol_proto.status import Status

pytestmark = pytest.mark.skipif(
    native.KERNEL is None, reason="not run here: the package was built without a C compiler"
)


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


@dataclass
class Landed:
    """What `on_landed` was given."""

    answer: Status = Status.OK
    seen: dict[int, bytes] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None

    def __call__(self, number: int, view: memoryview) -> Status:
        self.before()
        assert number not in self.seen, "handed over twice"
        assert threading.current_thread() is not threading.main_thread()
        self.seen[number] = bytes(view)
        return self.answer


def spans(*sizes: int) -> list[RemoteSpan]:
    return [RemoteSpan(1, 0, size) for size in sizes]


async def say_in_crumbs(peer: RawPeer, raw: bytes, rng: random.Random) -> None:
    """Send in packets that end anywhere."""
    at = 0
    while at < len(raw):
        end = at + rng.choice((1, 7, 63, 64, 65, 1_000, 40_000, 300_000))
        peer.say(raw[at:end])
        await peer.writer.drain()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        at = end


@pytest.mark.parametrize("seed", range(8))
def test_spans_land_exactly_however_they_are_cut(runner: object, seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        sizes = [rng.choice((1, 64, 4_096, 100_001, 700_000)) for _ in range(12)]
        bodies = [rng.randbytes(size) for size in sizes]
        async with raw_session() as (endpoint, peer):
            served = rng.randbytes(5_000)
            exposure = await endpoint.expose(memoryview(bytearray(served)))
            for _ in range(2):  # the loop receives in between, and hands over again
                landed = Landed()
                assert endpoint.can_land(spans(*sizes))
                landing = asyncio.ensure_future(endpoint.land(spans(*sizes), landed, soon(20)))
                request = await peer.asked()
                out, failed, reads = b"", set(), 0
                for index, body in enumerate(bodies):
                    if rng.random() < 0.2:
                        out += framing.error(request, index, Status.LEASE_EXPIRED)
                        failed.add(index)
                        continue
                    at = 0
                    while at < len(body):
                        size = rng.randint(1, len(body))
                        piece = body[at : at + size]
                        out += framing.data(request, index, at, len(piece)) + piece
                        at += size
                        if rng.random() < 0.2:  # the peer reads from us meanwhile
                            out += framing.read(reads, [exposure.span(100, 900)])
                            reads += 1
                            out += framing.cancel(77)
                await say_in_crumbs(peer, out, rng)
                statuses = await asyncio.wait_for(landing, 20)
                for index, body in enumerate(bodies):
                    expected = Status.LEASE_EXPIRED if index in failed else Status.OK
                    assert statuses[index] is expected, f"seed {seed}"
                    assert landed.seen.get(index) == (None if index in failed else body)
                for read in range(reads):
                    kind, _, _, asked, _, body = await peer.hear()
                    assert (kind, asked, body) == (framing.Message.DATA, read, served[100:1_000])
                memory, ops = target(300)
                reading = asyncio.ensure_future(endpoint.read(ops, soon()))
                request = await peer.asked()
                peer.say(framing.data(request, 0, 0, 300) + b"y" * 300)
                assert await reading == [Status.OK]
                assert bytes(memory[100:400]) == b"y" * 300

    run(runner, scenario())


@pytest.mark.parametrize("end", ["deadline", "disconnect"])
def test_what_landed_before_the_end_keeps_its_own_status(runner: object, end: str) -> None:
    """Its function has run: the caller's buffer holds the block, so it must not read as absent."""

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            landed = Landed()
            until_ns = soon(1) if end == "deadline" else soon(20)
            landing = asyncio.ensure_future(
                endpoint.land(spans(1_000, 1_000, 1_000), landed, until_ns)
            )
            request = await peer.asked()
            peer.say(
                framing.data(request, 0, 0, 1_000) + b"a" * 1_000,
                framing.error(request, 1, Status.LEASE_EXPIRED),
                framing.data(request, 2, 0, 1_000) + b"b" * 10,
            )
            await peer.writer.drain()
            while not landed.seen:
                await asyncio.sleep(0.005)
            if end == "disconnect":
                await asyncio.sleep(0.05)
                peer.writer.close()
            statuses = await asyncio.wait_for(landing, 10)
            last = Status.DEADLINE if end == "deadline" else Status.DISCONNECTED
            assert statuses == [Status.OK, Status.LEASE_EXPIRED, last]
            assert landed.seen == {0: b"a" * 1_000}

    run(runner, scenario())


@pytest.mark.parametrize("how", list(BAD_ANSWERS))
def test_a_bad_answer_ends_the_session_and_is_not_handed_over(runner: object, how: str) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            landed = Landed()
            landing = asyncio.ensure_future(endpoint.land(spans(1_000, 1_000), landed, soon()))
            peer.say(BAD_ANSWERS[how](await peer.asked()))
            statuses = await asyncio.wait_for(landing, 5)
            assert statuses[1] is Status.FABRIC_ERROR
            assert b"x" not in b"".join(landed.seen.values())
            await peer.cut_off()

    run(runner, scenario())


def test_nothing_behind_a_bad_answer_is_handed_over(runner: object) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            first, second = Landed(), Landed()
            landings = [
                asyncio.ensure_future(endpoint.land(spans(1_000), each, soon()))
                for each in (first, second)
            ]
            requests = [await peer.asked(), await peer.asked()]
            good = framing.data(requests[1], 0, 0, 1_000) + bytes(1_000)
            peer.say(framing.error(requests[1] + 7, 0, 9), good)
            assert await asyncio.gather(*landings) == [[Status.FABRIC_ERROR]] * 2
            await peer.cut_off()
            assert not first.seen
            assert not second.seen

    run(runner, scenario())


def test_what_the_function_says_is_the_status(runner: object) -> None:
    async def scenario() -> None:
        def on_landed(number: int, view: memoryview) -> Status:
            if number == 1:
                raise RuntimeError("a caller's bug")
            return (Status.CORRUPT, Status.OK, Status.OK)[number]

        async with raw_session() as (endpoint, peer):
            landing = asyncio.ensure_future(endpoint.land(spans(8, 8, 8), on_landed, soon()))
            request = await peer.asked()
            peer.say(*(framing.data(request, n, 0, 8) + bytes(8) for n in range(3)))
            assert await landing == [Status.CORRUPT, Status.INTERNAL, Status.OK]

    run(runner, scenario())


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_nothing_is_handed_over_afterwards(runner: object, how: str) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            landed = Landed()
            until_ns = soon(0.2 if how == "deadline" else 5)
            landing = asyncio.ensure_future(endpoint.land(spans(1_000, 1_000), landed, until_ns))
            request = await peer.asked()
            peer.say(framing.data(request, 0, 0, 600) + b"x" * 600)
            if how == "cancelled":
                await asyncio.sleep(0.05)
                landing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await landing
            else:
                assert await landing == [Status.DEADLINE] * 2
            assert (await peer.hear())[0] == framing.Message.CANCEL
            peer.say(framing.data(request, 0, 600, 400) + b"x" * 400)
            peer.say(framing.error(request, EVERY_INDEX, Status.DEADLINE))
            again = Landed()
            while not endpoint.can_land(spans(50)):
                await asyncio.sleep(0.01)
            landing = asyncio.ensure_future(endpoint.land(spans(50), again, soon()))
            request = await peer.asked()
            peer.say(framing.data(request, 0, 0, 50) + b"z" * 50)
            assert await landing == [Status.OK]
            assert not landed.seen
            assert again.seen == {0: b"z" * 50}

    run(runner, scenario())


def test_giving_up_waits_for_the_call_that_runs(runner: object) -> None:
    async def scenario() -> None:
        running, done = threading.Event(), threading.Event()

        def slow() -> None:
            running.set()
            time.sleep(0.2)
            done.set()

        async with raw_session() as (endpoint, peer):
            landed = Landed(before=slow)
            landing = asyncio.ensure_future(endpoint.land(spans(10, 10), landed, soon()))
            request = await peer.asked()
            peer.say(framing.data(request, 0, 0, 10) + bytes(10))
            while not running.is_set():
                await asyncio.sleep(0.005)
            landing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await landing
            assert done.is_set()
            peer.say(framing.data(request, 1, 0, 10) + bytes(10))
            await asyncio.sleep(0.1)
            assert list(landed.seen) == [0]

    run(runner, scenario())


@pytest.mark.parametrize("how", ["the peer ends", "the peer resets", "we close"])
def test_a_session_that_ends_ends_it(runner: object, how: str) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            landed = Landed()
            landing = asyncio.ensure_future(endpoint.land(spans(1_000), landed, soon()))
            request = await peer.asked()
            peer.say(framing.data(request, 0, 0, 600) + b"x" * 600)
            await peer.writer.drain()
            if how == "we close":
                await endpoint.close()
            elif how == "the peer resets":
                peer.writer.transport.abort()
            else:
                peer.writer.close()
            assert await asyncio.wait_for(landing, 5) == [Status.DISCONNECTED]
            assert not landed.seen
            assert not endpoint.can_land(spans(10))

    run(runner, scenario())


def test_a_read_waits_for_what_lands(runner: object) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            landed = Landed()
            landing = asyncio.ensure_future(endpoint.land(spans(40), landed, soon()))
            first = await peer.asked()
            memory, ops = target(30)
            reading = asyncio.ensure_future(endpoint.read(ops, soon()))
            late = asyncio.ensure_future(endpoint.read(target(30)[1], soon(0.05)))
            assert await late == [Status.DEADLINE]
            peer.say(framing.data(first, 0, 0, 40) + b"a" * 40)
            assert await landing == [Status.OK]
            second = await peer.asked()
            assert not endpoint.can_land(spans(10))  # the loop waits for an answer
            peer.say(framing.data(second, 0, 0, 30) + b"b" * 30)
            assert await reading == [Status.OK]
            assert bytes(memory[100:130]) == b"b" * 30
            assert endpoint.can_land(spans(10))

    run(runner, scenario())


def test_nothing_more_lands_while_a_read_waits(runner: object) -> None:
    """Gets that overlap had others, which are read another way, wait until their deadline."""

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            landing = asyncio.ensure_future(endpoint.land(spans(40), Landed(), soon()))
            first = await peer.asked()
            assert endpoint.can_land(spans(40))
            _, ops = target(30)
            reading = asyncio.ensure_future(endpoint.read(ops, soon()))
            await asyncio.sleep(0.01)
            assert not endpoint.can_land(spans(40))
            peer.say(framing.data(first, 0, 0, 40) + b"a" * 40)
            assert await landing == [Status.OK]
            second = await peer.asked()
            peer.say(framing.data(second, 0, 0, 30) + b"b" * 30)
            assert await reading == [Status.OK]
            late = asyncio.ensure_future(endpoint.land(spans(40), Landed(), soon()))
            await peer.asked()
            given_up = asyncio.ensure_future(endpoint.read(target(30)[1], soon(0.05)))
            assert await given_up == [Status.DEADLINE]
            assert endpoint.can_land(spans(40))
            late.cancel()

    run(runner, scenario())


def test_more_cancels_than_requests_end_what_lands(runner: object) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            landing = asyncio.ensure_future(endpoint.land(spans(10), Landed(), soon(30)))
            await peer.asked()
            peer.say(framing.cancel(0))
            assert await asyncio.wait_for(landing, 10) == [Status.FABRIC_ERROR]
            await peer.cut_off()

    run(runner, scenario())


def test_without_memory_for_a_longer_span_the_session_ends(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ended without a word: whatever was read there afterwards had to wait in vain."""

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            assert endpoint.can_land(spans(10))  # and so has its thread

            def none_left(_fd: int, length_bytes: int) -> mmap.mmap:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            monkeypatch.setattr(mmap, "mmap", none_left)
            landing = asyncio.ensure_future(endpoint.land(spans(2_000_000), Landed(), soon(30)))
            request = await peer.asked()
            peer.say(framing.data(request, 0, 0, 2_000_000) + bytes(2_000_000))
            assert await asyncio.wait_for(landing, 10) == [Status.DISCONNECTED]
            assert endpoint.closed

    run(runner, scenario())


def test_what_cannot_land() -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, _peer):
            assert not endpoint.can_land([])
            assert not endpoint.can_land(spans(SPAN_BYTES_MAX + 1))
            assert not endpoint.can_land(spans(0))
            assert await endpoint.land(spans(5), Landed(), 0) == [Status.DEADLINE]

    asyncio.run(scenario())


def test_without_a_kernel_nothing_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, _peer):
            monkeypatch.setattr(native, "KERNEL", None)
            assert not endpoint.can_land(spans(10))

    asyncio.run(scenario())


async def _real_pair(streams: int) -> tuple[TcpFabricServer, TcpEndpoint, TcpEndpoint]:
    server = TcpFabricServer("127.0.0.1", streams=streams)
    await server.start()
    offer = server.offer()
    host, reply = await registry.connect(offer, soon())
    ours = await server.accept(offer, reply, soon())
    assert isinstance(host, TcpEndpoint)
    return server, host, ours


FORGOTTEN = """
import asyncio, socket
from entresol_proto import native
from entresol_proto.fabric.landing import Lander
async def main():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    lander = Lander(native.KERNEL, ours, None)
    raise SystemExit(7)
asyncio.run(main())
"""


def test_a_lander_that_nobody_closed_does_not_keep_its_process() -> None:
    """A program that ends by an exception, with its client still open, hung for ever."""
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], timeout=60)
    assert done.returncode == 7


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_batches_from_a_real_peer_over_several_streams(runner: object, streams: int) -> None:
    async def scenario() -> None:
        server, host, ours = await _real_pair(streams)
        memory = random.Random(streams).randbytes(9 << 20)
        exposure = await ours.expose(memoryview(bytearray(memory)))
        sizes = [1 << 20, 1, 65_537, 1 << 20, 3 << 20, 4_096] * 2
        at, wanted = 0, []
        for size in sizes:
            wanted.append(exposure.span(at % (5 << 20), size))
            at += size
        gone = RemoteSpan(exposure.rkey ^ 1, 0, 100)
        for _ in range(3):
            landed = [Landed(), Landed()]  # two at a time share the threads
            found = await asyncio.gather(
                *(host.land([*wanted, gone], one, soon(30)) for one in landed)
            )
            for one, statuses in zip(landed, found, strict=True):
                assert statuses == [Status.OK] * len(wanted) + [Status.LEASE_EXPIRED]
                for number, span in enumerate(wanted):
                    assert one.seen[number] == memory[span.address :][: span.length_bytes]
        await host.close()
        await server.close()

    run(runner, scenario())
    assert SPAN.size == 16


async def test_a_lander_that_is_told_to_close_again_touches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its descriptors may be somebody else's by then."""
    assert native.KERNEL is not None
    mine, other = socket.socketpair()
    with mine, other:
        lander = Lander(native.KERNEL, mine, cast(Any, None))
        lander.close()
        await asyncio.to_thread(lander._thread.join, 60)
        written: list[int] = []
        monkeypatch.setattr(os, "eventfd_write", lambda fd, _count: written.append(fd))
        lander.close()
        assert not written


async def test_a_lander_that_cannot_be_made_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_args: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    assert native.KERNEL is not None
    monkeypatch.setattr(os, "eventfd", none_left)
    mine, other = socket.socketpair()
    with mine, other:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="too many"):
            Lander(native.KERNEL, mine, cast(Any, None))
        assert len(os.listdir("/proc/self/fd")) == before
