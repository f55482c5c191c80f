"""What one tenant can do to the others, and what the others notice.

`storm` runs four tenants that behave, then the same four beside one that floods, in the same
simulated shard: their bytes and their 99th percentiles before and during the flood. `contest` lets
everybody take as much as they can of what the flood is after: the share each gets.

Each flood is one coroutine per session of the flooder, at full speed for as long as it is let.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from entresol_daemon.control.grpc_services import EventsService
from entresol_daemon.shard.admin import Addresses, ShardAdmin
from entresol_proto.ids import TenantName
from entresol_proto.status import EntresolError, Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.wire import data
from tests.proof.fairlab import KIB, SECOND_NS, Guest, Place, Seen, key_of
from tests.proof.machines import on

VICTIMS = ("ann", "ben", "cas", "dee")
FLOODER = "mallory"
BLOCK_BYTES = 64 * KIB
BLOCKS = 192  # of every victim: more than its part of memory
GET_BLOCKS, PUT_BLOCKS = 16, 4
GETS_PER_S, PUTS_PER_S = 60.0, 20.0
FLOOD_BLOCKS = 512
TINY_BLOCKS = 8_000  # 4 KiB each in memory and on flash
FEW_BLOCKS = 24  # that stay in memory
WARM_S = 0.4


@dataclass(slots=True)
class Victim:
    """A tenant that behaves: gets and puts at its own rate, whatever comes of the last one."""

    guest: Guest
    names: bytes
    rng: random.Random
    gets: Seen = field(default_factory=Seen)
    puts: Seen = field(default_factory=Seen)
    next_key: int = BLOCKS

    async def live(self, seconds: float) -> None:
        """For so long; returns when everything begun has its answer."""
        async with asyncio.TaskGroup() as tasks:
            for rate, begin in ((GETS_PER_S, self._get), (PUTS_PER_S, self._put)):
                tasks.create_task(self._arrivals(tasks, rate, seconds, begin))

    async def _arrivals(
        self, tasks: asyncio.TaskGroup, rate: float, seconds: float,
        begin: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            await asyncio.sleep(self.rng.expovariate(rate))
            if loop.time() >= until:
                return
            tasks.create_task(begin())  # type: ignore[arg-type]

    async def _get(self) -> None:
        at = self.rng.randrange(BLOCKS - GET_BLOCKS) * 16
        work = self.guest.get(self.names[at : at + GET_BLOCKS * 16])
        await self.guest.timed(self.gets, BLOCK_BYTES, work, GET_BLOCKS)

    async def _put(self) -> None:
        first, self.next_key = self.next_key, self.next_key + PUT_BLOCKS
        keys = [key_of(self.guest.tenant, first + each) for each in range(PUT_BLOCKS)]
        await self.guest.timed(
            self.puts, BLOCK_BYTES, self.guest.put(keys, BLOCK_BYTES), PUT_BLOCKS
        )

    async def take_all(self, until: float, at_once: int, blocks: int) -> None:
        """Gets of its first so many blocks, round and round, so many at once."""
        turns = itertools.count()

        async def one() -> None:
            while asyncio.get_running_loop().time() < until:
                at = next(turns) * GET_BLOCKS % (blocks - blocks % GET_BLOCKS) * 16
                await self.guest.get(self.names[at : at + GET_BLOCKS * 16])

        await asyncio.gather(*(one() for _ in range(at_once)))


async def settle_in(
    guest: Guest, blocks: int, *, block_bytes: int = BLOCK_BYTES, at_once: int = 64
) -> bytes:
    """Store a guest's blocks; returns their names."""
    keys = [key_of(guest.tenant, number) for number in range(blocks)]
    for at in range(0, blocks, at_once):
        statuses = await guest.put(keys[at : at + at_once], block_bytes)
        assert set(statuses) == {Status.OK}, statuses
    return guest.names(keys)


async def victims_of(place: Place) -> list[Victim]:
    """The four, with their blocks on flash."""
    found = []
    for name in VICTIMS:
        guest = Guest(place, name)
        await guest.open()
        names = await settle_in(guest, BLOCKS)
        found.append(Victim(guest, names, random.Random(place.rng.getrandbits(64))))
    return found


