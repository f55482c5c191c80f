"""R9: latent errors planted under a whole shard; the scrubber finds each within one cycle.

A unit is one shard with a few hundred blocks, of which more than half are damaged or refused by the
device; every fourth shard scrubs while it is locked, and beside every fourth there is one whose
hosts store, forget and have segments evicted while cycle follows cycle: there nothing may be found.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from tests import simloop
from tests.proof.line import Line, Size, Slice, Tally
from tests.scrublab import Report, busy_story, story

BLOCKS = 400
ERRORS = 250


def run(slice_: Slice) -> Tally:
    """All shards of a slice."""
    logging.getLogger("entresol").setLevel(logging.CRITICAL)  # it tells of every damage it finds
    tally = Tally()
    for seed in slice_.seeds:
        report = one_shard(seed, slice_.folder, BLOCKS, ERRORS, locked=seed % 4 == 3)
        busy = busy_shard(seed, slice_.folder) if seed % 4 == 0 else Report()
        tally.tried += report.planted
        tally.survived += report.found
        tally.wrong_bytes += report.wrong + busy.wrong
        for note in report.notes + busy.notes:
            tally.found(seed, note)
        tally.figure("sound_blocks", BLOCKS - report.planted)
        tally.figure("scrubbed_under_load_bytes", busy.scrubbed)
        tally.figure("false_findings", report.false + busy.false)
    return tally


def busy_shard(seed: int, folder: Path) -> Report:
    """Cycle after cycle while hosts are at work; nothing is damaged."""
    home = folder / f"busy{seed}"
    home.mkdir(parents=True)
    try:
        return simloop.run(
            busy_story(home, seed), seed, loop=simloop.SimLoop(seed, seconds_max=100_000)
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)


def one_shard(
    seed: int, folder: Path, blocks: int, errors: int, *, locked: bool = False,
    spoil: bool = False,
) -> Report:  # fmt: skip
    """One story in virtual time."""
    home = folder / f"seed{seed}"
    home.mkdir(parents=True)
    try:
        loop = simloop.SimLoop(seed, seconds_max=100_000)
        return simloop.run(
            story(home, seed, blocks, errors, locked=locked, spoil=spoil), seed, loop=loop
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)


def canary() -> None:
    """A scrubber that looks at half of the blocks leaves planted errors behind."""
    with tempfile.TemporaryDirectory() as folder:
        report = one_shard(1, Path(folder), 80, 40, spoil=True)
    assert report.found < report.planted, f"what was not scrubbed went unnoticed: {report}"


LINES = (
    Line(
        id="R9",
        name="latent errors the scrubber finds in a cycle",
        unit="shards",
        units={Size.COMMIT: 4, Size.NIGHTLY: 40, Size.RELEASE: 400},
        slice_units=10,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
