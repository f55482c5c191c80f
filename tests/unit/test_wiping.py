"""Secrets that are wiped are zeros, and freed memory that was swept holds none."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from keyring_lab import open_ring, seeded

from entresol_daemon.keys import pool_ends, sweeping
from entresol_daemon.shard.keycare import wipe_from_memory
from entresol_proto.ids import TenantName
from entresol_proto.seal import keys
from entresol_proto.seal.keys import derive_block_key, derive_key_and_commitment
from entresol_proto.seal.wiping import wipe
from entresol_proto.status import SealError, Status
from tests.proof.memory_scan import Search


def test_a_wiped_object_is_zeros_and_keeps_its_length() -> None:
    secret = os.urandom(32)
    held = secret
    wipe(secret)
    assert held == bytes(32)


def test_short_objects_are_not_wiped() -> None:
    with pytest.raises(AssertionError):
        wipe(b"a")


def test_nothing_is_derived_from_a_wiped_key() -> None:
    secret = os.urandom(32)
    derive_block_key(secret, bytes(32))
    wipe(secret)
    with pytest.raises(SealError) as caught:
        derive_block_key(secret, bytes(32))
    assert caught.value.status is Status.ERASED


def test_no_second_copy_of_a_derived_key_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    derived, derive = list[bytearray](), keys._derive

    def noted(*args: bytes) -> bytearray:
        derived.append(derive(*args))
        return derived[-1]

    monkeypatch.setattr(keys, "_derive", noted)
    secret = os.urandom(32)
    key, both = derive_block_key(secret, bytes(32)), derive_key_and_commitment(secret, bytes(32))
    assert key.key + key.commitment == both
    assert any(both)
    assert derived == [bytearray(48)] * 2


def test_erased_and_retired_keys_are_wiped_and_the_others_stay(tmp_path: Path) -> None:
    seeded(tmp_path)
    ring = open_ring(tmp_path)
    acme, zeta = ring.get("acme"), ring.get("zeta")
    old, active = acme.deks[1], acme.deks[2]
    ring.retire("acme", 1)
    assert any(old), "sessions may still hold it"
    assert ring.wipe_destroyed("acme") == 1
    assert not any(old)
    assert any(active)
    ring.erase("acme", now_unix_s=1)
    assert ring.wipe_destroyed("zeta") == 0, "of another tenant"
    assert ring.wipe_destroyed("acme") == 2
    assert not any(active)
    assert not any(acme.naming_secret)
    assert any(zeta.deks[1])
    assert ring.wipe_destroyed("acme") == 0
    ring.close()


def test_a_forced_rotation_wipes_the_older_versions(tmp_path: Path) -> None:
    seeded(tmp_path)
    ring = open_ring(tmp_path)
    older = list(ring.get("acme").deks.values())
    ring.rotate("acme", now_unix_s=1, force=True)
    assert ring.wipe_destroyed("acme") == len(older) == 2
    assert not any(map(any, older))
    assert any(ring.get("acme").active_dek)
    ring.close()


CHILD = """
import hashlib, sys
from entresol_daemon.keys.sweeping import clear_on_free, sweep
if sys.argv[1] == "sweep":
    clear_on_free()
held = []
for at in range(4000):
    secret = hashlib.sha256(b"%d" % at).digest()
    held.append(secret + bytes(at % 400))
    held.append(secret * (1 + at % 80))
del held[::2], held[::3], held, secret
kinds = [
    lambda at: object(),
    lambda at: 2**30 + at,
    lambda at: b"%02d" % (at % 100),
    lambda at: b"%16d" % at,
]
small = [kinds[int(sys.argv[2])](at) for at in range(int(sys.argv[3]))]
for _ in sweep() if sys.argv[1] == "sweep" else ():
    pass
print("ready", flush=True)
sys.stdin.read()
"""


def secrets_left(how: str, kind: int = 0, small: int = 0) -> list[str]:
    """Which, how large their copies were, and where they are, in a process that made 4,000, copied
    and freed them, and then made `small` objects of one of four sizes to 64 bytes."""
    names = {
        hashlib.sha256(b"%d" % at).digest(): f"{at}: {65 + at % 400} {33 + 32 * (1 + at % 80)}"
        for at in range(4000)
    }
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, how, str(kind), str(small)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        found = Search(names).in_process(child.pid)
        child.communicate()
    return [f"{names[needle]} {dict(places)}" for needle, places in found.items()]


def test_a_sweep_overwrites_what_was_freed() -> None:
    left = secrets_left("nothing")
    assert len(left) > 1000, f"freed memory keeps what was in it: {len(left)} found"
    left = secrets_left("sweep")
    assert not left, "\n".join(sorted(left))


@pytest.mark.parametrize("kind", range(4), ids=["16", "32", "48", "64"])
def test_a_sweep_reaches_what_small_objects_were_put_beside(kind: int) -> None:
    """Memory of larger objects is given to small ones a piece at a time: the rest is as it was."""
    assert not secrets_left("sweep", kind, 1500)


ENDS = """
import gc, hashlib, sys
from entresol_daemon.keys import pool_ends, sweeping

