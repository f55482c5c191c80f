"""Leases over verbs in volume: hostile reads after their end, past their bounds, by others' keys.

A refused read ends the data path for good, so that every attempt takes a session of its own. What
is exposed is a secret, where a read lands is painted: a byte that is not paint has leaked.
`ENTRESOL_PROOF_SEED` and `ENTRESOL_PROOF_UNITS` as in test_flash_devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fabrics import FABRICS, Pair, filled, join, serving
from test_verbs_fences import REFUSED, REFUSED_S, steal

from entresol_proto.fabric.base import FabricServer, RemoteSpan
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.status import Status
from tests.rdma.evidence import trying

pytestmark = pytest.mark.timeout(500)

SEED = int(os.environ.get("ENTRESOL_PROOF_SEED", "1"))
UNITS = int(os.environ.get("ENTRESOL_PROOF_UNITS", "1"))
CANARY = os.environ.get("ENTRESOL_PROOF_CANARY", "").split(",")  # bugs to plant: "no revoke"
VERBS = FABRICS["verbs"]
ATTEMPTS = 6  # of each kind, per unit
SIZE = 3 * 4096
PAINT = b"\xa5"


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: a lease's end that takes nothing away."""
    if "no revoke" in CANARY:

        async def revoke(self: VerbsEndpoint, exposure: Any) -> None:
            """Nothing."""

        monkeypatch.setattr(VerbsEndpoint, "revoke", revoke)


Plan = Callable[[Pair, Pair, MemfdBuffer, random.Random], Awaitable[RemoteSpan]]


async def revoked(mine: Pair, _: Pair, secret: MemfdBuffer, rng: random.Random) -> RemoteSpan:
    """A lease that was given, used by its owner, and is over."""
    exposure = await mine.daemon.expose(secret)
    offset = rng.randrange(0, SIZE - 512)
    if rng.random() < 0.5:
        assert (await steal(mine.host, mine.daemon, exposure.span(offset, 512)))[0] is Status.OK
    await mine.daemon.revoke(exposure)
    return RemoteSpan(exposure.rkey, exposure.address + offset, rng.randrange(1, 512))


async def of_another(_: Pair, other: Pair, secret: MemfdBuffer, rng: random.Random) -> RemoteSpan:
    """A lease that another session holds, and goes on to hold."""
    exposure = await other.daemon.expose(secret)
    return RemoteSpan(exposure.rkey, exposure.address, rng.randrange(1, SIZE))


async def out_of_bounds(mine: Pair, _: Pair, secret: MemfdBuffer, rng: random.Random) -> RemoteSpan:
    """More than was leased: before it, behind it, over its end."""
    exposure = await mine.daemon.expose(secret.view[4096:8192])
    before, length = rng.choice(
        [(rng.randrange(1, 4097), rng.randrange(1, 64)), (-4096, rng.randrange(1, 4096)),
         (-rng.randrange(1, 4096), 4096), (0, 4096 + rng.randrange(1, 4096))]
    )  # fmt: skip
    return RemoteSpan(exposure.rkey, exposure.address - before, length)


async def forged(mine: Pair, _: Pair, secret: MemfdBuffer, rng: random.Random) -> RemoteSpan:
    """A key near the true one, or any other."""
    exposure = await mine.daemon.expose(secret)
    near = [exposure.rkey ^ 1 << rng.randrange(32), exposure.rkey + 256 * rng.randrange(1, 9)]
    rkey = rng.choice([*near, rng.getrandbits(32)]) % 2**32
    return RemoteSpan(rkey if rkey != exposure.rkey else rkey ^ 1, exposure.address, SIZE)


KINDS: dict[str, Plan] = {
    "rkey after lease end": revoked,
    "rkey of another session": of_another,
    "out-of-bounds read": out_of_bounds,
    "forged lease": forged,
}


async def attempt(kind: str, server: FabricServer, secret: MemfdBuffer, seed: int) -> None:
    rng = random.Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        mine, other = await join(VERBS, server), await join(VERBS, server)
        for end in (mine.host, mine.daemon, other.host, other.daemon):
            stack.push_async_callback(end.close)
        span = await KINDS[kind](mine, other, secret, rng)
        with trying(kind) as trial:
            with trial.within(REFUSED_S):
                status, landed = await steal(mine.host, mine.daemon, span)
            trial.same(landed, PAINT * len(landed))
            assert status in REFUSED, f"seed={seed}"


@pytest.mark.parametrize("kind", list(KINDS))
async def test_hostile_reads(kind: str, tmp_path: Path) -> None:
    async with serving(VERBS, tmp_path) as server:
        with filled(b"s" * SIZE) as secret:
            for unit in range(SEED, SEED + UNITS):
                for number in range(ATTEMPTS):
                    await attempt(kind, server, secret, unit * 1_000 + number)
                    await asyncio.sleep(0)
