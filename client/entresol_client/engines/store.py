"""The neutral core under every adapter: lookups, loads and stores as futures that always finish.

Invariants:
- a lookup is answered within its deadline, whatever the daemon does: an outage is "absent";
- a load's future is done only when nothing can land in its buffers any more;
- stores wait in a bounded backlog and are shed beyond it; loads never queue behind them;
- once the loop has ended, or after fork, everything is absent and nothing is waited for;
- a signal handler may ask and wait for the store that it interrupts (`answer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from entresol_client.buffers import UsageError, view_of
from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import ClientConfig
from entresol_client.engines.answer import Answer
from entresol_client.engines.choosing import DEADLINE_PART, Chooser, Run
from entresol_client.engines.settings import EngineSettings
from entresol_client.loopthread import LoopThread
from entresol_client.registered import RegisteredMemory
from entresol_client.results import PutBlock, prefix_of
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import ConfigError, EntresolError, Status

log = logging.getLogger("entresol.engine")

R = TypeVar("R")
MS_NS = 1_000_000
CLOSE_SECONDS_MAX = 10.0
LOOK_S = 0.5  # how often to look whether the loop has ended, where nothing else would tell
ENDS_LOOK_S = 0.01  # how often the end looks whether all jobs have ended


@dataclass(frozen=True, slots=True)
class LoadReply:
    """`statuses[i]` is OK where block i is in its buffer, verified. `bytes_loaded` counts those."""

    statuses: tuple[Status, ...]
    bytes_loaded: int
    seconds: float

    @property
    def prefix_blocks(self) -> int:
        """Leading blocks that are in place."""
        return prefix_of(self.statuses)

    @property
    def ok(self) -> bool:
        """True when every block is in place."""
        return all(status is Status.OK for status in self.statuses)


@dataclass(frozen=True, slots=True)
class StoreReply:
    """`statuses[i]` is OK or EXISTS where block i can be read now; all BUSY when shed."""

    statuses: tuple[Status, ...]
    bytes_stored: int
    seconds: float

    @property
    def ok(self) -> bool:
        """True when every block is stored."""
        return all(status in (Status.OK, Status.EXISTS) for status in self.statuses)

    @property
    def shed(self) -> bool:
        """True when nothing was tried, because the backlog was full."""
        return bool(self.statuses) and all(status is Status.BUSY for status in self.statuses)


class EngineStore:
    """One tenant's blocks, for an engine: may be used from any thread, never raises for an outage.

    Opening waits until each shard was tried once, at most the config's `connect_deadline_ns`.
    Close it; `close` gives stores under way a moment.

    Raises: ConfigError, IdentityError when there is no usable client configuration.
    """

    def __init__(self, settings: EngineSettings, *, config_path: str | None = None) -> None:
        """`config_path` overrides `settings.config` (another tenant's)."""
        self.settings = settings
        self._lock = threading.RLock()  # over these, but for the loop, which has its own
        self._counts: Counter[str] = Counter()
        self._counts_on_loop: Counter[str] = Counter()
        self._backlog_bytes = 0  # taken, and given back elsewhere than on the loop
        self._backlog_bytes_on_loop = 0  # given back there: negative
        self._pending: set[Future[Any]] = set()
        self._registered: list[RegisteredMemory] = []
        self._numbers = itertools.count(1)  # of stores, so that a drain knows which were waiting
        self._stores_given_up = 0  # stores up to this number that have not begun are shed
        self._closed = False
        self._thread = LoopThread()
        try:
            config = ClientConfig.find(config_path or settings.config or None)
            if config.tenant_key is not None and settings.open_at != "host":
                raise ConfigError(
                    "open_at is daemon, and with tenant_key no daemon can open a block",
                    hint='use open_at = "host", or a client configuration without tenant_key',
                )
            self._thread.call(lambda: self._begin(config))
        except BaseException:
            self._thread.stop()
            raise

    async def _begin(self, config: ClientConfig) -> None:
        """On the loop, so that it is known there before an interrupt may come in between."""
        self._client = await AsyncClient.open(config)
        self._thread.at_exit = self._end
        self._slots = asyncio.Semaphore(self.settings.stores_in_flight_max)

    def space(self, descriptor: NamespaceDescriptor) -> Space:
        """The blocks of one descriptor. Asks nobody; opened on the first use."""
        return Space(self, Namespace(self._client, descriptor))

    def register(self, buffer: Any) -> None:
        """Name memory that loads will land in, for as long as the store is open.

        RDMA then needs no set-up per read of a block the daemon opened; elsewhere it costs nothing.
        Stores leave through staging memory on purpose: after a deadline the daemon may still read,
        and it must not see what an engine has put into the slot since.
        Raises: UsageError unless it is writable, contiguous memory.
        """

        async def work() -> RegisteredMemory:
            return self._client.register(buffer)

        self._registered.append(self._thread.call(work))

    def drain(self, seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Wait until no buffer is in use: every load and store submitted before has ended.

        Stores that after `seconds` still wait for their turn are shed. What is under way is waited
        for; its own deadline ends it.
        """
        if self._thread.forked:
            return
        waiting = list(self._pending)
        newest = next(self._numbers)
        until = time.monotonic() + seconds
        for future in waiting:
            try:
                future.exception(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                self._stores_given_up = max(self._stores_given_up, newest)
                self._await(future)

    def _await(self, future: Future[Any]) -> None:
        """However long it takes, unless nothing runs any more that could end it."""
        while not future.done() and not self._thread.gone:
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=LOOK_S)

    def begin_store(self) -> int:
        """The number of a new store."""
        return next(self._numbers)

    def given_up(self, number: int) -> bool:
        """True when a drain no longer waits for this store to begin."""
        return number <= self._stores_given_up

    def stats(self) -> dict[str, int]:
        """Counters since the start; names end in what they count. `backlog_bytes` is a level."""
        found = Counter(self._counts)
        found.update(self._counts_on_loop.copy())
        return {**found, "backlog_bytes": self._backlog_bytes + self._backlog_bytes_on_loop}

    def connected(self) -> bool:
        """True when at least one shard is connected now."""
        return any(shard.connected for shard in self._client.shards())

    def describe(self) -> str:
        """One line for a log: shards, fabrics, what is wrong."""
        rows = []
        for shard in self._client.shards():
            state = shard.fabric if shard.connected else f"absent ({shard.last_error})"
            rows.append(f"{shard.name}@{shard.address}={state}")
        return " ".join(rows)

    def close(self, drain_seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Wait for work under way at most `drain_seconds`, then end the sessions. Idempotent."""
        if self._thread.forked:
            return
        self._closed = True
        waiting = list(self._pending)
        until = time.monotonic() + drain_seconds
        for future in waiting:
            try:
                future.exception(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                log.warning("event=store_drain_timeout jobs=%d", len(waiting))
                break
        self._thread.stop()  # which closes the client first

    async def _end(self) -> None:
        """On the loop, before it ends."""
        await self._client.close()  # what is left ends as DISCONNECTED
        until = time.monotonic() + CLOSE_SECONDS_MAX
        while self._pending and time.monotonic() < until:
            await asyncio.sleep(ENDS_LOOK_S)
        for memory in self._registered:
            memory.close()

    # Inside ----------------------------------------------------------------------------------

    def count(self, **amounts: int) -> None:
        """Add to the counters (from any thread)."""
        if self._thread.is_current:
            self._counts_on_loop.update(amounts)
            return
        with self._guard():
            self._counts.update(amounts)

    def _guard(self) -> contextlib.AbstractContextManager[object]:
        """The lock; after fork none: a thread that is not here may have held it."""
        return contextlib.nullcontext() if self._thread.forked else self._lock

    def start(
        self,
        work: Coroutine[Any, Any, R],
        failed: Callable[[Exception], R],
        over: Callable[[], object] = lambda: None,
    ) -> Future[R]:
        """Run `work` on the loop. The future cannot be cancelled: it tells when `work` has ended.

        `failed` turns an error into the answer it means; the future never raises. `over` is called
        when `work` has ended, before the future is done.
        """
        future: Answer[R] = Answer()

        def settle(answer: R) -> None:
            self._pending.discard(future)
            over()
            future.set_result(answer)

        def give_up() -> None:
            work.close()
            settle(failed(EntresolError("closed", status=Status.DISCONNECTED)))

        async def run() -> None:
            try:
                answer = await work
            except Exception as error:
                answer = failed(error)
            except asyncio.CancelledError:  # the loop is being stopped
                answer = failed(EntresolError("closed", status=Status.DISCONNECTED))
            settle(answer)

        def ended(_: object) -> None:
            if not future.done():  # the loop was stopped before the first step
                give_up()

        self._pending.add(future)  # so that whoever closes from now on sees it
        try:
            if not self._closed:
                self._thread.begin(run(), ended)
                return future
        except UsageError:  # the loop has ended, or this is a forked child
            pass
        give_up()
        return future

    def take_backlog(self, length_bytes: int) -> bool:
        """Account for a store; False when it must be shed. One store always fits."""
        with self._guard():
            taken_bytes = self._backlog_bytes + self._backlog_bytes_on_loop
            if taken_bytes and taken_bytes + length_bytes > self.settings.store_backlog_bytes_max:
                return False
            self._backlog_bytes += length_bytes
            return True

    def give_backlog(self, length_bytes: int) -> None:
        """The store is over."""
        if self._thread.is_current:
            self._backlog_bytes_on_loop -= length_bytes
            return
        with self._guard():
            self._backlog_bytes -= length_bytes


class Space:
    """Blocks of one namespace, as an engine uses them. Every method returns at once."""

    def __init__(self, store: EngineStore, namespace: Namespace) -> None:
        self.descriptor = namespace.descriptor
        self._store = store
        self._ns = namespace
        self.chooser = Chooser(namespace, store.settings, store.count)

    def lookup(
        self, keys: Sequence[bytes], runs: Sequence[Run] | None = None
    ) -> Future[list[bool]]:
        """Which blocks could be loaded now; all False when the daemon does not answer in time.

        With `recompute_or_fetch = auto` those are left out that are better computed. `runs`: which
        of the keys are of one prompt; without it all are of one, `block_tokens` each.
        """
        store, wanted = self._store, list(keys)
        if store.settings.recompute_or_fetch == "never":
            store.count(lookups=1, lookup_blocks=len(wanted))
            nothing: Future[list[bool]] = Future()
            nothing.set_result([False] * len(wanted))
            return nothing
        if runs is None:
            runs = [Run(range(len(wanted)), len(wanted) * self.descriptor.block_tokens)]

        async def work() -> list[bool]:
            deadline_ns = store.settings.lookup_deadline_ms * MS_NS
            quotes_until_ns = time.monotonic_ns() + deadline_ns // DEADLINE_PART
            asked = self.chooser.ask(wanted, runs, quotes_until_ns)
            try:
                found = await self._ns.exists(wanted, deadline_ns=deadline_ns)
                present = await self.chooser.narrow(
                    wanted, list(found.present), asked, quotes_until_ns
                )
            finally:
                await self.chooser.drop(asked)
            store.count(
                lookups=1,
                lookup_blocks=len(wanted),
                lookup_hit_blocks=sum(found.present),
                lookup_unanswered=int(not found.complete),
            )
            return present

        def failed(error: Exception) -> list[bool]:
            _tell("lookup", error)
            store.count(lookups=1, lookup_blocks=len(wanted), lookup_unanswered=1)
            return [False] * len(wanted)

        return store.start(work(), failed)

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, prefix: bool = False
    ) -> Future[LoadReply]:
        """Bring blocks into the caller's buffers (see `Namespace.get_into`).

        The buffers must stay alive and untouched until the future is done; nothing lands later.
        """
        store, wanted, into = self._store, list(keys), list(buffers)
        begun = time.monotonic()

        def counted(statuses: Sequence[Status], loaded_bytes: int) -> LoadReply:
            good = sum(status is Status.OK for status in statuses)
            store.count(
                loads=1,
                load_blocks=good,
                load_bytes=loaded_bytes,
                load_failed_blocks=len(statuses) - good,
                load_corrupt_blocks=sum(status is Status.CORRUPT for status in statuses),
            )
            return LoadReply(tuple(statuses), loaded_bytes, time.monotonic() - begun)

        async def work() -> LoadReply:
            got = await self._ns.get_into(
                wanted,
                into,
                deadline_ns=store.settings.load_deadline_ms * MS_NS,
                prefix=prefix,
                open_at=store.settings.open_at,
            )
            reply = counted(got.statuses, got.plain_bytes)
            self.chooser.fetched(wanted, reply.prefix_blocks, reply.seconds)
            return reply

        def failed(error: Exception) -> LoadReply:
            _tell("load", error)
            return counted([_status_of(error)] * len(wanted), 0)

        return store.start(work(), failed)

    def store(self, blocks: Sequence[PutBlock]) -> Future[StoreReply]:
        """Store blocks, in prefix order; shed (BUSY) when the backlog is full.

        The buffers must stay alive and unchanged until the future is done.
        """
        store, wanted = self._store, list(blocks)
        begun = time.monotonic()
        length_bytes = sum(map(_length_bytes, wanted))

        def counted(statuses: Sequence[Status], stored_bytes: int) -> StoreReply:
            counts = Counter(statuses)
            kept = counts[Status.OK] + counts[Status.EXISTS]
            store.count(
                stores=1,
                stored_blocks=counts[Status.OK],
                existed_blocks=counts[Status.EXISTS],
                store_failed_blocks=len(statuses) - kept,
                stored_bytes=stored_bytes,
            )
            return StoreReply(tuple(statuses), stored_bytes, time.monotonic() - begun)

        if not store.take_backlog(length_bytes):
            store.count(shed_stores=1, shed_blocks=len(wanted))
            shed: Answer[StoreReply] = Answer()
            shed.set_result(StoreReply((Status.BUSY,) * len(wanted), 0, 0.0))
            return shed

        number = store.begin_store()

        async def work() -> StoreReply:
            async with store._slots:
                if store.given_up(number):
                    store.count(shed_stores=1, shed_blocks=len(wanted))
                    return StoreReply((Status.BUSY,) * len(wanted), 0, 0.0)
                put = await self._ns.put(
                    wanted,
                    ack="durable" if store.settings.durable else "accepted",
                    deadline_ns=store.settings.store_deadline_ms * MS_NS,
                )
            return counted(put.statuses, put.plain_bytes)

        def failed(error: Exception) -> StoreReply:
            _tell("store", error)
            return counted([_status_of(error)] * len(wanted), 0)

        return store.start(work(), failed, lambda: store.give_backlog(length_bytes))

    def touch(self, keys: Sequence[bytes]) -> Future[int]:
        """Keep blocks recent that the engine found in a nearer tier; the number that were here."""

        async def work() -> int:
            deadline_ns = self._store.settings.lookup_deadline_ms * MS_NS
            return (await self._ns.touch(list(keys), deadline_ns=deadline_ns)).count

        return self._store.start(work(), lambda error: 0)

    def forget(self, keys: Sequence[bytes]) -> Future[bool]:
        """Drop blocks for good, for every host of the tenant; True when every shard answered."""

        async def work() -> bool:
            deadline_ns = self._store.settings.lookup_deadline_ms * MS_NS
            return (await self._ns.forget(list(keys), deadline_ns=deadline_ns)).complete

        return self._store.start(work(), lambda error: False)


def _length_bytes(block: PutBlock) -> int:
    """Of its buffer; 0 of what is none, which the put refuses, as a get does."""
    try:
        return view_of(block.buffer).nbytes
    except Exception:
        return 0


def _status_of(error: Exception) -> Status:
    return error.status if isinstance(error, EntresolError) else Status.INTERNAL


def _tell(what: str, error: Exception) -> None:
    """A mistake of the adapter or the engine: told, because outages never come this way."""
    if not isinstance(error, EntresolError):
        log.error("event=engine_%s_failed", what, exc_info=error)
    elif error.status is not Status.DISCONNECTED:
        log.error("event=engine_%s_refused reason=%s", what, error)
