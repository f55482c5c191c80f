"""What keyring.json holds, as frozen records and as bytes.

Invariant: `decode(encode(state)) == state`, and `decode` accepts nothing that `encode` could not
have written: a torn, rotten or edited file fails its checksum or its shape and is refused whole.
The checksum is against accidents. Against somebody who can write the folder, each wrapped key is
bound to its tenant and version by the KEK's authentication (`wrap_aad`).

Layout (JSON, version 1): `{"checksum", "format", "version", "body"}`; the checksum is BLAKE2b-256
of the body in canonical form (sorted keys, no spaces, ASCII). Bytes are lower-case hexadecimal.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from entresol_daemon.keys.receipts import RECEIPT_FORMAT, Receipt, canonical
from entresol_proto.ids import BadKeyError, TenantName, check_tenant_name
from entresol_proto.status import KeyringError, Status

KEYRING_FORMAT = "entresol-keyring"
KEYRING_VERSION = 1
STREAM_BYTES = 16
SECRET_BYTES = 32
FINGERPRINT_BYTES = 8
WRAPPED_STORED_BYTES_MAX = 1024
_U63 = 2**63

KIND_NAMING = 1
KIND_DEK = 2
KIND_RECEIPT = 3


class DamagedError(KeyringError):
    """The bytes are torn, rotten or edited."""

    status = Status.CORRUPT


class StrangeError(DamagedError):
    """Whole by its checksum, and yet nothing that this daemon would write: not an accident."""


class UnknownVersionError(KeyringError):
    """The file was written by another version of the daemon."""

    status = Status.UNSUPPORTED


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What a tenant may use. 0 means no number of its own; `weight` is its fair share."""

    flash_bytes: int = 0
    dram_bytes: int = 0
    weight: int = 1
    index_blocks: int = 0
    get_bytes: int = 0  # leased to its hosts or being staged for them
    put_bytes: int = 0  # reserved and not yet on flash
    sessions: int = 0
    leases: int = 0
    watchers: int = 0  # consumers of events

    def __post_init__(self) -> None:
        for name in self.__slots__:
            low = 1 if name == "weight" else 0
            value = getattr(self, name)
            if type(value) is not int or not low <= value < _U63:
                raise KeyringError(
                    f"quota {name} is {value!r}, not a whole number from {low}",
                    status=Status.BAD_REQUEST,
                )


# Written only where they are set, as by a daemon that did not know them.
_QUOTA_ADDED = ("index_blocks", "get_bytes", "put_bytes", "sessions", "leases", "watchers")


@dataclass(frozen=True, slots=True)
class StoredDek:
    """One version of a tenant's data-encryption key, wrapped."""

    version: int
    created_unix_s: int
    fingerprint: bytes  # 8 bytes, one-way; for listings, metrics and receipts
    wrapped: bytes = field(repr=False)
    sealed_blocks: int = 0  # at most so many were sealed under it; counted on in steps


@dataclass(frozen=True, slots=True)
class StoredTenant:
    """One tenant as kept on disk; nothing in it is secret without the KEK."""

    name: TenantName
    stream: bytes  # 16 random bytes, the tenant's name towards the flash engine
    created_unix_s: int
    quota: TenantQuota
    naming: bytes = field(repr=False)  # wrapped naming secret
    deks: tuple[StoredDek, ...] = ()  # ascending by version
    active: int = 1


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    """A receipt as it is in the file: its text takes half the memory of the parsed form."""

    tenant: str
    text: bytes  # canonical

    @classmethod
    def of(cls, receipt: Receipt) -> StoredReceipt:
        """As it will be written."""
        return cls(receipt["tenant"], canonical(receipt))

    def parsed(self) -> Receipt:
        """A new copy."""
        return cast(Receipt, json.loads(self.text))


@dataclass(frozen=True, slots=True)
class State:
    """The whole keyring. Replaced, never changed."""

    generation: int = 0
    kek_id: bytes = b""  # empty until the keyring was first opened with a KEK
    receipt_wrapped: bytes = field(default=b"", repr=False)
    receipt_public: bytes = b""
    receipts_issued: int = 0
    tenants: Mapping[str, StoredTenant] = field(default_factory=dict)
    erased: tuple[StoredReceipt, ...] = ()


def wrap_aad(kind: int, name: str, stream: bytes, version: int) -> bytes:
    """What a wrapped key is bound to: `label, u8 kind, u16 length, name, stream, u32 version`."""
    raw = name.encode()
    return (
        b"entresol/v1/wrap"
        + struct.pack("<BH", kind, len(raw))
        + raw
        + stream
        + struct.pack("<I", version)
    )


def dek_fingerprint(dek: bytes) -> bytes:
    """8 bytes that name a DEK; a one-way function of a random 256-bit key."""
    return hashlib.blake2b(
        b"", digest_size=FINGERPRINT_BYTES, key=dek, person=b"entresol-dekfp"
    ).digest()


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def envelope(format_name: str, version: int, body: Any) -> bytes:
    """Wrap a body with format, version and checksum; ends in a newline."""
    return _wrapped(format_name, version, canonical_json(body))


def _wrapped(format_name: str, version: int, raw: bytes) -> bytes:
    checksum = hashlib.blake2b(raw, digest_size=32).hexdigest()
    head = {"checksum": checksum, "format": format_name, "version": version}
    return canonical_json(head)[:-1] + b',"body":' + raw + b"}\n"


