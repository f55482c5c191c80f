"""Which codec the blocks of a namespace are sealed with under `auto`. No I/O, no clock.

What a codec costs is known from the bench, what it saves depends on the model: so the constants
decide first, and then what the blocks of the namespace really became. A change must promise
BETTER_PERCENT, so that two codecs that are nearly equal do not alternate. Every RETRY_CHOICES
choices what was learned is forgotten: data changes, and a codec that is not used is not measured.

Invariant: the choice costs or saves time and space, never bytes: every block names its own codec.
At most PLACES_MAX namespaces and dtypes are remembered, those that were asked for last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from entresol_proto.seal import codecs
from entresol_proto.seal.bypass import Bypass
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.meter import POLICY_AUTO, choose_codec, plain_rates

PLACES_MAX = 1024
BETTER_PERCENT = 10
RATIO_MIN = 1.03  # below it blocks are stored raw anyway
RETRY_CHOICES = 64
LEARN_BYTES_MIN = 4 * 1024 * 1024  # of a codec's blocks, before their ratio counts
LEARN_BYTES_MAX = 1024 * 1024 * 1024  # then older blocks count half


@dataclass(slots=True)
class _Place:
    """One namespace and dtype: plain and stored bytes by the codec that was asked for."""

    chosen: int | None = None
    choices: int = 0
    totals: dict[int, list[int]] = field(default_factory=dict)

    def ratios(self) -> dict[int, float]:
        return {
            codec_id: plain / stored
            for codec_id, (plain, stored) in self.totals.items()
            if plain >= LEARN_BYTES_MIN and stored
        }


class CodecChooser:
    """Of one shard."""

    def __init__(self, *, policy: str, link_bytes_per_s: int) -> None:
        self._policy = policy
        self._link_bytes_per_s = link_bytes_per_s
        self._places: dict[tuple[bytes, DType], _Place] = {}
        self.bypass = Bypass()

    def _place(self, namespace_id: bytes, dtype: DType) -> _Place:
        place = self._places.pop((namespace_id, dtype), None) or _Place()
        self._places[namespace_id, dtype] = place
        if len(self._places) > PLACES_MAX:
            del self._places[next(iter(self._places))]
        return place

    def learn(
        self, namespace_id: bytes, dtype: DType, codec_id: int, plain_bytes: int, stored_bytes: int
    ) -> None:
        """A block that was to be sealed with `codec_id` was stored; raw after all, if it did not
        shrink."""
        totals = self._place(namespace_id, dtype).totals.setdefault(codec_id, [0, 0])
        if totals[0] > LEARN_BYTES_MAX:
            totals[:] = [total // 2 for total in totals]
        totals[0] += plain_bytes
        totals[1] += stored_bytes

    def choose(
        self, namespace_id: bytes, dtype: DType, *, same_host: bool, open_threads: int
    ) -> int:
        """The codec id for a session's blocks. Raises: ConfigError for an unknown policy."""
        link = self._link_bytes_per_s
        if self._policy != POLICY_AUTO or same_host:
            return choose_codec(
                same_host=same_host, link_bytes_per_s=link, open_threads=open_threads,
                dtype=dtype, policy=self._policy,
            )  # fmt: skip
        place = self._place(namespace_id, dtype)
        place.choices += 1
        if place.choices % RETRY_CHOICES == 0:
            place.totals.clear()
        found = plain_rates(
            link_bytes_per_s=link, open_threads=open_threads, dtype=dtype, ratios=place.ratios()
        )
        found = {
            codec_id: rate
            for codec_id, rate in found.items()
            if codec_id == codecs.RAW or rate.ratio >= RATIO_MIN
        }
        best = max(found, key=lambda codec_id: found[codec_id])
        kept = place.chosen
        if (
            kept is None
            or kept not in found
            or found[best].plain_per_s * 100 > found[kept].plain_per_s * (100 + BETTER_PERCENT)
            or found[best].ratio * 100 > found[kept].ratio * (100 + BETTER_PERCENT)
        ):
            place.chosen = best
        assert place.chosen is not None
        return place.chosen
