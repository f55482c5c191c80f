"""S5: an erased tenant's blocks open nowhere: not from disk, not from memory, not from a core file.

A real daemon stores blocks of two tenants, over every way that brings a key out of it, rotates, and
erases one of them through its admin socket. What is searched for afterwards (the tenant's data keys
of every version, its naming secret, the secrets of its namespaces, the key of every one of its
blocks) was taken from its files before, with the key-encryption key that lies beside them.

Invariant: the searches are made on the same bytes that held those secrets a moment before, and must
have found some of them there; the other tenant's blocks are all served to the end.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc

from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.state import decode
from entresol_daemon.keys.tenant import Tenant, unwrap_tenant
from entresol_proto import ids
from entresol_proto.seal.block import SealedHeader, derive_block_key
from entresol_proto.status import SealError, Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg
from tests.daemon.daemon_lab import client_of
from tests.harness import DaemonProcess
from tests.proof.line import Line, Size, Slice, Tally
from tests.proof.memory_scan import Search, cores_of, forms_of, no_core
from tests.proof.tenancy import (
    BLOCK_BYTES,
    DESCRIPTOR,
    OTHER,
    OWN,
    chain,
    content,
    run_on_loop,
    salted,
)

BLOCKS = 1_000  # of the tenant that is erased, per unit
OTHERS = 200  # of the one that stays
DESCRIPTORS = (DESCRIPTOR, salted("a salt"))
BLOCK_KEY = "key of a block"
PLANTED = ""  # a canary's bug, in Python
OPEN_AIR = """
import dataclasses
from entresol_daemon import config
real_dev = config.Config.dev
def dev(root):
    made = real_dev(root)
    return dataclasses.replace(made, sandbox=dataclasses.replace(made.sandbox, mode="off"))
config.Config.dev = staticmethod(dev)
"""
START = """
import sys
from entresol_daemon.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def program_of(seed: int, before: str = "") -> Sequence[str]:
    """What runs as the daemon: every other one without its sandbox, which lets no core file out."""
    return ("-c", before + (OPEN_AIR if seed % 2 else "") + START)


@dataclass
class Doomed:
    """What must be found nowhere afterwards."""

    tenant: Tenant
    wrapped: list[bytes]  # as they stood in the keyring's files
    needles: dict[bytes, str] = field(default_factory=dict)
    blocks: int = 0


def run(part: Slice) -> Tally:
    """A unit is the life of one daemon."""
    tally = Tally()
    for seed in part.seeds:
        _one(part.folder / f"e{seed}", seed, tally)
    return tally


def _one(folder: Path, seed: int, tally: Tally) -> None:
    folder.mkdir()
    arguments = ("--flash", "512MiB", "--codec", "zstd")
    process = DaemonProcess(folder / "d", *arguments, program=program_of(seed, PLANTED))
    with contextlib.chdir(folder), process:  # where a core file goes
        run_on_loop(_use(process, seed))
        doomed = harvest(folder / "d")
        search = Search(doomed.needles)
        before = search.summary(search.in_process(process.process.pid))
        tally.figure("keys_in_memory_before", sum(before.values()))
        if not before.get("data key") or doomed.blocks < BLOCKS:
            tally.found(seed, f"the search finds nothing even before: {before}, {doomed.blocks}")
        with receipt_of(process, folder) as receipt:
            _check_receipt(receipt, folder, seed, tally)
        _look(search, search.in_process(process.process.pid), "memory", seed, tally)
        _files(folder, doomed, search, seed, tally)
        run_on_loop(_others_are_served(process, seed, tally))
        _core(process, folder, search, seed, tally, written=bool(seed % 2))
    readable = _reopened(folder, seed, tally)
    tally.tried += doomed.blocks
    tally.survived += doomed.blocks - readable
    tally.wrong_bytes += readable


