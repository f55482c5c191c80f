"""What the tests of the real daemon share: known content, small shapes, raw sessions, idle checks.

Content is a function of the key, so that a block read back years later can be judged without
keeping what was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Running, eventually, running_daemon

from bench.processes import free_ports
from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import ClientConfig, ShardAddress, TlsFiles
from entresol_client.connection import Connection
from entresol_client.handshake import OpenSession, connect
from entresol_client.results import GetResult, PutBlock, PutResult
from entresol_daemon import dev
from entresol_daemon.config import Config
from entresol_daemon.config_reference import to_toml
from entresol_daemon.server import Daemon
from entresol_proto.fabric.base import Endpoint
from entresol_proto.identity import client_ssl_context
from entresol_proto.ids import EngineKey, NamespaceDescriptor, wire_key
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from entresol_proto.wire.data import Ack, Commit, Fetch, Grant, OpenAt, PutItem, Reserve
from entresol_proto.wire.opening import NamespaceOpened, OpenNamespace

DEADLINE_NS = 60_000_000_000  # the machine may be busy; nothing here measures time
FABRICS = ("shm", "tcp", "tls")
DESCRIPTOR = NamespaceDescriptor(model="lab/tiny", dtype="bf16", layers=2, kv_heads=2, head_dim=8)


def seed_of(name: str) -> int:
    """A random seed, or the one of a failure to repeat: ENTRESOL_SEED."""
    seed = int(os.environ.get("ENTRESOL_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
    print(f"{name}: ENTRESOL_SEED={seed}")
    return seed


def key_of(number: int, salt: str = "") -> bytes:
    """A 32-byte engine key."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


def keys_of(count: int, salt: str = "") -> list[bytes]:
    return [key_of(number, salt) for number in range(count)]


def content(key: bytes, length_bytes: int) -> bytes:
    """The bytes a block of this key and length has, in every test and process."""
    seed = int.from_bytes(hashlib.blake2b(key + length_bytes.to_bytes(8, "little")).digest()[:8])
    return np.random.Generator(np.random.PCG64(seed)).bytes(length_bytes)


def blocks(keys: Sequence[bytes], length_bytes: int, **more: Any) -> list[PutBlock]:
    """Blocks of a chain: position and parent as an engine gives them."""
    return [
        PutBlock(key, content(key, length_bytes), position=at,
                 parent_key=keys[at - 1] if at else None, **more)
        for at, key in enumerate(keys)
    ]  # fmt: skip


def shape(
    *,
    dram: int = 64 * MIB,
    slab: int = 8 * MIB,
    flash: int = 256 * MIB,
    segment: int = 16 * MIB,
    block_max: int = 4 * MIB,
    fabrics: Sequence[str] = ("shm", "tcp"),
    tcp_tls: bool = False,
    tls: dict[str, Any] | None = None,
    **limits: Any,
) -> Callable[[Config], Config]:
    """A change of the dev configuration for `running_daemon`."""

    def change(config: Config) -> Config:
        return replace(
            config,
            memory=replace(config.memory, dram_bytes=dram, slab_bytes=slab),
            flash=replace(config.flash, size_bytes=flash, segment_bytes=segment),
            fabric=replace(config.fabric, enabled=tuple(fabrics), tcp_tls=tcp_tls),
            limits=replace(config.limits, block_bytes_max=block_max, **limits),
            tls=replace(config.tls, **(tls or {})),
        )

    return change


@contextlib.asynccontextmanager
async def client_of(
    running: Any, tenant: str = "dev", fabric: str = "shm", **overrides: Any
) -> AsyncIterator[AsyncClient]:
    """A connected client on exactly this fabric ("tls" is tcp to a daemon that wants TLS on it)."""
    overrides.setdefault("deadline_ns", DEADLINE_NS)
    overrides.setdefault("connect_deadline_ns", 5_000_000_000)
    overrides.setdefault("ping_deadline_ns", 20_000_000_000)
    name = "tcp" if fabric == "tls" else fabric
    config = running.client_config(tenant, fabric=name, fallback=False, **overrides)
    async with await AsyncClient.open(config) as client:
        await eventually(lambda: client.shards()[0].connected, seconds=60, what="the connection")
        assert client.shards()[0].fabric == name, client.shards()[0]
        yield client


