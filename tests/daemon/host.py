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
    """A session of a flood: it outlasts the flood, as a host's does."""

    def __init__(self, client: AsyncClient, space: Namespace) -> None:
        self._client = client
        self._space = space
        self._runs: dict[int, bytes] = {}  # wire keys, by the first block's number
        self.tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, config: ClientConfig) -> Flooder:
        """Connected, when it returns in time."""
        client = await AsyncClient.open(config)
        space = await client.namespace(DESCRIPTOR)
        until = time.monotonic() + 30
        while not client.shards()[0].connected and time.monotonic() < until:
            await asyncio.sleep(0.005)
        return cls(client, space)

    async def fetch(self, first: int) -> tuple[Connection, Fetch]:
        """What to send for a run of blocks, and over what. Raises: RequestFailedError."""
        (link,) = self._client._links
        connection = link.admit().connection
        namespace = await connection.namespace(self._space.canonical, _until(30))
        keys = self._runs.get(first)
        if keys is None:
            numbers = range(first, first + GET_BLOCKS)
            keys = self._runs[first] = b"".join(
                wire_key(namespace.secret, EngineKey(key_of(n, "soak"))) for n in numbers
            )
        return connection, Fetch(namespace.handle, OpenAt.HOST, False, 5_000_000_000, keys)

    async def close(self) -> None:
        await self._client.close()


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
        self._counts = Counter()
        while len(self._flooders) < sessions:
            self._flooders.append(await Flooder.open(self._config))
        begun = due = time.monotonic()
        while due < begun + seconds:
            due += self._rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._counts["offered"] += 1
            least = min(self._flooders, key=lambda each: len(each.tasks))
            if len(least.tasks) >= window:
                self._counts["not_asked"] += 1
                continue
            first = self._rng.randrange(self._keys // GET_BLOCKS) * GET_BLOCKS
            task = asyncio.create_task(self._flood_one(least, first))
            least.tasks.add(task)
            task.add_done_callback(least.tasks.discard)
        left = [task for each in self._flooders for task in each.tasks]
        if left:
            await asyncio.wait(left)
        return {"seconds": time.monotonic() - begun, "counts": dict(self._counts),
                "times_ms": [], "refused_ms": []}  # fmt: skip

    async def _flood_one(self, flooder: Flooder, first: int) -> None:
        try:
            connection, fetch = await flooder.fetch(first)
            number, sink = await connection.fetch(fetch, _until(5))
            self._counts["sent"] += 1
            try:
                while grants := await sink.next(_until(5)):
                    for grant, _ in grants:
                        if grant.items:
                            connection.release(grant.lease_id)
            finally:
                connection.end_fetch(number, sink)
            self._counts["flooded"] += 1
        except RequestFailedError as error:
            if error.status is Status.BUSY:
                self._counts["refused"] += 1
                self._counts["get_busy"] += GET_BLOCKS
            else:
                self._counts["cut_off"] += 1

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
