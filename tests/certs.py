"""Certificates for tests: a CA, and leaves with the SPIFFE names the daemon takes tenants from.

    ca = make_ca("test")
    pair = ca.issue("daemon", spiffe_uri="spiffe://test/daemon", hosts=["127.0.0.1", "localhost"])
    server_context(pair, ca), client_context(pair, ca)
    paths = pair.write(tmp_path)          # files, for what wants paths

Everything is P-256: fast to generate, what SPIFFE implementations issue by default.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True, slots=True)
class CertPaths:
    """Where a pair was written: PEM files; the key has mode 0600."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class CertPair:
    """A certificate and its key, PEM, with the CA that signed it."""

    name: str
    cert_pem: bytes
    key_pem: bytes = field(repr=False)
    ca_pem: bytes

    @property
    def sha256(self) -> bytes:
        """Digest of the DER form: what a tcp offer pins."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.cert_pem.decode())).digest()

    def write(self, folder: Path) -> CertPaths:
        """Write `<name>.crt`, `<name>.key` and `<name>-ca.crt` into `folder`."""
        paths = CertPaths(
            folder / f"{self.name}.crt", folder / f"{self.name}.key", folder / f"{self.name}-ca.crt"
        )
        paths.cert.write_bytes(self.cert_pem)
        paths.ca.write_bytes(self.ca_pem)
        with open(paths.key, "wb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            file.write(self.key_pem)
        return paths


@dataclass(frozen=True, slots=True)
class TestCA:
    """A certificate authority of one test."""

    __test__ = False

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def pem(self) -> bytes:
        return self.cert.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str,
        *,
        spiffe_uri: str | None = None,
        uris: Sequence[str] = (),
        hosts: Sequence[str] = ("localhost", "127.0.0.1", "::1"),
        days: float = 1,
        start_days_ago: float = 0.01,
        server: bool = True,
        client: bool = True,
    ) -> CertPair:
        """A leaf with the given URI and host names; negative `days` makes an expired one."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        begin = now - datetime.timedelta(days=max(start_days_ago, start_days_ago - days + 0.01))
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(u)
            for u in [*([spiffe_uri] if spiffe_uri else []), *uris]
        ]
        names += [_host_name(host) for host in hosts]
        usage = [ExtendedKeyUsageOID.SERVER_AUTH] if server else []
        usage += [ExtendedKeyUsageOID.CLIENT_AUTH] if client else []
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject(name))
            .issuer_name(self.cert.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(sign_certs=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        cert = builder.sign(self.key, hashes.SHA256())
        return CertPair(
            name, cert.public_bytes(serialization.Encoding.PEM), _key_pem(key), self.pem
        )


def make_ca(name: str = "entresol-test") -> TestCA:
    """A fresh self-signed CA, valid for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    public = key.public_key()
    cert = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(_subject(name))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    return TestCA(cert, key)


def server_context(pair: CertPair, ca: TestCA) -> ssl.SSLContext:
    """TLS 1.3 server side that demands a client certificate from `ca`."""
    return _context(ssl.PROTOCOL_TLS_SERVER, pair, ca)


def client_context(pair: CertPair, ca: TestCA) -> ssl.SSLContext:
    """TLS 1.3 client side with a certificate; checks the chain, not the host name (SPIFFE)."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, pair, ca)


def _context(protocol: ssl._SSLMethod, pair: CertPair, ca: TestCA) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca.pem.decode())
    with tempfile.TemporaryDirectory() as folder:
        paths = pair.write(Path(folder))
        context.load_cert_chain(paths.cert, paths.key)
    return context


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, sign_certs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certs,
        crl_sign=sign_certs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
