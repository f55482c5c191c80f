"""A host process of line R8: asks for blocks as fast as it is told to, and counts what came of it.

Commands come as JSON lines on stdin, answers go as JSON lines to stdout. A `run` keeps `window`
gets under way and puts what was not there; what is read is compared with what its key says that it
must be. A `flood` asks `rate` times a second whatever became of the earlier, over sessions of its
own, and reads nothing.

Invariant: every get that was sent is counted once: served (or granted to the flood), refused or cut
off. What a flood did not send, because so many were under way already, is counted apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import BreakerSettings, ClientConfig
from entresol_client.connection import Connection
from entresol_client.results import PutBlock, RequestFailedError
from entresol_proto.ids import EngineKey, wire_key
from entresol_proto.limits import KIB
from entresol_proto.status import Status
from entresol_proto.wire.data import Fetch, OpenAt
from entresol_proto.wire.opening import ErrorReply, NamespaceOpened
from tests.daemon.daemon_lab import DESCRIPTOR, key_of

BLOCK_BYTES = 64 * KIB
GET_BLOCKS = 32
PUTS_AT_ONCE_MAX = 2
REFUSED_PAUSE_S = 0.005
OUTAGE = frozenset({Status.DISCONNECTED, Status.BREAKER_OPEN, Status.DRAINING, Status.DEADLINE})


def block(number: int) -> bytes:
    """What the block must hold: cheap to make, and different for each."""
    return key_of(number, "soak") * (BLOCK_BYTES // 32)


def _until(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


class Flooder:
    """A session of a flood: it outlasts the flood, as a host's does. Whatever can be left out of
    asking is left out: no task and no timer for a request, and frames that leave together."""

    def __init__(self, client: AsyncClient, canonical: bytes, counts: Counter[str]) -> None:
        self._client = client
        self._canonical = canonical
        self._connection: Connection | None = None
        self._namespace: NamespaceOpened
        self._runs: dict[int, Fetch] = {}  # by the first block's number
        self._sinks: list[FloodSink] = []  # of those that are asked and not sent
        self.counts = counts
        self.under_way = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @classmethod
    async def open(cls, config: ClientConfig, counts: Counter[str]) -> Flooder:
        """Connected, when it returns in time."""
        client = await AsyncClient.open(config)
        space = await client.namespace(DESCRIPTOR)
        until = time.monotonic() + 30
        while not client.shards()[0].connected and time.monotonic() < until:
            await asyncio.sleep(0.005)
        return cls(client, space.canonical, counts)

    def ask(self, first: int) -> None:
        """Of a run of blocks; `send` sends it."""
        self._sinks.append(FloodSink(self, first))
        self.under_way += 1
        self.idle.clear()

    async def send(self) -> None:
        """All that was asked."""
        sinks, self._sinks = self._sinks, []
        if not sinks:
            return
        try:
            connection = await self._usable()
        except RequestFailedError:
            for sink in sinks:
                sink.over("cut_off")
            return
        raw = []
        for sink in sinks:
            sink.connection = connection
            number, frame = connection.session.send(self._fetch(sink.first))
            connection._pending[number] = sink
            raw.append(frame)
        self.counts["sent"] += len(raw)
        connection._write(b"".join(raw))

    async def _usable(self) -> Connection:
        """The connection; another one when it has reached its age. Raises: RequestFailedError."""
        if self._connection is None or not self._connection.usable:
            (link,) = self._client._links
            self._connection = connection = link.admit().connection
            self._namespace = await connection.namespace(self._canonical, _until(30))
            self._runs.clear()
        return self._connection

    def over(self) -> None:
        """One is no longer under way."""
        self.under_way -= 1
        if not self.under_way:
            self.idle.set()

    def _fetch(self, first: int) -> Fetch:
        """For a run of blocks."""
        found = self._runs.get(first)
        if found is None:
            secret, numbers = self._namespace.secret, range(first, first + GET_BLOCKS)
            names = (wire_key(secret, EngineKey(key_of(n, "soak"))) for n in numbers)
            handle, keys = self._namespace.handle, b"".join(names)
            found = self._runs[first] = Fetch(handle, OpenAt.HOST, False, 5_000_000_000, keys)
        return found

    async def close(self) -> None:
        await self._client.close()


class FloodSink:
    """Takes what is answered to one get of a flood, and gives back what was granted."""

    __slots__ = ("_flooder", "connection", "first")

    def __init__(self, flooder: Flooder, first: int) -> None:
        self._flooder = flooder
        self.first = first
        self.connection: Connection | None = None  # once it is sent

    def deliver(self, message: Any) -> bool:
        """A GRANT or an ERROR; True when it was the last."""
        if isinstance(message, ErrorReply):
            if message.status is Status.BUSY:
                self._flooder.counts["get_busy"] += GET_BLOCKS
            self.over("refused" if message.status is Status.BUSY else "cut_off")
            return True
        if message.items and self.connection is not None:
            self.connection.release(message.lease_id)
        if message.final:
            self.over("flooded")
        return bool(message.final)

    def fail(self, _error: RequestFailedError) -> None:
        """The session is gone."""
        self.over("cut_off")

    def over(self, what: str) -> None:
        """What became of it."""
        self._flooder.counts[what] += 1
        self._flooder.over()


class Host:
    """See the module."""

    def __init__(self, config: ClientConfig, seed: int, keys: int) -> None:
        self._config = config
        self._rng = random.Random(seed)
        self._keys = keys
        self._free: list[list[bytearray]] = []
        self._client: AsyncClient
        self._space: Namespace
        self._times: list[float] = []
        self._refused_times: list[float] = []
        self._counts: Counter[str] = Counter()
        self._flooders: list[Flooder] = []
        self._forget = 0.0
        self._putting = 0

    async def open(self) -> None:
        self._client = await AsyncClient.open(self._config)
        self._space = await self._client.namespace(DESCRIPTOR)

    # One operation.

    async def _get(self) -> None:
        """A run of blocks, as a prefix is: read, compared, and put where it was missing."""
        first = self._rng.randrange(self._keys // GET_BLOCKS) * GET_BLOCKS
        numbers = range(first, first + GET_BLOCKS)
        buffers = self._free.pop() if self._free else [
            bytearray(BLOCK_BYTES) for _ in numbers
        ]  # fmt: skip
        begun = time.monotonic()
        keys = [key_of(number, "soak") for number in numbers]
        result = await self._space.get_into(keys, buffers, prefix=False)
        took = time.monotonic() - begun
        missing = []
        for number, buffer, status in zip(numbers, buffers, result.statuses, strict=True):
            if status is Status.OK:
                self._counts["wrong"] += buffer != block(number)
            elif status is Status.MISS:
                missing.append(number)
            self._counts[f"get_{status.label}"] += 1
        self._free.append(buffers)
        statuses = set(result.statuses)
        if statuses == {Status.BUSY}:
            self._counts["refused"] += 1
            self._refused_times.append(took)
        elif statuses & OUTAGE:
            self._counts["cut_off"] += 1
        else:
            self._counts["served"] += 1
            self._times.append(took)
        if missing and self._putting < PUTS_AT_ONCE_MAX:  # else some other time, as engines do
            await self._put(missing)
        elif self._rng.random() < self._forget:
            forgotten = await self._space.forget(keys)
            self._counts["forgotten"] += forgotten.count

    async def _put(self, numbers: list[int]) -> None:
        items = [PutBlock(key_of(n, "soak"), block(n), position=n) for n in numbers]
        self._putting += 1
        try:
            result = await self._space.put(items, ack="accepted")
        finally:
            self._putting -= 1
        for status in result.statuses:
            self._counts[f"put_{status.label}"] += 1

    # Commands.

    async def do_fill(self, first: int, count: int) -> Any:
        """Put blocks, durably; how many are stored."""
        stored = 0
        for at in range(first, first + count, GET_BLOCKS):
            numbers = range(at, at + GET_BLOCKS)
            items = [PutBlock(key_of(n, "soak"), block(n), position=n) for n in numbers]
            result = await self._space.put(items, ack="durable")
            stored += result.stored + result.existed
        return stored

    async def do_run(self, seconds: float, window: int, forget: float = 0.0) -> Any:
        """Work for a while, with `window` gets at a time; counts and times of it."""
        self._times, self._refused_times, self._counts = [], [], Counter()
        self._forget = forget
        begun = time.monotonic()
        until = begun + seconds
        await asyncio.gather(*(self._closed_loop(until) for _ in range(window)))
        return {
            "seconds": time.monotonic() - begun,
            "counts": dict(self._counts),
            "times_ms": [round(each * 1e3, 2) for each in self._times],
            "refused_ms": [round(each * 1e3, 2) for each in self._refused_times],
        }

    async def do_flood(self, seconds: float, rate: float, window: int, sessions: int) -> Any:
        """Ask, and read nothing of what is granted: the cheapest way to ask for much. Each session
        has at most `window` under way."""
        counts = self._counts = Counter()
        for each in self._flooders:
            each.counts = counts
        while len(self._flooders) < sessions:
            self._flooders.append(await Flooder.open(self._config, counts))
        begun = due = time.monotonic()
        while due < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while due < min(time.monotonic(), begun + seconds):
                due += self._rng.expovariate(rate)
                counts["offered"] += 1
                least = min(self._flooders, key=lambda each: each.under_way)
                if least.under_way >= window:
                    counts["not_asked"] += 1
                else:
                    least.ask(self._rng.randrange(self._keys // GET_BLOCKS) * GET_BLOCKS)
            for each in self._flooders:
                await each.send()
        for each in self._flooders:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(each.idle.wait(), 10)
        return {"seconds": time.monotonic() - begun, "counts": dict(counts),
                "times_ms": [], "refused_ms": []}  # fmt: skip

    async def _closed_loop(self, until: float) -> None:
        while time.monotonic() < until:
            refused = self._counts["refused"]
            await self._get()
            # Refused, a host works the block out for itself meanwhile.
            await asyncio.sleep(REFUSED_PAUSE_S if self._counts["refused"] > refused else 0)

    async def do_connected(self) -> Any:
        """Wait for a session, for a while."""
        until = time.monotonic() + 30
        while not self._client.shards()[0].connected and time.monotonic() < until:
            await asyncio.sleep(0.005)
        return self._client.shards()[0].connected

    async def do_stats(self) -> Any:
        """The client's own counters."""
        return self._client.stats()

    async def run(self) -> None:
        """Serve commands until "quit" or the end of stdin."""
        await self.open()
        loop = asyncio.get_running_loop()
        while raw := await loop.run_in_executor(None, sys.stdin.readline):
            words = json.loads(raw)
            what = words.pop("do")
            if what == "quit":
                break
            answer = await getattr(self, "do_" + what)(**words)
            print(json.dumps({"answer": answer}), flush=True)
        for flooder in self._flooders:
            await flooder.close()
        await self._client.close()


def main() -> None:
    """`python host.py JSON`: config, fabric, seed, keys, options of the client."""
    words = json.loads(sys.argv[1])
    config = replace(
        ClientConfig.load(Path(words["config"])),
        fabric=words["fabric"],
        breaker=BreakerSettings(cooldown_ns_min=20_000_000, cooldown_ns_max=200_000_000),
        **words.get("options", {}),
    )
    import uvloop

    host = Host(config, words["seed"], words["keys"])
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(host.run())


if __name__ == "__main__":
    main()