async def put(
    namespace: Namespace, keys: Sequence[bytes], length_bytes: int, *, ack: str = "accepted"
) -> PutResult:
    """Put blocks with their known content."""
    return await namespace.put(blocks(keys, length_bytes), ack=ack)  # type: ignore[arg-type]


async def get(
    namespace: Namespace,
    keys: Sequence[bytes],
    length_bytes: int,
    *,
    prefix: bool = False,
    open_at: str = "host",
    deadline_ns: int | None = None,
) -> GetResult:
    """Get blocks and judge every byte: OK has the known content, anything else nothing of it."""
    buffers = [bytearray(b"\xa5" * length_bytes) for _ in keys]
    result = await namespace.get_into(
        keys, buffers, prefix=prefix, open_at=open_at, deadline_ns=deadline_ns  # type: ignore[arg-type]
    )  # fmt: skip
    judge(keys, buffers, result)
    return result


def judge(keys: Sequence[bytes], buffers: Sequence[bytearray], result: GetResult) -> None:
    """Fail on any byte that should not be there."""
    for key, buffer, status in zip(keys, buffers, result.statuses, strict=True):
        if status is Status.OK:
            assert bytes(buffer) == content(key, len(buffer)), f"wrong bytes for {key.hex()}"
        else:
            untouched = buffer.count(0xA5) == len(buffer) or not any(buffer)
            assert untouched, f"{status.label} left something in the buffer of {key.hex()}"


def all_are(result: GetResult | PutResult, status: Status) -> bool:
    return all(found is status for found in result.statuses)


def counts(statuses: Iterable[Status]) -> dict[str, int]:
    """For failure messages."""
    found: dict[str, int] = {}
    for status in statuses:
        found[status.label] = found.get(status.label, 0) + 1
    return found


async def assert_idle(daemon: Daemon) -> None:
    """With nobody asking for anything, nothing is held."""
    shard = daemon.shard
    parts = shard.parts

    def held() -> list[str]:
        found = {
            "leases": len(parts.leases),
            "leases in the books": parts.held.leases.used,
            "leased bytes": parts.held.get_bytes.used,
            "pinned residents": sum(r.pins > 0 for r in parts.residency._by_slot.values()),
            "loading": shard.gets.loading,
            "reservations": len(shard.puts._reservations),
            "wanted": len(shard.puts._wanted),
            "unflushed": len(shard.puts._entering.durable),
            "put bytes": parts.put_budget.used_bytes,
            "put blocks": parts.put_budget.used_blocks,
            "scratch bytes": parts.scratch.allocated_bytes,
            "session bytes": sum(s.held_bytes for s in shard.sessions.values()),
            "plain blocks": sum(len(s.plain_blocks) for s in shard.sessions.values()),
        }
        used = sum(r.extent.length_bytes for r in parts.residency._by_slot.values())
        found["memory of no resident"] = parts.residency.pool.allocated_bytes - used
        return [f"{name}: {count}" for name, count in found.items() if count]

    until = time.monotonic() + 30
    while held() and time.monotonic() < until:
        await asyncio.sleep(0.02)
    pinned = [  # which way they came says where to look
        f"slot {r.slot}: {r.pins} pins, {r.state.name.lower()}, "
        + ("read and not granted" if r.from_flash else "granted or put")
        for r in parts.residency._by_slot.values()
        if r.pins
    ]
    assert not held(), "; ".join([*held(), *pinned])
    for account in parts.accounts.by_name.values():
        live = sum(r.live_bytes for r in parts.engine.segments() if r.stream == account.stream)
        assert account.flash_bytes == live, f"{account.name}: {account.flash_bytes} != {live}"
        assert account.put_bytes == account.put_blocks == 0, account


