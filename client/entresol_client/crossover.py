"""Fetch or recompute: learned from what both took, decided by what both would take now. Pure.

A recompute is a line over its tokens and over the pairs of tokens that attend to each other; a
fetch is a line over what the daemon quoted and over the bytes that the host then reads and opens.
Both are fitted to what was seen, the latest counting most and outliers little. What is expected of
the next one also follows the latest few of about its size: a processor or link that is busy is
noticed soon.

Invariants: what was never seen, nor anything near it, is not decided by guessing: without a
`prefill_tokens_per_s` nothing is recomputed that is more than REACH times what was; trying the side
that looks worse costs at most EXPLORED_SHARE of what everything takes; time comes in as `now_s`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEPT = 0.95  # of what was seen before, at each further sight
RECENT = 9  # sights that the next one is compared with
FRESH_S = 10.0  # and how long they count
SIMILAR = 4.0  # times shorter or longer is about the same size
SIMILAR_MIN = 3
HALF_BELIEVED = 0.5  # a single one that was slow
QUICK_AGAIN = 0.8  # the latest took so much less than those of about the size
SEEN_MIN = 6  # prefills, before anything is decided by them
REACH = 4  # times as many tokens as were ever seen recomputed at once
REACH_REMEMBERED = 256
SPREADS = 3.0  # further off than so many usual errors is an outlier
SPREAD_MIN, SPREAD_MAX = 0.05, 1.0
MARGIN = 0.1  # what changes the side must be better by so much
CANDIDATES = 16  # ways to cut a prefix in two that are looked at
EXPLORED_SHARE = 0.02
EXPLORE_AFTER = 32  # decisions for one side in a row, before the other is tried
BUDGET_S_MAX = 0.5
PAIRS = 1 << 20  # so many are the unit of the quadratic term
SECONDS_MIN = 1e-6

Features = tuple[float, float, float]


def solve(rows: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss-Jordan with pivots, for a few unknowns; None for a singular system."""
    size = len(right)
    work = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(work[row][at]))
        if abs(work[pivot][at]) < 1e-300:
            return None
        work[at], work[pivot] = work[pivot], work[at]
        work[at] = [value / work[at][at] for value in work[at]]
        for row in range(size):
            if row != at:
                factor = work[row][at]
                work[row] = [a - factor * b for a, b in zip(work[row], work[at], strict=True)]
    return [row[size] for row in work]


