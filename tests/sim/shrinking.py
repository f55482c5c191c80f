"""Finds a small part of a failing plan that still fails, by leaving out more and more of it.

Everything that stays is what was drawn for the seed, and what a part does to the others is found by
running, not by reasoning: delta debugging (Zeller and Hildebrandt, 2002), coarse parts first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tests.sim.plans import Mask, Plan

T = TypeVar("T", bound=Hashable)

TRIES_MAX = 400
SECONDS_MAX = 240.0


class Shrinker:
    """`fails` runs a plan and tells whether it (still) fails."""

    def __init__(self, plan: Plan, fails: Callable[[Plan], bool]) -> None:
        self.plan = plan
        self.mask = Mask()
        self.tries = 0
        self._fails = fails
        self._end_s = time.perf_counter() + SECONDS_MAX

    def shrink(self) -> Plan:
        """The smallest part that was found."""
        before: Mask | None = None
        while before != self.mask and not self._spent:
            before = self.mask
            self._rounds()
            small = self.mask.apply(self.plan)
            self._drop("hosts", [host.name for each in small.rounds for host in each.hosts])
            self._drop("mishaps", [one.number for each in small.rounds for one in each.mishaps])
            self._drop("faults", [*small.network, *(kind.value for kind in small.media)])
            self._drop("ops", self._ops())
        return self.mask.apply(self.plan)

    @property
    def _spent(self) -> bool:
        return self.tries >= TRIES_MAX or time.perf_counter() > self._end_s

    def _ops(self) -> list[int]:
        return [
            op.number
            for each in self.mask.apply(self.plan).rounds
            for host in each.hosts
            for worker in host.workers
            for op in worker
        ]

    def _try(self, mask: Mask) -> bool:
        if self._spent:
            return False
        self.tries += 1
        if not self._fails(mask.apply(self.plan)):
            return False
        self.mask = mask
        return True

    def _rounds(self) -> None:
        for count in range(1, len(self.plan.rounds)):
            if (not self.mask.rounds or count < self.mask.rounds) and self._try(
                replace(self.mask, rounds=count)
            ):
                return

    def _drop(self, name: str, parts: Sequence[Any]) -> None:
        """Leave out as many of the parts as possible: halves, quarters, then one at a time."""
        left = list(dict.fromkeys(parts))
        size = max(1, len(left) // 2)
        while left and not self._spent:
            at = 0
            while at < len(left) and not self._spent:
                chunk = left[at : at + size]
                gone: frozenset[Any] = getattr(self.mask, name) | frozenset(chunk)
                changes: dict[str, Any] = {name: gone}
                if self._try(replace(self.mask, **changes)):
                    del left[at : at + size]
                else:
                    at += size
            if size == 1:
                return
            size = max(1, size // 2)
