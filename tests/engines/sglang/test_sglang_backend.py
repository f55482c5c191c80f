"""The backend in SGLang's own factory, with its own host pools and the real daemon.

SGLang's engine itself is not run here: its kernels need CUDA. Tests that harm no daemon share one;
a model revision each keeps their pages apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entresol_client.engines.sglang_pages import page_hashes
from entresol_proto.status import ConfigError
from tests.engines.sglang import parts, pools
from tests.engines.tier_daemon import TierDaemon

# Tests run on busy machines, and without an engine whose arguments tell its weights.
IN_PLACE = {"interface_v1": 1, "lookup_deadline_ms": 5000, "weights": "w"}
QUICK = {**IN_PLACE, "lookup_deadline_ms": 300, "load_deadline_ms": 500, "store_deadline_ms": 500}
BOUND_SECONDS = 3.0
COUNT = 6
HASHES = pools.hashes(COUNT)
FROM = list(range(COUNT))
TO = [9, 3, 15, 4, 8, 1]
PAGE_FIRST = "page_first"


@pytest.fixture(scope="module")
def shared() -> Iterator[TierDaemon]:
    """A daemon for all tests that leave it alone."""
    with TierDaemon() as one:
        yield one


@pytest.fixture
def attach(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`attach(tier, pool, **config)`: a backend, closed after the test."""
    opened: list[Any] = []

    def make(tier: TierDaemon, pool: Any, tenant: str = "dev", **changes: Any) -> Any:
        extra = {**IN_PLACE, "model_revision": request.node.name, **changes.pop("extra", {})}
        opened.append(pools.backend(tier.client_toml(tenant), pool, extra=extra, **changes))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def put(backend: Any, pages: list[int] = FROM, hashes: list[str] = HASHES) -> list[bool]:
    return list(backend.batch_set_v1(hashes, pools.indices(pages)))


def get(backend: Any, pages: list[int] = TO, hashes: list[str] = HASHES) -> list[bool]:
    return list(backend.batch_get_v1(hashes, pools.indices(pages)))


def check(source: Any, target: Any, count: int = COUNT) -> None:
    """The first pages are where they belong, and no other memory was written."""
    expected = dict(zip(TO[:count], FROM[:count], strict=True))
    for number in range(pools.PAGES):
        found = pools.page(target, number)
        if number in expected:
            assert torch.equal(found, pools.page(source, expected[number]))
        else:
            assert not found.any()


