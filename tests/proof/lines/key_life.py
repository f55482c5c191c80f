"""K1 to K3: keys come, change and go while the daemon serves.

K1 rotates data keys under load, by hand, by limit and by force, with kill -9 in between. K2 changes
the KEK, with a crash at every file operation and at any moment of a life. K3 starts without the
KEK: locked, nothing lost, unlocked without a restart. (K4, keys that the daemon never has, is in
`host_sealed`.)
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entresol_daemon.keys.providers import FileKek
from entresol_proto.limits import MIB
from entresol_proto.status import EntresolError, KeyringError, Status
from tests.daemon.life_lab import BUGS, Died, Lab
from tests.daemon.oracle_lab import MISS
from tests.proof.keylife import ask, configure, kek_of, tenant, until, with_keys
from tests.proof.line import Line, Size, Slice, Tally
from tests.unit.keyring_lab import KEK, KEK_B, Crash, FaultyCalls, keys_of, open_ring, seeded

MIX = {"durable": 0.5, "accepted": 0.1, "forget": 0.1, "get": 0.3}
FLASH_BYTES = 1024 * MIB
SPREAD = 120  # blocks of a load
ROTATE_BLOCKS = 150  # sealed under one version before the next begins by itself


def _lab(part: Slice, rng: random.Random, plant: str = "", **more: Any) -> Lab:
    fabric = rng.choice(["shm", "tcp"])
    return Lab(part.folder, fabric=fabric, plant=plant, flash=FLASH_BYTES, **more)


def _lives(
    part: Slice,
    plant: str,
    life: Callable[[Lab, random.Random, Tally], None],
    seeds: Sequence[int] | None = None,
    **keys: Any,
) -> Tally:
    """A site, and a unit's worth of its life for every seed."""
    tally = Tally()
    with _lab(part, random.Random(part.seed), plant) as lab:
        if keys:
            configure(lab, with_keys(**keys))
        lab.first_life()
        for seed in part.seeds if seeds is None else seeds:
            tally.tried += 1
            before = len(lab.judge.findings), len(tally.findings)
            try:
                life(lab, random.Random(seed), tally)
            except Died as error:
                tally.crashes += 1
                tally.found(seed, f"{error}: {lab.last_words()}")
                break
            if bug := BUGS.search(said := lab.new_log()):
                tally.crashes += 1
                tally.found(
                    seed, f"the log says {said[max(0, bug.start() - 200) : bug.end() + 800]}"
                )
            for text in lab.judge.findings[before[0] :]:
                tally.found(seed, text)
            tally.survived += before == (len(lab.judge.findings), len(tally.findings))
        tally.wrong_bytes += lab.judge.wrong
        tally.durable_lost += lab.judge.lost
        tally.figure("answers_judged", lab.judge.checked)
        tally.figure("durable_acks", lab.judge.durable)
    return tally


def _load(lab: Lab, rng: random.Random) -> None:
    lab.driver.ask(
        "load", seed=rng.getrandbits(32), workers=3, mix=MIX, spread=SPREAD, once=False
    )  # fmt: skip
    time.sleep(0.1 + rng.random() * 0.2)


def _restart(lab: Lab) -> None:
    lab.start()
    lab.look_after_restart()


def _may_be_gone(lab: Lab) -> None:
    """Nothing that was stored so far has to be there any more."""
    lab.judge.read(lab.journal)
    for may in lab.judge.may.values():
        may.add(MISS)


# K1 -----------------------------------------------------------------------------------------------


def rotation(part: Slice) -> Tally:
    """K1's work."""
    return _rotation(part, plant="")


def _rotation(part: Slice, plant: str) -> Tally:
    return _lives(part, plant, _rotating, rotate_blocks=ROTATE_BLOCKS)


