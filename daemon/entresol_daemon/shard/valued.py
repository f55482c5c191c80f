"""Tells `core.valuing` of the blocks of an engine: stored, used, evicted. The hands of eviction by
worth; with `[flash] eviction = "median"` there is nothing to tell, and no memory is taken.

Invariants: a tenant's blocks are told under the stream of the segment that they are in, whoever
stored or read them, so that what is learned is of those who pay; before anything is chosen or goes,
all that was told is learned, or forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.eviction import Choosers
from entresol_daemon.core.valuing import Standing, Values
from entresol_daemon.core.worth import U64
from entresol_daemon.core.worth_ranking import Columns, WorthRanking
from entresol_daemon.flash.engine import Engine
from entresol_daemon.flash.index import Slots

log = logging.getLogger("entresol.eviction")

TOLD_TOGETHER = 256  # blocks: to learn of one costs as much as of a hundred


class Valued:
    """Of a shard. `policy`: "median" or "worth"."""

    def __init__(self, engine: Engine, policy: str) -> None:
        self._engine = engine
        self._values: Values | None = None
        self._told: list[int] = []  # slots of what is not learned yet, in order
        self._parts_told: list[tuple[int, int, bool]] = []  # of those: how many, last tick, put
        if policy == "worth":
            self._values = Values(engine.index.capacity, engine.segment_slots, self._columns)

    @property
    def choosers(self) -> Choosers | None:
        """For `choose_victim`."""
        return None if self._values is None else self._ranking

    def stored(self, slots: Sequence[int]) -> None:
        """New blocks, touched just now, in this order."""
        self._tell(slots, put=True)

    def used(self, slots: Sequence[int]) -> None:
        """Blocks that a host was given, touched just now, in this order."""
        self._tell(slots, put=False)

    def _tell(self, slots: Sequence[int], *, put: bool) -> None:
        if self._values is None or not slots:
            return
        self._told += slots
        self._parts_told.append((len(slots), self._engine.index.now_touch, put))
        if len(self._told) >= TOLD_TOGETHER:
            self.learn()

    def learn(self) -> None:
        """Have all learned that was told: also before a slot of it may be another block's. Where
        there is no memory for it nothing is learned of those: a removal must come to its end."""
        if not self._told:
            return
        try:
            self._learn()
        except MemoryError:
            log.warning("event=not_learned blocks=%d reason='no memory'", len(self._told))
        finally:
            self._told, self._parts_told = [], []

    def _learn(self) -> None:
        assert self._values is not None, "nobody learns"
        counts, ticks, puts = zip(*self._parts_told, strict=True)
        slots = np.asarray(self._told, np.int64)
        # Each was touched at a tick of its own: a request's first block is as much older.
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(slots))
        touch = np.repeat(np.asarray(ticks, np.int64), counts) - behind
        put = np.repeat(puts, counts)
        keys, numbers = self._keys(slots), self._engine.index.segment[slots].tolist()
        streams = {each: self._engine.stream_of(each) for each in set(numbers)}
        whose = [streams[each] for each in numbers]
        for stream in sorted(set(whose)):
            mine = np.asarray([each == stream for each in whose])
            self._values.told(stream, slots[mine], keys[mine], touch[mine], put[mine], ~put[mine])

    def _ranking(self, stream: bytes, live_blocks: int) -> WorthRanking | None:
        self.learn()
        assert self._values is not None, "nobody learns"
        return self._values.ranking(stream, live_blocks)

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
            self.learn()
            self._values.evicted(stream, slots, self._keys(slots), self._columns(slots))

    def report(self) -> list[Standing]:
        """Of each tenant that is learned of."""
        if self._values is None:
            return []
        self.learn()
        return self._values.report()

    def forget(self, stream: bytes) -> None:
        """A tenant is erased."""
        if self._values is not None:
            self.learn()
            self._values.forget(stream)

    def _keys(self, slots: Slots) -> U64:
        return self._engine.index.key_columns()[0][slots]

    def _columns(self, slots: Slots) -> Columns:
        index = self._engine.index
        assert self._values is not None, "columns are for eviction by worth"
        return Columns(
            index.last_touch[slots], self._values.uses[slots], index.position[slots],
            index.sealed_bytes[slots],
        )  # fmt: skip