def eventually(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.mark.parametrize("in_place", [0, 1])
@pytest.mark.parametrize("make", [pools.mha_pool, pools.mla_pool])
@pytest.mark.parametrize("layout", [PAGE_FIRST, "page_first_direct", "layer_first"])
def test_pages_of_every_layout_come_back_where_they_belong(
    shared: TierDaemon, attach: Callable[..., Any], make: Any, layout: str, in_place: int
) -> None:
    source, target = make(layout, seed=1), make(layout)
    extra = {"interface_v1": in_place}
    one, other = attach(shared, source, extra=extra), attach(shared, target, extra=extra)
    assert isinstance(one, parts.storage.HiCacheStorage)
    assert other.batch_exists(HASHES) == 0
    assert put(one) == [True] * COUNT
    assert other.batch_exists(HASHES) == COUNT
    assert get(other) == [True] * COUNT
    check(source, target)


@pytest.mark.parametrize("layout", [PAGE_FIRST, "layer_first", "page_head"])
def test_pages_that_sglang_copies_itself_come_back_too(
    shared: TierDaemon, attach: Callable[..., Any], layout: str
) -> None:
    source, target = pools.mha_pool(layout, seed=2), pools.mha_pool(layout)
    extra = {"interface_v1": 0}
    one, other = attach(shared, source, extra=extra), attach(shared, target, extra=extra)
    values = [source.get_data_page(at * pools.PAGE_TOKENS) for at in FROM]
    assert one.batch_set(HASHES, values)
    assert one.exists(HASHES[0])
    into = [target.get_dummy_flat_data_page() for _ in HASHES]
    for at, found in zip(TO, other.batch_get(HASHES, into), strict=True):
        assert found is not None
        target.set_from_flat_data_page(at * pools.PAGE_TOKENS, found)
    check(source, target)
    single = target.get_dummy_flat_data_page()
    assert other.get(HASHES[0], single) is single
    assert other.get(pools.hashes(1, start=7)[0], single) is None


def test_a_gap_ends_the_prefix(shared: TierDaemon, attach: Callable[..., Any]) -> None:
    source, target = pools.mha_pool(PAGE_FIRST, seed=3), pools.mha_pool(PAGE_FIRST)
    one, other = attach(shared, source), attach(shared, target)
    kept = [at for at in FROM if at != 2]
    assert put(one, kept, [HASHES[at] for at in kept]) == [True] * len(kept)
    assert other.batch_exists(HASHES) == 2
    assert get(other)[:3] == [True, True, False]
    assert other.batch_exists(HASHES[3:]) == COUNT - 3


def test_a_salt_of_a_request_is_in_sglangs_hash_and_keeps_pages_apart(
    shared: TierDaemon, attach: Callable[..., Any]
) -> None:
    one = attach(shared, pools.mha_pool(PAGE_FIRST, seed=3))
    assert all(put(one))
    salted = pools.hashes(COUNT, salt="someone")
    assert not set(salted) & set(HASHES)
    assert one.batch_exists(salted) == 0


@pytest.mark.parametrize("salt", [None, "someone"])
def test_hashes_from_token_ids_are_sglangs(salt: str | None) -> None:
    """`entresol explain --tokens` computes them without SGLang."""
    tokens = range(COUNT * pools.PAGE_TOKENS)
    assert page_hashes(tokens, pools.PAGE_TOKENS, cache_salt=salt) == pools.hashes(COUNT, salt=salt)


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "tiny2"},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"pp_rank": 0, "pp_size": 2},
        {"attn_cp_size": 2},
        {"extra": {"cache_salt": "engine-b"}},
        {"extra": {"kv_format": "other"}},
        {"extra": {"weights": "finetune-7"}},
        {"extra": {"interface_v1": 0}},
        {"pool": {"heads": 1}},
        {"pool": {"layers": 2}},
        {"pool": {"dtype": torch.float16}},
        {"layout": "page_first_direct"},
    ],
    ids=lambda other: "-".join(str(part) for pair in other.items() for part in pair),
)
def test_whatever_changes_a_pages_bytes_makes_it_another(
    shared: TierDaemon, attach: Callable[..., Any], other: dict[str, Any]
) -> None:
    assert all(put(attach(shared, pools.mha_pool(PAGE_FIRST, seed=4))))
    layout, pool = other.pop("layout", PAGE_FIRST), other.pop("pool", {})
    stranger = attach(shared, pools.mha_pool(layout, **pool), **other)
    assert stranger.batch_exists(HASHES) == 0
    assert not any(get(stranger))
    same = attach(shared, pools.mha_pool(PAGE_FIRST))
    assert same.batch_exists(HASHES) == COUNT


def test_ranks_of_a_replicated_model_share_pages_and_one_writes(
    shared: TierDaemon, attach: Callable[..., Any]
) -> None:
    source, target = pools.mla_pool(PAGE_FIRST, seed=5), pools.mla_pool(PAGE_FIRST)
    ranks = {"is_mla_model": True, "tp_size": 2}
    reader = attach(shared, target, tp_rank=1, **ranks)
    assert put(reader) == [True] * COUNT
    assert reader.batch_exists(HASHES) == 0, "rank 1 has nothing to write"
    writer = attach(shared, source, tp_rank=0, **ranks)
    assert all(put(writer))
    assert all(get(reader))
    check(source, target)


