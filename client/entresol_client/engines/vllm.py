"""Entresol as a secondary tier of vLLM's offloading: `"type": "entresol"` in `secondary_tiers`.

vLLM keeps chunks of KV in a pool in host memory (its primary tier); what falls out of it, or was
computed by another engine, comes from here, and what it stores is copied here. See client/VLLM.md.

Invariants:
- no method waits for the daemon: lookups, loads and stores are futures that vLLM polls;
- a job is reported finished only when nobody touches its slots any more, also when it failed;
- a request that names a tenant this engine may not act for uses no tenant's blocks.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, ClassVar

from entresol_client.client import KEYS_PER_CALL_MAX
from entresol_client.engines import vllm_compat as compat
from entresol_client.engines.asker import ParamsError, who_asks
from entresol_client.engines.choosing import Run
from entresol_client.engines.logs import join_log
from entresol_client.engines.prefills import Prefills
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore, LoadReply, Space, StoreReply
from entresol_client.engines.vllm_metrics import COUNTERS, GAUGES, METRIC
from entresol_client.engines.vllm_naming import as_words, check_hashes, describe
from entresol_client.engines.vllm_requests import (
    Ask,
    Found,
    Prompt,
    Request,
    Requests,
)
from entresol_client.engines.vllm_tokens import live_requests
from entresol_client.results import PutBlock
from entresol_proto.status import ConfigError, Status

log = logging.getLogger("entresol.engine")

MS = 1e-3
TOUCHES_IN_FLIGHT_MAX = 4  # beyond it keys are not touched: it only keeps them young
DRAIN_MS_DEFAULT, DRAIN_MS_MAX = 5_000, 600_000
CALLBACK_SECONDS_MAX = 5.0  # from the end of a job to its report


@dataclass(slots=True)
class Job:
    """A load or store under way. `keys` are vLLM's, in the order of `views`."""

    job_id: int
    request_id: str
    is_load: bool
    keys: list[bytes]
    views: list[memoryview] = field(repr=False)
    begun_s: float

    def release(self) -> None:
        """Let go of the slots; somebody may still hold a view for a moment."""
        for view in self.views:
            with contextlib.suppress(BufferError):
                view.release()
        self.views.clear()


