"""Certificates of every kind, and the two doors they are shown at: control stream and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import certs
import grpc
from harness import Running

from entresol_client.config import ClientConfig, TlsFiles
from entresol_proto.fabric.registry import same_host_id
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc
from entresol_proto.wire.frames import FrameType, encode_frame
from entresol_proto.wire.opening import Hello
from tests.daemon.daemon_lab import shape

DOMAIN = "entresol.local"
REFUSALS = (
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
)  # fmt: skip


@dataclass
class Pki:
    """The daemon's CA and shard certificate, made by the test, in the places of the dev PKI."""

    folder: Path
    ca: certs.TestCA

    @classmethod
    def at(cls, folder: Path) -> Pki:
        pki = cls(folder, certs.make_ca("the pod"))
        pki.install("dev")
        return pki

    def install(self, shard: str) -> None:
        """Put CA and shard certificate where the daemon's configuration points."""
        self.folder.mkdir(exist_ok=True)
        pair = self.ca.issue(shard, spiffe_uri=f"spiffe://{DOMAIN}/shard/{shard}")
        for name, raw in (("ca.pem", self.ca.pem), ("shard.key", pair.key_pem),
                          ("shard.pem", pair.cert_pem)):  # fmt: skip
            scratch = self.folder / "scratch"
            scratch.write_bytes(raw)
            scratch.replace(self.folder / name)

    def change(self, **tls: int) -> Callable[..., Any]:
        """A change of a daemon's configuration that makes it use these files."""
        changed = shape(tls={
            "cert": self.folder / "shard.pem", "key": self.folder / "shard.key",
            "ca": self.folder / "ca.pem", **tls,
        })  # fmt: skip
        return changed


def config_of(running: Running, pair: certs.CertPair, ca: bytes, folder: Path) -> ClientConfig:
    """How a host with this certificate reaches the daemon."""
    paths = pair.write(folder)
    paths.ca.write_bytes(ca)
    base = running.client_config("dev", connect_deadline_ns=5_000_000_000)
    return replace(base, tls=TlsFiles(paths.cert, paths.key, paths.ca, DOMAIN))


async def greeted(running: Running, context: ssl.SSLContext) -> bool:
    """Whether the daemon answers anything at all to a HELLO under this context."""
    hello = encode_frame(FrameType.HELLO, 1, Hello(1, 1, same_host_id(), 1, "tls").encode())
    with contextlib.suppress(ssl.SSLError, OSError):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", running.daemon.control.port, ssl=context
        )
        try:
            writer.write(hello)
            await writer.drain()
            async with asyncio.timeout(10):
                return bool(await reader.read(16))
        finally:
            writer.transport.abort()
            with contextlib.suppress(ssl.SSLError, OSError):
                await writer.wait_closed()
    return False


def refused_pairs(pki: Pki) -> dict[str, certs.CertPair]:
    """Every certificate that must get nobody in, by what is wrong with it."""
    foreign = certs.make_ca("somebody else")
    good = f"spiffe://{DOMAIN}/tenant/dev"
    issue = pki.ca.issue
    return {
        "foreign CA": foreign.issue("x", spiffe_uri=good),
        "expired": issue("x", spiffe_uri=good, days=-1),
        "not yet valid": issue("x", spiffe_uri=good, start_days_ago=-0.5, days=2),
        "a shard's": issue("x", spiffe_uri=f"spiffe://{DOMAIN}/shard/dev"),
        "another trust domain": issue("x", spiffe_uri="spiffe://other.pod/tenant/dev"),
        "trust domain in the path": issue("x", spiffe_uri=f"spiffe://evil/{DOMAIN}/tenant/dev"),
        "no tenant in the path": issue("x", spiffe_uri=f"spiffe://{DOMAIN}/tenant/"),
        "a deeper path": issue("x", spiffe_uri=good + "/sub"),
        "a bad name": issue("x", spiffe_uri=f"spiffe://{DOMAIN}/tenant/A%20b"),
        "a query": issue("x", spiffe_uri=good + "?admin=1"),
        "upper-case scheme": issue("x", spiffe_uri=good.replace("spiffe", "https")),
        "no URI": issue("x"),
        "two tenants": issue("x", uris=[good, f"spiffe://{DOMAIN}/tenant/other"]),
        "for servers only": issue("x", spiffe_uri=good, client=False),
    }  # fmt: skip


def without_certificate(pki: Pki) -> ssl.SSLContext:
    """A peer that shows nothing."""
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=pki.ca.pem.decode())
    return bare


@contextlib.asynccontextmanager
async def grpc_channel(running: Running, pair: certs.CertPair | None, ca: bytes) -> Any:
    """A channel to the daemon's TCP listener under a certificate, or under none."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=ca,
        private_key=pair.key_pem if pair else None,
        certificate_chain=pair.cert_pem if pair else None,
    )
    options = [
        ("grpc.ssl_target_name_override", "localhost"),
        ("grpc.use_local_subchannel_pool", 1),  # a handshake of its own
    ]
    place = f"127.0.0.1:{running.daemon.grpc.port}"
    async with grpc.aio.secure_channel(place, credentials, options=options) as channel:
        yield channel


async def described(channel: Any, seconds: float = 10.0) -> str:
    """The tenant that a daemon takes the caller for; empty when it refuses."""
    stub = entresol_pb2_grpc.DescribeStub(channel)
    try:
        reply = await stub.Describe(pb.DescribeRequest(), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() not in REFUSALS:
            raise
        return ""
    return str(reply.tenant)
