"""The daemon's TLS: who connects, and new certificates without a restart.

Invariant: every handshake is judged by the newest certificate, key and CA bundle that loaded
cleanly. Sessions are never resumed (no tickets), because resumption would skip that judgement; a
broken new file, a certificate that no host would accept (of somebody else, or not valid at this
time), and CAs of which none is valid, change nothing but a counter and one log line.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
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
    "Dates",
    "IdentityError",
    "PemBundle",
    "ReloadingServerContext",
    "SpiffeId",
    "Validity",
    "check_server_identity",
    "check_trust_domain",
    "client_ssl_context",
    "first_certificate",
    "judge_files",
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


@dataclass(frozen=True, slots=True)
class Validity:
    """From when until when a certificate is valid, in seconds since 1970."""

    not_before_s: float
    not_after_s: float

    def problem(self, now_s: float) -> IdentityError | None:
        """Why no host would accept it at that time; None when nothing is wrong with it."""
        if now_s < self.not_before_s:
            return IdentityError(
                f"the certificate is valid only from {_minute(self.not_before_s)} on",
                hint="check the clock of this host (timedatectl), and of the one that issued it",
            )
        if now_s > self.not_after_s:
            return IdentityError(
                f"the certificate expired on {_minute(self.not_after_s)}",
                hint="issue a new one (`entresold --config FILE renew`, where `prepare` made it), "
                "or check the clock of this host (timedatectl)",
            )
        return None


@dataclass(frozen=True, slots=True)
class Dates:
    """When a set of files lets hosts connect: while its certificate is valid, and one at least of
    the CAs that theirs are verified against (none: they tell no dates)."""

    certificate: Validity
    cas: tuple[Validity, ...]

    @property
    def not_after_s(self) -> float:
        """When the certificate ends, or the last CA if that is sooner."""
        last_ca_s = max((ca.not_after_s for ca in self.cas), default=math.inf)
        return min(self.certificate.not_after_s, last_ca_s)

    def begins_s(self, now_s: float) -> float | None:
        """When it can be used next, if it cannot be now; None for never."""
        begins = [one.not_before_s for one in (self.certificate, *self.cas)]
        usable = [at for at in begins if at > now_s and self.problem(at) is None]
        return min(usable, default=None)

    def problem(self, now_s: float) -> IdentityError | None:
        """Why no host can connect at that time; None when the dates stand in nobody's way."""
        error = self.certificate.problem(now_s)
        if error is not None or not self.cas:
            return error
        if any(ca.not_before_s <= now_s <= ca.not_after_s for ca in self.cas):
            return None
        later = [ca.not_before_s for ca in self.cas if ca.not_before_s > now_s]
        if later:
            what = f"no CA in [tls] ca is valid before {_minute(min(later))}"
        else:
            which = "the CA" if len(self.cas) == 1 else "the last CA"
            last_s = max(ca.not_after_s for ca in self.cas)
            what = f"{which} in [tls] ca expired on {_minute(last_s)}"
        return IdentityError(
            f"{what}: no host's certificate is accepted",
            hint="put a valid certificate of the CA there, beside the old one if hosts have one "
            "of each, or check the clock of this host (timedatectl)",
        )


def judge_files(context: ssl.SSLContext, pem: bytes, shard: SpiffeId | None) -> Dates:
    """The dates of a chain's first certificate, see `judge_certificate`, and of the CAs that a
    context has loaded. Raises: IdentityError."""
    cas = []
    for ca in context.get_ca_certs():
        with contextlib.suppress(KeyError, ValueError):  # of a form that tells no date
            dates = (str(ca["notBefore"]), str(ca["notAfter"]))
            cas.append(Validity(*map(ssl.cert_time_to_seconds, dates)))
    return Dates(judge_certificate(pem, shard), tuple(cas))


def judge_certificate(pem: bytes, shard: SpiffeId | None) -> Validity:
    """When the chain's first certificate is valid, if it names `shard` (None: whomever it names).

    Raises: IdentityError for one that hosts would not take for that shard's: another role, name or
        trust domain, several names or none, a CA's.
    """
    raw = first_certificate(pem)
    certificate = load_certificate(raw)
    if shard is not None:
        wanted = f"a certificate with the single URI name {shard}"
        try:
            named = spiffe_id_from_cert(raw, shard.trust_domain)
        except IdentityError as error:
            raise IdentityError(
                Exception.__str__(error),
                hint=f"[tls] cert: {wanted}; or correct [tls] trust_domain",
            ) from None
        if named != shard:
            raise IdentityError(
                f"the certificate is of {named.role} {named.name}, not of {shard.role} "
                f"{shard.name}",
                hint=f"[tls] cert: {wanted}; or correct [shard] name",
            )
    return Validity(
        certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    )


