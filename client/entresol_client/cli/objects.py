"""How a file becomes blocks: keys, and the head that lets a name alone find it again. Pure.

Blocks are a chain, as in a prefix cache: the key of each is a digest of its parent's key and its
bytes, so files with a common beginning share blocks. The keys of a file are stored in list blocks,
and a head of HEAD_BYTES under a key made from the name says how many there are and what the file's
SHA-256 is. A head is written last: whoever finds one finds a whole file, or blocks that were
evicted since.

Invariant: everything on the way from a name to bytes has a length that is known before it is read.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from entresol_client.cli.errors import CliError, UsageProblem
from entresol_proto import limits
from entresol_proto.status import Status

KEY_BYTES = 32
HEAD_BYTES = 256
KEYS_PER_LIST = 32_768  # 1 MiB of keys in a list block
BLOCKS_PER_FILE_MAX = limits.KEYS_PER_FRAME_MAX
NAME_BYTES_MAX = 512
BLOCK_BYTES_DEFAULT = limits.MIB
TEXT_PREFIX = "text:"

_HEAD = struct.Struct("<8sIIQII32s32s")
_MAGIC = b"ENTRFILE"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Head:
    """What a name stands for."""

    length_bytes: int
    block_bytes: int
    sha256: bytes
    keys_sha256: bytes  # of all keys in a row

    @property
    def blocks(self) -> int:
        """Number of data blocks."""
        return -(-self.length_bytes // self.block_bytes)

    def block_length(self, index: int) -> int:
        """Bytes of one block; the last may be shorter."""
        return min(self.block_bytes, self.length_bytes - index * self.block_bytes)

    def encode(self) -> bytes:
        """The head's bytes."""
        fields = _HEAD.pack(
            _MAGIC, _VERSION, self.block_bytes, self.length_bytes, self.blocks, 0, self.sha256,
            self.keys_sha256,
        )  # fmt: skip
        return fields.ljust(HEAD_BYTES, b"\0")

    @classmethod
    def decode(cls, raw: bytes | bytearray) -> Head:
        """Inverse of `encode`. Raises: CliError when another tool stored something there."""
        magic, version, block_bytes, length, blocks, _, digest, keys = _HEAD.unpack_from(raw)
        head = cls(length, block_bytes, digest, keys) if block_bytes else None
        if (
            head is None
            or magic != _MAGIC
            or version != _VERSION
            or blocks != head.blocks
            or blocks > BLOCKS_PER_FILE_MAX
            or block_bytes > limits.BLOCK_BYTES_MAX
            or bytes(raw) != head.encode()
        ):
            raise CliError(
                "what is stored under this name is no file head that this version knows",
                hint="it was stored by another version; store the file again with --replace",
                status=Status.UNSUPPORTED,
            )
        return head

    def list_keys(self) -> list[bytes]:
        """Engine keys of the list blocks."""
        return [
            hashlib.sha256(
                b"entresol/cli/list/v1\0" + self.keys_sha256 + struct.pack("<I", number)
            ).digest()
            for number in range(-(-self.blocks // KEYS_PER_LIST))
        ]

    def list_length(self, number: int) -> int:
        """Bytes of one list block."""
        return KEY_BYTES * min(KEYS_PER_LIST, self.blocks - number * KEYS_PER_LIST)

    def split_lists(self, lists: list[bytearray]) -> list[bytes]:
        """The keys in the list blocks. Raises: CliError when they are not the head's."""
        raw = b"".join(lists)
        if hashlib.sha256(raw).digest() != self.keys_sha256:
            raise CliError("the key list is not the one of this head", status=Status.CORRUPT)
        return split_keys(raw)


def split_keys(raw: bytes) -> list[bytes]:
    """Keys of KEY_BYTES in a row."""
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def chain_key(parent: bytes, block: bytes | memoryview) -> bytes:
    """Key of a block after `parent` (empty at the root)."""
    digest = hashlib.sha256(b"entresol/cli/block/v1\0" + parent)
    digest.update(block)
    return digest.digest()


def name_key(name: str) -> bytes:
    """Key of a name's head. Raises: UsageProblem."""
    raw = name.encode(errors="surrogateescape")
    if not 0 < len(raw) <= NAME_BYTES_MAX:
        raise UsageProblem(f"a name has 1 to {NAME_BYTES_MAX} bytes, this one {len(raw)}")
    return hashlib.sha256(b"entresol/cli/name/v1\0" + raw).digest()


def parse_key(text: str) -> bytes:
    """An engine key as people write it: hex of 8 to 64 bytes, or `text:ANYTHING`.

    Raises: UsageProblem.
    """
    if text.startswith(TEXT_PREFIX):
        raw = text[len(TEXT_PREFIX) :].encode(errors="surrogateescape")
        return hashlib.sha256(b"entresol/cli/text/v1\0" + raw).digest()
    low, high = limits.ENGINE_KEY_BYTES_MIN, limits.ENGINE_KEY_BYTES_MAX
    try:
        key = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        raise UsageProblem(
            f"key {text!r} is not hex",
            hint=f"write {low} to {high} bytes in hex, or {TEXT_PREFIX}WORDS to have a key made",
        ) from None
    if not low <= len(key) <= high:
        raise UsageProblem(
            f"key {text!r} has {len(key)} bytes",
            hint=f"engine keys have {low} to {high} bytes, two hex digits each",
        )
    return key
