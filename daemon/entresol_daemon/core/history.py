"""Why blocks went away: a bounded memory for EXPLAIN. Pure.

Invariants: at most `entries_max` rows; the oldest of the owner with most rows are forgotten first,
after which a key reads as never stored, which is what the documentation says. So an owner that has
no more than its equal share forgets nothing because of others, and hears nothing of them by it.
"""

from __future__ import annotations

from collections import OrderedDict

from entresol_proto.wire.data import Reason

_Place = tuple[bytes, bytes]
FORGOTTEN_SHIFT = 6  # so much of an owner's rows is forgotten together: finding it takes a while


class History:
    """(namespace id, wire key) -> (reason, Unix ns) of recent removals and refusals."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._rows: dict[_Place, tuple[Reason, int, bytes]] = {}
        self._of: dict[bytes, OrderedDict[_Place, None]] = {}  # by owner, the oldest first

    def __len__(self) -> int:
        return len(self._rows)

    def record(
        self, namespace_id: bytes, key: bytes, reason: Reason, unix_ns: int, owner: bytes = b""
    ) -> None:
        """Remember the newest reason for a key of this owner."""
        place = (namespace_id, key)
        self._drop(place)
        self._rows[place] = (reason, unix_ns, owner)
        self._of.setdefault(owner, OrderedDict())[place] = None
        if len(self._rows) > self._entries_max:
            most = max(self._of.values(), key=len)
            for _ in range(max(1, len(most) >> FORGOTTEN_SHIFT)):
                self._drop(next(iter(most)))

    def forget(self, namespace_id: bytes, key: bytes) -> tuple[Reason, int]:
        """The block is stored again; returns what `why` said until now."""
        before = self.why(namespace_id, key)
        self._drop((namespace_id, key))
        return before

    def why(self, namespace_id: bytes, key: bytes) -> tuple[Reason, int]:
        """The newest reason, or NEVER_STORED at time 0."""
        found = self._rows.get((namespace_id, key))
        return (Reason.NEVER_STORED, 0) if found is None else found[:2]

    def _drop(self, place: _Place) -> None:
        row = self._rows.pop(place, None)
        if row is not None:
            mine = self._of[row[2]]
            del mine[place]
            if not mine:
                del self._of[row[2]]
