"""One shard as the client sees it: a session that comes back by itself, behind a breaker.

Invariants:
- a caller never waits for a connection: without a usable session `admit` refuses at once;
- the background task keeps trying, at most once per cool-down, with or without traffic, and pings
  an idle session, so that a hang is noticed and ends by itself;
- staging memory that the daemon may read (puts) belongs to one session and dies with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any, cast

from entresol_client.breaker import Breaker, BreakerState
from entresol_client.certificates import OwnTls
from entresol_client.config import ClientConfig, ShardAddress
from entresol_client.connection import Connection
from entresol_client.handshake import OpenSession, connect
from entresol_client.registered import RegisteredMemory
from entresol_client.results import RequestFailedError, ShardReport
from entresol_client.staging import Arena, PrivateMemory, shared_memory
from entresol_client.stats import ClientStats
from entresol_client.surroundings import Surroundings
from entresol_client.workers import Workers
from entresol_proto import limits
from entresol_proto.fabric.base import Endpoint, Exposure, RegisteringEndpoint
from entresol_proto.seal.bypass import Bypass
from entresol_proto.status import FabricError, Status
from entresol_proto.wire.opening import NamespaceOpened

log = logging.getLogger("entresol.client")

PUT_ROUNDS_IN_FLIGHT_MAX = 3  # RESERVEs whose blocks are being stored, per shard
PINGS_MISSED_MAX = 3  # then the silent session is dropped and a fresh one is tried
SILENCE_NS_MIN = 10_000_000  # a shorter wait without an answer says nothing about the shard
LATE_NS_MIN = 20_000_000  # a deadline that is noticed so late says that we did not run
SHORT_LIFE_NS = 1_000_000_000  # a session that ends sooner is not replaced without a pause
RETRY_NS = 100_000_000  # between connection attempts before the breaker takes over


class Session:
    """One open session and what belongs to it."""

    def __init__(self, opened: OpenSession, staging_bytes: int) -> None:
        self.connection: Connection = opened.connection
        self.welcome = opened.welcome
        self.endpoint: Endpoint | None = opened.endpoint
        self.fabric = opened.fabric
        self.fabric_reason = opened.fabric_reason
        self._staging_bytes = staging_bytes
        self._put: Arena | None = None
        self._exposing: asyncio.Task[tuple[Arena, Exposure]] | None = None
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> Session:
        """Use the session; a drained one is closed only after its last user left."""
        self._users += 1
        self._unused.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if self._users == 0:
            self._unused.set()

    async def retire(self, closing: asyncio.Event) -> None:
        """Close once nobody uses it, it is lost, or `closing` is set."""
        unused = asyncio.ensure_future(self._unused.wait())
        close = asyncio.ensure_future(closing.wait())
        try:
            await asyncio.wait(
                (unused, close, self.connection.lost), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            unused.cancel()
            close.cancel()
            await self.close()

    async def put_staging(self, deadline_ns: int) -> tuple[Arena, Exposure]:
        """Memory the daemon may read, exposed once per session, made on first use.

        Raises: RequestFailedError when there is no data path, it cannot expose memory, or the
        deadline comes first.
        """
        exposing = self._exposing  # that other callers replace when it has failed
        if exposing is None or (exposing.done() and self._put is None):
            # A task of the session: one caller's deadline must not fail the others.
            exposing = asyncio.get_running_loop().create_task(self._expose_staging())
            exposing.add_done_callback(_seen)
            self._exposing = exposing
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        done, _ = await asyncio.wait((exposing,), timeout=left_s)
        if not done:
            raise RequestFailedError(Status.DEADLINE)
        try:
            return exposing.result()
        except asyncio.CancelledError:
            raise RequestFailedError(Status.DISCONNECTED) from None
        except FabricError as error:
            raise RequestFailedError(error.status, str(error)) from None

    async def _expose_staging(self) -> tuple[Arena, Exposure]:
        if self.endpoint is None:
            raise FabricError("no data path", status=Status.UNSUPPORTED)
        try:
            memory = shared_memory(self._staging_bytes)
        except OSError as error:
            raise FabricError(f"no staging memory: {error.strerror or error}") from None
        try:
            exposure = await self.endpoint.expose(memory)
        except BaseException:
            memory.close()
            raise
        self._put = Arena(memory, self._staging_bytes)
        return self._put, exposure

    def land_in(self, arena: Arena) -> None:
        """Reads will land in this memory: tell a fabric that gains by knowing."""
        endpoint = self.endpoint
        if endpoint is not None and endpoint.capabilities.registers and not endpoint.closed:
            try:  # until the endpoint's end
                cast(RegisteringEndpoint, endpoint).register(arena.memory.view)
            except FabricError as error:  # each read costs more, and works
                log.warning("event=staging_not_registered reason=%s", error)

    def check_data_path(self) -> None:
        """A dead data path ends the session, so that a fresh one comes."""
        if self.endpoint is not None and self.endpoint.closed:
            self.connection.drop("the data path is lost")

    async def close(self) -> None:
        """End connection, data path and staging, in this order. Idempotent."""
        await self.connection.close()
        if self._exposing is not None and not self._exposing.done():
            self._exposing.cancel()
            await asyncio.wait((self._exposing,))
        if self.endpoint is not None:
            await self.endpoint.close()
        if self._put is not None:
            self._put.close()


class ShardLink:
    """Owns the session with one shard. Used from one event loop; `start` it, `close` it."""

    def __init__(
        self,
        address: ShardAddress,
        config: ClientConfig,
        tls: OwnTls,
        workers: Workers,
        stats: ClientStats,
        rng: random.Random,
        around: Surroundings,
    ) -> None:
        self.address = address
        self.config = config
        self.workers = workers
        self.stats = stats
        self.breaker = Breaker(config.breaker, rng.random)
        # Half for reading, half for what the daemon may read.
        self.staging_bytes = config.staging_bytes_max // 2
        self.read_staging = Arena(PrivateMemory(self.staging_bytes), self.staging_bytes)
        self.put_rounds = asyncio.Semaphore(PUT_ROUNDS_IN_FLIGHT_MAX)
        self.bypass = Bypass()  # of blocks sealed here
        self.settled_once = asyncio.Event()  # the first attempt has succeeded or failed
        self._tls = tls
        self._rng = rng
        self._around = around
        self._session: Session | None = None
        self._namespaces: dict[bytes, None] = {}  # canonical descriptors, to reopen ahead of use
        self._memories: list[RegisteredMemory] = []  # told to every session
        self._task: asyncio.Task[None] | None = None
        self._suspect = asyncio.Event()  # a caller met silence: ping now
        self._suspected_ns = 0
        self._closing = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()
        self._rtt_ns: int | None = None
        self._last_error = self._last_hint = ""
        self._last_status = Status.OK
        self._connects = 0
        self._drained = False  # the latest session ended by a goodbye
        self._locked = False  # the latest attempt was refused: the daemon has no KEK

    # For callers -----------------------------------------------------------------------------

    def admit(self) -> Session:
        """The session for new work. Raises: RequestFailedError at once when there is none."""
        if self._locked:
            raise RequestFailedError(Status.LOCKED, self._last_error)
        if not self.breaker.admits:
            raise RequestFailedError(Status.BREAKER_OPEN, self._last_error)
        session = self._session
        if session is None:
            status = Status.DRAINING if self._drained else Status.DISCONNECTED
            raise RequestFailedError(status, self._last_error)
        if session.connection.draining:
            raise RequestFailedError(Status.DRAINING)
        if not session.connection.usable:
            raise RequestFailedError(Status.DISCONNECTED)
        return session

    def remember(self, canonical: bytes) -> None:
        """Open this namespace on every later session without being asked, as far as there is room:
        of more those that were named or used last."""
        self._namespaces.pop(canonical, None)
        self._namespaces[canonical] = None
        if len(self._namespaces) > limits.NAMESPACES_PER_SESSION_MAX:
            del self._namespaces[next(iter(self._namespaces))]

    async def namespace(
        self, session: Session, canonical: bytes, deadline_ns: int
    ) -> NamespaceOpened:
        """The handle of a namespace that is used now. Raises: RequestFailedError."""
        self.remember(canonical)
        return await session.connection.namespace(canonical, deadline_ns)

    def land_in(self, memory: RegisteredMemory) -> None:
        """Reads will land in this memory, now and in every later session, until it is closed."""
        self._memories = [one for one in self._memories if not one.closed] + [memory]
        if self._session is not None:
            memory.show(self._session.endpoint)

    def note_deadline(self, session: Session, begun_ns: int) -> None:
        """A request met its deadline: an outage if the shard said nothing at all meanwhile."""
        now_ns = time.monotonic_ns()
        if session is not self._session or session.connection.last_received_ns >= begun_ns:
            return
        # Only what began after the last suspicion counts again: its ping had time for an answer,
        # and many calls that meet one deadline together are one piece of evidence.
        if now_ns - begun_ns >= SILENCE_NS_MIN and begun_ns > self._suspected_ns:
            self._suspected_ns = now_ns
            self._failure("silent past a deadline", now_ns)
            self._suspect.set()

    @property
    def late_grants(self) -> int:
        """Of the present session; those of past ones are in the stats."""
        return self._session.connection.late_grants if self._session else 0

    def report(self) -> ShardReport:
        """The present state, for people."""
        session = self._session
        live = session is not None and session.connection.usable
        return ShardReport(
            name=self.address.name,
            address=f"{self.address.host}:{self.address.port}",
            connected=live,
            draining=self._drained if session is None else session.connection.draining,
            breaker=self.breaker.state.value,
            fabric=session.fabric if session else "",
            fabric_reason=session.fabric_reason if session else "",
            incarnation=session.welcome.incarnation if session else 0,
            tenant=session.welcome.tenant if session else "",
            rtt_ns=self._rtt_ns if live else None,
            last_error=self._last_error,
            connects=self._connects,
            last_status=self._last_status,
            last_hint=self._last_hint,
            block_bytes_max=session.welcome.block_bytes_max if session else 0,
        )

    # Life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin connecting in the background."""
        self._task = asyncio.get_running_loop().create_task(self._live())
        self._task.add_done_callback(_report_bug)

    async def close(self) -> None:
        """End the session and the background task. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None
        self._closing.set()
        if self._retiring:
            await asyncio.wait(self._retiring)
        self.read_staging.close()

    async def _live(self) -> None:
        """Connect, watch, connect again, for ever."""
        while True:
            try:
                paused = await self._live_once()
            except RequestFailedError as error:
                self._locked = error.status is Status.LOCKED
                self._failure(str(error), time.monotonic_ns())
                self._last_status, self._last_hint = error.status, error.hint
                if error.status is Status.FORBIDDEN and self._tls.refused:
                    self._last_hint = f"replaced files are not used: {self._tls.refused}"
                paused = True
            except Exception as error:  # a bug costs this attempt, not the shard for ever
                log.critical("event=bug where=shard_link", exc_info=error)
                self._failure(f"bug: {type(error).__name__}", time.monotonic_ns())
                paused = True
            self.settled_once.set()
            if paused:
                await self._pause()

    async def _live_once(self) -> bool:
        """One session from its beginning to its end; whether to pause before the next one.

        Raises: RequestFailedError when there is none.
        """
        opened = await connect(self.address, self.config, self._tls.context(), self._around)
        session = Session(opened, self.staging_bytes)
        try:
            if self._around.on_session is not None:
                self._around.on_session(self.address.name, opened)
            session.land_in(self.read_staging)
            for memory in self._memories:
                memory.show(session.endpoint)
        except BaseException:
            await session.close()
            raise
        self._session = session
        begun_ns = time.monotonic_ns()
        try:
            self._joined(session)
            await self._watch(session)
        finally:
            self._session = None
            self._drained = session.connection.draining
            retiring = asyncio.get_running_loop().create_task(self._retire(session))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        return not self._drained or time.monotonic_ns() - begun_ns < SHORT_LIFE_NS

    async def _retire(self, session: Session) -> None:
        connection = session.connection
        if connection.lost.done():
            self._last_error = connection.lost.result()
        await session.retire(self._closing)
        self.stats.disconnects += 1
        self.stats.late_grants += connection.late_grants
        log.info(
            "event=disconnected shard=%s reason=%r", self.address.name, connection.lost.result()
        )

    def _joined(self, session: Session) -> None:
        self.breaker.success()
        self._connects += 1
        self._drained = self._locked = False
        self.stats.connects += 1
        self._last_error = self._last_hint = ""
        self._last_status = Status.OK
        self.settled_once.set()
        log.info(
            "event=connected shard=%s tenant=%s incarnation=%d fabric=%s",
            self.address.name, session.welcome.tenant, session.welcome.incarnation, session.fabric,
        )  # fmt: skip

    async def _pause(self) -> None:
        """Wait before the next attempt: the breaker's cool-down, or a short jittered moment."""
        now_ns = time.monotonic_ns()
        wait_ns = self.breaker.wait_ns(now_ns)
        if self.breaker.state is BreakerState.CLOSED:
            wait_ns = int(RETRY_NS * (0.5 + self._rng.random()))
        await asyncio.sleep(wait_ns / 1e9)
        # Timers may fire a moment early; the attempt that follows is the probe all the same.
        self.breaker.probe(max(time.monotonic_ns(), self.breaker.retry_at_ns))

    async def _watch(self, session: Session) -> None:
        """Ping until the session ends, and drop it when it stays silent; meanwhile open again what
        the last one had open."""
        reopening = asyncio.get_running_loop().create_task(self._reopen(session.connection))
        reopening.add_done_callback(_seen)
        try:
            await self._keep_asking(session)
        finally:
            reopening.cancel()

    async def _reopen(self, connection: Connection) -> None:
        deadline_ns = time.monotonic_ns() + self.config.deadline_ns
        for canonical in list(self._namespaces):
            try:
                await connection.namespace(canonical, deadline_ns)
            except RequestFailedError:
                break  # the next user of the namespace hears of it

    async def _keep_asking(self, session: Session) -> None:
        connection = session.connection
        missed = 0
        while not connection.ending.is_set():
            await self._until_ping(connection)
            if connection.ending.is_set():
                return
            self.breaker.probe(time.monotonic_ns())
            try:
                await self._ping(connection)
            except RequestFailedError as error:
                missed += 1
                self._hang(error, missed)
                if missed >= PINGS_MISSED_MAX:
                    connection.drop("the daemon does not answer")
                continue
            missed = 0
            self.breaker.success()
            session.check_data_path()

    async def _ping(self, connection: Connection) -> None:
        """Return when the shard says anything. Raises: RequestFailedError when it stays silent.

        Silence while this process itself could not run proves nothing: what was said may lie
        unread, or the question unsent. Then it is asked once more.
        """
        for excused in (False, True):
            begun_ns = time.monotonic_ns()
            until_ns = begun_ns + self.config.ping_deadline_ns
            try:
                self._rtt_ns = await self._ask(connection, until_ns)
                return
            except RequestFailedError as error:
                if connection.last_received_ns >= begun_ns and not connection.lost.done():
                    return  # busy, not dead
                late_ns = time.monotonic_ns() - until_ns
                if excused or error.status is not Status.DEADLINE or late_ns < LATE_NS_MIN:
                    raise
                log.info(
                    "event=asked_again shard=%s reason='this process was late' late_ms=%d",
                    self.address.name, late_ns // 1_000_000,
                )  # fmt: skip

    async def _ask(self, connection: Connection, until_ns: int) -> int:
        """Round trip time of one PING, ns. Raises: RequestFailedError.

        BUSY says nothing about the shard: earlier questions hold every place. What it says until
        the deadline answers this one, too.
        """
        try:
            return await connection.ping(until_ns)
        except RequestFailedError as error:
            if error.status is not Status.BUSY:
                raise
            left_s = max(0.0, (until_ns - time.monotonic_ns()) / 1e9)
            await asyncio.wait((connection.lost,), timeout=left_s)
            raise RequestFailedError(Status.DEADLINE, str(error)) from None

    async def _until_ping(self, connection: Connection) -> None:
        """Sleep until the next ping is due, a caller suspects a hang, or the session ends."""
        wait_s = self.config.ping_interval_ns / 1e9
        if self.breaker.state is not BreakerState.CLOSED:
            wait_s = self.breaker.wait_ns(time.monotonic_ns()) / 1e9
        self._suspect.clear()
        suspected = asyncio.ensure_future(self._suspect.wait())
        ending = asyncio.ensure_future(connection.ending.wait())
        try:
            await asyncio.wait(
                (suspected, ending), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            suspected.cancel()
            ending.cancel()

    def _hang(self, error: RequestFailedError, missed: int) -> None:
        """A ping met silence: open (or open again) the breaker without counting up to it."""
        now_ns = time.monotonic_ns()
        was = self.breaker.state
        if was is BreakerState.HALF_OPEN:
            self.breaker.failure(now_ns)
        else:
            self.breaker.trip(now_ns)
        self._opened(was, f"ping {missed} not answered: {error}")

    def _failure(self, reason: str, now_ns: int) -> None:
        was = self.breaker.state
        self.breaker.failure(now_ns)
        self._last_status, self._last_hint = Status.DISCONNECTED, ""
        self._opened(was, reason)

    def _opened(self, was: BreakerState, reason: str) -> None:
        self._last_error = reason
        if was is BreakerState.CLOSED and self.breaker.state is BreakerState.OPEN:
            self.stats.breaker_openings += 1
            log.warning("event=breaker_open shard=%s reason=%r", self.address.name, reason)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _report_bug(task: asyncio.Task[None]) -> None:
    """The background task ends only by cancellation; anything else is a bug, told loudly."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("event=bug where=shard_link", exc_info=error)
