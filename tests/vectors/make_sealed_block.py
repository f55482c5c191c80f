"""Writes sealed_block.json and the golden blocks it names; run it as a script.

Deterministic for the raw codec. A block of another codec may come out different with another zstd
library; the stored one must open for ever. So run this only for a new version of the format, never
to make a failing test pass.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from entresol_proto.ids import pack_token_ids
from entresol_proto.seal import block, codecs
from entresol_proto.seal.dtypes import DType

HERE = Path(__file__).parent
DEK = hashlib.sha256(b"golden data key").digest()


def plain_of(recipe: str, size: int) -> bytes:
    """Plaintext by recipe: "noise" is SHAKE-256 of the word, "kv" the same with few exponents."""
    noise = hashlib.shake_256(recipe.encode()).digest(size + 1)
    if recipe == "noise":
        return noise[:size]
    assert recipe == "kv"
    out = bytearray()
    for at in range(0, size, 2):
        bits = noise[at] | noise[at + 1] << 8
        exponent = 120 + (bits >> 7 & 0xFF).bit_count()
        out += (bits & 0x807F | exponent << 7).to_bytes(2, "little")
    return bytes(out[:size])


def cases() -> list[dict[str, Any]]:
    """Inputs of every golden block."""
    return [
        {"name": "raw", "codec": "raw", "dtype": "opaque", "recipe": "noise", "plain_bytes": 1},
        {"name": "raw_meta", "codec": "raw", "dtype": "bf16", "recipe": "kv", "plain_bytes": 9001},
        {"name": "zstd", "codec": "zstd", "dtype": "fp16", "recipe": "kv", "plain_bytes": 12288},
        {"name": "plane", "codec": "plane", "dtype": "bf16", "recipe": "kv", "plain_bytes": 9001},
    ]


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `seal_into` for a case, all derived from its name."""

    def digest(what: str, size: int) -> bytes:
        return hashlib.shake_256(f"{case['name']} {what}".encode()).digest(size)

    salt = digest("salt", 32)
    meta = None
    if case["name"] != "raw":
        tokens = tuple(range(1000, 1016))
        meta = block.BlockMeta(digest("parent", 32), 256, 16, pack_token_ids(tokens))
    identity = block.BlockIdentity(
        namespace_id=digest("namespace", 16),
        wire_key=digest("wire key", 16),
        engine_key=digest("engine key", 8 if case["name"] == "raw" else 36),
        dtype=DType.from_name(case["dtype"]),
        dek_version=7,
    )
    return {
        "identity": identity,
        "block_key": block.derive_block_key(DEK, salt),
        "salt": salt,
        "codec_id": codecs.by_name(case["codec"]).codec_id,
        "meta": meta,
        "chunk_bytes": 4096,
    }


def seal(case: dict[str, Any]) -> bytes:
    """The sealed bytes of a case."""
    plain = plain_of(case["recipe"], case["plain_bytes"])
    out = bytearray(block.sealed_bytes_max(len(plain), chunk_bytes=4096, meta_tokens=16))
    header = block.seal_into(memoryview(out), memoryview(plain), **inputs(case))
    return bytes(out[: header.sealed_bytes])


def describe(case: dict[str, Any], sealed: bytes) -> dict[str, Any]:
    """Everything another implementation needs to check itself against a case."""
    given = inputs(case)
    identity, key, meta = given["identity"], given["block_key"], given["meta"]
    return {
        **case,
        "plain_sha256": hashlib.sha256(plain_of(case["recipe"], case["plain_bytes"])).hexdigest(),
        "file": f"sealed_{case['name']}.bin",
        "sealed_sha256": hashlib.sha256(sealed).hexdigest(),
        "dek": DEK.hex(),
        "salt": given["salt"].hex(),
        "block_key": key.key.hex(),
        "commitment": key.commitment.hex(),
        "namespace_id": identity.namespace_id.hex(),
        "wire_key": identity.wire_key.hex(),
        "engine_key": identity.engine_key.hex(),
        "dek_version": identity.dek_version,
        "chunk_bytes": given["chunk_bytes"],
        "meta": meta
        and {
            "parent": meta.parent.hex(),
            "position": meta.position,
            "block_tokens": meta.block_tokens,
            "token_ids": list(meta.token_ids),
        },
    }


def main() -> None:
    """Write all files."""
    described = []
    for case in cases():
        sealed = seal(case)
        (HERE / f"sealed_{case['name']}.bin").write_bytes(sealed)
        described.append(describe(case, sealed))
    (HERE / "sealed_block.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