def _rotating(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """One life: rotations under load, then death in the middle of one, or a quiet end of it."""
    began_at = lab.journal.stat().st_size
    _load(lab, rng)
    for _ in range(rng.randrange(1, 4)):
        lab.driver.ask("admin", what="rotate", tenant="dev", wait=True)
        time.sleep(rng.random() * 0.1)
        tally.figure("rotations_asked", 1)
    how = rng.choice(["kill", "kill", "force", "kill_forced", "quiet"])
    tally.figure(f"ended_{how}", 1)
    if how == "kill":
        lab.driver.ask("admin", what="rotate", tenant="dev")
        time.sleep(rng.random() * 0.03)
        lab.kill()
    elif how == "kill_forced":
        _forced_in_background(lab, rng)
    if how.startswith("kill"):
        lab.driver.ask("stop")
        lab.judge.read(lab.journal)
        _restart(lab)
        lab.judge.evicts = False
        return
    lab.driver.ask("stop")
    _only_misses(lab, began_at)
    lab.look("quiet")
    _counted(lab, tally)
    tally.figure("rotations_by_limit", lab.metrics()[ROTATED_BY_LIMIT])
    _forced(lab, tally) if how == "force" else _aged_out(lab, tally)
    if lab.stop() != 0:
        lab.judge.found("a clean stop ended badly")
    _restart(lab)


# What a put or get may answer while keys change; BUSY is another put of the same block.
ORDINARY = frozenset({Status.OK, Status.EXISTS, Status.MISS, Status.GAP, Status.BUSY})


def _only_misses(lab: Lab, began_at: int) -> None:
    """Nobody noticed that keys changed: no error, no refusal, no deadline in the whole load."""
    with open(lab.journal, encoding="utf-8") as file:
        file.seek(began_at)
        for line in file:
            _, word, *rest = json.loads(line)
            if word in ("put_answered", "saw"):
                odd = {Status(code) for code in rest[3].values()} - ORDINARY
                if odd:
                    lab.judge.found(f"{word} {rest[0]}: {sorted(s.label for s in odd)} under load")


ROTATED_BY_LIMIT = 'entresol_key_rotations_total{cause="limit"}'
OLD_BLOCKS = 'entresol_tenant_old_key_blocks{tenant="dev"}'


def _forced_in_background(lab: Lab, rng: random.Random) -> None:
    """Begin a forced rotation, whose end nobody will hear of."""

    def force() -> None:
        try:
            ask(lab, "TenantRotate", name="dev", force=True)
        except EntresolError:
            return  # the daemon died, as it should

    # From here to the next start blocks go at a moment nobody knows, also those stored meanwhile.
    _may_be_gone(lab)
    lab.judge.evicts = True
    thread = threading.Thread(target=force)
    thread.start()
    time.sleep(rng.random() * 0.05)
    lab.kill()
    thread.join()


def _counted(lab: Lab, tally: Tally) -> None:
    """Every block is counted under one version, once the daemon has looked."""

    def balanced() -> bool:
        row = tenant(lab)
        known = sum(version.blocks for version in row.key_versions) + row.blocks_host_sealed
        return not row.blocks_not_counted and known == row.blocks

    if not until(balanced):
        lab.judge.found(f"versions do not add up to the blocks: {tenant(lab)}")
    tally.figure("versions_seen", len(tenant(lab).key_versions))


def _forced(lab: Lab, tally: Tally) -> None:
    """After it nothing stored before can be read, and what is stored then can."""
    ask(lab, "TenantRotate", name="dev", force=True)
    tally.figure("rotations_forced", 1)
    for place in lab.judge.may:
        if place[0] == "dev":
            lab.judge.may[place] = {MISS}
    lab.look("quiet")
    row = tenant(lab)
    if len(row.key_versions) != 1 or row.blocks:
        lab.judge.found(f"a forced rotation left something: {row}")
    lab.driver.ask("put", numbers=list(range(12)), ack="durable")
    lab.look("quiet")


def _aged_out(lab: Lab, tally: Tally) -> None:
    """With its last block an old version ends by itself."""
    lab.driver.ask("forget", numbers=list(range(SPREAD)))
    lab.judge.read(lab.journal)
    if not until(lambda: len(tenant(lab).key_versions) == 1):
        lab.judge.found(f"versions without blocks are still there: {tenant(lab)}")
    if lab.metrics()[OLD_BLOCKS]:
        lab.judge.found("the metric counts blocks under versions that ended")
    tally.figure("aged_out", 1)


def _rotation_canary() -> None:
    """A rotation that destroys the versions before it, although nobody forced it."""
    with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
        part = Slice(1, 2, Size.COMMIT, Path(name))
        tally = _rotation(part, plant="tests.daemon.plants:rotation_destroys")
    assert tally.durable_lost, f"{tally.tried} lives, {tally.findings}"


# K2 -----------------------------------------------------------------------------------------------

LIVES_EVERY = 6  # units: one of them is a life of the real daemon, the others are files only


def kek_change(part: Slice) -> Tally:
    """K2's work."""
    tally = Tally()
    lives = [seed for seed in part.seeds if seed % LIVES_EVERY == 0]
    for seed in part.seeds:
        if seed not in lives:
            _crashes_of_a_change(part.folder / f"ring-{seed}", random.Random(seed), seed, tally)
    if lives:
        tally.add(_lives(part, "", _changing, lives))
    return tally


def _crashes_of_a_change(folder: Path, rng: random.Random, seed: int, tally: Tally) -> None:
    """A crash (or one failing call) at every file operation of a change: one of the two opens."""
    k = 0
    finished = False
    while not finished:
        k += 1
        tally.tried += 1
        at = folder / str(k)
        seeded(at)
        calls = FaultyCalls(crash=rng.random() < 0.7)
        calls.short_writes = rng.random() < 0.3
        ring = open_ring(at, calls=calls)
        for _ in range(rng.randrange(3)):
            ring.rotate("zeta", now_unix_s=9)
        before = keys_of(ring)
        calls.count, calls.k = 0, k
        try:
            ring.rewrap(KEK_B)
            finished = calls.count < k
        except (Crash, KeyringError):
            pass
        ring.close()
        opened = []
        for kek in (KEK, KEK_B):
            try:
                again = open_ring(at, kek)
            except KeyringError:
                continue
            opened.append(kek.source)
            if keys_of(again) != before:
                tally.found(seed, f"call {k}: keys changed with the KEK")
            again.close()
        if len(opened) != 1 or (finished and opened != [KEK_B.source]):
            tally.found(seed, f"call {k}: opened by {opened or 'neither'}")
        else:
            tally.survived += 1
        shutil.rmtree(at)
    tally.figure("file_operations", k)


def _changing(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """The KEK changes under load; sometimes the daemon dies in the middle."""
    old, new = kek_of(lab), lab.folder / f"kek-{rng.getrandbits(32):08x}"
    FileKek.generate(new)
    lab.driver.ask("put", numbers=list(range(1_000, 1_016)), ack="durable")
    before = _records(lab)
    _load(lab, rng)
    kill = rng.random() < 0.6
    done = threading.Event()

    def change() -> None:
        try:
            ask(lab, "ChangeKek", kek_file=str(new))
            done.set()
        except EntresolError:
            return

    thread = threading.Thread(target=change)
    thread.start()
    if kill:
        time.sleep(rng.random() * 0.06)
        lab.kill()
    thread.join()
    lab.driver.ask("stop")
    if not kill:
        lab.look("quiet")
        if not done.is_set():
            lab.judge.found("the KEK could not be changed")
        lab.stop()
    tally.figure("killed_in_a_change" if kill else "changes_under_load", 1)
    lab.judge.read(lab.journal)
    _start_with_either(lab, old, new, must_be_new=done.is_set())
    lab.look_after_restart()
    # Blocks that were there before are where they were, byte for byte.
    after = _records(lab)
    kept = sum(after.get(at) == raw for at, raw in before.items())
    tally.figure("records_untouched", kept)
    if kept != len(before):
        lab.judge.found(f"{len(before) - kept} records of {len(before)} were rewritten")


def _start_with_either(lab: Lab, old: Path, new: Path, *, must_be_new: bool) -> None:
    """Exactly one of the two KEKs must be right."""
    ids = {path: FileKek.open(path).kek_id().hex() for path in (old, new)}
    said = (lab.site.config.shard.state_dir / "keyring.json").read_text(errors="replace")
    backup = lab.site.config.shard.state_dir / "keyring.json.bak"
    right = [path for path in (old, new) if ids[path] in said] or [
        path for path in (old, new) if ids[path] in backup.read_text(errors="replace")
    ]
    wrong = old if right == [new] else new
    configure(lab, with_keys(kek_file=wrong))
    try:
        lab.start()
    except Died:
        pass  # as it should: another KEK wrapped the keyring
    else:
        lab.judge.found("a daemon started with the wrong KEK")
    lab.kill()
    configure(lab, with_keys(kek_file=right[0]))
    lab.start()
    if must_be_new and right != [new]:
        lab.judge.found("the change was answered and is not there after a restart")


def _records(lab: Lab) -> dict[int, bytes]:
    """The first bytes of every record on flash, by place."""
    found = {}
    with open(lab.site.config.flash_path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(0, min(size, 64 * MIB), 4096):
            raw = os.pread(file.fileno(), 512, at)
            if b"ENTS" in raw:
                found[at] = raw
    return found


def _kek_canary() -> None:
    """A change that forgets the second copy: after a crash, and without one, both KEKs open."""
    from entresol_daemon.keys import keyring

    def careless(ring: Any, new_kek: Any) -> None:
        state = ring._state  # the keys stay wrapped under the old one, the name says the new one
        ring._save(replace(state, kek_id=new_kek.kek_id()))

    honest = keyring.Keyring.rewrap
    keyring.Keyring.rewrap = careless  # type: ignore[method-assign, assignment]
    try:
        with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
            tally = kek_change(Slice(1, 2, Size.COMMIT, Path(name)))
    finally:
        keyring.Keyring.rewrap = honest  # type: ignore[method-assign]
    assert tally.findings, "nobody noticed that keys were left under the old KEK"


# K3 -----------------------------------------------------------------------------------------------


def locked(part: Slice) -> Tally:
    """K3's work."""
    return _lives(part, "", _locked_life)


def _locked_life(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Blocks, then a start without the KEK: locked, nothing lost, unlocked without a restart."""
    kek = kek_of(lab)
    away = kek.with_name("kek.away")
    first = rng.randrange(1_000_000)
    lab.driver.ask("put", numbers=list(range(first, first + 10)), ack="durable")
    lab.judge.read(lab.journal)
    if rng.random() < 0.5:
        lab.stop()
    else:
        lab.kill()
    kek.rename(away)
    lab.start()
    for _ in range(rng.randrange(1, 3)):
        _says_it_is_locked(lab)
        if rng.random() < 0.4:  # it dies and comes back, still locked
            lab.kill()
            lab.start()
            tally.figure("killed_locked", 1)
    _refuses_another_kek(lab, rng)
    away.rename(kek)
    how = rng.choice(["hangup", "unlock", "unlock_file"])
    if how == "hangup":
        lab.signal(signal.SIGHUP)
    else:
        ask(lab, "Unlock", kek_file=str(kek) if how == "unlock_file" else "")
    tally.figure(f"unlocked_by_{how}", 1)
    if not until(lambda: _ready(lab)[0] == 200):
        lab.judge.found(f"it is not ready after {how}: {_ready(lab)}")
        return
    if not lab.driver.ask("connect", seconds=30):
        lab.judge.found("the client did not come back after the unlocking")
    lab.look("quiet")
    lab.driver.ask("put", numbers=[first + 500], ack="durable")
    lab.look("quiet")


def _ready(lab: Lab) -> tuple[int, str]:
    listen = lab.site.config.listen
    url = f"http://{listen.metrics_host}:{listen.metrics_port}/readyz"
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def _says_it_is_locked(lab: Lab) -> None:
    stat = ask(lab, "Stat")
    code, text = _ready(lab)
    # It answers people and machines, and says what to do.
    for what, said in (("stat", " ".join(stat.reasons_not_ready)), ("health", text)):
        if "locked" not in said or "unlock" not in said:
            lab.judge.found(f"{what} of a locked daemon says {said!r}")
    if code != 503 or stat.state != 3:
        lab.judge.found(f"a locked daemon is ready: {code}, state {stat.state}")
    if lab.metrics()['entresol_state{state="locked"}'] != 1:
        lab.judge.found("the metric of the state does not say locked")
    statuses = _asked(lab) - {"breaker_open"}
    if statuses - {"locked", "disconnected"} or not until(lambda: _asked(lab) == {"locked"}):
        lab.judge.found(f"a locked daemon answered a client with {statuses}")


def _asked(lab: Lab) -> set[str]:
    return set(lab.driver.ask("get", numbers=[0, 1], when="load"))


def _refuses_another_kek(lab: Lab, rng: random.Random) -> None:
    other = lab.folder / f"other-{rng.getrandbits(32):08x}"
    FileKek.generate(other)
    try:
        ask(lab, "Unlock", kek_file=str(other))
        lab.judge.found("another KEK unlocked it")
    except EntresolError as error:
        if "is wrapped under KEK" not in str(error):
            lab.judge.found(f"another KEK was refused with {error}")
    _says_it_is_locked(lab)


def _locked_canary() -> None:
    """A daemon that throws away what it cannot open while it is locked."""
    with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
        part = Slice(1, 1, Size.COMMIT, Path(name))
        tally = _lives(part, "tests.daemon.plants:locked_drops", _locked_life)
    assert tally.durable_lost, f"nothing was lost: {tally.findings}"


LINES = (
    Line(
        id="K1",
        name="rotation while serving, kill -9 in it",
        unit="lives",
        units={Size.COMMIT: 5, Size.NIGHTLY: 40, Size.RELEASE: 120},
        slice_units=12,
        run=rotation,
        canary=_rotation_canary,
        slice_deadline_s=400.0,
    ),
    Line(
        id="K2",
        name="KEK change, crash at every file call",
        unit="changes",
        units={Size.COMMIT: 6, Size.NIGHTLY: 60, Size.RELEASE: 144},
        slice_units=24,
        run=kek_change,
        canary=_kek_canary,
        slice_deadline_s=400.0,
    ),
    Line(
        id="K3",
        name="locked start, unlocked without a restart",
        unit="locked lives",
        units={Size.COMMIT: 2, Size.NIGHTLY: 12, Size.RELEASE: 40},
        slice_units=8,
        run=locked,
        canary=_locked_canary,
        slice_deadline_s=400.0,
    ),
)
