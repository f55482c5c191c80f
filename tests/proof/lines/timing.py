"""S4: how long an answer takes does not tell whether another tenant has the block.

Sessions of a tenant ask, in random order, for names that are stored by another tenant and for
names that nobody has, drawn from pools of one size and asked equally often. Which kind an ask is,
is thrown for every single one: whatever a shared and noisy machine does falls on both alike, so
that under "no difference" the area under the ROC curve (AUC) is 0.5 with a known standard error,
and a Kolmogorov-Smirnov test sees other differences than of location. It asks in many namespaces
of its own, because a name falls into another bucket of the index in each: with one, the luck of
2048 names (which buckets happen to be taken) would be asked again and again and look like a leak.
That luck alone moved AUC by 0.008 with 48 namespaces (root mean square of 15 runs, asks of 64
names), and moves it by 0.002 with 384 (of 8), which takes several sessions: one has 64 at most.

Invariant: a verdict rests on at least PAIRS asks of each kind; while it is in doubt more are made,
and all of them count.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from entresol_daemon.flash.index import ABSENT, Index
from entresol_daemon.shard.dispatch import SessionHandler
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import ConnectOptions, Endpoint, RemoteSpan
from entresol_proto.ids import EngineKey, NamespaceDescriptor, TenantName, wire_key
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.frames import FrameDecoder, FrameType, encode_frame
from entresol_proto.wire.opening import (
    Attach,
    Hello,
    NamespaceOpened,
    OpenNamespace,
    Welcome,
)
from tests.daemon.daemon_lab import client_of
from tests.proof.line import Line, Size, Slice, Tally
from tests.proof.tenancy import (
    BLOCK_BYTES,
    DESCRIPTOR,
    OTHER,
    Room,
    chain,
    room_in,
    run_on_loop,
    salted,
    soon,
    wire_keys,
)

POOL = 2048  # names of each kind
ASKERS, SPACES = 8, 48  # sessions that ask, and namespaces of each
PAIRS = 20_000  # asks of each kind, at least
PAIRS_MAX = 160_000  # and at most, while the verdict is in doubt
AUC_DEVIATION_MAX = 0.01
AUC_DEVIATION_CLEAR = 0.05  # beyond: nothing more needs to be asked
KS_CHANCE_MIN = 1e-6  # of so large a distance by chance
Z_999 = 3.29  # standard errors of a two-sided confidence of 99.9 %
DEADLINE_NS = 60_000_000_000

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What two samples of times say."""

    pairs: int
    auc: float
    auc_half_width: float  # of the 99.9 % interval around 0.5 under "no difference"
    ks_distance: float
    ks_chance: float

    @property
    def deviation(self) -> float:
        return abs(self.auc - 0.5)

    @property
    def holds(self) -> bool:
        return self.deviation <= AUC_DEVIATION_MAX and self.ks_chance >= KS_CHANCE_MIN


def judge(present: Times, absent: Times) -> Verdict:
    """AUC by ranks, ties shared (Mann-Whitney); two-sample KS with its asymptotic distribution."""
    n, m = len(present), len(absent)
    both = np.concatenate([present, absent])
    values, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    auc = (ranks[:n].sum() - n * (n + 1) / 2) / (n * m)
    # The exact variance of the rank sum under random labels; ties make it smaller.
    spread = (n + m + 1) - float((counts.astype(float) ** 3 - counts).sum()) / (
        (n + m) * (n + m - 1)
    )
    error = math.sqrt(spread / (12 * n * m))
    steps = [np.searchsorted(np.sort(one), values, side="right") / len(one)
             for one in (present, absent)]  # fmt: skip
    distance = float(np.abs(steps[0] - steps[1]).max())
    scaled = distance * math.sqrt(n * m / (n + m))
    chance = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    chance = 1.0 if scaled < 0.3 else min(1.0, max(0.0, chance))
    return Verdict(min(n, m), float(auc), Z_999 * error, distance, chance)


def descriptors(asker: int, count: int) -> list[NamespaceDescriptor]:
    """An asker's namespaces: of the first one the owner's, and others that differ in the salt."""
    several = [salted(f"salt {asker} {number}") for number in range(count)]
    return several if asker else [DESCRIPTOR, *several[1:]]


