"""The tier under vLLM's own tiering manager and host pool, and the real daemon; no model.

Quick, so that what needs exact timing is here: held slots, drains, shutting down, refusals.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import config as vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import (
    scheduler as offloading_scheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from entresol_client.engines import vllm_compat, vllm_facts
from entresol_client.engines.vllm import EntresolTier
from entresol_client.engines.vllm_connector import EntresolConnector
from entresol_client.engines.vllm_metrics import METRIC
from entresol_client.engines.vllm_versions import TESTED
from entresol_proto.status import ConfigError
from tests.engines.tier_daemon import TierDaemon

CHUNK_BYTES = 64 * 1024
POOL_CHUNKS = 16
SECONDS_MAX = 30.0
SLACK_S = 3.0  # what a busy machine may add
STEP = ScheduleEndContext([], [])


def key(number: int) -> bytes:
    return hashlib.sha256(b"chunk %d" % number).digest() + bytes(4)


def content(number: int) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(number))
    return rng.integers(-128, 128, CHUNK_BYTES, np.int8)


def known(kind: Any, **values: Any) -> Any:
    """An object of `kind` with those of the values that this version has."""
    names = {one.name for one in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def offloading_config(tier: dict[str, Any], **changes: Any) -> OffloadingConfig:
    values: dict[str, Any] = {
        "groups": (
            known(OffloadingGroupConfig, tokens_per_block=32, layer_names=("0", "1"), group_id=0),
        ),
        "worker_kv_bytes_per_block": CHUNK_BYTES,
        "enable_kv_cache_events": True,
        "extra_config": {
            "cpu_bytes_to_use": CHUNK_BYTES * POOL_CHUNKS,
            "secondary_tiers": [tier],
        },
        "engine_id": f"entresol-test-{uuid.uuid4()}",
        "model": OffloadingModelConfig("tiny", "bfloat16"),
        "cache": OffloadingCacheConfig(32, 1),
        "parallel": known(
            OffloadingParallelConfig, rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1,
            dcp_size=1, data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        "kv_cache_layout": "LBHNC",
    }  # fmt: skip
    return known(OffloadingConfig, **{**values, **changes})


class Engine:
    """What vLLM's scheduler does with the manager, a step at a time."""

    def __init__(self, daemon: TierDaemon, **more: Any) -> None:
        tier = {
            "type": "entresol", "config": str(daemon.client_toml()), "weights": "off",
            "model_revision": "r1",
            "lookup_deadline_ms": 400, "load_deadline_ms": 1_000, "store_deadline_ms": 2_000,
            "tenants": {"other": str(daemon.client_toml("other"))},
            "tenants_trust_each_other": True, **more,
        }  # fmt: skip
        load_general_plugins()
        self.spec = TieringOffloadingSpec(offloading_config(tier))
        self.manager: Any = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.view = self.manager.primary_tier.get_kv_memoryview()

    def row(self, slot: int) -> np.ndarray:
        return np.asarray(self.view)[slot]

    def request(self, name: str, params: dict[str, Any] | None = None) -> ReqContext:
        context = ReqContext(name, params)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(STEP)

    def store(self, context: ReqContext, *numbers: int) -> None:
        """As after a prefill: chunks come into the pool and go on to the tier."""
        keys = [key(number) for number in numbers]
        found = self.manager.prepare_store(keys, context)
        assert found is not None
        for one, slot in zip(found.keys_to_store, found.store_spec.chunk_ids, strict=True):
            self.row(int(slot))[:] = content(numbers[keys.index(one)])
        self.manager.complete_store(set(found.keys_to_store), context)

    def settle(self, seconds: float = SECONDS_MAX) -> None:
        """Step until no job is under way."""
        until = time.monotonic() + seconds
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "jobs did not end"
            self.step()
            for _ in self.manager.take_events():
                pass
            time.sleep(0.002)

    def reset(self) -> None:
        """Drop all caches; the scheduler also tells, from 0.33 on, that its workers are done."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def look(self, context: ReqContext, *numbers: int) -> list[LookupResult]:
        """Ask for chunks as the scheduler does, until none has to be asked again."""
        until = time.monotonic() + SECONDS_MAX
        while True:
            found = [self.manager.lookup(key(number), context) for number in numbers]
            self.step()
            if LookupResult.RETRY not in found:
                return found
            assert time.monotonic() < until, "lookups did not end"
            time.sleep(0.002)

    def load(self, context: ReqContext, *numbers: int) -> list[bool]:
        """Bring chunks into the pool; True where the exact bytes are there."""
        self.look(context, *numbers)
        self.settle()
        return [self.has(context, number) for number in numbers]

    def has(self, context: ReqContext, number: int) -> bool:
        if self.manager.primary_tier.lookup(key(number), context) is not LookupResult.HIT:
            return False
        spec = self.manager.primary_tier.prepare_load([key(number)], context)
        self.manager.primary_tier.complete_load([key(number)], context)
        assert (self.row(int(spec.chunk_ids[0])) == content(number)).all(), "wrong bytes"
        return True

    def close(self) -> None:
        gc.collect()  # arrays over the pool, made here
        self.manager.shutdown()


def session_part(*identifiers: str) -> Request:
    images = [
        MultiModalFeatureSpec(None, "image", one, PlaceholderRange(0, 1)) for one in identifiers
    ]
    return Request(
        "session", prompt_token_ids=[1, 2, 3], pooling_params=None, mm_features=images,
        sampling_params=SamplingParams(max_tokens=1), resumable=True,
    )  # fmt: skip


def arrived(engine: Engine, name: str, *identifiers: str) -> tuple[ReqContext, Request]:
    """A request with images of these names, as vLLM's connector tells of it."""
    request = session_part(*identifiers)
    request.request_id = name
    connector: Any = object.__new__(OffloadingConnectorScheduler)
    connector.__dict__.update(manager=engine.manager, config=None, _req_status={})
    connector.on_new_request(request)
    return connector._req_status[name].req_context, request


