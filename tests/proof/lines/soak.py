"""R8: hours of everything at once, with ten times more sent than is admitted.

Hosts in processes of their own first ask as much as the shard admits; then another one asks, beside
them, for so much that ten times as much is sent as is admitted. What they are admitted must be
served nearly as fast as before, what waits must stay within the limits that are set, what is
refused must be counted alike on both sides, and when all is quiet again nothing may be left: no
lease, queue, task, descriptor, thread or memory. Meanwhile hosts are killed and come back, blocks
are forgotten and evicted, events are followed, tenants are added, rotated and erased. One unit is
one soak, whose length is its size. Of rounds in which a hypervisor gave a fifth of the processors
to others, neither times nor what was sent are judged; where that is most of them, the row says so.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.daemon.daemon_lab import rss_bytes
from tests.daemon.host import GET_BLOCKS
from tests.daemon.life_lab import BUGS, GUEST, HERE, Lab, Process, alive
from tests.proof.line import Line, Size, Slice, Tally
from tests.proof.soak_load import (
    Round,
    Window,
    compared,
    judge_sent,
    judge_waiting,
    late,
    merge,
    p99,
    percentile,
    say_disturbed,
    undisturbed,
)
from tests.proof.soak_rest import Rest, judge_rests, left_over, rest_of

HOSTS = 2
WINDOW = 4  # gets that each asks at a time, when it asks no more than is admitted
AT_ONCE = HOSTS * WINDOW  # gets the shard serves at a time, here
PUTS_QUEUED_MAX = 128  # blocks: fewer than the hosts may have under way
HOST_NICE = 10
ASKED = 13  # times what was served is asked for, so that OVERLOAD times as much is sent
OVER_SESSIONS, OVER_WINDOW = 4, 240  # of the flood; gets that each has under way, at most
FORGET = 0.004  # of the gets that found everything
KEYS = 1_600
WARM_S, ADMITTED_S, OVERLOAD_S = 7.0, 5.0, 10.0  # to warm up; of one round
QUIET_SECONDS_MAX = 20.0
ASK_AGAIN_S = 5.0
LATE_SECONDS_MAX = 60.0  # looked at what is left after that, to tell a leak from what is slow to go
DRAM_BYTES, FLASH_BYTES = 256 << 20, 176 << 20
LOOK_S = 1.0
LEASE_NS = 2_000_000_000
# Each thread of a process keeps freed pieces for itself, up to 7 of every length (glibc's tcache),
# and the library counts them as used: they fill for hours. Without, what is counted is used.
COUNTED = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a soak is, and what memory may grow by, once warm. `more`: rounds that are added
    where few gets decide what is late and say that they were. `length`: of every stretch of load,
    as a part of what it is meant to be. `quiet_s`: how long to wait until nothing is held."""

    rounds: int
    growth_max: float
    more: int = 0
    length: float = 1.0
    quiet_s: float = QUIET_SECONDS_MAX


PLANS = {Size.COMMIT: Plan(3, 0.10, more=3), Size.NIGHTLY: Plan(33, 0.02),
         Size.RELEASE: Plan(200, 0.02)}  # fmt: skip
CANARY = Plan(1, 1.0, length=0.2, quiet_s=4.0)  # what it holds goes in two seconds, or never


