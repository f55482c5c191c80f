"""Settings of what the daemon tells of its work, besides metrics: log and traces."""

# ruff: noqa: RUF009 - `setting` returns dataclasses.field(...), not a shared default.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from entresol_daemon.config_values import setting


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs go to standard error."""

    level: str = setting(
        "info", "Least severe level written.", choices=("debug", "info", "warning", "error")
    )
    format: str = setting(
        "kv", "Lines of key=value, or a JSON object a line.", choices=("kv", "json")
    )


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """OpenTelemetry spans of requests, sent over OTLP to a collector on this machine."""

    socket: Path | None = setting(
        None, "UNIX socket of the collector's OTLP/gRPC receiver; left out: no traces."
    )
    sample: float = setting(0.01, "Share of the requests that are traced.", low=0.0, high=1.0)
