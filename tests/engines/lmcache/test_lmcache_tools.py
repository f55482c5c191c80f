"""LMCache's own conformance check and benchmark, as a user runs them, against the real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.lmcache.objects import adapter_json
from tests.engines.tier_daemon import ROOT, TierDaemon

SECONDS_MAX = 240.0
KEYS = 8
# All of it, 128 MiB, fits into the daemon: what it evicted would not be found again.
BENCH = {"rounds": 3, "in-flight": 4, "num-keys": 16, "data-size-kb": 512}


def run(words: Sequence[str]) -> str:
    """Run a Python program of this environment; what it printed. Raises: AssertionError."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False,
        timeout=SECONDS_MAX, cwd=ROOT, stdin=subprocess.DEVNULL,
        env={**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(spec: str) -> str:
    """`basic_check`: it ends with 0 whatever it found, so its words count."""
    return run(
        ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--l2-adapter", spec,
         "--num-keys", str(KEYS), "--obj-size", "262144"]
    )  # fmt: skip


def bench(spec: str) -> dict[str, dict[str, Any]]:
    """`lmcache bench l2` with verification; its figures by operation."""
    sizes = [word for name, value in BENCH.items() for word in (f"--{name}", str(value))]
    said = run(
        ["-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", spec, *sizes,
         "--lookup-max-hit-rate", "0.5", "--no-skip-verify", "--format", "json"]
    )  # fmt: skip
    assert "data verified OK" in said, said
    report = json.loads(said[said.index("\n{") : said.rindex("\n}") + 2])
    rows = [row for name, row in report["metrics"].items() if name.startswith("op_")]
    return {row["operation"]: row for row in rows}


def test_lmcaches_conformance_check_passes(tier: TierDaemon) -> None:
    said = check(adapter_json(tier.client_toml()))
    for words in ("correctly absent", "found"):
        assert f"{KEYS}/{KEYS} {words}" in said, said
    for phase in ("loaded", "content"):
        assert f"Validation ({phase}): {KEYS}/{KEYS}" in said, said
    assert "Batch store OK" in said, said


def test_lmcaches_check_fails_without_a_daemon(make_tier: Callable[..., TierDaemon]) -> None:
    absent = make_tier(client={"connect_deadline_ns": 500_000_000})
    said = check(adapter_json(absent.client_toml(), store_deadline_ms=500, load_deadline_ms=500))
    assert f"{KEYS}/{KEYS} correctly absent" in said, said
    assert "Batch store FAIL" in said, said
    assert f"Validation (loaded): 0/{KEYS}" in said, said


@pytest.mark.timeout(600)
def test_lmcaches_bench_beside_its_own_file_adapter(
    tier: TierDaemon, tmp_path: Path, figure: Callable[[str, float, str], None]
) -> None:
    files = json.dumps({"type": "fs", "base_path": str(tmp_path / "fs")})
    keys = BENCH["rounds"] * BENCH["in-flight"] * BENCH["num-keys"]
    for name, spec in (("entresol", adapter_json(tier.client_toml())), ("lmcache fs", files)):
        rows = bench(spec)
        for operation, found in (("Store", keys), ("Lookup", keys // 2), ("Load", keys)):
            row = rows[operation]
            assert (row["rounds_timed_out"], row["total_success"]) == (0, found), row
        figure(f"bench l2 store, {name}", rows["Store"]["throughput_avg_mbps"], "MB/s")
        figure(f"bench l2 load, {name}", rows["Load"]["throughput_avg_mbps"], "MB/s")
        figure(f"bench l2 lookup of 64 keys, {name}", rows["Lookup"]["duration_avg_ms"], "ms")
