"""R8: hours of everything at once, with ten times more asked than is admitted.

Hosts in processes of their own first ask as much as the shard admits; then another one asks ten
times as much beside them. What they are admitted must be served nearly as fast as before, what is
refused must be counted alike on both sides, and when all is quiet again nothing may be left: no
lease, queue, task, descriptor, thread or memory. Meanwhile hosts are killed and come back, blocks
are forgotten and evicted, events are followed, tenants are added, rotated and erased. One unit is
one soak, whose length is its size. Of rounds in which a hypervisor gave a fifth of the processors
to others, times are not judged; where that is most of them, a figure says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.daemon.daemon_lab import rss_bytes
from tests.daemon.host import GET_BLOCKS
from tests.daemon.life_lab import BUGS, GUEST, HERE, Lab, Process, alive
from tests.proof.line import Line, Size, Slice, Tally

HOSTS = 2
WINDOW = 4  # gets that each asks at a time, when it asks no more than is admitted
AT_ONCE = HOSTS * WINDOW  # gets the shard serves at a time, here
OVERLOAD = 10
OVER_WINDOW = 100  # gets that the flood has under way, at most
FORGET = 0.004  # of the gets that found everything
KEYS = 1_600
WARM_S, ADMITTED_S, OVERLOAD_S = 7.0, 5.0, 10.0  # to warm up; of one round
SAMPLES_MIN = 20_000  # for a 99th percentile of each round: of fewer, the 95th is judged
STOLEN_MAX = 0.2  # of the processors, by the hypervisor: such a round says nothing of times
RATIO_MAX = 2.0  # of the p99 under ten times the load to that under what is admitted
QUIET_SECONDS_MAX = 20.0
DRAM_BYTES, FLASH_BYTES = 256 << 20, 176 << 20
ARENA_BYTES = 1 << 20  # by which the interpreter takes memory: one more or less is no growth
RECEIPT_BYTES = 1 << 10  # in memory, of an erased tenant's: 4,096 are kept
LOOK_S = 1.0
LEASE_NS = 2_000_000_000
# Each thread of a process keeps freed pieces for itself, up to 7 of every length (glibc's tcache),
# and the library counts them as used: they fill for hours. Without, what is counted is used.
COUNTED = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
HELD = ("leases", "leased_bytes", 'queue_depth{queue="get"}', 'queue_depth{queue="put"}',
        'queue_depth{queue="stage"}', "staging_reads_in_flight")  # fmt: skip


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


@dataclass(slots=True)
class Rest:
    """What the daemon holds while nobody asks for anything."""

    rss_bytes: int
    malloc_bytes: int  # in use, of the C library: larger objects, and what is not Python's
    objects: int  # of the interpreter's, of up to 512 bytes: a leak shows here first
    erased: int  # tenants, ever: a receipt of each is kept
    fds: int
    threads: int
    tasks: int
    sessions: int
    held: dict[str, float]


@dataclass(slots=True)
class Window:
    """What the hosts saw in one stretch of load."""

    counts: Counter[str] = field(default_factory=Counter)
    times_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    stolen: float = 0.0  # the largest share of the processors that this machine asked for in vain

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        for answer in answers:
            self.counts.update(answer["counts"])
            self.times_ms += answer["times_ms"]
            self.refused_ms += answer["refused_ms"]
        self.seconds += max(answer["seconds"] for answer in answers)


Round = tuple[Window, Window]  # under what is admitted, and under ten times as much


def _processor_ticks() -> tuple[int, int]:
    """Of all processors since the start: stolen by a hypervisor, and all of them (proc(5))."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


def _threads(pid: int) -> int:
    """Threads, without those of gRPC's pool, which begins another when it once had too few."""
    count = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            count += (path / "comm").read_text().strip() != "event_engine"
    return count


def _fds(pid: int) -> int:
    """Open descriptors beside memory: slabs come and go within their budget."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += not os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:")
    return count


def percentile(values: Sequence[float], percent: int) -> float:
    """0 of nothing."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


