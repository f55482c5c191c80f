"""R6: the real daemon, killed -9 at random moments, judged by an oracle outside of it.

One unit is a life: start, look at everything, work, die. The moment of death is drawn from the
seed: under load, while starting, while draining, right after an eviction, in the middle of a key
rotation, of adding or of erasing a tenant. Every third slice has so little flash that it evicts all
the time; there a durable block may be gone, but never wrong and never back. In the others nothing
may be evicted, nor lost, before more was written than their flash has room for.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

from entresol_proto.limits import MIB
from entresol_proto.status import Status
from tests.daemon.driver import size_of
from tests.daemon.life_lab import BUGS, GUEST, Died, Lab, alive
from tests.proof.line import Line, Size, Slice, Tally

SLICE_UNITS = 25
EVICTING_EVERY = 3  # slices
MOMENTS = ("load", "load", "start", "drain", "evict", "rotate", "tenant")
MIX = {"durable": 0.45, "accepted": 0.2, "forget": 0.15, "get": 0.2}
ROOMY_BYTES, TIGHT_BYTES = 1024 * MIB, 24 * MIB
KEYS_ROOMY, KEYS_TIGHT = 200, 800
# What a life may leave of a segment without having filled it: those open at its end.
LEFT_PER_LIFE_BYTES = 4 * 4 * MIB
PAGE_BYTES, HEADERS_BYTES_MAX = 4_096, 512  # a record begins on a page, with its headers
GUEST_BLOCKS = (1, 2, 3, 8, 9)
EVICTED = re.compile(r"event=evicted .* blocks=([1-9]\d*)")
BUCKETS_MS = (250, 500, 1_000)


def run(part: Slice) -> Tally:
    """Lives of one site, each ended by SIGKILL."""
    return lives(part, plant="")


def lives(part: Slice, plant: str) -> Tally:
    """The same with a bug planted in the daemon."""
    tally = Tally()
    evicting = part.seed // SLICE_UNITS % EVICTING_EVERY == 1
    rng = random.Random(part.seed)
    flash = TIGHT_BYTES if evicting else ROOMY_BYTES
    fabric = rng.choice(["shm", "tcp"])
    with Lab(part.folder, evicts=evicting, fabric=fabric, plant=plant, flash=flash) as lab:
        lab.first_life()
        lab.kill()
        tally.figure("max_cold_start_ms", lab.cold_start_ms())
        for seed in part.seeds:
            tally.tried += 1
            before = len(lab.judge.findings)
            try:
                moment = _life(lab, random.Random(seed), evicting)
            except Died as error:
                tally.crashes += 1
                tally.found(seed, f"{error}: {lab.last_words()}")
                break
            tally.figure(f"killed_{moment}", 1)
            _look_at_log(lab, tally, seed)
            findings = lab.judge.findings[before:]
            for text in findings:
                tally.found(seed, text)
            tally.survived += not findings
        else:
            _last_look(lab, tally, part.seeds[-1])
        _sum_up(lab, tally)
    return tally


def _life(lab: Lab, rng: random.Random, evicting: bool) -> str:
    """Start, look, work, die; returns in which moment."""
    began = time.monotonic()

    def trace(what: str) -> None:
        if os.environ.get("ENTRESOL_PROOF_TRACE"):
            print(f"{(time.monotonic() - began) * 1e3:7.0f} ms {what}", flush=True)

    moment = rng.choice([m for m in MOMENTS if m != "evict" or evicting])
    if moment == "start":
        lab.begin()
        time.sleep(rng.random() * 0.4)
        lab.kill()
    lab.start()
    trace("started")
    lab.look_after_restart()
    trace("looked")
    driver = lab.driver
    if lab.judge.exists.get(GUEST) == {True}:
        driver.ask("put", numbers=list(GUEST_BLOCKS), ack="durable", tenant=GUEST)
    driver.ask(
        "load", seed=rng.getrandbits(32), workers=4, mix=MIX,
        spread=KEYS_TIGHT if evicting else KEYS_ROOMY,
    )  # fmt: skip
    time.sleep(0.05 + rng.random() * 0.3)
    hit = _until_death(lab, rng, moment)
    lab.kill()
    trace(f"killed: {moment} {hit}")
    operations = driver.ask("stop")
    trace(f"{operations} operations")
    lab.judge.read(lab.journal)
    return moment if hit else "load"


def _until_death(lab: Lab, rng: random.Random, moment: str) -> bool:
    """Bring the moment about; False when it had passed before the kill."""
    if moment == "drain":
        lab.signal(signal.SIGTERM)
        time.sleep(rng.random() * 0.12)
        return alive(lab.pid)
    if moment == "evict":
        at = lab.log.stat().st_size
        until = time.monotonic() + 1
        while not (hit := EVICTED.search(lab.log_since(at))) and time.monotonic() < until:
            time.sleep(0.0005)
        time.sleep(rng.random() * 0.004)
        return hit is not None
    if moment in ("rotate", "tenant"):
        here = lab.judge.exists.get(GUEST) == {True}
        what = "rotate" if moment == "rotate" else "erase" if here else "add"
        lab.driver.ask("admin", what=what, tenant="dev" if what == "rotate" else GUEST)
        time.sleep(rng.random() * 0.03)
        answers = {"rotate": "rotated", "erase": "erased", "add": "added"}
        tail = lab.journal.read_text().rpartition(f'"{what}"')[2]
        return f'"{answers[what]}"' not in tail
    return True


def _look_at_log(lab: Lab, tally: Tally, seed: int) -> None:
    """The daemon's own words: nothing in them may be a bug."""
    said = lab.new_log()
    tally.figure("evictions", len(EVICTED.findall(said)))
    if not lab.judge.evicts and (evicted := EVICTED.search(said)):
        written, room = written_bytes(lab.journal), room_bytes(len(lab.restarts_ms))
        if written > room:
            lab.judge.evicts = True
            tally.figure("slices that wrote more than there is room for", 1)
        else:
            tally.found(seed, f"{evicted[0]} after {written} bytes of {room}")
    if bug := BUGS.search(said):
        tally.crashes += 1
        tally.found(seed, f"the log says {said[max(0, bug.start() - 200) : bug.end() + 800]}")


