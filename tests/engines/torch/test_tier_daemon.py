"""The daemon that the engines' suites use, with the neutral core under every adapter: no engine.

What a suite does to the daemon must do what its name says, or its tests show nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore, Space
from entresol_client.results import PutBlock
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status
from tests.engines.tier_daemon import TierDaemon

DESCRIPTOR = NamespaceDescriptor(model="tiny", dtype="bf16", layers=2, kv_heads=2, head_dim=8)
KEYS = [bytes([number]) * 32 for number in range(8)]
BLOCK_BYTES = 64 * 1024
SECONDS_MAX = 30.0


def content(key: bytes) -> np.ndarray:
    """The bytes stored under a key."""
    return np.random.Generator(np.random.PCG64(key[0])).integers(0, 256, BLOCK_BYTES, np.uint8)


@pytest.fixture
def store(tier: TierDaemon) -> Iterator[EngineStore]:
    one = EngineStore(EngineSettings(config=str(tier.client_toml()), load_deadline_ms=3000))
    yield one
    one.close()


@pytest.fixture
def space(store: EngineStore) -> Space:
    """With the blocks in it."""
    space = store.space(DESCRIPTOR)
    blocks = [PutBlock(key, content(key), position=at) for at, key in enumerate(KEYS)]
    assert space.store(blocks).result(SECONDS_MAX).ok
    return space


def load(space: Space) -> tuple[list[np.ndarray], tuple[Status, ...]]:
    buffers = [np.zeros(BLOCK_BYTES, np.uint8) for _ in KEYS]
    return buffers, space.load(KEYS, buffers).result(SECONDS_MAX).statuses


def eventually(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def test_blocks_survive_a_restart_on_the_same_ports(tier: TierDaemon, space: Space) -> None:
    before = tier.pid
    tier.restart()
    assert tier.pid != before
    eventually(lambda: all(space.lookup(KEYS).result(SECONDS_MAX)), "found again")
    buffers, statuses = load(space)
    assert set(statuses) == {Status.OK}
    for key, buffer in zip(KEYS, buffers, strict=True):
        assert np.array_equal(buffer, content(key))
    assert tier.metric("entresol_blocks_served_total", tier="flash") == len(KEYS)
    assert tier.metric("entresol_blocks_served_total", tenant="nobody") == 0


def test_a_damaged_block_is_the_one_that_fails(tier: TierDaemon, space: Space) -> None:
    damaged = tier.damage(lambda blocks: [one for one in blocks if one.engine_key == KEYS[3]])
    assert [one.plain_bytes for one in damaged] == [BLOCK_BYTES]
    eventually(lambda: any(space.lookup(KEYS).result(SECONDS_MAX)), "connected again")
    buffers, statuses = load(space)
    assert [status is Status.OK for status in statuses] == [key != KEYS[3] for key in KEYS]
    assert not np.array_equal(buffers[3], content(KEYS[3]))
    assert tier.metric("entresol_corrupt_blocks_total") >= 1


def test_a_choice_of_no_block_is_a_mistake_of_the_test(tier: TierDaemon, space: Space) -> None:
    with pytest.raises(AssertionError, match="no block to damage"):
        tier.damage(lambda blocks: [])


def test_frozen_it_answers_nothing_and_thawed_it_does(tier: TierDaemon, space: Space) -> None:
    tier.freeze()
    assert not tier.serves()
    begun = time.monotonic()
    assert not any(space.lookup(KEYS).result(SECONDS_MAX))
    assert time.monotonic() - begun < 2.0, "a lookup has a deadline of its own"
    tier.thaw()
    eventually(lambda: all(space.lookup(KEYS).result(SECONDS_MAX)), "answers again")


def test_never_started_it_is_misses(make_tier: Callable[..., TierDaemon]) -> None:
    absent = make_tier(client={"connect_deadline_ns": 500_000_000})
    store = EngineStore(EngineSettings(config=str(absent.client_toml())))
    try:
        assert not any(store.space(DESCRIPTOR).lookup(KEYS).result(SECONDS_MAX))
        assert not absent.running
    finally:
        store.close()


def test_another_tenant_finds_nothing(tier: TierDaemon, space: Space) -> None:
    other = EngineStore(EngineSettings(config=str(tier.client_toml("other"))))
    try:
        assert all(space.lookup(KEYS).result(SECONDS_MAX))
        assert not any(other.space(DESCRIPTOR).lookup(KEYS).result(SECONDS_MAX))
        assert other.connected()
    finally:
        other.close()


def test_removed_it_is_gone(tier: TierDaemon) -> None:
    pid, home = tier.pid, tier.home
    assert tier.cli("stat")
    tier.remove()
    assert not home.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_bench_of_first_tokens_finds_every_byte_and_logit(tier: TierDaemon) -> None:
    """On a processor, where its times mean nothing: what it compares must hold here, too."""
    command = [sys.executable, "-m", "bench.ttft", "--shape", "tiny", "--tokens", "96,128",
               "--rounds", "1", "--config", str(tier.client_toml())]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("every byte and logit equal") == 2, done.stderr