class Flood:
    """One tenant's attack: `sessions` guests, each running `attack` over and over."""

    name = ""
    sessions = 8
    at_once = 8  # of each session

    def __init__(self, place: Place) -> None:
        self.place = place
        self.guests: list[Guest] = []
        self.seen = Seen()
        self.numbers = itertools.count(10**6)
        self.names = b""
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, *, blocks: int = FLOOD_BLOCKS) -> None:
        """Get ready, then run until `end`."""
        first = Guest(self.place, FLOODER)
        await first.open()
        self.guests.append(first)
        self.names = await self.settle(first, blocks)
        for _ in range(self.sessions - 1):
            guest = Guest(self.place, FLOODER)
            await guest.open()
            self.guests.append(guest)
        for guest in self.guests:
            for _ in range(self.at_once):
                self._tasks.append(asyncio.create_task(self._go_on(guest)))

    async def settle(self, guest: Guest, blocks: int) -> bytes:
        """Store what is asked for later; its names."""
        return await settle_in(guest, blocks)

    async def end(self) -> None:
        """Stop and leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for guest in self.guests:
            await guest.gone()

    async def _go_on(self, guest: Guest) -> None:
        while True:
            try:
                await self.attack(guest)
            except EntresolError:
                await asyncio.sleep(0.001)

    async def attack(self, guest: Guest) -> None:
        raise NotImplementedError

    def some(self, count: int) -> bytes:
        """Names of blocks in a row, anywhere among its own."""
        at = self.place.rng.randrange(len(self.names) // 16 - count) * 16
        return self.names[at : at + 16 * count]


class Puts(Flood):
    """New blocks, as fast as they are taken."""

    name = "puts"

    async def attack(self, guest: Guest) -> None:
        keys = [key_of(FLOODER, next(self.numbers)) for _ in range(64)]
        work = guest.put(keys, BLOCK_BYTES, ack=data.Ack.ACCEPTED)
        await guest.timed(self.seen, BLOCK_BYTES, work, 64)


class TinyPuts(Flood):
    """Blocks of a few bytes, thousands in one request."""

    name = "tiny puts"
    at_once = 4

    async def attack(self, guest: Guest) -> None:
        keys = [key_of(FLOODER, next(self.numbers)) for _ in range(1_000)]
        await guest.timed(self.seen, 16, guest.put(keys, 16), 1_000)


class Reserves(Flood):
    """Reservations that are never committed."""

    name = "reservations"
    at_once = 4

    async def attack(self, guest: Guest) -> None:
        items = tuple(
            data.PutItem(guest.names([key])[:16], key, BLOCK_BYTES, at, b"", b"")
            for at, key in enumerate(key_of(FLOODER, next(self.numbers)) for _ in range(1_000))
        )
        message = data.Reserve(guest.handle, data.Ack.ACCEPTED, SECOND_NS, items)
        await guest.call(message)


class AbsentGets(Flood):
    """Fetches of thousands of keys that nobody stored."""

    name = "gets of absent keys"
    at_once = 16

    async def attack(self, guest: Guest) -> None:
        await guest.get(self.place.rng.randbytes(16 * 4_096))


class FlashGets(Flood):
    """Fetches of more blocks than fit into memory."""

    name = "gets from flash"

    async def attack(self, guest: Guest) -> None:
        await guest.timed(self.seen, BLOCK_BYTES, guest.get(self.some(64)), 64)


class TinyFlashGets(Flood):
    """Fetches of blocks of a few bytes, more than fit into memory."""

    name = "gets of tiny blocks from flash"

    async def begin(self, *, blocks: int = TINY_BLOCKS) -> None:
        await super().begin(blocks=blocks)

    async def settle(self, guest: Guest, blocks: int) -> bytes:
        return await settle_in(guest, blocks, block_bytes=16, at_once=500)

    async def attack(self, guest: Guest) -> None:
        names = b"".join(self.some(1) for _ in range(64))
        await guest.timed(self.seen, 16, guest.get(names), 64)


class ResidentGets(Flood):
    """Fetches of the same few blocks."""

    name = "gets of resident blocks"
    at_once = 16

    async def attack(self, guest: Guest) -> None:
        await guest.timed(
            self.seen, BLOCK_BYTES, guest.get(self.names[: 16 * FEW_BLOCKS]), FEW_BLOCKS
        )


class Leases(Flood):
    """Leases that are never given back."""

    name = "leases"

    async def attack(self, guest: Guest) -> None:
        await guest.get(self.some(64), release=False)


class Sessions(Flood):
    """Sessions opened and dropped, every second one before it has a data path."""

    name = "sessions"
    sessions = 1
    at_once = 32

    async def attack(self, guest: Guest) -> None:
        passing = Guest(self.place, FLOODER)
        try:
            await passing.open(attach=self.place.rng.random() < 0.5)
            await asyncio.sleep(self.place.rng.uniform(0, 0.01))
        finally:
            await passing.gone()


class _Context:
    """A gRPC call of the flooder."""

    async def abort(self, code: Any, details: str, trailing: Any = ()) -> None:
        raise EntresolError(details, status=Status.QUOTA)


class Watchers(Flood):
    """Consumers of events: most do not read, the others make every event be written many times."""

    name = "event watchers"

    async def begin(self, *, blocks: int = FLOOD_BLOCKS) -> None:
        async def never(*_: Any) -> Any:
            raise AssertionError("not asked")

        admin = ShardAdmin(
            self.place.shard, Addresses("", ()), end_sessions=never, begin_drain=lambda: None,
            unlock=never, change_kek=never,
        )  # fmt: skip
        self.service = EventsService(admin, lambda _: TenantName(FLOODER))
        await super().begin(blocks=blocks)
        for number in range(64):
            watching = on(self.place.loop, self._watch(reading=number % 4 == 0))
            self._tasks.append(asyncio.create_task(watching))

    async def attack(self, guest: Guest) -> None:
        keys = [key_of(FLOODER, next(self.numbers)) for _ in range(256)]
        await guest.timed(self.seen, 16, guest.put(keys, 16), 256)

    async def _watch(self, *, reading: bool) -> None:
        while True:
            replies = self.service.Watch(pb.WatchRequest(), _Context())
            try:
                async for _ in replies:
                    if not reading:
                        await asyncio.sleep(3_600)
            except EntresolError:
                await asyncio.sleep(0.01)
            finally:
                await replies.aclose()


class HugeExists(Flood):
    """Look-ups of 65,536 keys at a time."""

    name = "huge look-ups"
    at_once = 16

    async def attack(self, guest: Guest) -> None:
        keys = self.place.rng.randbytes(16) * 65_536
        await guest.call(data.Exists(guest.handle, keys))


FLOODS: tuple[type[Flood], ...] = (
    HugeExists, FlashGets, Leases, Puts, AbsentGets, Sessions, ResidentGets, Watchers, TinyPuts,
    Reserves, TinyFlashGets,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weather:
    """What the victims had, all together, over one stretch."""

    gets: Seen
    puts: Seen
    done_bytes: int
    offered_blocks: int
    blocks: int


async def _live(victims: list[Victim], seconds: float) -> Weather:
    for victim in victims:
        victim.gets, victim.puts = Seen(), Seen()
    await asyncio.gather(*(victim.live(seconds) for victim in victims))
    gets, puts = Seen(), Seen()
    for victim in victims:
        for total, mine in ((gets, victim.gets), (puts, victim.puts)):
            total.seconds += mine.seconds
            total.done_bytes += mine.done_bytes
            total.blocks += mine.blocks
    offered = GET_BLOCKS * len(gets.seconds) + PUT_BLOCKS * len(puts.seconds)
    return Weather(
        gets, puts, gets.done_bytes + puts.done_bytes, offered, gets.blocks + puts.blocks,
    )  # fmt: skip


async def storm(place: Place, kind: type[Flood], seconds: float) -> tuple[Weather, Weather]:
    """The victims' weather without and with the flood."""
    victims = await victims_of(place)
    await _live(victims, WARM_S)
    calm = await _live(victims, seconds)
    flood = kind(place)
    await flood.begin()
    await _live(victims, WARM_S)
    rough = await _live(victims, seconds)
    await flood.end()
    return calm, rough


async def contest(place: Place, kind: type[Flood], seconds: float) -> dict[str, int]:
    """Bytes that each tenant was given, whole gets or not, when all wanted more than there was of
    what this flood is after: flash, or the event loop, for blocks in memory."""
    victims = await victims_of(place)
    flood = kind(place)
    await flood.begin()
    loop = asyncio.get_running_loop()
    until = loop.time() + WARM_S + seconds
    blocks = FEW_BLOCKS if kind is ResidentGets else BLOCKS
    jobs = [asyncio.create_task(victim.take_all(until, 8, blocks)) for victim in victims]

    def given() -> dict[str, int]:
        of_flood = sum(guest.given_bytes for guest in flood.guests)
        return {v.guest.tenant: v.guest.given_bytes for v in victims} | {FLOODER: of_flood}

    await asyncio.sleep(WARM_S)
    before = given()
    await asyncio.sleep(seconds)
    after = given()
    await asyncio.gather(*jobs)
    await flood.end()
    return {name: after[name] - before[name] for name in after}