Make = Callable[..., Engine]


@pytest.fixture
def tier(make_tier: Callable[..., TierDaemon]) -> TierDaemon:
    daemon = make_tier()
    daemon.start()
    return daemon


@pytest.fixture
def make(tier: TierDaemon) -> Iterator[Make]:
    """Engines that are shut down after the test."""
    made: list[Engine] = []

    def one(**more: Any) -> Engine:
        made.append(Engine(tier, **more))
        return made[-1]

    yield one
    tier.thaw()
    for engine in made:
        engine.close()


@pytest.mark.parametrize("place", ["host", "daemon"])
def test_what_one_engine_stores_another_one_finds(make: Make, place: str) -> None:
    a, b = make(), make(open_at=place)
    a.store(a.request("r"), 1, 2, 3)
    a.settle()
    wanted = b.request("q")
    assert b.look(wanted, 1, 2, 3, 4) == [LookupResult.HIT_PENDING] * 3 + [LookupResult.MISS]
    b.settle()
    assert [b.has(wanted, number) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert b.tier.counts()["lookups"] == 1


def test_what_is_quicker_computed_is_not_loaded(make: Make) -> None:
    """`recompute_or_fetch = auto` between two speeds of the engine that settle the matter."""
    a = make(recompute_or_fetch="auto", prefill_tokens_per_s=1)
    b = make(recompute_or_fetch="auto", prefill_tokens_per_s=10**9)
    context = a.request("r")
    assert a.look(context, 1, 2, 3) == [LookupResult.MISS] * 3
    a.store(context, 1, 2, 3)
    a.settle()
    assert b.look(b.request("q"), 1, 2, 3) == [LookupResult.MISS] * 3
    assert b.tier.counts()["recompute_blocks"] == 3
    again = make(recompute_or_fetch="auto", prefill_tokens_per_s=1)
    assert again.load(again.request("q"), 1, 2, 3) == [True] * 3
    assert again.tier.counts()["quotes"] == 1


def test_a_model_whose_revision_nobody_tells_is_not_served(make: Make) -> None:
    with pytest.raises(ConfigError, match="revision"):
        make(model_revision="")


def test_a_store_serves_the_tenant_whose_request_computed_it(make: Make) -> None:
    a, b = make(), make()
    other = {"entresol": {"tenant": "other"}}
    a.store(a.request("mine"), 1)
    a.store(a.request("theirs", other), 2)
    a.settle()
    assert b.load(b.request("mine"), 1, 2) == [True, False]
    c = make()
    assert c.load(c.request("theirs", other), 1, 2) == [False, True]
    nobody = c.request("?", {"entresol": {"tenant": "nobody"}})
    c.store(nobody, 3)
    assert c.look(nobody, 1, 2)[0] is LookupResult.MISS
    c.settle()
    assert c.tier.counts()["refused_requests"] == 1
    d = make()
    assert d.load(d.request("mine"), 3) == [False]


def test_a_request_whose_images_have_given_names_uses_no_tier(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes `multi_modal_uuids` for hashes. It does not pass the request on: whoever moves it
    out of sight, or renames what it has of images, makes this fail."""
    monkeypatch.setattr(offloading_scheduler, "RequestOffloadState", SimpleNamespace)

    def arrive(engine: Engine, name: str, identifier: str | None) -> ReqContext:
        return arrived(engine, name, *([identifier] if identifier else []))[0]

    a, b, open_to_all = make(), make(), make(multimodal="accept")
    named = arrive(a, "named", "cat")
    a.store(named, 1)
    a.store(arrive(a, "hashed", "ab" * 32), 2)
    a.store(arrive(a, "plain", None), 3)
    a.settle()
    assert (a.tier.counts()["refused_requests"], a.tier.counts()["stored_blocks"]) == (1, 2)
    a.tier.on_request_finished(named)
    a.store(named, 4)  # when it is over
    a.settle()
    assert a.tier.counts()["stored_blocks"] == 2
    assert b.load(arrive(b, "named", "cat"), 2, 3) == [False] * 2
    assert b.load(arrive(b, "hashed", "ab" * 32), 1, 2, 3, 4) == [False, True, True, False]
    assert open_to_all.load(arrive(open_to_all, "named", "cat"), 2, 3) == [True] * 2


def test_a_session_whose_later_images_have_given_names_uses_the_tier_no_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input of a session comes in parts, and vLLM tells a connector of the first alone."""
    monkeypatch.setattr(offloading_scheduler, "RequestOffloadState", SimpleNamespace)
    a, b = make(), make()
    context, request = arrived(a, "session")
    a.store(context, 1)
    update = StreamingUpdate.from_request(session_part("cat"))
    scheduler: Any = SimpleNamespace(
        hash_block_size=32, num_waiting_for_streaming_input=1, log_stats=False
    )
    request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    Scheduler._update_request_as_session(scheduler, request, update)
    a.store(context, 2)
    a.settle()
    assert (a.tier.counts()["refused_requests"], a.tier.counts()["stored_blocks"]) == (1, 1)
    assert a.look(context, 1, 5) == [LookupResult.HIT, LookupResult.MISS]
    a.tier.on_request_finished(context)
    a.store(context, 3)
    a.settle()
    assert b.load(b.request("q"), 1, 2, 3) == [True, False, False]


def test_a_word_for_images_that_is_not_known_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="multimodal"):
        make(multimodal="yes")


def test_random_weights_are_not_stored_as_a_models(make: Make) -> None:
    loaded = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    with pytest.raises(ConfigError, match="dummy"):
        vllm_compat.check_fit(loaded, "", "off")
    vllm_compat.check_fit(loaded, "", "of this benchmark")


def test_a_lookup_ends_at_its_deadline_while_the_daemon_hangs(make: Make, tier: TierDaemon) -> None:
    engine = make()
    context = engine.request("r")
    engine.look(context, 1)  # connected, namespace open
    tier.freeze()
    begun = time.monotonic()
    assert engine.look(context, 2, 3) == [LookupResult.MISS] * 2
    assert 0.3 < time.monotonic() - begun < 0.4 + SLACK_S
    assert engine.tier.counts()["lookup_unanswered"] >= 1


def test_the_slots_of_a_load_that_fails_late_are_held_until_nothing_can_land(
    make: Make, tier: TierDaemon
) -> None:
    a, b = make(), make()
    a.store(a.request("r"), *range(8))
    a.settle()
    context = b.request("q")
    while LookupResult.RETRY in [b.manager.lookup(key(n), context) for n in range(8)]:
        b.manager.secondary_tiers[0].on_schedule_end(STEP)  # asks, and loads nothing yet
        time.sleep(0.002)
    tier.freeze()
    begun = time.monotonic()
    b.step()  # the load goes out to a daemon that hangs
    slots = dict(zip(range(8), b.manager._jobs[0].transfer_job.chunk_ids, strict=True))
    while b.manager.has_pending_work():
        held = [b.manager.primary_tier.lookup(key(n), context) for n in range(8)]
        if b.manager._jobs:
            assert held == [LookupResult.HIT_PENDING] * 8, "given away while it may land"
        b.step()
        time.sleep(0.01)
    assert 0.5 < time.monotonic() - begun < 1.0 + SLACK_S
    assert [b.manager.primary_tier.lookup(key(n), context) for n in range(8)] == [
        LookupResult.MISS
    ] * 8
    for slot in slots.values():  # vLLM uses them for something else now
        b.row(int(slot))[:] = 77
    tier.thaw()
    time.sleep(1.0)
    assert all((b.row(int(slot)) == 77).all() for slot in slots.values()), "it landed late"
    assert b.look(context, 0) == [LookupResult.MISS], "failed: absent for this request"
    until = time.monotonic() + SECONDS_MAX
    while b.load(b.request("again"), *range(8)) != [True] * 8:
        assert time.monotonic() < until, "the blocks did not come back"
        time.sleep(0.1)


def test_of_a_load_that_fails_in_part_the_good_blocks_are_kept(
    make: Make, tier: TierDaemon
) -> None:
    a, b = make(durable=True), make()
    a.store(a.request("r"), *range(6))
    a.settle()
    tier.damage(lambda blocks: [one for one in blocks if one.engine_key == key(3)])
    until = time.monotonic() + SECONDS_MAX
    while b.tier.counts()["connected"] < 2:  # one for each tenant
        assert time.monotonic() < until
        time.sleep(0.02)
    context = b.request("q")
    assert b.load(context, *range(6)) == [True, True, True, False, True, True]
    assert b.tier.counts()["load_corrupt_blocks"] == 1
    assert b.look(context, 3) == [LookupResult.MISS], "not again for this request"


def test_events_tell_of_blocks_stored_and_of_blocks_that_were_not_there(
    make: Make, tier: TierDaemon
) -> None:
    a, b = make(enable_kv_events=True), make(enable_kv_events=True)
    a.store(a.request("r"), 1, 2)
    events: list[Any] = []
    while not events or a.manager.has_pending_work():
        a.step()
        events += [one for one in a.manager.take_events() if one.medium is Medium.STORAGE]
        time.sleep(0.002)
    assert sorted(events[0].keys) == sorted([key(1), key(2)])
    assert [one.removed for one in events] == [False]
    assert events[0].locality is None
    context = b.request("q")
    b.look(context, 9)
    b.tier._requests.get("q").known[key(1)] = True  # as if it went between lookup and load
    b.tier._requests.get("q").known[key(9)] = True
    for number in (1, 9):
        b.manager.lookup(key(number), context)
    b.step()
    events = []
    while not events or b.manager.has_pending_work():
        b.step()
        events += [one for one in b.manager.take_events() if one.medium is Medium.STORAGE]
        time.sleep(0.002)
    assert [(one.keys, one.removed) for one in events] == [([key(9)], True)]


def test_a_drain_ends_in_bounded_time_with_a_daemon_that_hangs(
    make: Make, tier: TierDaemon
) -> None:
    engine = make(drain_deadline_ms=200, stores_in_flight_max=1)
    context = engine.request("r")
    engine.store(context, 0)
    engine.settle()
    tier.freeze()
    for number in range(1, 8):
        engine.store(context, number)
    begun = time.monotonic()
    engine.manager.reset_cache()
    assert time.monotonic() - begun < 0.2 + 2.0 + SLACK_S, "one store's deadline, not seven"
    assert not engine.manager._jobs
    assert engine.tier.counts()["shed_blocks"] >= 1


@pytest.mark.parametrize("on_reset", ["new", "keep", "off"])
def test_after_a_reset_nothing_of_before_is_found(make: Make, on_reset: str) -> None:
    """vLLM asks for it when its weights were changed, and when it goes to sleep."""
    engine, other = make(on_reset=on_reset), make()
    under_way = engine.request("r")
    engine.store(under_way, 1, 2)
    engine.settle()
    engine.reset()
    kept = on_reset == "keep"
    assert engine.load(engine.request("q"), 1, 2) == [kept] * 2
    assert engine.load(under_way, 1) == [kept]
    assert other.load(other.request("q"), 1, 2) == [True] * 2
    if not kept:
        engine.store(engine.request("s"), 1)
        engine.settle()
        engine.manager.primary_tier.reset_cache()
        assert engine.load(engine.request("t"), 1) == [on_reset == "new"]


def test_an_engine_with_adapters_says_what_they_hold() -> None:
    config = SimpleNamespace(lora_config=object(), cache_config=None)
    with pytest.raises(ConfigError, match="adapters"):
        vllm_compat.check_fit(config, "", "auto")
    vllm_compat.check_fit(config, "v1", "auto")
    vllm_compat.check_fit(None, "", "auto")
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        vllm_compat.check_fit(
            SimpleNamespace(cache_config=SimpleNamespace(calculate_kv_scales=True)), "", "auto"
        )


def test_shutting_down_lets_go_of_the_pool(
    tier: TierDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tier)
    path = engine.spec._scheduler_mmap.mmap_path
    context = engine.request("r")
    engine.store(context, *range(8))
    engine.look(context, 20)
    region = engine.spec._scheduler_mmap
    engine.view = None
    engine.close()  # with stores under way
    assert region.mmap_obj is None, "the pool could not be unmapped"
    assert "Failed" not in caplog.text
    assert not os.path.exists(path)


def test_stats_are_increases_since_the_last_call(make: Make) -> None:
    engine = make()
    engine.store(engine.request("r"), 1, 2)
    engine.settle()
    found = engine.tier.get_stats().reduce()
    assert found[METRIC + "stored_blocks"] == 2
    assert found[METRIC + "connected"] == 2, "of both tenants"
    assert engine.tier.get_stats() is None
    names = EntresolTier.build_metric_definitions({})
    assert set(found) <= set(names)


@pytest.mark.parametrize(("more", "words"), [
    ({"lookup_deadline": 5}, "did you mean 'lookup_deadline_ms'"),
    ({"lookup_deadline_ms": 0}, "not a number of 1.."),
    ({"drain_deadline_ms": True}, "drain_deadline_ms"),
    ({"locality": "REMOTE"}, "no locality"),
    ({"config": "/nowhere/client.toml"}, "/nowhere/client.toml"),
    ({"tenants": {"b": "/nowhere/b.toml"}}, "/nowhere/b.toml"),
    ({"tenants_trust_each_other": False}, "one engine for several tenants"),
])  # fmt: skip
def test_a_mistake_in_the_settings_keeps_vllm_from_starting(
    tier: TierDaemon, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as found:
        Engine(tier, **more)
    assert words in f"{found.value} {found.value.hint}"


def test_hashes_of_chance_keep_vllm_from_starting_when_it_tells_its_algorithm(
    tier: TierDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    vllm_config = SimpleNamespace(  # what vLLM's connector has as a local name while it builds us
        cache_config=SimpleNamespace(prefix_caching_hash_algo="xxhash"), model_config=None,
        attention_config=None,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="random number"):
        Engine(tier)
    assert vllm_config
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    Engine(tier).close()


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "refused"),
    [(0, False, True), (4, False, False), (0, True, False)],
)
def test_an_engine_that_numbers_its_images_does_not_start(
    cache_gb: int, prefix_caching: bool, refused: bool
) -> None:
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)
        ),
    )
    if not refused:
        vllm_compat.check_fit(vllm_config, "", "auto")
        return
    with pytest.raises(ConfigError, match="numbers images"):
        vllm_compat.check_fit(vllm_config, "", "auto")


