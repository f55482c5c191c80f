"""The daemon's TLS: who connects, and new certificates without a restart.

Invariant: every handshake is judged by the newest certificate, key and CA bundle that loaded
cleanly. Sessions are never resumed (no tickets), because resumption would skip that judgement; a
broken new file changes nothing but a counter and one log line.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from entresol_proto.identity import (
    ROLE_SHARD,
    ROLE_TENANT,
    IdentityError,
    SpiffeId,
    check_server_identity,
    check_trust_domain,
    client_ssl_context,
    load_certificate,
    load_into_context,
    parse_spiffe_id,
    shard_uri,
    spiffe_id_from_cert,
    tenant_from_cert,
    tenant_uri,
)

__all__ = [
    "ROLE_SHARD",
    "ROLE_TENANT",
    "IdentityError",
    "PemBundle",
    "ReloadingServerContext",
    "SpiffeId",
    "check_server_identity",
    "check_trust_domain",
    "client_ssl_context",
    "first_certificate",
    "parse_spiffe_id",
    "server_ssl_context",
    "shard_uri",
    "spiffe_id_from_cert",
    "tenant_from_cert",
    "tenant_uri",
]

log = logging.getLogger("entresol.identity")

RELOAD_INTERVAL_NS_DEFAULT = 30_000_000_000

_Signature = tuple[tuple[int, int, int, int], ...]


def server_ssl_context(cert: str | Path, key: str | Path, ca: str | Path) -> ssl.SSLContext:
    """TLS for the daemon's side: TLS 1.3, a client certificate signed under `ca` is required.

    Raises: IdentityError naming the file that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_into_context(context, cert, key, ca)
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return context


@dataclass(frozen=True, slots=True)
class PemBundle:
    """One consistent set of files, for servers that take bytes (gRPC's dynamic credentials)."""

    generation: int  # counts successful loads, from 1
    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes = b""


class ReloadingServerContext:
    """A server context that follows its files.

    Pass `context` to the server once and for all. At each handshake, at most every `interval_ns`,
    the three files are looked at (inode, size, times of content and of owner or mode); when one
    changed, a new context is built and serves this and all later handshakes. Established sessions
    keep the identity they were accepted with, which is why sessions have a maximum age.

    Attributes:
        reloads: times a changed set of files was taken over.
        failures: times a changed set of files could not be used.
        stale: what lies there now cannot be used; an older set serves.
    """

    def __init__(
        self,
        cert: str | Path,
        key: str | Path,
        ca: str | Path,
        *,
        interval_ns: int = RELOAD_INTERVAL_NS_DEFAULT,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises: IdentityError when the files cannot be used now."""
        self._paths = (Path(cert), Path(key), Path(ca))
        self._interval_ns = interval_ns
        self._now_ns = now_ns
        self.reloads = 0
        self.failures = 0
        self.stale = False
        self._signature = self._stat()
        self._active, self._bundle = self._load(generation=1)
        self._not_after_s = _not_after_s(self._bundle.cert)
        self._checked_ns = now_ns()
        # The context that servers hold is a door only: each handshake is moved to the active one.
        self.context = server_ssl_context(*self._paths)
        self.context.sni_callback = self._on_client_hello

    def _stat(self) -> _Signature | None:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError:
            return None
        return tuple(
            (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) for info in found
        )

    def _load(self, generation: int) -> tuple[ssl.SSLContext, PemBundle]:
        context = server_ssl_context(*self._paths)
        try:
            cert, key, ca = (path.read_bytes() for path in self._paths)
        except OSError as error:
            raise IdentityError(f"cannot read a TLS file: {error}") from None
        return context, PemBundle(generation, cert, key, ca)

    def check(self, *, force: bool = False) -> bool:
        """Look at the files if it is time to; True when a new set was taken over.

        Small synchronous file reads; never raises. `force` ignores the interval (SIGHUP), and
        tries a set again that could not be used.
        """
        now_ns = self._now_ns()
        if not force and now_ns - self._checked_ns < self._interval_ns:
            return False
        self._checked_ns = now_ns
        signature = self._stat()
        if signature == self._signature and not (force and self.stale):
            return False
        self._signature = signature  # a set that failed is tried again when it changes, or by HUP
        try:
            context, bundle = self._load(self._bundle.generation + 1)
            not_after_s = _not_after_s(bundle.cert)
            if self._stat() != signature:
                raise IdentityError("the files changed while they were read")
        except IdentityError as error:
            if self._stat() != signature:
                self._signature = None
            self.failures += 1
            self.stale = True
            log.warning("event=tls_reload_failed kept=old reason=%r", str(error))
            return False
        self._active, self._bundle, self._not_after_s = context, bundle, not_after_s
        self.stale = False
        self.reloads += 1
        log.info("event=tls_reloaded generation=%d", bundle.generation)
        return True

    def not_after_s(self) -> float:
        """When the certificate in force ends, in seconds since 1970; looks at the files first, so
        that a daemon that nobody connects to tells of new ones."""
        self.check()
        return self._not_after_s

    def bundle(self) -> PemBundle:
        """The files now in force, after a look at them; for gRPC's certificate fetcher."""
        self.check()
        return self._bundle

    def _on_client_hello(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext
    ) -> None:
        self.check()
        connection.context = self._active


def first_certificate(pem: bytes) -> bytes:
    """The chain's first certificate, as PEM. Text of any encoding may stand before it."""
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    return begin + pem.partition(begin)[2].partition(end)[0] + end


def _not_after_s(pem: bytes) -> float:
    """The end of the chain's first certificate. Raises: IdentityError."""
    return load_certificate(first_certificate(pem)).not_valid_after_utc.timestamp()