class Line:
    """Seconds as a sum of three features, each with a factor of at least 0."""

    def __init__(self, guesses: Sequence[tuple[Features, float, float]]) -> None:
        """`guesses`: (features, seconds, weight) that hold until something is seen."""
        self._rows = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._guessed = [[0.0] * 3 for _ in range(3)]
        self._guessed_right = [0.0] * 3
        for features, seconds, weight in guesses:
            _add(self._guessed, self._guessed_right, features, seconds, weight)
        self._spread = SPREAD_MAX / SPREADS
        self._recent: deque[tuple[Features, float, float]] = deque(maxlen=RECENT)
        self.seen = 0
        self.factors = (0.0, 0.0, 0.0)
        self._solve()

    def note(self, features: Features, seconds: float, now_s: float) -> None:
        """One was seen to take so long."""
        seconds = max(seconds, SECONDS_MIN)
        weight = 1.0
        if self.seen:
            off = abs(seconds / max(self.base(features), SECONDS_MIN) - 1)
            weight = min(1.0, SPREADS * self._spread / off) if off else 1.0
            self._spread += 0.1 * (min(off, SPREADS * self._spread) - self._spread)
            self._spread = min(max(self._spread, SPREAD_MIN), SPREAD_MAX)
        for row in self._rows:
            row[:] = [value * KEPT for value in row]
        self._right = [value * KEPT for value in self._right]
        _add(self._rows, self._right, features, seconds, weight)
        self._recent.append((features, seconds, now_s))
        self.seen += 1
        self._solve()

    def base(self, features: Features) -> float:
        """What the line says."""
        return sum(a * b for a, b in zip(self.factors, features, strict=True))

    def expect(self, features: Features, now_s: float) -> float:
        """What is to be expected now: the line, and how far off it was for the latest ones."""
        base = self.base(features)
        recent = [
            (max(self.base(seen), SECONDS_MIN), seconds)
            for seen, seconds, at_s in self._recent
            if now_s - at_s < FRESH_S
        ]
        if not recent:
            return base
        ratios = [seconds / said for said, seconds in recent]
        is_similar = [1 / SIMILAR < said / max(base, SECONDS_MIN) < SIMILAR for said, _ in recent]
        similar = [ratio for ratio, like in zip(ratios, is_similar, strict=True) if like]
        latest = statistics.median(ratios[-SIMILAR_MIN:])
        if len(similar) >= SIMILAR_MIN:
            ratio = statistics.median(similar[-SIMILAR_MIN:])
            if is_similar[-1]:
                ratio = max(ratio, HALF_BELIEVED * similar[-1])
            # Where even short ones are quick again, long ones will be, though none was seen since.
            return base * (latest if latest < QUICK_AGAIN * ratio else ratio)
        if latest < QUICK_AGAIN:
            return base * latest
        late = statistics.median(seconds - said for said, seconds in recent)
        return base + max(0.0, late)

    def _solve(self) -> None:
        """Least squares without negative factors: what would be negative is left out."""
        rows = [
            [a + b for a, b in zip(*pair, strict=True)]
            for pair in zip(self._rows, self._guessed, strict=True)
        ]
        right = [a + b for a, b in zip(self._right, self._guessed_right, strict=True)]
        kept = [at for at in range(3) if rows[at][at] > 0]
        factors = [0.0] * 3
        while kept:
            some = [[rows[a][b] * (1 + 1e-6 * (a == b)) for b in kept] for a in kept]
            found = solve(some, [right[at] for at in kept])
            if found is None:
                kept.pop()
                continue
            least = min(range(len(kept)), key=found.__getitem__)
            if found[least] >= 0:
                for at, value in zip(kept, found, strict=True):
                    factors[at] = value
                break
            del kept[least]
        self.factors = (factors[0], factors[1], factors[2])


def _add(
    rows: list[list[float]], right: list[float], features: Features, seconds: float, weight: float
) -> None:
    weight /= seconds * seconds  # errors count relatively
    for a in range(3):
        right[a] += weight * features[a] * seconds
        for b in range(3):
            rows[a][b] += weight * features[a] * features[b]


def _prefill(context_tokens: int, tokens: int) -> Features:
    pairs = tokens * (context_tokens + tokens / 2)
    return (1.0, float(tokens), pairs / PAIRS)


@dataclass(frozen=True, slots=True)
class Offer:
    """A prefix that could be fetched: blocks that stand for so many `tokens` together, and
    `fetch(n)`, (seconds quoted, bytes) of its first n.

    `context_tokens` are before it and in place, `tail_tokens` behind it and computed in any case.
    """

    blocks: int
    tokens: int
    fetch: Callable[[int], tuple[float, int]]
    context_tokens: int = 0
    tail_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """Fetch the first so many blocks, compute the rest. Seconds are None where nothing is known."""

    fetch_blocks: int
    expected_s: float | None = None
    fetch_all_s: float | None = None
    recompute_all_s: float | None = None
    explored: bool = False