async def _use(process: DaemonProcess, seed: int) -> None:
    """Blocks by every way in and out that carries keys, under two key versions."""
    for tenant, count in ((OWN, BLOCKS), (OTHER, OTHERS)):
        for number, fabric in enumerate(("shm", "tcp")):
            if number:
                await _asked(process, "TenantRotate", pb.TenantRotateRequest(name=tenant))
            async with client_of(process, tenant, fabric) as client:
                for each, descriptor in enumerate(DESCRIPTORS):
                    space = await client.namespace(descriptor)
                    blocks = chain(seed, count // 4, f"{tenant}{fabric}{each}")
                    assert (await space.put(blocks, ack="durable")).ok
                    keys = [block.key for block in blocks]
                    for place in ("host", "daemon") if fabric == "shm" else ("host",):
                        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
                        got = await space.get_into(keys, buffers, open_at=place)  # type: ignore[arg-type]
                        assert got.ok, got.statuses
                        assert bytes(buffers[-1]) == content(keys[-1])


async def _asked(process: DaemonProcess, method: str, request: Any) -> Any:
    """One call of the operator's."""
    address = f"unix:{process.client_config().shards[0].admin_socket}"
    async with grpc.aio.insecure_channel(address) as channel:
        return await getattr(pbg.AdminStub(channel), method)(request)


def harvest(home: Path, descriptors: Sequence[ids.NamespaceDescriptor] = DESCRIPTORS) -> Doomed:
    """The secrets of the tenant, as whoever has its files and the KEK knows them."""
    state = next(home.rglob("keyring.json")).read_bytes()
    stored = decode(state).tenants[OWN]
    tenant = unwrap_tenant(FileKek.open(home / "kek"), stored)
    doomed = Doomed(tenant, [blob.wrapped for blob in stored.deks] + [stored.naming])
    for dek in tenant.deks.values():
        doomed.needles |= forms_of(dek, "data key")
    doomed.needles |= forms_of(tenant.naming_secret, "naming secret")
    spaces = set()
    for descriptor in descriptors:
        canonical = descriptor.canonical()
        spaces.add(ids.namespace_id(tenant.naming_secret, canonical))
        secret = ids.namespace_secret(tenant.naming_secret, canonical)
        doomed.needles |= forms_of(secret, "namespace secret")
    for header in headers_on(next(home.rglob("flash.data"))):
        if header.namespace_id in spaces:
            doomed.blocks += 1
            key = derive_block_key(tenant.deks[header.dek_version], header.salt).key
            doomed.needles |= {key: BLOCK_KEY, key.hex().encode(): BLOCK_KEY}
    return doomed


def headers_on(path: Path) -> Iterator[SealedHeader]:
    """Every sealed header in a data file, whatever the index says of it."""
    with path.open("rb") as file:
        while page := file.read(4096):
            try:
                yield SealedHeader.parse(page[RECORD_HEADER_BYTES:])
            except SealError:
                continue


def _look(search: Search, found: Any, where: str, seed: int, tally: Tally) -> None:
    summary = search.summary(found)
    tally.figure(f"keys_in_{where}", sum(summary.values()))
    if summary:
        tally.found(seed, f"{where} after the erasure: {summary}")


# -- the receipt


@contextlib.contextmanager
def receipt_of(process: DaemonProcess, folder: Path) -> Iterator[Path]:
    """Erase the tenant as an operator does; the file with the signed receipt."""
    path = folder / "receipt.json"

    async def erase() -> bytes:
        request = pb.TenantEraseRequest(name=OWN, confirm=OWN)
        reply = await _asked(process, "TenantErase", request)
        assert reply.blocks_dropped == BLOCKS, reply.blocks_dropped
        return bytes(reply.signed_receipt)

    path.write_bytes(run_on_loop(erase()) + b"\n")
    yield path


def _check_receipt(receipt: Path, folder: Path, seed: int, tally: Tally) -> None:
    """With the command, without a daemon; altered, or under another key, it must not verify."""
    public = decode(next((folder / "d").rglob("keyring.json")).read_bytes()).receipt_public
    told = json.loads(receipt.read_text())
    altered = receipt.with_name("altered.json")
    altered.write_text(json.dumps(told | {"tenant": OTHER}))
    cases = ((receipt, public, 0), (altered, public, 1), (receipt, bytes(32), 1))
    for path, key, wanted in cases:
        command = [sys.executable, "-m", "entresol_daemon", "verify-receipt", str(path),
                   "--key", key.hex()]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != wanted or (wanted == 0 and OWN not in done.stdout):
            tally.found(seed, f"verify-receipt {path.name}: {done.returncode} {done.stderr}")
    destroyed = {row["version"] for row in told["erased"]}
    if destroyed != {1, 2}:
        tally.found(seed, f"the receipt names versions {destroyed}")


# -- where the keys must not be


def _files(folder: Path, doomed: Doomed, search: Search, seed: int, tally: Tally) -> None:
    """Every file below the folder: data, keyring and its copies, namespaces, checkpoint, log."""
    wrapped = Search(
        {blob.hex().encode(): "wrapped key" for blob in doomed.wrapped}
        | dict.fromkeys(doomed.wrapped, "wrapped key")
    )
    found: dict[bytes, int] = {}
    count = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            count += 1
            found |= search.in_file(path)
            for needle in wrapped.in_file(path):
                tally.found(seed, f"{path.name} still holds a {wrapped.label(needle)}")
    tally.figure("files_searched", count)
    _look(search, found, "files", seed, tally)


async def _others_are_served(process: DaemonProcess, seed: int, tally: Tally) -> None:
    async with client_of(process, OTHER, "tcp") as client:
        space = await client.namespace(DESCRIPTOR)
        keys = [block.key for block in chain(seed, OTHERS // 4, f"{OTHER}tcp0")]
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        got = await space.get_into(keys, buffers)
        served = sum(bytes(b) == content(k) for k, b in zip(keys, buffers, strict=True))
        tally.figure("others_served", served)
        if served != len(keys):
            tally.found(seed, f"the other tenant was given {served} of {len(keys)}: {got.statuses}")


def _core(
    process: DaemonProcess, folder: Path, search: Search, seed: int, tally: Tally, *, written: bool
) -> None:
    """A core file has the whole image, freed and all. None comes out of the sandbox."""
    assert process.process is not None
    cores, why = cores_of(process.process, folder)
    tally.lacks(no_core(cores, why, written=written))
    if cores and not written:
        tally.found(seed, "a core file came out of the sandbox")
    for core in cores:
        tally.figure("cores", 1)
        tally.figure("core_bytes", core.stat().st_size)
        _look(search, search.in_file(core), "core", seed, tally)
        core.unlink()


# -- and again


def _reopened(folder: Path, seed: int, tally: Tally) -> int:
    """Start anew over the same files, also for a tenant of the same name: how many blocks open."""
    with DaemonProcess(folder / "d", "--flash", "512MiB", "--codec", "zstd") as process:
        return run_on_loop(_readable(process, seed, tally))


async def _readable(process: DaemonProcess, seed: int, tally: Tally) -> int:
    await _asked(process, "TenantAdd", pb.TenantAddRequest(name=OWN))
    found = 0
    for fabric in ("shm", "tcp"):
        async with client_of(process, OWN, fabric) as client:
            for each, descriptor in enumerate(DESCRIPTORS):
                space = await client.namespace(descriptor)
                keys = [b.key for b in chain(seed, BLOCKS // 4, f"{OWN}{fabric}{each}")]
                buffers = [bytearray(BLOCK_BYTES) for _ in keys]
                result = await space.get_into(keys, buffers, prefix=False)
                found += sum(status is not Status.MISS for status in result.statuses)
                found += sum((await space.exists(keys)).present)
                found += sum(map(any, buffers))
    if found:
        tally.found(seed, f"{found} blocks of the erased tenant answer after a restart")
    return found


# -- the bug


KEEPING = """
from entresol_daemon.keys import keyring
from entresol_daemon.shard import admin
keyring.Keyring.wipe_destroyed = lambda self, name: 0
kept = []
real = keyring.Keyring.erase
def erase(self, name, **more):
    kept.extend(self.get(name).deks.values())
    return real(self, name, **more)
keyring.Keyring.erase = erase
"""


@contextlib.contextmanager
def a_key_is_kept() -> Iterator[None]:
    """The bug: something, say a cache, holds on to the data keys of an erased tenant."""
    with mock.patch(f"{__name__}.PLANTED", KEEPING):
        yield


def canary() -> None:
    """See `a_key_is_kept`. Raises: AssertionError when it goes unnoticed."""
    with (
        a_key_is_kept(), tempfile.TemporaryDirectory() as folder,
        mock.patch(f"{__name__}.BLOCKS", 40), mock.patch(f"{__name__}.OTHERS", 40),
    ):  # fmt: skip
        tally = run(Slice(1, 1, Size.COMMIT, Path(folder)))
    assert any(f.text.startswith("memory after") for f in tally.findings), tally.findings


def no_memory_of_others() -> str:
    """A reason why this machine cannot run the line."""
    try:
        with subprocess.Popen(["sleep", "5"]) as child:
            try:
                with open(f"/proc/{child.pid}/mem", "rb"):
                    return ""
            finally:
                child.kill()
    except OSError as error:
        return f"the memory of another process cannot be read here: {error.strerror}"


LINES = (
    Line(
        id="S5",
        name="erased: nothing on disk, in memory or in a core opens a block",
        unit=f"erasures of {BLOCKS:,} blocks",
        units={Size.COMMIT: 1, Size.NIGHTLY: 5, Size.RELEASE: 20},
        slice_units=2,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
        not_run=no_memory_of_others,
    ),
)