class Platform(SimpleNamespace):
    """What is asked of vLLM's."""

    def fp8_dtype(self) -> str:
        return str(self.fp8)

    def get_device_capability(self) -> tuple[int, int]:
        return self.capability  # type: ignore[no-any-return]


def test_machines_that_lay_out_other_bytes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(
        layout: str | None = None, dtype: str = "bfloat16", told: str = "", **more: Any
    ) -> str:
        platform = Platform(
            **{"device_type": "cuda", "_enum": SimpleNamespace(name="CUDA"), "fp8": "e4m3fn",
               "capability": (9, 0), **more}
        )  # fmt: skip
        config = SimpleNamespace(kv_cache_layout=layout, model=SimpleNamespace(dtype=dtype))
        return str(vllm_compat._platform_facts(config, platform, told))

    assert facts() != facts(capability=(10, 0)), "it chooses the layout itself"
    assert facts("NHD") != facts("NHD", capability=(10, 0)), "and the backend"
    assert facts("NHD", told="FLASH") == facts("NHD", told="FLASH", capability=(10, 0))
    assert facts(dtype="fp8") != facts(dtype="fp8", fp8="e4m3fnuz")
    assert facts() != facts(_enum=SimpleNamespace(name="ROCM"))
    before = facts()
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert facts() != before


