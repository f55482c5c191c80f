"""Keys of single blocks, derived from a tenant's data key and a salt that is fresh for one write.

Invariant: no block key ever seals two different blocks. The salt is random, never a function of the
block's name, because names repeat when a block is written again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from entresol_proto.status import SealError, Status

SALT_BYTES = 32
DEK_BYTES = 32
KEY_BYTES = 32
COMMITMENT_BYTES = 16
KEY_LABEL = b"entresol/v1/block"
_BYTES = KEY_BYTES + COMMITMENT_BYTES
_SHA256 = SHA256()
_ZEROS = bytes(_BYTES)
_WIPED = bytes(DEK_BYTES)
SALTS_AT_ONCE = 32
HOST_KEY_LABEL = b"entresol/v1/host-block"  # of keys that only the tenant has


# Not frozen, because one is made per opening of a block: a frozen one costs twice as much.
@dataclass(slots=True)
class BlockKey:
    """The AES-256 key of one block (32 bytes) and the public commitment to it (16 bytes)."""

    key: bytes = field(repr=False)
    commitment: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.commitment) != COMMITMENT_BYTES:
            raise SealError("block key has a wrong length", status=Status.BAD_REQUEST)


def derive_block_key(dek: bytes, salt: bytes, label: bytes = KEY_LABEL) -> BlockKey:
    """The block key for one write: HKDF-Expand-SHA256 (RFC 5869), 32 bytes key, 16 commitment.

    `dek` is the tenant's 32-byte data key, uniformly random, so Extract is not needed; `salt` is
    the 32 bytes the block's header carries. The commitment gives the key-committing property that
    AES-GCM lacks (RFC 9771): nobody can build a block that opens under two keys. `label` is
    HOST_KEY_LABEL for host-sealed blocks, so that no key of a daemon is ever one of a tenant.

    Raises: SealError (BAD_REQUEST) for wrong lengths, (ERASED) for a key that was wiped: nothing is
    ever sealed under zeros.
    """
    raw = _derive(dek, salt, label)
    whole = memoryview(raw)
    key = BlockKey(bytes(whole[:KEY_BYTES]), bytes(whole[KEY_BYTES:]))
    raw[:] = _ZEROS  # no second copy stays in freed memory
    return key


def derive_key_and_commitment(dek: bytes, salt: bytes) -> bytes:
    """The same, end to end, 48 bytes: for whoever hands both on, and wipes them in one go."""
    raw = _derive(dek, salt, KEY_LABEL)
    both = bytes(raw)
    raw[:] = _ZEROS
    return both


def _derive(dek: bytes, salt: bytes, label: bytes) -> bytearray:
    if len(dek) != DEK_BYTES or len(salt) != SALT_BYTES:
        raise SealError("data key or salt has a wrong length", status=Status.BAD_REQUEST)
    if dek == _WIPED:
        raise SealError("the data key was destroyed", status=Status.ERASED)
    raw = bytearray(_BYTES)
    HKDFExpand(_SHA256, _BYTES, label + salt).derive_into(dek, raw)
    return raw


def new_salt() -> bytes:
    """32 fresh random bytes from the kernel; one per write, never reused."""
    return os.urandom(SALT_BYTES)


class Salts:
    """The same for whoever writes many: the kernel is asked for several at a time."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: list[bytes] = []

    def new(self) -> bytes:
        """See `new_salt`."""
        if not self._left:
            raw = os.urandom(SALTS_AT_ONCE * SALT_BYTES)
            self._left = [raw[at : at + SALT_BYTES] for at in range(0, len(raw), SALT_BYTES)]
        return self._left.pop()