def room_bytes(lives: int) -> int:
    """What the roomy flash has room for after so many lives."""
    return ROOMY_BYTES - lives * LEFT_PER_LIFE_BYTES


def written_bytes(journal: Path) -> int:
    """All that may have been written by puts, stored or without an answer, as records that do not
    shrink."""
    asked: dict[tuple[str, int, int], int] = {}
    for line in journal.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        _, word, *rest = json.loads(line)
        if word == "put":
            tenant, _, versions = rest
            asked |= {(tenant, int(n), version): _record(int(n)) for n, version in versions.items()}
        elif word == "put_answered":
            tenant, _, versions, statuses = rest
            for number, code in statuses.items():
                if Status(code) is not Status.OK:
                    asked.pop((tenant, int(number), versions[number]), None)
    return sum(asked.values())


def _record(number: int) -> int:
    return -(-(size_of(number) + HEADERS_BYTES_MAX) // PAGE_BYTES) * PAGE_BYTES


def _last_look(lab: Lab, tally: Tally, seed: int) -> None:
    """One more start, everything judged, and a clean stop."""
    before = len(lab.judge.findings)
    lab.start()
    lab.look_after_restart()
    code = lab.stop()
    if code != 0:
        tally.found(seed, f"a clean stop ended with {code}")
    _look_at_log(lab, tally, seed)
    for text in lab.judge.findings[before:]:
        tally.found(seed, text)


def _sum_up(lab: Lab, tally: Tally) -> None:
    judge = lab.judge
    tally.wrong_bytes += judge.wrong
    tally.durable_lost += judge.lost
    tally.figure("answers_judged", judge.checked)
    tally.figure("durable_acks", judge.durable)
    tally.figure("forgets", judge.forgotten)
    tally.figure("restarts", len(lab.restarts_ms))
    if lab.judge.evicts is False:
        tally.figure("max_bytes written with room for them", written_bytes(lab.journal))
    tally.figure("restart_ms_total", round(sum(lab.restarts_ms)))
    for limit_ms in BUCKETS_MS:
        tally.figure(
            f"restarts_within_{limit_ms}_ms", sum(ms <= limit_ms for ms in lab.restarts_ms)
        )
    tally.figure("max_restart_ms", round(max(lab.restarts_ms)))


def _canary() -> None:
    """A daemon that says `durable` before it wrote."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
        folder = Path(name)
        tally = lives(Slice(1, 6, Size.COMMIT, folder), plant="tests.daemon.plants:early_ack")
    assert tally.durable_lost, f"lives {tally.tried}, durable acks {tally.figures['durable_acks']}"


LINES = (
    Line(
        id="R6",
        name="kill -9 with an outside oracle",
        unit="lives",
        units={Size.COMMIT: 50, Size.NIGHTLY: 200, Size.RELEASE: 500},
        slice_units=SLICE_UNITS,
        run=run,
        canary=_canary,
        slice_deadline_s=240.0,
    ),
)
