"""What R8's daemon holds while nobody asks for anything, and what of it may have become more.

Invariant: what is compared was looked at when nothing was under way.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.daemon.daemon_lab import rss_bytes
from tests.proof.line import Tally

ARENA_BYTES = 1 << 20  # by which the interpreter takes memory: one more or less is no growth
RECEIPT_BYTES = 1 << 10  # in memory, of an erased tenant's: 4,096 are kept
TCP_STATES = {"01": "established", "08": "closed by the peer", "0A": "listening"}  # tcp_states.h
UNIX_STATES = {"01": "unconnected or listening", "02": "connecting", "03": "connected"}
HELD = ("leases", "leased_bytes", 'queue_depth{queue="get"}', 'queue_depth{queue="put"}',
        'queue_depth{queue="stage"}', "staging_reads_in_flight")  # fmt: skip


@dataclass(slots=True)
class Rest:
    """What the daemon holds while nobody asks for anything."""

    rss_bytes: int
    malloc_bytes: int  # in use, of the C library: larger objects, and what is not Python's
    objects: int  # of the interpreter's, of up to 512 bytes: a leak shows here first
    erased: int  # tenants, ever: a receipt of each is kept
    fds: int
    kinds: Counter[str]  # what the descriptors are of
    threads: int
    tasks: int
    sessions: int
    held: dict[str, float]
    went_s: float = 0.0  # until what there was too much of was gone, where it was too late


def rest_of(pid: int, metrics: Mapping[str, float]) -> Rest:
    """One look at it."""
    kinds = fds_of(pid)
    return Rest(
        rss_bytes(pid), int(metrics["entresol_malloc_bytes"]),
        int(metrics["entresol_python_objects"]),
        int(metrics['entresol_events_published_total{kind="tenant_erased"}']),
        kinds.total(), kinds, threads_of(pid), int(metrics["entresol_tasks"]),
        int(sum(v for k, v in metrics.items() if k.startswith("entresol_sessions{"))),
        {name: metrics.get(f"entresol_{name}", 0.0) for name in HELD},
    )  # fmt: skip


def threads_of(pid: int) -> int:
    """Threads, without those of gRPC's pool, which begins another when it once had too few."""
    count = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            count += (path / "comm").read_text().strip() != "event_engine"
    return count


def fds_of(pid: int) -> Counter[str]:
    """Open descriptors by what they are of, but memory: slabs come and go within their budget."""
    kinds: Counter[str] = Counter()
    sockets = _sockets(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if not target.startswith("/memfd:"):
                kinds[sockets.get(target) or re.sub(r":\[\d+\]$", "", target)] += 1
    return kinds


def _sockets(pid: int) -> dict[str, str]:
    """What each socket is, by the name of its descriptor (proc(5), net/tcp and net/unix)."""
    said = {}
    net = Path(f"/proc/{pid}/net")
    for name in ("tcp", "tcp6"):
        for line in (net / name).read_text().splitlines()[1:]:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16)
            state = TCP_STATES.get(words[3], words[3])
            said[f"socket:[{words[9]}]"] = f"{name} of port {port}, {state}"
    for line in (net / "unix").read_text().splitlines()[1:]:
        words = line.split()
        path = words[7] if len(words) > 7 else "no name"
        state = UNIX_STATES.get(words[5], words[5])
        said[f"socket:[{words[6]}]"] = f"unix of {path}, {state}"
    return said


def judge_rests(tally: Tally, rests: Sequence[Rest], growth_max: float) -> list[str]:
    """What is left when nobody asks for anything. Memory is the median of a tenth of the rounds,
    at either end: of 55 MiB, the allocators' own coming and going is one or two. Judged is what is
    in use by the count of either allocator, and what the process has, beyond one arena; of all of
    it, what grew by more than the receipts of erased tenants. (The interpreter's table of interned
    names doubles once, by a megabyte, when names that came and went have used it up: after some
    three quarters of an hour.)"""
    findings = []
    some = max(1, len(rests) // 10)
    receipts = RECEIPT_BYTES * (rests[-1].erased - rests[0].erased)
    tally.figure("max_receipts_bytes", receipts)
    for name, spare in (
        ("rss_bytes", ARENA_BYTES + receipts), ("malloc_bytes", receipts),
        ("objects", 0),
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
    findings = [
        f"{name}: {getattr(least, name)} before, {getattr(now, name)} now"
        for name in ("fds", "threads", "tasks", "sessions")
        if getattr(now, name) > getattr(least, name)
    ]
    if now.fds > least.fds:
        more = ", ".join(f"{n} of {kind}" for kind, n in (now.kinds - least.kinds).items())
        went = f"gone {now.went_s:.0f} s later" if now.went_s else "not gone since"
        findings[0] += f" ({more} more, {went})"
    return findings
