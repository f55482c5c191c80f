"""Why blocks went away: a bounded memory for EXPLAIN. Pure.

Invariant: at most `entries_max` rows; the oldest are forgotten first, after which a key reads as
never stored, which is what the documentation says.
"""

from __future__ import annotations

from collections import OrderedDict

from entresol_proto.wire.data import Reason


class History:
    """(namespace id, wire key) -> (reason, Unix ns) of recent removals and refusals."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._rows: OrderedDict[tuple[bytes, bytes], tuple[Reason, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, namespace_id: bytes, key: bytes, reason: Reason, unix_ns: int) -> None:
        """Remember the newest reason for a key."""
        place = (namespace_id, key)
        self._rows[place] = (reason, unix_ns)
        self._rows.move_to_end(place)
        if len(self._rows) > self._entries_max:
            self._rows.popitem(last=False)

    def forget(self, namespace_id: bytes, key: bytes) -> tuple[Reason, int]:
        """The block is stored again; returns what `why` said until now."""
        return self._rows.pop((namespace_id, key), (Reason.NEVER_STORED, 0))

    def why(self, namespace_id: bytes, key: bytes) -> tuple[Reason, int]:
        """The newest reason, or NEVER_STORED at time 0."""
        return self._rows.get((namespace_id, key), (Reason.NEVER_STORED, 0))
