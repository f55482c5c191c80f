"""Counters of one client: what came from where, what missed and why.

Invariant: each block of each get and put is counted exactly once, under its final status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from entresol_proto.status import Status
from entresol_proto.wire.data import Tier


class ClientStats:
    """Plain counters, touched from the client's event loop only."""

    __slots__ = (
        "breaker_openings", "connects", "disconnects", "get_plain_bytes", "get_wire_bytes",
        "gets", "hits", "late_grants", "misses", "put_plain_bytes", "put_statuses",
        "put_wire_bytes", "puts",
    )  # fmt: skip

    def __init__(self) -> None:
        self.gets = 0
        self.puts = 0
        self.hits: Counter[Tier] = Counter()
        self.misses: Counter[Status] = Counter()
        self.put_statuses: Counter[Status] = Counter()
        self.get_plain_bytes = 0
        self.get_wire_bytes = 0
        self.put_plain_bytes = 0
        self.put_wire_bytes = 0
        self.late_grants = 0  # leases that came after their request had been given up
        self.connects = 0
        self.disconnects = 0
        self.breaker_openings = 0

    def count_get(self, statuses: Iterable[Status], tiers: Iterable[Tier]) -> None:
        """Count the blocks of one finished get."""
        self.gets += 1
        for status, tier in zip(statuses, tiers, strict=True):
            if status is Status.OK:
                self.hits[tier] += 1
            else:
                self.misses[status] += 1

    def as_dict(self) -> dict[str, Any]:
        """A snapshot with stable names; ratios are plain over wire bytes, None before any."""
        return {
            "gets": self.gets,
            "puts": self.puts,
            "hits": {tier.label: count for tier, count in self.hits.items()},
            "misses": {status.label: count for status, count in self.misses.items()},
            "put_blocks": {status.label: count for status, count in self.put_statuses.items()},
            "corrupt": self.misses[Status.CORRUPT],
            "get_plain_bytes": self.get_plain_bytes,
            "get_wire_bytes": self.get_wire_bytes,
            "get_ratio": _ratio(self.get_plain_bytes, self.get_wire_bytes),
            "put_plain_bytes": self.put_plain_bytes,
            "put_wire_bytes": self.put_wire_bytes,
            "put_ratio": _ratio(self.put_plain_bytes, self.put_wire_bytes),
            "late_grants": self.late_grants,
            "connects": self.connects,
            "disconnects": self.disconnects,
            "breaker_openings": self.breaker_openings,
        }


def _ratio(plain_bytes: int, wire_bytes: int) -> float | None:
    return round(plain_bytes / wire_bytes, 4) if wire_bytes else None
