"""The keyring's namespaces: derived from a tenant's naming secret, remembered across restarts.

Invariant: an id is derived from the tenant's naming secret and nothing a request says can choose
it; what is written down is sealed under that secret.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from entresol_daemon.keys.errors import io_error
from entresol_daemon.keys.namespaces import NamespaceRegistry, open_descriptor
from entresol_daemon.keys.state import StoredTenant
from entresol_daemon.keys.tenant import Tenant
from entresol_proto import ids
from entresol_proto.ids import (
    HostSealedNamespace,
    NamespaceDescriptor,
    NamespaceId,
    TenantName,
    parse_namespace,
)
from entresol_proto.status import KeyringError

log = logging.getLogger("entresol.keys")


class NamespaceNames:
    """The part of `Keyring` that is about namespaces."""

    _namespaces: NamespaceRegistry
    _lock: threading.Lock

    def get(self, name: str) -> Tenant:
        """See `Keyring.get`."""
        raise NotImplementedError

    def _stored(self, name: str) -> StoredTenant:
        raise NotImplementedError

    @property
    def namespace_files_damaged(self) -> int:
        """Namespace files that were unreadable at `open` and taken as empty."""
        return self._namespaces.damaged_files

    def derive_namespace(self, name: str, canonical: bytes) -> tuple[NamespaceId, bytes]:
        """The id and the 32-byte secret of a namespace; memory only, remembers nothing.

        Raises: KeyringError as `get`.
        """
        secret = self.get(name).naming_secret
        return ids.namespace_id(secret, canonical), ids.namespace_secret(secret, canonical)

    def remember_namespace(self, name: str, canonical: bytes) -> tuple[NamespaceId, bytes]:
        """`derive_namespace`, and write down whose it is, so that it is known after a restart.

        Writes only the first time. Raises: KeyringError as `get`; BadKeyError for a descriptor that
            is not canonical; QuotaError at the tenant's limit.
        """
        parse_namespace(canonical)
        with self._lock:
            tenant = self.get(name)
            namespace, secret = self.derive_namespace(name, canonical)
            try:
                self._namespaces.remember(
                    tenant.stream, tenant.name, tenant.naming_secret, namespace, canonical
                )
            except OSError as error:
                raise io_error(self._namespaces.folder, error) from None
            return namespace, secret

    def forget_namespaces(self, name: str, namespaces: Iterable[bytes]) -> int:
        """Drop namespaces without blocks from the registry; how many. Raises: KeyringError."""
        with self._lock:
            try:
                return self._namespaces.forget(self._stored(name).stream, namespaces)
            except OSError as error:
                raise io_error(self._namespaces.folder, error) from None

    def _drop_namespaces(self, name: str, stream: bytes) -> None:
        """Of a tenant whose keys were destroyed."""
        try:
            self._namespaces.drop(stream)
        except OSError as error:
            # Sealed under a secret that no longer exists; `open` removes the file.
            log.warning("event=namespaces_file_left tenant=%s reason=%s", name, error.strerror)

    def tenant_of(self, namespace: bytes) -> TenantName | None:
        """The tenant a namespace belongs to, None when it is not known; works while locked."""
        return self._namespaces.owner(namespace)

    def was_found(self, namespace: bytes) -> bool:
        """Whether a namespace has been remembered since before `open`."""
        return self._namespaces.was_found(namespace)

    def namespaces_of(self, name: str) -> list[NamespaceId]:
        """The remembered namespaces of a tenant, the oldest first; works while locked.

        Raises: KeyringError.
        """
        return self._namespaces.of(self._stored(name).stream)

    def descriptor_of(self, namespace: bytes) -> NamespaceDescriptor | HostSealedNamespace | None:
        """What a namespace is (model, layout, salt: the tenant's data, never to be logged).

        None when it is not known, or its record does not open. Raises: KeyringError while locked.
        """
        record = self._namespaces.record(namespace)
        if record is None:
            return None
        secret = self.get(record.tenant).naming_secret
        try:
            return parse_namespace(open_descriptor(secret, namespace, record.sealed))
        except (KeyringError, ids.BadKeyError):
            return None
