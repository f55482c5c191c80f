"""Scenes of line R7: one kind of trouble each, brought over a real daemon and taken away again.

A scene gets a daemon that serves and is under load, does its worst, and returns with everything
healed. It says what it noticed itself; whether the daemon lived, recovered and kept its promises is
looked at afterwards by the line.

Invariant: a scene that has system calls fail goes on until one was struck, or says that none was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon.faults_lab import Act, Call, Faults, Kind, Rule
from tests.daemon.life_lab import GUEST, Lab, alive

READ, WRITE, SYNC, OPEN, RENAME = Call.READ, Call.WRITE, Call.SYNC, Call.OPEN, Call.RENAME
DATA, STATE, SOCKET = Kind.DATA, Kind.STATE, Kind.SOCKET
EIO, ENOSPC = errno.EIO, errno.ENOSPC

HEAL_SECONDS_MAX = 15.0
START_SECONDS_MAX = 30.0
STRIKE_S = 0.6
STRUCK_SECONDS_MAX = 10.0  # from the beginning of a strike until a call was struck
TRIES_MAX = 8  # of a beginning or an end with a fault that may come too late in it
MISS_SECONDS_MAX = 6.0  # the driver's deadline and some
DISK_BYTES = 160 << 20
DISK_FLASH_BYTES = 64 << 20


class NotHere(Exception):
    """This machine cannot do the scene."""


@dataclass(slots=True)
class Scene:
    """What a scene has in its hands. `injects`: it has had system calls fail, or meant to."""

    lab: Lab
    faults: Faults
    rng: random.Random
    seed: int
    injects: bool = False
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = self._injected()

    def _injected(self) -> int:
        return sum(self.faults.injected().values())

    @property
    def struck(self) -> int:
        """System calls that were made to fail in this scene."""
        return self._injected() - self._before

    def begin(self, *rules: Rule) -> None:
        """These faults from now on."""
        self.injects = True
        self.faults.strike(rules, self.seed)

    def strike(self, *rules: Rule, seconds: float = STRIKE_S) -> None:
        """These faults for a while, under the load that is on, and until one was met."""
        before, began = self.struck, time.monotonic()
        self.begin(*rules)
        time.sleep(seconds)
        while self.struck == before and time.monotonic() - began < STRUCK_SECONDS_MAX:
            time.sleep(0.02)
        self.faults.heal()

    def rate(self) -> float:
        """How often, from now and then to most of the time."""
        return self.rng.choice([0.05, 0.2, 0.5, 0.9])

    def guest(self) -> None:
        """Add the guest, or erase it."""
        here = self.lab.judge.exists.get(GUEST) == {True}
        self.lab.driver.ask("admin", what="erase" if here else "add", tenant=GUEST, wait=True)
        self.lab.judge.read(self.lab.journal)


# The flash ----------------------------------------------------------------------------------------


def failing_reads(scene: Scene) -> None:
    act, error = scene.rng.choice([(Act.ERROR, EIO), (Act.ERROR, errno.EINTR), (Act.SHORT, 0)])
    scene.strike(Rule((READ,), (DATA,), act, error, rate=min(0.8, scene.rate())))


def failing_writes(scene: Scene) -> None:
    act, error = scene.rng.choice(
        [(Act.ERROR, EIO), (Act.ERROR, ENOSPC), (Act.TORN, EIO), (Act.SHORT, 0)]
    )
    scene.strike(Rule((WRITE,), (DATA,), act, error, rate=scene.rate()))


def failing_flushes(scene: Scene) -> None:
    scene.strike(Rule((SYNC,), (DATA,), Act.ERROR, EIO, rate=scene.rate()))


def the_kth_call(scene: Scene) -> None:
    for _ in range(3):
        call = scene.rng.choice([READ, WRITE, SYNC])
        act = Act.ERROR if call is SYNC else scene.rng.choice([Act.ERROR, Act.SHORT, Act.TORN])
        kth = scene.rng.randint(1, 12)
        scene.strike(Rule((call,), (DATA,), act, EIO, kth=kth), seconds=STRIKE_S / 2)


def a_storm(scene: Scene) -> None:
    """All at once, on flash, state and sockets."""
    scene.strike(
        Rule((READ, WRITE, SYNC), (DATA,), Act.ERROR, EIO, rate=0.1),
        Rule((READ, WRITE), (DATA,), Act.SHORT, rate=0.1),
        Rule((OPEN, WRITE, SYNC, RENAME), (STATE,), Act.ERROR, EIO, rate=0.1),
        Rule((READ, WRITE), (SOCKET,), Act.SHORT, rate=0.1),
        seconds=2 * STRIKE_S,
    )


def writes_are_gone(scene: Scene) -> None:
    """Nothing is written for longer than the engine tries."""
    error = scene.rng.choice([EIO, ENOSPC])
    scene.strike(Rule((WRITE, SYNC), (DATA,), Act.ERROR, error, rate=1.0), seconds=3.0)


def reads_are_gone(scene: Scene) -> None:
    scene.strike(Rule((READ,), (DATA,), Act.ERROR, EIO, rate=1.0), seconds=2 * STRIKE_S)


# Keys, and connections ----------------------------------------------------------------------------


def failing_state(scene: Scene) -> None:
    """Tenants are added, erased, rotated while the keyring's folder fails."""
    calls = scene.rng.choice([(OPEN,), (WRITE,), (SYNC,), (RENAME,), (OPEN, WRITE, SYNC, RENAME)])
    act = Act.TORN if calls == (WRITE,) and scene.rng.random() < 0.5 else Act.ERROR
    rule = Rule(calls, (STATE,), act, scene.rng.choice([EIO, ENOSPC]), rate=scene.rate())
    scene.begin(rule)
    for turn in range(3 * TRIES_MAX):
        if turn >= 3 and scene.struck:
            break
        scene.guest()
        scene.lab.driver.ask("admin", what="rotate", tenant="dev", wait=True)
    scene.faults.heal()
    scene.guest()


