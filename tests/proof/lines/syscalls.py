"""R7: the real daemon while its system calls fail, its disks are full, its process is squeezed.

One unit is a scene, drawn in turn: some work, then a fault for a while, then healing. In every
scene the daemon lives on, answers are blocks or misses, and within `HEAL_SECONDS_MAX` after healing
it stores durably again by itself; then everything is looked at, and after some scenes once more
behind a kill -9. The oracle is that of R6: durable blocks are there, forgotten ones are not, and no
byte is wrong. System calls fail by a preloaded library (`tests/daemon/faults.c`); a scene that has
them fail and in which none was struck is a finding.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path

from tests.daemon.faults_lab import Faults, compiler
from tests.daemon.life_lab import BUGS, Died, Lab, alive
from tests.daemon.siege_lab import HEAL_SECONDS_MAX, MIX, SCENES, NotHere, Scene
from tests.proof.line import Line, Size, Slice, Tally

SLICE_UNITS = len(SCENES)
FLASH_BYTES = 512 << 20
DRAM_BYTES = 8 << 20  # so that blocks are read from flash
LEASE_NS = 800_000_000
KILLED_AFTER = 0.35  # of the scenes
CANARY_SCENES_MAX = 16
SPREAD = 400
CALM_S = 0.15
PROBES = 10_000  # blocks from here on tell whether it is well again
CLIENT = {
    "deadline_ns": 4_000_000_000, "connect_deadline_ns": 2_000_000_000,
    "ping_deadline_ns": 2_000_000_000,
}  # fmt: skip


def run(part: Slice) -> Tally:
    """Scenes upon one daemon."""
    return scenes(part, plant="")


def scenes(part: Slice, plant: str, only: str = "") -> Tally:
    """The same with a bug planted in the daemon, or with one scene alone."""
    tally = Tally()
    faults = Faults(part.folder, data_part="flash.data", state_part="/state")
    chosen = [scene for scene in SCENES if only in ("", scene.__name__)]
    lab = Lab(
        part.folder, plant=plant, env=faults.env, client=CLIENT, flash=FLASH_BYTES, dram=DRAM_BYTES,
        lease_ns=LEASE_NS, fabric=random.Random(part.seed).choice(["shm", "tcp"]),
    )  # fmt: skip
    with lab:
        lab.first_life()
        for seed in part.seeds:
            play = chosen[seed % len(chosen)]
            scene = Scene(lab, faults, random.Random(seed), seed)
            before = len(lab.judge.findings)
            try:
                trouble = _play(scene, play.__name__, tally)
                if scene.injects and not scene.struck:
                    trouble = trouble or "no system call was struck"
            except NotHere as error:
                tally.lacks(f"{play.__name__}: {error}")
                continue
            except (Died, AssertionError) as error:
                trouble = f"{type(error).__name__}: {error}"
                tally.crashes += isinstance(error, Died) or not alive(lab.pid)
            tally.tried += 1
            tally.figure(f"scene_{play.__name__}", 1)
            if scene.injects:
                tally.figure("min_struck in a scene of faults", scene.struck)
            texts = lab.judge.findings[before:] + [trouble] * bool(trouble)
            for text in texts:
                tally.found(seed, f"{play.__name__}: {text}")
            tally.survived += not texts
            if trouble:
                break  # what follows would only tell of the same
        _sum_up(lab, faults, tally)
    faults.close()
    return tally


def _play(scene: Scene, name: str, tally: Tally) -> str:
    """One scene and what has to follow it; what went wrong, or ""."""
    lab, driver = scene.lab, scene.lab.driver
    driver.ask("load", seed=scene.seed, workers=4, spread=SPREAD, mix=MIX, once=False)
    time.sleep(CALM_S)
    began = time.monotonic()
    try:
        next(each for each in SCENES if each.__name__ == name)(scene)
    finally:
        scene.faults.heal()
    if os.environ.get("ENTRESOL_PROOF_TRACE"):
        print(f"{scene.seed} {name}: {time.monotonic() - began:.1f} s", flush=True)
    if not alive(lab.pid):
        raise Died(f"the daemon ended: {lab.last_words()}")
    healing = _until_well(lab, scene.seed)
    driver.ask("stop")
    if healing > HEAL_SECONDS_MAX:
        return f"not well {HEAL_SECONDS_MAX:.0f} s after healing: {lab.last_words()}"
    tally.figure("max_healing_ms", round(healing * 1e3))
    lab.look("quiet")
    if scene.rng.random() < KILLED_AFTER:
        lab.kill()
        lab.start()
        lab.look_after_restart()
        tally.figure("killed_afterwards", 1)
    if bug := BUGS.search(said := lab.new_log()):
        return f"the log says {said[max(0, bug.start() - 300) : bug.end() + 1_200]}"
    return ""


def _until_well(lab: Lab, seed: int) -> float:
    """Seconds until a new block is stored durably and comes back."""
    began = time.monotonic()
    tries = 0
    while time.monotonic() - began <= HEAL_SECONDS_MAX:
        number = PROBES + 100 * seed + tries % 100
        if lab.driver.ask("connect", seconds=1):
            stored = lab.driver.ask("put", numbers=[number], ack="durable")
            if stored == ["ok"] and lab.driver.ask("get", numbers=[number]) == ["ok"]:
                break
        tries += 1
        time.sleep(0.02)
    return time.monotonic() - began


def _sum_up(lab: Lab, faults: Faults, tally: Tally) -> None:
    judge = lab.judge
    tally.wrong_bytes += judge.wrong
    tally.durable_lost += judge.lost
    tally.figure("answers_judged", judge.checked)
    tally.figure("durable_acks", judge.durable)
    for (call, kind), count in faults.injected().items():
        tally.figure(f"failed_{call.name.lower()}_{kind.name.lower()}", count)


def _not_run() -> str:
    return "" if compiler() else "there is no C compiler for the preloaded library"


def _canary() -> None:
    """A daemon that a failed read can end."""
    with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
        for begin in range(0, CANARY_SCENES_MAX, 4):  # in one scene, few reads fail
            folder = Path(name) / str(begin)
            folder.mkdir()
            part = Slice(begin, 4, Size.COMMIT, folder)
            tally = scenes(part, plant="tests.daemon.plants:dies_of_reads", only="failing_reads")
            if tally.crashes:
                return
    raise AssertionError(f"{CANARY_SCENES_MAX} scenes survived; at last {tally.figures}")


LINES = (
    Line(
        id="R7",
        name="failing system calls, full disks, squeezed process",
        unit="scenes",
        units={Size.COMMIT: len(SCENES), Size.NIGHTLY: 8 * len(SCENES), Size.RELEASE: 300},
        slice_units=SLICE_UNITS,
        run=run,
        canary=_canary,
        slice_deadline_s=400.0,
        not_run=_not_run,
    ),
)