def p99(values: Sequence[float]) -> float:
    return percentile(values, 99)


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
        return Process(HERE / "host.py", words)

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
            rate = OVERLOAD * self.capacity
            self.flooder.tell("flood", seconds=seconds, rate=rate, window=OVER_WINDOW)
        window = Window()
        before = _processor_ticks()
        window.add([host.answer() for host in self.hosts])
        if overload:
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
        be slow to go, as connections of gRPC are."""
        pid = self.lab.pid
        for what in ("add", "erase"):  # which also gives back to the system what was freed
            self.lab.driver.ask("admin", what=what, tenant=GUEST, wait=True)
        until = time.monotonic() + self._quiet_s
        found: Rest | None = None
        steady = 0
        while steady < 3 and time.monotonic() < until:
            time.sleep(0.3)
            metrics = self.lab.metrics()
            now = Rest(
                rss_bytes(pid), int(metrics["entresol_malloc_bytes"]),
                int(metrics["entresol_python_objects"]),
                int(metrics['entresol_events_published_total{kind="tenant_erased"}']),
                _fds(pid), _threads(pid), int(metrics["entresol_tasks"]),
                int(sum(v for k, v in metrics.items() if k.startswith("entresol_sessions{"))),
                {name: metrics.get(f"entresol_{name}", 0.0) for name in HELD},
            )  # fmt: skip
            same = found is not None and not any(now.held.values()) and (
                (now.fds, now.threads, now.tasks) == (found.fds, found.threads, found.tasks)
            )  # fmt: skip
            same = same and not (least and left_over(least, now))
            steady = steady + 1 if same else 0
            found = now
        assert found is not None
        return found


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
        gets_at_once_max=AT_ONCE, lease_ns=LEASE_NS, env=COUNTED,
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
            _merge(one, soak.load(ADMITTED_S))
            _merge(ten, soak.load(OVERLOAD_S, overload=True))

        _beside(soak, worst, load)
        seen.append((one, ten))
        rests.append(soak.rest(rests[warm] if warm else None))
        if not warm and number >= min(rounds - 1, max(1, rounds // 10)):
            warm = number
        _trace(f"round {number}", one, ten, rests[-1])
        number += 1
        if plan.more and number == plan.rounds and _late(seen):
            rounds += plan.more
            soak.tally.figure("rounds_added", plan.more)
    findings = _judge(soak, base, seen, worst)
    return findings + _judge_rest(soak.tally, rests[warm:], plan.growth_max)


def _merge(into: Window, other: Window) -> None:
    into.counts.update(other.counts)
    into.times_ms += other.times_ms
    into.refused_ms += other.refused_ms
    into.seconds += other.seconds
    into.stolen = max(into.stolen, other.stolen)


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


def _undisturbed(seen: Sequence[Round]) -> list[Round]:
    """The rounds in which this machine had its processors."""
    return [(one, ten) for one, ten in seen if max(one.stolen, ten.stolen) <= STOLEN_MAX]


def _compared(seen: Sequence[Round]) -> tuple[int, float, float, float]:
    """Which percentile is judged, what it is of either load, in ms, and the ratio that is judged:
    the median of those of the rounds. Of few samples the 99th is one of the worst three: chance,
    and not the shard; so is a stretch in which the machine was somebody else's."""
    percent = 99 if sum(len(ten.times_ms) for _, ten in seen) >= SAMPLES_MIN else 95
    one = [percentile(one.times_ms, percent) for one, _ in seen]
    ten = [percentile(ten.times_ms, percent) for _, ten in seen]
    ratio = statistics.median(b / max(a, 1e-9) for a, b in zip(one, ten, strict=True))
    return percent, statistics.median(one), statistics.median(ten), ratio


