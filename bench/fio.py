"""fio as the ceiling of flash: the same file system, block size, depth and flush policy as ours.

Invariant: what fio is asked is in one place and said in the report; where fio cannot be had, that
is a reason to print, never a number that is missing without a word.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import install
from bench.processes import NotRunError, bound

RUN_SECONDS_MAX = 300.0
DEPTH = 8  # as the daemon's io_threads
P99 = "99.000000"


@dataclass(frozen=True, slots=True)
class Rate:
    """What one run of fio found.

    Attributes:
        gbps: 10^9 bytes per second.
        p50_us, p99_us: completion latency of one request, from submission, in microseconds.
    """

    gbps: float
    p50_us: float
    p99_us: float
    requests: int


@dataclass(frozen=True, slots=True)
class Fio:
    """A usable fio: the system's, or one unpacked into the cache."""

    program: str
    environment: Mapping[str, str]

    @classmethod
    def find(cls, *, download: bool = True) -> Fio:
        """Raises: NotRunError when there is none, and none may or can be had."""
        there = shutil.which("fio")
        if there:
            return cls(there, {})
        if not download:
            raise NotRunError("it is not installed, and nothing is downloaded at this size")
        root = install.debian(("fio",))
        return cls(
            str(install.program(root, "fio")), {"LD_LIBRARY_PATH": install.library_path(root)}
        )

    def version(self) -> str:
        """As it says."""
        return self._run(["--version"]).strip()

    def read(
        self,
        path: Path,
        *,
        block_bytes: int,
        offset: int,
        length: int,
        memory: Path,
        depth: int = DEPTH,
        random: bool = False,
        count: int = 0,
        lead_ms: int = 0,
    ) -> Rate:
        """Direct reads of a part of a file into the shared region; `count` of them, or all. Those
        of the first `lead_ms` are not counted."""
        words = ["--rw=randread" if random else "--rw=read", "--readonly", f"--iodepth={depth}"]
        if count:
            words.append(f"--io_size={count * block_bytes}")
        if lead_ms:
            words.append(f"--ramp_time={lead_ms}ms")
        return self._rate("read", path, block_bytes, offset, length, memory, words)

    def write(
        self, path: Path, *, block_bytes: int, length: int, memory: Path, flush_blocks: int
    ) -> Rate:
        """Direct writes of a new, preallocated file, one fdatasync per `flush_blocks` of them."""
        words = [
            "--rw=write", "--fallocate=posix", f"--iodepth={DEPTH}", f"--fdatasync={flush_blocks}",
            "--end_fsync=1",
        ]  # fmt: skip
        return self._rate("write", path, block_bytes, 0, length, memory, words)

    def _rate(
        self,
        way: str,
        path: Path,
        block_bytes: int,
        offset: int,
        length: int,
        memory: Path,
        words: list[str],
    ) -> Rate:
        found = self._run([
            "--name=bench", f"--filename={path}", "--ioengine=libaio", "--direct=1", "--thread=1",
            f"--bs={block_bytes}", f"--offset={offset}", f"--size={length}", "--numjobs=1",
            f"--iomem=mmapshared:{memory}", "--output-format=json", "--invalidate=0", *words,
        ])  # fmt: skip
        return parse(json.loads(found[found.index("{") :]), way)

    def _run(self, words: list[str]) -> str:
        """Raises: NotRunError with what fio said."""
        done = subprocess.run(
            bound([self.program, *words]), capture_output=True, text=True, check=False,
            timeout=RUN_SECONDS_MAX, env={**os.environ, **self.environment},
        )  # fmt: skip
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise NotRunError(f"fio: {lines[-1] if lines else done.returncode}")
        return done.stdout


def parse(report: Mapping[str, Any], way: str) -> Rate:
    """Rate and latencies of a JSON report. Raises: NotRunError when it reports an error."""
    (job,) = report["jobs"]
    if job.get("error"):
        raise NotRunError(f"fio ended with error {job['error']}")
    side = job[way]
    if not side["total_ios"]:
        raise NotRunError("fio was through before what it counts began")
    percentiles = side["clat_ns"].get("percentile", {})
    seconds = side["runtime"] / 1e3
    return Rate(
        side["io_bytes"] / seconds / 1e9 if seconds else 0.0,
        percentiles.get("50.000000", 0) / 1e3,
        percentiles.get(P99, 0) / 1e3,
        side["total_ios"],
    )
