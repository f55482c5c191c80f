"""A shard: one engine, one memory budget, one event log, and the sessions that use them.

This is where the brain (`core`) meets the hands (`flash`, `memory`, fabrics). It knows no sockets:
`dispatch` brings messages in, endpoints come from fabric servers, so a simulation drives the same
object as the daemon does.

Invariant: a session's tenant is what `open_session` was told by the authenticated connection; no
message can change it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from entresol_daemon.compute import Compute
from entresol_daemon.config import Config
from entresol_daemon.core.accounts import Accounts
from entresol_daemon.core.admission import Admission
from entresol_daemon.core.census import VersionCensus
from entresol_daemon.core.history import History
from entresol_daemon.core.leases import LeaseTable
from entresol_daemon.core.residency import Residency
from entresol_daemon.core.scrubbing import Refused
from entresol_daemon.events.log import EventLog
from entresol_daemon.flash.engine import Engine
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.memory.slabs import Slab, SlabBuffer, SlabPool
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard import lookups, quotas
from entresol_daemon.shard.choosing import CodecChooser
from entresol_daemon.shard.explaining import Explainer
from entresol_daemon.shard.gets import GetPath
from entresol_daemon.shard.keycare import KeyCare
from entresol_daemon.shard.meters import Meters
from entresol_daemon.shard.parts import Parts, Signal
from entresol_daemon.shard.pressure import Waiting
from entresol_daemon.shard.puts import PutPath
from entresol_daemon.shard.quoting import Quoting
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.scrubber import Scrubber
from entresol_daemon.shard.sessions import Leased, OpenedNamespace, Session
from entresol_daemon.shard.tenancy import Tenancy
from entresol_daemon.shard.turns import SharedTurns
from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind, FabricServer, Offer
from entresol_proto.ids import (
    BadKeyError,
    HostSealedNamespace,
    NamespaceDescriptor,
    TenantName,
    parse_namespace,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import EntresolError, QuotaError, Status
from entresol_proto.wire import opening
from entresol_proto.wire.data import (
    Explain,
    Explained,
    Forget,
)

TICK_NS = 50_000_000
HISTORY_ENTRIES_MAX = 65_536
SCRATCH_BYTES_MAX = 256 * limits.MIB
ALIGN_BYTES = limits.ALIGN_BYTES
_ROUND_UP = RECORD_HEADER_BYTES + ALIGN_BYTES - 1

log = logging.getLogger("entresol.shard")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a shard is given of the world."""

    make_buffer: Callable[[int], SlabBuffer]  # memory that fabrics can expose
    make_private: Callable[[int], SlabBuffer]  # memory nobody else sees
    host_id: bytes
    now_ns: Callable[[], int]
    unix_ns: Callable[[], int]
    sweep: Callable[[], Iterator[None]] = lambda: iter(())  # of freed memory; not in a simulation
    scrub_file: Path | None = None  # where the scrubber keeps its place over a restart


