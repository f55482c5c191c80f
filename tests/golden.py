"""Reads what the first formats left on file (tests/vectors): understood, or refused cleanly.

Invariant checked: today's code reads every golden file to the very values it was made from, writes
the same bytes again where writing is deterministic, refuses the same file of a later version with
a documented error, and takes a damaged one for nothing but damaged. How they were made:
tests/vectors/make_v1.py and its companions.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import simloop
from flashlab import OPTIONS, get_all, open_engine

from entresol_client.tenant_key import TenantKey
from entresol_daemon.config import Config
from entresol_daemon.config_reference import to_toml
from entresol_daemon.control import grpc_convert as convert
from entresol_daemon.flash import checkpoint
from entresol_daemon.flash.engine import RecoveryKind
from entresol_daemon.flash.sim import SimDevice
from entresol_daemon.keys import state
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.keys.providers import FileKek
from entresol_proto.ids import (
    EngineKey,
    HostSealedNamespace,
    NamespaceDescriptor,
    host_sealed_namespace,
    masked_engine_key,
)
from entresol_proto.seal import block
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import (
    ConfigError,
    EntresolError,
    FormatError,
    KeyringError,
    ProtocolError,
    SealError,
    Status,
)
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.wire.frames import FrameType
from entresol_proto.wire.session import ClientSession, ServerSession, State

VECTORS = Path(__file__).parent / "vectors"
V1 = VECTORS / "v1"
HASHES = VECTORS / "HASHES"
_QUOTES = {FrameType.QUOTE, FrameType.QUOTED}
SESSIONS: dict[str, set[FrameType]] = {  # a session of each protocol: the types that came later
    "session1.json": _QUOTES,
    "session2.json": _QUOTES,
    "session3.json": set(),
}
REFUSALS = (ProtocolError, KeyringError, FormatError, SealError, ConfigError)


class GoldenError(AssertionError):
    """A golden file is not read as it was written."""


def same(found: object, wanted: object, what: str) -> None:
    """Raises: GoldenError."""
    if found != wanted:
        raise GoldenError(f"{what}: {found!r:.200} is not {wanted!r:.200}")


def refused(what: str, read: Callable[[], object]) -> None:
    """Reading must end in a documented error. Raises: GoldenError, or whatever else it raised."""
    try:
        found = read()
    except REFUSALS:
        return
    raise GoldenError(f"{what} was read: {found!r:.200}")


def unchanged() -> list[str]:
    """Names of golden files that are not what HASHES says, are missing from it, or are gone."""
    lines = (line.split("  ", 1) for line in HASHES.read_text(encoding="utf-8").splitlines())
    listed = {name: digest for digest, name in lines}
    there = {
        path.relative_to(VECTORS).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VECTORS.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path != HASHES
    }
    return sorted(
        name for name in listed.keys() | there.keys() if listed.get(name) != there.get(name)
    )


def load(name: str) -> Any:
    """A JSON file of v1."""
    return json.loads((V1 / name).read_text(encoding="utf-8"))


# The control stream -------------------------------------------------------------------------------


def session(folder: Path) -> None:
    """Both machines replay whole sessions of every protocol, and would send the same bytes."""
    for name, later in SESSIONS.items():
        _replay(name, later)


def _replay(name: str, later: set[FrameType]) -> None:
    host, daemon = ClientSession(now_ns=0), ServerSession(now_ns=0)
    types = set()
    for number, line in enumerate(load(name)):
        raw, what = bytes.fromhex(line["bytes"]), f"{name}, frame {number}, {line['type']}"
        listener = daemon if line["from"] == "host" else host
        (received,) = listener.receive(raw, 1)
        same(received.message.TYPE.name, line["type"], what)
        types.add(line["type"])
        if line["from"] == "host":
            same(host.send(received.message), (received.request_id, raw), what)
        else:
            same(daemon.send(received.message, received.request_id), raw, what)
    same(types, {kind.name for kind in set(FrameType) - later}, f"types of message in {name}")
    same((host.state, daemon.state), (State.DRAINING, State.DRAINING), "the end")
    same((host.in_flight, daemon.in_flight), ({}, {}), "requests in flight at the end")


def session_of_a_later_version(folder: Path) -> None:
    """The first frame says another version: both machines refuse it."""
    frames = load("session1.json")
    for machine, line in (
        (ServerSession(now_ns=0), frames[0]),
        (ClientSession(now_ns=0), frames[1]),
    ):
        raw = bytearray.fromhex(line["bytes"])
        raw[2] += 1
        if isinstance(machine, ClientSession):
            machine.send(
                ServerSession(now_ns=0).receive(bytes.fromhex(frames[0]["bytes"]), 1)[0].message
            )
        refused("a frame of a later version", lambda m=machine, r=raw: m.receive(bytes(r), 1))  # type: ignore[misc]


def damaged_session(folder: Path, rng: random.Random) -> None:
    """A frame is damaged somewhere: whoever reads it ends the session, or reads a message."""
    host, daemon = ClientSession(now_ns=0), ServerSession(now_ns=0)
    lines = load(rng.choice(tuple(SESSIONS)))
    bad = rng.randrange(len(lines))
    for number, line in enumerate(lines[: bad + 1]):
        raw = bytes.fromhex(line["bytes"])
        listener = daemon if line["from"] == "host" else host
        if number == bad:
            try:
                listener.receive(damage(raw, rng), 1)
            except ProtocolError:
                same(listener.state, State.CLOSED, "the state after a broken frame")
            return
        (received,) = listener.receive(raw, 1)
        if line["from"] == "host":
            host.send(received.message)
        else:
            daemon.send(received.message, received.request_id)


def damage(raw: bytes, rng: random.Random) -> bytes:
    """A copy that differs: bits flipped, cut short, something put in or taken out."""
    while True:
        made = bytearray(raw)
        at = rng.randrange(len(made))
        kind = rng.randrange(4)
        if kind == 0:
            for _ in range(rng.randrange(1, 4)):
                made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del made[at:]
        elif kind == 2:
            del made[at : at + rng.randrange(1, 9)]
        else:
            made[at:at] = rng.randbytes(rng.randrange(1, 9))
        if made != raw:
            return bytes(made)


# The keyring --------------------------------------------------------------------------------------


def keyring(folder: Path) -> None:
    """Every key, quota, receipt and namespace is what it was; the file is written as it was."""
    about = load("keyring.json")
    home = folder / "keyring"
    shutil.copytree(V1 / "keyring", home)
    home.chmod(0o700)
    raw = (home / "keyring.json").read_bytes()
    same(state.encode(state.decode(raw)), raw, "keyring.json written again")
    ring = Keyring.open(home, FileKek(bytes.fromhex(about["kek"]), "golden"))
    try:
        found: dict[str, dict[str, Any]] = {
            str(info.name): {
                "naming_secret": ring.get(info.name).naming_secret.hex(),
                "deks": {str(v): key.hex() for v, key in ring.get(info.name).deks.items()},
                "active": ring.get(info.name).active_version,
                "quota": asdict(ring.get(info.name).info.quota),
            }
            for info in ring.tenants()
        }
        for name, wanted in about["tenants"].items():  # newer quotas may have more fields
            found[name]["quota"] = {
                key: value for key, value in found[name]["quota"].items() if key in wanted["quota"]
            }
        same(found, about["tenants"], "tenants")
        same([dict(receipt) for receipt in ring.receipts()], about["receipts"], "receipts")
        same(ring.copies_recovered, 0, "copies that had to be repaired")
        namespace = bytes.fromhex(about["namespace"])
        same([bytes(one) for one in ring.namespaces_of("acme")], [namespace], "namespaces")
        described = ring.descriptor_of(namespace)
        same(described and described.canonical().hex(), about["descriptor"], "the descriptor")
    finally:
        ring.close()
    shutil.rmtree(home)


def keyring_of_a_later_version(folder: Path) -> None:
    """Refused, and left alone."""
    home = folder / "later"
    shutil.copytree(V1 / "keyring", home)
    home.chmod(0o700)
    for name in ("keyring.json", "keyring.json.bak"):
        raw = (home / name).read_bytes()
        (home / name).write_bytes(raw.replace(b'"version":1,"body"', b'"version":2,"body"', 1))
    before = (home / "keyring.json").read_bytes()
    refused("a later keyring", lambda: Keyring.open(home, FileKek(bytes(32), "golden")))
    same((home / "keyring.json").read_bytes(), before, "a later keyring after it was refused")
    shutil.rmtree(home)


def damaged_keyring(folder: Path, rng: random.Random) -> None:
    """Its checksum or its form gives it away, always."""
    raw = (V1 / "keyring" / "keyring.json").read_bytes()
    refused("a damaged keyring", lambda: state.decode(damage(raw, rng)))


# The data file and its checkpoint -----------------------------------------------------------------


def _reopen(path: Path | None) -> tuple[RecoveryKind, dict[tuple[str, str], str]]:
    """How the cleanly closed file opens with a checkpoint, and what is in it."""
    about = load("clean.json")
    options = replace(OPTIONS, segment_bytes=about["segment_bytes"], blocks_max=128)
    image = bytearray(gzip.decompress((V1 / "clean.gz").read_bytes()))

    async def life() -> tuple[RecoveryKind, dict[tuple[str, str], str]]:
        engine = await open_engine(
            SimDevice(len(image), image=image), replace(options, checkpoint_path=path)
        )
        found = {
            (space.hex(), key.hex()): hashlib.sha256(data).hexdigest()
            for (space, key), (status, data) in (await get_all(engine)).items()
            if status is Status.OK
        }
        kind = engine.recovery.kind
        await engine.close(clean=False)
        return kind, found

    opened: tuple[RecoveryKind, dict[tuple[str, str], str]] = simloop.run(life())
    return opened


def _blocks() -> dict[tuple[str, str], str]:
    return {(one["namespace"], one["key"]): one["sha256"] for one in load("clean.json")["blocks"]}


def clean_file(folder: Path) -> None:
    """It opens by its checkpoint, and without it by its footers, to the same blocks."""
    same(_reopen(V1 / "checkpoint.arrow"), (RecoveryKind.CHECKPOINT, _blocks()), "by checkpoint")
    same(_reopen(None), (RecoveryKind.FOOTERS, _blocks()), "by footers")


def checkpoint_of_a_later_version(folder: Path) -> None:
    """Refused by its reader; an engine then goes by the footers, for its digest is another, too."""
    raw = (V1 / "checkpoint.arrow").read_bytes()
    later = raw.replace(b'{"version": 1,', b'{"version": 2,')
    same(len(later) == len(raw) and later != raw, True, "the version in the checkpoint was found")
    refused("a later checkpoint", lambda: checkpoint.decode(later))
    _without(folder, later)


def damaged_checkpoint(folder: Path, rng: random.Random) -> None:
    """Never believed; nothing is lost."""
    _without(folder, damage((V1 / "checkpoint.arrow").read_bytes(), rng))


def _without(folder: Path, raw: bytes) -> None:
    path = folder / "checkpoint.arrow"
    path.write_bytes(raw)
    same(_reopen(path), (RecoveryKind.FOOTERS, _blocks()), "with a checkpoint that is not the one")


# Sealed blocks, events, configuration -------------------------------------------------------------


def sealed_blocks(folder: Path) -> None:
    """Every golden block opens to the plaintext it was made from."""
    for case in json.loads((VECTORS / "sealed_block.json").read_text(encoding="utf-8")):
        same(_open(case, (VECTORS / case["file"]).read_bytes()), Status.OK, case["name"])


def sealed_block_of_a_later_version(folder: Path) -> None:
    """Not opened."""
    for case in json.loads((VECTORS / "sealed_block.json").read_text(encoding="utf-8")):
        raw = bytearray((VECTORS / case["file"]).read_bytes())
        same((raw[:4], raw[4]), (b"ENTS", 1), "magic and version")
        raw[4] += 1
        same(_open(case, bytes(raw)) is Status.OK, False, f"{case['name']} of a later version")


def damaged_sealed_block(folder: Path, rng: random.Random) -> None:
    """Not opened, wherever it is damaged."""
    case = rng.choice(json.loads((VECTORS / "sealed_block.json").read_text(encoding="utf-8")))
    raw = bytearray((VECTORS / case["file"]).read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    same(_open(case, bytes(raw)) is Status.OK, False, f"{case['name']}, damaged")


def host_sealed(folder: Path) -> None:
    """A block under a tenant's own key opens by the key file; names are masked as they were."""
    about, raw = load("host_sealed.json"), (V1 / "host_sealed.bin").read_bytes()
    text = (V1 / "tenant.key").read_bytes()
    key = TenantKey.decode(text)
    same(key.encode(), text, "tenant.key written again")
    descriptor = NamespaceDescriptor(model="golden/model", cache_salt="grain", layers=2)
    namespace, secret = host_sealed_namespace(key.naming, descriptor, DType.BF16)
    same(namespace.canonical().hex(), about["namespace"], "the namespace")
    same(HostSealedNamespace.parse(namespace.canonical()), namespace, "the namespace, parsed")
    masked = masked_engine_key(secret, EngineKey(bytes.fromhex(about["engine_key"])))
    same(masked.hex(), about["masked_engine_key"], "the masked engine key")
    header = block.SealedHeader.parse(memoryview(raw))
    same((header.host_sealed, header.dek_version), (True, 2), "what the header says")
    into = bytearray(header.plain_bytes)
    block_key = block.derive_block_key(key.versions[2].secret, header.salt, block.HOST_KEY_LABEL)
    status = block.open_into(
        memoryview(raw), memoryview(into), namespace_id=bytes.fromhex(about["namespace_id"]),
        wire_key=bytes.fromhex(about["wire_key"]), engine_key=masked, block_key=block_key,
    )  # fmt: skip
    same(
        (status, hashlib.sha256(into).hexdigest()), (Status.OK, about["plain_sha256"]), "the block"
    )


