"""From an engine key to the block hash that a router knows: one rule, in one place.

Invariant: the hash of a block is the one the engine itself publishes for it, because routers go on
from the blocks on the GPU to those stored here by comparing hashes.

Who made a key is the first word of its namespace's `page_layout`:

| Maker | Engine key | Bytes | The block's hash in it |
|---|---|---|---|
| `vllm-kvbm` | u64 hash, digest | 8 + 24 | the u64, big endian |
| others | sha256 (vLLM) | 32 | all of it |
| others | sha256, group (vLLM) | 32 + 4 | the sha256 |
| others | anything else | n | all of it |

Behind it there may be 16 bytes that stand for a salt. As a number, a hash is its low 64 bits, read
big endian.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

Hash = int | bytes
"""A block's name on the wire: a u64, or bytes; one relay uses one of the two."""

U64_BYTES = 8
SHA_BYTES = 32
GROUP_BYTES = 4
KVBM_BYTES = 32
SALT_BYTES = 16  # `engines.naming.salted`
_WHOLE = {"vllm-kvbm": (KVBM_BYTES,)}
_WHOLE_OTHERS = (SHA_BYTES, SHA_BYTES + GROUP_BYTES)


class Parts(NamedTuple):
    """An engine key taken apart. `group` is the KV cache group's number in 4 bytes, or empty."""

    hash: bytes
    group: bytes
    salted: bool


def maker_of(page_layout: str) -> str:
    """Who made the keys of a namespace: the text before the fingerprint."""
    return re.split("[:/]", page_layout, maxsplit=1)[0]


def split(key: bytes, maker: str) -> Parts:
    """Take an engine key apart (the table above)."""
    whole = _WHOLE.get(maker, _WHOLE_OTHERS)
    salted = len(key) - SALT_BYTES in whole
    if salted:
        key = key[:-SALT_BYTES]
    if len(key) not in whole:
        return Parts(key, b"", salted)
    end = whole[0]
    return Parts(key[: U64_BYTES if maker in _WHOLE else end], key[end:], salted)


def number(block_hash: bytes) -> int:
    """The low 64 bits, read big endian, as vLLM and its readers cut a longer hash."""
    return int.from_bytes(block_hash[-U64_BYTES:], "big")


def names_in_chunk(block_hash: Hash, count: int) -> tuple[Hash, ...]:
    """Names for the `count` router blocks in one stored block, in order; the last is its own.

    An engine may store several of its blocks under the hash of the last. The others' names are
    derived from it, so that they are the same in every relay and after a restart.
    """
    if count == 1:
        return (block_hash,)
    raw = block_hash if isinstance(block_hash, bytes) else block_hash.to_bytes(U64_BYTES, "big")
    size = U64_BYTES if isinstance(block_hash, int) else SHA_BYTES
    names: list[Hash] = []
    for index in range(count - 1):
        salt = index.to_bytes(4, "little")
        made = hashlib.blake2b(raw, digest_size=size, salt=salt, person=b"entresol-part").digest()
        names.append(number(made) if isinstance(block_hash, int) else made)
    return (*names, block_hash)
