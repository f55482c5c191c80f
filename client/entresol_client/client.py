"""The host's side of Entresol: get and put KV blocks over all shards, and never block an engine.

Invariants:
- an absent, hung, refusing, draining or broken shard reads as misses within the deadline; what
  raises is a caller's mistake (`UsageError`, `BadKeyError`), at once, before anything is sent;
- when a call returns, by whatever way, nobody writes into its buffers any more.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from entresol_client import exits
from entresol_client.buffers import UsageError
from entresol_client.certificates import OwnTls
from entresol_client.config import ClientConfig
from entresol_client.namespace import KEYS_PER_CALL_MAX, Namespace
from entresol_client.placement import Placement
from entresol_client.registered import RegisteredMemory
from entresol_client.results import RequestFailedError, ShardReport
from entresol_client.shard_link import ShardLink
from entresol_client.stats import ClientStats
from entresol_client.surroundings import ORDINARY, Surroundings
from entresol_client.tenant_key import KeyFile
from entresol_proto.identity import client_ssl_context
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import ConfigError

if TYPE_CHECKING:
    from entresol_client.tracing import Tracing

__all__ = ["KEYS_PER_CALL_MAX", "AsyncClient", "Namespace"]


class AsyncClient:
    """All shards of a config behind one object; belongs to the event loop that opened it, and to
    its process: elsewhere, as after fork, its calls raise UsageError. Close it, or have its loop
    end, before the interpreter does; where its loop still runs then, it is closed there.

    async with await AsyncClient.open(ClientConfig.find()) as client:
        ns = await client.namespace(NamespaceDescriptor(model="llama-3.1-8b"))
        result = await ns.get_into(keys, buffers)
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        rng: random.Random | None = None,
        around: Surroundings = ORDINARY,
    ) -> None:
        """Use `open`. Raises: IdentityError, KeyringError when a file it names cannot be used;
        ConfigError for traces that cannot be made, or what is no configuration; EntresolError
        (BUSY) where there are no threads to be had."""
        if not isinstance(config, ClientConfig):
            raise ConfigError(
                f"a client is made of a ClientConfig, not of a {type(config).__name__}",
                hint="ClientConfig.load(path) reads a file, ClientConfig.find() the usual ones",
            )
        self.config = config
        tls = OwnTls(config.tls, client_ssl_context)
        self._stats = ClientStats()
        self._keys = None if config.tenant_key is None else KeyFile(config.tenant_key)
        self._tracing: Tracing | None = None
        rng = rng or random.Random()
        self._placement = Placement([(shard.name, shard.weight) for shard in config.shards])
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None  # set by `open`
        self._guest: exits.Guest | None = None
        self._workers = around.make_workers(config.open_threads)
        self._links: list[ShardLink] = []
        try:  # its threads are there, and nobody else could end them
            if config.traces:
                from entresol_client.tracing import Tracing

                self._tracing = Tracing(config.traces)
                around = replace(around, on_session=self._tracing.watch)
            for address in config.shards:
                self._links.append(
                    ShardLink(address, config, tls, self._workers, self._stats, rng, around)
                )
        except BaseException:
            self._workers.close()
            for link in self._links:
                link.read_staging.close()
            if self._tracing is not None:
                self._tracing.close()
            raise

    @classmethod
    async def open(
        cls,
        config: ClientConfig | None = None,
        *,
        rng: random.Random | None = None,
        around: Surroundings = ORDINARY,
    ) -> AsyncClient:
        """A client whose shards have each been tried once; `ClientConfig.find()` by default.

        Waits at most `config.connect_deadline_ns`. Shards that are not there are tried again in the
        background, for ever; `shards()` tells how each stands. `rng` only spreads retries; `around`
        replaces threads and data paths.

        Raises: ConfigError, IdentityError, KeyringError; EntresolError (BUSY) without threads;
        UsageError when the interpreter ends. Never for an outage.
        """
        client = cls(config or ClientConfig.find(), rng=rng, around=around)
        client._loop = asyncio.get_running_loop()
        client._guest = exits.Guest(client.close)
        try:
            client._guest.keep()
        except UsageError:
            await client.close()
            raise
        for link in client._links:
            link.start()
        waits = [asyncio.ensure_future(link.settled_once.wait()) for link in client._links]
        try:
            await asyncio.wait(waits, timeout=client.config.connect_deadline_ns / 1e9)
        except asyncio.CancelledError:
            await client.close()
            raise
        finally:
            for wait in waits:
                wait.cancel()
        return client

    def _namespace(self, descriptor: NamespaceDescriptor) -> Namespace:
        if self._tracing is None:
            return Namespace(self, descriptor)
        from entresol_client.tracing import TracedNamespace

        return TracedNamespace(self, descriptor, self._tracing)

    async def namespace(self, descriptor: NamespaceDescriptor) -> Namespace:
        """The blocks of one descriptor. Opens it on every shard that is reachable; on the others,
        and after every reconnect, it is opened by itself. Cheap to call again."""
        self._check_open()
        opened = self._namespace(descriptor)
        deadline_ns = time.monotonic_ns() + self.config.deadline_ns

        async def one(link: ShardLink) -> None:
            link.remember(opened.canonical)
            try:
                await link.admit().connection.namespace(opened.canonical, deadline_ns)
            except RequestFailedError:
                return  # the first use tells

        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(one(link))
        return opened

    def register(self, buffer: Any) -> RegisteredMemory:
        """Name long-lived memory that gets will read into: cheaper then, over RDMA.

        Costs nothing elsewhere. Gets into other memory work as before. Close what is returned
        before the memory goes away; closing the client ends its use too.
        Raises: UsageError unless `buffer` is writable, contiguous memory.
        """
        self._check_open()
        memory = RegisteredMemory(buffer)
        for link in self._links:
            link.land_in(memory)
        return memory

    def shards(self) -> list[ShardReport]:
        """How each shard stands: connected, fabric and why, breaker, round trip time."""
        return [link.report() for link in self._links]

    def stats(self) -> dict[str, Any]:
        """Counters since the client was opened; see `ClientStats.as_dict`."""
        found = self._stats.as_dict()
        found["late_grants"] += sum(link.late_grants for link in self._links)
        return found

    async def close(self) -> None:
        """End all sessions and threads. Calls under way end as DISCONNECTED. Idempotent.

        A caller that is cancelled leaves early; the client is closed all the same. In a forked
        child nothing is done. Raises: UsageError on another event loop.
        """
        if os.getpid() != self._pid:
            return
        if self._loop is not None and (self._closing is None or not self._closing.done()):
            self._check_place()
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await asyncio.gather(*(link.close() for link in self._links))
        finally:
            self._workers.close()
            if self._guest is not None:
                exits.let_go(self._guest)
            if self._tracing is not None:
                await self._tracing.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        """Raises: UsageError."""
        if self._closed:
            raise UsageError("the client is closed")
        self._check_place()

    def _check_place(self) -> None:
        """A call elsewhere would break the session that the owner uses. Raises: UsageError."""
        if os.getpid() != self._pid:
            raise UsageError(
                "the client was opened before fork", hint="open one in the child process"
            )
        try:
            if asyncio.get_running_loop() is self._loop:
                return
        except RuntimeError:  # no loop runs here
            pass
        raise UsageError("the client belongs to another event loop", hint="open one on each loop")