def test_ranks_of_a_replicated_model_share_pages_also_after_clear(
    shared: TierDaemon, attach: Callable[..., Any]
) -> None:
    """One writes for all: they must look for it under the same name."""
    ranks = {"is_mla_model": True, "tp_size": 2}
    writer, reader = (
        attach(shared, pools.mla_pool(PAGE_FIRST, seed=14), tp_rank=rank, **ranks)
        for rank in (0, 1)
    )
    assert all(put(writer))
    for one in (writer, reader):
        one.clear()
    assert reader.batch_exists(HASHES) == 0
    assert all(put(writer))
    assert reader.batch_exists(HASHES) == COUNT


def test_whatever_fails_in_a_call_is_absent_pages(
    shared: TierDaemon, attach: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's threads that call here are not started again."""
    one = attach(shared, pools.mha_pool(PAGE_FIRST, seed=15))
    assert all(put(one))
    transfer = parts.storage.PoolTransfer(
        name="kv", keys=HASHES, host_indices=pools.indices(FROM),
        hit_policy=parts.storage.PoolHitPolicy.ALL_PAGES,
    )  # fmt: skip
    tensor = torch.zeros(16)
    for name in ("_kv", "_get", "_set", "_present", "_load", "_save"):
        monkeypatch.setattr(one, name, lambda *args, **words: 1 / 0)
    assert one.batch_exists(HASHES) == 0
    assert not one.exists(HASHES[0])
    assert get(one) == put(one) == [False] * COUNT
    assert one.batch_exists_v2(HASHES, [transfer]).kv_hit_pages == 0
    assert one.batch_get_v2([transfer]) == one.batch_set_v2([transfer]) == {"kv": [False] * COUNT}
    assert one.get(HASHES[0], tensor) is None
    assert not one.set(HASHES[0], tensor)


@pytest.mark.parametrize("missing", ["weights", "model_revision"])
def test_an_engine_that_does_not_tell_its_arguments_needs_words_for_them(
    shared: TierDaemon, missing: str
) -> None:
    extra = {**IN_PLACE, "model_revision": "r"} | {missing: {"weights": "auto"}.get(missing, "")}
    with pytest.raises(ConfigError, match="engine's own arguments"):
        pools.backend(shared.client_toml(), pools.mha_pool(PAGE_FIRST), extra=extra)


def test_a_model_of_images_is_refused_unless_accepted(
    shared: TierDaemon, attach: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from entresol_client.engines import sglang as adapter

    told = SimpleNamespace(enable_multimodal=True, model_path="m")
    monkeypatch.setattr(adapter, "_server_args", lambda: told)
    with pytest.raises(ConfigError, match="mm_hashes"):
        attach(shared, pools.mha_pool(PAGE_FIRST))
    one = attach(shared, pools.mha_pool(PAGE_FIRST, seed=16), extra={"multimodal": "accept"})
    assert all(put(one))


def test_another_path_under_the_same_served_name_is_another_model(
    shared: TierDaemon, attach: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from entresol_client.engines import sglang as adapter

    found = []
    for path in ("Qwen/one", "acme/tuned", "Qwen/one"):
        told = SimpleNamespace(model_path=path)
        monkeypatch.setattr(adapter, "_server_args", lambda told=told: told)
        one = attach(shared, pools.mha_pool(PAGE_FIRST, seed=17), extra={"weights": "auto"})
        found.append(one.batch_exists(HASHES))
        put(one)
    assert found == [0, 0, COUNT]


def test_another_tenant_sees_nothing(shared: TierDaemon, attach: Callable[..., Any]) -> None:
    assert all(put(attach(shared, pools.mha_pool(PAGE_FIRST, seed=6))))
    stranger = attach(shared, pools.mha_pool(PAGE_FIRST), tenant="other")
    assert stranger.batch_exists(HASHES) == 0
    assert not any(get(stranger))


def test_state_pools_are_found_by_their_own_policy(
    shared: TierDaemon, attach: Callable[..., Any]
) -> None:
    names, policy = parts.storage.PoolName, parts.storage.PoolHitPolicy
    one = attach(shared, pools.mha_pool(PAGE_FIRST, seed=7))
    swa, target = pools.mha_pool(PAGE_FIRST, seed=8, heads=1), pools.mha_pool(PAGE_FIRST, heads=1)
    one.register_mem_host_pool_v2(swa, names.SWA)

    def transfer(pages: list[int], hit: Any = policy.ALL_PAGES, of: list[int] | None = None) -> Any:
        return parts.storage.PoolTransfer(
            name=names.SWA, keys=[HASHES[at] for at in (of or pages)],
            host_indices=pools.indices(pages), hit_policy=hit,
        )  # fmt: skip

    assert all(put(one))
    assert one.batch_set_v2([transfer([0, 1, 3, 4])])[names.SWA] == [True] * 4
    every = one.batch_exists_v2(HASHES, [transfer([0])])
    assert (every.kv_hit_pages, every.extra_pool_hit_pages) == (2, {"kv": COUNT, "swa": 2})
    last_two = one.batch_exists_v2(HASHES, [transfer([0, 1], policy.TRAILING_PAGES)])
    assert last_two.kv_hit_pages == 5
    assert last_two.restorable_prefix_pages == [1, 2, 5]
    groups = one.batch_exists_v2(HASHES, [transfer([0], policy.BLOCK_GROUPS)])
    assert (groups.kv_hit_pages, groups.extra_pool_hit_pages) == (COUNT, {"kv": COUNT})
    assert one.batch_exists_v2(pools.hashes(3, start=900), [transfer([0])]).kv_hit_pages == 0

    reader = attach(shared, pools.mha_pool(PAGE_FIRST))
    reader.register_mem_host_pool_v2(target, names.SWA)
    came = reader.batch_get_v2([transfer([5, 6, 7], of=[3, 2, 4])])[names.SWA]
    assert came == [True, False, True]
    assert torch.equal(pools.page(target, 5), pools.page(swa, 3))
    assert torch.equal(pools.page(target, 7), pools.page(swa, 4))
    unknown = parts.storage.PoolTransfer(name=names.MAMBA, keys=HASHES[:1])
    assert reader.batch_get_v2([unknown]) == {names.MAMBA: [False]}


def test_indices_that_do_not_fit_are_no_pages(
    shared: TierDaemon, attach: Callable[..., Any]
) -> None:
    one = attach(shared, pools.mha_pool(PAGE_FIRST, seed=9))
    assert one.batch_set_v1(HASHES, pools.indices([0])) == [False] * COUNT
    assert one.batch_get_v1(HASHES, pools.indices([0])) == [False] * COUNT
    assert not one.batch_set(HASHES, [torch.zeros(4)])
    assert one.batch_get(HASHES, None) == [None] * COUNT


def test_clear_drops_nothing_of_anybody(shared: TierDaemon, attach: Callable[..., Any]) -> None:
    """Who asked for it finds nothing of before: SGLang reports success, its weights may be new."""
    one, other = (attach(shared, pools.mha_pool(PAGE_FIRST, seed=10)) for _ in range(2))
    assert all(put(one))
    one.clear()
    assert one.batch_exists(HASHES) == 0
    assert other.batch_exists(HASHES) == COUNT
    assert all(put(one))
    assert one.batch_exists(HASHES) == COUNT
    assert one.get_stats() is None


def test_clear_does_nothing_where_weights_never_change(
    shared: TierDaemon, attach: Callable[..., Any]
) -> None:
    one = attach(shared, pools.mha_pool(PAGE_FIRST, seed=13), extra={"on_reset": "keep"})
    assert all(put(one))
    one.clear()
    assert one.batch_exists(HASHES) == COUNT


def test_after_clear_nothing_is_stored_where_that_is_wanted(
    shared: TierDaemon, attach: Callable[..., Any]
) -> None:
    one, other = (
        attach(shared, pools.mha_pool(PAGE_FIRST, seed=18), extra={"on_reset": "off"})
        for _ in range(2)
    )
    one.clear()
    assert not any(put(one))
    assert one.batch_exists(HASHES) == other.batch_exists(HASHES) == 0
    assert all(put(other))
    assert one.batch_exists(HASHES) == 0
    assert not any(get(one))


def test_sglangs_own_failure_injector_runs_over_it(
    shared: TierDaemon, attach: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = attach(shared, pools.mha_pool(PAGE_FIRST, seed=11))
    assert all(put(plain))
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    injected = attach(shared, pools.mha_pool(PAGE_FIRST))
    assert type(injected).__name__ == "HiCacheStorageFailureInjector"
    seen = {injected.batch_exists(HASHES) for _ in range(40)}
    assert seen == {0, COUNT}
    assert {all(get(injected)) for _ in range(40)} == {True, False}


def test_pages_survive_a_restart(tier: TierDaemon, attach: Callable[..., Any]) -> None:
    source, target = pools.mha_pool(PAGE_FIRST, seed=12), pools.mha_pool(PAGE_FIRST)
    one, other = attach(tier, source), attach(tier, target)
    assert all(put(one))
    tier.restart()
    eventually(lambda: other.batch_exists(HASHES) == COUNT, "found again")
    assert all(get(other))
    check(source, target)


def test_a_damaged_block_ends_the_prefix_before_its_page(
    tier: TierDaemon, attach: Callable[..., Any]
) -> None:
    source, target = pools.mha_pool(PAGE_FIRST, seed=13), pools.mha_pool(PAGE_FIRST)
    one, other = attach(tier, source), attach(tier, target)
    assert all(put(one))
    values = bytes.fromhex(HASHES[3]) + b"\1"  # the second block of a page: its V
    tier.damage(lambda blocks: [block for block in blocks if block.engine_key == values])
    eventually(lambda: other.batch_exists(HASHES) > 0, "connected again")
    assert get(other)[:4] == [True, True, True, False]
    for at in range(3):
        assert torch.equal(pools.page(target, TO[at]), pools.page(source, FROM[at]))


def test_a_frozen_daemon_costs_deadlines_and_it_comes_back(
    tier: TierDaemon, attach: Callable[..., Any]
) -> None:
    one = attach(tier, pools.mha_pool(PAGE_FIRST, seed=14), extra=QUICK)
    assert all(put(one))
    tier.freeze()
    for act in (
        lambda: [one.batch_exists(HASHES)],
        lambda: get(one),
        lambda: put(one, FROM, pools.hashes(COUNT, start=5000)),
    ):
        begun = time.monotonic()
        assert not any(act())
        assert time.monotonic() - begun < BOUND_SECONDS
    tier.thaw()
    eventually(lambda: one.batch_exists(HASHES) == COUNT, "found again")
    assert all(get(one))


def test_an_absent_daemon_is_misses_until_it_comes(
    make_tier: Callable[..., TierDaemon], attach: Callable[..., Any]
) -> None:
    tier = make_tier(client={"connect_deadline_ns": 500_000_000})
    one = attach(tier, pools.mha_pool(PAGE_FIRST, seed=15), extra=QUICK)
    assert one.batch_exists(HASHES) == 0
    assert not any(put(one))
    assert not any(get(one))
    tier.start()
    eventually(lambda: all(put(one)), "stored")
    assert one.batch_exists(HASHES) == COUNT


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lookup_dedline_ms": 5}, "lookup_deadline_ms"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"tenants": {"other": "/x"}}, "tenant"),
    ],
)
def test_mistakes_in_the_settings_are_refused(
    shared: TierDaemon, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(Exception, match=words):
        pools.backend(shared.client_toml(), pools.mha_pool(PAGE_FIRST), extra=extra)


def test_the_engine_itself() -> None:
    pytest.skip("not run here: SGLang's engine and its metrics: CUDA kernels")
