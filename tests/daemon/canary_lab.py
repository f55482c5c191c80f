"""Markers that stand for what must stay secret, and every use of a daemon with them in it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from entresol_client.client import AsyncClient
from entresol_client.results import PutBlock
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from tests.daemon.daemon_lab import DESCRIPTOR, counts, keys_of

SALT = "canary-salt-0d9f4c1e7ab2"
PAYLOAD = b"CANARY/payload/6b1f9e02d7c4"
TOKENS = (0x43414E41, 0x52592F74, 0x6F6B656E, 0x2F39663A)  # "CANA" "RY/t" "oken" "/9f:"
ENGINE_KEY = b"canary-engine-key"
BLOCK_BYTES = 64 * KIB
SALTED = replace(DESCRIPTOR, cache_salt=SALT)


def varint(number: int) -> bytes:
    """As protobuf packs it."""
    groups = [(number >> shift) & 0x7F for shift in range(0, 35, 7)]
    while len(groups) > 1 and not groups[-1]:
        groups.pop()
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


MARKERS = {
    "payload": PAYLOAD,
    "salt": SALT.encode(),
    "token ids": struct.pack("<4I", *TOKENS),
    "token ids in words": str(TOKENS[0]).encode(),
    "token ids in hex": f"{TOKENS[1]:08x}".encode(),
    "token ids in events": b"".join(varint(token) for token in TOKENS),
    "engine key": ENGINE_KEY,
    "payload in hex": PAYLOAD.hex().encode(),
    "engine key in hex": ENGINE_KEY.hex().encode(),
}
IN_EVENTS = ("token ids", "token ids in events", "engine key")


def payload(number: int, length_bytes: int) -> bytes:
    """Nothing but the marker, so that every piece of it is one."""
    unit = PAYLOAD + number.to_bytes(4, "little")
    return (unit * (length_bytes // len(unit) + 1))[:length_bytes]


def found_in(raw: bytes, *allowed: str) -> list[str]:
    """Markers in a text."""
    return [what for what, marker in MARKERS.items() if marker in raw and what not in allowed]


def search(path: Path, *allowed: str) -> list[str]:
    """Markers in a file, read in pieces that overlap."""
    found: set[str] = set()
    with path.open("rb") as file:
        tail = b""
        while piece := file.read(8 * MIB):
            found.update(found_in(tail + piece, *allowed))
            tail = piece[-64:]
    return sorted(found)


def files_under(folder: Path) -> Iterator[Path]:
    """Regular files, links not followed."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


async def busy(client: AsyncClient, ack: str, blocks: int = 120, salt: str = "") -> list[bytes]:
    """Every way of use, with some failures among them; the keys that are left stored."""
    space = await client.namespace(SALTED)
    keys = [ENGINE_KEY + key[:8] for key in keys_of(blocks, salt)]
    items = [
        PutBlock(key, payload(at, BLOCK_BYTES), at, keys[at - 1] if at else None, TOKENS)
        for at, key in enumerate(keys)
    ]
    result = await space.put(items, ack=ack)  # type: ignore[arg-type]
    assert set(result.statuses) <= {Status.OK, Status.EXISTS}, counts(result.statuses)
    buffers = [bytearray(BLOCK_BYTES) for _ in keys]
    places = ["host"] if client.shards()[0].fabric == "tcp" else ["host", "daemon"]
    for place in places:
        assert (await space.get_into(keys, buffers, open_at=place)).ok  # type: ignore[arg-type]
        assert bytes(buffers[7]) == payload(7, BLOCK_BYTES)
    await space.get_into(keys[:3], [bytearray(100) for _ in range(3)])  # wrong lengths
    await space.get_into([b"canary-engine-key-absent"], [bytearray(9)])
    await space.put([PutBlock(ENGINE_KEY, payload(1, 5 * MIB), token_ids=TOKENS)])  # too large
    await space.stage(keys, hold_ns=100_000_000)
    await space.touch(keys)
    await space.forget(keys[:10])
    await space.explain(keys)
    return keys[10:]
