"""The client process of the proof lines: puts, gets, forgets and administers on command.

Commands come as JSON lines on stdin, answers go as JSON lines to stdout; what is asked of the
daemon and what it answers goes to the journal, before and after. It keeps no expectation of its
own beyond which version of a block it tried last: judging is the business of `oracle_lab.Judge`.

Invariant: at any time a block has at most one operation under way, so that its answers have an
order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entresol_client.cli import rpc
from entresol_client.cli.errors import CliError
from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import BreakerSettings, ClientConfig
from entresol_client.results import PutBlock
from entresol_proto.limits import KIB
from entresol_proto.status import Status
from tests.daemon.daemon_lab import DESCRIPTOR, content, key_of
from tests.daemon.oracle_lab import MISS, WRONG, Journal

SIZES = (16, 5_000, 64 * KIB, 5_000, 16, 200 * KIB, 5_000, 20_000)
HEAD_BYTES = 16
CONNECT_SECONDS_MAX = 60.0
QUIET_SECONDS_MAX = 20.0
CHECK_BLOCKS_MAX = 100
NONE: frozenset[Status] = frozenset()
PASSING = frozenset({Status.BUSY, Status.BREAKER_OPEN, Status.DISCONNECTED})


def size_of(number: int) -> int:
    """Bytes of a block."""
    return SIZES[number % len(SIZES)]


def bytes_of(tenant: str, number: int, version: int, length: int) -> bytes:
    """Bytes that only this version of this block has."""
    return content(key_of(number, tenant) + version.to_bytes(4, "little"), length)


def block_of(tenant: str, number: int, version: int) -> bytes:
    """The whole block: a head that tells the version, then the rest."""
    head = bytes_of(tenant, number, version, HEAD_BYTES)
    rest = size_of(number) - HEAD_BYTES
    return head + (bytes_of(tenant, number, version, rest) if rest else b"")


class Driver:
    """See the module."""

    def __init__(self, folder: Path, journal: Path, fabric: str, options: dict[str, Any]) -> None:
        self._folder = folder
        self._journal = Journal(journal)
        self._fabric = fabric
        self._options = options
        self._clients: dict[str, AsyncClient] = {}
        self._spaces: dict[str, Namespace] = {}
        self._tried: dict[tuple[str, int], int] = {}
        self._busy: set[tuple[str, int]] = set()
        self._workers: list[asyncio.Task[None]] = []
        self._admin: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._ops = 0
        self._events = 0
        self._watching: asyncio.Task[None] | None = None
        self._watch_call: Any = None

    # Sessions.

    async def space(self, tenant: str) -> Namespace:
        """The tenant's namespace, on a client that outlives the daemon."""
        found = self._spaces.get(tenant)
        if found is not None:
            return found
        name = "client.toml" if tenant == "dev" else f"client-{tenant}.toml"
        config = replace(
            ClientConfig.load(self._folder / name),
            fabric=self._fabric,
            fallback=False,
            breaker=BreakerSettings(
                failures_to_open=1, cooldown_ns_min=20_000_000, cooldown_ns_max=60_000_000
            ),
            **{"deadline_ns": 60_000_000_000, "connect_deadline_ns": 5_000_000_000,
               "ping_deadline_ns": 20_000_000_000, **self._options},
        )  # fmt: skip
        client = self._clients[tenant] = await AsyncClient.open(config)
        self._spaces[tenant] = await client.namespace(DESCRIPTOR)
        return self._spaces[tenant]

    def connected(self, tenant: str) -> bool:
        return self._clients[tenant].shards()[0].connected

    async def connect(self, tenant: str = "dev", seconds: float = CONNECT_SECONDS_MAX) -> bool:
        """Wait for a session."""
        await self.space(tenant)
        until = time.monotonic() + seconds
        while not self.connected(tenant):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.002)
        return True

    # One operation each, journaled.

    async def put(self, tenant: str, numbers: Sequence[int], ack: Any) -> list[Status]:
        space = await self.space(tenant)
        new = {}
        for number in numbers:
            new[number] = self._tried[tenant, number] = self._tried.get((tenant, number), 0) + 1
        self._journal.note("put", tenant, ack, new)
        items = [PutBlock(key_of(n, tenant), block_of(tenant, n, new[n]), position=n)
                 for n in numbers]  # fmt: skip
        result = await space.put(items, ack=ack)
        answers = dict(zip(numbers, map(int, result.statuses), strict=True))
        self._journal.note("put_answered", tenant, ack, new, answers)
        return result.statuses

    async def forget(self, tenant: str, numbers: Sequence[int]) -> bool:
        space = await self.space(tenant)
        self._journal.note("forget", tenant, list(numbers))
        result = await space.forget([key_of(number, tenant) for number in numbers])
        self._journal.note("forgotten", tenant, list(numbers), result.complete)
        return result.complete

    async def get(
        self, tenant: str, numbers: Sequence[int], when: str, passing: frozenset[Status] = NONE
    ) -> list[Status]:
        """Get blocks and write down which version each has. An answer with one of `passing` in it
        is no answer about a quiet daemon: it counts as one under load."""
        space = await self.space(tenant)
        buffers = [bytearray(size_of(number)) for number in numbers]
        keys = [key_of(number, tenant) for number in numbers]
        result = await space.get_into(keys, buffers, prefix=False)
        seen, statuses = {}, {}
        for number, buffer, status in zip(numbers, buffers, result.statuses, strict=True):
            if status is Status.OK:
                seen[number] = self._version_in(tenant, number, buffer)
            else:
                seen[number], statuses[number] = MISS, int(status)
                if any(buffer):
                    seen[number] = WRONG  # a miss leaves nothing behind
        when = "load" if passing.intersection(result.statuses) else when
        self._journal.note("saw", when, tenant, seen, statuses)
        return result.statuses

    def _version_in(self, tenant: str, number: int, buffer: bytearray) -> int:
        head = bytes(buffer[:HEAD_BYTES])
        for version in range(self._tried.get((tenant, number), 0), 0, -1):
            if head == bytes_of(tenant, number, version, HEAD_BYTES):
                return version if buffer == block_of(tenant, number, version) else WRONG
        return WRONG

    # Load.

    async def _work(self, tenant: str, rng: random.Random, spread: int, mix: dict[str, float],
                    once: bool) -> None:  # fmt: skip
        """Random operations until the daemon is gone, or until told to stop."""
        words, weights = list(mix), list(mix.values())
        while not self._stopping:
            numbers = [
                number for number in rng.sample(range(spread), rng.choice([1, 3, 12]))
                if (tenant, number) not in self._busy
            ]  # fmt: skip
            places = {(tenant, number) for number in numbers}
            self._busy |= places
            try:
                what = rng.choices(words, weights)[0] if numbers else "pause"
                if what in ("durable", "accepted"):
                    await self.put(tenant, numbers, what)
                elif what == "forget":
                    await self.forget(tenant, numbers)
                elif what == "get":
                    await self.get(tenant, numbers, "load")
                else:
                    await asyncio.sleep(0.001)
                self._ops += 1
            finally:
                self._busy -= places
            if not self.connected(tenant):
                if once:
                    return
                await asyncio.sleep(0.005)

    # Commands.

    async def do_connect(self, **words: Any) -> Any:
        """`tenant`, `seconds`: whether there is a session now."""
        return await self.connect(**words)

    async def do_load(
        self, seed: int, workers: int, spread: int, mix: dict[str, float], tenant: str = "dev",
        once: bool = True,
    ) -> Any:  # fmt: skip
        """Begin working in the background."""
        self._stopping = False
        self._ops = 0
        rng = random.Random(seed)
        await self.space(tenant)
        self._workers += [
            asyncio.create_task(
                self._work(tenant, random.Random(rng.random()), spread, mix, once)
            )
            for _ in range(workers)
        ]  # fmt: skip
        return len(self._workers)

    async def do_stop(self) -> Any:
        """End the load; every operation has its answer then. Returns how many there were."""
        self._stopping = True
        workers, self._workers = self._workers, []
        await asyncio.gather(*workers)
        if self._admin:
            await asyncio.wait(self._admin)
        return self._ops

    async def do_check(self, when: str, tenant: str = "dev") -> Any:
        """Get every block that was ever tried; how many there were."""
        numbers = sorted(number for name, number in self._tried if name == tenant)
        for at in range(0, len(numbers), CHECK_BLOCKS_MAX):
            await self._settled(tenant, numbers[at : at + CHECK_BLOCKS_MAX], when)
        return len(numbers)

    async def _settled(self, tenant: str, numbers: Sequence[int], when: str) -> None:
        """Get, and again for a while where the answer is not about the block: busy, or away."""
        until = time.monotonic() + QUIET_SECONDS_MAX
        passing = PASSING
        while passing.intersection(await self.get(tenant, numbers, when, passing)):
            await self.connect(tenant)
            await asyncio.sleep(0.01)
            if time.monotonic() > until:
                passing = NONE

    async def do_put(self, numbers: list[int], ack: str, tenant: str = "dev") -> Any:
        """Put blocks; their statuses."""
        return [status.label for status in await self.put(tenant, numbers, ack)]

    async def do_forget(self, numbers: list[int], tenant: str = "dev") -> Any:
        """Forget blocks; whether the answer was complete."""
        return await self.forget(tenant, numbers)

    async def do_get(self, numbers: list[int], when: str = "load", tenant: str = "dev") -> Any:
        """Get blocks; their statuses."""
        return [status.label for status in await self.get(tenant, numbers, when)]

    async def do_tenants(self) -> Any:
        """The operator's list of tenants, into the journal."""
        found = await asyncio.to_thread(self._ask, "TenantList", "TenantListRequest")
        rows = {info.name: info.dek_version for info in found.tenants}
        self._journal.note("tenants", rows)
        return rows

    async def do_admin(
        self, what: str, tenant: str, wait: bool = False, flash_bytes: int = 0
    ) -> Any:
        """Add (with a quota), rotate or erase a tenant, in the background unless `wait`."""
        task = asyncio.create_task(self._administer(what, tenant, flash_bytes))
        self._admin.add(task)
        task.add_done_callback(self._admin.discard)
        if wait:
            await task
        return what

    async def _administer(self, what: str, tenant: str, flash_bytes: int) -> None:
        note = self._journal.note
        name = {"add": "TenantAdd", "rotate": "TenantRotate", "erase": "TenantErase"}[what]
        more: dict[str, Any] = {"confirm": tenant} if what == "erase" else {}
        if what == "add" and flash_bytes:
            more = {"quota": {"flash_bytes": flash_bytes}}
        note(what, tenant)
        try:
            got = await asyncio.to_thread(self._ask, name, f"{name}Request", name=tenant, **more)
            version = getattr(got, "dek_version", 0)
        except CliError:
            got, version = None, 0
        if what == "rotate":
            if got is not None:
                note("rotated", tenant, version)
            return
        note({"add": "added", "erase": "erased"}[what], tenant, got is not None)

    def _ask(self, method: str, request: str, **fields: Any) -> Any:
        _, pb, stubs = rpc.modules()
        with rpc.operator_channel(self._folder / "run" / "admin.sock") as channel:
            stub = stubs.AdminStub(channel)
            return rpc.call(getattr(stub, method), getattr(pb, request)(**fields), timeout_s=20)

    async def do_watch(self, on: bool) -> Any:
        """Follow every tenant's events as the operator, or stop; how many have come so far."""
        if on and self._watching is None:
            _, pb, stubs = rpc.modules()
            open_ = contextlib.ExitStack()
            channel = open_.enter_context(rpc.operator_channel(self._folder / "run" / "admin.sock"))
            # Made here, so that what is cancelled below is always the call that is followed.
            self._watch_call = stubs.EventsStub(channel).Watch(pb.WatchRequest())
            self._watching = asyncio.create_task(
                asyncio.to_thread(self._follow, open_, self._watch_call)
            )
        elif not on and self._watching is not None:
            self._watch_call.cancel()
            await asyncio.wait((self._watching,))
            self._watching = None
        return self._events

    def _follow(self, open_: contextlib.ExitStack, call: Any) -> None:
        grpc, _, _ = rpc.modules()
        with open_, contextlib.suppress(grpc.RpcError):
            for reply in call:
                self._events += len(reply.events)

    async def do_stats(self, tenant: str = "dev") -> Any:
        """The client's counters."""
        return self._clients[tenant].stats()

    async def run(self) -> None:
        """Serve commands until "quit" or the end of stdin."""
        loop = asyncio.get_running_loop()
        while raw := await loop.run_in_executor(None, sys.stdin.readline):
            words = json.loads(raw)
            what = words.pop("do")
            if what == "quit":
                break
            answer = await getattr(self, "do_" + what)(**words)
            print(json.dumps({"answer": answer}), flush=True)
        for client in self._clients.values():
            await client.close()
        self._journal.close()


def main() -> None:
    """`python driver.py JSON`: folder, journal, fabric, options of the client."""
    words = json.loads(sys.argv[1])
    driver = Driver(
        Path(words["folder"]), Path(words["journal"]), words["fabric"], words.get("options", {})
    )
    import uvloop

    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(driver.run())


if __name__ == "__main__":
    main()
