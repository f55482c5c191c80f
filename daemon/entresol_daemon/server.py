"""The daemon's life: open everything in order, serve, drain, close in the opposite order.

Invariant: whatever was opened is closed again, also when start-up fails half-way; a stop asked for
twice becomes a fast one, never an unclean one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from entresol_daemon import ports
from entresol_daemon.compute import ThreadCompute
from entresol_daemon.config import Config
from entresol_daemon.control.grpc_server import GrpcLimits, GrpcServer
from entresol_daemon.control.http import HttpServer
from entresol_daemon.control.identity import (
    ROLE_SHARD,
    ReloadingServerContext,
    SpiffeId,
    first_certificate,
)
from entresol_daemon.control.listener import ControlListener
from entresol_daemon.fabrics import open_fabrics
from entresol_daemon.flash.engine import Engine, EngineOptions
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.folders import private_folder
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.keys.providers import FileKek, KekMissingError
from entresol_daemon.keys.sweeping import sweep
from entresol_daemon.manager import Sockets, Watchdog, tell, watchdog_ns
from entresol_daemon.memory.huge_pages import check_huge_pages
from entresol_daemon.memory.slabs import SlabBuffer
from entresol_daemon.metrics import LoopLagProbe, Metrics
from entresol_daemon.observe import follow_process, follow_shard
from entresol_daemon.overview import Overview
from entresol_daemon.shard.admin import Addresses, ShardAdmin
from entresol_daemon.shard.shard import Shard, Surroundings
from entresol_daemon.stalls import StallWatch
from entresol_proto import __version__
from entresol_proto.fabric.base import FabricKind, FabricServer
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.registry import same_host_id
from entresol_proto.fabric.tcp import TcpFabricServer
from entresol_proto.ids import TenantName
from entresol_proto.status import (
    DeviceError,
    EntresolError,
    FabricError,
    KeyringError,
    Status,
)

KEY_THREADS = 2  # for what the keyring writes, which its lock lets happen one by one
DRAIN_NS = 20_000_000_000
ADMIN_SOCKET = "admin.sock"
SCRUB_FILE = "scrub.json"

log = logging.getLogger("entresol.daemon")
Closer = Callable[[], Awaitable[None]]


class Daemon:
    """One shard with everything around it. `start`, then `stop`; both once."""

    def __init__(self, config: Config, *, settle: Callable[[], None] = lambda: None) -> None:
        """`config` must have passed `Config.check`. `settle` is called once all is open, and may
        hold the loop up: nobody watches that before."""
        self.config = config
        self._settle = settle
        self.metrics = Metrics(version=__version__, shard=config.shard.name)
        self._closers: list[tuple[str, Closer]] = []
        self._stopping = False
        self._clean = True
        self._flash_direct = False
        self._unlocking: asyncio.Future[None] | None = None
        self._ready_ms = 0
        self._sockets = Sockets()
        self.shard: Shard
        self.control: ControlListener
        self.grpc: GrpcServer
        self.http: HttpServer
        self.admin: ShardAdmin
        self.tls: ReloadingServerContext
        self.compute: ThreadCompute
        self.keys: ThreadCompute  # what the keyring writes waits for a disk, not in sealing's way
        self.fabrics: dict[FabricKind, FabricServer] = {}

    async def start(self) -> None:
        """Open everything; on return the daemon serves.

        Raises: EntresolError with a hint; everything is closed again then.
        """
        try:
            await self._open()
        except BaseException as error:
            await self._close_all()
            if isinstance(error, MemoryError):
                raise EntresolError(
                    f"not enough memory to start: {error}",
                    hint="smaller [flash] blocks_max or [memory] dram_bytes, or more memory",
                    status=Status.BUSY,
                ) from None
            raise

    async def _open(self) -> None:
        config = self.config
        started_ns = time.monotonic_ns()
        self._sockets = Sockets.from_environment()
        self._on_close("inherited sockets", _as_closer(self._sockets.close))
        check_huge_pages(config.memory)
        self.tls = self._open_tls()
        if self._sockets.none:  # else they are the manager's, and taken
            await asyncio.to_thread(ports.check, config)
        private_folder(config.shard.state_dir)
        keyring = await self._open_keyring()
        self.compute = ThreadCompute(config.sealing_threads)
        self._on_close("compute", self.compute.close)
        self.keys = ThreadCompute(KEY_THREADS)
        self._on_close("keys", self.keys.close)
        tell("STATUS=opening the flash, which may have to be recovered")
        engine = await self._open_engine(locked=keyring.locked)
        await self._open_fabrics()
        self.shard = await Shard.open(
            config,
            engine=engine,
            keyring=keyring,
            compute=self.compute,
            keys=self.keys,
            metrics=self.metrics,
            fabrics=self.fabrics,
            surroundings=Surroundings(
                make_buffer=self._make_slab,
                make_private=_make_private,
                host_id=same_host_id(),
                now_ns=time.monotonic_ns,
                unix_ns=time.time_ns,
                sweep=sweep,
                scrub_file=config.shard.state_dir / SCRUB_FILE,
            ),
        )
        # The shard closes the engine; from here on the engine's own closer has nothing to do.
        self._on_close("shard", lambda: self.shard.close(clean=self._clean))
        if config.fabric.tcp_tls and FabricKind.TCP in self.fabrics:
            tcp = self.fabrics[FabricKind.TCP]
            assert isinstance(tcp, TcpFabricServer)
            tcp.shake_hands = self._shake_hands
        await self._open_surfaces(self.tls)
        self._ready_ms = (time.monotonic_ns() - started_ns) // 1_000_000
        self._tell_up(locked=keyring.locked)
        tell("READY=1")
        self._settle()
        self._watch_loop()
        watchdog = Watchdog(watchdog_ns())
        watchdog.start(asyncio.get_running_loop())
        self._on_close("watchdog", _as_closer(watchdog.stop))

    def _tell_up(self, *, locked: bool) -> None:
        """Say whether it serves, now that everything is open, or now that it is unlocked."""
        engine, control = self.shard.parts.engine, self.control
        blocks = len(engine.index)
        told = (
            self.config.shard.name, control.host, control.port, blocks,
            engine.recovery.kind.value, self._ready_ms, __version__,
        )  # fmt: skip
        fields = "shard=%s control=%s:%d blocks=%d recovery=%s ready_ms=%d version=%s"
        if locked:
            log.warning(f"event=waiting_locked {fields} hint='see `entresol unlock`'", *told)
            tell(f"STATUS=waiting, locked: see `entresol unlock`; {blocks} blocks")
        else:
            log.info(f"event=serving {fields}", *told)
            tell(f"STATUS=serving; {blocks} blocks at this time")

    async def _open_keyring(self) -> Keyring:
        config = self.config
        kek = await self._find_kek()

        def open_keyring() -> Keyring:
            return Keyring.open(
                config.shard.state_dir,
                kek,
                tenants_max=config.limits.tenants_max,
                namespaces_per_tenant_max=config.limits.namespaces_per_tenant_max,
            )

        keyring = await asyncio.to_thread(open_keyring)
        self._on_close("keyring", lambda: asyncio.to_thread(keyring.close))
        return keyring

    async def _find_kek(self) -> FileKek | None:
        """None when it is not there (yet): the daemon starts locked. Raises: KeyringError."""
        path, why = self.config.keys.kek_file, "[keys] kek_file names no key-encryption key"
        if path is not None:
            try:
                return await asyncio.to_thread(FileKek.open, path)
            except KekMissingError as error:
                why = Exception.__str__(error)
        if not self.config.flash_path.exists():
            raise KeyringError(
                f"{why}, and there is no {self.config.flash_path}: without the key none is made",
                hint="name a key-encryption key in [keys] kek_file; before a first start "
                "`entresold --config FILE prepare` makes it; where there was one, bring it back",
            )
        log.warning("event=locked reason=%r hint='see `entresol unlock`'", why)
        return None

    async def unlock(self, kek_file: str = "") -> str:
        """Take the KEK from a file (by default the configured one); returns its id.

        Harmless when it is not locked. Raises: KeyringError; it is still locked then, and nothing
        was changed.
        """
        path = Path(kek_file) if kek_file else self.config.keys.kek_file
        if path is None:
            raise KeyringError(
                "no KEK file is known",
                hint="`entresol unlock FILE`, or [keys] kek_file in the daemon's configuration",
                status=Status.BAD_REQUEST,
            )
        keyring = self.shard.parts.keyring
        kek = await asyncio.to_thread(FileKek.open, path)
        if await self.keys.run(keyring.unlock, kek):
            self._tell_up(locked=False)
        self.grpc.tell_health()
        return kek.kek_id().hex()

    async def change_kek(self, kek_file: str) -> tuple[str, str]:
        """Wrap every key under the KEK in a file; returns the ids of the old one and the new.

        Blocks stay as they are. Raises: KeyringError.
        """
        keyring = self.shard.parts.keyring
        kek = await asyncio.to_thread(FileKek.open, kek_file)
        old = await self.keys.run(keyring.rewrap, kek)
        log.warning("event=kek_changed hint='[keys] kek_file must name the new one at next start'")
        return old.hex(), kek.kek_id().hex()

    def on_hangup(self) -> None:
        """SIGHUP: look at the certificates again, and at the KEK's place if it is missing."""
        log.info("event=hangup hint='certificates are read again; settings want a restart'")
        self.tls.check(force=True)
        if self.shard.parts.keyring.locked:
            self._unlocking = asyncio.ensure_future(self._try_unlock())

    async def _try_unlock(self) -> None:
        try:
            await self.unlock()
        except EntresolError as error:
            log.warning("event=still_locked reason=%r", str(error))

    async def _open_engine(self, *, locked: bool) -> Engine:
        """A locked daemon makes and formats nothing: what it finds may be somebody else's."""
        flash = self.config.flash
        device = await FileDevice.open(
            self.config.flash_path,
            flash.size_bytes or None,
            io_threads=flash.io_threads,
            create=not locked,
            direct=flash.direct != "off",
        )
        self._on_close("device", device.close)
        self._flash_direct = device.direct
        if flash.direct == "on" and not device.direct:
            raise DeviceError(
                f"{device.name} does not support O_DIRECT",
                hint='use another file system, or [flash] direct = "auto"',
            )
        engine = await Engine.open(
            device,
            EngineOptions(
                segment_bytes=flash.segment_bytes,
                blocks_max=self.config.blocks_max(device.size_bytes),
                group_commit_bytes=flash.group_commit_bytes,
                group_commit_ns=flash.group_commit_ns,
                checkpoint_path=self.config.checkpoint_path,
                may_format=not locked,
            ),
            compute=self.compute,
            now_ns=time.monotonic_ns,
        )
        self._on_close("engine", lambda: engine.close(clean=True))
        report = engine.recovery
        self.metrics.recovery_seconds.set(report.elapsed_ns / 1e9)
        self.metrics.recovered_blocks.set(report.blocks)
        return engine

    def _open_tls(self) -> ReloadingServerContext:
        files = self.config.tls
        assert files.cert is not None, "checked by Config.check"
        assert files.key is not None, "checked by Config.check"
        assert files.ca is not None, "checked by Config.check"
        return ReloadingServerContext(
            files.cert, files.key, files.ca,
            shard=SpiffeId(files.trust_domain, ROLE_SHARD, self.config.shard.name),
            interval_ns=files.reload_interval_ns,
        )  # fmt: skip

    async def _open_fabrics(self) -> None:
        listen, data = self.config.listen, None
        if "tcp" in self.config.fabric.enabled:
            data = await self._sockets.take_one("data", listen.data_host, listen.data_port)
        servers = await open_fabrics(
            self.config, self.tls.context, self._certificate_sha256, data_socket=data
        )
        for server in servers:
            self.fabrics[server.kind] = server
            self._on_close(f"fabric {server.kind.label}", server.close)

    async def _shake_hands(self, origin: str) -> None:
        """Of a data stream: its address waits between many of them, but not the control port's."""
        parts = self.shard.parts
        await parts.turns.loop.shake_hands(f"data {origin}", parts.now_ns())

    async def _open_surfaces(self, tls: ReloadingServerContext) -> None:
        config, listen = self.config, self.config.listen
        self.control = ControlListener(
            self.shard, host=listen.control_host, port=listen.control_port, tls=tls.context,
            trust_domain=config.tls.trust_domain,
            sockets=await self._sockets.take("control", listen.control_host, listen.control_port),
        )  # fmt: skip
        metrics_socket = await self._sockets.take_one(
            "metrics", listen.metrics_host, listen.metrics_port
        )
        self._sockets.check_none_left()
        await self.control.start()
        self._on_close("control", self.control.close)
        tcp = self.fabrics.get(FabricKind.TCP)
        data = (f"{listen.data_host}:{tcp.port}",) if isinstance(tcp, TcpFabricServer) else ()
        self.admin = ShardAdmin(
            self.shard,
            Addresses(f"{listen.control_host}:{self.control.port}", data),
            end_sessions=self._end_sessions,
            begin_drain=self._begin_drain,
            unlock=self.unlock,
            change_kek=self.change_kek,
            flash_direct=self._flash_direct,
            unusable=tls.problem,
        )
        self.grpc = GrpcServer(
            self.admin, tls=tls.bundle, trust_domain=config.tls.trust_domain,
            host=listen.grpc_host, port=listen.grpc_port, unix_path=listen.unix_dir / ADMIN_SOCKET,
            grpc_limits=GrpcLimits(connection_age_max_s=config.tls.session_age_max_ns / 1e9),
        )  # fmt: skip
        await self.grpc.start()
        self._on_close("grpc", self.grpc.close)
        self.http = HttpServer(
            self.metrics,
            self.admin.reasons_not_ready,
            host=listen.metrics_host,
            port=listen.metrics_port,
            overview=Overview(self.metrics, self.shard, self.admin.look, __version__),
            listening=metrics_socket,
        )
        try:
            await self.http.start()
        except OSError as error:
            raise EntresolError(
                f"cannot listen at {listen.metrics_host}:{listen.metrics_port}: {error.strerror}",
                hint="is another daemon running? see [listen] metrics_host and metrics_port",
            ) from None
        self._on_close("http", self.http.close)
        self._on_close("control", self.control.close)  # again: hosts leave before the others close
        follow_shard(self.metrics, self.shard, tls)
        self.metrics.on_refresh(lambda: self.metrics.set_state(self.admin.state()))
        self.grpc.announce()

    def _watch_loop(self) -> None:
        probe = LoopLagProbe(self.metrics.loop_lag_seconds)
        probe.start(asyncio.get_running_loop())
        self._on_close("probe", _as_closer(probe.stop))
        watch = StallWatch()
        watch.start(asyncio.get_running_loop())
        self._on_close("stall watch", _as_closer(watch.stop))
        follow_process(self.metrics, watch)

    async def until_broken(self) -> BaseException:
        """Return what broke its writing, if ever: stop it then, not `clean`, and start again."""
        return await self.shard.parts.engine.until_broken()

    async def stop(self, *, drain_ns: int = DRAIN_NS, clean: bool = True) -> None:
        """Say goodbye to hosts, finish what is under way within `drain_ns`, close. Idempotent.

        `clean`: make everything durable and leave a checkpoint; else flash is left as it is.
        """
        if self._stopping:
            return
        self._stopping, self._clean = True, clean
        tell("STOPPING=1\nSTATUS=draining: hosts finish what is under way")
        self._begin_drain()
        self.control.hand_over()
        complete = await self.shard.drain(time.monotonic_ns() + drain_ns)
        log.info("event=drained complete=%s sessions=%d", complete, len(self.shard.sessions))
        await self._close_all()
        log.info("event=stopped")

    async def _close_all(self) -> None:
        for name, closer in reversed(self._closers):
            try:
                await closer()
            except Exception:
                log.exception("event=close_failed part=%s", name)
        self._closers.clear()

    def _on_close(self, name: str, closer: Closer) -> None:
        self._closers.append((name, closer))

    def _begin_drain(self) -> None:
        self.shard.draining = True
        self.control.say_goodbye(Status.DRAINING, "the daemon is stopping")
        self.grpc.tell_health()

    async def _end_sessions(self, tenant: TenantName) -> int:
        """Close the connections of a tenant and wait until their sessions are gone."""
        mine = [
            c for c in self.control.connections
            if c.handler is not None and c.handler.session is not None
            and c.handler.session.account.name == tenant
        ]  # fmt: skip
        for connection in mine:
            connection.abort()
        while any(s.account.name == tenant for s in self.shard.sessions.values()):
            await asyncio.sleep(0.01)
        return len(mine)

    def _certificate_sha256(self) -> bytes:
        """Digest of the certificate in force, for hosts to pin on TLS data streams."""
        leaf = first_certificate(self.tls.bundle().cert).decode("ascii", "replace")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(leaf)).digest()

    def _make_slab(self, length_bytes: int) -> SlabBuffer:
        huge = self.config.memory.huge_pages
        try:
            buffer = MemfdBuffer(length_bytes, name="entresol-slab", huge_pages=huge != "off")
        except FabricError as error:
            raise OSError(str(error)) from None
        if huge == "on" and not buffer.huge:
            buffer.close()
            log.warning("event=no_huge_pages effect=less_memory hint='others took them meanwhile'")
            raise OSError("no huge pages left")
        buffer.seal_for_readers()
        return buffer


def _make_private(length_bytes: int) -> SlabBuffer:
    """Memory that is never given to a fabric."""
    try:
        return MemfdBuffer(length_bytes, name="entresol-scratch")
    except FabricError as error:
        raise OSError(str(error)) from None


def _as_closer(stop: Callable[[], None]) -> Closer:
    async def close() -> None:
        stop()

    return close