def ragged_sockets(scene: Scene) -> None:
    """Streams give and take a few bytes at a time."""
    scene.strike(Rule((READ, WRITE), (SOCKET,), Act.SHORT, rate=0.4))


def reset_sockets(scene: Scene) -> None:
    rule = Rule((READ, WRITE), (SOCKET,), Act.ERROR, errno.ECONNRESET, rate=0.01)
    scene.strike(rule, seconds=2 * STRIKE_S)


# Beginnings and ends ------------------------------------------------------------------------------


def a_bad_start(scene: Scene) -> None:
    """The k-th call fails while the daemon starts: it serves, or refuses in words."""
    lab, rng = scene.lab, scene.rng
    lab.kill()
    lab.driver.ask("stop")
    for turn in range(TRIES_MAX):
        if turn >= 2 and scene.struck:
            break
        kind = rng.choice([DATA, STATE])
        calls = (READ, WRITE, SYNC) if kind is DATA else (OPEN, READ, WRITE, SYNC, RENAME)
        rule = Rule(calls, (kind,), Act.ERROR, rng.choice([EIO, ENOSPC]), kth=rng.randint(1, 40))
        scene.begin(rule)
        at = lab.log.stat().st_size
        lab.begin()
        until = time.monotonic() + START_SECONDS_MAX
        said = ""
        while alive(lab.pid) and "event=serving" not in said and time.monotonic() < until:
            time.sleep(0.02)
            said = lab.log_since(at)
        assert time.monotonic() < until, f"neither up nor down: {said}"
        if not alive(lab.pid):
            said = lab.log_since(at)
            assert "entresold: " in said, f"it ended without a word: {said}"
        lab.kill()
        scene.faults.heal()
    lab.start()
    lab.look_after_restart()


def a_bad_end(scene: Scene) -> None:
    """The flash fails while the daemon stops: it ends all the same, and comes back whole."""
    lab = scene.lab
    call, act = scene.rng.choice([(WRITE, Act.ERROR), (WRITE, Act.TORN), (SYNC, Act.ERROR)])
    for turn in range(TRIES_MAX):
        if turn:  # what it met was nothing: again, with something left to write
            lab.driver.ask("load", seed=scene.seed + turn, workers=4, spread=60, mix=MIX)
            time.sleep(STRIKE_S)
        scene.begin(Rule((call,), (DATA,), act, EIO, rate=scene.rate()))
        code = lab.stop()
        scene.faults.heal()
        assert code == 0, f"it stopped with {code}"
        lab.driver.ask("stop")
        lab.start()
        lab.look_after_restart()
        if scene.struck:
            break


# Squeezed -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    """A lower limit of a running process for a while."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


def no_descriptors(scene: Scene) -> None:
    """Strangers take every descriptor that is left."""
    lab = scene.lab
    used = len(os.listdir(f"/proc/{lab.pid}/fd"))
    listen = lab.site.config.listen
    taken: list[socket.socket] = []
    with limited(lab.pid, resource.RLIMIT_NOFILE, used + scene.rng.randint(0, 6)):
        try:
            for _ in range(24):
                for port in (listen.control_port, listen.metrics_port, listen.data_port):
                    with contextlib.suppress(OSError):
                        address = (listen.control_host, port)
                        taken.append(socket.create_connection(address, timeout=0.2))
            time.sleep(STRIKE_S)
        finally:
            for each in taken:
                each.close()


