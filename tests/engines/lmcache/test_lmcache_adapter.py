"""The adapter with LMCache's own classes and the real daemon: its interface, and what may fail.

Tests that harm no daemon share one; a model revision each keeps their objects apart.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engines.lmcache.objects import (
    SHAPE,
    Controller,
    adapter_json,
    create,
    key,
    layouts,
    memory,
    same,
)
from tests.engines.tier_daemon import TierDaemon

KEYS = [key(number) for number in range(8)]
BOUND_SECONDS = 3.0  # for what is bounded by deadlines of half a second or less
QUICK = {"lookup_deadline_ms": 300, "load_deadline_ms": 500, "store_deadline_ms": 500}


@pytest.fixture(scope="module")
def shared() -> Iterator[TierDaemon]:
    """A daemon for all tests that leave it alone."""
    with TierDaemon() as one:
        yield one


@pytest.fixture
def open_adapter(request: pytest.FixtureRequest) -> Iterator[Callable[..., Controller]]:
    """`open_adapter(tier, tenant="dev", **params)`; closed after the test."""
    opened: list[Any] = []

    def make(tier: TierDaemon, tenant: str = "dev", **params: Any) -> Controller:
        named = {"model_revision": request.node.name, **params}
        opened.append(create(adapter_json(tier.client_toml(tenant), **named)))
        return Controller(opened[-1])

    yield make
    for one in opened:
        one.close()


def filled(cache: Controller) -> Controller:
    """The adapter, with the objects of KEYS stored."""
    assert cache.store(KEYS, [memory(at) for at in range(len(KEYS))]).is_successful()
    return cache


@pytest.fixture
def cache(shared: TierDaemon, open_adapter: Callable[..., Controller]) -> Controller:
    """An adapter with the objects of KEYS stored."""
    return filled(open_adapter(shared))


@pytest.fixture
def own(tier: TierDaemon, open_adapter: Callable[..., Controller]) -> Controller:
    """The same, with a daemon that the test may harm."""
    return filled(open_adapter(tier))


def check_all(cache: Controller) -> None:
    """Everything of KEYS is there and exact."""
    assert cache.lookup(KEYS) == [True] * len(KEYS)
    objects = [memory(None) for _ in KEYS]
    assert cache.load(KEYS, objects) == [True] * len(KEYS)
    assert all(same(one, memory(at)) for at, one in enumerate(objects))


def eventually(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def test_what_is_stored_is_found_and_loaded_exactly(cache: Controller) -> None:
    check_all(cache)


def test_a_second_store_moves_nothing_and_succeeds(cache: Controller) -> None:
    result = cache.store(KEYS, [memory(at) for at in range(len(KEYS))])
    assert result.is_successful()
    assert result.bytes_transferred() == 0
    assert cache.adapter.get_usage().total_bytes_used == len(KEYS) * memory(None).get_size()


def test_the_three_descriptors_differ_and_are_silent_without_news(cache: Controller) -> None:
    adapter = cache.adapter
    fds = [
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    ]
    assert len(set(fds)) == 3
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    assert poller.poll(100) == []


def test_a_result_is_given_once(cache: Controller) -> None:
    adapter = cache.adapter
    lookup = adapter.submit_lookup_and_lock_task(KEYS, layouts())
    load = adapter.submit_load_task(KEYS, [memory(None) for _ in KEYS])
    for fd, ask, task in (
        (adapter.get_lookup_and_lock_event_fd(), adapter.query_lookup_and_lock_result, lookup),
        (adapter.get_load_event_fd(), adapter.query_load_result, load),
    ):
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(20_000)
        assert ask(task) is not None
        assert ask(task) is None
    assert adapter.pop_completed_store_tasks() == {}


def test_hits_and_misses_are_told_apart_in_place(cache: Controller) -> None:
    mixed = [one for pair in zip(KEYS, map(key, range(100, 108)), strict=True) for one in pair]
    expected = [True, False] * len(KEYS)
    assert cache.lookup(mixed) == expected
    objects = [memory(None) for _ in mixed]
    assert cache.load(mixed, objects) == expected
    for at, one in enumerate(objects):
        assert same(one, memory(at // 2) if expected[at] else memory(None))


@pytest.mark.parametrize(
    "other",
    [
        {"chunk_hash": (99).to_bytes(32, "big")},
        {"model_name": "tiny/lama"},
        {"kv_rank": (2 << 24) | 1},
        {"object_group_id": 1},
        {"cache_salt": "someone"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_every_field_of_a_key_keeps_objects_apart(cache: Controller, other: dict[str, Any]) -> None:
    strangers = [key(number, **other) for number in range(len(KEYS))]
    assert not any(cache.lookup(strangers, layouts(groups=2)))
    assert not any(cache.load(strangers, [memory(None) for _ in strangers]))
    assert cache.store(strangers[:1], [memory(50)]).is_successful()
    assert cache.lookup(strangers[:1], layouts(groups=2)) == [True]
    check_all(cache)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPE, torch.float16), ((2, 4, 128, 64), torch.bfloat16)]
)
def test_the_same_bytes_under_another_layout_are_not_found(
    cache: Controller, shape: tuple[int, ...], dtype: Any
) -> None:
    assert not any(cache.lookup(KEYS, layouts(shape, dtype)))
    assert not any(cache.load(KEYS, [memory(None, shape, dtype) for _ in KEYS]))


def test_another_format_of_the_same_objects_is_not_found(
    shared: TierDaemon, cache: Controller, open_adapter: Callable[..., Controller]
) -> None:
    assert not any(open_adapter(shared, kv_format="lmcache-9").lookup(KEYS))
    assert not any(open_adapter(shared, model_revision="2").lookup(KEYS))


def test_another_host_finds_and_loads(
    shared: TierDaemon, cache: Controller, open_adapter: Callable[..., Controller]
) -> None:
    check_all(open_adapter(shared))


def test_another_tenant_sees_nothing(
    shared: TierDaemon, cache: Controller, open_adapter: Callable[..., Controller]
) -> None:
    stranger = open_adapter(shared, tenant="other")
    assert not any(stranger.lookup(KEYS))
    assert not any(stranger.load(KEYS, [memory(None) for _ in KEYS]))
    assert stranger.store(KEYS[:1], [memory(70)]).is_successful()
    check_all(cache)


def test_objects_survive_a_restart_of_the_daemon(tier: TierDaemon, own: Controller) -> None:
    tier.restart()
    eventually(lambda: all(own.lookup(KEYS)), "found again")
    check_all(own)


def test_a_damaged_object_is_a_cleared_bit(tier: TierDaemon, own: Controller) -> None:
    hash_of = KEYS[3].chunk_hash
    tier.damage(lambda blocks: [b for b in blocks if b.engine_key.startswith(hash_of)])
    eventually(lambda: any(own.lookup(KEYS)), "connected again")
    objects = [memory(None) for _ in KEYS]
    assert own.load(KEYS, objects) == [at != 3 for at in range(len(KEYS))]
    for at, one in enumerate(objects):
        assert same(one, memory(None) if at == 3 else memory(at))


def test_a_frozen_daemon_costs_deadlines_and_it_comes_back(
    tier: TierDaemon, own: Controller, open_adapter: Callable[..., Controller]
) -> None:
    quick = open_adapter(tier, **QUICK)
    assert all(quick.lookup(KEYS))
    tier.freeze()
    for act in (
        lambda: quick.lookup(KEYS),
        lambda: quick.load(KEYS, [memory(None) for _ in KEYS]),
        lambda: [quick.store([key(200)], [memory(200)]).is_successful()],
    ):
        begun = time.monotonic()
        assert not any(act())
        assert time.monotonic() - begun < BOUND_SECONDS
    tier.thaw()
    eventually(lambda: all(quick.lookup(KEYS)), "found again")
    check_all(quick)


def test_closing_against_a_frozen_daemon_is_bounded(
    tier: TierDaemon, open_adapter: Callable[..., Controller]
) -> None:
    quick = open_adapter(tier, **QUICK)
    assert quick.lookup(KEYS) == [False] * len(KEYS)
    tier.freeze()
    quick.adapter.submit_store_task(KEYS, [memory(at) for at in range(len(KEYS))])
    begun = time.monotonic()
    quick.adapter.close()
    quick.adapter.close()
    assert time.monotonic() - begun < 2 * BOUND_SECONDS


def test_an_absent_daemon_is_misses_until_it_comes(
    make_tier: Callable[..., TierDaemon], open_adapter: Callable[..., Controller]
) -> None:
    tier = make_tier(client={"connect_deadline_ns": 500_000_000})
    cache = open_adapter(tier)
    objects = [memory(at) for at in range(len(KEYS))]
    assert not any(cache.lookup(KEYS))
    assert not cache.store(KEYS, objects).is_successful()
    assert not any(cache.load(KEYS, [memory(None) for _ in KEYS]))
    status = cache.adapter.report_status()
    assert status["is_healthy"]
    assert not status["connected"]
    tier.start()
    eventually(lambda: cache.store(KEYS, objects).is_successful(), "stored")
    check_all(cache)


def test_a_daemon_killed_in_a_load_ends_the_load_and_nothing_lands_later(
    tier: TierDaemon, open_adapter: Callable[..., Controller]
) -> None:
    cache = open_adapter(tier, load_deadline_ms=3000)
    keys = [key(number) for number in range(64)]
    shape = (2, 8, 256, 128)  # 1 MiB each
    assert cache.store(keys, [memory(at, shape) for at in range(64)]).is_successful()
    tier.restart()
    eventually(lambda: all(cache.lookup(keys, layouts(shape))), "found again")
    objects = [memory(None, shape) for _ in keys]
    killer = threading.Timer(0.03, tier.kill)
    killer.start()
    bits = cache.load(keys, objects)
    after = [one.raw_data.clone() for one in objects]
    killer.join()
    for at, (bit, one) in enumerate(zip(bits, objects, strict=True)):
        assert not bit or same(one, memory(at, shape))
    time.sleep(0.5)
    assert all(torch.equal(one.raw_data, was) for one, was in zip(objects, after, strict=True))


def test_stores_beyond_the_backlog_fail_at_once(
    tier: TierDaemon, open_adapter: Callable[..., Controller]
) -> None:
    cache = open_adapter(tier, store_backlog_bytes_max=2**16, store_deadline_ms=2000)
    assert cache.store(KEYS[:1], [memory(0)]).is_successful()
    tier.freeze()
    adapter = cache.adapter
    waiting = adapter.submit_store_task(KEYS[1:2], [memory(1)])
    begun = time.monotonic()
    shed = adapter.submit_store_task(KEYS[2:3], [memory(2)])
    done = adapter.pop_completed_store_tasks()
    assert time.monotonic() - begun < 0.5
    assert shed in done
    assert not done[shed].is_successful()
    assert waiting not in done
    assert adapter.report_status()["shed_stores"] == 1


def test_two_threads_at_once_each_get_their_own_results(cache: Controller) -> None:
    failures: list[BaseException] = []

    def stores() -> None:
        try:
            for at in range(20):
                assert cache.store([key(1000 + at)], [memory(at)]).is_successful()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=stores)
    thread.start()
    for _ in range(20):
        check_all(cache)
    thread.join()
    assert not failures


def test_deleted_objects_are_gone_and_no_longer_counted(cache: Controller) -> None:
    before = cache.adapter.get_usage().total_bytes_used
    cache.adapter.delete(KEYS[:3])
    assert cache.lookup(KEYS) == [False] * 3 + [True] * 5
    assert cache.adapter.get_usage().total_bytes_used == before * 5 // 8
    assert not cache.adapter.supports_global_eviction


def test_objects_of_every_layout_are_deleted(cache: Controller) -> None:
    """LMCache names a layout neither in a key nor when it deletes: two engines of one model in two
    worlds, and one that began anew with other shapes."""
    half = (*SHAPE[:3], SHAPE[3] // 2)
    world = [key(at, kv_rank=2 << 24) for at in range(2)]
    assert cache.store(world, [memory(at, half) for at in range(2)]).is_successful()
    assert cache.store(KEYS[:1], [memory(9, half)]).is_successful()
    cache.adapter.delete(KEYS[:3])
    assert cache.lookup(KEYS) == [False] * 3 + [True] * 5
    assert cache.lookup(KEYS[:1], layouts(half)) == [False]
    assert cache.lookup(world, layouts(half)) == [True] * 2
    cache.adapter.delete([*world, key(1, kv_rank=3 << 24)])
    assert cache.lookup(world, layouts(half)) == [False] * 2


def test_salts_are_counted_apart(cache: Controller) -> None:
    assert cache.store([key(1, cache_salt="a")], [memory(1)]).is_successful()
    used = cache.adapter.get_usage().bytes_by_cache_salt
    assert used["a"] == memory(None).get_size()
    assert used[""] == len(KEYS) * used["a"]


def test_mistakes_in_the_settings_are_refused(shared: TierDaemon) -> None:
    for params, words in (
        ({"lookup_dedline_ms": 5}, "lookup_deadline_ms"),
        ({"lookup_deadline_ms": "5"}, "lookup_deadline_ms"),
        ({"kv_format": 7}, "kv_format"),
        ({"tenants": {"other": str(shared.client_toml("other"))}}, "tenant"),
    ):
        with pytest.raises(Exception, match=words):
            create(adapter_json(shared.client_toml(), **params))


def test_a_listener_that_fails_costs_no_result(cache: Controller) -> None:
    from lmcache.v1.distributed.internal_api import L2AdapterListener

    class Broken(L2AdapterListener):
        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            raise RuntimeError("stored")

        def on_l2_keys_accessed(self, keys: Any) -> None:
            raise RuntimeError("accessed")

        def on_l2_keys_deleted(self, keys: Any) -> None:
            raise RuntimeError("deleted")

    cache.adapter.register_listener(Broken())
    assert cache.store([key(300)], [memory(0)]).is_successful()
    check_all(cache)
