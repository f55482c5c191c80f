"""What work waits for, seen over a while: so that the choice of a codec knows what is short.

Invariant: pure arithmetic on what `sample` is told; no clock. A resource counts as short only after
work waited for it in most of the last looks, and until it hardly ever did: a burst changes nothing,
and neither does the pause between two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from entresol_proto.seal.meter import Load

KEPT = 0.95  # of what is believed, from one look to the next: some 20 looks count
SHORT_FROM = 0.6  # of the looks
SHORT_UNTIL = 0.2


@dataclass(frozen=True, slots=True)
class Waiting:
    """What work waits for at one moment."""

    sealing: bool = False  # sealing and opening threads
    flash_reads: bool = False
    flash_writes: bool = False
    room: bool = False  # blocks are evicted for others


@dataclass(slots=True)
class _Share:
    """Of the looks that found something waiting."""

    share: float = 0.0
    short: bool = False

    def sample(self, waits: bool) -> None:
        self.share = self.share * KEPT + waits * (1 - KEPT)
        self.short = self.share >= (SHORT_UNTIL if self.short else SHORT_FROM)


@dataclass(slots=True)
class Pressure:
    """Of one shard."""

    seal_threads: int
    _sealing: _Share = field(default_factory=_Share)
    _flash_reads: _Share = field(default_factory=_Share)
    _flash_writes: _Share = field(default_factory=_Share)
    _room: _Share = field(default_factory=_Share)
    _read_bytes_per_s: float = 0.0
    _write_bytes_per_s: float = 0.0

    def sample(
        self, waiting: Waiting, *, read_bytes_per_s: float, write_bytes_per_s: float
    ) -> None:
        """A look, at regular times; the speeds are those of the flash, as measured lately."""
        self._sealing.sample(waiting.sealing)
        self._flash_reads.sample(waiting.flash_reads)
        self._flash_writes.sample(waiting.flash_writes)
        self._room.sample(waiting.room)
        self._read_bytes_per_s = read_bytes_per_s
        self._write_bytes_per_s = write_bytes_per_s

    def load(self) -> Load:
        """What is short now."""
        return Load(
            flash_read_bytes_per_s=self._read_bytes_per_s if self._flash_reads.short else 0.0,
            flash_write_bytes_per_s=self._write_bytes_per_s if self._flash_writes.short else 0.0,
            seal_threads=self.seal_threads if self._sealing.short else 0,
            full=self._room.short,
        )
