"""Whether worth or LRU chooses for a tenant, judged by what each finds of its sampled keys. Pure.

Two comparisons, both with LRU per block, which is exact, because it depends on a block's age alone.
Before worth rules, a `Shadow` tells what it would find: it must not promise less than LRU. While it
rules, what was really found tells, with all that whole segments and rewriting cost.

Invariant: tables have the size they are made with (`shadow_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

TRIAL_TURNOVERS = 2  # of the store, the first of which does not count
REST_TURNOVERS = 4  # that LRU rules after worth fell behind, the first time
REST_DOUBLINGS_MAX = 8
LOSS_MAX = 0.002  # hits per reference that worth may be behind
PROMISE_MIN = -0.005  # hits per reference that the shadow must find beyond LRU's, the first time
SLACK = 32  # one in so many is dropped at a time


def shadow_bytes(entries: int) -> int:
    """What a Shadow of so many entries holds."""
    return entries


class Shadow:
    """A store of the sampled keys alone, as large for them as the real one is for all, from which
    blocks leave one by one. Keys are known by their entry in the ledger."""

    def __init__(self, entries: int) -> None:
        self._inside: Bools = np.zeros(entries, np.bool_)

    def asked(self, at: Ints, known: Bools, again: Ints) -> int:
        """These entries were referred to, where `known` still by the key that they are of, and
        those numbered in `again` not for the first time; returns how many were inside. All are,
        from now on."""
        inside = self._inside[at]
        inside[again] = True
        self._inside[at] = True
        return int((inside & known).sum())

    def keep(self, entries: Bools) -> None:
        """Only these entries are still of a key."""
        self._inside &= entries

    def fit(self, room: int, choose: Callable[[Ints, int], Ints]) -> None:
        """At most about `room` stay; `choose` says which of these entries go, so many of them. No
        room: the real store was never full."""
        if not room:
            return
        slack = max(1, room // SLACK)
        count = int(np.count_nonzero(self._inside))
        if count <= room + slack // 2:
            return
        held = np.flatnonzero(self._inside)
        drop = min(count, count - room + slack // 2)
        self._inside[choose(held, drop)] = False


class Trial:
    """Of one tenant.

    LRU rules until the shadow has found more for a whole turnover of the store. Then worth does
    until it falls behind, then LRU again for a while, which doubles each time; and from then on the
    shadow must promise as much more as was missing from what it had promised.
    """

    def __init__(self) -> None:
        self.rules = False
        self.lost = 0  # how often worth fell behind
        self._found = self._lru = self._seen = 0.0
        self._put = 0  # sampled blocks put since the last change
        self._rest = 1
        self._shadow = self._shadow_lru = self._shadow_seen = 0.0
        self._shadow_put = 0
        self._missing = 0.0  # of what the shadow promised, where worth fell behind

    @property
    def gain(self) -> float:
        """Uses found beyond those that LRU would have found, per reference."""
        return (self._found - self._lru) / max(1.0, self._seen)

    @property
    def promise(self) -> float:
        """Uses that the shadow found beyond those that LRU would have found, per reference."""
        return (self._shadow - self._shadow_lru) / max(1.0, self._shadow_seen)

    def saw(self, found: int, lru: int, put: int, shadow: int) -> None:
        """References to sampled blocks: found, those that LRU and the shadow would have found, and
        put."""
        self._found += found
        self._lru += lru
        self._seen += found + put
        self._put += put
        self._shadow += shadow
        self._shadow_lru += lru
        self._shadow_seen += found + put
        self._shadow_put += put

    def judge(self, turnover: int) -> None:
        """Now and then; `turnover` is how many sampled blocks the store holds."""
        promising = self._promising(turnover)
        if self.rules and self._put < TRIAL_TURNOVERS * turnover:
            if self._put < turnover:  # what is stored was not chosen by worth yet
                self._found = self._lru = self._seen = 0.0
            return
        if not self.rules and (self._put < self._rest * turnover or not promising):
            return
        behind = self.rules and self.gain < -LOSS_MAX
        if behind:
            self.lost += 1
            self._missing = max(self._missing, self.promise - self.gain)
            self._rest = REST_TURNOVERS << min(self.lost - 1, REST_DOUBLINGS_MAX)
        if behind or not self.rules:
            self.rules = not self.rules
            self._put = 0
            self._found = self._lru = self._seen = 0.0
        else:  # half of what was seen stays
            self._found, self._lru, self._seen = self._found / 2, self._lru / 2, self._seen / 2
            self._put = turnover

    def _promising(self, turnover: int) -> bool:
        """Whether the shadow found more; half of what it saw stays after each look."""
        if self._shadow_put < turnover:
            return False
        promising = self.promise > PROMISE_MIN + self._missing
        if self._shadow_put >= TRIAL_TURNOVERS * turnover:
            self._shadow /= 2
            self._shadow_lru /= 2
            self._shadow_seen /= 2
            self._shadow_put = turnover
        return promising