def test_a_store_after_its_requests_end_and_a_reset_is_not_kept(make: Make) -> None:
    """Its blocks may have been computed by other weights."""
    engine = make()
    context = engine.request("r")
    engine.look(context, 1)
    engine.tier.drain_jobs()
    engine.tier.on_request_finished(context)
    engine.store(context, 1)
    engine.settle()
    assert engine.tier.counts()["stored_blocks"] == 0


def test_hashes_of_chance_switch_the_tier_off_when_vllm_tells_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "5f" * 32)
    engine = make()
    context = engine.request("r")
    engine.store(context, 1)
    engine.settle()
    assert engine.look(context, 1, 2)[1] is LookupResult.MISS
    assert engine.tier.counts()["lookup_blocks"] == engine.tier.counts()["stored_blocks"] == 0


def test_the_entry_point_names_tier_and_connector() -> None:
    load_general_plugins()
    assert SecondaryTierFactory.get_tier_class({"type": "entresol"}) is EntresolTier
    assert KVConnectorFactory.get_connector_class_by_name("EntresolConnector") is EntresolConnector
    assert EntresolTier.cache_hit_source is not None
    assert vllm_compat.VERSION.split("+")[0] in TESTED


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (vllm_config.CacheConfig, vllm_facts.CACHE_FACTS),
        (vllm_config.MultiModalConfig, vllm_facts.MULTIMODAL_FACTS),
        (vllm_config.AttentionConfig, vllm_facts.ATTENTION_FACTS),
        (vllm_config.LoRAConfig, vllm_facts.LORA_FACTS),
        (vllm_config.SpeculativeConfig, vllm_facts.DRAFT_FACTS),
        (vllm_config.ParallelConfig, vllm_facts.INTERLEAVE_FACTS[:1]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_read_of_vllms_configuration_is_there(kind: type, names: Sequence[str]) -> None:
    """What vLLM renames would be None in every engine's namespace, and tell none apart."""
    assert set(names) <= {one.name for one in dataclasses.fields(kind)}


def test_processors_that_lay_keys_out_otherwise_have_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's `_get_attn_isa` (v1/attention/backends/cpu_attn.py) chooses by the processor."""

    def facts(amx: bool) -> Any:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        return vllm_compat.engine_facts(offloading_config({}), None).extra

    assert facts(True) != facts(False)
    assert facts(True) == facts(True)


def test_numbers_that_a_backend_chooses_by_the_processor_have_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TurboQuant, also where it was told: `_use_fp8_e4b15`, `is_flydsl_available`."""
    flydsl = SimpleNamespace(is_flydsl_available=lambda: False)
    monkeypatch.setattr(vllm_compat, "_flydsl", lambda: flydsl)

    def facts(dtype: str, capability: str = "8.0") -> Any:
        told = offloading_config({}, model=OffloadingModelConfig("tiny", dtype))
        platform = SimpleNamespace(
            device_type="cuda", get_device_capability=lambda: capability, fp8_dtype=lambda: "e4m3"
        )
        return vllm_compat._platform_facts(told, platform, "TOLD")

    assert facts("turboquant_k8v4") != facts("turboquant_k8v4", "9.0")
    for dtype in ("bfloat16", "fp8_e4m3"):
        assert facts(dtype) == facts(dtype, "9.0")
    usual = facts("turboquant_k8v4")
    flydsl.is_flydsl_available = lambda: True
    assert facts("turboquant_k8v4") != usual


def test_the_renamed_fields_of_older_versions_are_known() -> None:
    assert vllm_compat.slots_of(SimpleNamespace(block_ids=np.array([3, 1]))) == [3, 1]
    assert vllm_compat.slots_of(SimpleNamespace(chunk_ids=np.array([2]))) == [2]

    @dataclasses.dataclass
    class OldResult:  # before 0.29
        job_id: int
        success: bool

    assert vllm_compat._known(OldResult, {"job_id": 1, "success": True, "transfer_time": 2.0}) == {
        "job_id": 1, "success": True,
    }  # fmt: skip
    assert vllm_compat.end_token_of(SimpleNamespace(), b"") is None


def test_an_untested_version_is_told_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_compat, "VERSION", "99.1.0")
    vllm_compat.tell_version()
    assert TESTED[0] in caplog.text
