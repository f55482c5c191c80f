"""Writes `v1/`: sessions on the wire, keys, a cleanly closed data file, events, a config.

Each is made by the code that writes it in service, from fixed inputs: run it as a script, with the
packages on PYTHONPATH. What is released is never made again: a new version has a folder of its own.
Its companions are `make_sealed_block.py` (sealed_*.bin), `tests/unit/test_ids.py` (ids.json) and
`tests/unit/test_flash_golden.py` (datafile_v1). `HASHES` lists them all; `tests/golden.py` reads
them, and `tests/unit/test_golden.py` sees that none has changed. With the word `hashes` the script
makes nothing, and only adds to HASHES what it does not list yet; with the word
`session` and a protocol it makes that session alone.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import simloop
from flashlab import FORGOTTEN, NAMESPACES, OPTIONS, device_bytes, get_all, key_of, open_engine, put
from keyring_lab import KEK, SALTY
from wire_messages import CARRYING, EXAMPLES

from entresol_client.tenant_key import KeyVersion, TenantKey
from entresol_daemon.config import Config
from entresol_daemon.config_reference import to_toml
from entresol_daemon.control import grpc_convert as convert
from entresol_daemon.events.log import EventLimits, EventLog
from entresol_daemon.events.types import (
    Event,
    Gap,
    GapReason,
    Kind,
    Medium,
    Position,
    Reason,
)
from entresol_daemon.flash.engine import EngineOptions
from entresol_daemon.flash.sim import SimDevice
from entresol_daemon.keys.keyring import Keyring, TenantQuota
from entresol_proto.ids import (
    EngineKey,
    NamespaceDescriptor,
    TenantName,
    host_sealed_namespace,
    masked_engine_key,
    pack_token_ids,
)
from entresol_proto.seal.block import (
    HOST_KEY_LABEL,
    BlockIdentity,
    BlockMeta,
    derive_block_key,
    seal_into,
    sealed_bytes_max,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.wire import opening
from entresol_proto.wire.frames import FrameType as F
from entresol_proto.wire.session import ANSWERS, ClientSession, ServerSession

HERE = Path(__file__).resolve().parent
V1 = HERE / "v1"
HASHES = HERE / "HASHES"
SEGMENT = 32 * 1024
SEGMENTS = 8
SMALL: EngineOptions = replace(OPTIONS, segment_bytes=SEGMENT, blocks_max=128)
KEK_BYTES = random.Random(1).randbytes(32)  # of keyring_lab.KEK
DESCRIPTOR = NamespaceDescriptor(model="golden/model", cache_salt="grain", layers=2)
TENANT_KEY = TenantKey(
    hashlib.sha256(b"naming").digest(),
    {n: KeyVersion(100 + n, hashlib.sha256(bytes([n])).digest()) for n in (1, 2)},
)
REQUESTS = (
    F.OPEN_NAMESPACE, F.EXISTS, F.RESERVE, F.COMMIT, F.FETCH, F.STAGE, F.TOUCH, F.FORGET, F.EXPLAIN,
    F.PING,
)  # fmt: skip


def session(protocol: int) -> list[dict[str, str]]:
    """From hello to goodbye, every type of message at least once: who sends it, and its bytes."""
    host, daemon = ClientSession(now_ns=0), ServerSession(now_ns=0)
    lines: list[dict[str, str]] = []

    def note(sender: str, kind: F, raw: bytes) -> None:
        lines.append({"from": sender, "type": kind.name, "bytes": raw.hex()})
        (daemon if sender == "host" else host).receive(raw, 1)

    def say(message: Any) -> int:
        request_id, raw = host.send(message)
        note("host", message.TYPE, raw)
        return request_id

    def answer(message: Any, request_id: int = 0) -> None:
        note("daemon", message.TYPE, daemon.send(message, request_id))

    hello = replace(EXAMPLES[F.HELLO], protocol_min=1, protocol_max=protocol)
    answer(replace(EXAMPLES[F.WELCOME], protocol=protocol), say(hello))
    answer(EXAMPLES[F.ERROR], say(EXAMPLES[F.ATTACH]))  # this data path fails, the next does not
    answer(EXAMPLES[F.ATTACHED], say(EXAMPLES[F.ATTACH]))
    named = DESCRIPTOR.canonical()
    if protocol >= opening.PROTOCOL_HOST_SEALED:
        named = host_sealed_namespace(TENANT_KEY.naming, DESCRIPTOR, DType.BF16)[0].canonical()
    for kind in REQUESTS + ((F.QUOTE,) if protocol >= opening.PROTOCOL_QUOTE else ()):
        message = EXAMPLES[kind]
        if kind is F.OPEN_NAMESPACE:
            message = opening.OpenNamespace(named)
        request_id = say(message)
        if kind is F.FETCH:
            answer(replace(EXAMPLES[F.GRANT], final=False), request_id)
        answer(EXAMPLES[ANSWERS[kind]], request_id)
    if protocol >= opening.PROTOCOL_CARRY:
        answer(CARRYING, say(replace(EXAMPLES[F.FETCH], carry=True)))
    say(EXAMPLES[F.RELEASE])
    late = say(EXAMPLES[F.FETCH])
    answer(EXAMPLES[F.GOODBYE])
    answer(opening.ErrorReply(Status.DRAINING, "the daemon stops", ""), late)
    say(opening.Goodbye(Status.OK, ""))
    return lines


def host_sealed() -> tuple[bytes, dict[str, str]]:
    """A block that a tenant sealed under its own key, and what leads to its plaintext."""
    namespace, secret = host_sealed_namespace(TENANT_KEY.naming, DESCRIPTOR, DType.BF16)
    engine_key = EngineKey(b"engine key of a host-sealed block...")
    masked, salt = masked_engine_key(secret, engine_key), b"salt" * 8
    key = derive_block_key(TENANT_KEY.versions[2].secret, salt, HOST_KEY_LABEL)
    plain = hashlib.shake_256(b"host-sealed").digest(9001)
    identity = BlockIdentity(b"n" * 16, b"w" * 16, masked, DType.BF16, 2, host_sealed=True)
    out = bytearray(sealed_bytes_max(len(plain), chunk_bytes=4096, meta_tokens=3))
    header = seal_into(
        memoryview(out), memoryview(plain), identity=identity, block_key=key, salt=salt, codec_id=0,
        meta=BlockMeta(b"p" * 32, 7, 16, pack_token_ids((1, 2, 3))), chunk_bytes=4096,
    )  # fmt: skip
    return bytes(out[: header.sealed_bytes]), {
        "namespace": namespace.canonical().hex(),
        "engine_key": engine_key.hex(),
        "masked_engine_key": masked.hex(),
        "namespace_id": identity.namespace_id.hex(),
        "wire_key": identity.wire_key.hex(),
        "plain_sha256": hashlib.sha256(plain).hexdigest(),
    }


def keyring(folder: Path) -> dict[str, Any]:
    """Two tenants, one with two key versions and a namespace, one erased; and what is in it."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "keyring"
        ring = Keyring.open(home, KEK, random=random.Random(1).randbytes)
        for number, name in enumerate(("acme", "zeta", "gone")):
            ring.add_tenant(name, TenantQuota(1 << 40, 1 << 30, 1 + number), now_unix_s=100)
        ring.rotate("acme", now_unix_s=102)
        namespace = ring.remember_namespace("acme", SALTY)
        ring.erase("gone", now_unix_s=103)
        about = {
            "kek": KEK_BYTES.hex(),
            "namespace": namespace[0].hex(),
            "descriptor": SALTY.hex(),
            "receipts": ring.receipts(),
            "tenants": {
                str(info.name): {
                    "naming_secret": ring.get(info.name).naming_secret.hex(),
                    "deks": {str(v): k.hex() for v, k in ring.get(info.name).deks.items()},
                    "active": ring.get(info.name).active_version,
                    "quota": asdict(ring.get(info.name).info.quota),
                }
                for info in ring.tenants()
            },
        }
        ring.close()
        for path in sorted(home.rglob("*")):
            if path.is_file() and path.stat().st_size:
                target = folder / path.relative_to(home)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    return about


