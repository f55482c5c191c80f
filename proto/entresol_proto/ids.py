"""Names of things: namespaces, blocks, tenants, and how they are derived.

Invariant: two different (tenant, model, layout, salt, ...) descriptors never give the same bytes,
so they never share a block. The encoding is length-framed: no choice of field values can imitate
another (`("org_1", "2345")` against `("org_12345", "")`). Test vectors: tests/vectors/ids.json.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NewType

from entresol_proto import limits
from entresol_proto.status import EntresolError, Status

NamespaceId = NewType("NamespaceId", bytes)  # 16 bytes, opaque to the flash engine
WireKey = NewType("WireKey", bytes)  # 16 bytes, names a block inside a namespace
EngineKey = NewType("EngineKey", bytes)  # 8..64 bytes, as the inference engine gave it
TenantName = NewType("TenantName", str)

NAMESPACE_SECRET_BYTES = 32
_OPTIONAL = frozenset({"lora", "cache_salt"})
_DESCRIPTOR_LABEL = b"entresol/ns/v1"
_HOST_SEALED_LABEL = b"entresol/hs/v1"
_HOST_SEALED = struct.Struct("<B3xI32s")
_TENANT_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")


class BadKeyError(EntresolError):
    """A key or descriptor has a length or value that is not allowed."""

    status = Status.BAD_REQUEST


def check_tenant_name(name: str) -> TenantName:
    """Return `name` if it is a usable tenant name.

    Raises: BadKeyError unless it is 1 to 64 of a-z 0-9 . _ - with an alphanumeric at both ends.
    """
    _check_name("tenant", name)
    return TenantName(name)


def check_shard_name(name: str) -> None:
    """Raises: BadKeyError for what is no name of a shard; they are as those of tenants are."""
    _check_name("shard", name)


def _check_name(whose: str, name: str) -> None:
    if not _TENANT_NAME.fullmatch(name):
        raise BadKeyError(
            f"{whose} name {name!r} is not allowed",
            hint="use 1 to 64 of a-z 0-9 . _ - and begin and end with a letter or digit",
        )


def check_engine_key(key: bytes) -> EngineKey:
    """Return `key` if its length is allowed (8 to 64 bytes).

    Raises: BadKeyError otherwise.
    """
    if not limits.ENGINE_KEY_BYTES_MIN <= len(key) <= limits.ENGINE_KEY_BYTES_MAX:
        raise BadKeyError(
            f"engine key is {len(key)} bytes",
            hint=f"give {limits.ENGINE_KEY_BYTES_MIN} to {limits.ENGINE_KEY_BYTES_MAX} bytes: "
            "8 (KVBM), 16 (positional lineage) or 32 and more (vLLM sha256 + group)",
        )
    return EngineKey(bytes(key))


@dataclass(frozen=True, slots=True)
class NamespaceDescriptor:
    """Everything that must agree before one host may use another's KV bytes.

    Any difference is another namespace, hence a miss. The tenant is not a field: it comes from the
    certificate. `cache_salt` and `lora` are None when absent; an empty string is refused, so that
    absent and empty cannot be confused.
    """

    model: str
    model_revision: str = "main"
    lora: str | None = None
    cache_salt: str | None = field(default=None, repr=False)
    dtype: str = "bf16"
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    kv_order: str = "kv"  # which of K and V comes first, and on which axis
    page_layout: str = "opaque"  # how the engine lays out one block
    block_tokens: int = 16
    tp_rank: int = 0
    tp_world: int = 1
    pp_rank: int = 0
    pp_world: int = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and one.name in _OPTIONAL:
                continue
            if isinstance(value, str) is isinstance(one.default, int) or value is None:
                raise BadKeyError(f"namespace field {one.name} is a {type(value).__name__}")
            if isinstance(value, str):
                try:
                    size = len(value.encode())
                except UnicodeEncodeError:
                    raise BadKeyError(f"namespace field {one.name} is not UTF-8 text") from None
                if not 0 < size <= limits.DESCRIPTOR_TEXT_BYTES_MAX:
                    raise BadKeyError(
                        f"namespace field {one.name} is {size} bytes",
                        hint=f"give 1 to {limits.DESCRIPTOR_TEXT_BYTES_MAX} bytes, "
                        "or leave an optional field out",
                    )
            elif not isinstance(value, int) or not 0 <= value < 2**32:
                raise BadKeyError(f"namespace field {one.name} is {value}, not 0..2^32-1")
        if not 0 < self.block_tokens <= limits.TOKENS_PER_BLOCK_MAX:
            raise BadKeyError(f"block_tokens is {self.block_tokens}")

    def canonical(self) -> bytes:
        """The one byte form: label, then per present field `u8 number, u8 type, u32 length, value`.

        Field numbers are the order of declaration from 1; integers are u32 little-endian.
        """
        parts = [_DESCRIPTOR_LABEL]
        for number, one in enumerate(fields(self), start=1):
            value = getattr(self, one.name)
            if value is None:
                continue
            if isinstance(value, int):
                parts.append(struct.pack("<BBII", number, 1, 4, value))
            else:
                raw = value.encode()
                parts.append(struct.pack("<BBI", number, 2, len(raw)) + raw)
        return b"".join(parts)

    @classmethod
    def parse(cls, raw: bytes) -> NamespaceDescriptor:
        """Decode `canonical()`; anything that would not re-encode to the same bytes is refused.

        Raises: BadKeyError.
        """
        if len(raw) > limits.DESCRIPTOR_BYTES_MAX or not raw.startswith(_DESCRIPTOR_LABEL):
            raise BadKeyError("not a namespace descriptor of version 1")
        names = [one.name for one in fields(cls)]
        values: dict[str, str | int] = {}
        at = len(_DESCRIPTOR_LABEL)
        try:
            while at < len(raw):
                number, kind, size = struct.unpack_from("<BBI", raw, at)
                body = raw[at + 6 : at + 6 + size]
                if len(body) != size:
                    raise BadKeyError("namespace descriptor is cut short")
                name = names[number - 1] if number else ""
                values[name] = body.decode() if kind == 2 else struct.unpack("<I", body)[0]
                at += 6 + size
            parsed = cls(**values)  # type: ignore[arg-type]
            canonical = parsed.canonical()
        except BadKeyError:
            raise
        except (struct.error, IndexError, TypeError, UnicodeDecodeError, AttributeError) as error:
            raise BadKeyError(f"namespace descriptor is malformed: {error}") from None
        if canonical != raw:
            raise BadKeyError("namespace descriptor is not in canonical form")
        return parsed

    def digest(self) -> bytes:
        """32-byte unkeyed digest of the canonical form; used only for client-side placement."""
        return descriptor_digest(self.canonical())


def descriptor_digest(canonical: bytes) -> bytes:
    """32-byte unkeyed digest of a canonical form; used only for client-side placement."""
    return hashlib.blake2b(canonical, digest_size=32, person=b"entresol-nsdig").digest()


@dataclass(frozen=True, slots=True)
class HostSealedNamespace:
    """What a daemon is told instead of a descriptor when the tenant keeps its keys.

    `tag` stands for the whole descriptor, keyed by the tenant's own naming secret: nobody without
    that can test a guess against it. Its canonical form begins with another label than any
    descriptor's, so a host-sealed namespace and a daemon-sealed one never share an id.
    """

    tag: bytes  # 32 bytes
    dtype: int  # as in the sealed header
    block_tokens: int

    def __post_init__(self) -> None:
        if len(self.tag) != 32 or not 0 <= self.dtype < 256:
            raise BadKeyError("host-sealed namespace is out of range")
        if not 0 < self.block_tokens <= limits.TOKENS_PER_BLOCK_MAX:
            raise BadKeyError(f"block_tokens is {self.block_tokens}")

    def canonical(self) -> bytes:
        """The one byte form: label, u8 dtype, 3 zeros, u32 tokens per block, tag."""
        return _HOST_SEALED_LABEL + _HOST_SEALED.pack(self.dtype, self.block_tokens, self.tag)

    @classmethod
    def parse(cls, raw: bytes) -> HostSealedNamespace:
        """Decode `canonical()`. Raises: BadKeyError."""
        size = len(_HOST_SEALED_LABEL)
        if len(raw) != size + _HOST_SEALED.size or not raw.startswith(_HOST_SEALED_LABEL):
            raise BadKeyError("not a host-sealed namespace of version 1")
        dtype, block_tokens, tag = _HOST_SEALED.unpack_from(raw, size)
        parsed = cls(tag, dtype, block_tokens)
        if parsed.canonical() != raw:
            raise BadKeyError("host-sealed namespace is not in canonical form")
        return parsed


def parse_namespace(raw: bytes) -> NamespaceDescriptor | HostSealedNamespace:
    """What OPEN_NAMESPACE carries, of either kind. Raises: BadKeyError."""
    if raw.startswith(_HOST_SEALED_LABEL):
        return HostSealedNamespace.parse(raw)
    return NamespaceDescriptor.parse(raw)


def host_sealed_namespace(
    naming_secret: bytes, descriptor: NamespaceDescriptor, dtype: int
) -> tuple[HostSealedNamespace, bytes]:
    """A descriptor as the daemon may know it, and the 32-byte secret that masks its engine keys.

    `naming_secret` is the 32 bytes of the tenant's key file; both results are keyed BLAKE2b-256.
    """
    canonical = descriptor.canonical()

    def keyed(person: bytes) -> bytes:
        found = hashlib.blake2b(canonical, digest_size=32, key=naming_secret, person=person)
        return found.digest()

    namespace = HostSealedNamespace(keyed(b"entresol-hsns"), dtype, descriptor.block_tokens)
    return namespace, keyed(b"entresol-hssec")


def masked_engine_key(secret: bytes, engine_key: EngineKey) -> EngineKey:
    """32 bytes that stand for an engine key towards the daemon: keyed BLAKE2b-256 (RFC 7693).

    `secret` is the second result of `host_sealed_namespace`. An engine key is a hash of the prompt;
    this one cannot be computed from the prompt.
    """
    raw = hashlib.blake2b(engine_key, digest_size=32, key=secret, person=b"entresol-hskey").digest()
    return EngineKey(raw)


def namespace_id(tenant_secret: bytes, canonical: bytes) -> NamespaceId:
    """16-byte id of a namespace: keyed BLAKE2b-128, so it says nothing about a guessable salt.

    `tenant_secret` is the tenant's 32-byte naming secret; it never leaves the daemon.
    """
    return NamespaceId(
        hashlib.blake2b(
            canonical, digest_size=16, key=tenant_secret, person=b"entresol-nsid"
        ).digest()
    )


def namespace_secret(tenant_secret: bytes, canonical: bytes) -> bytes:
    """32-byte key under which the host names blocks of this namespace."""
    return hashlib.blake2b(
        canonical, digest_size=NAMESPACE_SECRET_BYTES, key=tenant_secret, person=b"entresol-nssec"
    ).digest()


def wire_key(secret: bytes, engine_key: EngineKey) -> WireKey:
    """16-byte name of a block: keyed BLAKE2b-128 over the whole engine key (RFC 7693).

    `secret` is `namespace_secret`. Computed on the host; the daemon checks it when a block is put.
    """
    return WireKey(
        hashlib.blake2b(engine_key, digest_size=16, key=secret, person=b"entresol-block").digest()
    )


def engine_key_digest(engine_key: bytes) -> bytes:
    """32 bytes that stand for the whole engine key: BLAKE2b-256 (RFC 7693).

    What the daemon found in the header of a block it opened; the host compares it with its own.
    """
    return hashlib.blake2b(engine_key, digest_size=32, person=b"entresol-engkey").digest()


def placement_hash(descriptor_digest: bytes, engine_key: EngineKey, shard: bytes) -> int:
    """64-bit rendezvous score of a shard for a block; the highest score owns the block."""
    raw = hashlib.blake2b(
        engine_key + shard, digest_size=8, key=descriptor_digest, person=b"entresol-place"
    ).digest()
    return int.from_bytes(raw, "little")


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are kept everywhere: 4 bytes little-endian each, a ninth of what a tuple
    of them takes. Raises: struct.error outside 0..2^32-1."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_token_ids(token_ids_u32le: bytes) -> tuple[int, ...]:
    """Inverse of `pack_token_ids`."""
    return struct.unpack(f"<{len(token_ids_u32le) // 4}I", token_ids_u32le)


def short(raw: bytes) -> str:
    """The form of an id that logs may show: its first four bytes in hex."""
    return raw[:4].hex()