class Shard:
    """See the module. Build with `await Shard.open(...)`, end with `await close()`."""

    def __init__(
        self,
        parts: Parts,
        fabrics: Mapping[FabricKind, FabricServer],
        surroundings: Surroundings,
        incarnation: int,
    ) -> None:
        self.parts = parts
        self.fabrics = dict(fabrics)
        self.incarnation = incarnation
        self.sessions: dict[int, Session] = {}
        self.draining = False
        self.removal = Removal(parts)
        self.gets = GetPath(parts, self.removal)
        self.quoting = Quoting(parts, self.gets)
        self.tenancy = Tenancy(parts)
        self.keycare = KeyCare(parts, self.removal, self.tenancy, self.sessions)
        self.puts = PutPath(parts, self.removal, self.keycare)
        self._explainer = Explainer(parts, self.puts.is_wanted)
        self.host_id = surroundings.host_id
        self._hurry = asyncio.Event()
        self._next_session = 1
        self.scrubber = Scrubber(
            parts, self.removal, busy=lambda: self.gets.loading > 0, file=surroundings.scrub_file
        )
        self._ticker: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        parts.residency.pool.on_close = self._slab_closes
        parts.scratch.on_close = self._scratch_closes

    @classmethod
    async def open(
        cls,
        config: Config,
        *,
        engine: Engine,
        keyring: Keyring,
        compute: Compute,
        metrics: Metrics,
        fabrics: Mapping[FabricKind, FabricServer],
        surroundings: Surroundings,
        incarnation: int | None = None,
        keys: Compute | None = None,
    ) -> Shard:
        """Wire a shard around a recovered engine and an opened keyring, and start its ticker.

        The shard owns `engine` from here on; the rest stays the caller's. `keys` runs what the
        keyring writes, in a thread of its own where `compute` is to be free for sealing.
        """
        number = incarnation or secrets.randbits(63) | 1
        pool = SlabPool(
            config.memory.dram_bytes, config.memory.slab_bytes, surroundings.make_buffer
        )
        accounts, turns = Accounts(), SharedTurns.of(config.sealing_threads, surroundings.now_ns)
        parts = Parts(
            config=config,
            engine=engine,
            keyring=keyring,
            compute=compute,
            keys=keys or compute,
            metrics=metrics,
            meters=Meters(metrics, engine.index.capacity, config),
            events=_event_log(number, config, accounts, metrics),
            accounts=accounts,
            put_budget=quotas.put_budget_of(config),
            held=quotas.held_of(config),
            turns=turns,
            admission=Admission.from_config(
                config.admission, engine.capacity_bytes, cache_blocks=engine.index.capacity
            ),
            history=History(HISTORY_ENTRIES_MAX, secrets.token_bytes(16)),
            census=VersionCensus(engine.index.capacity),
            codecs=CodecChooser(
                policy=config.sealing.codec,
                link_bytes_per_s=config.sealing.link_bytes_per_s,
                seal_threads=config.sealing_threads,
                on_choice=metrics.codecs.chosen,
            ),
            residency=Residency(pool, accounts.weight_of),
            refused=Refused(),
            scratch=SlabPool(
                SCRATCH_BYTES_MAX, config.memory.slab_bytes, surroundings.make_private
            ),
            leases=LeaseTable[Leased](leases_per_session_max=config.limits.leases_per_session_max),
            room=Signal(turns.loop),
            make_plain_buffer=surroundings.make_buffer,
            dek_of=_dek_lookup(keyring),
            now_ns=surroundings.now_ns,
            unix_ns=surroundings.unix_ns,
            sweep=surroundings.sweep,
        )
        shard = cls(parts, fabrics, surroundings, number)
        engine.hooks.on_write = turns.flash.occupy  # what is written there reads leave room for
        shard.tenancy.find()
        shard.scrubber.start()
        shard._ticker = asyncio.get_running_loop().create_task(shard._tick())
        return shard

    # Sessions.

    async def open_session(self, name: TenantName, hello: opening.Hello) -> Session:
        """A new session of an authenticated tenant.

        Raises: EntresolError: DRAINING, FORBIDDEN, LOCKED, QUOTA at a session limit.
        """
        if self.draining:
            raise EntresolError("the daemon is draining", status=Status.DRAINING)
        account = await self.tenancy.admit(name)
        try:
            self.parts.held.may_open_session(account, alone=len(self.parts.accounts.by_name) == 1)
        except QuotaError:
            self.parts.metrics.quota_refusals[name, "sessions"].inc()
            raise
        session = Session(
            number=self._next_session,
            session_id=secrets.token_bytes(16),
            account=account,
            tenant=self.parts.keyring.get(name),
            same_host=hello.host_id == self.host_id,
            open_threads=max(1, hello.open_threads),
            client=hello.client,
        )
        self._next_session += 1
        self.sessions[session.number] = session
        account.sessions += 1
        account.sessions_opening += 1
        self.parts.held.sessions.take(1)
        return session

    def opened(self, session: Session) -> None:
        """The session has its data path, or none by choice, or has ended. Idempotent."""
        if session.opening:
            session.opening = False
            session.account.sessions_opening -= 1

    def offers(self, session: Session) -> list[Offer]:
        """Data paths for a new session; shm only where both ends share a host."""
        found = []
        for kind, server in self.fabrics.items():
            if kind is FabricKind.SHM and not session.same_host:
                continue
            try:
                found.append(server.offer(peer=session.account.name))
            except EntresolError as error:
                log.warning("event=no_offer fabric=%s reason=%s", kind.label, error)
        return found

    async def attach(self, session: Session, offer: Offer, reply: bytes) -> None:
        """Turn an offer the host took into the session's data path.

        Raises: FabricError.
        """
        deadline_ns = self.parts.now_ns() + limits.HANDSHAKE_DEADLINE_NS
        endpoint = await self.fabrics[offer.kind].accept(offer, reply, deadline_ns)
        if session.closed:
            await endpoint.close()
            raise EntresolError("session is closed", status=Status.DISCONNECTED)
        session.endpoint = endpoint
        session.fabric = offer.kind.label
        log.info(
            "event=attached session=%d tenant=%s fabric=%s same_host=%s",
            session.number, session.account.name, session.fabric, session.same_host,
        )  # fmt: skip

    async def close_session(self, session: Session) -> None:
        """End a session: leases, reservations, plaintext, data path. Idempotent."""
        if session.closed:
            return
        session.closed = True
        self.opened(session)
        endpoint = session.endpoint
        self.puts.close_session(session)
        if endpoint is not None:
            try:
                await endpoint.close()
            except Exception:  # what the session holds must come back all the same
                log.exception("event=endpoint_close_failed session=%d", session.number)
        session.fenced = True  # until here its leases are revoked like any other's
        session.stop_showing()
        # Where reads cannot be fenced (shm) the host may be opening a block in place this very
        # moment: what it was promised stays as it is until the lease runs out by itself.
        if endpoint is None or endpoint.capabilities.revokes:
            for lease in self.parts.leases.end_session(session.number):
                self.gets.granting.let_go(lease.payload)
        await self.gets.close_session(session)
        del self.sessions[session.number]
        session.account.sessions -= 1
        self.parts.held.sessions.refund(1)
        if endpoint is not None:
            self.parts.metrics.sessions[session.fabric].dec()

    # Small requests: answered at once.

    def open_namespace(self, session: Session, raw: bytes) -> opening.NamespaceOpened:
        """Name blocks of a descriptor in this session; opened again it has the handle it had. To
        ask leaves no trace: it is written down by the first put (`Remembering`).

        Raises: BadKeyError, QuotaError, KeyringError.
        """
        described = parse_namespace(raw)
        host_sealed = isinstance(described, HostSealedNamespace)
        dtype = _dtype_of(described)
        keyring, name = self.parts.keyring, session.account.name
        namespace_id, secret = keyring.derive_namespace(name, raw)
        endpoint = session.endpoint
        opened = session.opened(namespace_id)
        if opened is None:
            same_host = endpoint is not None and endpoint.capabilities.same_host
            choice = self.parts.codecs.choose(
                name,
                namespace_id,
                dtype,
                same_host=same_host or session.same_host,
                open_threads=session.open_threads,
            )
            handle = session.next_handle()
            opened = session.namespaces[handle] = OpenedNamespace(
                handle, namespace_id, secret, described.block_tokens, dtype, choice, host_sealed
            )
            session.descriptors[handle] = raw
        shown = endpoint is not None and not endpoint.capabilities.private
        return opening.NamespaceOpened(
            opened.handle,
            namespace_id,
            opened.secret,
            opened.choice.codec_id,
            host_sealed or shown,
            self.parts.config.sealing.chunk_bytes,
        )

    async def forget(self, session: Session, request: Forget) -> int:
        """Drop blocks; returns when they cannot come back after a crash.

        Also when none was found: an earlier try may have failed with its tombstones on the way.
        """
        count = await lookups.forget(self.parts, session, request, self.removal)
        await self.removal.barrier(session.account)
        return count

    async def explain(self, session: Session, request: Explain) -> Explained:
        """Why each key is, or is not, here. Lets others run in between."""
        return await self._explainer.explain(session, request)

    # Life.

    async def drain(self, deadline_ns: int) -> bool:
        """Take no new work; wait until leases and puts are finished or the deadline passes."""
        self.draining = True
        try:
            async with asyncio.timeout(max(0, deadline_ns - self.parts.now_ns()) / 1e9):
                while self.under_way() and not self._hurry.is_set():
                    await asyncio.sleep(TICK_NS / 1e9)
                await self.puts.drain()
            return not self.under_way()
        except TimeoutError:
            return False

    def under_way(self) -> int:
        """What hosts still do here: gets being served, leases, puts reserved or being read."""
        return self.gets.serving + self.leases_held() + self.puts.under_way

    def leases_held(self) -> int:
        """Leases of sessions that are open; those of gone sessions only wait for their time."""
        return sum(self.parts.leases.held_by(number) for number in self.sessions)

    def hurry(self) -> None:
        """Do not wait for hosts; what was accepted is still written."""
        self._hurry.set()

    async def close(self, *, clean: bool = True) -> None:
        """End every session, finish what is on its way to flash, close the engine. Idempotent."""
        self.draining = True
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        for session in list(self.sessions.values()):
            await self.close_session(session)
        await self.gets.close()
        await self.scrubber.close()
        await self.keycare.close()
        if clean:
            await self.puts.drain()
        await self.removal.stop()
        try:
            await self.parts.engine.close(clean=clean)
        finally:
            # Not before: a collector that is slow would eat the time a stop has for the flash.
            await self.parts.meters.close(self.parts.compute)
            if self._background:
                await asyncio.wait(self._background)
            self.parts.residency.clear()
            self.parts.residency.pool.on_close = self.parts.scratch.on_close = None
            self.parts.residency.pool.close()
            self.parts.scratch.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_NS / 1e9)
            try:
                self.tick()
            except Exception:
                log.exception("event=tick_failed")

    def tick(self) -> None:
        """Periodic work: end leases and reservations whose time has come."""
        now = self.parts.now_ns()
        expired = self.parts.leases.expire(now)
        for lease in expired:
            self.gets.granting.let_go(lease.payload)
        if expired:
            self.parts.metrics.leases_expired.inc(len(expired))
        self.puts.expire(now)
        self.keycare.tick(now)
        engine, turns = self.parts.engine, self.parts.turns
        self.parts.codecs.pressure.sample(
            Waiting(
                turns.compute.waiting > 0, turns.flash.waiting > 0, engine.writes_wait,
                self.removal.evicts,
            ),
            read_bytes_per_s=1e9 / self.gets.reads.speed.ns_per_byte,
            write_bytes_per_s=engine.write_bytes_per_s,
        )  # fmt: skip

    def _slab_closes(self, slab: Slab) -> None:
        """A slab's memory goes away: nobody may be shown it any more."""
        for session in self.sessions.values():
            session.forget_slab(slab)
            exposure = session.take_back(slab)
            if exposure is not None and session.endpoint is not None:
                task = asyncio.get_running_loop().create_task(session.endpoint.revoke(exposure))
                self._background.add(task)
                task.add_done_callback(self._background.discard)

    def _scratch_closes(self, slab: Slab) -> None:
        for session in self.sessions.values():
            session.forget_slab(slab)


def _dtype_of(found: NamespaceDescriptor | HostSealedNamespace) -> DType:
    """Raises: BadKeyError for a dtype this build does not know."""
    if isinstance(found, NamespaceDescriptor):
        return DType.from_name(found.dtype)
    try:
        return DType(found.dtype)
    except ValueError:
        raise BadKeyError(f"unknown dtype {found.dtype}") from None


def _dek_lookup(keyring: Keyring) -> Callable[[bytes, int], bytes | None]:
    def dek_of(stream: bytes, version: int) -> bytes | None:
        info = keyring.by_stream(stream)
        return None if info is None or keyring.locked else keyring.get(info.name).dek(version)

    return dek_of


def _event_log(number: int, config: Config, accounts: Accounts, metrics: Metrics) -> EventLog:
    return EventLog(
        number,
        event_limits=quotas.event_limits_of(config),
        on_gap=metrics.event_gap,
        watchers_max=lambda name: quotas.watchers_max(config, accounts, name),
    )
