"""R3: a power failure after every write of many lives, each image opened and read in full.

A unit is one life. Its seed says which kind: put and remove, eviction with reinsertion, forgetting
with barriers and dropped namespaces, clean closes with a checkpoint file beside, formatting, a
second failure while the first is being recovered from, and keys that rotate and are erased.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

from entresol_daemon.flash.sim import SimDevice
from tests import simloop
from tests.crashlab import (
    SMALL,
    STYLES,
    CheckpointFile,
    Facts,
    ImageDevice,
    Life,
    Style,
    Verdict,
    judge,
    logging_device,
    moments,
    open_at,
)
from tests.keycrashlab import KeyLife, judge_keys, key_moments
from tests.proof.line import Line, Size, Slice, Tally

KINDS = ("mixed", "evict", "forget", "checkpoint", "twice", "mixed", "evict", "keys", "format")
MIXES = 3  # random mixes per write
TWICE_EVERY = 40  # images of a life that are recovered on a logging device
TWICE_STYLE = Style(rounds=6, keys=24, clean=(False,))
KEY_STEPS = 12


def run(slice_: Slice) -> Tally:
    """All lives of a slice."""
    logging.getLogger("entresol").setLevel(logging.CRITICAL)  # it tells of every damage it finds
    tally = Tally()
    for seed in slice_.seeds:
        kind = KINDS[seed % len(KINDS)]
        began = time.process_time()
        verdict = one_life(kind, seed, slice_.folder)
        tally.tried += verdict.images
        tally.survived += verdict.survived
        tally.wrong_bytes += verdict.wrong
        tally.durable_lost += verdict.lost
        for note in verdict.notes:
            tally.found(seed, f"{kind}: {note}")
        tally.figure("blocks_read", verdict.blocks)
        tally.figure(f"images_{kind}", verdict.images)
        tally.figure(f"cpu_s_{kind}", round(time.process_time() - began, 3))
    return tally


def one_life(
    kind: str, seed: int, folder: Path, *, device: SimDevice | None = None, every: int = 1
) -> Verdict:
    """Live it, then try every failure of it, or every so manyth. `device`: the canary's."""
    device = device or logging_device(seed)
    base = device.image()
    rng = random.Random(seed)
    if kind == "keys":
        return _keys(device, base, seed, folder, rng, every)
    options = SMALL
    if kind == "checkpoint":
        options = replace(SMALL, checkpoint_path=folder / "index.arrow")
    style = STYLES.get(kind, STYLES["mixed"])
    simloop.run(Life(device, seed, style).live(options), seed)
    assert device.log is not None
    log = device.log
    verdict = Verdict()

    async def try_all() -> None:
        file = None if options.checkpoint_path is None else CheckpointFile(options.checkpoint_path)
        for number, moment in enumerate(moments(base, log, rng, MIXES, Facts())):
            if number % every:
                continue
            if verdict.lost and isinstance(device, HastyDevice):
                return
            if kind == "twice":
                if number % (TWICE_EVERY * every) == 0:
                    verdict.add(await _twice(moment.device([]), moment.facts.copy(), rng))
            elif file is None:
                writable = kind == "format" or number % 16 == 0
                verdict.add(await judge(moment.device(), options, moment.facts, writable=writable))
            else:
                for _ in file.forms(moment.facts, rng):
                    verdict.add(await judge(moment.device(), options, moment.facts))

    simloop.run(try_all(), seed)
    return verdict


async def _twice(device: ImageDevice, facts: Facts, rng: random.Random) -> Verdict:
    """Recover an image on a logging device, live on for a while, and fail again anywhere there."""
    base = device.image()
    verdict = Verdict()
    life = Life(device, rng.randrange(2**32), TWICE_STYLE)
    life.held = dict(facts.required)
    engine = await open_at(device, SMALL)
    # What recovery found is what is there now, acknowledged or not.
    index = engine.index
    for slot in index.live_slots().tolist():
        life.held.setdefault((index.namespace_of(slot), index.key_of(slot)), b"")
    await life.steps(engine)
    await engine.close(clean=False)
    assert device.log is not None
    for moment in moments(base, device.log, rng, 1, facts):
        verdict.add(await judge(moment.device(), SMALL, moment.facts))
    return verdict


def _keys(
    device: SimDevice, base: bytes, seed: int, folder: Path, rng: random.Random, every: int
) -> Verdict:
    home, looked_at = folder / "home", folder / "looked-at"
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(looked_at, ignore_errors=True)
    home.mkdir(mode=0o700)
    looked_at.mkdir(mode=0o700)
    simloop.run(KeyLife(device, home, seed).live(KEY_STEPS), seed)
    assert device.log is not None
    log = device.log
    verdict = Verdict()

    async def try_all() -> None:
        for number, moment in enumerate(key_moments(base, log, rng, MIXES)):
            if number % every:
                continue
            verdict.add(await judge_keys(moment, home, looked_at))

    simloop.run(try_all(), seed)
    return verdict


class HastyDevice(SimDevice):
    """The planted bug: a flush is reported done although nothing was flushed, once."""

    hasty = 6  # which flush

    async def flush(self) -> None:
        if self.flushes == self.hasty:
            self.flushes += 1
            await asyncio.sleep(0)
            return
        await super().flush()


def canary() -> None:
    """A device that forgets one flush loses an acknowledged block in some image."""
    seed = 0
    blank = logging_device(seed)
    device = HastyDevice(blank.size_bytes, seed=seed, keep_log=True, sleep=asyncio.sleep)
    verdict = one_life("mixed", seed, Path("."), device=device)
    assert verdict.lost > 0, f"a forgotten flush went unnoticed: {verdict}"


LINES = (
    Line(
        id="R3",
        name="power failure after every write",
        unit="lives",
        units={Size.COMMIT: 12, Size.NIGHTLY: 108, Size.RELEASE: 1000},
        slice_units=4,
        run=run,
        canary=canary,
        slice_deadline_s=1200.0,
    ),
)