class Asker:
    """A session of another tenant, fed by hand inside the daemon's process: no network blurs what
    it measures. Made by `of`; `handler.finish` ends it."""

    def __init__(self, room: Room, tenant: str) -> None:
        self._decoder = FrameDecoder()
        self._decoder.allow(2**22)
        self._answered_ns = 0
        self._reply = b""
        self._event = asyncio.Event()
        self._next_id = 100
        self.handler = SessionHandler(
            room.running.daemon.shard, TenantName(tenant), write=self._took, close=lambda: None
        )
        self.endpoint: Endpoint
        self.spaces: list[NamespaceOpened] = []
        self.space: NamespaceOpened  # the one asked in now

    @classmethod
    async def of(
        cls, room: Room, tenant: str = OTHER, *, number: int = 0, spaces: int = SPACES
    ) -> Asker:
        """Opened, with a data path and its namespaces."""
        asker = cls(room, tenant)
        raw = await asker._say(
            FrameType.HELLO, Hello(1, 1, registry.same_host_id(), 1, "asker").encode()
        )
        offers = Welcome.decode(raw).offers
        offer = next(each for each in offers if each.kind.label == "shm")
        asker.endpoint, reply = await registry.connect(offer, soon(5), options=ConnectOptions())
        await asker._say(FrameType.ATTACH, Attach(int(offer.kind), reply).encode())
        for descriptor in descriptors(number, spaces):
            raw = await asker._say(
                FrameType.OPEN_NAMESPACE, OpenNamespace(descriptor.canonical()).encode()
            )
            asker.spaces.append(NamespaceOpened.decode(raw))
        asker.space = asker.spaces[0]
        return asker

    def _took(self, raw: bytes) -> None:
        self._answered_ns = time.perf_counter_ns()
        self._reply = raw
        self._event.set()

    async def _say(self, kind: FrameType, payload: bytes) -> bytes:
        await self.time(kind, payload)
        return self._decoder.feed(self._reply)[0].payload

    async def time(self, kind: FrameType, payload: bytes) -> int:
        """Ask; nanoseconds until the answer is handed to the transport."""
        self._next_id += 1
        frame = encode_frame(kind, self._next_id, payload)
        self._event.clear()
        began = time.perf_counter_ns()
        self.handler.receive(frame)
        if not self._event.is_set():
            await self._event.wait()
        return self._answered_ns - began

    def last(self) -> bytes:
        """The payload of the last answer."""
        return self._decoder.feed(self._reply)[0].payload

    async def close(self) -> None:
        await self.handler.finish()
        await self.endpoint.close()