async def clean_file(checkpoint: Path) -> tuple[bytes, dict[str, Any]]:
    """A data file after a clean stop, and its checkpoint."""
    device = SimDevice(device_bytes(SEGMENTS, SEGMENT), seed=2)
    engine = await open_engine(device, replace(SMALL, checkpoint_path=checkpoint), seed=2)
    rng = random.Random(2)
    for number in range(12):
        name = (NAMESPACES[number % 3], key_of(number))
        _, future = put(engine, name, rng.randbytes(rng.randrange(10, 6000)))
        assert await future is Status.OK
    engine.remove(int(engine.index.live_slots()[5]), FORGOTTEN)
    await engine.barrier()
    blocks = [
        {"namespace": space.hex(), "key": key.hex(), "sha256": hashlib.sha256(data).hexdigest()}
        for (space, key), (_, data) in sorted((await get_all(engine)).items())
    ]
    await engine.close()
    return device.image(), {"segment_bytes": SEGMENT, "blocks": blocks}


def events() -> list[dict[str, str]]:
    """Replies of `Events.Snapshot` and `Events.Watch`: every kind, every reason, every gap."""
    tenant, space = TenantName("acme"), bytes(range(16))
    log = EventLog(7, event_limits=EventLimits(keys_per_event_max=2))
    subscription = log.subscribe(tenant)
    keys = tuple(bytes([number]) * 16 for number in range(3))
    log.publish(
        Kind.STORED, tenant, time_unix_ns=1, namespace_id=space, wire_keys=keys,
        engine_keys=tuple(key * 2 for key in keys), parent=b"p" * 32, position=4, block_tokens=2,
        token_ids_u32le=pack_token_ids([1, 2, 3, 4, 5, 2**32 - 1]), medium=Medium.MEMORY,
        size_bytes=3 << 20,
    )  # fmt: skip
    for kind in (Kind.STAGED, Kind.DEMOTED, Kind.PINNED):
        log.publish(
            kind, tenant, time_unix_ns=2, namespace_id=space, wire_keys=keys[:1],
            medium=Medium.FLASH, until_unix_ns=5,
        )  # fmt: skip
    for reason in Reason:
        kind = Kind.CORRUPT if reason >= Reason.HEADER else Kind.REMOVED
        log.publish(
            kind, tenant, time_unix_ns=3, namespace_id=space, wire_keys=keys[:1], reason=reason
        )
    log.publish(Kind.EXPIRED, tenant, time_unix_ns=4, namespace_id=space, wire_keys=keys[2:])
    log.publish(Kind.CLEARED, tenant, time_unix_ns=5, namespace_id=space)
    found = subscription.poll()
    assert isinstance(found, list)
    log.publish(Kind.TENANT_ERASED, tenant, time_unix_ns=6)
    found += subscription.poll()  # type: ignore[arg-type]
    listed = Event(0, 9, tenant, Kind.STORED, space, keys[:1], medium=Medium.FLASH)
    replies: list[Any] = [
        pb.SnapshotReply(position=convert.position_message(Position(7, 3))),
        *(pb.SnapshotReply(events=group) for group in convert.event_groups([listed])),
        pb.SnapshotReply(complete=True),
        pb.WatchReply(incarnation=7, position=convert.position_message(Position(7, 3))),
        *(pb.WatchReply(incarnation=7, events=group) for group in convert.event_groups(found)),
        *(
            pb.WatchReply(incarnation=7, gap=convert.gap_message(Gap(tenant, reason, 1, 2, 3)))
            for reason in GapReason
        ),
    ]
    return [
        {
            "message": type(reply).__name__,
            "bytes": reply.SerializeToString(deterministic=True).hex(),
        }
        for reply in replies
    ]


