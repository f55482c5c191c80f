"""K4: host-sealed namespaces keep their keys at the tenant.

Two hosts share blocks exactly, and whoever has the daemon, all its memory and all its files opens
nothing and finds nothing of what the hosts know.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from entresol_client import tenant_key
from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import BreakerSettings, ClientConfig
from entresol_client.results import PutBlock, PutResult
from entresol_client.tenant_key import TenantKey
from entresol_daemon.config import Config
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from tests.daemon.life_lab import BUGS, Lab
from tests.proof.keylife import Spy, ask, configure
from tests.proof.line import Line, Size, Slice, Tally


class _Secrets:
    """What must not be found at the daemon's, new in each unit."""

    def __init__(self, rng: random.Random) -> None:
        self.marker = rng.randbytes(32)  # in every block, again and again
        self.model = f"model-{rng.randbytes(12).hex()}"
        self.salt = f"salt-{rng.randbytes(12).hex()}"
        self.tokens = tuple(rng.randrange(1 << 24, 1 << 31) for _ in range(16))
        self.keys = [rng.randbytes(32) for _ in range(24)]

    def descriptor(self) -> NamespaceDescriptor:
        """A namespace whose very name is a secret."""
        return NamespaceDescriptor(model=self.model, cache_salt=self.salt, dtype="bf16")

    def content(self, number: int, length: int) -> bytes:
        """Blocks that compress (so that no codec hides the marker from us) and differ."""
        head = number.to_bytes(8, "little") + self.keys[number]
        return (head + self.marker * (length // 32 + 1))[:length]

    def blocks(self, numbers: range, length: int) -> list[PutBlock]:
        """A chain."""
        return [
            PutBlock(
                self.keys[n], self.content(n, length), position=n,
                parent_key=self.keys[n - 1] if n else None, token_ids=self.tokens,
            )
            for n in numbers
        ]  # fmt: skip

    def needles(self, key: TenantKey) -> dict[str, bytes]:
        """By what it would give away."""
        found = {
            "plaintext": self.marker * 2,
            "model": self.model.encode(),
            "salt": self.salt.encode(),
            "tokens": b"".join(token.to_bytes(4, "little") for token in self.tokens[:4]),
            "naming": key.naming,
            "naming_hex": key.naming.hex().encode(),
        }
        found |= {f"engine_key_{n}": engine_key for n, engine_key in enumerate(self.keys[:4])}
        found |= {f"secret_{n}": version.secret for n, version in key.versions.items()}
        return found


def host_sealed(part: Slice) -> Tally:
    """K4's work."""
    return _host_sealed(part, sealed=True)


def _host_sealed(part: Slice, *, sealed: bool) -> Tally:
    tally = Tally()
    with Lab(part.folder, flash=64 * MIB) as lab:
        for seed in part.seeds:
            tally.tried += 1
            before = len(tally.findings)
            fabric = ("shm", "tcp", "tls")[seed % 3]
            configure(lab, _on(fabric))
            lab.start()
            ask(lab, "TenantAdd", name="dev")
            asyncio.run(_tenant_keeps(_Unit(lab, random.Random(seed), seed, fabric, sealed, tally)))
            lab.kill()
            if bug := BUGS.search(said := lab.new_log()):
                tally.crashes += 1
                tally.found(seed, f"the log says {said[bug.start() : bug.end() + 800]}")
            tally.survived += before == len(tally.findings)
    return tally


def _on(fabric: str) -> Callable[[Config], Config]:
    return lambda config: replace(
        config, fabric=replace(config.fabric, tcp_tls=fabric == "tls", enabled=("shm", "tcp"))
    )


@dataclass(slots=True)
class _Unit:
    lab: Lab
    rng: random.Random
    seed: int
    fabric: str
    sealed: bool
    tally: Tally

    def check(self, good: bool, text: str) -> None:
        """Or it is a finding."""
        if not good:
            self.tally.found(self.seed, f"over {self.fabric}: {text}")

    async def client(self, key_file: Path | None) -> AsyncClient:
        """A host of the tenant."""
        fabric = "tcp" if self.fabric == "tls" else self.fabric
        config = replace(
            ClientConfig.load(self.lab.site.directory / "client.toml"), fabric=fabric,
            fallback=False, deadline_ns=60_000_000_000, ping_deadline_ns=20_000_000_000,
            tenant_key=key_file, breaker=BreakerSettings(cooldown_ns_max=250_000_000),
        )  # fmt: skip
        client = await AsyncClient.open(config)
        until_s = time.monotonic() + 60
        while not client.shards()[0].connected:
            assert time.monotonic() < until_s, client.shards()[0]
            await asyncio.sleep(0.01)
        return client


async def _tenant_keeps(unit: _Unit) -> None:
    """Two hosts, other hosts, a rotation, a death, and a spy."""
    lab, rng, secrets = unit.lab, unit.rng, _Secrets(unit.rng)
    mine, copy, foreign = (lab.folder / f"{name}-{unit.seed}.key" for name in ("a", "b", "c"))
    TenantKey.generate(1_000).save(mine, new=True)
    TenantKey.generate(1_000).save(foreign, new=True)
    shutil.copy(mine, copy)
    length = rng.choice([5_000, 64 * KIB, 300 * KIB])
    files = (mine, copy, foreign, None) if unit.sealed else (None, None, foreign, mine)
    one, two, stranger, plain = [await unit.client(file) for file in files]
    try:
        spaces = [await c.namespace(secrets.descriptor()) for c in (one, two, stranger)]
        stored = await spaces[0].put(secrets.blocks(range(12), length), ack="durable")
        unit.check(_all(stored, Status.OK), f"a put said {stored.statuses}")
        await _sees(unit, spaces[1], secrets, range(12), length, Status.OK)
        await _sees(unit, spaces[2], secrets, range(12), length, Status.MISS)
        again = await spaces[1].put(secrets.blocks(range(12), length), ack="durable")
        unit.check(_all(again, Status.EXISTS), f"the other host stored again: {again.statuses}")
        key = TenantKey.load(mine)
        if unit.sealed:
            key = key.rotated(2_000)
            key.save(mine)
            await _both_follow(unit, spaces, secrets, length, copy, mine)
        await asyncio.sleep(0.2)
        spy = Spy(lab)
        _finds_nothing(unit, "memory", spy.in_memory(secrets.needles(key)))
        # Whoever keeps no keys tells the daemon the name, and finds nothing under it.
        open_book = await plain.namespace(secrets.descriptor())
        await _sees(unit, open_book, secrets, range(12), length, Status.MISS)
    finally:
        for client in (one, two, stranger, plain):
            await client.close()
    await _after_death(unit, spy, secrets, key, files[1], length)


async def _both_follow(
    unit: _Unit, spaces: list[Namespace], secrets: _Secrets, length: int, copy: Path, mine: Path
) -> None:
    """The tenant rotates: a host with the old file misses new blocks, and nothing else."""
    tenant_key.LOOK_NS = 50_000_000  # no need to wait for it
    await asyncio.sleep(0.1)
    stored = await spaces[0].put(secrets.blocks(range(12, 24), length), ack="durable")
    unit.check(_all(stored, Status.OK), f"after its rotation a put said {stored.statuses}")
    await _sees(unit, spaces[1], secrets, range(12, 24), length, Status.LOCKED)
    await _sees(unit, spaces[1], secrets, range(12), length, Status.OK)
    shutil.copy(mine, copy)
    await asyncio.sleep(0.1)
    await _sees(unit, spaces[1], secrets, range(24), length, Status.OK)
    unit.tally.figure("tenant_rotations", 1)


async def _sees(
    unit: _Unit, space: Namespace, secrets: _Secrets, numbers: range, length: int, wanted: Status
) -> None:
    buffers = [bytearray(b"\xa5" * length) for _ in numbers]
    keys = [secrets.keys[n] for n in numbers]
    result = await space.get_into(keys, buffers, prefix=False)
    for number, buffer, status in zip(numbers, buffers, result.statuses, strict=True):
        if status is Status.OK:
            unit.tally.wrong_bytes += bytes(buffer) != secrets.content(number, length)
        else:
            untouched = buffer.count(0xA5) == length or not any(buffer)
            unit.check(untouched, f"{status.label} left something in the buffer")
        unit.check(status is wanted, f"block {number} is {status.label}, not {wanted.label}")
    unit.tally.figure("blocks_got", len(numbers))


def _finds_nothing(unit: _Unit, where: str, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        unit.check(count == 0, f"{name} is {count} times in the daemon's {where}")
    unit.tally.figure("needles_looked_for", len(counts))


async def _after_death(
    unit: _Unit, spy: Spy, secrets: _Secrets, key: TenantKey, file: Path | None, length: int
) -> None:
    """With all its files and keys nothing opens; started again it serves the same blocks."""
    lab = unit.lab
    lab.kill()
    _finds_nothing(unit, "files", spy.in_files(secrets.needles(key)))
    headers = spy.headers(length)
    unit.tally.figure("headers_tried", len(headers))
    unit.check(len(headers) >= 12, f"only {len(headers)} blocks are on flash")
    opened = spy.opened(headers)
    unit.check(opened == 0, f"the daemon's keys open {opened} of {len(headers)} blocks")
    lab.start()
    client = await unit.client(file)
    try:
        space = await client.namespace(secrets.descriptor())
        await _sees(unit, space, secrets, range(24 if unit.sealed else 12), length, Status.OK)
    finally:
        await client.close()
    ask(lab, "TenantErase", name="dev", confirm="dev")
    unit.check(ask(lab, "Stat").blocks == 0, "blocks outlived the tenant's erasure")


def _all(result: PutResult, status: Status) -> bool:
    return all(found is status for found in result.statuses)


def _host_sealed_canary() -> None:
    """The same tenant without its key file: the daemon has the keys, and the spy must see it."""
    with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
        tally = _host_sealed(Slice(3, 1, Size.COMMIT, Path(name)), sealed=False)
    said = " ".join(finding.text for finding in tally.findings)
    for sign in ("daemon's keys open", "tokens is", "engine_key_0 is"):
        assert sign in said, f"the spy did not see that {sign!r}: {said or 'nothing found'}"


LINES = (
    Line(
        id="K4",
        name="host-sealed: the daemon opens nothing",
        unit="tenants",
        units={Size.COMMIT: 3, Size.NIGHTLY: 12, Size.RELEASE: 30},
        slice_units=6,
        run=host_sealed,
        canary=_host_sealed_canary,
        slice_deadline_s=400.0,
    ),
)
