"""R5: bits flipped, sectors replaced, records swapped, everywhere on flash and in sealed blocks.

A unit is one world: a data file of its own, all bits of all fields in it, random bits of the rest,
tried at the decoders, through reads of an opened engine, through whole openings, and as a host
opens a sealed block.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tests import fliplab, simloop
from tests.fliplab import Damage, World
from tests.proof.line import Line, Size, Slice, Tally

PAYLOAD_FLIPS = 3000
CHECKPOINT_FLIPS = 200
OPENINGS = 100


def run(slice_: Slice) -> Tally:
    """All worlds of a slice."""
    logging.getLogger("entresol").setLevel(logging.CRITICAL)  # it tells of every damage it finds
    tally = Tally()
    for seed in slice_.seeds:
        damage = one_world(seed, slice_.folder)
        tally.tried += damage.tried
        tally.survived += damage.detected
        tally.wrong_bytes += damage.wrong
        tally.durable_lost += damage.lost
        for note in damage.notes:
            tally.found(seed, note)
        for kind, count in damage.by_kind.items():
            tally.figure(kind, count)
    return tally


def one_world(seed: int, folder: Path, *, share: float = 1.0, verify_reads: bool = True) -> Damage:
    """Every kind of damage of one world; `share` of the random ones. Not to verify reads is the
    bug that the canary plants."""
    world, damage = World(seed, folder), Damage()
    fliplab.structures(world, damage)
    fliplab.checkpoints(world, damage, int(CHECKPOINT_FLIPS * share))
    fliplab.hosts(world, damage, int(PAYLOAD_FLIPS * share))

    async def live() -> None:
        engine = await fliplab.opened(world, verify_reads)
        await fliplab.records(world, engine, damage, int(PAYLOAD_FLIPS * share))
        await fliplab.sectors(world, engine, damage)
        await fliplab.swaps(world, engine, damage)
        await engine.close(clean=False)
        await fliplab.openings(world, damage, int(OPENINGS * share))

    simloop.run(live(), seed)
    return damage


def canary() -> None:
    """A reader that does not look at payloads lets flips of them through."""
    with tempfile.TemporaryDirectory() as folder:
        damage = one_world(1, Path(folder), share=0.1, verify_reads=False)
    assert damage.wrong > 0, f"unverified payloads went unnoticed: {damage}"


LINES = (
    Line(
        id="R5",
        name="flipped bits, swapped sectors and records",
        unit="worlds",
        units={Size.COMMIT: 2, Size.NIGHTLY: 40, Size.RELEASE: 200},
        slice_units=10,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
