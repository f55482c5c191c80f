"""LMCache's own storage manager over the adapter: its controllers store and prefetch; no engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.lmcache.objects import adapter_json, key, layouts, memory
from tests.engines.tier_daemon import TierDaemon

KEYS = [key(number) for number in range(12)]
SECONDS_MAX = 30.0


@contextlib.contextmanager
def manager(client_toml: Path, **params: Any) -> Iterator[Any]:
    """A storage manager from the words of `lmcache server`'s command line."""
    one = StorageManager(
        parse_args(
            ["--l1-size-gb", "0.0625", "--no-l1-use-lazy", "--eviction-policy", "LRU",
             "--l2-adapter", adapter_json(client_toml, **params)]
        )
    )  # fmt: skip
    try:
        yield one
    finally:
        one.close()


def write(one: Any) -> None:
    """Put the objects of KEYS into the first level; they go on to the second by themselves."""
    reserved = one.reserve_write(KEYS, layouts()[0])
    assert set(reserved) == set(KEYS)
    for at, chunk in enumerate(KEYS):
        reserved[chunk].raw_data[: memory(None).get_size()].copy_(memory(at).raw_data)
    one.finish_write(KEYS)


def wait_stored(one: Any, count: int) -> None:
    """Until the adapter has stored so many."""
    (status,) = one.report_status()["l2_adapters"]
    until = time.monotonic() + SECONDS_MAX
    while status.get("stored_blocks", 0) < count:
        assert time.monotonic() < until, status
        time.sleep(0.05)
        (status,) = one.report_status()["l2_adapters"]


def prefetch(one: Any) -> tuple[int, int, list[bytes]]:
    """Ask for the chain of KEYS: hits in each level, and the bytes of the leading hits."""
    rows = [GroupedObjectKeys(keys=KEYS, object_group_id=0, layout_desc=layouts()[0])]
    handle = one.submit_prefetch_task(PrefetchTaskSpec(key_groups=rows))
    assert one.wait_prefetch_status(handle, SECONDS_MAX)
    result = one.query_prefetch_status(handle)
    hits = KEYS[: result.l1_hit_count + result.l2_hit_count]
    if not hits:
        return 0, 0, []
    with one.read_prefetched_results(hits) as objects:
        assert objects is not None
        found = [bytes(item.byte_array) for item in objects]
    one.finish_read_prefetched(hits)
    return result.l1_hit_count, result.l2_hit_count, found


def expected(count: int) -> list[bytes]:
    return [memory(at).raw_data.numpy().tobytes() for at in range(count)]


def test_what_one_server_wrote_another_prefetches(tier: TierDaemon) -> None:
    with manager(tier.client_toml()) as first:
        write(first)
        wait_stored(first, len(KEYS))
        assert first.report_status()["is_healthy"]
        assert prefetch(first) == (len(KEYS), 0, expected(len(KEYS)))
    with manager(tier.client_toml()) as second:
        assert prefetch(second) == (0, len(KEYS), expected(len(KEYS)))
        assert prefetch(second)[2] == expected(len(KEYS))
    with manager(tier.client_toml("other")) as stranger:
        assert prefetch(stranger) == (0, 0, [])


def test_a_damaged_object_shortens_the_prefix(tier: TierDaemon) -> None:
    with manager(tier.client_toml()) as first:
        write(first)
        wait_stored(first, len(KEYS))
    hash_of = KEYS[5].chunk_hash
    tier.damage(lambda blocks: [b for b in blocks if b.engine_key.startswith(hash_of)])
    with manager(tier.client_toml()) as second:
        in_l1, from_l2, found = prefetch(second)
        assert (in_l1, from_l2) == (0, 5)
        assert found == expected(5)


def test_a_frozen_daemon_is_no_hits_in_time_and_the_server_goes_on(tier: TierDaemon) -> None:
    with manager(tier.client_toml(), lookup_deadline_ms=300, store_deadline_ms=500) as one:
        tier.freeze()
        begun = time.monotonic()
        assert prefetch(one) == (0, 0, [])
        assert time.monotonic() - begun < 5.0
        write(one)
        assert prefetch(one)[0] == len(KEYS), "the first level serves"
        assert one.report_status()["is_healthy"]
        tier.thaw()
