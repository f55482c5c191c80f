"""One seed of the simulation, from a plan to an outcome.

A round has two phases. Faults: hosts work while the device, the network and the machines misbehave.
Healing: the faults end, and within bounds every call must end, every client must be back, every
daemon must store and give again; then each tenant reads everything, hosts leave, and nothing may be
held. After the last round the daemons stop and start once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from entresol_client.placement import Placement
from entresol_daemon.flash.sim import Fault, FaultPlan
from entresol_proto.ids import EngineKey, NamespaceDescriptor, TenantName, wire_key
from entresol_proto.status import Status
from tests import simloop
from tests.sim.hostile import HostileHost
from tests.sim.oracle import SALTS, Name, Oracle, salt_of, space_of
from tests.sim.plans import KEYS_PER_SPACE, TENANTS, HostPlan, Mishap, Op, Plan, Round
from tests.sim.sealing import Sealings
from tests.sim.simdaemon import SimDaemon, private_folder
from tests.sim.simfabric import Fabrics
from tests.sim.simhost import SHARD_NAMES, SimHost, identities, one_tls_context_each
from tests.sim.simnet import SimNetwork, as_host
from tests.simloop import SimLoop, WallClock

# Bounds of the healing phase, in virtual seconds.
CALLS_END_S = 8.0  # the longest deadline, what a stalled stream may add, and closing
CLIENTS_BACK_S = 6.0  # breaker at its longest, a connect deadline, three pings missed
SERVES_S = 4.0
IDLE_S = 10.0  # leases, reservations, tombstones
STEPS_MAX = 3_000_000
SECONDS_MAX = 3_000.0


@dataclass(slots=True)
class Outcome:
    """What came of a seed. `wrong` is empty when every promise held."""

    seed: int
    flavour: str
    tried: int = 0
    full_stack: int = 0  # of those tried: through the real client
    served: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    trace: str = ""
    lines: list[str] = field(default_factory=list)
    injected: dict[str, int] = field(default_factory=dict)
    seals: int = 0
    keys: int = 0
    reused: int = 0
    seals_per_key_max: int = 0
    blocks_per_dek_max: int = 0
    virtual_s: float = 0.0
    steps: int = 0


class _Bugs(logging.Handler):
    """Collects what the program itself calls a bug: an unexpected exception in its log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Called for every record of level ERROR and above."""
        if record.exc_info or "event=bug" in record.msg:
            text = record.getMessage()
            if record.exc_info:
                text += " " + logging.Formatter().formatException(record.exc_info)
            self.found.append(text)


@contextlib.contextmanager
def _listening(loop: SimLoop) -> Iterator[_Bugs]:
    """Hear of bugs, and of nothing else: formatting warnings would cost more than the run."""
    bugs = _Bugs()
    logger = logging.getLogger("entresol")
    before = (logger.propagate, logging.root.manager.disable)
    logger.propagate = False
    logger.addHandler(bugs)
    logging.disable(logging.WARNING)
    loop.set_exception_handler(lambda _, context: bugs.found.append(str(_unhandled(context))))
    try:
        yield bugs
    finally:
        logger.removeHandler(bugs)
        logger.propagate = before[0]
        logging.disable(before[1])


def _unhandled(context: dict[str, object]) -> str:
    error = context.get("exception")
    text = f"unhandled: {context.get('message')}"
    if isinstance(error, BaseException):
        text += (
            f": {logging.Formatter().formatException((type(error), error, error.__traceback__))}"
        )
    return text


class Story:
    """A plan being lived."""

    def __init__(
        self, plan: Plan, folder: Path, oracle: Oracle, wall: WallClock, sealings: Sealings
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.plan = plan
        self.oracle = oracle
        oracle.excuse = self._was_told
        self.loop = loop
        self.wall = wall
        self.sealings = sealings
        self.network = SimNetwork(loop, plan.seed, dict(identities().der))
        loop.network = self.network
        self.fabrics = Fabrics(self.network, plan.seed)
        self.media = FaultPlan(rates={}, enabled=False)
        self.hostile_ops = 0
        self.daemons = [
            SimDaemon(
                name, private_folder(folder / name), plan.seed, plan.geometry, self.media,
                self.network, self.fabrics, self.wall,
            )
            for name in SHARD_NAMES[: plan.shards]
        ]  # fmt: skip
        self._rng = random.Random(f"{plan.seed} story")
        self._placement = Placement([(daemon.name, 1.0) for daemon in self.daemons])
        self._due: dict[int, list[Mishap]] = {}  # by the call they follow
        self._hosts: list[SimHost] = []
        self._at_work: list[asyncio.Task[None]] = []  # restarts and rotations
        self._sick = False
        self._starting = 0  # daemons

    async def live(self) -> None:
        """All of it."""
        for daemon in self.daemons:
            await daemon.start(TENANTS)
        for number, each in enumerate(self.plan.rounds):
            await self._round(number, each)
            if self.oracle.notes:
                return
        for daemon in self.daemons:
            self._collect(daemon)
            await daemon.stop()
        for daemon in self.daemons:
            await daemon.start(TENANTS)
            for text in self.sealings.uncounted(daemon.keyring):
                self.oracle.accuse(f"{daemon.name}: {text}")
        await self._audit("end")
        for daemon in self.daemons:
            await daemon.stop()

    # The first phase.

    async def _round(self, number: int, each: Round) -> None:
        self._sicken()
        hosts = [self._host(plan) for plan in each.hosts if not plan.hostile]
        hostile = [HostileHost(self, plan) for plan in each.hosts if plan.hostile]
        await asyncio.gather(*(host.start() for host in hosts))
        self._hosts = hosts
        for one in each.mishaps:
            self._due.setdefault(one.after, []).append(one)
        plans = {plan.name: plan for plan in each.hosts}
        jobs = [
            self._job(host.name, host.work(ops))
            for host in hosts
            for ops in plans[host.name].workers
        ]
        jobs += [self._job(h.plan.name, h.work(ops)) for h in hostile for ops in h.plan.workers]
        pending: set[asyncio.Task[None]] = set(jobs)
        if jobs:
            _, pending = await asyncio.wait(jobs, timeout=30.0)
        self._due.clear()
        await self._heal(number, hosts, hostile, jobs, pending)

    def _job(self, name: str, work: object) -> asyncio.Task[None]:
        with as_host(name):
            return self.loop.create_task(work)  # type: ignore[arg-type]

    def _host(self, plan: HostPlan) -> SimHost:
        return SimHost(
            plan.name, plan.tenant, self.plan.shards, self.network, self.fabrics, self.oracle,
            self.plan.seed, same_machine=plan.same_machine, on_end=self.call_ended,
        )  # fmt: skip

    def _set_media(self) -> None:
        """Faulty, unless all is healed or a daemon is starting."""
        self.media.enabled = self._sick and not self._starting

    def _sicken(self) -> None:
        self.media.rates = self.plan.media
        self._sick = True
        self._set_media()
        faults = self.network.faults
        for name, chance in self.plan.network.items():
            setattr(faults, name, chance)

    def call_ended(self, op: Op) -> None:
        """What was to happen in this moment happens."""
        for one in self._due.pop(op.number, ()):
            daemon = self.daemons[one.target % len(self.daemons)]
            self.oracle.note(f"{self.loop.time():.6f} {one.kind} {daemon.name} {one.seconds}s")
            self._count(one.kind)
            if one.kind in ("crash", "stop", "rotate"):
                work = self._rotate if one.kind == "rotate" else self._restart
                self._at_work.append(self.loop.create_task(work(daemon, one)))
            else:
                self._disturb(daemon, one)

    def _disturb(self, daemon: SimDaemon, one: Mishap) -> None:
        if one.kind == "clock":
            self.wall.jump(one.amount)
        elif one.kind == "hang" and daemon.up:
            self.network.freeze(daemon.name)
            self.loop.call_later(one.seconds, self.network.thaw, daemon.name)
        elif one.kind == "cut_off" and daemon.up:
            for stream in [s for s in self.network.streams if daemon.name in s.hosts]:
                stream.cut()
        elif one.kind == "vanish" and self._hosts:
            host = self._hosts[one.target % len(self._hosts)]
            host.gone = True
            self.network.vanish(host.name)
            self.loop.call_later(one.seconds, self.network.bury, host.name)

    async def _rotate(self, daemon: SimDaemon, one: Mishap) -> None:
        if daemon.up:
            tenant = TENANTS[one.target % len(TENANTS)]
            await daemon.shard.keycare.rotate(TenantName(tenant), force=False)

    async def _restart(self, daemon: SimDaemon, one: Mishap) -> None:
        if not daemon.up:
            return
        self._collect(daemon)
        if one.kind == "crash":
            await daemon.crash()
        else:
            await daemon.stop()
        await asyncio.sleep(min(one.seconds, 2.0))
        self._starting += 1  # a start that fails is systemd's
        self._set_media()
        await daemon.start(TENANTS)
        self._starting -= 1
        self._set_media()
        self._look_at_indexes()

    def _look_at_indexes(self) -> None:
        """Right after a start, before anybody stores again what may be missing."""
        for name in list(self.oracle.stories):
            owner = self.daemons[self._owner(name)]  # a hostile host stores where it likes
            if owner.up:
                self.oracle.judge(name, self.oracle.look(name), owner.has(name))

    def _owner(self, name: Name) -> int:
        digest = NamespaceDescriptor(model="sim", cache_salt=salt_of(name[0])).digest()
        return self._placement.owner(digest, EngineKey(name[1]))

    def _count(self, name: str) -> None:
        injected = self.network.faults.injected
        injected[name] = injected.get(name, 0) + 1

    # The second phase.

    async def _heal(
        self, number: int, hosts: list[SimHost], hostile: list[HostileHost],
        jobs: list[asyncio.Task[None]], pending: set[asyncio.Task[None]],
    ) -> None:  # fmt: skip
        oracle, loop = self.oracle, self.loop
        oracle.note(f"{loop.time():.6f} healing")
        self._sick = False
        self._set_media()
        self.network.faults.heal()
        for daemon in self.daemons:
            self.network.thaw(daemon.name)
        if self._at_work:
            await asyncio.wait(self._at_work)
            for task in self._at_work:
                task.result()
            self._at_work.clear()
        if pending:
            _, late = await asyncio.wait(pending, timeout=CALLS_END_S)
            for task in late:
                oracle.accuse(f"round {number}: a call does not end: {task.get_stack(limit=1)}")
                task.cancel()
        for job in jobs:
            if job.done() and not job.cancelled():
                job.result()
        for daemon in self.daemons:
            if daemon.shard.parts.engine.failed:
                self._collect(daemon)
                self._count("engine_failed")
            await daemon.restart_if_failed(TENANTS)
        alive = [host for host in hosts if not host.gone]
        until_s = loop.time() + CLIENTS_BACK_S
        for host in alive:
            if not await host.healed(until_s):
                oracle.accuse(f"round {number}: {host.name} does not come back")
        for stranger in hostile:
            await stranger.leave()
        for host in hosts:
            if host.gone:
                self.network.bury(host.name)
            with as_host(host.name):
                await host.close()
        await self._audit(f"round {number}")
        await self._idle(number)

    async def _audit(self, when: str) -> None:
        """Fresh hosts read everything, and store and read something: the tier serves."""
        oracle = self.oracle
        for tenant in TENANTS:
            host = self._host(HostPlan(f"audit-{when}-{tenant}", tenant, False, True, ()))
            with as_host(host.name):
                await host.start()
                for salt in SALTS:
                    found = await host.audit(salt)
                    for key, status in found.items():
                        name = (space_of(tenant, salt), key)
                        oracle.judge(name, oracle.look(name), status is Status.OK)
                served = await self._serves(host)
                if not served:
                    oracle.accuse(f"{when}: the tier does not serve {tenant} again")
                await host.close()
        unexplained = oracle.corrupt_seen + sum(
            count
            for d in self.daemons
            for count in d.shard.parts.meters.totals.corrupt_where.values()
        )
        if unexplained and not self.plan.explains_corruption and not self.hostile_ops:
            oracle.accuse(f"{when}: {unexplained} corrupt blocks that nothing explains")

    async def _serves(self, host: SimHost) -> bool:
        """Store and read a block, within a bound.

        One that lies on a sector that is bad for good is forgotten first: the daemon would ask for
        it again a minute later, and then drop it.
        """
        until_s = self.loop.time() + SERVES_S
        rotten = Fault.LATENT_SECTOR in self.plan.media
        while self.loop.time() < until_s:
            op = Op(0, "put", "s", KEYS_PER_SPACE - 1, 1, durable=True)
            stored = await host._put(op)
            read = await host._get(op) if stored in ("ok", "exists") else ""
            if read == "ok":
                return True
            if rotten and stored == "exists" and read == "io_error":
                await host._forget(op)
            await asyncio.sleep(0.1)
        return False

    async def _idle(self, number: int) -> None:
        """Within a bound nothing is held and the books are right."""
        until_s = self.loop.time() + IDLE_S
        while True:
            wrong = [text for daemon in self.daemons for text in daemon.check_idle()]
            if not wrong or self.loop.time() >= until_s:
                break
            await asyncio.sleep(0.1)
        wrong += [text for daemon in self.daemons for text in daemon.check_events()]
        for daemon in self.daemons:
            wrong += self.sealings.uncounted(daemon.keyring)
        for text in wrong:
            self.oracle.accuse(f"round {number}: {text}")
        self.oracle.quiet()

    # Blocks that were dropped and told.

    def _collect(self, daemon: SimDaemon) -> None:
        if daemon.up:
            daemon.remember_gone()

    def _was_told(self, name: Name) -> bool:
        """An event said that the block was evicted, or lost: possible only where space is short."""
        if self.plan.flavour not in ("tight", "large"):
            return False
        for daemon in self.daemons:
            self._collect(daemon)
            namespace, secret = daemon.spaces[name[0]]
            if (namespace, wire_key(secret, EngineKey(name[1]))) in daemon.told_gone:
                return True
        return False


def run_plan(plan: Plan, folder: Path, *, lines: bool = False) -> Outcome:
    """Live a plan on a fresh loop. Never raises for what the program does."""
    loop = SimLoop(plan.seed, steps_max=STEPS_MAX, seconds_max=SECONDS_MAX)
    wall = WallClock(loop)
    oracle = Oracle(plan.seed, honest=plan.honest, sizes=plan.sizes)
    oracle.lines = [] if lines else None
    sealings = Sealings()
    identities()
    lived: list[Story] = []

    async def live() -> None:
        lived.append(Story(plan, folder, oracle, wall, sealings))
        await lived[0].live()

    with (
        _listening(loop) as bugs,
        sealings,
        one_tls_context_each(),
        simloop.virtual_world(loop, wall, plan.seed),
    ):
        try:
            simloop.run(live(), plan.seed, loop=loop)
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            oracle.accuse(f"{type(error).__name__}: {error} ({trace.name}:{trace.lineno})")
    for text in (*bugs.found, *sealings.wrong()):
        oracle.accuse(text)
    return _outcome(lived[0], sealings)


def _outcome(story: Story, sealings: Sealings) -> Outcome:
    oracle, loop = story.oracle, story.loop
    injected = dict(story.network.faults.injected)
    for kind, count in story.media.injected.items():
        injected[kind.value] = injected.get(kind.value, 0) + count
    oracle.note(loop.steps, f"{loop.time():.6f}", story.network.bytes_carried, sealings.seals)
    oracle.note(sorted(injected.items()))
    return Outcome(
        story.plan.seed,
        story.plan.flavour,
        tried=oracle.tried,
        full_stack=oracle.tried - story.hostile_ops,
        served=oracle.served,
        wrong_bytes=oracle.wrong_bytes,
        lost=oracle.lost,
        wrong=list(oracle.notes),
        trace=oracle.trace.hexdigest(),
        lines=oracle.lines or [],
        injected=injected,
        seals=sealings.seals,
        keys=len(sealings.keys),
        reused=sealings.reused,
        seals_per_key_max=sealings.seals_per_key_max,
        blocks_per_dek_max=sealings.blocks_per_dek_max,
        virtual_s=loop.time(),
        steps=loop.steps,
    )
