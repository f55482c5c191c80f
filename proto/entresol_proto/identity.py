"""Who is at the other end: SPIFFE identities in X.509 certificates, and the client's TLS settings.

Invariant: an identity is read from exactly one place, the single URI name of a leaf certificate
that TLS has already verified, and only in the form `spiffe://<trust domain>/<role>/<name>`. No
request field, common name or DNS name ever takes its place, so a tenant's certificate cannot pass
as a shard's, nor one tenant's as another's.

Sources: SPIFFE-ID (characters of trust domain and path, 2048 bytes at most) and X.509-SVID (exactly
one URI name, leaf is no CA), github.com/spiffe/spiffe/tree/main/standards.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from entresol_proto.ids import BadKeyError, TenantName, check_tenant_name
from entresol_proto.status import EntresolError, Status

SPIFFE_ID_BYTES_MAX = 2048
CERTIFICATE_BYTES_MAX = 64 * 1024
ROLE_TENANT = "tenant"
ROLE_SHARD = "shard"

# Everything the X.509 parser is known to raise for a certificate that is not well-formed.
_MALFORMED = (
    ValueError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}")


class IdentityError(EntresolError):
    """A certificate names nobody we may talk to, or cannot be loaded."""

    status = Status.FORBIDDEN


@dataclass(frozen=True, slots=True)
class SpiffeId:
    """A verified peer: what it is (`role`) and which one (`name`), inside one trust domain."""

    trust_domain: str
    role: str
    name: str

    def __str__(self) -> str:
        return f"spiffe://{self.trust_domain}/{self.role}/{self.name}"


def check_trust_domain(trust_domain: str) -> str:
    """Return `trust_domain` if it is usable. Raises: IdentityError (a-z 0-9 . _ - only)."""
    if not _TRUST_DOMAIN.fullmatch(trust_domain):
        raise IdentityError(
            f"trust domain {trust_domain!r} is not allowed",
            hint="use a-z 0-9 . _ - only, without spiffe:// in front",
        )
    return trust_domain


def tenant_uri(trust_domain: str, name: str) -> str:
    """The URI name that a tenant's certificate must carry."""
    return str(SpiffeId(check_trust_domain(trust_domain), ROLE_TENANT, check_tenant_name(name)))


def shard_uri(trust_domain: str, name: str) -> str:
    """The URI name that a daemon's certificate must carry."""
    return str(SpiffeId(check_trust_domain(trust_domain), ROLE_SHARD, check_tenant_name(name)))


def parse_spiffe_id(uri: str, trust_domain: str) -> SpiffeId:
    """Take apart `spiffe://<trust_domain>/<role>/<name>`.

    Compared byte for byte: no case folding, no percent-decoding, no dot segments, no query, because
    every leniency here is a second spelling of somebody's name.

    Raises: IdentityError.
    """
    check_trust_domain(trust_domain)
    if len(uri.encode(errors="replace")) > SPIFFE_ID_BYTES_MAX:
        raise IdentityError(f"the certificate's URI name is over {SPIFFE_ID_BYTES_MAX} bytes")
    prefix = "spiffe://"
    if not uri.startswith(prefix):
        raise IdentityError(
            f"the certificate's URI name {uri!r} is not a SPIFFE id",
            hint=f"issue one for spiffe://{trust_domain}/{ROLE_TENANT}/NAME",
        )
    domain, slash, path = uri[len(prefix) :].partition("/")
    if domain != trust_domain:
        raise IdentityError(
            f"the certificate belongs to trust domain {domain!r}, this side to {trust_domain!r}",
            hint="use a certificate of this trust domain, or set trust_domain (a daemon: of [tls])",
        )
    role, second, name = path.partition("/")
    if not slash or not second or role not in (ROLE_TENANT, ROLE_SHARD):
        raise IdentityError(
            f"the path of SPIFFE id {uri!r} is neither /{ROLE_TENANT}/NAME nor /{ROLE_SHARD}/NAME"
        )
    try:
        check_tenant_name(name)
    except BadKeyError as error:
        raise IdentityError(f"the path of SPIFFE id {uri!r} ends in a bad name: {error}") from None
    return SpiffeId(trust_domain, role, name)


def load_certificate(raw: bytes) -> x509.Certificate:
    """Parse one certificate, DER or PEM (the first of a chain). Raises: IdentityError."""
    if not 0 < len(raw) <= CERTIFICATE_BYTES_MAX:
        raise IdentityError(
            "the peer sent no certificate" if not raw else "the certificate is too long"
        )
    try:
        if raw.lstrip().startswith(b"-----BEGIN"):
            return x509.load_pem_x509_certificate(raw)
        return x509.load_der_x509_certificate(raw)
    except _MALFORMED as error:
        raise IdentityError(f"not an X.509 certificate: {error}") from None


