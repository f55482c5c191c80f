"""How likely a stored block is used again soon, learned from how blocks were used before. Pure.

Blocks are told apart by how often they were used (`uses`) and by their age, in ticks of the touch
clock since the last use. For each such class the ledger learns how many are used again at which
age, also after they were evicted, from a sample of all keys. The *worth* of a block is then the
most uses per tick of room that keeping it can yield: over every horizon, the chance of a use within
it by the ticks that the block would be held meanwhile (Gittins' index; LHD, NSDI'18, has a related
hit density). A chat's first turn is worth more when it is old enough that the answer is read; what
was used twice more than what never was; under equal decay of both this is LRU.

Invariants: all tables have the size they are made with (`LEDGER_BYTES`, `Ghosts.memory_bytes`);
nothing is kept of a key but 64 bits that are random already; one tenant's blocks teach nothing
about another's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.trial import Bools, Shadow, Trial, shadow_bytes

U64 = npt.NDArray[np.uint64]
U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CLASSES = 4  # uses: never since it was put, once, twice, more
BINS_PER_OCTAVE = 3
OCTAVES = 24  # ages of 16 million ticks and more are one
BINS = BINS_PER_OCTAVE * OCTAVES
LEDGER_ENTRIES = 32_768
LEDGER_BYTES = LEDGER_ENTRIES * (8 + 8 + 1) + 4 * CLASSES * BINS * 8 + shadow_bytes(LEDGER_ENTRIES)
TURNOVERS = 4  # an entry is overwritten after about as many times what the store holds
LEARN_EVERY = 1_024  # sampled events
DECAY = 1 - LEARN_EVERY / LEDGER_ENTRIES  # of what was learned, each time: it lasts like entries
PRIOR = 20.0  # blocks of the whole, mixed into every class
GHOST_TAG_BITS = 14
LEARNED_MIN = 4  # times, before anything is judged by worth
HOLES = 8_192  # batches of which it is remembered that they were cut

_EDGES: Floats = np.exp2(np.arange(BINS + 1) / BINS_PER_OCTAVE) - 1
_WIDTHS: Floats = np.diff(_EDGES)
_HORIZONS = np.triu_indices(BINS)  # from the start of one bin to the end of another
_TOUCH_BITS = 48  # ticks of the touch clock, for centuries
_MIX = np.uint64(0x9E3779B97F4A7C15)


def age_bin(age: npt.NDArray[np.integer]) -> Ints:
    """The bin of each age in ticks; the last one is open."""
    found: Ints = (BINS_PER_OCTAVE * np.log2(age + 1.0)).astype(np.int64)
    return np.minimum(found, BINS - 1)


def repeats(places: Ints) -> tuple[Ints, Ints]:
    """Which of these were there before, and where each of those was the last time."""
    order = np.argsort(places, kind="stable")
    same = np.flatnonzero(places[order[1:]] == places[order[:-1]])
    return order[same + 1], order[same]


def _histogram(classes: npt.NDArray[np.integer], bins: Ints) -> Floats:
    """How many are of each class and bin."""
    counts = np.bincount(classes.astype(np.int64) * BINS + bins, minlength=CLASSES * BINS)
    found: Floats = counts.reshape(CLASSES, BINS).astype(np.float64)
    return found


def yields(used: Floats, lost: Floats) -> Floats:
    """Worth per class and age bin: the most uses per tick of room over all horizons.

    `used` and `lost` count, per class and bin, blocks that were used at that age and blocks of
    which nothing is known beyond it.
    """

    def at_risk(u: Floats, x: Floats) -> Floats:
        total = u + x
        later: Floats = np.cumsum(total[..., ::-1], -1)[..., ::-1] - total
        return later + u + 0.5 * x

    whole = used.sum(0)
    pooled = whole / np.maximum(at_risk(whole, lost.sum(0)), 1e-9)
    hazard = (used + PRIOR * pooled) / (at_risk(used, lost) + PRIOR)
    decay = np.log1p(-np.minimum(hazard, 0.999))
    left = np.concatenate([np.zeros((len(used), 1)), np.cumsum(decay, 1)], 1)
    start, end = _HORIZONS
    alive = np.exp(left)
    # Room held from the start of the first bin to the end of the last, as seen from the very start.
    room = np.concatenate(
        [np.zeros((len(used), 1)), np.cumsum((alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTHS, 1)], 1
    )
    worth = np.full((len(used), BINS, BINS), 0.0)
    worth[:, start, end] = (alive[:, start] - alive[:, end + 1]) / np.maximum(
        room[:, end + 1] - room[:, start], 1e-300
    )
    found: Floats = worth.max(2)
    return found


class Ledger:
    """When a sample of one tenant's keys was used, whether stored or not. Direct-mapped: a new key
    takes the place of an old one, of which nothing more is known then."""

    def __init__(self) -> None:
        self._keys: U64 = np.zeros(LEDGER_ENTRIES, np.uint64)
        self._touch: U64 = np.zeros(LEDGER_ENTRIES, np.uint64)
        self._uses: U8 = np.zeros(LEDGER_ENTRIES, np.uint8)
        self._used: Floats = np.zeros((CLASSES, BINS))
        self._lost: Floats = np.zeros((CLASSES, BINS))
        self._worth: Floats = np.zeros((CLASSES, BINS))
        self._rank: Ints = np.zeros((CLASSES, BINS), np.int64)  # of each worth among all of them
        self._shift = 0  # a key in 2^shift is sampled
        self._live_blocks = 0
        self._events = 0
        self._lru_age = np.inf  # up to this age LRU would have kept a block
        self.learned = 0  # how often the worth was computed
        self.trial = Trial()
        self._shadow = Shadow(LEDGER_ENTRIES)

    @property
    def ready(self) -> bool:
        """True once there is something to judge by."""
        return self.learned >= LEARNED_MIN

    def fit(self, live_blocks: int) -> None:
        """So many blocks are stored: sample so that entries outlive TURNOVERS of them."""
        self._live_blocks = live_blocks
        want = max(0, (TURNOVERS * max(1, live_blocks) // LEDGER_ENTRIES).bit_length())
        if want > self._shift or want < self._shift - 1:
            self._shift = want
            self._keys[~self._sampled(self._keys)] = 0
            self._shadow.keep(self._keys != 0)

    def _sampled(self, keys: U64) -> npt.NDArray[np.bool_]:
        mask = np.uint64((1 << self._shift) - 1)
        found: npt.NDArray[np.bool_] = (keys & mask) == 0
        return found

    def note(self, keys: U64, uses: U8, touch: Ints, found: Bools) -> None:
        """These blocks were put (or, where `found`, given to a host) at these ticks, in order;
        `uses` says how often from here on."""
        chosen = self._sampled(keys)
        if not chosen.any():
            return
        keys, uses, touch, found = keys[chosen], uses[chosen], touch[chosen], found[chosen]
        now, given = int(touch[-1]), int(found.sum())
        at = ((keys * _MIX) >> np.uint64(64 - LEDGER_ENTRIES.bit_length() + 1)).astype(np.int64)
        there, last, used = self._keys[at], self._touch[at].astype(np.int64), self._uses[at]
        again, before = repeats(at)
        there[again], last[again], used[again] = keys[before], touch[before], uses[before]
        known = there == keys
        ages = touch - last
        classes, bins = np.minimum(used, CLASSES - 1), age_bin(np.maximum(ages, 0))
        self._used += _histogram(classes[known], bins[known])
        lost = ~known & (there != 0)
        self._lost += _histogram(classes[lost], bins[lost])
        kept = int((known & (ages <= self._lru_age)).sum())
        shadow = self._shadow.asked(at, known, again)
        self.trial.saw(given, kept, len(keys) - given, shadow)
        self._keys[at], self._touch[at], self._uses[at] = keys, touch, uses
        self._shadow.fit(self._room, lambda held, count: self._worth_least(held, count, now))
        self._events += len(keys)
        if self._events >= LEARN_EVERY:
            self._learn(now)

    @property
    def _room(self) -> int:
        """How many of the sampled blocks the store holds."""
        return self._live_blocks >> self._shift

    def _worth_least(self, held: Ints, count: int, now: int) -> Ints:
        """So many of these entries that are worth least; of equals, the oldest."""
        last = self._touch[held].astype(np.int64)
        bins = age_bin(np.maximum(now - last, 0))
        rank = self._rank[np.minimum(self._uses[held], CLASSES - 1), bins]
        if count >= len(held):
            return held
        found: Ints = held[np.argpartition((rank << _TOUCH_BITS) + last, count)[:count]]
        return found

    def _learn(self, now: int) -> None:
        self._events = 0
        held = np.flatnonzero(self._keys)
        ages = np.maximum(now - self._touch[held].astype(np.int64), 0)
        still = _histogram(np.minimum(self._uses[held], CLASSES - 1), age_bin(ages))
        self._worth = yields(self._used, self._lost + still)
        self._rank = np.unique(self._worth, return_inverse=True)[1].reshape(self._worth.shape)
        self._used *= DECAY
        self._lost *= DECAY
        would = self._room
        full = 0 < would < len(ages)  # else LRU would have lost nothing
        self._lru_age = float(np.partition(ages, would)[would]) if full else np.inf
        self.learned += 1
        if self.learned >= LEARNED_MIN and would:
            self.trial.judge(would)

    def worth(self, last_touch: U64, uses: U8, now: int) -> Floats:
        """Of stored blocks: uses per tick of room that they promise."""
        ages = np.maximum(now - last_touch.astype(np.int64), 0)
        found: Floats = self._worth[np.minimum(uses, CLASSES - 1), age_bin(ages)]
        return found


class Ghosts:
    """How often blocks that were evicted had been used, as far as one table of 16-bit entries
    remembers: `entries` (rounded up to a power of two) of the latest. Of 16,384 new blocks one is
    taken for an evicted one: it is then thought a little better of."""

    def __init__(self, entries: int) -> None:
        bits = max(4, (max(1, entries) - 1).bit_length())
        self._table: U16 = np.zeros(1 << bits, np.uint16)
        self._table.fill(0)  # pages are taken now, so that memory does not grow later
        self._at = np.uint64(64 - bits)

    @property
    def memory_bytes(self) -> int:
        return self._table.nbytes

    def _places(self, keys: U64) -> tuple[Ints, U16]:
        mixed = keys * _MIX
        tags = (keys >> np.uint64(64 - GHOST_TAG_BITS)).astype(np.uint16) << np.uint16(2)
        return (mixed >> self._at).astype(np.int64), tags

    def gone(self, keys: U64, uses: U8) -> None:
        """These were evicted."""
        at, tags = self._places(keys)
        self._table[at] = tags | np.minimum(uses, CLASSES - 1).astype(np.uint16)

    def uses(self, keys: U64) -> U8:
        """Of blocks that are put: 0 for new ones, else one more than when they were evicted."""
        at, tags = self._places(keys)
        found = self._table[at]
        known = ((found ^ tags) >> np.uint16(2) == 0) & (found != 0)
        before = (found & np.uint16(3)).astype(np.uint8) + np.uint8(1)
        return np.where(known, np.minimum(before, CLASSES - 1), 0).astype(np.uint8)


class Holes:
    """Where prefixes were cut: a block whose prefix lost an earlier block is of no use.

    Blocks of one request are touched tail first, so the sum of touch and position is one number for
    all of them: their *batch*. Of two batches with the same number (about one in thirty) the later
    block may be taken for useless by mistake.
    """

    def __init__(self, entries: int = HOLES) -> None:
        self._batch: Ints = np.zeros(entries, np.int64)
        self._position: Ints = np.zeros(entries, np.int64)

    def cut(self, last_touch: U64, position: npt.NDArray[np.integer]) -> None:
        """These blocks were dropped."""
        at = np.asarray(position, np.int64)
        batch = last_touch.astype(np.int64) + at
        order = np.argsort(-at, kind="stable")  # of several of a batch the earliest counts
        at, batch = at[order], batch[order]
        place = batch % len(self._batch)
        same = self._batch[place] == batch
        self._position[place] = np.where(same, np.minimum(self._position[place], at), at)
        self._batch[place] = batch

    def behind(self, last_touch: U64, position: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of these come after a block of their batch that was dropped."""
        at = np.asarray(position, np.int64)
        batch = last_touch.astype(np.int64) + at
        place = batch % len(self._batch)
        found: npt.NDArray[np.bool_] = (self._batch[place] == batch) & (self._position[place] < at)
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What freeing each of some segments comes to: worth lost per freed byte, by segment, and which
    blocks are kept."""

    cost: Floats
    kept: npt.NDArray[np.bool_]


def plan(
    worth: Floats, position: npt.NDArray[np.integer], size_bytes: npt.NDArray[np.integer],
    counts: Ints, *, bar: float, limit_bytes: int,
) -> Plan:  # fmt: skip
    """Of blocks in order of their segments, `counts` of each: keep what is worth more than `bar`,
    the best of a segment first, as far as `limit_bytes` and half of the segment go; `bar` is also
    what half of a rewrite costs, per byte."""
    many = len(counts)
    segment = np.repeat(np.arange(many), counts)
    sizes = size_bytes.astype(np.float64)
    total = np.bincount(segment, sizes, many)
    order = np.lexsort((position, -worth, segment))  # keeps the segments' order
    taken = np.cumsum(sizes[order]) - np.repeat(np.cumsum(total) - total, counts)
    room = np.minimum(limit_bytes, total / 2)[segment]
    kept = np.zeros(len(worth), np.bool_)
    kept[order] = (worth[order] > bar) & (taken <= room)
    rewritten = np.bincount(segment, sizes * kept, many)
    lost = np.bincount(segment, worth * sizes * ~kept, many)
    charge = 0.5 * bar * rewritten if np.isfinite(bar) else 0.0
    return Plan((lost + charge) / np.maximum(1.0, total - rewritten), kept)