class ReloadingServerContext:
    """A server context that follows its files.

    Pass `context` to the server once and for all. At each handshake, at most every `interval_ns`,
    the three files are looked at (inode, size, times of content and of owner or mode); when one
    changed, a new context is built and serves this and all later handshakes. Established sessions
    keep the identity they were accepted with, which is why sessions have a maximum age.

    A certificate that is not valid now takes no valid one's place, nor do CAs of which none is;
    they are tried again when their time begins. At the start, and after what is not valid either,
    they are taken: a clock may be set only later. `problem` tells of it.

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
        shard: SpiffeId | None = None,
        interval_ns: int = RELOAD_INTERVAL_NS_DEFAULT,
        now_ns: Callable[[], int] = time.monotonic_ns,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`shard`: whom the certificate must name. Raises: IdentityError when the files cannot be
        used now, for another reason than dates."""
        self._paths = (Path(cert), Path(key), Path(ca))
        self._shard = shard
        self._interval_ns = interval_ns
        self._now_ns = now_ns
        self._unix_s = unix_s
        self.reloads = 0
        self.failures = 0
        self.stale = False
        self._again_s: float | None = None  # when the time of a set that lies there begins
        self._signature = self._stat()
        self._active, self._bundle = self._load(generation=1)
        self._dates = judge_files(self._active, self._bundle.cert, shard)
        self._warn_of_dates()
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
        again = (force and self.stale) or self._has_begun()
        if signature == self._signature and not again:
            return False
        self._signature = signature  # a set that failed is tried again when it changes, or by HUP
        self._again_s = None
        try:
            context, bundle = self._load(self._bundle.generation + 1)
            dates = self._judge(context, bundle)
            if self._stat() != signature:
                raise IdentityError("the files changed while they were read")
        except IdentityError as error:
            if self._stat() != signature:
                self._signature = None
            self.failures += 1
            self.stale = True
            reason, hint = Exception.__str__(error), error.hint
            log.warning("event=tls_reload_failed kept=old reason=%r hint=%r", reason, hint)
            return False
        self._active, self._bundle, self._dates = context, bundle, dates
        self.stale = False
        self.reloads += 1
        log.info("event=tls_reloaded generation=%d", bundle.generation)
        self._warn_of_dates()
        return True

    def _has_begun(self) -> bool:
        return self._again_s is not None and self._unix_s() >= self._again_s

    def _judge(self, context: ssl.SSLContext, bundle: PemBundle) -> Dates:
        """Raises: IdentityError when it must not take the place of what is in force."""
        dates, now_s = judge_files(context, bundle.cert, self._shard), self._unix_s()
        error = dates.problem(now_s)
        if error is not None and self._dates.problem(now_s) is None:
            self._again_s = dates.begins_s(now_s)
            raise error
        return dates

    def _warn_of_dates(self) -> None:
        error = self._dates.problem(self._unix_s())
        if error is not None:
            log.error(
                "event=certificate_not_valid effect=hosts_cannot_connect reason=%r hint=%r",
                Exception.__str__(error), error.hint,
            )  # fmt: skip

    def not_after_s(self) -> float:
        """When the certificate in force ends, or the last CA if that is sooner, in seconds since
        1970; looks at the files first, so that a daemon that nobody connects to tells of new ones.
        """
        self.check()
        return self._dates.not_after_s

    def problem(self) -> str:
        """Why no host can connect with the files in force at this time; empty when that is not so.
        Looks at the files first."""
        self.check()
        error = self._dates.problem(self._unix_s())
        return "" if error is None else Exception.__str__(error)

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


def _minute(moment_s: float) -> str:
    """As people read it; a certificate may end in the year 9999, and no clock is past that."""
    return f"{datetime.datetime.fromtimestamp(moment_s, datetime.UTC):%Y-%m-%d %H:%M} UTC"
