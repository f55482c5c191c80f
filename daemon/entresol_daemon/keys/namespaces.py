"""Which namespace belongs to whom, kept across restarts: one small file per tenant.

Invariant: a namespace id maps to at most one tenant; descriptors (model names and cache salts are
the tenant's data) are on disk only sealed under a key derived from its naming secret. Losing such a
file loses attribution until the tenant opens the namespace again, never a block: so a damaged file
counts as empty, and there is no second copy that an erasure would have to chase.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from entresol_daemon.keys import files
from entresol_daemon.keys.state import DamagedError, UnknownVersionError, envelope, open_envelope
from entresol_proto import limits
from entresol_proto.ids import NamespaceId, TenantName
from entresol_proto.status import KeyringError, QuotaError, Status

log = logging.getLogger("entresol.keys")

NAMESPACES_FORMAT = "entresol-namespaces"
NAMESPACES_VERSION = 1
_NONCE_BYTES = 12
_SEALED_BYTES_MAX = limits.DESCRIPTOR_BYTES_MAX + _NONCE_BYTES + 16


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A remembered namespace."""

    namespace: NamespaceId
    tenant: TenantName
    sealed: bytes = field(repr=False)


def _cipher(naming_secret: bytes) -> AESGCM:
    # A key of its own from the naming secret; the person tells it apart from the ids' derivations.
    key = hashlib.blake2b(b"", digest_size=32, key=naming_secret, person=b"entresol-nsreg").digest()
    return AESGCM(key)


def seal_descriptor(
    naming_secret: bytes, namespace: bytes, canonical: bytes, nonce: bytes
) -> bytes:
    """A descriptor sealed for the disk, bound to its id: `nonce ‖ ciphertext ‖ tag`.

    `nonce` is 12 random bytes.
    """
    return nonce + _cipher(naming_secret).encrypt(nonce, canonical, namespace)


def open_descriptor(naming_secret: bytes, namespace: bytes, sealed: bytes) -> bytes:
    """The canonical descriptor. Raises: KeyringError (CORRUPT)."""
    try:
        return _cipher(naming_secret).decrypt(
            sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], namespace
        )
    except (InvalidTag, ValueError):
        raise KeyringError("a namespace record does not open", status=Status.CORRUPT) from None