def _late(seen: Sequence[Round]) -> str:
    """What is wrong with the times of what is served under overload; empty if nothing is, or if
    most rounds can say nothing of it."""
    quiet = _undisturbed(seen)
    if 2 * len(quiet) < len(seen):
        return ""
    percent, before, after, ratio = _compared(quiet)
    if ratio <= RATIO_MAX:
        return ""
    return f"p{percent} {ratio:.2f} times as long: {after:.0f} ms in overload, {before:.0f} before"


def _judge(
    soak: Soak, base: dict[str, float], seen: Sequence[Round], worst: Counter[str]
) -> list[str]:
    """What the load itself says."""
    tally, metrics = soak.tally, soak.lab.metrics()
    findings = []
    over = Window()
    for _, ten in seen:
        _merge(over, ten)

    def since(name: str) -> int:
        return int(metrics.get(name, 0.0) - base.get(name, 0.0))

    percent, before, after, ratio = _compared(_undisturbed(seen) or seen)
    if late := _late(seen):
        findings.append(late)
    refused = since('entresol_blocks_missed_total{cause="busy",tenant="dev"}')
    unheard = refused - soak.counts["get_busy"]  # a host that was cut off may not have heard of it
    if not 0 <= unheard <= GET_BLOCKS * soak.counts["cut_off"]:
        findings.append(f"refused blocks: {refused} counted here, {soak.counts['get_busy']} there")
    if not over.counts["refused"]:
        findings.append("nothing was refused: it was no overload")
    tally.figure(f"max_p{percent}_admitted_ms", round(before, 1))
    tally.figure(f"max_p{percent}_overload_ms", round(after, 1))
    tally.figure(f"max_p{percent}_ratio", round(ratio, 2))
    tally.figure("samples_overload", len(over.times_ms))
    if disturbed := len(seen) - len(_undisturbed(seen)):
        judged = "" if 2 * disturbed <= len(seen) else ", times not judged"
        name = f"rounds in which over {STOLEN_MAX:.0%} of the processors were stolen{judged}"
        tally.figure(name, disturbed)
    tally.figure("max_p99_refusal_ms", round(p99(over.refused_ms), 1))
    for name, value in worst.items():
        tally.figure(f"max_{name}", value)
    tally.figure("min_offered_over_served", round(
        over.counts["offered"] / max(1, over.counts["served"] + over.counts["flooded"]), 1
    ))  # fmt: skip
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


def _judge_rest(tally: Tally, rests: Sequence[Rest], growth_max: float) -> list[str]:
    """What is left when nobody asks for anything. Memory is the median of a tenth of the rounds,
    at either end: of 55 MiB, the allocators' own coming and going is one or two. Judged is what is
    in use by the count of either allocator, and what the process has, beyond one arena; of all of
    it, what grew by more than the receipts of erased tenants."""
    findings = []
    some = max(1, len(rests) // 10)
    receipts = RECEIPT_BYTES * (rests[-1].erased - rests[0].erased)
    tally.figure("max_receipts_bytes", receipts)
    for name, spare in (
        ("rss_bytes", ARENA_BYTES + receipts), ("malloc_bytes", receipts), ("objects", 0),
    ):  # fmt: skip
        before = statistics.median(getattr(rest, name) for rest in rests[:some])
        after = statistics.median(getattr(rest, name) for rest in rests[-some:])
        tally.figure(f"max_{name}_growth_percent", round(100 * (after / before - 1), 2))
        if after - spare > before * (1 + growth_max):
            findings.append(f"{name}: {before:.0f} at first, {after:.0f} in the end")
    findings += left_over(rests[0], rests[-1])
    held = rests[-1].held.items()
    return findings + [f"still held: {name} {value}" for name, value in held if value]


def left_over(least: Rest, now: Rest) -> list[str]:
    """What there is more of than there was."""
    return [
        f"{name}: {getattr(least, name)} before, {getattr(now, name)} now"
        for name in ("fds", "threads", "tasks", "sessions")
        if getattr(now, name) > getattr(least, name)
    ]


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