def add_hashes() -> list[str]:
    """List files that HASHES does not know yet; lines that are there stay. Returns the names."""
    text = HASHES.read_text(encoding="utf-8") if HASHES.exists() else ""
    known = {line.split("  ", 1)[1] for line in text.splitlines()}
    found = {
        path.relative_to(HERE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in HERE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path != HASHES
    }
    new = sorted(found.keys() - known)
    lines = [*text.splitlines(), *(f"{found[name]}  {name}" for name in new)]
    lines.sort(key=lambda line: line.split("  ", 1)[1])
    HASHES.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return new


def as_json(value: Any) -> str:
    """One value, for people as well."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def make(folder: Path) -> None:
    """Fill a folder."""
    folder.mkdir(parents=True)
    for protocol in (1, 2, 3):
        (folder / f"session{protocol}.json").write_text(as_json(session(protocol)))
    sealed, about = host_sealed()
    (folder / "host_sealed.bin").write_bytes(sealed)
    (folder / "host_sealed.json").write_text(as_json(about))
    (folder / "tenant.key").write_bytes(TENANT_KEY.encode())
    (folder / "keyring.json").write_text(as_json(keyring(folder / "keyring")))
    image, listing = simloop.run(clean_file(folder / "checkpoint.arrow"))
    (folder / "clean.gz").write_bytes(gzip.compress(image, 9, mtime=0))
    (folder / "clean.json").write_text(as_json(listing))
    (folder / "events.json").write_text(as_json(events()))
    (folder / "entresold.toml").write_text(to_toml(Config(), comments=False))


if __name__ == "__main__":
    if sys.argv[1:2] == ["session"]:
        path = V1 / f"session{int(sys.argv[2])}.json"
        if path.exists():
            sys.exit(f"{path} is there: what was written once is not written again")
        path.write_text(as_json(session(int(sys.argv[2]))))
    elif sys.argv[1:] != ["hashes"]:  # that lists new files of others, and makes none
        if V1.exists():
            sys.exit(f"{V1} is there: what was written once is not written again")
        make(V1)
    print("\n".join(add_hashes()))