class EntresolTier(compat.SecondaryTierManager):  # type: ignore[misc]
    """See the module. One per engine (and data parallel rank), in vLLM's scheduler process."""

    medium: ClassVar[Any] = compat.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        model: str = "",
        enable_kv_events: bool = False,
        drain_deadline_ms: int = DRAIN_MS_DEFAULT,
        multimodal: str = "",
        locality: Any = None,
        **settings: Any,
    ) -> None:
        """Settings beside `EngineSettings`: `model` overrides the model's name in the namespace;
        `enable_kv_events` tells vLLM's event publisher of stored blocks; `drain_deadline_ms` bounds
        what shutting down waits for stores; `multimodal` "accept" also serves requests whose
        images have names that their callers gave.

        Raises: ConfigError, IdentityError: vLLM then does not start. Never for an absent daemon.
        """
        join_log("vllm")
        compat.tell_version()
        base = {
            "offloading_spec": offloading_spec,
            "primary_kv_view": primary_kv_view,
            "tier_type": tier_type,
            "backpressure_detector": backpressure_detector,
        }
        super().__init__(**compat.base_arguments(type(self), base))
        if locality is not None:
            raise ConfigError(
                "the entresol tier has no locality", hint="leave it out: routers drop REMOTE"
            )
        if type(drain_deadline_ms) is not int or not 0 < drain_deadline_ms <= DRAIN_MS_MAX:
            raise ConfigError(f"drain_deadline_ms is {drain_deadline_ms!r}, not 1..{DRAIN_MS_MAX}")
        if multimodal not in ("", "accept"):
            raise ConfigError(f"multimodal is {multimodal!r}", hint='leave it out, or "accept"')
        own = frozenset({"model", "enable_kv_events", "drain_deadline_ms", "multimodal"})
        self._settings = EngineSettings.from_mapping(settings, where=tier_type, also=own)
        self._drain_s = drain_deadline_ms * MS
        self._given_names_pass = multimodal == "accept"
        config = offloading_spec.config
        self._config = config
        self._chunk_bytes: int = primary_kv_view.strides[0]  # type: ignore[index]
        vllm_config = compat.config_of_callers()
        if vllm_config is None and not self._settings.model_revision:
            raise ConfigError(
                "this version of vLLM does not show a tier the model's revision",
                hint="set model_revision: two revisions under one name must not share blocks",
            )
        compat.check_fit(vllm_config, self._settings.adapters, self._settings.weights)
        facts = compat.engine_facts(config, vllm_config)
        check_hashes(facts)
        self.descriptor = describe(config, self._chunk_bytes, self._settings, facts, model=model)
        self._requests: Requests[Space] = Requests()
        auto = self._settings.recompute_or_fetch == "auto"
        self._prefills = Prefills() if auto else None
        self._jobs: dict[int, Job] = {}
        self._finished: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
        self._touches: dict[Space, set[bytes]] = {}
        self._touches_in_flight: list[Future[int]] = []
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()  # what metrics were told of so far
        self._events: list[Any] | None = [] if self._wants_events(enable_kv_events) else None
        self._hashes_checked = False
        self._usable = True
        self._view: memoryview | None = None
        self._spaces: dict[str, Space] = {}
        self._stores: list[EngineStore] = []
        self._open(primary_kv_view)

    def _wants_events(self, enabled: bool) -> bool:
        published = getattr(self._config, "enable_kv_cache_events", False)
        if enabled and not published:
            log.warning("event=kv_events_off reason='vLLM publishes none: see kv_events_config'")
        return enabled and published

    def _open(self, primary_kv_view: memoryview) -> None:
        """Open one store per tenant; vLLM's pool becomes their landing memory."""
        try:
            self._view = primary_kv_view.cast("B")
            by_path: dict[str, Space] = {}
            for tenant, path in [("", ""), *self._settings.tenants.items()]:
                if path not in by_path:
                    store = EngineStore(self._settings, config_path=path or None)
                    self._stores.append(store)
                    store.register(self._view)
                    by_path[path] = store.space(self.descriptor)
                    log.info("event=tier_open tenant=%r shards=%r", tenant, store.describe())
                self._spaces[tenant] = by_path[path]
        except BaseException:
            self.shutdown()
            raise
        log.info("event=tier_namespace chunk_bytes=%d namespace=%r",
                 self._chunk_bytes, as_words(self.descriptor))  # fmt: skip

    # Requests --------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Find out whose blocks the request may use."""
        if not self._given_names_pass:
            compat.note_images(req_context)
        self._add(req_context)
        return compat.RequestOffloadingContext()

    def _add(self, context: Any) -> Request[Space]:
        if not self._hashes_checked:
            self._check_seed()
        space, salt = None, ""
        try:
            who = who_asks(context.kv_transfer_params)
            space, salt = self._spaces.get(who.tenant), who.salt
            reason = f"unknown tenant {who.tenant!r}"
        except ParamsError as error:
            reason = str(error)
        if space is None:
            self._refused(context, reason)
        request = self._requests.add(context.req_id, space if self._usable else None, salt)
        return self._fit(request, context)

    def _fit(self, request: Request[Space], context: Any) -> Request[Space]:
        """`request`, which uses the tier no more if images have come with names of their own."""
        if (
            request.space is not None
            and not self._given_names_pass
            and compat.has_given_names(context)
        ):
            request.space = None
            self._refused(context, "its images have names that are no hashes (multi_modal_uuids)")
        return request

    def _refused(self, context: Any, reason: str) -> None:
        self._counts["refused_requests"] += 1
        count = self._counts["refused_requests"]
        if count.bit_count() == 1:  # the 1st, 2nd, 4th, ...: one client cannot fill the log
            log.warning("event=request_without_tier request=%s reason=%r refused_requests=%d",
                        context.req_id, reason, count)  # fmt: skip

    def _check_seed(self) -> None:
        """vLLM has chosen the seed of its hashes by now: one of chance finds nobody's blocks."""
        self._hashes_checked = True
        if not compat.hashes_are_shared(os.environ):
            self._usable = False
            log.error("event=tier_off reason='block hashes begin with a random number' "
                      "hint='set PYTHONHASHSEED, the same for all engines'")  # fmt: skip

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what was asked for the request. Its jobs go on."""
        self._requests.remove(req_context.req_id)
        compat.forget_images(req_context)
        live_requests.remove(req_context.req_id)
        if self._prefills is not None:
            self._prefills.finished(req_context.req_id)

    # Lookups ---------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY while the daemon is asked, at most `lookup_deadline_ms`."""
        known = self._requests.get(req_context.req_id)
        request = self._fit(known, req_context) if known else self._add(req_context)
        now_s = time.monotonic()
        if self._prefills is not None and request.space is not None:
            end_token = compat.end_token_of(req_context, bytes(key)) or 0
            request.first_end = request.first_end or end_token
            self._prefills.ready(req_context.req_id, end_token, now_s)
        found = self._requests.look(request, bytes(key), now_s)
        if found is Found.ASKED:
            return compat.LookupResult.RETRY
        return compat.LookupResult.HIT if found is Found.PRESENT else compat.LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """vLLM used these from a nearer tier: they stay young here too."""
        request = self._requests.get(req_context.req_id)
        if request is not None and request.space is not None:
            wanted = self._touches.setdefault(request.space, set())
            wanted.update(request.block_key(bytes(key)) for key in keys)

    def on_schedule_end(self, context: Any) -> None:
        """Ask the daemon what this step wanted to know, in one question per tenant."""
        self._requests.flush(self._ask, KEYS_PER_CALL_MAX)
        if self._touches:
            self._send_touches()

    def _ask(self, space: Space, keys: list[bytes], prompts: list[Prompt]) -> Ask:
        until_s = time.monotonic() + self._settings.lookup_deadline_ms * MS
        size = self.descriptor.block_tokens
        runs = [
            Run(one.positions, len(one.positions) * size, max(0, one.first_end - size))
            for one in prompts
        ]
        return Ask(keys, space.lookup(keys, runs), until_s)

    def _send_touches(self) -> None:
        waiting, self._touches = self._touches, {}
        self._touches_in_flight = [one for one in self._touches_in_flight if not one.done()]
        for space, keys in waiting.items():
            if len(self._touches_in_flight) < TOUCHES_IN_FLIGHT_MAX:
                self._touches_in_flight.append(space.touch(sorted(keys)[:KEYS_PER_CALL_MAX]))

    # Jobs ------------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks into their slots. Never shed, never behind a store."""
        request, job = self._begin(job_metadata, is_load=True)
        if request is None or request.space is None:
            self._finished.put((job.job_id, _done(LoadReply(_missing(job), 0, 0.0))))
            return
        future = request.space.load([request.block_key(key) for key in job.keys], job.views)
        future.add_done_callback(lambda done: self._finished.put((job.job_id, done)))

    def submit_store(self, job_metadata: Any) -> None:
        """Store chunks for the tenant whose request computed them; shed when too many wait."""
        request, job = self._begin(job_metadata, is_load=False)
        if request is None or request.space is None:
            self._finished.put((job.job_id, _done(StoreReply(_missing(job), 0, 0.0))))
            return
        if self._prefills is not None:
            self._learn(self._prefills, request.space, job, job_metadata.req_context)
        future = request.space.store(self._blocks(request, job, job_metadata.req_context))
        future.add_done_callback(lambda done: self._finished.put((job.job_id, done)))

    def _learn(self, prefills: Prefills, space: Space, job: Job, context: Any) -> None:
        """What the engine has computed is here to be stored: how long that took."""
        ends = [end for key in job.keys if (end := compat.end_token_of(context, key))]
        size, now_s = self.descriptor.block_tokens, time.monotonic()
        seen = prefills.stored(job.request_id, ends, size, now_s)
        if seen is not None:
            space.chooser.prefilled(seen.context_tokens, seen.tokens, seen.seconds)

    def _begin(self, metadata: Any, *, is_load: bool) -> tuple[Request[Space] | None, Job]:
        assert self._view is not None, "a job after shutdown"
        size = self._chunk_bytes
        keys = [bytes(one) for one in metadata.keys]
        pairs = list(zip(keys, compat.slots_of(metadata), strict=True))
        if not is_load:  # a set, in any order; blocks are stored from the front
            ends = {key: compat.end_token_of(metadata.req_context, key) or 0 for key, _ in pairs}
            pairs.sort(key=lambda pair: ends[pair[0]])
        views = [self._view[slot * size : (slot + 1) * size] for _, slot in pairs]
        job = Job(
            metadata.job_id,
            metadata.req_context.req_id,
            is_load,
            [key for key, _ in pairs],
            views,
            time.monotonic(),
        )
        self._jobs[job.job_id] = job
        request = self._requests.get(job.request_id)
        if request is None:  # finished before: whose it was is still written on it
            request = self._add(metadata.req_context)
            self._requests.remove(job.request_id)
            if self._requests.begun_anew:  # its blocks may have been computed before that
                request.space = None
        return self._fit(request, metadata.req_context), job

    def _blocks(self, request: Request[Space], job: Job, context: Any) -> list[PutBlock]:
        group = self._config.groups[0]
        blocks = []
        for key, view in zip(job.keys, job.views, strict=True):
            told = live_requests.told(
                job.request_id,
                key,
                compat.end_token_of(context, key),
                group_id=getattr(group, "group_id", 0),
                chunk_tokens=self.descriptor.block_tokens,
                hash_tokens=self._config.cache.tokens_per_hash,
            )
            parent = None if told.parent_key is None else request.block_key(told.parent_key)
            blocks.append(
                PutBlock(request.block_key(key), view, told.position, parent, told.token_ids)
            )
        return blocks

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs whose slots nobody touches any more."""
        results = []
        while not self._finished.empty():
            job_id, future = self._finished.get()
            job = self._jobs.pop(job_id)
            job.release()
            reply = future.result()
            results.append(self._result(job, reply))
        return results

    def _result(self, job: Job, reply: LoadReply | StoreReply) -> Any:
        good = [
            key
            for key, status in zip(job.keys, reply.statuses, strict=True)
            if status is Status.OK or (status is Status.EXISTS and not job.is_load)
        ]
        if isinstance(reply, LoadReply):
            if self._prefills is not None:
                self._prefills.ready(job.request_id, 0, time.monotonic())
            length_bytes = reply.bytes_loaded
            if not reply.ok:
                self._failed_load(job, good)
        else:
            length_bytes = reply.bytes_stored
            if good and self._events is not None:
                self._events.append(compat.event(good, removed=False))
        return compat.job_result(
            job.job_id,
            len(good) == len(job.keys),
            successful_keys=tuple(good) if job.is_load and len(good) < len(job.keys) else None,
            seconds=time.monotonic() - job.begun_s,
            length_bytes=length_bytes,
        )

    def _failed_load(self, job: Job, good: list[bytes]) -> None:
        """What did not come is absent for this request, and for routers."""
        bad = [key for key in job.keys if key not in set(good)]
        log.warning("event=load_failed request=%s blocks=%d of=%d",
                    job.request_id, len(bad), len(job.keys))  # fmt: skip
        request = self._requests.get(job.request_id)
        if request is not None:
            request.absent(bad)
        if self._events is not None:
            self._events.append(compat.event(bad, removed=True))

    def has_pending_work(self) -> bool:
        """True while jobs are under way, or results or events wait to be taken."""
        return bool(self._jobs) or bool(self._events)

    def take_events(self) -> Iterable[Any]:
        """KV events since the last call, for vLLM's publisher."""
        if self._events is None:
            return ()
        taken, self._events = self._events, []
        return taken

    # End -------------------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait until nobody touches vLLM's pool, which is about to drop what it holds.

        Stores that still wait for their turn after `drain_deadline_ms` are shed; what is under way
        ends by its own deadline (`load_deadline_ms`, `store_deadline_ms`). vLLM asks for it before
        it goes to sleep and when its weights were changed, and does not say which: see `on_reset`.
        """
        for store in self._stores:
            store.drain(self._drain_s)
        # A future is done a moment before its callback has queued it, and vLLM asks right away.
        until_s = time.monotonic() + CALLBACK_SECONDS_MAX
        while self._finished.qsize() < len(self._jobs) and time.monotonic() < until_s:
            time.sleep(0.0005)
        if self._settings.on_reset != "keep":  # what is stored may be of other weights
            self._touches.clear()
            self._requests.begin_anew()
            self._usable = self._usable and self._settings.on_reset == "new"
            event = "tier_begins_anew" if self._usable else "tier_off"
            log.warning("event=%s reason='vLLM drops its caches' hint='on_reset'", event)

    def shutdown(self) -> None:
        """End the sessions and let go of vLLM's pool, so that it can be unmapped. Idempotent."""
        stores, self._stores = self._stores, []
        for store in stores:
            store.close(self._drain_s)
        for job in self._jobs.values():
            job.release()
        self._jobs.clear()
        self._spaces.clear()
        view, self._view = self._view, None
        if view is not None:
            gc.collect()  # views in frames of exceptions would keep the pool mapped
            try:
                view.release()
            except BufferError:
                log.error("event=memory_in_use where=shutdown")

    # Metrics ---------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """What vLLM's Prometheus endpoint shows of this tier."""
        return compat.metric_definitions(
            {METRIC + name: text for name, text in COUNTERS.items()},
            {METRIC + name: text for name, text in GAUGES.items()},
        )

    def counts(self) -> Mapping[str, int]:
        """Every counter since the start, of all tenants together; `backlog_bytes` is a level."""
        total = self._totals()
        total["connected"] = sum(store.connected() for store in self._stores)
        return total

    def _totals(self) -> Counter[str]:
        total = Counter(self._counts)
        total["lookup_unanswered"] += self._requests.late_lookups
        for store in self._stores:
            total.update(store.stats())
        return total

    def get_stats(self) -> Any:
        """Increases since the last call, for vLLM's metrics; None when there are none."""
        now = self._totals()
        grown = {METRIC + name: now[name] - self._told[name] for name in COUNTERS}
        grown = {name: amount for name, amount in grown.items() if amount > 0}
        if not grown:  # as in nearly every step
            return None
        self._told = now
        levels = self.counts()
        return compat.make_stats(grown, {METRIC + name: levels[name] for name in GAUGES})


def _missing(job: Job) -> tuple[Status, ...]:
    return (Status.MISS,) * len(job.keys)


def _done(reply: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(reply)
    return future
