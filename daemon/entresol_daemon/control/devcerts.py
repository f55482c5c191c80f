"""A small certificate authority in a folder: `entresold --dev` and `prepare`, the demo, tests.

Invariant: private keys are written with mode 0600 and never overwritten while they are in use;
calling `create` or `issue_tenant` again changes nothing as long as the certificates still fit. It
is no way to run a pod: the CA's key lies next to what it signs. Production certificates come from
SPIRE, cert-manager or a site CA, with the same URI names.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from entresol_proto.identity import IdentityError, check_trust_domain, shard_uri, tenant_uri
from entresol_proto.ids import check_tenant_name
from entresol_proto.status import Status

TRUST_DOMAIN_DEFAULT = "entresol.local"
CA_DAYS = 3650
LEAF_DAYS = 365
RENEW_DAYS = 7  # a certificate with less left is issued anew
COMMON_NAME_CHARS_MAX = 64  # X.520
_CLOCK_SLACK = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class CertFiles:
    """PEM files of one peer: what `client_ssl_context` and `server_ssl_context` take."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class DevPki:
    """A dev PKI on disk: `ca.pem`, `shard.pem`, `tenants/NAME.pem`, and a `.key` next to each."""

    directory: Path
    trust_domain: str

    @property
    def ca(self) -> Path:
        """The CA's certificate."""
        return self.directory / "ca.pem"

    @property
    def shard(self) -> CertFiles:
        """The daemon's files."""
        return self.files("shard")

    def tenant(self, name: str) -> CertFiles:
        """The files of a tenant, issued already or not."""
        return self.files(f"tenants/{check_tenant_name(name)}")

    def files(self, stem: str) -> CertFiles:
        """The files of the leaf kept under `stem`."""
        # Not with_suffix: a tenant's name may hold a dot.
        return CertFiles(
            self.directory / f"{stem}.pem",
            self.directory / f"{stem}.key",
            self.directory / "ca.pem",
        )


def create(
    directory: str | Path,
    *,
    trust_domain: str = TRUST_DOMAIN_DEFAULT,
    shard: str = "dev",
    stem: str = "shard",
    hosts: Sequence[str] = ("localhost", "127.0.0.1"),
    tenants: Sequence[str] = (),
    anew: bool = False,
    now: datetime.datetime | None = None,
) -> DevPki:
    """Make or complete the PKI in `directory`: the CA, the shard's files, one per tenant.

    Idempotent, unless the shard's are to be made `anew`. `hosts` are DNS names and IP addresses for
    clients (gRPC) that check those; `stem` names the shard's files where one authority has several
    shards.

    Raises: IdentityError when the folder holds a CA of another trust domain or cannot be written.
    """
    pki = DevPki(Path(directory), check_trust_domain(trust_domain))
    if len(trust_domain) > COMMON_NAME_CHARS_MAX:
        raise IdentityError("a dev PKI's trust domain has at most 64 characters")
    try:
        pki.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _ensure_ca(pki, now)
        uri = shard_uri(trust_domain, shard)
        issue(pki, stem, uris=[uri], hosts=hosts, server=True, anew=anew, now=now)
        for name in tenants:
            issue_tenant(pki.directory, name, now=now)
    except OSError as error:
        raise IdentityError(
            f"cannot write the dev PKI in {pki.directory}: {error.strerror}",
            hint="name a folder that this user may write",
            status=Status.IO_ERROR,
        ) from None
    return pki


def load(directory: str | Path) -> DevPki:
    """The PKI that `create` made in `directory`. Raises: IdentityError when there is none."""
    folder = Path(directory)
    try:
        ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError):
        raise IdentityError(
            f"there is no dev PKI in {folder}", hint="`entresold --dev` makes one"
        ) from None
    return DevPki(folder, _common_name(ca))


def issue_tenant(
    directory: str | Path,
    name: str,
    *,
    anew: bool = False,
    now: datetime.datetime | None = None,
) -> CertFiles:
    """Issue (or, unless `anew`, keep) the certificate of tenant `name` in an existing PKI.

    Raises: IdentityError, BadKeyError for a bad name.
    """
    pki = load(directory)
    stem = f"tenants/{check_tenant_name(name)}"
    return issue(pki, stem, uris=[tenant_uri(pki.trust_domain, name)], anew=anew, now=now)


