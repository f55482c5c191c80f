"""tcp and verbs over a bad network: the kernel's netem loses, delays, reorders, damages packets.

Two namespaces, one wire, netem at both ends of it. A read that says OK has the right bytes; no read
outlasts its deadline by more than the fabric's own patience; once the wire is whole again, the data
path is too, or a new one is. `ENTRESOL_PROOF_SEED` and `ENTRESOL_PROOF_UNITS` as in
test_flash_devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import certs
import pytest
from fabrics import FABRICS, Pair, filled, soon

from entresol_proto import limits
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import ConnectOptions, Endpoint, Exposure, FabricServer, ReadOp
from entresol_proto.fabric.tcp import TcpEndpoint, TcpFabricServer
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.status import FabricError, Status
from tests.rdma import wire
from tests.rdma.evidence import NETEM, Trial, figure, trying

pytestmark = pytest.mark.timeout(300)

SEED = int(os.environ.get("ENTRESOL_PROOF_SEED", "1"))
UNITS = int(os.environ.get("ENTRESOL_PROOF_UNITS", "1"))
CANARY = os.environ.get("ENTRESOL_PROOF_CANARY", "").split(",")  # bugs to plant: "all is well"
KIB, MIB = limits.KIB, limits.MIB
BATCHES = 2
DEADLINE_S = 3.0
# What a fabric may take beyond the deadline to make sure that nothing lands any more, and an
# emulated machine to notice that.
PATIENCE_S = limits.VERBS_DRAIN_NS / 1e9 + 6.0
HEALED_S = 30.0
ENDS = ("rxe_host", "rxe_dpu")
WORDS = {
    "loss": "loss 25%",
    "delay": "delay 8ms 4ms",
    "reorder": "delay 4ms reorder 25% 50%",
    "duplicate": "duplicate 15%",
    "corrupt": "corrupt 8%",
    "rate": "rate 600kbit",
    "all of it": "delay 3ms 2ms reorder 20% 50% loss 1% duplicate 3% corrupt 1%",
    "silence": "loss 100%",
}
assert tuple(WORDS) == NETEM
# What TLS adds to tcp is seen as well in two of the networks as in all of them.
CASES = [
    *((name, what) for name in ("tcp-plain", "verbs") for what in WORDS),
    ("tcp-tls", "all of it"), ("tcp-tls", "silence"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _two_ends() -> None:
    if len(os.environ.get("ENTRESOL_RDMA_DEVICE", "").split(",")) < 2:
        pytest.skip("not run here: one device only (the suites run with --net pair)")


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: a reader that takes what did not arrive for what was asked."""
    if "all is well" not in CANARY:
        return
    for endpoint in (TcpEndpoint, VerbsEndpoint):
        honest = endpoint.read

        async def reads(self: Any, ops: Any, until_ns: int, honest: Any = honest) -> list[Status]:
            return [Status.OK] * len(await honest(self, ops, until_ns))

        monkeypatch.setattr(endpoint, "read", reads)