def little_memory(scene: Scene) -> None:
    """No address space is left for slabs or threads."""
    _room_of(scene, scene.rng.choice([2 << 20, 6 << 20]))


def no_memory(scene: Scene) -> None:
    """Nor for anything else."""
    _room_of(scene, scene.rng.choice([64 << 10, 256 << 10]))


def _room_of(scene: Scene, room_bytes: int) -> None:
    text = Path(f"/proc/{scene.lab.pid}/statm").read_text()
    size = int(text.split()[0]) * resource.getpagesize()
    with limited(scene.lab.pid, resource.RLIMIT_AS, size + room_bytes):
        time.sleep(STRIKE_S)


def frozen_daemon(scene: Scene) -> None:
    """It is stopped: every call of a host comes back in time."""
    lab = scene.lab
    lab.driver.ask("stop")
    lab.signal(signal.SIGSTOP)
    began = time.monotonic()
    statuses = lab.driver.ask("get", numbers=list(range(5)))
    took = time.monotonic() - began
    time.sleep(max(0.0, 1.5 - took))
    lab.signal(signal.SIGCONT)
    assert took < MISS_SECONDS_MAX, f"a get of a stopped daemon took {took:.1f} s"
    assert "ok" not in statuses, statuses


def frozen_host(scene: Scene) -> None:
    """The host is stopped for longer than its leases last; others may take the memory meanwhile."""
    pid = scene.lab.driver.process.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2 + scene.rng.random())  # the lab's leases last 0.8 s
    os.kill(pid, signal.SIGCONT)


# Full disks ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, kind: str) -> Iterator[Path]:
    """A small file system of its own. Raises: NotHere."""
    place = folder / "disk"
    place.mkdir(mode=0o700)
    if os.geteuid() != 0 or not shutil.which("mount"):
        raise NotHere("mounting needs root")
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(place)]
    if kind == "ext4":
        image = folder / "disk.img"
        with open(image, "wb") as file:
            file.truncate(DISK_BYTES)
        if not shutil.which("mkfs.ext4"):
            raise NotHere("there is no mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        words = ["mount", "-o", "loop", str(image), str(place)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotHere(f"{kind} cannot be mounted: {done.stderr.strip()}")
    try:
        place.chmod(0o700)
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _full(scene: Scene, kind: str) -> None:
    """A second daemon whose state and data live on a disk that somebody else fills to the brim."""
    folder = scene.lab.folder / f"full-{scene.seed}"
    folder.mkdir()
    try:
        with (
            mounted(folder, kind) as disk,
            Lab(folder, state_dir=disk / "state", flash=DISK_FLASH_BYTES, address=2) as lab,
        ):
            lab.first_life()
            lab.driver.ask("load", seed=scene.seed, workers=2, spread=60, mix=MIX, once=False)
            _fill(disk / "filler")
            for what, tenant in (("rotate", "dev"), ("add", GUEST), ("rotate", "dev")):
                lab.driver.ask("admin", what=what, tenant=tenant, wait=True)
            time.sleep(STRIKE_S)
            (disk / "filler").unlink()
            lab.driver.ask("admin", what="rotate", tenant="dev", wait=True)
            lab.driver.ask("stop")
            lab.look("quiet")
            assert alive(lab.pid), lab.last_words()
            lab.kill()
            lab.start()
            lab.look_after_restart()
            assert lab.judge.keys.get("dev", 1) > 1, "no key was rotated after healing"
            assert lab.judge.durable, "nothing durable was judged"
            assert lab.stop() == 0
            scene.lab.judge.take(lab.judge)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(path: Path) -> None:
    """Take every byte that is left."""
    with open(path, "wb") as file, contextlib.suppress(OSError):
        piece = bytes(1 << 20)
        while True:
            file.write(piece)
            file.flush()
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


def full_tmpfs(scene: Scene) -> None:
    _full(scene, "tmpfs")


def full_ext4(scene: Scene) -> None:
    _full(scene, "ext4")


MIX = {"durable": 0.3, "accepted": 0.1, "forget": 0.3, "get": 0.3}
SCENES: tuple[Callable[[Scene], None], ...] = (
    failing_reads, failing_writes, failing_flushes, the_kth_call, a_storm, writes_are_gone,
    reads_are_gone, failing_state, ragged_sockets, reset_sockets, a_bad_start, a_bad_end,
    no_descriptors, little_memory, no_memory, frozen_daemon, frozen_host, full_tmpfs, full_ext4,
)  # fmt: skip
