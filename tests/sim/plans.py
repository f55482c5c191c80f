"""What happens in one seed, drawn before anything runs: geometry, faults, operations, mishaps.

A plan is data. A `Mask` leaves out parts of it (operations, hosts, kinds of faults, mishaps) and
everything else stays as it was drawn, which is what makes a failing seed shrink.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from entresol_daemon.flash.sim import Fault
from tests.sim.oracle import SALTS
from tests.sim.simdaemon import Geometry

TENANTS = ("alpha", "beta")
KEYS_PER_SPACE = 32
PROMISES_EVERY = 5
COUNTS = (1, 3, 8, 16, 16, 24, 32, 32)  # blocks of one call

# What may be wrong with a device besides crashes. Failing says so; rotten lies.
FAILING = (Fault.READ_EIO, Fault.WRITE_EIO, Fault.TORN_WRITE, Fault.ENOSPC, Fault.FLUSH_FAIL)
LYING = (
    Fault.LATENT_SECTOR, Fault.MISDIRECTED_READ, Fault.MISDIRECTED_WRITE, Fault.STALE_READ,
    Fault.LOST_WRITE, Fault.BIT_ROT,
)  # fmt: skip
NETWORK = (
    "cut", "stall", "refuse", "split", "op_fails", "op_drops", "op_twice", "op_late", "flips",
)  # fmt: skip
MISHAPS = ("crash", "stop", "hang", "vanish", "cut_off", "clock", "rotate")


@dataclass(frozen=True, slots=True)
class Op:
    """One call of a host."""

    number: int  # unique in the plan
    kind: str  # put get exists forget touch stage explain
    salt: str
    first: int  # of a run of keys
    count: int
    durable: bool = False
    at_daemon: bool = False
    prefix: bool = False
    deadline_ns: int = 3_000_000_000
    cancel_s: float = 0.0  # 0: not cancelled
    pause_s: float = 0.0  # afterwards

    def __str__(self) -> str:
        how = [
            word
            for word, said in (
                ("durable", self.durable), ("at-daemon", self.at_daemon), ("prefix", self.prefix),
                (f"deadline={self.deadline_ns / 1e9:g}s", self.deadline_ns < 3_000_000_000),
                (f"cancelled={self.cancel_s:.4f}s", self.cancel_s > 0),
            )
            if said
        ]  # fmt: skip
        keys = f"{self.salt}/{self.first}..{self.first + self.count - 1}"
        return " ".join([f"op{self.number}", self.kind, keys, *how])


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A host of a tenant and what its workers do, side by side."""

    name: str
    tenant: str
    hostile: bool
    same_machine: bool
    workers: tuple[tuple[Op, ...], ...]


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something that happens to the whole, in the moment in which a call has ended."""

    number: int
    kind: str
    after: int  # number of that call
    target: int  # which daemon or host
    seconds: float
    amount: int  # of a clock jump, ns


@dataclass(frozen=True, slots=True)
class Round:
    """Faults on, hosts at work; then all heals."""

    hosts: tuple[HostPlan, ...]
    mishaps: tuple[Mishap, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One seed."""

    seed: int
    flavour: str  # honest, failing, rotten, tight, large
    shards: int
    geometry: Geometry
    media: dict[Fault, float]
    network: dict[str, float]
    rounds: tuple[Round, ...]
    sizes: tuple[int, ...]

    @property
    def honest(self) -> bool:
        """True when what is acknowledged must be there."""
        return self.flavour in ("honest", "tight", "large")

    @property
    def explains_corruption(self) -> bool:
        """True when a host may meet a damaged block."""
        return bool(self.network.get("flips")) or any(kind in self.media for kind in LYING)


