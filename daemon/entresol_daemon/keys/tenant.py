"""A tenant with its keys in memory, and the way between that and the wrapped form.

Invariant: unwrapped keys live only in `Tenant` objects, whose repr does not show them; each wrapped
key is bound to tenant name, stream, kind and version, so none opens in another's place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from entresol_daemon.keys.providers import KekProvider
from entresol_daemon.keys.state import (
    KIND_DEK,
    KIND_NAMING,
    KIND_RECEIPT,
    SECRET_BYTES,
    STREAM_BYTES,
    State,
    StoredDek,
    StoredTenant,
    TenantQuota,
    dek_fingerprint,
    wrap_aad,
)
from entresol_proto.ids import TenantName
from entresol_proto.status import KeyringError, Status

USAGE_FIRST_BLOCKS = 1 << 10  # of a new DEK, counted as sealed before the first one is

_RECEIPT_AAD = wrap_aad(KIND_RECEIPT, "", b"", 0)


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """What anybody in the daemon may know about a tenant; nothing secret."""

    name: TenantName
    stream: bytes  # 16 bytes, opaque to the flash engine
    quota: TenantQuota
    created_unix_s: int
    active_version: int
    fingerprints: dict[int, str]  # DEK version -> fingerprint, hex
    created: dict[int, int]  # DEK version -> Unix seconds


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with its unwrapped keys. Hold it as long as a session needs it, no longer.

    After `Keyring.rotate`, fetch it anew. After `Keyring.erase`, whoever still holds one must drop
    it: the shard ends the tenant's sessions.
    """

    info: TenantInfo
    naming_secret: bytes = field(repr=False)  # 32 bytes
    deks: dict[int, bytes] = field(repr=False)  # version -> 32 bytes

    @property
    def name(self) -> TenantName:
        """Its name, from the certificate."""
        return self.info.name

    @property
    def stream(self) -> bytes:
        """16 bytes: its name towards the flash engine."""
        return self.info.stream

    @property
    def active_version(self) -> int:
        """The DEK version of new blocks."""
        return self.info.active_version

    @property
    def active_dek(self) -> bytes:
        """The 32-byte DEK under which new blocks are sealed."""
        return self.deks[self.info.active_version]

    def dek(self, version: int) -> bytes | None:
        """The DEK of a block's version; None when it was retired, so the block is a miss."""
        return self.deks.get(version)


def info_of(stored: StoredTenant) -> TenantInfo:
    """The part of a stored tenant that is not secret."""
    return TenantInfo(
        name=stored.name,
        stream=stored.stream,
        quota=stored.quota,
        created_unix_s=stored.created_unix_s,
        active_version=stored.active,
        fingerprints={dek.version: dek.fingerprint.hex() for dek in stored.deks},
        created={dek.version: dek.created_unix_s for dek in stored.deks},
    )


def create_tenant(
    kek: KekProvider,
    name: TenantName,
    quota: TenantQuota,
    now_unix_s: int,
    random: Callable[[int], bytes],
) -> tuple[StoredTenant, Tenant]:
    """A new tenant with random stream, naming secret and DEK version 1, in both forms."""
    stream, naming, dek = random(STREAM_BYTES), random(SECRET_BYTES), random(SECRET_BYTES)
    stored = StoredTenant(
        name=name,
        stream=stream,
        created_unix_s=now_unix_s,
        quota=quota,
        naming=kek.wrap(naming, wrap_aad(KIND_NAMING, name, stream, 0)),
        deks=(wrap_dek(kek, name, stream, 1, dek, now_unix_s),),
        active=1,
    )
    return stored, Tenant(info_of(stored), naming, {1: dek})


def wrap_dek(
    kek: KekProvider, name: str, stream: bytes, version: int, dek: bytes, now_unix_s: int
) -> StoredDek:
    """The stored form of a new DEK, with its first use written down ahead."""
    wrapped = kek.wrap(dek, wrap_aad(KIND_DEK, name, stream, version))
    return StoredDek(version, now_unix_s, dek_fingerprint(dek), wrapped, USAGE_FIRST_BLOCKS)


def unwrap_tenant(kek: KekProvider, stored: StoredTenant) -> Tenant:
    """A tenant's keys. Raises: KeyringError (CORRUPT) naming the tenant."""
    name, stream = stored.name, stored.stream
    try:
        naming = kek.unwrap(stored.naming, wrap_aad(KIND_NAMING, name, stream, 0))
        deks = {
            dek.version: kek.unwrap(dek.wrapped, wrap_aad(KIND_DEK, name, stream, dek.version))
            for dek in stored.deks
        }
    except KeyringError as error:
        raise KeyringError(
            f"the keys of tenant {name} do not open: {error}",
            hint="the keyring was edited; restore it, or start locked and erase the tenant",
            status=Status.CORRUPT,
        ) from None
    return Tenant(info_of(stored), naming, deks)


def rewrap_tenant(kek: KekProvider, stored: StoredTenant, tenant: Tenant) -> StoredTenant:
    """The same keys wrapped under another KEK."""
    name, stream = stored.name, stored.stream
    deks = []
    for dek in stored.deks:
        aad = wrap_aad(KIND_DEK, name, stream, dek.version)
        deks.append(replace(dek, wrapped=kek.wrap(tenant.deks[dek.version], aad)))
    naming = kek.wrap(tenant.naming_secret, wrap_aad(KIND_NAMING, name, stream, 0))
    return replace(stored, naming=naming, deks=tuple(deks))


def wrap_receipt_seed(kek: KekProvider, seed: bytes) -> bytes:
    """The stored form of the receipt signing seed."""
    return kek.wrap(seed, _RECEIPT_AAD)


def unwrap_receipt_seed(kek: KekProvider, state: State) -> bytes:
    """The receipt signing seed. Raises: KeyringError."""
    return kek.unwrap(state.receipt_wrapped, _RECEIPT_AAD)