def _processor_ticks() -> tuple[int, int]:
    """Of all processors since the start: stolen by a hypervisor, and all of them (proc(5))."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


class Bustle:
    """What goes on beside the load, in a thread: tenants, watchers, a host that is killed."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.failed = ""

    def _run(self) -> None:
        soak, turn = self._soak, 0
        churn: Process | None = None
        try:
            while not self._stop.wait(0.3):
                turn += 1
                if churn is None:
                    churn = soak.host("other", 1_000 + turn)
                    churn.tell("run", seconds=3_600, window=1)
                elif turn % 7 == 0:
                    churn.process.send_signal(signal.SIGKILL)
                    churn.close()
                    churn = None
                    soak.tally.figure("host_restarts", 1)
                if turn % 4 == 0:
                    soak.tenants()
                soak.lab.driver.ask("watch", on=turn % 10 < 7)
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
        finally:
            if churn is not None:
                churn.process.send_signal(signal.SIGKILL)
                churn.close()
            soak.lab.driver.ask("watch", on=False)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Soak:
    """One soak."""

    def __init__(self, lab: Lab, seed: int, tally: Tally, plan: Plan) -> None:
        self.lab = lab
        self._length, self._quiet_s = plan.length, plan.quiet_s
        self.seed = seed
        self.tally = tally
        self.hosts = [self.host("dev", seed + number) for number in range(HOSTS)]
        self.flooder = self.host("dev", seed + HOSTS)
        # What asking ten times as much costs the machine must not count against the shard: the
        # flood takes what the others leave idle of the processors.
        os.sched_setscheduler(self.flooder.process.pid, os.SCHED_IDLE, os.sched_param(0))
        self._turn = 0
        self.counts: Counter[str] = Counter()
        self.capacity = 0.0  # gets a second that were served, with or without the flood
        self._latest = 0.0

    def host(self, tenant: str, seed: int) -> Process:
        """A host process of a tenant."""
        words = {
            "config": str(self.lab.client_toml(tenant)), "fabric": "shm", "seed": seed,
            "keys": KEYS, "options": {"deadline_ns": 5_000_000_000},
        }  # fmt: skip
        process = Process(HERE / "host.py", words)
        # It stands for another machine, and takes what the daemon leaves of this one's processors.
        os.setpriority(os.PRIO_PROCESS, process.process.pid, HOST_NICE)
        return process

    def tenants(self) -> None:
        """Add the guest, rotate its key, erase it, and again."""
        what = ("add", "rotate", "erase")[self._turn % 3]
        self._turn += 1
        self.lab.driver.ask("admin", what=what, tenant=GUEST, wait=True)
        self.tally.figure("tenant_changes", 1)

    def load(self, seconds: float, *, overload: bool = False) -> Window:
        """The same stretch of load by every host, with or without the flood beside it."""
        seconds *= self._length
        for host in self.hosts:
            host.tell("run", seconds=seconds, window=WINDOW, forget=FORGET)
        if overload:
            rate = ASKED * self.capacity
            self.flooder.tell(
                "flood", seconds=seconds, rate=rate, window=OVER_WINDOW, sessions=OVER_SESSIONS
            )
        window = Window()
        before = _processor_ticks()
        window.add([host.answer() for host in self.hosts])
        if overload:
            for what in ("refused", "cut_off"):  # so far they are the hosts' own
                window.counts[f"host_{what}"] += window.counts[what]
            flood = self.flooder.answer()
            window.counts.update(flood["counts"])
        ticks = [now - was for now, was in zip(_processor_ticks(), before, strict=True)]
        window.stolen = ticks[0] / max(1, ticks[1])
        self.counts.update(window.counts)
        served = window.counts["served"] + window.counts["flooded"]
        other, self._latest = self._latest, served / window.seconds
        self.capacity = max(other, self._latest)
        return window

    def rest(self, least: Rest | None) -> Rest:
        """Wait until nothing is under way, then look at what is held. More than `least` may only
        be slow to go, as connections of gRPC are: a client's library notices when it is used again
        that it is to close one."""
        pid = self.lab.pid
        self._come_and_go()
        began = asked = time.monotonic()
        found: Rest | None = None
        steady = 0
        while steady < 3 and (now_s := time.monotonic()) < began + self._quiet_s:
            if now_s > asked + ASK_AGAIN_S:
                self._come_and_go()
                asked = now_s
            time.sleep(0.3)
            metrics = self.lab.metrics()
            now = rest_of(pid, metrics)
            same = found is not None and not any(now.held.values()) and (
                (now.fds, now.threads, now.tasks) == (found.fds, found.threads, found.tasks)
            )  # fmt: skip
            same = same and not (least and left_over(least, now))
            steady = steady + 1 if same else 0
            found = now
        assert found is not None
        if least and left_over(least, found):
            found.went_s = self._late_by(least)
        return found

    def _come_and_go(self) -> None:
        """A tenant, which also gives back to the system what was freed."""
        for what in ("add", "erase"):
            self.lab.driver.ask("admin", what=what, tenant=GUEST, wait=True)

    def _late_by(self, least: Rest) -> float:
        """How long what is too much by now stays; 0: longer than anybody may take to notice."""
        began = time.monotonic()
        while (late_s := time.monotonic() - began) < LATE_SECONDS_MAX:
            time.sleep(1.0)
            if not left_over(least, rest_of(self.lab.pid, self.lab.metrics())):
                return late_s
        return 0.0