class Full:
    __slots__ = tuple("abcdefghijklmnopqrstuvwxyz"[: int(sys.argv[2])])

secrets = [hashlib.sha256(b"%d" % at).digest() for at in range(60_000)]  # of 80 bytes, in pools
del secrets
held = [[Full(), at] for at in range(120_000)]  # into those pools, and full of them
for one, at in held:
    one.a = at
if sys.argv[1] == "frozen":  # as a daemon does once it has started
    for _ in pool_ends.clear():
        pass
    gc.freeze()
for _ in sweeping.sweep() if sys.argv[1] != "nothing" else ():
    pass
assert all(one.a == at for one, at in held)
print("ready", flush=True)
sys.stdin.read()
"""


def ends_left(how: str, slots: int, *, kernel: bool = True) -> int:
    """How many of the secrets are still there."""
    env = {**os.environ} if kernel else {**os.environ, "ENTRESOL_NATIVE": "0"}
    names = {hashlib.sha256(b"%d" % at).digest(): "" for at in range(60_000)}
    with subprocess.Popen(
        [sys.executable, "-c", ENDS, how, str(slots)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        found = Search(names).in_process(child.pid)
        child.communicate()
    return len(found)


@pytest.mark.parametrize("slots", [10, 22])  # of 112 and of 208 bytes: 96 and 112 are left
def test_a_sweep_reaches_the_ends_of_pools_that_are_full(slots: int) -> None:
    """Behind the last object that fits lies what was in a pool when it was of another size."""
    assert ends_left("nothing", slots) > 20
    assert ends_left("sweep", slots) == 0
    assert ends_left("frozen", slots) == 0
    assert ends_left("sweep", slots, kernel=False) == 0


NO_ARENAS = """
import resource
from entresol_daemon.keys import sweeping

class Small:
    __slots__ = ("a", "b")

def size_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

held = [[Small() for _ in range(100)] for _ in range(10)]
usual = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size_bytes() + (3 << 20), usual[1]))
try:
    while True:  # the last ones from the C library, as no arena is to be had
        held.append([Small() for _ in range(100)])
except MemoryError:
    pass
resource.setrlimit(resource.RLIMIT_AS, usual)
for some in held:
    for one in some:
        one.a, one.b = some, one
for _ in range(2):
    for _ in sweeping.sweep():
        pass
assert all(one.a is some and one.b is one for some in held for one in some)
print(len(held))
"""


@pytest.mark.parametrize("kernel", ["1", "0"])
def test_ends_are_not_looked_for_beside_objects_outside_of_pools(kernel: str) -> None:
    """Where the interpreter gets no arena, small objects come from elsewhere, among anything."""
    env = {**os.environ, "ENTRESOL_NATIVE": kernel}
    done = subprocess.run(
        [sys.executable, "-c", NO_ARENAS], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_ends_are_left_alone_where_objects_are_not_in_pools() -> None:
    """With another allocator there is no head to read, and perhaps no memory."""
    count = "from entresol_daemon.keys import pool_ends; print(sum(1 for _ in pool_ends.clear()))"
    steps = {}
    for allocator in ("pymalloc", "malloc"):
        env = {**os.environ, "PYTHONMALLOC": allocator}
        done = subprocess.run(
            [sys.executable, "-c", count], env=env, capture_output=True, text=True, check=True
        )
        steps[allocator] = int(done.stdout)
    assert steps["malloc"] == 0
    assert steps["pymalloc"] > 2


GROWTH = """
from entresol_daemon.keys import sweeping
from entresol_daemon.shard.keycare import wipe_from_memory
from entresol_proto.ids import TenantName
held = [bytes(1000 + at % 3000) for at in range(8_000)]  # about 20 MB, with holes
del held[::3]
sweeping._trim()
with sweeping._statm() as statm:
    before = sweeping._resident_bytes(statm)
    for _ in sweeping.sweep():
        pass
    print(sweeping._resident_bytes(statm) - before)