def issue(
    pki: DevPki,
    stem: str,
    *,
    uris: Sequence[str],
    hosts: Sequence[str] = (),
    server: bool = False,
    days: int = LEAF_DAYS,
    anew: bool = False,
    now: datetime.datetime | None = None,
) -> CertFiles:
    """Issue one leaf under `stem` with exactly these names, unless a fitting one is there or it is
    to be made `anew`.

    The general form behind `create` and `issue_tenant`. It does not judge the names, so tests of
    refusal use it for wrong ones (other URIs, several, none) and, with a negative `days`, for
    certificates that have expired. A foreign certificate comes from a PKI in another folder.
    """
    files = pki.files(stem)
    now = now or datetime.datetime.now(datetime.UTC)
    ca_key, ca = _load_ca(pki)
    names = _names(uris, hosts)
    if days > 0 and not anew and _fits(files, ca, names, now):
        return files
    key = ec.generate_private_key(ec.SECP256R1())
    end = now + datetime.timedelta(days=days)
    begin = min(now, end - datetime.timedelta(days=1)) - _CLOCK_SLACK
    usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _builder(_name(Path(stem).name), ca.subject, key.public_key(), begin, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_usage(signs_certificates=False), True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    files.cert.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Key first: a reader that sees the new certificate finds its key.
    _write(files.key, _key_pem(key), 0o600)
    _write(files.cert, _cert_pem(builder.sign(ca_key, hashes.SHA256())), 0o644)
    return files


def _ensure_ca(pki: DevPki, now: datetime.datetime | None) -> None:
    if pki.ca.exists():
        found = load(pki.directory)
        if found.trust_domain != pki.trust_domain:
            raise IdentityError(
                f"{pki.ca} is the CA of trust domain {found.trust_domain!r}, "
                f"not {pki.trust_domain!r}",
                hint="use another folder, or remove this one",
            )
        _load_ca(pki)
        return
    now = now or datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(pki.trust_domain)
    end = now + datetime.timedelta(days=CA_DAYS)
    builder = _builder(name, name, key.public_key(), now - _CLOCK_SLACK, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    builder = builder.add_extension(_usage(signs_certificates=True), True)
    _write(pki.directory / "ca.key", _key_pem(key), 0o600)
    _write(pki.ca, _cert_pem(builder.sign(key, hashes.SHA256())), 0o644)


def _load_ca(pki: DevPki) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        certificate = x509.load_pem_x509_certificate(pki.ca.read_bytes())
        raw = (pki.directory / "ca.key").read_bytes()
        key = serialization.load_pem_private_key(raw, password=None)
    except (OSError, ValueError, TypeError) as error:
        raise IdentityError(
            f"the dev CA in {pki.directory} is not usable: {error}", hint="remove the folder"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"the dev CA in {pki.directory} was not made here")
    if key.public_key() != certificate.public_key():
        raise IdentityError(
            f"ca.key and ca.pem in {pki.directory} do not belong together", hint="remove the folder"
        )
    return key, certificate


def _fits(
    files: CertFiles,
    ca: x509.Certificate,
    names: list[x509.GeneralName],
    now: datetime.datetime,
) -> bool:
    """True when the leaf on disk has these names, this CA, its key, and time left."""
    try:
        leaf = x509.load_pem_x509_certificate(files.cert.read_bytes())
        key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
        leaf.verify_directly_issued_by(ca)
        found = list(leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    left = leaf.not_valid_after_utc - now
    return (
        found == names
        and key.public_key() == leaf.public_key()
        and left > datetime.timedelta(days=RENEW_DAYS)
    )


def _names(uris: Sequence[str], hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    # The identity is the URI name; this one is for people (and, in the CA, for `load`).
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:COMMON_NAME_CHARS_MAX])])


def _common_name(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return check_trust_domain(str(found[0].value) if found else "")


def _cert_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, raw: bytes, mode: int) -> None:
    """Replace `path` in one step, so that a server that follows the file never reads half of it,
    nor after the machine lost its power."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb", opener=lambda p, flags: os.open(p, flags, mode)) as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
