"""Where blocks do not shrink, most of them are not even looked at: random bytes, what is compressed
or encrypted already.

A codec finds out by a look at a few values, which is cheap, and still costs some percent of
sealing. So the outcomes of a namespace are remembered: after TRIES blocks in a row that stayed raw
one block is sealed raw without a look, after one more that stayed raw two are, then four, and so
on.

Invariant: of SKIPPED_MAX + 1 blocks in a row at least one is looked at, and one that shrinks ends
the skipping: data that shrink again are noticed within so many blocks. At most `places_max`
namespaces and dtypes are remembered, of each owner those that failed last; who has most of them
forgets first, so that no tenant's blocks are looked at anew because of others (`shares`).
"""

from __future__ import annotations

import threading

from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.shares import Shares

PLACES_MAX = 1024
TRIES = 4
SKIPPED_MAX = 64


class Bypass:
    """Of one daemon's shard, or one host's, which is its only owner. For use from any thread."""

    def __init__(self, *, places_max: int = PLACES_MAX) -> None:
        self._lock = threading.Lock()  # over what follows
        # Failed in a row, to be skipped.
        self._places: Shares[tuple[bytes, DType], list[int]] = Shares(places_max, lambda: [0, 0])
        self.skipped = 0  # blocks, ever

    def codec(self, namespace_id: bytes, dtype: DType, codec_id: int, owner: str = "") -> int:
        """What to seal the next block with where `codec_id` is asked for: that, or raw."""
        if codec_id == codecs.RAW or not self._places:
            return codec_id
        with self._lock:
            place = self._places.of(owner).get((namespace_id, dtype))
            if place is None or not place[1]:
                return codec_id
            place[1] -= 1
            self.skipped += 1
            return codecs.RAW

    def learn(
        self, namespace_id: bytes, dtype: DType, tried: int, became: int, owner: str = ""
    ) -> None:
        """A block that was to be sealed with the codec `tried` was sealed as `became`."""
        if tried == codecs.RAW or (became != codecs.RAW and not self._places):
            return
        with self._lock:
            if became != codecs.RAW:
                self._places.drop(owner, (namespace_id, dtype))
                return
            place = self._places.use(owner, (namespace_id, dtype))
            failed = place[0] + 1
            skipped = min(1 << min(failed - TRIES, 16), SKIPPED_MAX) if failed >= TRIES else 0
            place[:] = failed, skipped

    def forget(self, owner: str) -> None:
        """The tenant was erased."""
        with self._lock:
            self._places.forget(owner)
