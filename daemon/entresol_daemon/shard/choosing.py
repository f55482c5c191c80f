"""Which codec the blocks of a namespace are sealed with under `auto`. No I/O, no clock.

What a codec costs is known from the bench, what it saves depends on the model: so the constants
decide first, and then what the blocks of the namespace really became, and how fast this machine
sealed them. Of what lies between a writer and a reader, the link and the reader's cores always
count; the flash and the sealing threads only while work waits for them (`pressure`). So on an idle
machine behind a fast link blocks stay raw, and so they do on one host, where the link is memory and
never counts. While blocks are evicted a ratio counts twice: it is
also what is kept for longer.

A change must promise BETTER_PERCENT, so that two codecs that are nearly equal do not alternate.
Every RETRY_CHOICES choices what was learned is forgotten: data changes, and a codec that is not
used is not measured. A choice is made when a session opens a namespace, and holds for the session.

Invariant: the choice costs or saves time and space, never bytes: every block names its own codec.
At most PLACES_MAX namespaces and dtypes are remembered, once a block of them is stored: to ask
leaves no trace. Who has most of them forgets first, so that no tenant loses what was learned of it
because of others (`shares`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from entresol_daemon.shard.pressure import Pressure
from entresol_proto.limits import MIB
from entresol_proto.seal import codecs
from entresol_proto.seal.bypass import Bypass
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.meter import POLICY_AUTO, PlainRate, choose_codec, plain_rates
from entresol_proto.shares import Shares

log = logging.getLogger("entresol.codec")

PLACES_MAX = 1024
SAME_HOST_BYTES_PER_S = 10**12  # memory: so that something else bounds
BETTER_PERCENT = 10
RATIO_MIN = 1.03  # below it blocks are stored raw anyway
RETRY_CHOICES = 64
LEARN_BYTES_MIN = 4 * 1024 * 1024  # of a codec's blocks, before their ratio counts
LEARN_BYTES_MAX = 1024 * 1024 * 1024  # then older blocks count half


@dataclass(slots=True)
class _Sealed:
    """Plain bytes and nanoseconds of one dtype and codec."""

    plain_bytes: int = 0
    elapsed_ns: int = 0

    def add(self, plain_bytes: int, elapsed_ns: int) -> None:
        if self.plain_bytes > LEARN_BYTES_MAX:
            self.plain_bytes //= 2
            self.elapsed_ns //= 2
        self.plain_bytes += plain_bytes
        self.elapsed_ns += elapsed_ns


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a session's blocks. `why`: "policy" (configured), or what is
    slowest with it: "link", "opening", "flash_reads", "flash_writes" or "sealing"."""

    codec_id: int
    why: str


@dataclass(slots=True)
class _Place:
    """One namespace and dtype: plain and stored bytes by the codec that was asked for."""

    chosen: Choice | None = None  # last
    choices: int = 0
    totals: dict[int, list[int]] = field(default_factory=dict)

    def ratios(self) -> dict[int, float]:
        return {
            codec_id: plain / stored
            for codec_id, (plain, stored) in self.totals.items()
            if plain >= LEARN_BYTES_MIN and stored
        }