def tenant_key_of_a_later_version(folder: Path) -> None:
    """Refused."""
    text = (V1 / "tenant.key").read_bytes()
    later = text.replace(b"tenant-key/1", b"tenant-key/2")
    same(later == text, False, "the format in tenant.key was found")
    refused("a later tenant key", lambda: TenantKey.decode(later))


def _open(case: dict[str, Any], raw: bytes) -> Status:
    into = bytearray(case["plain_bytes"])
    key = block.BlockKey(bytes.fromhex(case["block_key"]), bytes.fromhex(case["commitment"]))
    status = block.open_into(
        memoryview(raw), memoryview(into), namespace_id=bytes.fromhex(case["namespace_id"]),
        wire_key=bytes.fromhex(case["wire_key"]), engine_key=bytes.fromhex(case["engine_key"]),
        block_key=key,
    )  # fmt: skip
    if status is not Status.OK:
        return status
    same(hashlib.sha256(into).hexdigest(), case["plain_sha256"], f"plaintext of {case['name']}")
    if case["meta"] is None:
        return status
    try:  # the rest of it, which has a tag of its own
        meta = block.open_meta(memoryview(raw), block.SealedHeader.parse(memoryview(raw)), key)
    except SealError as error:
        return error.status
    found = {
        "parent": meta.parent.hex(), "position": meta.position, "block_tokens": meta.block_tokens,
        "token_ids": list(meta.token_ids),
    }  # fmt: skip
    same(found, case["meta"], f"meta of {case['name']}")
    return status


