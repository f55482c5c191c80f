"""S8: who gets in, at the control stream and at gRPC, over real handshakes with a real daemon.

A unit is one daemon with its own CA and every case of the matrix at both listeners. Each refusal is
paired with a good certificate that gets in, before and after, so that a closed door is no success.
An attempt is one case at one listener.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from entresol_daemon.config import Config
from entresol_proto.ids import TenantName
from tests import certs
from tests.daemon.daemon_lab import DESCRIPTOR, raw_of
from tests.daemon.pki_lab import (
    DOMAIN,
    Pki,
    config_of,
    described,
    greeted,
    grpc_channel,
    refused_pairs,
    without_certificate,
)
from tests.harness import Running, running_daemon
from tests.proof.line import Line, Size, Slice, Tally

AGE_S = 1.0
AGE_NS = int(AGE_S * 1e9)
LEASE_NS = 100_000_000
# gRPC spreads ages by a tenth either way, then gives a call `connection_age_grace_s`.
GRPC_END_S = 1.1 * AGE_S + 10.0 + 4.0
CONTROL_END_S = AGE_S + 2 * LEASE_NS / 1e9 + 4.0


class Matrix:
    """One daemon under one CA, and what was tried at it."""

    def __init__(self, running: Running, pki: Pki, folder: Path, seed: int, tally: Tally) -> None:
        self.running = running
        self.pki = pki
        self.folder = folder
        self._seed = seed
        self._tally = tally
        self.good = pki.ca.issue("good", spiffe_uri=f"spiffe://{DOMAIN}/tenant/dev")

    def check(self, held: bool, what: str) -> None:
        """One attempt, and whether it ended as it must."""
        self._tally.tried += 1
        if held:
            self._tally.survived += 1
        else:
            self._tally.found(self._seed, what)

    async def both(self, pair: certs.CertPair | None, *, in_: bool, what: str) -> None:
        """A certificate at both doors."""
        context = certs.client_context(pair, self.pki.ca) if pair else without_certificate(self.pki)
        self.check(await greeted(self.running, context) is in_, f"control: {what}")
        async with grpc_channel(self.running, pair, self.pki.ca.pem) as channel:
            self.check((await described(channel) != "") is in_, f"grpc: {what}")

    async def kinds(self) -> None:
        """Every kind of certificate."""
        await self.both(self.good, in_=True, what="a good certificate")
        for what, pair in refused_pairs(self.pki).items():
            await self.both(pair, in_=False, what=what)
        await self.both(None, in_=False, what="no certificate")
        old = certs.client_context(self.good, self.pki.ca)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        self.check(not await greeted(self.running, old), "control: TLS 1.2")
        await self.both(self.good, in_=True, what="a good certificate, after the others")

    async def rotation(self) -> None:
        """New server certificate, then a new CA, both without a restart."""
        before = self.good
        self.pki.install("dev")
        await self.both(before, in_=True, what="the same tenant at a rotated server certificate")
        self.pki.ca = certs.make_ca("the pod, rotated")
        self.pki.install("dev")
        self.good = self.pki.ca.issue("again", spiffe_uri=f"spiffe://{DOMAIN}/tenant/dev")
        await self.both(self.good, in_=True, what="a certificate of the new CA")
        await self.both(before, in_=False, what="a certificate of the old CA")

    async def removal(self) -> None:
        """A tenant that was erased: its certificate is as valid as ever and opens nothing."""
        gone = self.pki.ca.issue("gone", spiffe_uri=f"spiffe://{DOMAIN}/tenant/other")
        config = config_of(self.running, gone, self.pki.ca.pem, self.folder)
        async with raw_of(self.running, "other", config=config) as raw:
            await raw.namespace(DESCRIPTOR)
            await self.running.daemon.admin.tenant_erase(TenantName("other"))
            self.check(await _comes_true(raw.connection.lost.done, 5.0), "control: session of an "
                       "erased tenant goes on")  # fmt: skip
        try:
            async with raw_of(self.running, "other", config=config):
                self.check(False, "control: an erased tenant opened a session")
        except Exception as error:  # refused in whatever way a client tells it
            self.check(True, f"control: {error}")
        async with grpc_channel(self.running, gone, self.pki.ca.pem) as channel:
            self.check(await described(channel) == "", "grpc: an erased tenant was described")

    async def revocation(self) -> None:
        """What was opened under a CA that is gone since ends by itself, at both doors."""
        config = config_of(self.running, self.good, self.pki.ca.pem, self.folder)
        async with (
            raw_of(self.running, config=config) as raw,
            grpc_channel(self.running, self.good, self.pki.ca.pem) as channel,
        ):
            self.check(await described(channel) == "dev", "grpc: before the revocation")
            self.pki.ca = certs.make_ca("the pod, without them")
            self.pki.install("dev")
            began_s = time.monotonic()
            ended = await _comes_true(raw.connection.lost.done, CONTROL_END_S)
            self.check(ended, f"control: a revoked session lives after {CONTROL_END_S} s")
            refused = False
            while not refused and time.monotonic() - began_s < GRPC_END_S:
                refused = await described(channel, 2.0) == ""
                await asyncio.sleep(0.1)
            self.check(refused, f"grpc: a revoked connection lives after {GRPC_END_S} s")


async def _comes_true(check: Callable[[], bool], seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while not check():
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(0.02)
    return True


def _changed(pki: Pki) -> Callable[[Config], Config]:
    change = pki.change(reload_interval_ns=0, session_age_max_ns=AGE_NS)

    def both(config: Config) -> Config:
        config = change(config)
        return replace(config, limits=replace(config.limits, lease_ns=LEASE_NS))

    return both


async def _round(
    folder: Path, seed: int, tally: Tally, parts: Callable[[Matrix], Awaitable[None]]
) -> None:
    pki = Pki.at(folder / "pki")
    async with running_daemon(folder / "d", _changed(pki)) as running:
        await parts(Matrix(running, pki, folder, seed, tally))


async def _everything(matrix: Matrix) -> None:
    await matrix.kinds()
    await matrix.rotation()
    await matrix.removal()
    await matrix.revocation()


def run(work: Slice) -> Tally:
    """A daemon and the whole matrix for each seed."""
    tally = Tally()
    for seed in work.seeds:
        folder = work.folder / str(seed)
        folder.mkdir()
        asyncio.run(_round(folder, seed, tally, _everything))
    return tally


def canary() -> None:
    """A daemon that takes any role, and one whose gRPC connections never age, are found."""
    import tempfile

    from entresol_daemon import server
    from entresol_daemon.control import grpc_server, grpc_services, listener
    from entresol_proto.identity import spiffe_id_from_cert

    def any_role(raw: bytes | None, domain: str) -> Any:
        return TenantName(spiffe_id_from_cert(raw, domain).name)

    def found(parts: Callable[[Matrix], Awaitable[None]]) -> bool:
        tally = Tally()
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(_round(Path(folder), 1, tally, parts))
        return bool(tally.findings)

    with (
        patch.object(listener, "tenant_from_cert", any_role),
        patch.object(grpc_services, "tenant_from_cert", any_role),
    ):
        assert found(Matrix.kinds), "a shard's certificate got in, and nobody noticed"
    whole = grpc_server.GrpcLimits
    with patch.object(server, "GrpcLimits", lambda **_: whole()):
        assert found(Matrix.revocation), "a gRPC connection that never ends was not noticed"


LINES = (
    Line(
        id="S8",
        name="certificates at both listeners",
        unit="daemons with the whole matrix",
        units={Size.COMMIT: 1, Size.NIGHTLY: 3, Size.RELEASE: 10},
        slice_units=1,
        run=run,
        canary=canary,
        slice_deadline_s=120.0,
    ),
)