"""


def test_a_sweep_gives_back_what_it_took() -> None:
    grown = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True
    )
    assert int(grown.stdout) < 2 << 20  # 50 MB, where it gave nothing back


def test_a_sweep_ends_where_the_process_cannot_see_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping, "_resident_bytes", lambda _: 0)
    monkeypatch.setattr(sweeping, "BLIND_BYTES", 1 << 20)
    monkeypatch.setattr(pool_ends, "clear", lambda: iter(()))  # as many steps as there are objects
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.0)  # nobody is waited for
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    assert sum(1 for _ in sweeping.sweep()) == 4 + 32 + len(sweeping.LARGE_BYTES)


BESIDE = """
import sys, threading, time
from entresol_daemon.keys import sweeping
turns, over = 0, False
sweeping.ALONE_S = 60.0  # a busy machine is slow; that is not what is asked here
usual_s = sys.getswitchinterval()

def other():
    global turns
    while not over:
        time.sleep(0.001)  # then it waits for its turn
        turns += 1

def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass

def slowly(size, count, make=sweeping._objects):
    seen.append(turns)
    busy(2 * usual_s)
    return make(size, count)

sweeping._objects = slowly
seen, steps = [], []
thread = threading.Thread(target=other)
thread.start()
for _ in sweeping.sweep():
    if len(seen) > 1:
        steps.append(max(seen) - min(seen))
    seen = []
    time.sleep(0.002)  # as a loop does
    busy(usual_s / 2)  # the other one has begun to wait
assert sys.getswitchinterval() == usual_s
over = True
thread.join()
assert len(steps) >= 6, steps
print(sum(map(bool, steps)))
"""


def test_no_other_thread_runs_in_a_step_of_a_sweep() -> None:
    """What it is given meanwhile would keep a megabyte of new memory, for as long as it lives."""
    ran = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == 0


TWO_SWEEPS = """
import sys
from entresol_daemon.keys import sweeping
usual_s = sys.getswitchinterval()
one, two = sweeping.sweep(), sweeping.sweep()
next(one), next(one), next(two), next(two)
assert round(sys.getswitchinterval(), 3) == sweeping.ALONE_S
one.close()
assert round(sys.getswitchinterval(), 3) == sweeping.ALONE_S
two.close()
assert sys.getswitchinterval() == usual_s
"""


def test_two_sweeps_at_once_leave_the_interpreter_as_it_was() -> None:
    subprocess.run([sys.executable, "-c", TWO_SWEEPS], check=True)


SWEEP = """
from entresol_daemon.keys import sweeping
sizes = []
sweeping._take = lambda size, most, _: sizes.append(size) or []
for _ in sweeping.sweep():
    pass
assert sizes == [sweeping.FREE_POOL_BYTES] * 2 + list(sweeping.LARGE_BYTES), sizes
"""


def test_a_sweep_knows_the_interpreters_pools() -> None:
    """Else all that is free would be taken for each size: as thorough, but three times as long. In
    a process of its own: what thousands of tests leave is more than is looked through."""
    subprocess.run([sys.executable, "-c", SWEEP], check=True)


ARENAS = """
import ctypes, threading
from entresol_daemon.keys.sweeping import clear_on_free
clear_on_free()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)
def take():
    together.wait()
    assert all(libc.malloc(4096) for _ in range(100))  # beside each other: without the interpreter
    together.wait()
threads = [threading.Thread(target=take) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def test_threads_share_one_arena() -> None:
    """What one of them frees is in reach of the sweep, and of giving back to the system."""
    told = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True
    )
    if "<heap" not in told.stdout:
        pytest.skip("not run here: this C library has no malloc_info")
    assert told.stdout.count("<heap nr=") == 1


class Ring:
    """Keeps itself."""

    def __init__(self) -> None:
        self.me = self


async def test_what_only_a_cycle_keeps_goes_with_a_tenant_however_old_it_is() -> None:
    """What was in use while another tenant was erased is old by then: a call of gRPC, a watch."""
    ring = Ring()
    seen = weakref.ref(ring)
    gc.collect()
    del ring
    gc.collect(1)
    assert seen() is not None, "it is old"
    parts: Any = SimpleNamespace(
        keyring=SimpleNamespace(wipe_destroyed=lambda name: None),
        residency=SimpleNamespace(forget_keys=lambda stream: iter(())),
        sweep=lambda: iter(()),
    )
    await wipe_from_memory(parts, TenantName("acme"), b"its stream")
    assert seen() is None
