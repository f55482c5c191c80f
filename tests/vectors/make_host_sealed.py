"""Writes host_sealed.json: names, keys and one block of a tenant that keeps its keys.

Shares no code with Entresol: everything is computed here from proto/FORMAT.md with hashlib, hmac,
struct and AES-GCM. Deterministic; run it only for a new version of the format.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HERE = Path(__file__).parent


def made(what: str, size: int = 32) -> bytes:
    """Bytes that look random and are always the same."""
    return hashlib.shake_256(f"host-sealed vector: {what}".encode()).digest(size)


def blake(message: bytes, key: bytes, person: bytes, size: int) -> bytes:
    """Keyed BLAKE2b."""
    return hashlib.blake2b(message, digest_size=size, key=key, person=person).digest()


def expand(key: bytes, info: bytes, size: int) -> bytes:
    """HKDF-Expand-SHA256 (RFC 5869)."""
    out, last, count = b"", b"", 1
    while len(out) < size:
        last = hmac.new(key, last + info + bytes([count]), hashlib.sha256).digest()
        out, count = out + last, count + 1
    return out[:size]


def descriptor() -> bytes:
    """model "m", revision "main", dtype bf16, the defaults otherwise."""
    text: dict[int, str] = {1: "m", 2: "main", 5: "bf16", 9: "kv", 10: "opaque"}
    number = {6: 0, 7: 0, 8: 0, 11: 16, 12: 0, 13: 1, 14: 0, 15: 1}
    raw = b"entresol/ns/v1"
    for field in sorted(text | number):
        if field in text:
            value = text[field].encode()
            raw += struct.pack("<BBI", field, 2, len(value)) + value
        else:
            raw += struct.pack("<BBII", field, 1, 4, number[field])
    return raw


def vector() -> dict[str, Any]:
    """Inputs and what must come of them."""
    naming, secret, daemons_naming = made("naming"), made("version 7"), made("daemon's naming")
    engine_key, parent, salt = made("engine key"), made("parent"), made("salt")
    plain, tokens, version = made("plain", 5_000), (1, 2, 70_000), 7
    told = descriptor()
    tag = blake(told, naming, b"entresol-hsns", 32)
    mask = blake(told, naming, b"entresol-hssec", 32)
    canonical = b"entresol/hs/v1" + struct.pack("<B3xI", 1, 16) + tag
    masked = blake(engine_key, mask, b"entresol-hskey", 32)
    namespace_id = blake(canonical, daemons_naming, b"entresol-nsid", 16)
    namespace_secret = blake(canonical, daemons_naming, b"entresol-nssec", 32)
    wire_key = blake(masked, namespace_secret, b"entresol-block", 16)
    both = expand(secret, b"entresol/v1/host-block" + salt, 48)
    key, commitment = both[:32], both[32:]
    meta = struct.pack("<B3xIII64s", 32, 3, 16, len(tokens), parent) + struct.pack("<3I", *tokens)
    aad = struct.pack(
        "<4sHBBIIQQIIII", b"ENTS", 1, 0, 1, 1, 208, len(plain), len(plain) + 16, 1 << 18, 1,
        len(meta) + 16, version,
    )  # fmt: skip
    aad += namespace_id + wire_key + salt + commitment
    aad += bytes([len(masked)]) + bytes(7) + masked.ljust(64, b"\0")
    aad += struct.pack("<I", len(plain) + 16)
    assert len(aad) == 204
    cipher = AESGCM(key)
    sealed = aad + struct.pack("<I", zlib.crc32(aad))
    sealed += cipher.encrypt(struct.pack("<IBB6x", 0, 1, 1), meta, aad)
    sealed += cipher.encrypt(struct.pack("<IBB6x", 0, 0, 1), plain, aad)
    values = {
        "naming": naming, "secret": secret, "daemons_naming": daemons_naming,
        "descriptor": told, "canonical": canonical, "mask": mask, "engine_key": engine_key,
        "masked_engine_key": masked, "namespace_id": namespace_id, "wire_key": wire_key,
        "salt": salt, "block_key": key, "commitment": commitment, "parent": parent,
        "plain": plain, "sealed": sealed,
    }  # fmt: skip
    found: dict[str, Any] = {name: raw.hex() for name, raw in values.items()}
    return found | {"version": version, "token_ids": list(tokens), "position": 3}


if __name__ == "__main__":
    text = json.dumps(vector(), indent=1) + "\n"
    (HERE / "host_sealed.json").write_text(text, encoding="utf-8")
