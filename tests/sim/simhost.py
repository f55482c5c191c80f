"""A host in simulation: the real client, and workers that put, get, look up and forget.

Invariants checked on every call: bytes of a hit are the block's; a destination that is no hit holds
what it held before, or zeros; nobody writes into it after the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entresol_client import client
from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import BreakerSettings, ClientConfig, ShardAddress, TlsFiles
from entresol_client.results import PutBlock
from entresol_client.surroundings import Surroundings
from entresol_client.workers import InlineWorkers
from entresol_proto.identity import client_ssl_context
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status
from tests.certs import make_ca
from tests.sim.oracle import FILL, SALTS, Oracle, space_of
from tests.sim.plans import KEYS_PER_SPACE, TENANTS, Op, key_of
from tests.sim.simdaemon import HOST_ID, PORT, TRUST_DOMAIN
from tests.sim.simfabric import Fabrics
from tests.sim.simnet import SimNetwork, as_host
from tests.simloop import SECOND_NS

MS_NS = 1_000_000
SHARD_NAMES = ("shard0", "shard1", "shard2")
OUTAGES = (Status.DISCONNECTED.label, Status.BREAKER_OPEN.label, Status.DRAINING.label)
OUTAGE_PAUSE_S = 0.15
WATCHED_MAX = 24  # buffers of ended gets that are looked at again later
# What says that a block is not there; every other status says nothing about it.
ABSENT = frozenset({Status.MISS})


@dataclass(frozen=True, slots=True)
class Identities:
    """Certificates of everybody, as files and as what a peer shows."""

    folder: tempfile.TemporaryDirectory[str]
    files: dict[str, TlsFiles]
    der: dict[str, bytes]


@functools.cache
def identities() -> Identities:
    """Made once per process; nothing in a run depends on their bytes."""
    import ssl

    folder = tempfile.TemporaryDirectory(prefix="entresol-sim-")
    ca = make_ca("sim")
    files, der = {}, {}
    roles = [("tenant", name) for name in TENANTS] + [("shard", name) for name in SHARD_NAMES]
    for role, name in roles:
        pair = ca.issue(name, spiffe_uri=f"spiffe://{TRUST_DOMAIN}/{role}/{name}")
        paths = pair.write(Path(folder.name))
        files[name] = TlsFiles(paths.cert, paths.key, paths.ca, TRUST_DOMAIN)
        der[name] = ssl.PEM_cert_to_DER_cert(pair.cert_pem.decode())
    return Identities(folder, files, der)


@functools.cache
def _tls_context(cert: Path, key: Path, ca: Path) -> Any:
    return client_ssl_context(cert, key, ca)


@contextlib.contextmanager
def one_tls_context_each() -> Iterator[None]:
    """Clients of a tenant share the context their files give: reading them costs milliseconds."""
    real, client.client_ssl_context = client.client_ssl_context, _tls_context  # type: ignore[attr-defined]
    try:
        yield
    finally:
        client.client_ssl_context = real  # type: ignore[attr-defined]


def client_config(tenant: str, shards: int) -> ClientConfig:
    """Short times, little memory."""
    return ClientConfig(
        shards=tuple(ShardAddress(name, host=name, port=PORT) for name in SHARD_NAMES[:shards]),
        tls=identities().files[tenant],
        deadline_ns=3 * SECOND_NS,
        connect_deadline_ns=SECOND_NS,
        ping_interval_ns=500 * MS_NS,
        ping_deadline_ns=300 * MS_NS,
        open_threads=2,
        staging_bytes_max=4 << 20,
        breaker=BreakerSettings(3, 50 * MS_NS, SECOND_NS),
    )


@dataclass(slots=True)
class _Watched:
    """A buffer of a get that has ended, and what it held then."""

    buffer: bytearray
    held: bytes
    what: str


async def _as_it_is(host: str, port: int) -> list[str]:
    """The simulated network has names."""
    return [host]


class SimHost:
    """One host of a tenant."""

    def __init__(
        self, name: str, tenant: str, shards: int, network: SimNetwork, fabrics: Fabrics,
        oracle: Oracle, seed: int, *, same_machine: bool, on_end: Callable[[Op], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.tenant = tenant
        self.gone = False
        self._oracle = oracle
        self._on_end = on_end
        self._loop = network.loop
        self._rng = random.Random(f"{seed} host {name}")
        self._watched: list[_Watched] = []
        self._spaces: dict[str, Namespace] = {}
        network.certificates[name] = identities().der[tenant]
        self._config = client_config(tenant, shards)
        host_id = HOST_ID if same_machine else name.encode().ljust(16, b"\0")
        self._around = Surroundings(
            make_workers=InlineWorkers,
            connect_fabric=fabrics.connector(name),
            resolve=_as_it_is,
            host_id=lambda: host_id,
            process_name=lambda: f"sim/{name}",
        )
        self.client: AsyncClient

    async def start(self) -> None:
        """Connect; an outage does not matter."""
        with as_host(self.name):
            self.client = await AsyncClient.open(self._config, rng=self._rng, around=self._around)
            for salt in SALTS:
                descriptor = NamespaceDescriptor(model="sim", cache_salt=salt)
                self._spaces[salt] = await self.client.namespace(descriptor)

    async def work(self, ops: Sequence[Op]) -> None:
        """One worker's calls, one after the other."""
        for op in ops:
            if self.gone:
                return
            said = await self.do(op)
            pause_s = op.pause_s
            if any(word in said for word in OUTAGES):
                pause_s += OUTAGE_PAUSE_S  # or the rest of the work is over in no time
            if pause_s:
                await asyncio.sleep(pause_s)

    async def do(self, op: Op) -> str:
        """One call, in words; it may be cancelled on the way."""
        oracle = self._oracle
        oracle.tried += op.count
        began_s = self._loop.time()
        call = self._calls()[op.kind](op)
        if not op.cancel_s:
            said = await call
        else:
            task = asyncio.ensure_future(call)
            await asyncio.wait((task,), timeout=op.cancel_s)
            task.cancel()
            await asyncio.wait((task,))
            said = "cancelled" if task.cancelled() else task.result()
        self._on_end(op)
        took_s = self._loop.time() - began_s
        oracle.note(f"{began_s:.6f} {self.name} {op}: {said} ({took_s:.6f}s)")
        limit_s = op.deadline_ns / 1e9 + 1.0
        if took_s > limit_s:
            oracle.accuse(f"{self.name} {op} took {took_s:.3f} s")
        return said

    def _calls(self) -> dict[str, Callable[[Op], Coroutine[Any, Any, str]]]:
        return {
            "put": self._put, "get": self._get, "exists": self._exists, "forget": self._forget,
            "touch": self._touch, "stage": self._stage, "explain": self._explain,
        }  # fmt: skip

    def _names(self, op: Op) -> tuple[str, list[bytes]]:
        return space_of(self.tenant, op.salt), [key_of(op.first + n) for n in range(op.count)]

    async def _put(self, op: Op) -> str:
        oracle = self._oracle
        space, keys = self._names(op)
        blocks = [
            PutBlock(
                key, oracle.content(space, key), op.first + at,
                key_of(op.first + at - 1) if op.first + at else None, (op.first + at, 2, 3),
            )
            for at, key in enumerate(keys)
        ]  # fmt: skip
        names = [(space, key) for key in keys]
        epochs = oracle.put_begins(names)
        statuses: Sequence[Status | None] = [None] * len(keys)
        ack = "durable" if op.durable else "accepted"
        try:
            result = await self._spaces[op.salt].put(
                blocks,
                ack=ack,  # type: ignore[arg-type]
                deadline_ns=op.deadline_ns,
            )
            statuses = result.statuses
        finally:
            oracle.put_ended(names, epochs, statuses, durable=op.durable)
        return told(statuses)

    async def _get(self, op: Op) -> str:
        oracle = self._oracle
        space, keys = self._names(op)
        sizes = [len(oracle.content(space, key)) for key in keys]
        memory = bytearray((FILL,)) * sum(sizes)
        views, at = [], 0
        for size in sizes:
            views.append(memoryview(memory)[at : at + size])
            at += size
        names = [(space, key) for key in keys]
        before = [oracle.look(name) for name in names]
        statuses: Sequence[Status | None] = [None] * len(keys)
        try:
            result = await self._spaces[op.salt].get_into(
                keys, views, deadline_ns=op.deadline_ns, prefix=op.prefix,
                open_at="daemon" if op.at_daemon else "host",
            )  # fmt: skip
            statuses = result.statuses
        finally:
            self._look_at(op, space, keys, views, statuses)
            self._watch(memory, str(op))
        for name, known, status in zip(names, before, statuses, strict=True):
            present = True if status is Status.OK else False if status in ABSENT else None
            oracle.judge(name, known, present)
        return told(statuses)

    def _look_at(
        self, op: Op, space: str, keys: Sequence[bytes], views: Sequence[memoryview],
        statuses: Sequence[Status | None],
    ) -> None:  # fmt: skip
        oracle = self._oracle
        for key, view, status in zip(keys, views, statuses, strict=True):
            if status is Status.OK:
                oracle.saw(space, key, view)
            elif not oracle.untouched(view):
                if status is None and view == oracle.content(space, key):
                    continue  # cancelled, and this one was in place
                oracle.wrong_bytes += 1
                oracle.accuse(f"{self.name} {op}: {key.decode()} is {status} and not untouched")
            if status in (Status.CORRUPT, Status.CONFLICT):
                oracle.corrupt_seen += 1

    def _watch(self, memory: bytearray, what: str) -> None:
        self._watched.append(_Watched(memory, bytes(memory), what))
        if len(self._watched) > WATCHED_MAX:
            self.look_again(self._watched.pop(0))

    def look_again(self, watched: _Watched) -> None:
        """A buffer of a call that has ended must be as it was then."""
        if watched.buffer != watched.held:
            self._oracle.wrong_bytes += 1
            self._oracle.accuse(f"{self.name} {watched.what}: written to after the call")

    async def _exists(self, op: Op) -> str:
        oracle = self._oracle
        space, keys = self._names(op)
        names = [(space, key) for key in keys]
        before = [oracle.look(name) for name in names]
        result = await self._spaces[op.salt].exists(keys, deadline_ns=op.deadline_ns)
        if result.complete:
            for name, known, present in zip(names, before, result.present, strict=True):
                oracle.judge(name, known, present)
        if not result.complete:
            return Status.DISCONNECTED.label
        return f"{sum(result.present)} present"

    async def _forget(self, op: Op) -> str:
        oracle = self._oracle
        space, keys = self._names(op)
        names = [(space, key) for key in keys]
        epochs = oracle.forget_begins(names)
        complete = False
        try:
            result = await self._spaces[op.salt].forget(keys, deadline_ns=op.deadline_ns)
            complete = result.complete
        finally:
            oracle.forget_ended(names, epochs, complete=complete)
        return f"{result.count} forgotten" if complete else Status.DISCONNECTED.label

    async def _touch(self, op: Op) -> str:
        _, keys = self._names(op)
        result = await self._spaces[op.salt].touch(keys, deadline_ns=op.deadline_ns)
        return f"{result.count} touched"

    async def _stage(self, op: Op) -> str:
        _, keys = self._names(op)
        result = await self._spaces[op.salt].stage(
            keys, hold_ns=SECOND_NS, open_at="daemon" if op.at_daemon else "host",
            deadline_ns=op.deadline_ns,
        )  # fmt: skip
        return told(result.statuses)

    async def _explain(self, op: Op) -> str:
        _, keys = self._names(op)
        found = await self._spaces[op.salt].explain(keys, deadline_ns=op.deadline_ns)
        return told([row.status for row in found])

    async def healed(self, until_s: float) -> bool:
        """True once every shard is connected and its breaker closed."""
        while True:
            reports = self.client.shards()
            if all(r.connected and r.breaker == "closed" and not r.draining for r in reports):
                return True
            if self._loop.time() >= until_s:
                self._oracle.note(*(f"{r.name}: {r.breaker}, {r.last_error}" for r in reports))
                return False
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End; every buffer that was given is looked at once more."""
        await self.client.close()
        for watched in self._watched:
            self.look_again(watched)
        self._watched.clear()

    async def audit(self, salt: str, step: int = 24) -> dict[bytes, Status]:
        """Read everything of a namespace: what the status of each block is."""
        found: dict[bytes, Status] = {}
        for first in range(0, KEYS_PER_SPACE, step):
            keys = [key_of(n) for n in range(first, min(first + step, KEYS_PER_SPACE))]
            space = space_of(self.tenant, salt)
            views = [
                memoryview(bytearray((FILL,)) * len(self._oracle.content(space, key)))
                for key in keys
            ]
            result = await self._spaces[salt].get_into(keys, views, prefix=False)
            op = Op(0, "get", salt, first, len(keys))
            self._look_at(op, space, keys, views, result.statuses)
            found.update(zip(keys, result.statuses, strict=True))
            self._oracle.tried += len(keys)
        return found


def told(statuses: Sequence[Status | None]) -> str:
    """Statuses in order, runs of the same counted."""
    parts: list[tuple[str, int]] = []
    for status in statuses:
        label = "cancelled" if status is None else status.label
        if parts and parts[-1][0] == label:
            parts[-1] = (label, parts[-1][1] + 1)
        else:
            parts.append((label, 1))
    return " ".join(label if count == 1 else f"{count}x{label}" for label, count in parts)