Ask = Callable[[bytes | Sequence[bytes]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Measure:
    """One way to ask, with so many names at once. `whole` keys: the engine's, not wire keys. Those
    that are `quick` are asked at every size."""

    name: str
    count: int
    ask: Callable[[Asker, Sequence[bytes]], Awaitable[int]]
    whole: bool = False
    quick: bool = False


async def _exists(asker: Asker, names: Sequence[bytes]) -> int:
    return await asker.time(
        FrameType.EXISTS, data.Exists(asker.space.handle, b"".join(names)).encode()
    )


async def _touch(asker: Asker, names: Sequence[bytes]) -> int:
    return await asker.time(
        FrameType.TOUCH, data.Touch(asker.space.handle, b"".join(names)).encode()
    )


async def _fetch(asker: Asker, names: Sequence[bytes]) -> int:
    message = data.Fetch(asker.space.handle, data.OpenAt.HOST, False, DEADLINE_NS, b"".join(names))
    return await asker.time(FrameType.FETCH, message.encode())


async def _stage(asker: Asker, names: Sequence[bytes]) -> int:
    message = data.Stage(asker.space.handle, data.OpenAt.HOST, 1, DEADLINE_NS, b"".join(names))
    return await asker.time(FrameType.STAGE, message.encode())


async def _explain(asker: Asker, keys: Sequence[bytes]) -> int:
    return await asker.time(
        FrameType.EXPLAIN, data.Explain(asker.space.handle, tuple(keys)).encode()
    )


async def _reserve(asker: Asker, keys: Sequence[bytes]) -> int:
    items = tuple(
        data.PutItem(wire_key(asker.space.secret, EngineKey(key)), key, BLOCK_BYTES, 0, b"", b"")
        for key in keys
    )
    message = data.Reserve(asker.space.handle, data.Ack.ACCEPTED, DEADLINE_NS, items)
    taken = await asker.time(FrameType.RESERVE, message.encode())
    reserved = data.Reserved.decode(asker.last()).items
    assert all(item.status is Status.OK for item in reserved), "the other tenant's was told"
    given_up = data.Commit(tuple((item.put_id, RemoteSpan(0, 0, 0)) for item in reserved))
    await asker.time(FrameType.COMMIT, given_up.encode())
    return taken


MEASURES = (
    Measure("exists_1", 1, _exists), Measure("exists_64", 64, _exists, quick=True),
    Measure("touch_64", 64, _touch),
    Measure("fetch_1", 1, _fetch), Measure("fetch_16", 16, _fetch, quick=True),
    Measure("stage_16", 16, _stage),
    Measure("explain_1", 1, _explain, whole=True),
    Measure("explain_4", 4, _explain, whole=True, quick=True),
    Measure("reserve_2", 2, _reserve, whole=True),
)  # fmt: skip


async def sample(
    askers: Sequence[Asker],
    measure: Measure,
    pools: tuple[list[bytes], list[bytes]],
    rng: random.Random,
) -> Verdict:
    """Ask until there are enough of both kinds and the verdict is clear."""
    times: tuple[list[int], list[int]] = ([], [])
    wanted = PAIRS
    while True:
        for number in range(2 * wanted - len(times[0]) - len(times[1])):
            kind = rng.getrandbits(1)
            start = rng.randrange(POOL - measure.count + 1)
            asker = rng.choice(askers)
            asker.space = rng.choice(asker.spaces)
            times[kind].append(await measure.ask(asker, pools[kind][start : start + measure.count]))
            if number % 64 == 0:
                await asyncio.sleep(0)  # the daemon's own work gets its turn
        verdict = judge(np.array(times[0], np.int64), np.array(times[1], np.int64))
        in_doubt = not verdict.holds and verdict.deviation < AUC_DEVIATION_CLEAR
        if not in_doubt or wanted >= PAIRS_MAX:
            return verdict
        wanted *= 2


async def _round(folder: Path, seed: int, size: Size, tally: Tally, trace: bool) -> None:
    rng = random.Random(seed)
    measures = [each for each in MEASURES if each.quick or size is not Size.COMMIT]
    async with room_in(folder) as room:
        for at in range(0, POOL, 256):
            assert (await room.own.space.put(chain(seed + at, 256, "pool"))).ok
        for number in range(ASKERS):  # none of their namespaces is empty
            async with client_of(room.running, OTHER, "shm") as client:
                for descriptor in descriptors(number, SPACES):
                    space = await client.namespace(descriptor)
                    assert (await space.put(chain(seed, 4, "house"))).ok
        stored = [b.key for at in range(0, POOL, 256) for b in chain(seed + at, 256, "pool")]
        nowhere = [rng.randbytes(32) for _ in range(POOL)]
        # Names as only a thief of them has them: its own names for these keys say nothing at all.
        names = data.split_keys(wire_keys(room.own.shm.space, stored))
        none = [rng.randbytes(16) for _ in range(POOL)]
        askers = [await Asker.of(room, number=number) for number in range(ASKERS)]
        # EXPLAIN looks into all namespaces of its tenant: one with a few, or it takes for ever.
        third = await Asker.of(room, "third", spaces=2)
        try:
            for measure in measures:
                pools = (stored, nowhere) if measure.whole else (names, none)
                who = [third] if measure.ask is _explain else askers
                verdict = await sample(who, measure, pools, rng)
                _note(tally, seed, measure.name, verdict, trace)
        finally:
            for asker in [*askers, third]:
                await asker.close()


def _note(tally: Tally, seed: int, name: str, verdict: Verdict, trace: bool) -> None:
    tally.tried += verdict.pairs
    tally.survived += verdict.pairs if verdict.holds else 0
    tally.figure("max_auc_deviation", round(verdict.deviation, 5))
    tally.figure("max_auc_half_width_999", round(verdict.auc_half_width, 5))
    tally.figure(f"max_dev_{name}", round(verdict.deviation, 5))
    tally.figure("min_ks_chance", verdict.ks_chance)
    text = (
        f"{name}: AUC {verdict.auc:.4f} (99.9 % of chance within {verdict.auc_half_width:.4f}), "
        f"KS {verdict.ks_distance:.4f} (by chance: {verdict.ks_chance:.2g}), {verdict.pairs} pairs"
    )
    if not verdict.holds:
        tally.found(seed, text)
    if trace:
        print(text)


def run(part: Slice) -> Tally:
    """A unit is one daemon, asked in every way."""
    tally = Tally()
    for seed in part.seeds:
        run_on_loop(_round(part.folder / f"t{seed}", seed, part.size, tally, part.trace))
    return tally


@contextmanager
def shared_filter() -> Iterator[None]:
    """The bug: a filter over everybody's names, asked first because it is quick."""
    real = Index.lookup
    names: set[bytes] = set()

    def lookup(self: Index, namespace_id: bytes, keys: bytes) -> Any:
        if len(names) != len(self):
            names.clear()
            names.update(self.key_of(slot) for slot in self.live_slots().tolist())
        if keys[:16] not in names:
            return np.full(len(keys) // 16, ABSENT, np.int64)
        return real(self, namespace_id, keys)

    with mock.patch.object(Index, "lookup", lookup):
        yield


def canary() -> None:
    """See `shared_filter`. Raises: AssertionError when it goes unnoticed."""
    with (
        shared_filter(), tempfile.TemporaryDirectory() as folder,
        mock.patch(f"{__name__}.PAIRS", 4_000), mock.patch(f"{__name__}.PAIRS_MAX", 4_000),
        mock.patch(f"{__name__}.MEASURES", tuple(m for m in MEASURES if m.name == "exists_64")),
    ):  # fmt: skip
        tally = run(Slice(1, 1, Size.COMMIT, Path(folder)))
    seen = tally.figures["max_dev_exists_64"]
    assert tally.findings, tally.figures
    assert seen > 4 * AUC_DEVIATION_MAX, f"seen, but only just: {seen}"


LINES = (
    Line(
        id="S4",
        name="present elsewhere or nowhere: the time of an answer does not tell",
        unit="daemons, each asked in every way",
        units={Size.COMMIT: 1, Size.NIGHTLY: 3, Size.RELEASE: 6},
        slice_units=1,
        run=run,
        canary=canary,
        slice_deadline_s=2_400.0,
    ),
)