class Net:
    """A fabric's server in one namespace, and how the other one connects to it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.fabric = FABRICS[name]
        self.server: FabricServer
        self.options: ConnectOptions
        if name == "verbs":
            self.server, self.options = self.fabric.server(folder), self.fabric.options()
        elif name == "tcp-plain":
            self.server = TcpFabricServer(wire.PAIR["rxe_dpu"].address)
            self.options = ConnectOptions()
        else:
            ca = certs.make_ca()
            daemon = ca.issue("daemon", spiffe_uri="spiffe://test/daemon")
            self.server = TcpFabricServer(
                wire.PAIR["rxe_dpu"].address,
                ssl=certs.server_context(daemon, ca),
                certificate_sha256=lambda: daemon.sha256,
            )
            host = ca.issue("host", spiffe_uri="spiffe://test/tenant/a")
            self.options = ConnectOptions(ssl=certs.client_context(host, ca))

    async def join(self) -> Pair:
        """A session. Raises: FabricError."""
        offer = self.server.offer()
        with wire.sockets_of("host"):
            host, reply = await registry.connect(offer, soon(HEALED_S), options=self.options)
        try:
            daemon = await self.server.accept(offer, reply, soon(HEALED_S))
        except FabricError:
            await host.close()
            raise
        return Pair(self.fabric, self.server, daemon, host)


@contextlib.asynccontextmanager
async def net(name: str, folder: Path) -> AsyncIterator[Net]:
    made = Net(name, folder)
    with wire.sockets_of("dpu"):
        await made.server.start()
    try:
        yield made
    finally:
        await made.server.close()


def ops_of(rng: random.Random, exposure: Exposure, into: memoryview) -> list[tuple[int, ReadOp]]:
    """(offset, read) of pieces from anywhere in the exposure, one behind the other in `into`."""
    found, at = [], 0
    while at < len(into):
        size = min(rng.choice((512, 4 * KIB, 64 * KIB, 200_000)), len(into) - at)
        offset = rng.randrange(exposure.length_bytes - size + 1)
        found.append((offset, ReadOp(exposure.span(offset, size), into[at : at + size])))
        at += size
    return found


async def read(
    reader: Endpoint, content: bytes, exposure: Exposure, rng: random.Random, trial: Trial
) -> list[Status]:
    """One batch: in time, and exact wherever it says OK."""
    into = memoryview(bytearray(MIB // 4))
    pieces = ops_of(rng, exposure, into)
    with trial.within(DEADLINE_S + PATIENCE_S):
        statuses = await reader.read([op for _, op in pieces], soon(DEADLINE_S))
    for (offset, op), status in zip(pieces, statuses, strict=True):
        if status is Status.OK:
            trial.same(op.into, content[offset : offset + len(op.into)])
    return statuses


async def life(made: Net, what: str, content: bytes, seed: int, trial: Trial) -> None:
    rng = random.Random(seed)
    pair = await made.join()
    ok = tried = 0
    with filled(content) as buffer:
        exposures = [(await owner.expose(buffer), reader) for owner, reader in pair.ways()]
        for exposure, reader in exposures:
            assert set(await read(reader, content, exposure, rng, trial)) == {Status.OK}
        for end in ENDS:
            wire.netem(end, *WORDS[what].split())
        for _ in range(BATCHES):
            for exposure, reader in exposures:
                statuses = await read(reader, content, exposure, rng, trial)
                assert set(statuses) <= {Status.OK, Status.DEADLINE, Status.DISCONNECTED,
                                         Status.FABRIC_ERROR}, f"seed={seed}"  # fmt: skip
                tried += len(statuses)
                ok += statuses.count(Status.OK)
        for end in ENDS:
            wire.heal(end)
        figure("netem", fabric=made.fabric.name, what=what, seed=seed, reads=tried, ok=ok)
        if what == "silence":
            assert not ok, f"seed={seed}: the wire was not cut"
        async with asyncio.timeout(HEALED_S):
            await _works_again(made, pair, exposures, content, rng, trial)
    await pair.host.close()
    await pair.daemon.close()


async def _works_again(
    made: Net, pair: Pair, exposures: list[tuple[Exposure, Endpoint]], content: bytes,
    rng: random.Random, trial: Trial,
) -> None:  # fmt: skip
    """The wire is whole: every read is OK again, here or, if the data path ended, on a new one."""
    while not (pair.host.closed or pair.daemon.closed):
        found = [await read(reader, content, each, rng, trial) for each, reader in exposures]
        if all(set(statuses) == {Status.OK} for statuses in found):
            return
    fresh = await made.join()
    try:
        with filled(content) as buffer:
            for owner, reader in fresh.ways():
                exposure = await owner.expose(buffer)
                assert set(await read(reader, content, exposure, rng, trial)) == {Status.OK}
    finally:
        await fresh.host.close()
        await fresh.daemon.close()


@pytest.mark.parametrize(("name", "what"), CASES)
async def test_a_bad_network(name: str, what: str, tmp_path: Path) -> None:
    for seed in range(SEED, SEED + UNITS):
        content = random.Random(seed).randbytes(MIB)
        with wire.whole_afterwards(*ENDS), trying(f"netem: {what}") as trial:
            async with net(name, tmp_path) as made:
                await life(made, what, content, seed, trial)
