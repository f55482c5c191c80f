"""Who is let in: names in certificates, real TLS handshakes, new certificates without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import shutil
import ssl
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from entresol_daemon.control import devcerts
from entresol_daemon.control.devcerts import CertFiles, DevPki
from entresol_daemon.control.identity import (
    ReloadingServerContext,
    check_server_identity,
    client_ssl_context,
    server_ssl_context,
    tenant_from_cert,
)
from entresol_proto.identity import (
    IdentityError,
    SpiffeId,
    parse_spiffe_id,
    shard_uri,
    spiffe_id_from_cert,
    tenant_uri,
)
from entresol_proto.ids import BadKeyError
from entresol_proto.status import Status

DOMAIN = "pod.test"
LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(scope="module")
def pki_template(tmp_path_factory: pytest.TempPathFactory) -> DevPki:
    folder = tmp_path_factory.mktemp("pki")
    return devcerts.create(folder, trust_domain=DOMAIN, shard="s0", tenants=["acme", "zeta"])


@pytest.fixture
def pki(pki_template: DevPki, tmp_path: Path) -> DevPki:
    """A copy that the test may change."""
    folder = tmp_path / "pki"
    shutil.copytree(pki_template.directory, folder)
    return devcerts.load(folder)


@pytest.fixture
def foreign(tmp_path: Path) -> DevPki:
    """Somebody else's CA that claims the same trust domain and names."""
    folder = tmp_path / "foreign"
    return devcerts.create(folder, trust_domain=DOMAIN, shard="s0", tenants=["acme"])


def context_of(files: CertFiles) -> ssl.SSLContext:
    return client_ssl_context(files.cert, files.key, files.ca)


@contextlib.asynccontextmanager
async def serve(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that answers every connection with the tenant's name, or with the refusal."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
            try:
                reply = "tenant " + tenant_from_cert(tls.getpeercert(binary_form=True), DOMAIN)
            except IdentityError as error:
                reply = f"{error.status.label}: {error}"
            writer.write(reply.encode() + b"\n")
            await writer.drain()
            await reader.read()  # until the client goes
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


class Refused(Exception):
    """The handshake or the first read failed."""


class Client:
    """One connection that has read the server's answer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: str
    ) -> None:
        self.reader, self.writer, self.reply = reader, writer, reply
        self.tls: ssl.SSLObject = writer.get_extra_info("ssl_object")

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


async def dial(port: int, context: ssl.SSLContext) -> Client:
    """Connect and read the answer. With TLS 1.3 a client hears of its own refusal only then."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (OSError, ssl.SSLError) as error:
        raise Refused(str(error)) from None
    try:
        line = await asyncio.wait_for(reader.readline(), 20)
    except (OSError, ssl.SSLError) as error:
        line, why = b"", str(error)
    else:
        why = "closed"
    client = Client(reader, writer, line.decode().strip())
    if not line:
        await client.close()
        raise Refused(why)
    return client


async def ask(port: int, context: ssl.SSLContext) -> str:
    client = await dial(port, context)
    await client.close()
    return client.reply


def run(factory: LoopFactory, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


# Names.


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://pod.test/tenant/acme",
        "spiffe:/pod.test/tenant/acme",
        "SPIFFE://pod.test/tenant/acme",
        "spiffe://POD.test/tenant/acme",
        "spiffe://pod.tes/tenant/acme",
        "spiffe://pod.test.evil/tenant/acme",
        "spiffe://pod.test:443/tenant/acme",
        "spiffe://u@pod.test/tenant/acme",
        "spiffe:///tenant/acme",
        "spiffe://pod.test",
        "spiffe://pod.test/",
        "spiffe://pod.test/tenant",
        "spiffe://pod.test/tenant/",
        "spiffe://pod.test/tenant/acme/",
        "spiffe://pod.test/tenant//acme",
        "spiffe://pod.test//tenant/acme",
        "spiffe://pod.test/tenant/../tenant/acme",
        "spiffe://pod.test/tenant/%61cme",
        "spiffe://pod.test/tenant/acme?x=1",
        "spiffe://pod.test/tenant/acme#x",
        "spiffe://pod.test/tenant/ACME",
        "spiffe://pod.test/tenant/.",
        "spiffe://pod.test/tenant/acme\n",
        "spiffe://pod.test/tenant/acme\0",
        "spiffe://pod.test/admin/acme",
        "spiffe://pod.test/tenant/" + "a" * 65,
        "spiffe://pod.test/tenant/" + "a" * 2048,
    ],
)
def test_spiffe_ids_of_another_form_are_refused(uri: str) -> None:
    with pytest.raises(IdentityError) as caught:
        parse_spiffe_id(uri, DOMAIN)
    assert caught.value.status is Status.FORBIDDEN


