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

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CLASSES = 4  # uses: never since it was put, once, twice, more
BINS_PER_OCTAVE = 3
OCTAVES = 24  # ages of 16 million ticks and more are one
BINS = BINS_PER_OCTAVE * OCTAVES
LEDGER_ENTRIES = 16_384
LEDGER_BYTES = LEDGER_ENTRIES * (8 + 8 + 1) + 3 * CLASSES * BINS * 8
TURNOVERS = 4  # an entry is overwritten after about as many times what the store holds
LEARN_EVERY = 1_024  # sampled events
DECAY = 0.92  # of what was learned, each time
PRIOR = 20.0  # blocks of the whole, mixed into every class
GHOST_TAG_BITS = 30
LEARNED_MIN = 4  # times, before anything is judged by worth
TRIAL_TURNOVERS = 2  # of the store, the first of which does not count
REST_TURNOVERS = 4  # that LRU rules after worth fell behind, the first time
REST_DOUBLINGS_MAX = 8
LOSS_MAX = 0.002  # hits per reference that worth may be behind
HOLES = 8_192  # batches of which it is remembered that they were cut

_EDGES: Floats = np.exp2(np.arange(BINS + 1) / BINS_PER_OCTAVE) - 1
_WIDTHS: Floats = np.diff(_EDGES)
_MIX = np.uint64(0x9E3779B97F4A7C15)


def age_bin(age: npt.NDArray[np.integer]) -> Ints:
    """The bin of each age in ticks; the last one is open."""
    found: Ints = (BINS_PER_OCTAVE * np.log2(age + 1.0)).astype(np.int64)
    return np.minimum(found, BINS - 1)


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
    start, end = np.triu_indices(BINS)
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


class Trial:
    """Worth against LRU, on one tenant's sampled keys: uses found against those that LRU per block
    would have found, which is exact, because it depends on a block's age alone.

    LRU rules first, while ages are learned that a full store has. Then worth does until it falls
    behind, then LRU again for a while, which doubles each time.
    """

    def __init__(self) -> None:
        self.rules = False
        self.lost = 0  # how often worth fell behind
        self._found = self._lru = self._seen = 0.0
        self._put = 0  # sampled blocks put since the last change
        self._rest = 1

    @property
    def gain(self) -> float:
        """Uses found beyond those that LRU would have found, per reference."""
        return (self._found - self._lru) / max(1.0, self._seen)

    def saw(self, found: int, lru: int, put: int) -> None:
        """References to sampled blocks: found, those LRU would have found, and put."""
        self._found += found
        self._lru += lru
        self._seen += found + put
        self._put += put

    def judge(self, turnover: int) -> None:
        """Now and then; `turnover` is how many sampled blocks the store holds."""
        if self.rules and self._put < TRIAL_TURNOVERS * turnover:
            if self._put < turnover:  # what is stored was not chosen by worth yet
                self._found = self._lru = self._seen = 0.0
            return
        if not self.rules and self._put < self._rest * turnover:
            return
        behind = self.rules and self.gain < -LOSS_MAX
        if behind:
            self.lost += 1
            self._rest = REST_TURNOVERS << min(self.lost - 1, REST_DOUBLINGS_MAX)
        if behind or not self.rules:
            self.rules = not self.rules
            self._put = 0
            self._found = self._lru = self._seen = 0.0
        else:  # half of what was seen stays
            self._found, self._lru, self._seen = self._found / 2, self._lru / 2, self._seen / 2
            self._put = turnover


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
        self._shift = 0  # a key in 2^shift is sampled
        self._live_blocks = 0
        self._events = 0
        self._lru_age = np.inf  # up to this age LRU would have kept a block
        self.learned = 0  # how often the worth was computed
        self.trial = Trial()

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

    def _sampled(self, keys: U64) -> npt.NDArray[np.bool_]:
        mask = np.uint64((1 << self._shift) - 1)
        found: npt.NDArray[np.bool_] = (keys & mask) == 0
        return found

    def note(self, keys: U64, uses: U8, now: int, *, found: bool) -> None:
        """These blocks were put (or, if `found`, given to a host) now; `uses` says how often from
        here on."""
        chosen = self._sampled(keys)
        if not chosen.any():
            return
        keys, uses = keys[chosen], uses[chosen]
        at = ((keys * _MIX) >> np.uint64(64 - LEDGER_ENTRIES.bit_length() + 1)).astype(np.int64)
        there = self._keys[at]
        known = there == keys
        ages = now - self._touch[at].astype(np.int64)
        classes, bins = np.minimum(self._uses[at], CLASSES - 1), age_bin(np.maximum(ages, 0))
        np.add.at(self._used, (classes[known], bins[known]), 1)
        lost = ~known & (there != 0)
        np.add.at(self._lost, (classes[lost], bins[lost]), 1)
        kept = int((known & (ages <= self._lru_age)).sum())
        self.trial.saw(len(keys) if found else 0, kept, 0 if found else len(keys))
        self._keys[at], self._touch[at], self._uses[at] = keys, now, uses
        self._events += len(keys)
        if self._events >= LEARN_EVERY:
            self._learn(now)

    def _learn(self, now: int) -> None:
        self._events = 0
        held = np.flatnonzero(self._keys)
        still = np.zeros_like(self._lost)
        ages = np.maximum(now - self._touch[held].astype(np.int64), 0)
        np.add.at(still, (np.minimum(self._uses[held], CLASSES - 1), age_bin(ages)), 1)
        self._worth = yields(self._used, self._lost + still)
        self._used *= DECAY
        self._lost *= DECAY
        would = self._live_blocks >> self._shift
        self._lru_age = float(np.partition(ages, would)[would]) if would < len(ages) else np.inf
        self.learned += 1
        if self.learned >= LEARNED_MIN and would:
            self.trial.judge(would)

    def worth(self, last_touch: U64, uses: U8, now: int) -> Floats:
        """Of stored blocks: uses per tick of room that they promise."""
        ages = np.maximum(now - last_touch.astype(np.int64), 0)
        found: Floats = self._worth[np.minimum(uses, CLASSES - 1), age_bin(ages)]
        return found