def spiffe_id_from_cert(raw: bytes | None, trust_domain: str) -> SpiffeId:
    """The identity in a certificate that TLS has verified already (this function does not).

    `raw` is DER (`ssl_object.getpeercert(binary_form=True)`, which may be None) or PEM.

    Raises: IdentityError for no certificate, a CA certificate, no URI name, several URI names,
        another trust domain, or a path of another form.
    """
    certificate = load_certificate(raw or b"")
    try:
        extensions = certificate.extensions
        try:
            basic = extensions.get_extension_for_class(x509.BasicConstraints).value
            if basic.ca:
                raise IdentityError("the certificate is a CA's; a CA has no identity of its own")
        except x509.ExtensionNotFound:
            pass
        try:
            names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        except x509.ExtensionNotFound:
            uris = []
    except _MALFORMED as error:
        raise IdentityError(f"the certificate's extensions are malformed: {error}") from None
    if len(uris) != 1:
        many = "no URI name" if not uris else f"{len(uris)} URI names"
        raise IdentityError(
            f"the certificate has {many}; exactly one is needed",
            hint=f"issue one with the single URI name spiffe://{trust_domain}/{ROLE_TENANT}/NAME",
        )
    return parse_spiffe_id(uris[0], trust_domain)


def tenant_from_cert(raw: bytes | None, trust_domain: str) -> TenantName:
    """The tenant that a verified client certificate names.

    Raises: IdentityError; see `spiffe_id_from_cert`. A shard's certificate is refused too.
    """
    peer = spiffe_id_from_cert(raw, trust_domain)
    if peer.role != ROLE_TENANT:
        raise IdentityError(
            f"the certificate is a {peer.role}'s ({peer}), not a tenant's",
            hint=f"connect with a certificate for spiffe://{trust_domain}/{ROLE_TENANT}/NAME",
        )
    return TenantName(peer.name)


def check_server_identity(
    raw: bytes | None, trust_domain: str, *, shard: str | None = None
) -> SpiffeId:
    """Make sure the server is a daemon of our trust domain; call it before sending anything.

    Shards move between addresses, so a host name says little about them: the SPIFFE id
    `spiffe://<trust domain>/shard/<name>` is what counts, and DNS and IP names are not consulted.
    With `shard` given, it must be that very one.

    Raises: IdentityError, also when the server shows a tenant's certificate.
    """
    peer = spiffe_id_from_cert(raw, trust_domain)
    if peer.role != ROLE_SHARD:
        raise IdentityError(
            f"the server's certificate is a {peer.role}'s ({peer}), not a shard's",
            hint="somebody else is listening at this address",
        )
    if shard is not None and peer.name != shard:
        raise IdentityError(
            f"the server is shard {peer.name!r}, not {shard!r}",
            hint="correct name, host or port in [[shards]] of the client's configuration",
        )
    return peer


def load_into_context(
    context: ssl.SSLContext, cert: str | Path, key: str | Path, ca: str | Path
) -> None:
    """The settings both sides share: TLS 1.3, both ends verified, our certificate, one CA bundle.

    Raises: IdentityError naming the file that cannot be used.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # identity is the SPIFFE id, checked right after the handshake
    context.verify_mode = ssl.CERT_REQUIRED
    for path in (cert, key, ca):
        _check_file(path)
    try:
        # A password callback keeps OpenSSL from asking on the terminal when the key is encrypted.
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise IdentityError(
            f"certificate {str(cert)!r} and key {str(key)!r} cannot be used together: {error}",
            hint="both must be PEM, the key unencrypted and belonging to the certificate",
        ) from None
    try:
        context.load_verify_locations(cafile=str(ca))
    except (ssl.SSLError, OSError) as error:
        raise IdentityError(
            f"CA bundle {str(ca)!r} cannot be used: {error}",
            hint="it must hold the PEM certificates of the CAs that sign your peers",
        ) from None


def _check_file(path: str | Path) -> None:
    """Raises: IdentityError when there is none, or this user may not look into its folder."""
    try:
        found = Path(path).is_file()
    except OSError as error:
        raise IdentityError(
            f"cannot read {str(path)!r}: {error.strerror}",
            hint="run this as a user who may, or let this one into the folder",
        ) from None
    if not found:
        raise IdentityError(
            f"there is no file {str(path)!r}",
            hint="cert, key and ca (a daemon's: of [tls]) name PEM files; for one machine "
            "`entresold --config FILE prepare` makes a daemon's, `certify` a tenant's, and "
            "`entresold --dev` its own",
        )


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


def client_ssl_context(cert: str | Path, key: str | Path, ca: str | Path) -> ssl.SSLContext:
    """TLS for the host's side: TLS 1.3, our tenant certificate, the server verified against `ca`.

    The caller must pass the peer's certificate to `check_server_identity` after the handshake.

    Raises: IdentityError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_into_context(context, cert, key, ca)
    return context
