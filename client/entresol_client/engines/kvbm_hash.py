"""KVBM's block and sequence hashes, and the engine keys that Entresol stores KVBM's blocks under.

Invariant: two blocks have one engine key only if KVBM gives them one sequence hash *and* they have
the same tokens, the same tokens before them and the same salt, by a 192-bit digest of our own.
KVBM's hash alone is 64 bits of XXH3, which is no protection against a collision, found or made.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from entresol_proto.status import ConfigError

CHAIN_BYTES = 24
KEY_BYTES = 8 + CHAIN_BYTES
TOKEN_MAX = 2**32 - 1

_PERSON = b"entresol-kvbm-1"
_PAIR = struct.Struct("<QQ")


@cache
def _xxh3_64() -> Callable[..., int]:
    """XXH3-64 of the xxhash package; imported late, the light core does not need it."""
    try:
        module: Any = importlib.import_module("xxhash")
    except ImportError:
        raise ConfigError(
            "KVBM's hashes need the xxhash package", hint="pip install 'entresol[kvbm]'"
        ) from None
    function: Callable[..., int] = module.xxh3_64_intdigest
    return function


def salt_json(salt: str | None = None, lora_name: str | None = None) -> bytes:
    """What KVBM hashes into the salt: compact JSON with the fields that are set, in this order."""
    fields = {"salt": salt, "lora_name": lora_name}
    present = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(present, separators=(",", ":"), ensure_ascii=False).encode()


def salt_hash(salt: str | None = None, lora_name: str | None = None) -> int:
    """KVBM's salt hash, a u64: the seed of every hash of a sequence."""
    return _xxh3_64()(salt_json(salt, lora_name), 0)


def sequence_hashes(
    tokens: Sequence[int],
    block_tokens: int,
    salt: str | None = None,
    lora_name: str | None = None,
) -> list[int]:
    """KVBM's sequence hash (u64) of every full block of `tokens`."""
    chain = KeyChain(block_tokens, salt, lora_name)
    chain.extend(tokens)
    return chain.sequence_hashes


class KeyChain:
    """Hashes and engine keys of one growing sequence.

    Engine key of block i, 32 bytes: KVBM's sequence hash (8, big-endian), then
    `digest_i = BLAKE2b-192(digest_{i-1} ‖ tokens of the block as u32 little-endian)`, where
    `digest_{-1}` is the digest of KVBM's salt JSON and the private salt. `person` of all of them:
    "entresol-kvbm-1".
    """

    def __init__(
        self,
        block_tokens: int,
        salt: str | None = None,
        lora_name: str | None = None,
        *,
        private_salt: str = "",
    ) -> None:
        """`block_tokens` is KVBM's page size; KVBM does not know `private_salt`.

        Raises: ConfigError without the xxhash package.
        """
        self.block_tokens = block_tokens
        self.keys: list[bytes] = []
        self.sequence_hashes: list[int] = []
        self._xxh3 = _xxh3_64()
        self._seed = salt_hash(salt, lora_name)
        self._digest = _digest(salt_json(salt, lora_name) + b"\0" + private_salt.encode())
        self._block = struct.Struct(f"<{block_tokens}I")

    def extend(self, tokens: Sequence[int], blocks: int | None = None) -> int:
        """Take in `tokens`, the whole sequence so far, up to `blocks` full blocks (None: all).

        What was taken before is not read again. Returns the number of blocks with keys, which is
        smaller when a token is no u32 (a placeholder of the engine, an embedding).
        """
        full = len(tokens) // self.block_tokens
        for index in range(len(self.keys), full if blocks is None else min(full, blocks)):
            start = index * self.block_tokens
            try:
                raw = self._block.pack(*tokens[start : start + self.block_tokens])
            except struct.error:
                break
            value = self._xxh3(raw, self._seed)
            if index:
                value = self._xxh3(_PAIR.pack(self.sequence_hashes[-1], value), self._seed)
            self._digest = _digest(self._digest + raw)
            self.sequence_hashes.append(value)
            self.keys.append(value.to_bytes(8, "big") + self._digest)
        return len(self.keys)

    def parent(self, index: int) -> bytes | None:
        """The key of the block before block `index`; None for the first."""
        return self.keys[index - 1] if index else None


def kvbm_hash_of(key: bytes) -> int:
    """KVBM's sequence hash in an engine key."""
    return int.from_bytes(key[:8], "big")


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=CHAIN_BYTES, person=_PERSON).digest()
