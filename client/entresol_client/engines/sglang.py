"""SGLang's third level in Entresol: a HiCache storage backend of the "dynamic" kind.

    --enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "entresol", "interface_v1": 1,
        "module_path": "entresol_client.engines.sglang", "class_name": "EntresolHiCache",
        "config": "/etc/entresol/client.toml"}'

Invariants: an outage, or whatever else fails in a call, reads as absent pages and failed stores
within the deadlines, never as an exception; a page counts as loaded only when all its blocks are in
place.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from entresol_client.engines import naming
from entresol_client.engines import sglang_pages as names
from entresol_client.engines.choosing import Run
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.sglang_pools import Buffers, PagePool, platform_facts
from entresol_client.engines.store import EngineStore
from entresol_client.results import PutBlock
from entresol_proto.status import ConfigError, Status

log = logging.getLogger("entresol.sglang")

TESTED = "0.5.23"
# Read by SGLang itself, some of them only on some of its paths.
SGLANG_SETTINGS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
OWN_SETTINGS = frozenset({"cache_salt", "kv_format", "multimodal"})
MEASUREMENTS_MAX = 4096  # kept until SGLang asks
GB = 1e9
R = TypeVar("R")


def _guarded(none: Callable[[Any, Any], R]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Whatever fails inside reads as nothing: what calls here is a thread of SGLang's that nobody
    starts again. `none` makes that answer from the instance and the first argument."""

    def around(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def inner(self: Any, keys: Any, *args: Any, **words: Any) -> R:
            try:
                return method(self, keys, *args, **words)
            except Exception:
                log.exception(
                    "event=sglang_call_failed call=%s effect=reads_as_none", method.__name__
                )
                return none(self, keys)

        return inner

    return around


_no_pages = _guarded(lambda _self, keys: 0)
_none_of_them = _guarded(lambda _self, keys: [False] * len(keys))
_nothing_of_pools = _guarded(
    lambda _self, transfers: {one.name: [False] * len(one.keys or []) for one in transfers}
)


class EntresolHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no type marker
    """Stores, finds and loads SGLang's pages in Entresol; called from several of its threads.

    With `"interface_v1": 1` and a page-first host layout, blocks are read and written in place;
    otherwise SGLang copies a page before and after.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Settings are in `storage_config.extra_config`: `EngineSettings`, `cache_salt` (of this
        engine), `kv_format` (who lays out a page; default: SGLang and its version) and `multimodal`
        ("accept": also for models of images, see SGLANG.md).

        Raises: ConfigError, IdentityError. Never because the daemon is absent.
        """
        raw = dict(storage_config.extra_config or {})
        settings = EngineSettings.from_mapping(
            raw, where="hicache-storage-backend-extra-config", also=SGLANG_SETTINGS | OWN_SETTINGS
        )
        if settings.tenants:
            raise ConfigError(
                "SGLang tells its storage of no tenant", hint="one engine, one client certificate"
            )
        version = _version()
        if version != TESTED:
            log.warning("event=sglang_untested version=%s tested=%s", version, TESTED)
        for name in OWN_SETTINGS & raw.keys():
            if not isinstance(raw[name], str):
                raise ConfigError(f"{name} is {raw[name]!r}, not a text")
        self._config = storage_config
        self._settings = settings
        self._salt: str = raw.get("cache_salt", "")
        self._format: str = raw.get("kv_format") or f"sglang-{version}"
        self._in_place = bool(raw.get("interface_v1", 0))
        self._pools: dict[str, PagePool] = {}
        self._args = _server_args()
        _check_fit(self._args, settings, str(raw.get("multimodal", "")))
        path = str(getattr(self._args, "model_path", None) or storage_config.model_name or "")
        revision = str(getattr(self._args, "revision", None) or "")
        folder = naming.weights_folder(path, revision) or path
        self._revision = naming.revision(
            folder, settings.model_revision, revision, settings.weights, settings.adapters
        )
        # The name that an engine serves its model by may be another model's as well.
        self._path = "" if naming.WEIGHTS_SIGN in self._revision else path
        self._clears = 0
        self._lock = threading.Lock()
        self._loaded: deque[tuple[int, float]] = deque(maxlen=MEASUREMENTS_MAX)
        self._stored: deque[tuple[int, float]] = deque(maxlen=MEASUREMENTS_MAX)
        self._store = EngineStore(settings)
        log.info("event=sglang_backend_open sglang=%s shards=%r", version, self._store.describe())

    # Host pools --------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(names.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != names.KV:
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        pool = PagePool(name, host_pool, zero_copy=self._in_place)
        if not pool.holds_nothing:
            found = names.descriptor(
                self._config,
                name,
                pool.described,
                piece_bytes=pool.piece_bytes,
                engine=names.engine_facts(self._args, self._settings.adapters, self._path)
                | platform_facts(),
                revision=self._revision,
                kv_format=self._format,
                cache_salt=self._salt,
            )
            pool.open(self._store, found)
        self._pools[name] = pool
        log.info(
            "event=sglang_pool name=%s page_tokens=%d blocks_per_page=%d in_place=%s",
            name,
            pool.page_size,
            pool.pieces,
            not pool.copies,
        )

    # Pages in place, in batches ----------------------------------------------------------------

    @_no_pages
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many leading pages could be loaded now."""
        return _leading(self._present(self._kv(), keys))

    @_none_of_them
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages to their places in the host pool; stops at the first gap."""
        return self._get(self._kv(), keys, host_indices, prefix=True)

    @_none_of_them
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages from their places in the host pool."""
        return self._set(self._kv(), keys, host_indices)

    @_guarded(lambda _self, keys: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that every pool can serve, each pool's own, and all that can stop at.

        A pool of groups of blocks gets no verdict: it never shortens the prefix. One with a policy
        that is not known here has nothing.
        """
        kv = self._kv()
        pages = len(keys) if kv.holds_nothing else _leading(self._present(kv, keys))
        hits: dict[str, int] = {names.KV: pages} if pages else {}
        stops = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not stops or transfer.hit_policy == getattr(PoolHitPolicy, "BLOCK_GROUPS", None):
                continue
            pool = self._pools.get(str(transfer.name))
            present = self._present(pool, keys[:pages]) if pool else [False] * pages
            good = _stops(transfer, present)
            if good:
                hits[str(transfer.name)] = max(good)
            stops = [stop for stop in stops if stop in good]
        return PoolTransferResult(stops[-1] if stops else 0, hits, stops)

    @_nothing_of_pools
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load pages of several pools; per pool, which came."""
        return {
            transfer.name: self._get(
                self._pools.get(str(transfer.name)), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    @_nothing_of_pools
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; per pool, which are stored."""
        return {
            transfer.name: self._set(
                self._pools.get(str(transfer.name)), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    # Pages that SGLang copies itself -----------------------------------------------------------

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> Any | None:
        return self.batch_get([key], [target_location], [target_sizes])[0]

    @_guarded(lambda _self, keys: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[Any | None]:
        """Load pages into tensors of the caller; None where a page did not come."""
        into = list(target_locations or [])
        if len(into) != len(keys) or any(one is None for one in into):
            log.error("event=sglang_no_target pages=%d", len(keys))
            return [None] * len(keys)
        good = self._load(self._kv(), keys, into, prefix=True)
        return [one if ok else None for one, ok in zip(into, good, strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], [value])

    @_guarded(lambda _self, keys: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store pages from tensors of the caller; True when all are stored."""
        pages = list(values or [])
        if len(pages) != len(keys) or any(one is None for one in pages):
            log.error("event=sglang_no_value pages=%d", len(keys))
            return False
        return all(self._save(self._kv(), keys, [page.contiguous() for page in pages]))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # The rest ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """This engine finds nothing any more of what was stored before, by itself or by others.

        Nothing is dropped: other hosts use these blocks. `entresol tenant erase` erases a tenant.
        With `on_reset` "keep" nothing happens, with "off" it uses the storage no more.
        """
        if self._settings.on_reset == "keep":
            log.warning("event=sglang_clear_ignored reason='on_reset is keep'")
            return
        if self._settings.on_reset == "off":
            for pool in self._pools.values():
                pool.space = None
            log.warning("event=sglang_off reason='its storage was cleared' hint='on_reset'")
            return
        self._clears += 1
        epoch = naming.new_epoch()
        for pool in self._pools.values():
            # What one rank writes for all, all must look for under one name.
            pool.epoch = epoch if self._sharded(pool) else naming.common_epoch(self._clears)
        log.warning("event=sglang_begins_anew reason='its storage was cleared' hint='on_reset'")

    def get_stats(self) -> Any | None:
        """SGLang's own StorageMetrics since the last call; None when it did not ask for metrics."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loaded, stored = list(self._loaded), list(self._stored)
            self._loaded.clear()
            self._stored.clear()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loaded],
            backup_pgs=[pages for pages, _ in stored],
            prefetch_bandwidth=[rate for _, rate in loaded],
            backup_bandwidth=[rate for _, rate in stored],
        )

    def counters(self) -> dict[str, int]:
        """Entresol's own counters, see `EngineStore.stats`."""
        return self._store.stats()

    def close(self) -> None:
        """End the sessions; after it nothing lands in any pool. Idempotent."""
        self._store.close()

    # Inside ------------------------------------------------------------------------------------

    def _kv(self) -> PagePool:
        """Raises: ConfigError before a host pool was registered."""
        pool = self._pools.get(names.KV)
        if pool is None:
            raise ConfigError("no host pool was registered")
        return pool

    def _present(self, pool: PagePool, hashes: Sequence[str]) -> list[bool]:
        if pool.space is None or not hashes:
            return [pool.holds_nothing] * len(hashes)
        keys = pool.keys(hashes)
        run = Run(range(len(keys)), len(hashes) * pool.space.descriptor.block_tokens)
        return pool.of_pages(pool.space.lookup(keys, [run]).result())

    def _get(
        self, pool: PagePool | None, hashes: list[str], indices: Any, *, prefix: bool = False
    ) -> list[bool]:
        if pool is None or pool.space is None or not hashes or not pool.fits(hashes, indices):
            return [pool is not None and pool.holds_nothing] * len(hashes)
        targets = pool.targets(indices)
        good = self._load(pool, hashes, targets, prefix=prefix)
        pool.place(indices, targets, good)
        return good

    def _set(self, pool: PagePool | None, hashes: list[str], indices: Any) -> list[bool]:
        if pool is None or pool.space is None or not hashes or not pool.fits(hashes, indices):
            return [pool is not None and pool.holds_nothing] * len(hashes)
        if not self._writes(pool):
            return [True] * len(hashes)
        return self._save(pool, hashes, pool.sources(indices))

    def _writes(self, pool: PagePool) -> bool:
        """Of a pool that all tensor-parallel ranks hold alike, one writes."""
        writer = getattr(self._config, "is_storage_writer", self._config.tp_rank == 0)
        return bool(writer) or self._sharded(pool)

    def _sharded(self, pool: PagePool) -> bool:
        """Whether each rank has other bytes, and a namespace of its own."""
        return names.is_sharded(pool.name, pool.described, bool(self._config.is_mla_model))

    def _load(
        self, pool: PagePool, hashes: Sequence[str], into: Buffers, *, prefix: bool
    ) -> list[bool]:
        assert pool.space is not None
        keys = pool.keys(hashes)
        if len(keys) != len(into):
            log.error("event=sglang_not_whole_pages pool=%s", pool.name)
            return [False] * len(hashes)
        reply = pool.space.load(keys, into, prefix=prefix).result()
        self._measure(self._loaded, len(hashes), reply.bytes_loaded, reply.seconds)
        return pool.of_pages([status is Status.OK for status in reply.statuses])

    def _save(self, pool: PagePool, hashes: Sequence[str], buffers: Buffers) -> list[bool]:
        assert pool.space is not None
        keys = pool.keys(hashes)
        if len(keys) != len(buffers):
            log.error("event=sglang_not_whole_pages pool=%s", pool.name)
            return [False] * len(hashes)
        blocks = [PutBlock(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        reply = pool.space.store(blocks).result()
        self._measure(self._stored, len(hashes), reply.bytes_stored, reply.seconds)
        stored = (Status.OK, Status.EXISTS)
        return pool.of_pages([status in stored for status in reply.statuses])

    def _measure(
        self, where: deque[tuple[int, float]], pages: int, length_bytes: int, seconds: float
    ) -> None:
        if self._config.enable_storage_metrics and length_bytes:
            with self._lock:
                where.append((pages, length_bytes / GB / max(seconds, 1e-9)))


def _leading(present: Sequence[bool]) -> int:
    return list(present).index(False) if False in present else len(present)


def _stops(transfer: PoolTransfer, present: Sequence[bool]) -> set[int]:
    """The prefix lengths, in pages, at which this pool has what its policy asks for."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(present) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        lengths = range(1, len(present) + 1)
        return {n for n in lengths if all(present[max(0, n - window) : n])}
    log.error("event=sglang_policy_unknown policy=%s", transfer.hit_policy)
    return set()


def _version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"


def _server_args() -> Any:
    """The engine's own arguments; None where there are none, or SGLang keeps them elsewhere."""
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),  # before 0.5.20 or so
    ):
        try:
            found = getattr(importlib.import_module(module), name)()
        except Exception as error:  # not there, not yet set, or retired: each version has its own
            log.warning("event=sglang_arguments_unknown where=%s reason=%s", module, error)
            continue
        if found is not None:
            return found
    return None


def _check_fit(args: Any, settings: EngineSettings, multimodal: str) -> None:
    """Refuse an engine whose pages could differ under one name. Raises: ConfigError."""
    if args is None and not (settings.model_revision and settings.weights not in ("auto", "off")):
        raise ConfigError(
            "this version of SGLang does not show a storage the engine's own arguments",
            hint="set model_revision, and weights to a text: they stand for the model, its dtype "
            "and whatever else of the command line shapes its KV",
        )
    names.check_weights(args, settings.weights)
    if multimodal not in ("", "accept"):
        raise ConfigError(f"multimodal is {multimodal!r}", hint='leave it out, or "accept"')
    if not multimodal and names.is_multimodal(args):
        raise ConfigError(
            "SGLang names an image by 64 bits that its request may choose (mm_hashes): who chooses "
            "those of another's gets its KV, or gives it away",
            hint='set multimodal to "accept" where callers are trusted',
        )