@dataclass(frozen=True, slots=True)
class Mask:
    """What a shrunk run leaves out."""

    ops: frozenset[int] = frozenset()
    hosts: frozenset[str] = frozenset()
    mishaps: frozenset[int] = frozenset()
    faults: frozenset[str] = frozenset()
    rounds: int = 0  # of the first so many, 0: all

    def apply(self, plan: Plan) -> Plan:
        """The plan without them."""
        rounds = tuple(
            Round(
                tuple(
                    replace(
                        host,
                        workers=tuple(
                            tuple(op for op in worker if op.number not in self.ops)
                            for worker in host.workers
                        ),
                    )
                    for host in each.hosts
                    if host.name not in self.hosts
                ),
                tuple(one for one in each.mishaps if one.number not in self.mishaps),
            )
            for each in plan.rounds[: self.rounds or len(plan.rounds)]
        )
        return replace(
            plan,
            rounds=rounds,
            media={kind: rate for kind, rate in plan.media.items() if kind not in self.faults},
            network={name: rate for name, rate in plan.network.items() if name not in self.faults},
        )


@dataclass(slots=True)
class _Draw:
    rng: random.Random
    flavour: str
    emphasis: str
    numbers: int = 0
    stored: list[tuple[str, int, int]] = field(default_factory=list)  # salt, first key, blocks

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers


def make_plan(seed: int, emphasis: str = "") -> Plan:
    """The plan of a seed. `emphasis`: "outages" for more of those, "sealing" for more puts; every
    fifth of the others has power fail right after something was promised."""
    if not emphasis and seed % PROMISES_EVERY == 0:
        emphasis = "promises"
    rng = random.Random(f"{seed} plan {emphasis}")
    flavour = rng.choices(
        ("honest", "failing", "rotten", "tight", "large"), (45, 15, 21, 16, 3)
    )[0]  # fmt: skip
    if emphasis == "promises":
        flavour = "honest"
    draw = _Draw(rng, flavour, emphasis)
    shards = rng.choices((1, 2, 3), (75, 20, 5))[0]
    geometry = _geometry(rng, flavour)
    media: dict[Fault, float] = {}
    if flavour == "failing":
        media = {k: rng.uniform(0.005, 0.06) for k in rng.sample(FAILING, rng.randint(1, 4))}
    if flavour == "rotten":
        kinds = (*rng.sample(LYING, rng.randint(1, 5)), *rng.sample(FAILING, rng.randint(0, 2)))
        media = {kind: rng.uniform(0.005, 0.06) for kind in kinds}
    if rng.random() < 0.5:
        media[Fault.LATENCY] = rng.uniform(0.002, 0.02)
    network = {}
    for name in rng.sample(NETWORK, rng.randint(0, 8)):
        high = {"cut": 0.004, "stall": 0.004, "refuse": 0.2, "split": 0.2}.get(name, 0.08)
        network[name] = rng.uniform(high / 4, high)
    rounds = tuple(_round(draw, number, shards) for number in range(rng.choice((1, 2, 2, 2, 3))))
    sizes: tuple[int, ...] = (1, 700, 3000, 4096, 9000)
    if flavour == "large":
        sizes = (5000, 30_000, 60_000, 150_000)
    return Plan(seed, flavour, shards, geometry, media, network, rounds, sizes)


def _geometry(rng: random.Random, flavour: str) -> Geometry:
    fabrics = rng.choice(
        (("tcp",), ("tcp",), ("tcp",), ("private",), ("shm", "tcp"), ("shm", "private"))
    )
    codec = rng.choice(("auto", "raw", "zstd"))
    dram = rng.choice((512 * 1024, 512 * 1024, 2 << 20))
    checkpoint = rng.random() < 0.5
    if flavour == "large":
        return Geometry(
            segments=16, segment_bytes=512 * 1024, dram_bytes=4 << 20, slab_bytes=1 << 20,
            block_bytes_max=256 * 1024, chunk_bytes=rng.choice((16 * 1024, 64 * 1024)),
            codec=codec, fabrics=fabrics, checkpoint=checkpoint,
        )  # fmt: skip
    segments = 9 if flavour == "tight" else 40
    return Geometry(
        segments=segments, segment_bytes=rng.choice((64, 96)) * 1024, dram_bytes=dram,
        codec=codec, fabrics=fabrics, checkpoint=checkpoint,
    )  # fmt: skip