@dataclass
class Raw:
    """A session without the client's manners: any message, any span."""

    opened: OpenSession
    connection: Connection

    @property
    def endpoint(self) -> Endpoint:
        assert self.opened.endpoint is not None
        return self.opened.endpoint

    async def ask(self, message: Any, seconds: float = 60) -> Any:
        """One request, its answer. Raises: RequestFailedError."""
        return await self.connection.request(message, _until(seconds))

    async def namespace(self, descriptor: NamespaceDescriptor = DESCRIPTOR) -> NamespaceOpened:
        opened: NamespaceOpened = await self.ask(OpenNamespace(descriptor.canonical()))
        return opened

    async def fetch(
        self, handle: int, keys: bytes, *, open_at: OpenAt = OpenAt.HOST, seconds: float = 60
    ) -> list[Grant]:
        """All grants of a FETCH; nothing is released."""
        message = Fetch(handle, open_at, False, int(seconds * 1e9), keys)
        request_id, sink = await self.connection.fetch(message, _until(seconds))
        grants: list[Grant] = []
        try:
            while found := await sink.next(_until(seconds + 30)):
                grants += [grant for grant, _ in found]
        finally:
            self.connection.end_fetch(request_id, sink)
        return grants

    async def reserve(
        self, handle: int, items: Sequence[PutItem], *, ack: Ack = Ack.DURABLE, seconds: float = 60
    ) -> Any:
        return await self.ask(Reserve(handle, ack, int(seconds * 1e9), tuple(items)))

    async def commit(self, pairs: Sequence[tuple[int, Any]]) -> list[Status]:
        return list((await self.ask(Commit(tuple(pairs)))).statuses)


def put_item(namespace: NamespaceOpened, engine_key: bytes, length_bytes: int) -> PutItem:
    return PutItem(
        wire_key(namespace.secret, EngineKey(engine_key)), engine_key, length_bytes, 0, b"", b""
    )


def run_of(namespace: NamespaceOpened, keys: Sequence[bytes]) -> bytes:
    """The wire keys of engine keys, as FETCH wants them."""
    return b"".join(wire_key(namespace.secret, EngineKey(key)) for key in keys)


@contextlib.asynccontextmanager
async def raw_of(
    running: Any, tenant: str = "dev", fabric: str = "shm", config: ClientConfig | None = None
) -> AsyncIterator[Raw]:
    """A raw session of a tenant."""
    name = "tcp" if fabric == "tls" else fabric
    config = config or running.client_config(
        tenant, fabric=name, fallback=False, connect_deadline_ns=5_000_000_000
    )
    context = client_ssl_context(config.tls.cert, config.tls.key, config.tls.ca)
    opened = await connect(config.shards[0], config, context)
    try:
        yield Raw(opened, opened.connection)
    finally:
        await opened.connection.close()
        if opened.endpoint is not None:
            await opened.endpoint.close()