def test_spiffe_ids_round_trip() -> None:
    for role, uri in (
        ("tenant", tenant_uri(DOMAIN, "a.b-c_d")),
        ("shard", shard_uri(DOMAIN, "a.b-c_d")),
    ):
        assert parse_spiffe_id(uri, DOMAIN) == SpiffeId(DOMAIN, role, "a.b-c_d")
        assert str(parse_spiffe_id(uri, DOMAIN)) == uri
    with pytest.raises(IdentityError, match="trust domain"):
        tenant_uri("Pod/x", "a")
    with pytest.raises(BadKeyError):
        tenant_uri(DOMAIN, "A")


def test_the_name_comes_from_a_single_uri_of_a_leaf(pki: DevPki) -> None:
    acme = pki.tenant("acme").cert.read_bytes()
    assert tenant_from_cert(acme, DOMAIN) == "acme"
    der = ssl.PEM_cert_to_DER_cert(acme.decode())
    assert tenant_from_cert(der, DOMAIN) == "acme"

    def refused(stem: str, uris: list[str], hosts: list[str], match: str) -> None:
        cert = devcerts.issue(pki, stem, uris=uris, hosts=hosts).cert.read_bytes()
        with pytest.raises(IdentityError, match=match) as caught:
            tenant_from_cert(cert, DOMAIN)
        assert caught.value.status is Status.FORBIDDEN

    uri = tenant_uri(DOMAIN, "acme")
    refused("none", [], [], "no URI name; exactly one is needed")
    refused("dns", [], ["acme.tenant.pod.test"], "no URI name")
    refused("two", [uri, tenant_uri(DOMAIN, "zeta")], [], "2 URI names")
    refused("twice", [uri, uri], [], "2 URI names")
    refused("domain", [tenant_uri("other.test", "acme")], [], "trust domain 'other.test'")
    refused("path", [f"spiffe://{DOMAIN}/ns/default/sa/acme"], [], "path of SPIFFE id")
    refused("role", [shard_uri(DOMAIN, "acme")], [], "a shard's")
    with pytest.raises(IdentityError, match="a CA has no identity"):
        tenant_from_cert(pki.ca.read_bytes(), DOMAIN)
    for raw, match in (
        (None, "no certificate"),
        (b"", "no certificate"),
        (b"rubbish", "not an X.509"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not an X.509"),
        (bytes(70_000), "too long"),
    ):
        with pytest.raises(IdentityError, match=match):
            tenant_from_cert(raw, DOMAIN)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # some flips make it negative
def test_truncated_and_flipped_certificates_never_raise_anything_else(pki: DevPki) -> None:
    der = bytearray(ssl.PEM_cert_to_DER_cert(pki.tenant("acme").cert.read_text()))
    for at in range(len(der)):
        flipped = bytearray(der)
        flipped[at] ^= 1 << (at % 8)
        for raw in (bytes(flipped), bytes(der[:at])):
            with contextlib.suppress(IdentityError):
                tenant_from_cert(raw, DOMAIN)


def test_the_server_must_be_a_shard(pki: DevPki) -> None:
    shard = pki.shard.cert.read_bytes()
    assert check_server_identity(shard, DOMAIN).name == "s0"
    assert check_server_identity(shard, DOMAIN, shard="s0").role == "shard"
    with pytest.raises(IdentityError, match="is shard 's0', not 's1'"):
        check_server_identity(shard, DOMAIN, shard="s1")
    with pytest.raises(IdentityError, match="a tenant's"):
        check_server_identity(pki.tenant("acme").cert.read_bytes(), DOMAIN)
    with pytest.raises(IdentityError, match="trust domain"):
        check_server_identity(shard, "other.test")


# Handshakes.


@LOOPS
def test_handshakes_of_every_kind(pki: DevPki, foreign: DevPki, loop_factory: LoopFactory) -> None:
    other = devcerts.issue(pki, "tenants/x", uris=[tenant_uri("other.test", "acme")])
    old = devcerts.issue(pki, "tenants/old", uris=[tenant_uri(DOMAIN, "old")], days=-1)
    no_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    no_certificate.check_hostname = False
    no_certificate.load_verify_locations(pki.ca)
    stranger = CertFiles(foreign.tenant("acme").cert, foreign.tenant("acme").key, pki.ca)
    too_old = context_of(pki.tenant("acme"))
    too_old.minimum_version = ssl.TLSVersion.TLSv1_2
    too_old.maximum_version = ssl.TLSVersion.TLSv1_2

    async def main() -> None:
        door = ReloadingServerContext(pki.shard.cert, pki.shard.key, pki.shard.ca)
        async with serve(door.context) as port:
            client = await dial(port, context_of(pki.tenant("acme")))
            assert client.reply == "tenant acme"
            assert client.tls.version() == "TLSv1.3"
            peer = client.tls.getpeercert(binary_form=True)
            assert check_server_identity(peer, DOMAIN).name == "s0"
            # No ticket: a later connection cannot skip the judgement of its certificate.
            session = client.tls.session
            assert session is None or not session.has_ticket
            await client.close()
            assert await ask(port, context_of(pki.tenant("zeta"))) == "tenant zeta"
            assert (await ask(port, context_of(other))).startswith("forbidden: the certificate")
            for context in (no_certificate, context_of(stranger), context_of(old), too_old):
                with pytest.raises(Refused):
                    await ask(port, context)
            # A client that trusts another CA only.
            with pytest.raises(Refused, match="CERTIFICATE_VERIFY_FAILED"):
                await ask(port, context_of(foreign.tenant("acme")))
            assert await ask(port, context_of(pki.tenant("acme"))) == "tenant acme"

    run(loop_factory, main())


@LOOPS
def test_a_client_refuses_bad_servers(pki: DevPki, loop_factory: LoopFactory) -> None:
    uri = shard_uri(DOMAIN, "s0")
    expired = devcerts.issue(pki, "expired", uris=[uri], server=True, days=-1)
    thief = devcerts.issue(pki, "thief", uris=[tenant_uri(DOMAIN, "acme")], server=True)
    tenant = pki.tenant("zeta")  # for clients only, by its extended key usage

    async def main() -> None:
        for files in (expired, tenant):
            async with serve(server_ssl_context(files.cert, files.key, files.ca)) as port:
                with pytest.raises(Refused, match="CERTIFICATE_VERIFY_FAILED"):
                    await ask(port, context_of(pki.tenant("acme")))
        async with serve(server_ssl_context(thief.cert, thief.key, thief.ca)) as port:
            client = await dial(port, context_of(pki.tenant("acme")))
            with pytest.raises(IdentityError, match="not a shard's"):
                check_server_identity(client.tls.getpeercert(binary_form=True), DOMAIN)
            await client.close()

    run(loop_factory, main())


# Rotation.


class Clock:
    """A clock the test moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def server_serial(client: Client) -> int:
    raw = client.tls.getpeercert(binary_form=True)
    assert raw is not None
    return x509.load_der_x509_certificate(raw).serial_number


@LOOPS
def test_rotation_without_restart(pki: DevPki, tmp_path: Path, loop_factory: LoopFactory) -> None:
    live = tmp_path / "live"
    live.mkdir()

    def install(source: DevPki) -> CertFiles:
        """Put a PKI's server files in place, one rename each, as an agent does."""
        for name in ("shard.key", "shard.pem", "ca.pem"):
            shutil.copy(source.directory / name, live / f"{name}.new")
            os.replace(live / f"{name}.new", live / name)
        return CertFiles(live / "shard.pem", live / "shard.key", live / "ca.pem")

    files = install(pki)
    next_pki = devcerts.create(
        tmp_path / "next", trust_domain=DOMAIN, shard="s0", tenants=["acme", "newcomer"]
    )
    clock = Clock()

    async def main() -> None:
        door = ReloadingServerContext(
            files.cert, files.key, files.ca, interval_ns=1000, now_ns=clock
        )
        async with serve(door.context) as port:
            old_client = await dial(port, context_of(pki.tenant("acme")))
            first = server_serial(old_client)
            install(next_pki)
            clock.now_ns = 999  # not yet time to look
            assert await ask(port, context_of(pki.tenant("acme"))) == "tenant acme"
            assert door.reloads == 0
            clock.now_ns = 1000
            client = await dial(port, context_of(next_pki.tenant("newcomer")))
            assert client.reply == "tenant newcomer"
            assert server_serial(client) != first
            await client.close()
            assert (door.reloads, door.failures, door.bundle().generation) == (1, 0, 2)
            assert door.bundle().ca == next_pki.ca.read_bytes()
            assert "PRIVATE" not in repr(door.bundle())
            # The old CA no longer opens the door, not even with the session of before ...
            mixed = CertFiles(pki.tenant("acme").cert, pki.tenant("acme").key, next_pki.ca)
            with pytest.raises(Refused):
                await ask(port, context_of(mixed))
            with pytest.raises(Refused):
                await ask(port, context_of(pki.tenant("acme")))
            # ... and the connection of before still stands.
            old_client.writer.write(b"x")
            await old_client.writer.drain()
            await old_client.close()

    run(loop_factory, main())


def test_a_set_repaired_without_new_content_is_taken_over(pki: DevPki) -> None:
    """chown and chmod change no content: by time of change, or at once by HUP."""
    key = pki.shard.key
    good = key.read_bytes()
    door = ReloadingServerContext(pki.shard.cert, key, pki.ca, interval_ns=0, now_ns=Clock())
    at = key.stat()

    def written(raw: bytes) -> None:
        """In place, as long as before and not later: only the time of change tells."""
        with open(key, "r+b") as file:
            file.write(raw.ljust(at.st_size))
        os.utime(key, ns=(at.st_atime_ns, at.st_mtime_ns))

    written(b"unreadable")
    assert not door.check()
    assert (door.stale, door.failures) == (True, 1)
    assert not door.check()
    assert door.failures == 1, "the same files were tried again without being asked to"
    assert not door.check(force=True)
    assert door.failures == 2, "HUP did not try them again"
    written(good)
    assert door.check()
    assert (door.stale, door.reloads) == (False, 1)
    assert not door.check(force=True), "a good set was taken over twice"


def test_it_tells_when_its_certificate_ends(pki: DevPki) -> None:
    files = pki.shard
    door = ReloadingServerContext(files.cert, files.key, files.ca, interval_ns=0, now_ns=Clock())
    assert abs(door.not_after_s() - time.time() - devcerts.LEAF_DAYS * 86_400) < 3600
    renewed = devcerts.issue(pki, "renewed", uris=[shard_uri(DOMAIN, "s0")], server=True, days=30)
    text = b"issued by hand\n" + renewed.cert.read_bytes() + pki.ca.read_bytes()
    files.key.write_bytes(renewed.key.read_bytes())
    files.cert.write_bytes(text)  # with words before it and a chain behind
    assert abs(door.not_after_s() - time.time() - 30 * 86_400) < 3600


@LOOPS
def test_a_broken_new_file_keeps_the_old_one(
    pki: DevPki, tmp_path: Path, loop_factory: LoopFactory, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    good = {path: path.read_bytes() for path in (pki.shard.cert, pki.shard.key, pki.ca)}
    uri = shard_uri(DOMAIN, "s0")
    renewed = devcerts.issue(pki, "renewed", uris=[uri], server=True)

    async def main() -> None:
        door = ReloadingServerContext(
            pki.shard.cert, pki.shard.key, pki.ca, interval_ns=0, now_ns=clock
        )
        async with serve(door.context) as port:
            failures = 0
            for path, raw in (
                (pki.shard.cert, b"rubbish"),
                (pki.shard.cert, b""),
                (pki.shard.cert, renewed.cert.read_bytes()),  # its key is not there yet
                (pki.shard.key, b"-----BEGIN PRIVATE KEY-----\n"),
                (pki.ca, b"rubbish"),
                (pki.ca, None),
            ):
                if raw is None:
                    path.unlink()
                else:
                    path.write_bytes(raw)
                failures += 1
                for _ in range(2):  # the second handshake does not try the same files again
                    assert await ask(port, context_of_saved) == "tenant acme"
                    assert door.failures == failures
                path.write_bytes(good[path])
                assert await ask(port, context_of_saved) == "tenant acme"
            assert door.failures == failures
            pki.shard.cert.write_bytes(renewed.cert.read_bytes())
            assert not door.check(force=True)
            pki.shard.key.write_bytes(renewed.key.read_bytes())
            assert door.check(force=True)
            client = await dial(port, context_of_saved)
            renewed_serial = x509.load_pem_x509_certificate(renewed.cert.read_bytes()).serial_number
            assert server_serial(client) == renewed_serial
            await client.close()

    context_of_saved = context_of(pki.tenant("acme"))
    with caplog.at_level(logging.WARNING, "entresol.identity"):
        run(loop_factory, main())
    warnings = [r.getMessage() for r in caplog.records if r.name == "entresol.identity"]
    assert any("event=tls_reload_failed kept=old" in text for text in warnings)
    assert all("PRIVATE" not in text for text in warnings)


def _spoiled(pki: DevPki) -> dict[str, CertFiles]:
    """Certificates that hosts refuse, of the right authority and with their own keys."""
    uri, now = shard_uri(DOMAIN, "s0"), datetime.datetime.now(datetime.UTC)
    later = now + datetime.timedelta(days=2)
    wrong = {
        "expired": devcerts.issue(pki, "expired", uris=[uri], server=True, days=-1),
        "valid only from": devcerts.issue(pki, "later", uris=[uri], server=True, now=later),
        "not of shard s0": devcerts.issue(
            pki, "another", uris=[shard_uri(DOMAIN, "s1")], server=True
        ),
        "belongs to trust domain": devcerts.issue(
            pki, "domain", uris=[shard_uri("other.test", "s0")], server=True
        ),
        "no URI name": devcerts.issue(pki, "nobody", uris=[], server=True),
    }
    return wrong | {"of tenant acme, not of shard": pki.tenant("acme")}


def test_a_certificate_that_hosts_refuse_takes_no_good_ones_place(
    pki: DevPki, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake of who renews it cut off every tenant, and no counter told."""
    shard, files = SpiffeId(DOMAIN, "shard", "s0"), pki.shard
    before = (files.cert.read_bytes(), files.key.read_bytes())
    door = ReloadingServerContext(*_paths(files), shard=shard, interval_ns=0, now_ns=Clock())
    for number, (why, wrong) in enumerate(_spoiled(pki).items(), 1):
        caplog.clear()
        files.key.write_bytes(wrong.key.read_bytes())
        files.cert.write_bytes(wrong.cert.read_bytes())
        assert not door.check(force=True), why
        assert (door.reloads, door.failures, door.stale) == (0, number, True)
        assert door.bundle().cert == before[0]
        assert door.problem() == ""
        assert why in caplog.text
        assert "PRIVATE" not in caplog.text
    files.key.write_bytes(before[1])
    files.cert.write_bytes(before[0])
    assert door.check(force=True)
    assert not door.stale


def test_no_start_with_a_certificate_of_somebody_else(pki: DevPki) -> None:
    for why, wrong in _spoiled(pki).items():
        shard = SpiffeId(DOMAIN, "shard", "s0")
        if why in ("expired", "valid only from"):
            assert why in ReloadingServerContext(*_paths(wrong), shard=shard).problem()
            continue
        with pytest.raises(IdentityError, match=why) as caught:
            ReloadingServerContext(*_paths(wrong), shard=shard)
        assert f"spiffe://{DOMAIN}/shard/s0" in caught.value.hint


def test_a_clock_that_is_set_late_and_certificates_of_its_time(
    pki: DevPki, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a battery starts in 1970, where no certificate is valid yet."""
    shard, files = SpiffeId(DOMAIN, "shard", "s0"), pki.shard
    now_s = [0.0]
    door = ReloadingServerContext(
        *_paths(files), shard=shard, interval_ns=0, now_ns=Clock(), unix_s=lambda: now_s[0]
    )
    assert "valid only from" in door.problem()
    assert "event=certificate_not_valid" in caplog.text
    uri, now = shard_uri(DOMAIN, "s0"), datetime.datetime.now(datetime.UTC)
    renewed = devcerts.issue(pki, "renewed", uris=[uri], server=True)
    _install(renewed, files)
    assert door.check(), "nothing is lost by taking another one that is not valid yet"
    now_s[0] = time.time()
    assert door.problem() == ""
    soon = devcerts.issue(
        pki, "soon", uris=[uri], server=True, now=now + datetime.timedelta(hours=1)
    )
    _install(soon, files)
    for _ in range(3):
        assert not door.check()
    assert (door.failures, door.reloads) == (1, 1), "tried again before its time, or not at all"
    now_s[0] += 3600
    assert door.check(), "its time has begun, and it was not looked at again"
    assert (door.stale, door.problem()) == (False, "")
    now_s[0] += (devcerts.LEAF_DAYS + 1) * 86_400
    assert "expired" in door.problem()


@LOOPS
def test_cas_that_are_not_valid_take_no_good_ones_place(
    pki: DevPki, tmp_path: Path, loop_factory: LoopFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """They were taken over without a word, and every host was refused from then on."""
    files, good, now_s = pki.shard, pki.ca.read_bytes(), [time.time()]
    older, old, soon = (_ca_of(tmp_path / f"{year}", year) for year in (2009, 2010, 2100))

    async def main() -> None:
        door = ReloadingServerContext(
            *_paths(files), interval_ns=0, now_ns=Clock(), unix_s=lambda: now_s[0]
        )
        async with serve(door.context) as port:
            for number, (raw, why) in enumerate((
                (old, "the CA in [tls] ca expired on 2019-12-30"),
                (older + old, "the last CA in [tls] ca expired on 2019-12-30"),
                (soon, "no CA in [tls] ca is valid before 2099-12-31"),
                (old + soon, "no CA in [tls] ca is valid before 2099-12-31"),
            ), 1):  # fmt: skip
                caplog.clear()
                pki.ca.write_bytes(raw)
                for _ in range(2):
                    assert await ask(port, context_of_saved) == "tenant acme"
                assert (door.reloads, door.failures, door.stale) == (0, number, True)
                assert why in caplog.text
                assert door.problem() == ""
            pki.ca.write_bytes(old + good + soon)
            assert door.check(), "one that is valid is enough"
            assert await ask(port, context_of_saved) == "tenant acme"

    context_of_saved = context_of(pki.tenant("acme"))
    run(loop_factory, main())


def test_cas_and_their_time(pki: DevPki, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing told why no host could connect, nor that the CA would end."""
    now_s, files = [time.time()], pki.shard
    door = ReloadingServerContext(
        *_paths(files), interval_ns=0, now_ns=Clock(), unix_s=lambda: now_s[0]
    )
    good, soon_s = pki.ca.read_bytes(), time.time() + 100 * 86_400
    soon = datetime.datetime.fromtimestamp(soon_s, datetime.UTC)
    pki.ca.write_bytes(_ca_of(tmp_path / "soon", soon.year, begin=soon))
    assert not door.check()
    now_s[0] = soon_s
    assert door.check(), "its time has begun, and it was not looked at again"
    pki.ca.write_bytes(good)
    long = devcerts.issue(
        pki, "long", uris=[shard_uri(DOMAIN, "s0")], server=True, days=2 * devcerts.CA_DAYS
    )
    _install(long, files)
    assert door.check()
    assert abs(door.not_after_s() - time.time() - devcerts.CA_DAYS * 86_400) < 3600
    now_s[0] = door.not_after_s() + 1
    assert "the CA in [tls] ca expired" in door.problem()
    caplog.clear()
    late = ReloadingServerContext(*_paths(files), now_ns=Clock(), unix_s=lambda: now_s[0])
    assert "the CA in [tls] ca expired" in late.problem(), "a start, as its clock may be wrong"
    assert "event=certificate_not_valid" in caplog.text


def _ca_of(folder: Path, year: int, *, begin: datetime.datetime | None = None) -> bytes:
    begin = begin or datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)
    return devcerts.create(folder, trust_domain=DOMAIN, shard="s0", now=begin).ca.read_bytes()


def _paths(files: CertFiles) -> tuple[Path, Path, Path]:
    return files.cert, files.key, files.ca


def _install(source: CertFiles, target: CertFiles) -> None:
    target.key.write_bytes(source.key.read_bytes())
    target.cert.write_bytes(source.cert.read_bytes())


def test_files_that_cannot_be_used_are_named(pki: DevPki, tmp_path: Path) -> None:
    shard, acme = pki.shard, pki.tenant("acme")
    with pytest.raises(IdentityError, match=r"no file .*none\.pem"):
        server_ssl_context(tmp_path / "none.pem", shard.key, shard.ca)
    with pytest.raises(IdentityError, match=r"shard\.pem.* and key .*acme\.key.* together"):
        server_ssl_context(shard.cert, acme.key, shard.ca)
    with pytest.raises(IdentityError, match="CA bundle"):
        client_ssl_context(acme.cert, acme.key, acme.key)
    key = serialization.load_pem_private_key(acme.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )
    with pytest.raises(IdentityError, match="unencrypted"):
        client_ssl_context(acme.cert, locked, acme.ca)


# The dev PKI.


def test_the_dev_pki_is_idempotent_and_private(pki: DevPki) -> None:
    def content() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in pki.directory.rglob("*") if p.is_file()}

    before = content()
    again = devcerts.create(
        pki.directory, trust_domain=DOMAIN, shard="s0", tenants=["acme", "zeta"]
    )
    devcerts.issue_tenant(pki.directory, "acme")
    assert again == pki
    assert content() == before
    for key in pki.directory.rglob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    devcerts.issue_tenant(pki.directory, "a.new-one")
    assert set(content()) - set(before) == {
        str(pki.tenant("a.new-one").cert),
        str(pki.tenant("a.new-one").key),
    }
    assert not list(pki.directory.rglob("*.tmp"))
    names = x509.load_pem_x509_certificate(pki.shard.cert.read_bytes()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in found.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert spiffe_id_from_cert(pki.shard.cert.read_bytes(), DOMAIN).name == "s0"


def test_the_dev_pki_renews_what_no_longer_fits(pki: DevPki) -> None:
    before = pki.shard.cert.read_bytes()
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=devcerts.LEAF_DAYS - 6)
    devcerts.create(pki.directory, trust_domain=DOMAIN, shard="s0", now=soon)
    renewed = pki.shard.cert.read_bytes()
    assert renewed != before
    devcerts.create(pki.directory, trust_domain=DOMAIN, shard="s1", now=soon)
    assert spiffe_id_from_cert(pki.shard.cert.read_bytes(), DOMAIN).name == "s1"
    pki.tenant("acme").key.write_bytes(pki.tenant("zeta").key.read_bytes())
    devcerts.issue_tenant(pki.directory, "acme")
    context_of(pki.tenant("acme"))  # key and certificate belong together again


def test_a_dev_pki_of_another_kind_is_not_touched(pki: DevPki, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"trust domain 'pod\.test', not 'other\.test'"):
        devcerts.create(pki.directory, trust_domain="other.test")
    with pytest.raises(IdentityError, match="no dev PKI"):
        devcerts.issue_tenant(tmp_path / "nowhere", "acme")
    shutil.copy(pki.tenant("acme").key, pki.directory / "ca.key")
    with pytest.raises(IdentityError, match="do not belong together"):
        devcerts.create(pki.directory, trust_domain=DOMAIN)
    with pytest.raises(IdentityError, match="64 characters"):
        devcerts.create(tmp_path / "long", trust_domain="d" * 65)


def test_dev_certificates_pass_strict_verification(pki: DevPki) -> None:
    """Python 3.13 verifies strictly (RFC 5280) by default; so do other stacks."""
    server = server_ssl_context(pki.shard.cert, pki.shard.key, pki.ca)
    client = context_of(pki.tenant("acme"))
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    client.check_hostname = True
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    a = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    b = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (a, b):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert tenant_from_cert(b.getpeercert(binary_form=True), DOMAIN) == "acme"


def test_a_file_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    """Had ended in a traceback: certificates in a folder that is closed to this user."""
    for name in ("n" * 300, "absent"):
        with pytest.raises(IdentityError, match=r"too long|there is no file") as error:
            client_ssl_context(tmp_path / name, tmp_path / "k", tmp_path / "ca")
        assert str(tmp_path / name) in str(error.value)
        assert error.value.hint