def events(folder: Path) -> None:
    """Every reply parses, means what it meant, and is written the same."""
    kinds: dict[str, Any] = {"SnapshotReply": pb.SnapshotReply, "WatchReply": pb.WatchReply}
    for number, line in enumerate(load("events.json")):
        raw, kind = bytes.fromhex(line["bytes"]), kinds[line["message"]]
        reply, again = kind.FromString(raw), kind()
        again.CopyFrom(reply)
        if reply.events:
            records = [convert.event_record(message) for message in reply.events]
            del again.events[:]
            for group in convert.event_groups(records):
                again.events.extend(group)
        if kind is pb.WatchReply and reply.HasField("gap"):
            again.gap.CopyFrom(convert.gap_message(convert.gap_record(reply.gap)))
        same(again.SerializeToString(deterministic=True).hex(), raw.hex(), f"reply {number}")


def config(folder: Path) -> None:
    """Today's daemon starts with it, and its values are those of the file."""
    path = V1 / "entresold.toml"
    text = path.read_text(encoding="utf-8")
    read = Config.parse(text, path)
    written = to_toml(read, comments=False).splitlines()
    missing = [line for line in text.splitlines() if line and line not in written]
    same(missing, [], "settings that were read differently")


def config_of_a_later_version(folder: Path) -> None:
    """An unknown setting is refused, with its name."""
    path = V1 / "entresold.toml"
    text = path.read_text(encoding="utf-8").replace("[flash]\n", "[flash]\nlater_setting = 1\n", 1)
    try:
        Config.parse(text, path)
    except ConfigError as error:
        same("later_setting" in str(error), True, "the refusal names the setting")
        return
    raise GoldenError("a setting of a later version was passed over")


CHECKS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        session, session_of_a_later_version, keyring, keyring_of_a_later_version, clean_file,
        checkpoint_of_a_later_version, sealed_blocks, sealed_block_of_a_later_version, events,
        config, config_of_a_later_version, host_sealed, tenant_key_of_a_later_version,
    )
}  # fmt: skip
DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    each.__name__: each
    for each in (damaged_session, damaged_keyring, damaged_checkpoint, damaged_sealed_block)
}
__all__ = ["CHECKS", "DAMAGES", "EntresolError", "GoldenError", "unchanged"]