def open_envelope(raw: bytes, format_name: str, version: int) -> dict[str, Any]:
    """The body inside an envelope.

    Raises: UnknownVersionError for another version, DamagedError for anything else.
    """
    try:
        outer = json.loads(raw)
    except (ValueError, RecursionError):
        raise DamagedError("not complete JSON") from None
    if not isinstance(outer, dict) or outer.get("format") != format_name:
        raise DamagedError(f"not a file of format {format_name}")
    found = outer.get("version")
    if found != version and type(found) is int:
        raise UnknownVersionError(
            f"format {format_name} version {found}, this daemon knows version {version}",
            hint="run the daemon version that wrote it",
        )
    body = outer.get("body")
    if not isinstance(body, dict):
        raise DamagedError("no body")
    digest = hashlib.blake2b(canonical_json(body), digest_size=32).hexdigest()
    if found != version or outer.get("checksum") != digest:
        raise DamagedError("the checksum does not match")
    return body


def encode(state: State) -> bytes:
    """The bytes of keyring.json."""
    tenants = [
        {
            "name": tenant.name,
            "stream": tenant.stream.hex(),
            "created_unix_s": tenant.created_unix_s,
            "flash_bytes": tenant.quota.flash_bytes,
            "dram_bytes": tenant.quota.dram_bytes,
            "weight": tenant.quota.weight,
            **{n: found for n in _QUOTA_ADDED if (found := getattr(tenant.quota, n))},
            "naming": tenant.naming.hex(),
            "active": tenant.active,
            "deks": [
                {
                    "version": dek.version,
                    "created_unix_s": dek.created_unix_s,
                    "fingerprint": dek.fingerprint.hex(),
                    "wrapped": dek.wrapped.hex(),
                    # Left out at 0, as by a daemon that did not count.
                    **({"sealed_blocks": dek.sealed_blocks} if dek.sealed_blocks else {}),
                }
                for dek in tenant.deks
            ],
        }
        for _, tenant in sorted(state.tenants.items())
    ]
    body = {
        "generation": state.generation,
        "kek_id": state.kek_id.hex(),
        "receipt_wrapped": state.receipt_wrapped.hex(),
        "receipt_public": state.receipt_public.hex(),
        "receipts_issued": state.receipts_issued,
        "tenants": tenants,
    }
    # "erased" is the first key in order, and the receipts are in the form of the file already.
    erased = b",".join(receipt.text for receipt in state.erased)
    raw = b'{"erased":[' + erased + b"]," + canonical_json(body)[1:]
    return _wrapped(KEYRING_FORMAT, KEYRING_VERSION, raw)


def decode(raw: bytes) -> State:
    """Read keyring.json. Raises: UnknownVersionError, DamagedError."""
    body = open_envelope(raw, KEYRING_FORMAT, KEYRING_VERSION)
    try:
        tenants: dict[str, StoredTenant] = {}
        for tenant in map(_tenant, _items(body, "tenants")):
            tenants[tenant.name] = tenant
        state = State(
            generation=_whole(body, "generation"),
            kek_id=_raw(body, "kek_id", 0, 8),
            receipt_wrapped=_raw(body, "receipt_wrapped", 0, WRAPPED_STORED_BYTES_MAX),
            receipt_public=_raw(body, "receipt_public", 0, 32),
            receipts_issued=_whole(body, "receipts_issued"),
            tenants=tenants,
            erased=tuple(map(StoredReceipt.of, map(_receipt, _items(body, "erased")))),
        )
    except (KeyError, TypeError, ValueError, AttributeError, BadKeyError, KeyringError) as error:
        raise StrangeError(f"a field is missing or impossible: {error}") from None
    if encode(state) != raw:
        raise StrangeError("not in the form this daemon writes")
    return state


def _tenant(item: dict[str, Any]) -> StoredTenant:
    deks = tuple(
        StoredDek(
            version=_whole(dek, "version", 1),
            created_unix_s=_whole(dek, "created_unix_s"),
            fingerprint=_raw(dek, "fingerprint", FINGERPRINT_BYTES, FINGERPRINT_BYTES),
            wrapped=_raw(dek, "wrapped", 1, WRAPPED_STORED_BYTES_MAX),
            sealed_blocks=_whole(dek, "sealed_blocks") if "sealed_blocks" in dek else 0,
        )
        for dek in _items(item, "deks")
    )
    versions = [dek.version for dek in deks]
    active = _whole(item, "active", 1)
    if versions != sorted(set(versions)) or active not in versions or versions[-1] >= 2**32:
        raise ValueError("key versions are out of order")
    return StoredTenant(
        name=check_tenant_name(item["name"]),
        stream=_raw(item, "stream", STREAM_BYTES, STREAM_BYTES),
        created_unix_s=_whole(item, "created_unix_s"),
        quota=TenantQuota(
            item["flash_bytes"],
            item["dram_bytes"],
            item["weight"],
            *(_whole(item, name) if name in item else 0 for name in _QUOTA_ADDED),
        ),
        naming=_raw(item, "naming", 1, WRAPPED_STORED_BYTES_MAX),
        deks=deks,
        active=active,
    )


def _receipt(item: dict[str, Any]) -> Receipt:
    if item["format"] != RECEIPT_FORMAT or set(item) != set(Receipt.__annotations__):
        raise ValueError("not a receipt")
    check_tenant_name(item["tenant"])
    return cast(Receipt, item)


def _items(table: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = table[name]
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"{name} is not a list of records")
    return found


def _whole(table: dict[str, Any], name: str, low: int = 0) -> int:
    value = table[name]
    if type(value) is not int or not low <= value < _U63:
        raise ValueError(f"{name} is not a whole number")
    return value


def _raw(table: dict[str, Any], name: str, low: int, high: int) -> bytes:
    value = bytes.fromhex(table[name])
    if not low <= len(value) <= high:
        raise ValueError(f"{name} is {len(value)} bytes")
    return value