class Crossover:
    """What one engine and one store learned of each other. Not for several threads at once."""

    def __init__(self, *, prefill_tokens_per_s: int = 0) -> None:
        """`prefill_tokens_per_s`: what the user knows of the engine; 0: wait until it is seen."""
        self._told = prefill_tokens_per_s > 0
        guesses = []
        if self._told:
            guesses = [
                ((0.0, float(n), 0.0), n / prefill_tokens_per_s, weight)
                for n, weight in ((256, 1.0), (4096, 1.0))
            ]
        self._recompute = Line(guesses)
        # As quoted; and a link of 2 GB/s, which weighs little beside anything that was seen.
        self._fetch = Line([((0.0, 1.0, 0.0), 1.0, 0.1), ((0.0, 0.0, 1.0), 0.5, 0.02)])
        self._tokens: deque[int] = deque(maxlen=REACH_REMEMBERED)
        self._fetching = True  # the side of the last decision
        self._in_a_row = 0
        self._budget_s = 0.0

    @property
    def prefills_seen(self) -> int:
        """Prefills that were learned from."""
        return self._recompute.seen

    @property
    def fetches_seen(self) -> int:
        """Fetches that were learned from."""
        return self._fetch.seen

    def prefilled(self, context_tokens: int, tokens: int, seconds: float, now_s: float) -> None:
        """The engine computed so many tokens behind so many, and it took so long, waiting too."""
        if tokens > 0 and seconds > 0:
            self._recompute.note(_prefill(context_tokens, tokens), seconds, now_s)
            self._tokens.append(tokens)

    def fetched(self, quoted_s: float, length_bytes: int, seconds: float, now_s: float) -> None:
        """A fetch that was quoted took so long, from asking to the last block in place."""
        if seconds > 0:
            self._fetch.note((1.0, quoted_s, length_bytes / 1e9), seconds, now_s)

    def expect_prefill(self, context_tokens: int, tokens: int, now_s: float) -> float | None:
        """Seconds; None where too little is known."""
        unseen = self._recompute.seen < SEEN_MIN or tokens > REACH * max(self._tokens)
        if unseen and not self._told:
            return None
        return self._recompute.expect(_prefill(context_tokens, tokens), now_s)

    def expect_fetch(self, quoted_s: float, length_bytes: int, now_s: float) -> float:
        """Seconds."""
        return self._fetch.expect((1.0, quoted_s, length_bytes / 1e9), now_s)

    def choose(self, offer: Offer, now_s: float) -> Choice:
        """What to do with a prefix."""
        blocks = offer.blocks
        steps = sorted({blocks * step // CANDIDATES for step in range(CANDIDATES + 1)})
        costs = {
            fetch: cost
            for fetch in steps
            if (cost := self._cost(offer, fetch, now_s)) is not None
        }  # fmt: skip
        if blocks not in costs:
            return Choice(blocks)
        best = min(costs, key=lambda fetch: (costs[fetch], -fetch))
        stay = blocks if self._fetching else min(costs)
        if costs[best] > (1 - MARGIN) * costs[stay]:
            best = stay
        other = min(costs) if 2 * best >= blocks else blocks
        explored = self._explores(costs[other] - costs[best], costs[best])
        if explored:
            best, self._in_a_row = other, 0
        else:
            self._decided(2 * best >= blocks)
        return Choice(best, costs[best], costs[blocks], costs.get(0), explored)

    def _cost(self, offer: Offer, fetch: int, now_s: float) -> float | None:
        done = offer.tokens * fetch // offer.blocks
        rest = offer.tokens - done + max(1, offer.tail_tokens)
        compute = self.expect_prefill(offer.context_tokens + done, rest, now_s)
        if compute is None or not fetch:
            return compute
        return compute + self.expect_fetch(*offer.fetch(fetch), now_s)

    def _explores(self, extra_s: float, best_s: float) -> bool:
        """Whether to try the other side, not taken for long; only if that is affordable."""
        self._budget_s = min(self._budget_s + EXPLORED_SHARE * best_s, BUDGET_S_MAX)
        if self._in_a_row < EXPLORE_AFTER or extra_s > self._budget_s:
            return False
        self._budget_s -= max(0.0, extra_s)
        return True

    def _decided(self, fetching: bool) -> None:
        self._in_a_row = self._in_a_row + 1 if fetching is self._fetching else 0
        self._fetching = fetching