def _until(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process without its shared files and slabs."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise AssertionError("no RssAnon in /proc")


async def disconnected(running: Running, sessions: int = 0) -> None:
    """Wait until the daemon has let go of all but `sessions` sessions."""
    shard = running.daemon.shard
    await eventually(lambda: len(shard.sessions) <= sessions, seconds=30, what="sessions to end")


_ZYGOTE = """
import importlib, json, os, resource, signal, sys, time
import entresol_daemon.__main__ as command
import entresol_daemon.dev, entresol_daemon.server, uvloop
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    pid = job["pid"] or os.fork()
    if pid == 0:
        out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | job["flags"], 0o600)
        os.dup2(out, 1), os.dup2(out, 2), os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        if job["file_bytes_max"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes_max"],) * 2)
        os.environ.update(job["env"])
        if job["plant"]:
            module, _, name = job["plant"].partition(":")
            getattr(importlib.import_module(module), name)()
        code = 70
        try:
            code = command.main(job["argv"])
        except SystemExit as error:
            code = error.code
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if job["keep"]:
        print(pid, flush=True)
        continue
    until = time.monotonic() + 60
    done, status = 0, 0
    while not done and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps(os.waitstatus_to_exitcode(status) if done else "still running"), flush=True)
"""


class Starter:
    """Runs `entresold ARGS` to its end in a process of its own, without paying for the imports.

    A process that imported everything once forks one child per call; the child runs the command's
    `main` as the real entry point does.
    """

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        self._out = folder / "entresold.out"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self._line() == "ready"

    def run(self, *argv: str, file_bytes_max: int = 0) -> tuple[int | str, str]:
        """Exit status ("still running" after a minute, then it was killed) and what it printed."""
        code = self._job(argv=argv, file_bytes_max=file_bytes_max)
        return code, self._out.read_text()

    def start(
        self, out: Path, *argv: str, env: dict[str, str] | None = None, plant: str = ""
    ) -> int:
        """Start it and leave it running, its output appended to `out`; returns the process id.

        `plant`, a "module:function", is called first: where canaries put their bug in.
        """
        return int(
            self._job(
                argv=argv, out=str(out), flags=os.O_APPEND, keep=True, env=env or {}, plant=plant
            )
        )

    def wait(self, pid: int) -> int | str:
        """Exit status of what `start` started."""
        return self._job(pid=pid)

    def _job(self, **values: Any) -> Any:
        assert self._process.stdin is not None
        empty = {"argv": [], "out": str(self._out), "flags": os.O_TRUNC, "file_bytes_max": 0,
                 "pid": 0, "keep": False, "env": {}, "plant": ""}  # fmt: skip
        self._process.stdin.write(json.dumps({**empty, **values}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def refuses(self, *argv: str, **more: int) -> str:
        """It must end with status 1, one clear line and a hint, and no traceback."""
        code, text = self.run(*argv, **more)
        assert code == 1, (code, text)
        assert "Traceback" not in text, text
        said = [line for line in text.splitlines() if line.startswith("entresold: ")]
        fixes = [line for line in text.splitlines() if line.startswith("  fix: ")]
        assert len(said) == 1, text
        assert len(fixes) == 1, text
        assert len(fixes[0]) > 12, text
        return said[0] + "\n" + fixes[0]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class Site:
    """A prepared dev folder whose configuration is a file that tests can spoil."""

    directory: Path
    config: Config

    @classmethod
    def prepare(cls, directory: Path, **shape_options: Any) -> Site:
        config, _ = dev.prepare(directory)
        options = {"flash": 64 * MIB, "segment": 4 * MIB, "block_max": 1 * MIB, "dram": 32 * MIB}
        site = cls(directory, shape(**{**options, **shape_options})(config))
        site.write(site.config)
        return site

    @property
    def toml(self) -> Path:
        return self.directory / "entresold.toml"

    def write(self, config: Config, extra: str = "") -> None:
        """Make `config` the file's content."""
        self.toml.write_text(to_toml(config, comments=False) + extra)

    def change(self, section: str, **values: Any) -> None:
        """Write the site's configuration with some settings changed; `self.config` stays."""
        part = replace(getattr(self.config, section), **values)
        self.write(replace(self.config, **{section: part}))

    def fix_port(self) -> None:
        """Choose a free control port for good, so that clients find the daemon again."""
        (port,) = free_ports(1)
        listen = replace(self.config.listen, control_port=port)
        self.config = replace(self.config, listen=listen)
        self.write(self.config)

    def client_config(self, tenant: str = "dev", **overrides: Any) -> ClientConfig:
        """How a tenant reaches it; needs `fix_port`."""
        pki = self.directory / "pki"
        files = (pki / "tenants" / f"{tenant}.pem", pki / "tenants" / f"{tenant}.key")
        shard = ShardAddress(self.config.shard.name, port=self.config.listen.control_port)
        tls = TlsFiles(*files, pki / "ca.pem", self.config.tls.trust_domain)
        return replace(ClientConfig((shard,), tls), **overrides)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        """The site's own configuration in this process."""
        async with running_daemon(self.directory, lambda _: self.config) as running:
            yield running
