"""The connector class against KVBM's and vLLM's real ones: what they ask, what it tells them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm.vllm_integration.connector import DynamoConnector, DynamoConnectorMetadata
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from entresol_client.engines import kvbm
from entresol_client.engines.kvbm_plan import StepPlan
from entresol_client.engines.kvbm_stats import COUNTERS, PREFIX, Differences, TierMetrics, TierStats
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "client" / "KVBM.md"


def config(extra: dict[str, Any], policy: str = "recompute") -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="EntresolDynamoConnector",
            kv_connector_module_path="entresol_client.engines.kvbm",
            kv_connector_extra_config=extra,
            kv_load_failure_policy=policy,
            engine_id="e",
        )
    )


def test_vllm_finds_it_and_pd_connector_would_take_it() -> None:
    found = KVConnectorFactory.get_connector_class(config({}).kv_transfer_config)
    assert found is kvbm.EntresolDynamoConnector
    assert issubclass(found, DynamoConnector)
    assert not inspect.isabstract(found)


OVERRIDDEN = [
    name
    for name, value in vars(kvbm.EntresolDynamoConnector).items()
    if inspect.isfunction(value) and hasattr(KVConnectorBase_V1, name) and name != "__init__"
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_it_overrides_takes_what_vllm_gives(name: str) -> None:
    mine = inspect.signature(getattr(kvbm.EntresolDynamoConnector, name))
    assert [*mine.parameters] == [*inspect.signature(getattr(KVConnectorBase_V1, name)).parameters]


def test_its_metadata_is_kvbms_to_kvbm() -> None:
    made = kvbm.EntresolConnectorMetadata(b"{}", StepPlan())
    assert isinstance(made, DynamoConnectorMetadata)
    assert made.metadata == b"{}"


def test_introductions_of_several_workers_come_together() -> None:
    one = kvbm.EntresolWorkerMetadata({(0, 0): NamespaceDescriptor("m", tp_rank=0, tp_world=2)})
    two = kvbm.EntresolWorkerMetadata({(0, 1): NamespaceDescriptor("m", tp_rank=1, tp_world=2)})
    assert one.aggregate(two).descriptors == {**one.descriptors, **two.descriptors}


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_wrong_setting_ends_the_start_before_kvbm_begins(role: KVConnectorRole) -> None:
    with pytest.raises(ConfigError, match="lookup_deadline_ms"):
        kvbm.EntresolDynamoConnector(config({"entresol": {"lookup_deadlin_ms": 3}}), role, None)
    with pytest.raises(ConfigError, match="kv_load_failure_policy"):
        kvbm.EntresolDynamoConnector(config({}, "fail"), role, None)


def test_reports_are_what_grew() -> None:
    since = Differences()
    assert since.take({"load_blocks": 3, "backlog_bytes": 9}) == {"load_blocks": 3}
    assert since.take({"load_blocks": 3}) == {}
    assert since.take({"load_blocks": 5, "stored_blocks": 1}) == {
        "load_blocks": 2, "stored_blocks": 1
    }  # fmt: skip


def test_reports_add_up() -> None:
    both = TierStats({"load_blocks": 2}).aggregate(TierStats({"load_blocks": 3, "shed_blocks": 1}))
    assert both.reduce() == {"entresol_load_blocks": 5, "entresol_shed_blocks": 1}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_prometheus_has_every_counter_and_the_page_names_it() -> None:
    registry = CollectorRegistry()

    def counter(*arguments: Any, **named: Any) -> Counter:
        return Counter(*arguments, registry=registry, **named)

    metrics = TierMetrics(
        config({}), {Counter: counter, Gauge: Gauge, Histogram: Histogram}, ["engine"], {0: ["0"]}
    )
    metrics.observe(dict.fromkeys(COUNTERS, 2) | {"unknown": 1})
    text = generate_latest(registry).decode()
    page = PAGE.read_text(encoding="utf-8")
    for name, about in COUNTERS.items():
        assert f'{PREFIX}{name}_total{{engine="0"}} 2.0' in text
        assert f"| `{PREFIX}{name}_total` | {about} |" in page
    assert len(re.findall(rf"^\| `{PREFIX}", page, re.M)) == len(COUNTERS)