class CodecChooser:
    """Of one shard. `on_choice` is told every choice: codec id and why."""

    def __init__(
        self,
        *,
        policy: str,
        link_bytes_per_s: int,
        seal_threads: int = 1,
        on_choice: Callable[[int, str], None] = lambda codec_id, why: None,
    ) -> None:
        self._policy = policy
        self._on_choice = on_choice
        self._link_bytes_per_s = link_bytes_per_s
        self.pressure = Pressure(seal_threads)
        self._speeds: dict[tuple[DType, int], _Sealed] = {}
        self._places: Shares[tuple[bytes, DType], _Place] = Shares(PLACES_MAX, _Place)
        self.bypass = Bypass()

    def learn(
        self, tenant: str, namespace_id: bytes, dtype: DType, choice: Choice, plain_bytes: int,
        stored_bytes: int,
    ) -> None:  # fmt: skip
        """A block that was to be sealed as chosen was stored; raw after all, if it did not
        shrink."""
        place = self._places.use(tenant, (namespace_id, dtype))
        if place.chosen is None:
            place.chosen = choice
        totals = place.totals.setdefault(choice.codec_id, [0, 0])
        if totals[0] > LEARN_BYTES_MAX:
            totals[:] = [total // 2 for total in totals]
        totals[0] += plain_bytes
        totals[1] += stored_bytes

    def sealed(
        self, tenant: str, namespace_id: bytes, dtype: DType, tried: int, became: int,
        plain_bytes: int, elapsed_ns: int,
    ) -> None:  # fmt: skip
        """A block was sealed here, in so much time of one thread."""
        self.bypass.learn(namespace_id, dtype, tried, became, tenant)
        if tried == became:
            self._speeds.setdefault((dtype, tried), _Sealed()).add(plain_bytes, elapsed_ns)

    def _seal_speeds(self, dtype: DType) -> dict[int, float]:
        """Of the codecs that sealed enough here; at most dtypes times codecs are remembered."""
        return {
            codec_id: sealed.plain_bytes / sealed.elapsed_ns * 1e9
            for (of_dtype, codec_id), sealed in self._speeds.items()
            if of_dtype is dtype and sealed.plain_bytes >= LEARN_BYTES_MIN and sealed.elapsed_ns
        }

    def choose(
        self, tenant: str, namespace_id: bytes, dtype: DType, *, same_host: bool, open_threads: int
    ) -> Choice:
        """The codec of a session's blocks. Raises: ConfigError for an unknown policy."""
        place = self._places.of(tenant).get((namespace_id, dtype))
        if place is not None:  # of those that are known the most recently used
            self._places.use(tenant, (namespace_id, dtype))
        if self._policy == POLICY_AUTO:
            choice = self._choose(tenant, namespace_id, dtype, place, same_host, open_threads)
        else:
            choice = Choice(choose_codec(
                same_host=same_host, link_bytes_per_s=self._link_bytes_per_s,
                open_threads=open_threads, dtype=dtype, policy=self._policy,
            ), "policy")  # fmt: skip
        if place is not None:
            place.chosen = choice
        self._on_choice(choice.codec_id, choice.why)
        return choice

    def latest(self, tenant: str) -> Mapping[bytes, Choice]:
        """What was chosen last for the namespaces of a tenant that are remembered."""
        found = self._places.of(tenant).items()
        return {key[0]: place.chosen for key, place in found if place.chosen is not None}

    def in_use(self) -> Iterator[tuple[DType, int]]:
        """The dtype and the codec id of everything that is remembered, of all tenants."""
        for (_, dtype), place in self._places:
            if place.chosen is not None:
                yield dtype, place.chosen.codec_id

    def forget(self, tenant: str) -> None:
        """The tenant was erased."""
        self._places.forget(tenant)
        self.bypass.forget(tenant)

    def _choose(
        self, tenant: str, namespace_id: bytes, dtype: DType, place: _Place | None,
        same_host: bool, open_threads: int,
    ) -> Choice:  # fmt: skip
        """Of one that is not remembered, by the constants."""
        ratios: dict[int, float] = {}
        kept: int | None = None
        if place is not None:
            kept = None if place.chosen is None else place.chosen.codec_id
            place.choices += 1
            if place.choices % RETRY_CHOICES == 0:
                place.totals.clear()
            ratios = place.ratios()
        load = self.pressure.load()
        found = plain_rates(
            link_bytes_per_s=SAME_HOST_BYTES_PER_S if same_host else self._link_bytes_per_s,
            open_threads=open_threads, dtype=dtype, ratios=ratios, load=load,
            seal_speeds=self._seal_speeds(dtype),
        )  # fmt: skip
        decided = decide(found, kept, full=load.full)
        bound = found[decided].bound.replace(" ", "_")
        if decided != kept:
            # The tenant first, by which floods are told apart; a first choice is no news.
            log.log(
                logging.DEBUG if kept is None else logging.INFO,
                "event=codec tenant=%s namespace=%s dtype=%s codec=%s bound=%s mib_per_s=%.0f "
                "full=%s",
                tenant, namespace_id.hex()[:8], dtype.label, codecs.get(decided).name,
                bound, found[decided].plain_per_s / MIB, load.full,
            )  # fmt: skip
        return Choice(decided, bound)


def decide(found: Mapping[int, PlainRate], kept: int | None, *, full: bool) -> int:
    """The codec of what each promises; `kept` is the one so far, which stays unless another is
    better by BETTER_PERCENT, in speed or in ratio at no less speed. Pure."""

    def worth(codec_id: int) -> tuple[float, float]:
        rate = found[codec_id]
        return rate.plain_per_s * (rate.ratio if full else 1.0), rate.ratio

    worthy = [one for one in found if one == codecs.RAW or found[one].ratio >= RATIO_MIN]
    best = max(reversed(worthy), key=worth)  # of equals the denser
    if kept is None or kept not in worthy:
        return best
    more = 100 + BETTER_PERCENT
    if any(new * 100 > old * more for new, old in zip(worth(best), worth(kept), strict=True)):
        return best
    return kept
