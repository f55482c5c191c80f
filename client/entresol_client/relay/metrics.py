"""A relay's Prometheus metrics, where prometheus-client is installed.

Invariant: reading them changes nothing, and labels are the configured pods and shards only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from entresol_client.cli.errors import CliError
from entresol_proto.status import Status

if TYPE_CHECKING:
    from entresol_client.relay.service import Relay

# Name, label or empty, what it says. Counters end in _total (the exposition adds it).
METRICS = (
    ("entresol_relay_announced_blocks", "", "blocks that readers were told of and not withdrawn"),
    ("entresol_relay_stored_blocks", "", "blocks that at least one rank has stored"),
    ("entresol_relay_waiting_blocks", "", "stored blocks that wait for a parent or a rank"),
    ("entresol_relay_shard_up", "shard", "1 while the shard is followed"),
    ("entresol_relay_readers", "pod", "subscriptions now"),
    ("entresol_relay_buffered_messages", "pod", "messages held for replay"),
    ("entresol_relay_events_total", "", "events taken from the daemon"),
    ("entresol_relay_rounds_total", "", "times that everything was told again"),
    (
        "entresol_relay_snapshots_total",
        "end",
        "snapshots of what a shard has stored, complete or cut short",
    ),
    ("entresol_relay_messages_total", "", "messages published, all workers together"),
    ("entresol_relay_announced_blocks_total", "", "blocks announced"),
    ("entresol_relay_withdrawn_blocks_total", "", "blocks withdrawn"),
    ("entresol_relay_skipped_blocks_total", "why", "blocks that could not be published"),
    ("entresol_relay_replays_total", "", "replay requests answered"),
    ("entresol_relay_replay_refused_total", "", "replay requests malformed, or not read"),
)
SKIPPED = (
    "tokenless", "parentless", "other_size", "salted", "dropped_waiting", "malformed", "nameless",
)  # fmt: skip


def values(relay: Relay) -> dict[str, dict[str, float]]:
    """Every metric's samples by label value ("" where there is no label)."""
    state = relay.latest
    blocks, counts = state["blocks"], state["counts"]
    return {
        "entresol_relay_announced_blocks": {"": blocks["announced"]},
        "entresol_relay_stored_blocks": {"": blocks["stored"]},
        "entresol_relay_waiting_blocks": {"": blocks["waiting"]},
        "entresol_relay_shard_up": {
            row["name"]: float(row["state"] == "up") for row in state["shards"]
        },
        "entresol_relay_readers": {row["pod"]: row["readers"] for row in state["workers"]},
        "entresol_relay_buffered_messages": {
            row["pod"]: row["buffered"] for row in state["workers"]
        },
        "entresol_relay_events_total": {"": state["events"]},
        "entresol_relay_rounds_total": {"": state["rounds"]},
        "entresol_relay_snapshots_total": state["snapshots"],
        "entresol_relay_messages_total": {"": counts.get("messages", 0)},
        "entresol_relay_announced_blocks_total": {"": counts.get("announced_blocks", 0)},
        "entresol_relay_withdrawn_blocks_total": {"": counts.get("withdrawn_blocks", 0)},
        "entresol_relay_skipped_blocks_total": {
            why: counts.get(f"{why}_blocks", 0) for why in SKIPPED
        },
        "entresol_relay_replays_total": {"": counts.get("replays", 0)},
        "entresol_relay_replay_refused_total": {"": counts.get("replay_refused", 0)},
    }


def serve(relay: Relay, host: str, port: int) -> Callable[[], None]:
    """Serve them on HTTP; returns what ends that. Raises: CliError."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise CliError(
            "metrics need prometheus-client, which is not installed",
            hint="pip install prometheus-client",
            status=Status.UNSUPPORTED,
        ) from None

    class Collector:
        """Builds the families when they are read."""

        def collect(self) -> Iterator[Any]:
            """One family per line of `METRICS`."""
            found = values(relay)
            for name, label, about in METRICS:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(name, about, labels=[label] if label else [])
                for value, sample in found[name].items():
                    family.add_metric([value] if label else [], sample)
                yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise CliError(
            f"cannot serve metrics at {host}:{port}: {error.strerror or error}",
            hint="give another --metrics",
            status=Status.CONFLICT,
        ) from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