def run(part: Slice) -> Tally:
    """A soak for each unit."""
    tally = Tally()
    for seed in part.seeds:
        folder = part.folder / f"{seed}"
        folder.mkdir()
        _soak(folder, seed, PLANS[part.size], tally)
    return tally


def _soak(folder: Path, seed: int, plan: Plan, tally: Tally, plant: str = "") -> None:
    with Lab(
        folder, evicts=True, plant=plant, events_max=2_000, dram=DRAM_BYTES, flash=FLASH_BYTES,
        gets_at_once_max=AT_ONCE, put_queue_blocks_max=PUTS_QUEUED_MAX, lease_ns=LEASE_NS,
        env=COUNTED,
    ) as lab:  # fmt: skip
        lab.first_life()
        # It stores twice what it may, all the time, and evicts itself. (All its keys take 45.4 MB:
        # with a quota of 46.1 everything was stored at last, after half an hour, and stayed.)
        lab.driver.ask("admin", what="add", tenant="other", wait=True, flash_bytes=FLASH_BYTES // 8)
        soak = Soak(lab, seed, tally, plan)
        try:
            findings = _rounds(soak, plan)
        finally:
            for host in (*soak.hosts, soak.flooder):
                host.close()
        said = lab.new_log()
        if os.environ.get("ENTRESOL_PROOF_TRACE"):
            print("\n".join(line for line in said.splitlines() if "entresol.stalls" in line))
        if bug := BUGS.search(said):
            findings.append(f"the log says {said[max(0, bug.start() - 300) : bug.end() + 1_200]}")
        tally.crashes += not alive(lab.pid)
        if (code := lab.stop()) != 0:
            findings.append(f"a clean stop ended with {code}")
    asked = sum(soak.counts[what] for what in ("served", "flooded", "refused", "cut_off"))
    tally.tried += asked
    tally.wrong_bytes += soak.counts["wrong"]
    tally.survived += asked if not findings else 0
    for text in findings:
        tally.found(seed, text)


def _rounds(soak: Soak, plan: Plan) -> list[str]:
    """Warm up, then so many rounds of admitted load and of overload; what was wrong.

    Rounds that are added are judged together with the others; a figure tells.
    """
    lab, rounds = soak.lab, plan.rounds
    stored = soak.hosts[0].ask("fill", first=0, count=KEYS)
    assert stored == KEYS, stored
    base = lab.metrics()
    seen: list[Round] = []
    worst: Counter[str] = Counter()
    rests: list[Rest] = []
    warm = 0  # the first rest that counts
    _beside(soak, worst, lambda: soak.load(WARM_S))
    _beside(soak, worst, lambda: soak.load(WARM_S, overload=True))
    number = 0
    while number < rounds:
        one, ten = Window(), Window()

        def load(one: Window = one, ten: Window = ten) -> None:
            merge(one, soak.load(ADMITTED_S))
            merge(ten, soak.load(OVERLOAD_S, overload=True))

        _beside(soak, worst, load)
        seen.append((one, ten))
        rests.append(soak.rest(rests[warm] if warm else None))
        if not warm and number >= min(rounds - 1, max(1, rounds // 10)):
            warm = number
        _trace(f"round {number}", one, ten, rests[-1])
        number += 1
        if plan.more and number == plan.rounds and late(seen):
            rounds += plan.more
            soak.tally.figure("rounds_added", plan.more)
    findings = _judge(soak, base, seen, worst)
    return findings + judge_rests(soak.tally, rests[warm:], plan.growth_max)


def _beside(soak: Soak, worst: Counter[str], work: Any) -> None:
    """Do it with everything else going on, and look at the daemon meanwhile."""
    bustle = Bustle(soak)
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK_S):
            metrics = soak.lab.metrics()
            for name, value in (
                ("rss_mib", rss_bytes(soak.lab.pid) >> 20),
                ("gets_waiting", metrics['entresol_queue_depth{queue="get"}']),
                ("puts_waiting", metrics['entresol_queue_depth{queue="put"}']),
                ("loop_stall_ms", 1e3 * metrics["entresol_event_loop_lag_max_seconds"]),
            ):
                worst[name] = max(worst[name], int(value))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
        bustle.stop()
    assert not bustle.failed, bustle.failed


def _trace(what: str, one: Window, ten: Window, rest: Rest) -> None:
    if os.environ.get("ENTRESOL_PROOF_TRACE"):
        for name, window in (("admitted", one), ("overload", ten)):
            print(
                f"{what} {name}: {len(window.times_ms) / window.seconds:.0f}/s,"
                f" p50 {percentile(window.times_ms, 50):.0f} p99 {p99(window.times_ms):.0f} ms,"
                f" refused p99 {p99(window.refused_ms):.0f} ms, {dict(window.counts)}", flush=True,
            )  # fmt: skip
        print(f"{what} {rest}", flush=True)


def _judge(
    soak: Soak, base: dict[str, float], seen: Sequence[Round], worst: Counter[str]
) -> list[str]:  # fmt: skip
    """What the load itself says."""
    tally, metrics = soak.tally, soak.lab.metrics()
    findings = []
    over = Window()
    for _, ten in seen:
        merge(over, ten)

    def since(name: str) -> int:
        return int(metrics.get(name, 0.0) - base.get(name, 0.0))

    percent, before, after, ratio = compared(undisturbed(seen) or seen)
    if text := late(seen):
        findings.append(text)
    refused = since('entresol_blocks_missed_total{cause="busy",tenant="dev"}')
    unheard = refused - soak.counts["get_busy"]  # a host that was cut off may not have heard of it
    if not 0 <= unheard <= GET_BLOCKS * soak.counts["cut_off"]:
        findings.append(f"refused blocks: {refused} counted here, {soak.counts['get_busy']} there")
    findings += judge_sent(tally, seen)
    findings += judge_waiting(worst, soak.lab.site.config.limits)
    tally.figure(f"max_p{percent}_admitted_ms", round(before, 1))
    tally.figure(f"max_p{percent}_overload_ms", round(after, 1))
    tally.figure(f"max_p{percent}_ratio", round(ratio, 2))
    tally.figure("samples_overload", len(over.times_ms))
    say_disturbed(tally, seen)
    tally.figure("max_p99_refusal_ms", round(p99(over.refused_ms), 1))
    for name, value in worst.items():
        tally.figure(f"max_{name}", value)
    for name in ("served", "flooded", "refused", "not_asked", "cut_off"):
        tally.figure(f"gets_{name}", soak.counts[name])
    tally.figure("forgotten", soak.counts["forgotten"])
    tally.figure("evicted", since('entresol_evicted_blocks_total{reason="evicted"}'))
    sealed = since('entresol_put_blocks_total{status="ok",tenant="dev"}')
    tally.figure("max_blocks_under_one_key", sealed)
    if sealed >= soak.lab.site.config.keys.rotate_blocks:
        findings.append(f"{sealed} blocks under one key")
    tally.figure("events_followed", soak.lab.driver.ask("watch", on=False))
    return findings


def _canary() -> None:
    """A daemon that forgets to let go of a lease now and then."""
    with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
        tally = Tally()
        plant = "tests.daemon.plants:keeps_leases"
        _soak(Path(name), 1, CANARY, tally, plant)
    assert any("still held" in finding.text for finding in tally.findings), tally.findings


LINES = (
    Line(
        id="R8",
        name="soak and overload, ten times what is admitted",
        unit="soaks",
        units={Size.COMMIT: 1, Size.NIGHTLY: 1, Size.RELEASE: 1},
        slice_units=1,
        run=run,
        canary=_canary,
        alone=True,
        slice_deadline_s=5_400.0,
    ),
)