def _round(draw: _Draw, number: int, shards: int) -> Round:
    rng = draw.rng
    hosts = []
    for at in range(rng.randint(1, 3)):
        hostile = rng.random() < 0.1
        workers = tuple(
            tuple(_op(draw, first=at == 0) for at in range(rng.randint(4, 9)))
            for _ in range(rng.randint(1, 3))
        )
        name = f"host{number}{at}{'x' if hostile else ''}"
        hosts.append(HostPlan(name, rng.choice(TENANTS), hostile, rng.random() < 0.7, workers))
    calls = [op for host in hosts for worker in host.workers for op in worker]
    # What was just promised is what a crash should meet.
    forgets = [op for op in calls if op.kind == "forget"]
    promises = [op for op in calls if op.kind == "put" and op.durable]
    count = rng.choices((0, 1, 2, 3), (20, 40, 30, 10))[0] + (draw.emphasis == "outages")
    weights = (40, 8, 16, 12, 8, 11, 40 if draw.emphasis == "sealing" else 5)
    if draw.emphasis == "promises":
        calls, count, weights = [*forgets, *promises] or calls, 2, (100, 0, 0, 0, 0, 0, 0)
    mishaps = tuple(
        Mishap(
            draw.next_number(),
            rng.choices(MISHAPS, weights)[0],
            rng.choice(rng.choice([forgets, promises, calls]) or calls).number,
            rng.randrange(6),
            rng.choice((0.01, 0.3, 1.5, 6.0)),
            rng.choice((-1, 1)) * rng.choice((10**6, 10**9, 3600 * 10**9, 10**17)),
        )
        for _ in range(count)
    )
    return Round(tuple(hosts), mishaps)


def _op(draw: _Draw, *, first: bool) -> Op:
    rng = draw.rng
    weights: Sequence[int] = (36, 35, 9, 10, 3, 4, 3)
    if draw.emphasis == "sealing":
        weights = (70, 15, 2, 12, 0, 1, 0)
    if draw.emphasis == "promises":
        weights = (50, 15, 10, 25, 0, 0, 0)
    kind = rng.choices(
        ("put", "get", "exists", "forget", "touch", "stage", "explain"), weights
    )[0]  # fmt: skip
    if first and rng.random() < 0.6:
        kind = "put"  # there should be something to be got
    count = rng.choice((1, 2, 4, 8)) if kind == "forget" else rng.choice(COUNTS)
    if draw.flavour == "large":
        count = min(count, 6)
    start = rng.randrange(KEYS_PER_SPACE - count + 1)
    salt = rng.choices(SALTS, (85, 15))[0]
    if kind == "put":
        draw.stored.append((salt, start, count))
    elif draw.stored and rng.random() < (0.9 if kind == "forget" else 0.6):
        salt, low, most = rng.choice(draw.stored[-4:])  # what may well be there
        count = min(count, most)
        start = low + rng.randrange(most - count + 1)
    return Op(
        draw.next_number(), kind, salt, start, count,
        durable=rng.random() < 0.6,
        at_daemon=rng.random() < 0.3,
        prefix=rng.random() < 0.2,
        deadline_ns=rng.choices((3 * 10**9, 200 * 10**6, 2 * 10**6), (80, 14, 6))[0],
        cancel_s=rng.uniform(0, 0.02) if rng.random() < 0.06 else 0.0,
        pause_s=rng.uniform(0, 0.1) if rng.random() < 0.3 else 0.0,
    )  # fmt: skip


def key_of(number: int) -> bytes:
    """The engine key of a number."""
    return b"key-%012d" % number
