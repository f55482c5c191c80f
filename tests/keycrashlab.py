"""Power failures while keys change: one log of a data file and of the keyring's small files.

A life of three tenants (put, rotate, retire, change the KEK, erase, begin anew) runs on a logging
device and on files in memory, whose calls go into the same log. The file model is the unkind one: a
name is durable only after its folder was synced, bytes only after their own fsync, and what was
unlinked stays on the medium until something overwrites it. Invariant: an image counts only when its
keyring was opened, every block was read, and each of them was tried with every tenant's key.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entresol_daemon.flash.engine import Engine
from entresol_daemon.flash.sim import Logged
from entresol_daemon.keys import files
from entresol_daemon.keys.keyring import Keyring, Tenant
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.state import decode
from entresol_proto import ids
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.seal import block, codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import KeyringError, Status
from tests.crashlab import SMALL, ImageDevice, Verdict, Wreck, open_at
from tests.flashlab import Name, drop_namespace, get_all, put

KEKS = {name: FileKek(random.Random(name).randbytes(32), name) for name in ("A", "B")}
TENANTS = ("acme", "zeta", "mono")
DESCRIPTOR = NamespaceDescriptor(model="m").canonical()
_TEAR = 512


@dataclass(frozen=True, slots=True)
class FileOp:
    """One change of the files: create, truncate, write, fsync, rename, unlink, syncdir."""

    kind: str
    path: str = ""
    other: str = ""
    inode: int = -1
    offset: int = 0
    data: bytes = b""


class MemoryFiles(files.OsCalls):
    """The keyring's system calls on files in memory; every change goes into `log`."""

    def __init__(self, log: list[Logged]) -> None:
        self.log = log
        self._names: dict[str, int] = {}
        self._content: list[bytearray] = []
        self._open: dict[int, tuple[int, str]] = {}  # fd -> inode, folder
        self._at: dict[int, int] = {}
        self._next = 1000

    def _note(self, kind: str, **more: Any) -> None:
        self.log.append(Logged("file", mark=FileOp(kind, **more)))

    def open(self, path: Path, flags: int) -> int:
        name = str(path)
        self._next += 1
        self._at[self._next] = 0
        if flags & os.O_DIRECTORY:
            self._open[self._next] = (-1, name)
            return self._next
        inode = self._names.get(name)
        if inode is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(name)
            inode = self._names[name] = len(self._content)
            self._content.append(bytearray())
            self._note("create", path=name, inode=inode)
        elif flags & os.O_TRUNC:
            self._content[inode].clear()
            self._note("truncate", inode=inode)
        self._open[self._next] = (inode, "")
        return self._next

    def read(self, fd: int, length_bytes: int) -> bytes:
        at = self._at[fd]
        found = bytes(self._content[self._open[fd][0]][at : at + length_bytes])
        self._at[fd] += len(found)
        return found

    def write(self, fd: int, raw: bytes | memoryview) -> int:
        data, inode, at = bytes(raw), self._open[fd][0], self._at[fd]
        self._content[inode][at : at + len(data)] = data
        self._at[fd] += len(data)
        self._note("write", inode=inode, offset=at, data=data)
        return len(data)

    def seek(self, fd: int, offset_bytes: int) -> None:
        self._at[fd] = offset_bytes

    def size(self, fd: int) -> int:
        return len(self._content[self._open[fd][0]])

    def fsync(self, fd: int) -> None:
        inode, folder = self._open[fd]
        self._note("syncdir" if folder else "fsync", path=folder, inode=inode)

    def close(self, fd: int) -> None:
        del self._open[fd]

    def rename(self, old: Path, new: Path) -> None:
        if str(old) not in self._names:
            raise FileNotFoundError(str(old))
        self._names[str(new)] = self._names.pop(str(old))
        self._note("rename", path=str(old), other=str(new))

    def unlink(self, path: Path) -> None:
        if self._names.pop(str(path), None) is None:
            raise FileNotFoundError(str(path))
        self._note("unlink", path=str(path))


