"""Tells `core.valuing` of the blocks of an engine: stored, used, evicted. The hands of eviction by
worth; with `[flash] eviction = "median"` there is nothing to tell, and no memory is taken.

Invariant: a tenant's blocks are told under the stream of the segment that they are in, whoever
stored or read them, so that what is learned is of those who pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.eviction import Choosers
from entresol_daemon.core.valuing import Standing, Values
from entresol_daemon.core.worth import U64
from entresol_daemon.core.worth_ranking import Columns
from entresol_daemon.flash.engine import Engine
from entresol_daemon.flash.index import Slots


class Valued:
    """Of a shard. `policy`: "median" or "worth"."""

    def __init__(self, engine: Engine, policy: str) -> None:
        self._engine = engine
        self._values: Values | None = None
        if policy == "worth":
            self._values = Values(engine.index.capacity, engine.segment_slots, self._columns)

    @property
    def choosers(self) -> Choosers | None:
        """For `choose_victim`."""
        return None if self._values is None else self._values.ranking

    def stored(self, slots: Sequence[int]) -> None:
        """New blocks, touched just now."""
        if self._values is not None:
            for stream, mine in self._by_stream(slots):
                self._values.stored(stream, mine, self._keys(mine), self._engine.index.now_touch)

    def used(self, slots: Sequence[int]) -> None:
        """Blocks that a host was given, touched just now."""
        if self._values is not None:
            for stream, mine in self._by_stream(slots):
                self._values.used(stream, mine, self._keys(mine), self._engine.index.now_touch)

    def keep(self, stream: bytes, slots: Slots, room_bytes: int) -> npt.NDArray[np.bool_] | None:
        """Which of a victim's blocks are written again; None where `keep_blocks` is to say it."""
        keeper = self._values.keeper(stream) if self._values is not None else None
        if keeper is None:
            return None
        now = self._engine.index.now_touch
        return keeper.keep(self._columns(slots), now_touch=now, room_bytes=room_bytes)

    def evicted(self, stream: bytes, slots: Slots) -> None:
        """These are about to leave the index."""
        if self._values is not None and len(slots):
            self._values.evicted(stream, slots, self._keys(slots), self._columns(slots))

    def report(self) -> list[Standing]:
        """Of each tenant that is learned of."""
        return [] if self._values is None else self._values.report()

    def forget(self, stream: bytes) -> None:
        """A tenant is erased."""
        if self._values is not None:
            self._values.forget(stream)

    def _by_stream(self, slots: Sequence[int]) -> list[tuple[bytes, Slots]]:
        chosen = np.asarray(slots, np.int64)
        if not len(chosen):
            return []
        numbers = self._engine.index.segment[chosen]
        streams = {
            each: self._engine.segment_info(each).stream for each in np.unique(numbers).tolist()
        }
        distinct = sorted(set(streams.values()))
        if len(distinct) == 1:
            return [(distinct[0], chosen)]
        which = np.asarray([distinct.index(streams[each]) for each in numbers.tolist()])
        return [(stream, chosen[which == at]) for at, stream in enumerate(distinct)]

    def _keys(self, slots: Slots) -> U64:
        return self._engine.index.key_columns()[0][slots]

    def _columns(self, slots: Slots) -> Columns:
        index = self._engine.index
        assert self._values is not None, "columns are for eviction by worth"
        return Columns(
            index.last_touch[slots], self._values.uses[slots], index.position[slots],
            index.sealed_bytes[slots],
        )  # fmt: skip
