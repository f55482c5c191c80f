"""A daemon in simulation: the real engine, shard and listener on a simulated device and network.

It crashes, stops, hangs and comes back. `check_idle` is what must hold when nobody uses it: nothing
held, books equal to the index, events equal to the index.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entresol_daemon.compute import InlineCompute
from entresol_daemon.config import Config, FlashConfig, LimitsConfig, ShardConfig
from entresol_daemon.config_memory import MemoryConfig
from entresol_daemon.control.listener import ControlListener
from entresol_daemon.events.mirror import Mirror
from entresol_daemon.events.types import Medium
from entresol_daemon.flash.engine import Engine, EngineOptions
from entresol_daemon.flash.segment import DATA_OFFSET
from entresol_daemon.flash.sim import FaultPlan, SimDevice
from entresol_daemon.keys import files
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard.shard import Shard, Surroundings
from entresol_proto.fabric.base import FabricKind
from entresol_proto.ids import EngineKey, NamespaceDescriptor, wire_key
from entresol_proto.status import Status
from tests.flashlab import stock_faults
from tests.sim.oracle import SALTS, Name, space_of
from tests.sim.shardlab import SimBuffer
from tests.sim.simfabric import Fabrics, SimFabric
from tests.sim.simnet import SimNetwork
from tests.simloop import SECOND_NS, SimLoop, WallClock

TRUST_DOMAIN = "sim"
PORT = 7440
HOST_ID = b"simulated-host-1"
DRAIN_NS = 2 * SECOND_NS
BLOCK = 4096


class NoSync(files.OsCalls):
    """The keyring's files without waiting for a disk: its faults are another suite's."""

    def fsync(self, fd: int) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one daemon."""

    segments: int = 48
    segment_bytes: int = 128 * 1024
    dram_bytes: int = 2 << 20
    slab_bytes: int = 128 * 1024
    block_bytes_max: int = 64 * 1024
    chunk_bytes: int = 4096
    codec: str = "auto"
    fabrics: tuple[str, ...] = ("tcp",)  # tcp, private, shm
    lease_ns: int = SECOND_NS // 2
    checkpoint: bool = False

    @property
    def device_bytes(self) -> int:
        """Of the data file."""
        return DATA_OFFSET + self.segments * self.segment_bytes + BLOCK


