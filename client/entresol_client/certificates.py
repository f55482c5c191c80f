"""What is wrong with our own certificate, for when a shard hangs up on us.

Invariant: reads one file and judges it. In TLS 1.3 a server refuses a client's certificate after
the handshake and without a word, so that only our side of it can be looked at.
"""

from __future__ import annotations

import datetime

from entresol_client.config import TlsFiles
from entresol_proto.identity import IdentityError, load_certificate, tenant_from_cert

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
        tenant_from_cert(raw, files.trust_domain)
        found = dates_problem(raw)
    except OSError as error:
        return f"our certificate {files.cert} cannot be read: {error.strerror}", ""
    except IdentityError as error:
        return f"our certificate {files.cert}: {Exception.__str__(error)}", error.hint
    return None if found is None else (f"our certificate {files.cert} {found[0]}", found[1])