class Ghosts:
    """How often blocks that were evicted had been used, as far as one table of 32-bit entries
    remembers: `entries` (rounded up to a power of two) of the latest."""

    def __init__(self, entries: int) -> None:
        bits = max(4, (max(1, entries) - 1).bit_length())
        self._table: U32 = np.zeros(1 << bits, np.uint32)
        self._table.fill(0)  # pages are taken now, so that memory does not grow later
        self._at = np.uint64(64 - bits)

    @property
    def memory_bytes(self) -> int:
        return self._table.nbytes

    def _places(self, keys: U64) -> tuple[Ints, U32]:
        mixed = keys * _MIX
        tags = (keys >> np.uint64(64 - GHOST_TAG_BITS)).astype(np.uint32) << np.uint32(2)
        return (mixed >> self._at).astype(np.int64), tags

    def gone(self, keys: U64, uses: U8) -> None:
        """These were evicted."""
        at, tags = self._places(keys)
        self._table[at] = tags | np.minimum(uses, CLASSES - 1).astype(np.uint32)

    def uses(self, keys: U64) -> U8:
        """Of blocks that are put: 0 for new ones, else one more than when they were evicted."""
        at, tags = self._places(keys)
        found = self._table[at]
        known = ((found ^ tags) >> np.uint32(2) == 0) & (found != 0)
        before = (found & np.uint32(3)).astype(np.uint8) + np.uint8(1)
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
    """What freeing one segment comes to: worth lost per freed byte, and which blocks are kept."""

    cost: float
    kept: npt.NDArray[np.bool_]


def plan(
    worth: Floats, position: npt.NDArray[np.integer], size_bytes: npt.NDArray[np.integer],
    *, bar: float, limit_bytes: int,
) -> Plan:  # fmt: skip
    """Keep what is worth more than `bar`, the best first, as far as `limit_bytes` and half of the
    segment go; `bar` is also what half of a rewrite costs, per byte."""
    sizes = size_bytes.astype(np.float64)
    kept = np.zeros(len(worth), np.bool_)
    order = np.lexsort((position, -worth))
    order = order[worth[order] > bar]
    total = float(sizes.sum())
    fits = np.cumsum(sizes[order]) <= min(limit_bytes, total / 2)
    kept[order[fits]] = True
    rewritten = float(sizes[kept].sum())
    lost = float((worth * sizes)[~kept].sum())
    charge = 0.5 * bar * rewritten if rewritten else 0.0
    return Plan((lost + charge) / max(1.0, total - rewritten), kept)