class SimDaemon:
    """One shard. `start` it; then `crash` or `stop` it and `start` again, as often as wanted."""

    def __init__(
        self, name: str, folder: Path, seed: int, geometry: Geometry, plan: FaultPlan,
        network: SimNetwork, fabrics: Fabrics, wall: WallClock,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.name = name
        self.plan = plan
        self.network = network
        self.geometry = geometry
        self.up = False
        self.incarnation = 0
        self.rng = random.Random(f"{seed} daemon {name}")
        self._loop = loop
        self._fabrics = fabrics
        self._wall = wall
        self._folder = folder
        self._device_name = f"{name}.dev"
        self.device = SimDevice(
            geometry.device_bytes, seed=self.rng.getrandbits(32), plan=plan, sleep=asyncio.sleep,
            name=self._device_name,
        )  # fmt: skip
        self.config = replace(
            Config(),
            shard=ShardConfig(name=name, state_dir=folder),
            flash=FlashConfig(
                size_bytes=geometry.device_bytes, segment_bytes=geometry.segment_bytes
            ),
            memory=MemoryConfig(dram_bytes=geometry.dram_bytes, slab_bytes=geometry.slab_bytes),
            sealing=replace(
                Config().sealing, codec=geometry.codec, chunk_bytes=geometry.chunk_bytes
            ),
            limits=LimitsConfig(
                block_bytes_max=geometry.block_bytes_max,
                lease_ns=geometry.lease_ns,
                inflight_bytes_per_session_max=1 << 20,
                put_queue_bytes_max=4 << 20,
            ),
        )
        self.shard: Shard
        self.keyring: Keyring
        self.listener: ControlListener
        self.told_gone: set[tuple[bytes, bytes]] = set()  # what events said was evicted or lost
        self.spaces: dict[str, tuple[bytes, bytes]] = {}  # namespace id and secret, by space
        self.guests: list[Any] = []  # hosts that are not on the network: `gone` ends one
        self._mirrors: dict[str, tuple[Mirror, int]] = {}
        self._servers: dict[FabricKind, SimFabric] = {}

    async def start(self, tenants: tuple[str, ...]) -> None:
        """Format or recover the device, and serve."""
        assert not self.up, "started twice"
        self.incarnation += 1
        geometry, loop = self.geometry, self._loop
        self.keyring = Keyring.open(
            self._folder, FileKek(bytes(range(32))), calls=NoSync(), random=self.rng.randbytes
        )
        for tenant in tenants:
            if self.keyring.info(tenant) is None:
                self.keyring.add_tenant(tenant, now_unix_s=1)
        options = EngineOptions(
            segment_bytes=geometry.segment_bytes,
            blocks_max=4096,
            group_commit_ns=2_000_000,
            group_commit_bytes=256 * 1024,
            checkpoint_path=self._folder / "checkpoint" if geometry.checkpoint else None,
        )
        engine = await Engine.open(
            self.device, options, compute=InlineCompute(), now_ns=loop.now_ns,
            random_bytes=self.rng.randbytes,
        )  # fmt: skip
        self._servers = {
            fabric.kind: fabric
            for kind in geometry.fabrics
            for fabric in [
                SimFabric(
                    self.name,
                    kind=FabricKind.SHM if kind == "shm" else FabricKind.TCP,
                    private=kind == "private",
                    network=self.network,
                )
            ]
        }
        for server in self._servers.values():
            self._fabrics.add(server)
        self.shard = await Shard.open(
            self.config,
            engine=engine,
            keyring=self.keyring,
            compute=InlineCompute(),
            metrics=_metrics(),
            fabrics=self._servers,
            surroundings=Surroundings(
                make_buffer=SimBuffer, make_private=SimBuffer, host_id=HOST_ID,
                now_ns=loop.now_ns, unix_ns=self._wall.now_ns,
            ),
            incarnation=self.incarnation,
        )  # fmt: skip
        self._name_spaces(tenants)
        self._follow_events(tenants)
        self.listener = ControlListener(
            self.shard, host=self.name, port=PORT, tls=_no_tls(), trust_domain=TRUST_DOMAIN,
            server=_SimServer,  # type: ignore[arg-type]
        )  # fmt: skip
        await self.listener.start()
        self.up = True

    def _name_spaces(self, tenants: tuple[str, ...]) -> None:
        """What hosts call a namespace, and what the daemon does; it stays so for ever."""
        for tenant in tenants:
            for salt in SALTS:
                canonical = NamespaceDescriptor(model="sim", cache_salt=salt).canonical()
                named = self.keyring.derive_namespace(tenant, canonical)
                assert self.spaces.setdefault(space_of(tenant, salt), named) == named

    def _follow_events(self, tenants: tuple[str, ...]) -> None:
        """A consumer per tenant that knows what was there at the start."""
        for tenant in tenants:
            mirror = Mirror()
            mirror.restart(self.shard.parts.events.position(tenant))  # type: ignore[arg-type]
            for name in self._stored(tenant):
                mirror.blocks[name] = frozenset((Medium.MEMORY,))
            self._mirrors[tenant] = (mirror, self.incarnation)

    def _stored(self, tenant: str) -> set[tuple[bytes, bytes]]:
        index = self.shard.parts.engine.index
        mine = set(self.keyring.namespaces_of(tenant))
        names = ((index.namespace_of(s), index.key_of(s)) for s in index.live_slots().tolist())
        return {name for name in names if name[0] in mine}

    async def crash(self) -> None:
        """Power loss: whatever was not flushed may be gone; hosts lose their sessions."""
        if not self.up:
            return
        self.up = False
        self.device = self.device.crash(seed=self.rng.getrandbits(32))
        for server in self._servers.values():
            await server.close()
        self.network.break_all(self.name)
        await self._end(clean=False)

    async def stop(self) -> None:
        """As systemd asks for it: goodbye, drain, close."""
        if not self.up:
            return
        self.up = False
        self.network.thaw(self.name)
        self.shard.draining = True
        for guest in self.guests:
            guest.cut()
        self.listener.say_goodbye(Status.DRAINING, "the daemon is stopping")
        await self.shard.drain(self._loop.now_ns() + DRAIN_NS)
        await self.listener.close()
        await self._end(clean=True)
        for server in self._servers.values():
            await server.close()

    async def _end(self, *, clean: bool) -> None:
        for guest in self.guests:
            await guest.gone()
        self.guests.clear()
        if not clean:  # the process is dead; the objects are only tidied up
            await self.listener.close()
        await self.shard.close(clean=clean)
        self.remember_gone()  # a stop makes room for what it still writes
        self.keyring.close()

    async def restart_if_failed(self, tenants: tuple[str, ...]) -> bool:
        """An engine that stopped writing is what an operator restarts; True if it was one."""
        if self.up and self.shard.parts.engine.failed:
            await self.stop()
            await self.start(tenants)
            return True
        return False

    # What must hold.

    def remember_gone(self) -> None:
        """Note what events of this start said is gone."""
        for tenant in self._mirrors:
            self.told_gone |= self.removed_names(tenant)

    def removed_names(self, tenant: str) -> set[tuple[bytes, bytes]]:
        """Blocks that events said are gone, other than by a forget, since the start."""
        log = self.shard.parts.events
        first, last = log.held(tenant)  # type: ignore[arg-type]
        if not first:
            return set()
        events = log._read(tenant, first - 1, last)  # type: ignore[arg-type]
        return {
            (event.namespace_id, key)
            for event in events or ()
            if event.kind.ends_blocks and event.reason.label != "forgotten"
            for key in event.wire_keys
        }

    def has(self, name: Name) -> bool:
        """True if a block is in the index."""
        namespace, secret = self.spaces[name[0]]
        return (
            self.shard.parts.engine.index.find(namespace, wire_key(secret, EngineKey(name[1]))) >= 0
        )

    def check_events(self) -> list[str]:
        """A consumer that followed the events knows exactly what is stored."""
        wrong = []
        log = self.shard.parts.events
        for tenant, (mirror, incarnation) in self._mirrors.items():
            assert incarnation == self.incarnation, "a mirror of an earlier start"
            assert mirror.position is not None
            events = log._read(tenant, mirror.position.seq, 1 << 30)  # type: ignore[arg-type]
            if events is None:
                wrong.append(f"{self.name} {tenant}: the events were trimmed")
                continue
            mirror.follow(self.incarnation, events)
            stored, told = self._stored(tenant), set(mirror.blocks)
            if stored != told:
                wrong.append(
                    f"{self.name} {tenant}: {len(stored - told)} stored and not told, "
                    f"{len(told - stored)} told and not stored"
                )
        return wrong

    def check_idle(self) -> list[str]:
        """With no session left nothing may be held, and the books agree with the index."""
        shard, parts = self.shard, self.shard.parts
        held = {
            "sessions": len(shard.sessions),
            "leases": len(parts.leases),
            "leases in the books": parts.held.leases.used,
            "leased bytes": parts.held.get_bytes.used,
            "puts": parts.put_budget.used_blocks,
            "put bytes": parts.put_budget.used_bytes,
            "work of hosts": shard.under_way(),
            "loads": shard.gets.loading,
            "scratch bytes": parts.scratch.allocated_bytes,
        }
        wrong = [f"{self.name}: {count} {what} held" for what, count in held.items() if count]
        index = parts.engine.index
        for slot in index.live_slots().tolist():
            resident = parts.residency.get(slot)
            if resident is not None and resident.pins:
                wrong.append(f"{self.name}: a pin is left")
        wrong += [f"{self.name}: {text}" for text in stock_faults(parts.engine)]
        segments = parts.engine.segments()
        for account in parts.accounts.by_name.values():
            live = sum(each.live_bytes for each in segments if each.stream == account.stream)
            if account.flash_bytes != live:
                wrong.append(f"{self.name} {account.name}: {account.flash_bytes} booked of {live}")
        known = sum(each.extent.length_bytes for each in parts.residency._by_slot.values())
        if parts.residency.pool.allocated_bytes != known:
            wrong.append(f"{self.name}: slab memory of a block that is gone is left")
        return wrong


@functools.cache
def _metrics() -> Metrics:
    """One for all: nothing under test reads them, and making them costs a tenth of a run."""
    return Metrics()


class _SimServer:
    """Stands where `TlsServer` would: the simulated network accepts."""

    def __init__(self, factory: Callable[[], Any], *, host: str, port: int, **_: Any) -> None:
        self._place = (factory, host, port)
        self._server: Any = None

    async def start(self) -> int:
        self._server = await asyncio.get_running_loop().create_server(*self._place)
        return self._place[2]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def wait_closed(self) -> None:
        pass


@functools.cache
def _no_tls() -> ssl.SSLContext:
    """What the listener is given; the simulated network shows certificates without it."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def private_folder(folder: Path) -> Path:
    """A fresh folder for a keyring."""
    folder.mkdir(parents=True)
    os.chmod(folder, 0o700)
    return folder
