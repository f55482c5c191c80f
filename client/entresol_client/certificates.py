"""Our own certificate: taken over when it was replaced, and judged when a shard hangs up on us.

In TLS 1.3 a server refuses a client's certificate after the handshake and without a word, so that
only our side of it can be looked at.

Invariant: files that cannot be used change nothing: the certificate before them stays in use. So
it does when they are another tenant's, whose blocks are none of the caller's.
"""

from __future__ import annotations

import datetime
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

from entresol_client.config import TlsFiles
from entresol_proto.identity import IdentityError, load_certificate, tenant_from_cert

log = logging.getLogger("entresol.client")

RENEW = (
    "issue a new one: `entresold certify TENANT FOLDER --renew` where `certify` made it; "
    "`entresold --dev` does so at its next start"
)


def dates_problem(raw: bytes) -> tuple[str, str] | None:
    """(what is wrong, what to do) where a certificate does not hold now. Raises: IdentityError."""
    certificate = load_certificate(raw)
    now = datetime.datetime.now(datetime.UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < first:
        return (
            f"is valid only from {first:%Y-%m-%d %H:%M} UTC on",
            "check the clock of this host, and of the one that issued it",
        )
    if now > last:
        return f"expired on {last:%Y-%m-%d %H:%M} UTC", RENEW
    return None


def own_problem(files: TlsFiles) -> tuple[str, str] | None:
    """(what is wrong with our certificate, what to do), as far as this host can tell."""
    try:
        raw = files.cert.read_bytes()
    except OSError as error:
        return f"our certificate {files.cert} cannot be read: {error.strerror}", ""
    return _problem_of(raw, files)


def _problem_of(raw: bytes, files: TlsFiles) -> tuple[str, str] | None:
    """As `own_problem`, of what was read."""
    try:
        tenant_from_cert(raw, files.trust_domain)
        found = dates_problem(raw)
    except IdentityError as error:
        return f"our certificate {files.cert}: {Exception.__str__(error)}", error.hint
    return None if found is None else (f"our certificate {files.cert} {found[0]}", found[1])


class OwnTls:
    """The TLS context of new sessions: a certificate ends long before an engine does."""

    def __init__(self, files: TlsFiles, make: Callable[[Path, Path, Path], ssl.SSLContext]) -> None:
        """`make` reads certificate, key and CAs. Raises: IdentityError."""
        self._files, self._make = files, make
        self._stamps = self._look()
        self._context, self._cert = self._read()
        self.refused = ""  # why the files as they are were not taken over

    def context(self) -> ssl.SSLContext:
        """Of the files as they are, or were while they could be used last."""
        stamps = self._look()
        if stamps != self._stamps:
            try:
                context, cert = self._read()
                self._judge(cert)
                if self._look() != stamps:
                    raise IdentityError("the files changed while they were read")
            except IdentityError as error:  # as between the writing of one and of the next
                if str(error) != self.refused:
                    self.refused = str(error)
                    log.warning("event=tls_reload_failed kept=old reason=%r", self.refused)
                return self._context
            self._context, self._cert, self._stamps = context, cert, stamps
            log.info("event=tls_reloaded cert=%s", self._files.cert)
        self.refused = ""
        return self._context

    def _read(self) -> tuple[ssl.SSLContext, bytes]:
        """The context, and the certificate in it. Raises: IdentityError."""
        files = self._files
        context = self._make(files.cert, files.key, files.ca)
        try:
            return context, files.cert.read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read {str(files.cert)!r}: {error.strerror}") from None

    def _judge(self, cert: bytes) -> None:
        """Raises: IdentityError when it must not take the place of the one in use."""
        ours, theirs = self._tenant(self._cert), self._tenant(cert)
        if ours and theirs and ours != theirs:
            raise IdentityError(
                f"the certificate {self._files.cert} is tenant {theirs}'s now, and this client "
                f"is tenant {ours}'s",
                hint="put back one of its own; to be the other, start this process again",
            )
        problem = _problem_of(cert, self._files)
        if problem is not None and _problem_of(self._cert, self._files) is None:
            raise IdentityError(problem[0], hint=problem[1])

    def _tenant(self, cert: bytes) -> str:
        """Whose it is; empty where shards would refuse it."""
        try:
            return tenant_from_cert(cert, self._files.trust_domain)
        except IdentityError:
            return ""

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Another inode, size or time, another content; None of what is not there."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self._files.cert, self._files.key, self._files.ca):
            try:
                info = os.stat(path)
                found.append((info.st_ino, info.st_size, info.st_mtime_ns))
            except OSError:
                found.append(None)
        return found