@dataclass(frozen=True, slots=True)
class FileImage:
    """Files by name, and every byte the medium still holds, named or not."""

    named: dict[str, bytes]
    medium: list[bytes]


class FileWreck:
    """What of the files is durable, and what a failure may or may not keep."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._moves: list[FileOp] = []  # of names, in order, not synced
        self._durable: dict[int, bytearray] = {}
        self._writes: dict[int, list[FileOp]] = {}  # by inode, not synced

    def take(self, op: FileOp) -> None:
        """One operation happened."""
        if op.kind in ("create", "rename", "unlink"):
            self._moves.append(op)
            if op.kind == "create":
                self._durable[op.inode] = bytearray()
        elif op.kind == "syncdir":
            self._names = self._moved(len(self._moves))
            self._moves.clear()
        elif op.kind == "fsync":
            self._durable[op.inode] = self._written(op.inode, self._writes.pop(op.inode, []))
        else:
            self._writes.setdefault(op.inode, []).append(op)

    def states(self, rng: random.Random, mixes: int) -> Iterator[FileImage]:
        """Nothing of what is not synced, all of it, and mixes."""
        last = len(self._moves)
        yield self._image(0, lambda ops: [])
        if not last and not self._writes:
            return
        yield self._image(last, lambda ops: ops)
        for _ in range(mixes):
            yield self._image(rng.randrange(last + 1), lambda ops: _some(ops, rng))

    def _image(self, moves: int, choose: Callable[[list[FileOp]], list[FileOp]]) -> FileImage:
        content = {
            inode: bytes(self._written(inode, choose(self._writes.get(inode, []))))
            for inode in self._durable
        }
        names = self._moved(moves)
        return FileImage(
            {name: content[inode] for name, inode in names.items()}, list(content.values())
        )

    def _moved(self, count: int) -> dict[str, int]:
        names = dict(self._names)
        for op in self._moves[:count]:
            if op.kind == "create":
                names[op.path] = op.inode
            elif op.kind == "rename":
                names[op.other] = names.pop(op.path)
            else:
                names.pop(op.path, None)
        return names

    def _written(self, inode: int, ops: Sequence[FileOp]) -> bytearray:
        found = bytearray(self._durable[inode])
        for op in ops:
            if op.kind == "truncate":
                found.clear()
                continue
            end = op.offset + len(op.data)
            found.extend(bytes(max(0, end - len(found))))
            found[op.offset : end] = op.data
        return found


def _some(ops: list[FileOp], rng: random.Random) -> list[FileOp]:
    """A random part of the writes, each cut at 512 bytes or, being longer, full of zeros."""
    found = []
    for op in ops:
        chance = rng.random()
        if chance < 0.3:
            continue
        if chance < 0.7 and op.kind == "write":
            keep = rng.randrange(0, len(op.data) + _TEAR, _TEAR)
            data = op.data[:keep]
            if chance < 0.5:
                data = data.ljust(len(op.data), b"\0")
            op = FileOp("write", inode=op.inode, offset=op.offset, data=data)
        found.append(op)
    return found


@dataclass(frozen=True, slots=True)
class KeyFact:
    """What the operator asked for or was told. `kind`: adding, added, retiring, retired, erasing,
    receipt, rewrapping, rewrapped; `blobs` are the wrapped keys that must be gone for good then."""

    kind: str
    tenant: str = ""
    version: int = 0
    kek: str = ""
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Sealed:
    """A block that was put. `kind`: put or durable."""

    kind: str
    tenant: str
    name: Name
    engine_key: bytes
    version: int
    plain: bytes


@dataclass(slots=True)
class KeyFacts:
    """What must hold, as the log goes on."""

    keks: set[str] = field(default_factory=lambda: {"A"})
    tenants: dict[str, set[int]] = field(default_factory=dict)  # live -> versions being retired
    erased: set[str] = field(default_factory=set)
    ever: dict[Name, Sealed] = field(default_factory=dict)
    required: dict[Name, Sealed] = field(default_factory=dict)
    blobs: list[bytes] = field(default_factory=list)  # wrapped keys that must be nowhere

    def apply(self, fact: object) -> None:
        """Take one mark in."""
        if isinstance(fact, Sealed):
            self.ever[fact.name] = fact
            if fact.kind == "durable" and fact.tenant in self.tenants:
                self.required[fact.name] = fact
            return
        assert isinstance(fact, KeyFact)
        if fact.kind == "adding":
            self.erased.discard(fact.tenant)
        elif fact.kind == "added":
            self.tenants[fact.tenant] = set()
        elif fact.kind == "retiring":
            self.tenants[fact.tenant].add(fact.version)
            self._forgive(lambda b: b.tenant == fact.tenant and b.version == fact.version)
        elif fact.kind == "erasing":
            self.tenants.pop(fact.tenant, None)
            self._forgive(lambda b: b.tenant == fact.tenant)
        elif fact.kind == "receipt":
            self.erased.add(fact.tenant)
        elif fact.kind == "rewrapping":
            self.keks.add(fact.kek)
        elif fact.kind == "rewrapped":
            self.keks = {fact.kek}
        self.blobs += fact.blobs

    def _forgive(self, which: Callable[[Sealed], bool]) -> None:
        self.required = {name: b for name, b in self.required.items() if not which(b)}


class KeyLife:
    """One life of three tenants over one engine and one keyring."""

    def __init__(self, device: Any, folder: Path, seed: int) -> None:
        assert device.log is not None
        self.device = device
        self.rng = random.Random(seed)
        self.kek = "A"
        self.files = MemoryFiles(device.log)
        self.folder = folder
        (folder / "namespaces").mkdir(parents=True, exist_ok=True)
        self.number = 0

    def say(self, fact: object) -> None:
        self.device.mark(fact)

    def open_ring(self) -> Keyring:
        kek = KEKS[self.kek]
        return Keyring.open(self.folder, kek, calls=self.files, random=self.rng.randbytes)

    async def live(self, steps: int) -> None:
        """All of it, with one restart of the keyring and the engine in the middle."""
        for half in range(2):
            self.ring = self.open_ring()
            engine = await open_at(self.device, SMALL, half)
            for tenant in TENANTS:
                if self.ring.info(tenant) is None:
                    self.add(tenant)
            for _ in range(steps):
                await self.step(engine)
            await engine.close(clean=False)
            self.ring.close()

    async def step(self, engine: Engine) -> None:
        tenant = self.rng.choice(TENANTS)
        chance = self.rng.random()
        if chance < 0.6:
            await self.put(engine, tenant)
        elif chance < 0.75:
            self.ring.rotate(tenant, now_unix_s=1)
        elif chance < 0.83:
            self.retire(tenant)
        elif chance < 0.88:
            self.rewrap()
        else:
            await self.erase(engine, tenant)
            if self.rng.random() < 0.7:
                self.add(tenant)
        if self.ring.info(tenant) is None:
            self.add(tenant)

    def add(self, tenant: str) -> None:
        self.say(KeyFact("adding", tenant))
        self.ring.add_tenant(tenant, now_unix_s=1, after_erase=True)
        self.ring.remember_namespace(tenant, DESCRIPTOR)
        self.say(KeyFact("added", tenant))

    def blobs(self, tenant: str, version: int | None = None) -> tuple[bytes, ...]:
        """The wrapped keys as they stand in the file."""
        state = decode(files.read(self.files, self.folder / "keyring.json") or b"")
        stored = state.tenants[tenant]
        deks = [d.wrapped for d in stored.deks if version in (None, d.version)]
        found = deks if version is not None else [stored.naming, *deks]
        return tuple(blob.hex().encode() for blob in found)

    def retire(self, tenant: str) -> None:
        info = self.ring.info(tenant)
        assert info is not None
        old = [version for version in info.fingerprints if version != info.active_version]
        if old:
            blobs = self.blobs(tenant, old[0])
            self.say(KeyFact("retiring", tenant, old[0]))
            self.ring.retire(tenant, old[0])
            self.say(KeyFact("retired", tenant, old[0], blobs=blobs))

    def rewrap(self) -> None:
        other = "B" if self.kek == "A" else "A"
        blobs = tuple(blob for tenant in self.ring.tenants() for blob in self.blobs(tenant.name))
        self.say(KeyFact("rewrapping", kek=other))
        self.ring.rewrap(KEKS[other])
        self.kek = other
        self.say(KeyFact("rewrapped", kek=other, blobs=blobs))

    async def erase(self, engine: Engine, tenant: str) -> None:
        namespace, _ = self.ring.derive_namespace(tenant, DESCRIPTOR)
        blobs = self.blobs(tenant)
        self.say(KeyFact("erasing", tenant))
        self.ring.erase(tenant, now_unix_s=2)
        self.say(KeyFact("receipt", tenant, blobs=blobs))
        drop_namespace(engine, namespace)
        await engine.barrier()

    async def put(self, engine: Engine, tenant: str) -> None:
        held = self.ring.get(tenant)
        if not engine.room_for(held.stream, 12288):
            return
        self.number += 1
        namespace, secret = self.ring.derive_namespace(tenant, DESCRIPTOR)
        engine_key = self.number.to_bytes(16, "big")
        key = ids.wire_key(secret, ids.check_engine_key(engine_key))
        plain = self.rng.randbytes(self.rng.randrange(1, 6000))
        sealed = seal(held, namespace, key, engine_key, plain, self.rng.randbytes(32))
        name = (bytes(namespace), bytes(key))
        fact = Sealed("put", tenant, name, engine_key, held.active_version, plain)
        self.say(fact)
        _, future = put(engine, name, sealed, stream=held.stream)
        if self.rng.random() < 0.5:
            assert await future is Status.OK
            self.say(Sealed("durable", tenant, name, engine_key, held.active_version, plain))


def seal(
    tenant: Tenant, namespace: bytes, key: bytes, engine_key: bytes, plain: bytes, salt: bytes
) -> bytes:
    """A sealed block as the daemon stores it."""
    identity = block.BlockIdentity(namespace, key, engine_key, DType.BF16, tenant.active_version)
    out = bytearray(block.sealed_bytes_max(len(plain)))
    header = block.seal_into(
        memoryview(out), memoryview(plain), identity=identity,
        block_key=block.derive_block_key(tenant.active_dek, salt), salt=salt,
        codec_id=codecs.RAW, meta=None,
    )  # fmt: skip
    return bytes(out[: header.sealed_bytes])


def open_sealed(raw: bytes, header: block.SealedHeader, name: Name, dek: bytes) -> bytes | None:
    """As a host does it, under one key; None when it does not open."""
    into = bytearray(header.plain_bytes)
    status = block.open_into(
        memoryview(raw), memoryview(into), namespace_id=name[0], wire_key=name[1],
        engine_key=None, block_key=block.derive_block_key(dek, header.salt),
    )  # fmt: skip
    return bytes(into) if status is Status.OK else None


@dataclass(frozen=True, slots=True)
class KeyMoment:
    """A state to be tried."""

    entry: int
    facts: KeyFacts
    base: bytearray
    sectors: dict[int, bytes]
    files: FileImage


def key_moments(
    base: bytes, log: Sequence[Logged], rng: random.Random, mixes: int
) -> Iterator[KeyMoment]:
    """Every power failure of a life. Use up a moment before asking for the next."""
    wreck, small, facts = Wreck(base), FileWreck(), KeyFacts()
    for number, entry in enumerate(log, start=1):
        fresh = 0
        if entry.kind == "mark":
            facts.apply(entry.mark)
            wreck.stricter()
        elif entry.kind == "file":
            assert isinstance(entry.mark, FileOp)
            small.take(entry.mark)
            wreck.stricter()
        else:
            fresh = wreck.take(entry)
        sectors = list(wreck.states(rng, fresh, 0))
        if entry.kind == "file":
            for image in small.states(rng, mixes):
                yield KeyMoment(number, facts, wreck.durable, rng.choice(sectors), image)
        elif entry.kind == "write" or number == len(log):
            for chosen in sectors:
                image = rng.choice(list(small.states(rng, 1)))
                yield KeyMoment(number, facts, wreck.durable, chosen, image)


class QuietCalls(files.OsCalls):
    """The real ones without fsync: an image that is looked at once need not be safe."""

    def fsync(self, fd: int) -> None:
        pass


async def judge_keys(moment: KeyMoment, home: Path, folder: Path) -> Verdict:
    """Put the files into `folder` (they were made under `home`), open both, try every key."""
    verdict = Verdict(images=1)
    _lay_out(moment.files, home, folder)
    facts = moment.facts
    ring = _open_any(folder, facts.keks, verdict)
    if ring is None:
        return verdict
    try:
        for name in facts.tenants:
            if ring.info(name) is None or not _held(ring, name):
                verdict.lost += 1
                verdict.note(f"the live tenant {name} is unreadable")
        for name in facts.erased:
            if ring.info(name) is not None:
                verdict.back += 1
                verdict.note(f"{name} is back after its receipt")
        left = b"\0".join(moment.files.medium)
        if any(blob in left for blob in facts.blobs):
            verdict.back += 1
            verdict.note("a destroyed key is still on the medium")
        await _judge_blocks(moment, ring, verdict)
    finally:
        ring.close()
    verdict.survived = int(verdict.bad == 0)
    return verdict


def _held(ring: Keyring, name: str) -> bool:
    try:
        return bool(ring.get(name).active_dek)
    except KeyringError:
        return False


def _open_any(folder: Path, keks: set[str], verdict: Verdict) -> Keyring | None:
    problem = ""
    for name in sorted(keks):
        try:
            return Keyring.open(folder, KEKS[name], calls=QuietCalls())
        except KeyringError as error:
            problem = str(error)
    verdict.refused += 1
    verdict.note(f"the keyring does not open: {problem}")
    return None


async def _judge_blocks(moment: KeyMoment, ring: Keyring, verdict: Verdict) -> None:
    facts = moment.facts
    deks = [
        (info.name, version, dek)
        for info in ring.tenants() for version, dek in ring.get(info.name).deks.items()
    ]  # fmt: skip
    engine = await open_at(ImageDevice(moment.base, dict(moment.sectors)), SMALL)
    opened: set[Name] = set()
    try:
        for name, (status, raw) in (await get_all(engine)).items():
            verdict.blocks += 1
            known = facts.ever.get(name)
            if status is not Status.OK or known is None:
                verdict.refused += 1
                verdict.note(f"a block is {status.label}, known: {known is not None}")
                continue
            header = block.SealedHeader.parse(memoryview(raw))
            for tenant, version, dek in deks:
                plain = None
                if version == header.dek_version:
                    plain = open_sealed(raw, header, name, dek)
                if plain is None:
                    continue
                opened.add(name)
                if plain != known.plain or (tenant, version) != (known.tenant, known.version):
                    verdict.wrong += 1
                    verdict.note(f"a block of {known.tenant} opens under a key of {tenant}")
                if known.tenant in facts.erased:
                    verdict.back += 1
                    verdict.note(f"a block of {known.tenant} opens after its erasure")
        for name, known in facts.required.items():
            if name not in opened:
                verdict.lost += 1
                verdict.note(f"a durable block of {known.tenant} does not open")
    finally:
        await engine.close(clean=False)


def _lay_out(image: FileImage, home: Path, folder: Path) -> None:
    (folder / "namespaces").mkdir(parents=True, exist_ok=True)
    wanted = {folder / Path(name).relative_to(home): raw for name, raw in image.named.items()}
    for path in [*folder.iterdir(), *(folder / "namespaces").iterdir()]:
        if path.is_file() and path not in wanted:
            path.unlink()
    for path, raw in wanted.items():
        path.write_bytes(raw)
