"""R4: the k-th I/O fails, for every k, every workload and every kind of fault, once and for ever.

A unit is one loop over k: one workload, one kind of fault, once or sticky. The seed says which; the
first dozen are the small workload's, then come the others, the keyring's files and the whole shard.
After the last of them they begin again with other data.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from entresol_daemon.flash.sim import Fault
from entresol_proto.status import DeviceError, EntresolError, Status
from entresol_proto.wire.data import Ack, OpenAt
from tests import simloop
from tests.kthlab import (
    FILE_KINDS,
    KINDS,
    LIVES,
    OPERATIONS,
    SECONDS_MAX,
    HangingDevice,
    Outcome,
    attempt,
    keys_attempt,
    make_device,
)
from tests.proof.line import Line, Size, Slice, Tally
from tests.sim.shardlab import Host, World

K_MAX = 5000  # a workload with more I/O never ends
SHARD_KEYS = [b"key-%012d" % number for number in range(12)]

Loop = tuple[str, Fault | str, bool]


def loops() -> list[Loop]:
    """(workload, kind, sticky), in the order of seeds from 1."""
    found: list[Loop] = []
    for life in LIVES:
        found += [(life, kind, sticky) for kind in KINDS for sticky in (False, True)]
    found += [(f"keys {name}", kind, False) for name in OPERATIONS for kind in FILE_KINDS]
    found += [(f"keys {name}", kind, True) for name in OPERATIONS for kind in FILE_KINDS[1:]]
    found += [("shard", kind, sticky) for kind in KINDS for sticky in (False, True)]
    return found


def run(slice_: Slice) -> Tally:
    """All loops of a slice."""
    logging.getLogger("entresol").setLevel(logging.CRITICAL)  # it tells of every fault it meets
    tally = Tally()
    for seed in slice_.seeds:
        every = loops()
        life, kind, sticky = every[(seed - 1) % len(every)]
        data_seed = 1 + (seed - 1) // len(every)
        outcome = one_loop(life, kind, sticky, data_seed, slice_.folder)
        tally.tried += outcome.tried
        bad = bool(outcome.wrong or outcome.lost or outcome.notes)
        tally.survived += outcome.tried - int(bad)
        tally.wrong_bytes += outcome.wrong
        tally.durable_lost += outcome.lost
        for note in outcome.notes:
            tally.found(seed, f"{life} {kind} sticky={sticky}: {note}")
        tally.figure("injected", outcome.injected)
        tally.figure("condemned", outcome.condemned)
        tally.figure("openings_refused", outcome.refused)
        tally.figure(f"points_{life.split()[0]}", outcome.tried)
    return tally


def one_loop(
    life: str, kind: Fault | str, sticky: bool, data_seed: int, folder: Path,
    make: Callable[..., HangingDevice] = make_device,
) -> Outcome:  # fmt: skip
    """k = 1, 2, 3 ... until nothing was injected."""
    total = Outcome()
    for k in range(1, K_MAX):
        if life == "shard":
            outcome = shard_attempt(data_seed, kind, k, sticky, folder / "shard")
        elif life.startswith("keys "):
            outcome = keys_attempt(life[5:], str(kind), k, sticky, folder / "keys")
        else:
            outcome = attempt(life, data_seed, kind, k, sticky, folder / "work", make)
        outcome.notes = [f"k={k}: {note}" for note in outcome.notes]
        total.add(outcome)
        if not outcome.injected:
            break
    else:
        total.note("the workload never gets through")
    if kind == Fault.FLUSH_FAIL and life != "shard" and not total.condemned:
        total.note("flushes failed and no segment was condemned")
    return total


def shard_attempt(seed: int, kind: Fault | str, k: int, sticky: bool, folder: Path) -> Outcome:
    """Puts, gets and forgets of a host through a whole shard."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = Outcome()
    loop = simloop.SimLoop(seed, seconds_max=SECONDS_MAX)
    device: list[HangingDevice] = []

    async def live() -> None:
        world = World(folder, seed, segments=8)
        device.append(make_device(kind, k, sticky, seed, world.size_bytes))
        world.device = device[0]
        try:
            await world.open(("alpha",))
        except DeviceError:
            outcome.refused = 1
            world.keyring.close()
        else:
            await _shard_life(world)
            await world.crash()
        device[0].plan.enabled = False
        device[0].hang_at = 0
        if outcome.refused:
            world.device = device[0].crash()
        await _shard_audit(world, outcome)

    simloop.run(live(), seed, loop=loop)
    outcome.injected = device[0].hung + sum(device[0].plan.injected.values())
    outcome.tried = int(outcome.injected > 0)
    return outcome


async def _shard_life(world: World) -> None:
    host = Host(world, "alpha", careful=True)
    try:
        await host.open()
    except EntresolError:
        return
    await host.put(SHARD_KEYS[:8], Ack.DURABLE)
    await host.forget(SHARD_KEYS[:2])
    await host.get(SHARD_KEYS, OpenAt.HOST)
    world.shard.parts.residency.clear()  # the next get reads from flash
    await host.get(SHARD_KEYS, OpenAt.HOST)
    await host.put(SHARD_KEYS[6:], Ack.ACCEPTED)
    await asyncio.sleep(1)
    await host.get(SHARD_KEYS, OpenAt.HOST)
    await host.gone()
    world.hosts.clear()


async def _shard_audit(world: World, outcome: Outcome) -> None:
    await world.open(("alpha",))
    host = Host(world, "alpha", careful=True)
    await host.open()
    statuses = await host.get(SHARD_KEYS, OpenAt.HOST)
    found = {("alpha", k) for k, s in zip(SHARD_KEYS, statuses, strict=True) if s is Status.OK}
    oracle = world.oracle
    if oracle.wrong_bytes:
        outcome.wrong += 1
        outcome.note("wrong bytes through the shard")
    if lost := oracle.durable - found:
        outcome.lost += len(lost)
        outcome.note(f"durable lost through the shard: {sorted(lost)[:2]}")
    if back := oracle.forgotten & found:
        outcome.note(f"forgotten and back: {sorted(back)[:2]}")
    await world.stop()


class ForgetfulDevice(HangingDevice):
    """The planted bug: a flush that failed is reported as done."""

    async def flush(self) -> None:
        try:
            await super().flush()
        except DeviceError:
            return


def canary() -> None:
    """Failed flushes that nobody hears of lose acknowledged blocks, and are not counted."""

    def forgetful(kind: Fault | str, k: int, sticky: bool, seed: int, size: int) -> HangingDevice:
        honest = make_device(kind, k, sticky, seed, size)
        return ForgetfulDevice(size, seed=seed, plan=honest.plan, sleep=asyncio.sleep)

    outcome = one_loop("small", Fault.FLUSH_FAIL, False, 1, Path("."), forgetful)
    assert outcome.lost > 0, f"forgotten flushes went unnoticed: {outcome}"


LINES = (
    Line(
        id="R4",
        name="the k-th I/O fails, for every k",
        unit="loops over k",
        units={
            Size.COMMIT: 2 * len(KINDS),
            Size.NIGHTLY: len(loops()),
            Size.RELEASE: 3 * len(loops()),
        },
        slice_units=6,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