class NamespaceRegistry:
    """The records of all tenants. Writers are serialised by the keyring's lock; readers need none,
    because every table they iterate is replaced, not changed.

    Attributes:
        folder: where the files are; made with the first one.
        damaged_files: files that were unreadable at `load` and taken as empty.
    """

    def __init__(
        self,
        calls: files.OsCalls,
        folder: Path,
        per_tenant_max: int,
        random: Callable[[int], bytes],
    ) -> None:
        self._calls = calls
        self.folder = folder
        self._per_tenant_max = per_tenant_max
        self._random = random
        self._owner: dict[bytes, NamespaceRecord] = {}
        self._of: dict[bytes, dict[bytes, NamespaceRecord]] = {}  # by stream
        self._found: set[bytes] = set()  # by `load`
        self.damaged_files = 0

    def load(self, streams: Mapping[bytes, TenantName]) -> None:
        """Read the files of these tenants; destroy files of streams that are not (or no longer)
        anybody's, which a crash during an erasure can leave.

        Raises: UnknownVersionError when one was written by another version; OSError."""
        if self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                if path.name not in {f"{stream.hex()}.json" for stream in streams}:
                    files.destroy(self._calls, path)
        for stream, tenant in streams.items():
            self._of[stream] = self._load_one(stream, tenant)
            self._owner.update(self._of[stream])
        self._found = set(self._owner)

    def _load_one(self, stream: bytes, tenant: TenantName) -> dict[bytes, NamespaceRecord]:
        path, records = self._path(stream), dict[bytes, NamespaceRecord]()
        try:
            raw = files.read(self._calls, path)
            if raw is None:
                return records
            body = open_envelope(raw, NAMESPACES_FORMAT, NAMESPACES_VERSION)
            for namespace_hex, sealed_hex in body["namespaces"]:
                namespace = NamespaceId(bytes.fromhex(namespace_hex))
                sealed = bytes.fromhex(sealed_hex)
                if len(namespace) != limits.NAMESPACE_ID_BYTES or len(sealed) > _SEALED_BYTES_MAX:
                    raise DamagedError("a record has an impossible length")
                if namespace in self._owner:
                    raise DamagedError("a namespace belongs to two tenants")
                records[namespace] = NamespaceRecord(namespace, tenant, sealed)
        except UnknownVersionError as error:  # taken as empty it would be written over
            raise UnknownVersionError(f"{path}: {error}") from None
        except (OSError, DamagedError, KeyError, TypeError, ValueError) as error:
            self.damaged_files += 1
            log.warning("event=namespaces_dropped tenant=%s reason=%r", tenant, str(error))
            return {}
        return records

    def _path(self, stream: bytes) -> Path:
        return self.folder / f"{stream.hex()}.json"

    def owner(self, namespace: bytes) -> TenantName | None:
        """The tenant of a namespace, None when it is not remembered."""
        record = self._owner.get(namespace)
        return record.tenant if record else None

    def record(self, namespace: bytes) -> NamespaceRecord | None:
        """What is remembered about a namespace."""
        return self._owner.get(namespace)

    def was_found(self, namespace: bytes) -> bool:
        """Whether its record is one that `load` found."""
        return namespace in self._found

    def of(self, stream: bytes) -> list[NamespaceId]:
        """The namespaces of a tenant."""
        return [record.namespace for record in self._of.get(stream, {}).values()]

    def remember(
        self,
        stream: bytes,
        tenant: TenantName,
        naming_secret: bytes,
        namespace: NamespaceId,
        canonical: bytes,
    ) -> None:
        """Write a record down, unless it is there. Blocking file operations.

        Raises: QuotaError at the tenant's limit, KeyringError when another tenant holds the id,
            OSError.
        """
        found = self._owner.get(namespace)
        if found is not None:
            if found.tenant != tenant:
                raise KeyringError("a namespace id is taken", status=Status.CONFLICT)
            return
        records = dict(self._of.get(stream, {}))
        if len(records) >= self._per_tenant_max:
            raise QuotaError(
                f"tenant {tenant} has {self._per_tenant_max} namespaces already",
                hint="raise [limits] namespaces_per_tenant_max, or forget all blocks of some",
            )
        sealed = seal_descriptor(naming_secret, namespace, canonical, self._random(_NONCE_BYTES))
        records[namespace] = NamespaceRecord(namespace, tenant, sealed)
        self._save(stream, records)
        self._of[stream] = records
        self._owner[namespace] = records[namespace]

    def forget(self, stream: bytes, namespaces: Iterable[bytes]) -> int:
        """Drop records that no block needs any more; how many there were.

        Raises: OSError; in memory they are gone even then, so that who needs one writes it.
        """
        doomed = set(namespaces)
        old = self._of.get(stream, {})
        kept = {key: record for key, record in old.items() if key not in doomed}
        if len(kept) == len(old):
            return 0
        self._of[stream] = kept
        for key in old.keys() - kept.keys():
            self._owner.pop(key, None)
            self._found.discard(key)
        self._save(stream, kept)
        return len(old) - len(kept)

    def drop(self, stream: bytes) -> None:
        """Destroy everything about a tenant. Raises: OSError; memory is clean even then."""
        for key in self._of.pop(stream, {}):
            self._owner.pop(key, None)
            self._found.discard(key)
        if self.folder.is_dir():
            files.destroy(self._calls, files.temporary_of(self._path(stream)))
            files.destroy(self._calls, self._path(stream))

    def _save(self, stream: bytes, records: Mapping[bytes, NamespaceRecord]) -> None:
        if not self.folder.is_dir():
            os.mkdir(self.folder, 0o700)
            os.chmod(self.folder, 0o700)  # whatever the umask is: another thread may have set it
            files.sync_folder(self._calls, self.folder.parent)
        pairs = [[record.namespace.hex(), record.sealed.hex()] for record in records.values()]
        body = {"namespaces": pairs}
        files.replace(
            self._calls,
            self._path(stream),
            envelope(NAMESPACES_FORMAT, NAMESPACES_VERSION, body),
        )
