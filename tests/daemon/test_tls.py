"""Who gets in: every kind of certificate over real handshakes, rotation, the age of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import certs
import pytest
from daemon_lab import DESCRIPTOR, client_of, get, keys_of, put, raw_of, shape
from harness import eventually, running_daemon
from pki_lab import DOMAIN, Pki, config_of, greeted, refused_pairs, without_certificate

from entresol_client.client import AsyncClient
from entresol_client.results import RequestFailedError
from entresol_daemon.shard.turns import LoopTurns
from entresol_proto.identity import IdentityError
from entresol_proto.limits import KIB
from entresol_proto.status import Status

pytestmark = pytest.mark.daemon


async def test_every_kind_of_certificate(tmp_path: Path) -> None:
    pki = Pki.at(tmp_path / "pki")
    async with running_daemon(tmp_path / "d", pki.change()) as running:
        for what, pair in refused_pairs(pki).items():
            assert not await greeted(running, certs.client_context(pair, pki.ca)), what
        assert not await greeted(running, without_certificate(pki)), "no certificate"
        allowed = pki.ca.issue("x", spiffe_uri=f"spiffe://{DOMAIN}/tenant/dev")
        assert await greeted(running, certs.client_context(allowed, pki.ca))
        old = certs.client_context(allowed, pki.ca)
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert not await greeted(running, old), "TLS 1.2"
        assert len(running.daemon.shard.sessions) <= 1
        config = config_of(running, allowed, pki.ca.pem, tmp_path)
        async with raw_of(running, config=config) as raw:
            assert raw.opened.welcome.tenant == "dev"
        # The other direction: a host talks to nobody but the very shard it names.
        for spoiled in (
            replace(config, shards=(replace(config.shards[0], name="shard9"),)),
            replace(config, tls=replace(config.tls, trust_domain="other.pod")),
            config_of(running, allowed, certs.make_ca("foreign").pem, tmp_path),
        ):
            with pytest.raises(RequestFailedError) as caught:
                async with raw_of(running, config=spoiled):
                    pass
            assert caught.value.status is Status.FORBIDDEN


async def test_who_comes_again_and_again_without_a_tenants_name_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki.at(tmp_path / "pki")
    async with running_daemon(tmp_path / "d", pki.change()) as running:
        context = certs.client_context(refused_pairs(pki)["a shard's"], pki.ca)
        for _ in range(3):
            assert not await greeted(running, context)
    said = [line for line in caplog.messages if "event=identity_refused" in line]
    assert len(said) == 1
    assert "address=127.0.0.1 unsaid=0 reason=" in said[0]


async def test_tls_data_streams_want_the_same_certificates(tmp_path: Path) -> None:
    """A stolen ticket is useless without a certificate the pod trusts."""
    change = shape(fabrics=["tcp"], tcp_tls=True)
    async with running_daemon(tmp_path / "d", change) as running, client_of(running, fabric="tls"):
        tls = running.client_config("dev").tls
        for context in (
            certs.client_context(certs.make_ca().issue("x"), certs.TestCA(*_ca_of(tls.ca))),
            None,
        ):
            with contextlib.suppress(ssl.SSLError, OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", running.daemon.fabrics[1].port, ssl=context
                )
                writer.write(bytes(64))
                async with asyncio.timeout(10):
                    said = await reader.read(1)
                writer.transport.abort()
                assert not said or (context is None and said[0] == 0x15), said  # a TLS alert


async def test_data_streams_shake_hands_in_turns_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    shake_hands = LoopTurns.shake_hands

    async def noted(turns: LoopTurns, origin: str, now_ns: int) -> None:
        asked.append(origin)
        await shake_hands(turns, origin, now_ns)

    monkeypatch.setattr(LoopTurns, "shake_hands", noted)
    for fabric in ("tls", "tcp"):
        asked.clear()
        change = shape(fabrics=["tcp"], tcp_tls=fabric == "tls")
        async with (
            running_daemon(tmp_path / fabric, change) as running,
            client_of(running, fabric=fabric),
        ):
            streams = running.daemon.config.fabric.streams
        assert asked.count("data 127.0.0.1") == (streams if fabric == "tls" else 0)
        assert "127.0.0.1" in asked


def _ca_of(path: Path) -> tuple[object, object]:
    from cryptography import x509

    return x509.load_pem_x509_certificate(path.read_bytes()), None


async def test_rotation_without_restart(tmp_path: Path) -> None:
    pki = Pki.at(tmp_path / "pki")
    uri = f"spiffe://{DOMAIN}/tenant/dev"
    async with running_daemon(tmp_path / "d", pki.change(reload_interval_ns=0)) as running:
        first = pki.ca.issue("first", spiffe_uri=uri)
        config = config_of(running, first, pki.ca.pem, tmp_path)
        async with await AsyncClient.open(config) as client:
            space = await client.namespace(DESCRIPTOR)
            keys = keys_of(4)
            assert (await put(space, keys, 64 * KIB)).ok
            # A broken file changes nothing.
            (pki.folder / "ca.pem").write_text("garbage")
            assert await greeted(running, certs.client_context(first, pki.ca))
            assert running.daemon.tls.failures
            before, pki.ca = pki.ca, certs.make_ca("the pod, rotated")
            pki.install("dev")
            second = pki.ca.issue("second", spiffe_uri=uri)
            assert await greeted(running, certs.client_context(second, pki.ca))
            assert not await greeted(running, certs.client_context(first, before)), "old pair"
            old_cert_new_ca = certs.client_context(first, before)
            old_cert_new_ca.load_verify_locations(cadata=pki.ca.pem.decode())
            assert not await greeted(running, old_cert_new_ca), "the old certificate"
            assert (await get(space, keys, 64 * KIB)).ok, "sessions of before go on"
        assert running.daemon.tls.reloads == 1


async def test_a_certificate_that_is_not_valid_is_not_ready(tmp_path: Path) -> None:
    """It said ready, and no host could connect. A clock may be set late, so it starts."""
    pki = Pki.at(tmp_path / "pki")
    uri = f"spiffe://{DOMAIN}/shard/dev"
    expired = pki.ca.issue("dev", spiffe_uri=uri, days=-1)
    (pki.folder / "shard.key").write_bytes(expired.key_pem)
    (pki.folder / "shard.pem").write_bytes(expired.cert_pem)
    async with running_daemon(tmp_path / "d", pki.change(reload_interval_ns=0)) as running:
        said = await asyncio.to_thread(_ready, running.daemon.http.port)
        assert said[0] == 503
        assert "the certificate expired on" in said[1]
        pki.install("dev")
        assert (await asyncio.to_thread(_ready, running.daemon.http.port))[0] == 200


def _ready(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


async def test_a_certificate_of_somebody_else_is_no_start(tmp_path: Path) -> None:
    pki = Pki.at(tmp_path / "pki")
    pki.install("another")
    with pytest.raises(IdentityError, match="not of shard dev"):
        async with running_daemon(tmp_path / "d", pki.change()):
            pass
    assert not (tmp_path / "d/state/flash.data").exists(), "formatted before it was judged"


async def test_sessions_end_at_their_age(tmp_path: Path) -> None:
    pki = Pki.at(tmp_path / "pki")
    change = pki.change(session_age_max_ns=1_000_000_000)

    def aged(config: Any) -> Any:
        config = change(config)
        return replace(config, limits=replace(config.limits, lease_ns=100_000_000))

    async with running_daemon(tmp_path / "d", aged) as running:
        pair = pki.ca.issue("x", spiffe_uri=f"spiffe://{DOMAIN}/tenant/dev")
        config = config_of(running, pair, pki.ca.pem, tmp_path)
        async with raw_of(running, config=config) as stubborn:
            begun = time.monotonic()
            async with await AsyncClient.open(config) as client:
                space = await client.namespace(DESCRIPTOR)
                keys = keys_of(4)
                await eventually(lambda: client.shards()[0].connected, seconds=30)
                assert (await put(space, keys, 64 * KIB)).stored
                await eventually(lambda: client.stats()["connects"] >= 3, seconds=30)
                for _ in range(50):
                    found = await get(space, keys, 64 * KIB)
                    if found.ok:
                        break
                    await asyncio.sleep(0.1)
                assert found.ok
                assert client.stats()["breaker_openings"] == 0
            # One that ignores the goodbye is cut.
            await eventually(stubborn.connection.lost.done, seconds=30, what="its end")
            assert time.monotonic() - begun > 0.9
        assert os.path.exists(config.tls.cert)
