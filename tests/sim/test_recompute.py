"""Recompute or fetch on a simulated engine: better than either alone, as load changes.

Everything is on a virtual clock, so the numbers are the same for the same seed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from entresol_proto.wire.data import OpenAt
from entresol_proto.wire.quote import Quote
from tests import simloop
from tests.proof import floods
from tests.proof.fairlab import Guest, Place
from tests.proof.machines import BusyLoop
from tests.sim import quotelab

SEEDS, PER_PHASE = (1, 2), 12
VS_ALWAYS, VS_NEVER, VS_ORACLE = 0.97, 0.8, 1.2


@pytest.mark.parametrize("policy", quotelab.POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_is_served(seed: int, policy: str) -> None:
    """Each policy by itself; what came of it is compared below."""
    outcome = quotelab.run(seed, policy, PER_PHASE)
    assert len(outcome.ttft_s) == PER_PHASE * len(quotelab.PHASES)
    assert min(outcome.ttft_s) > 0
    shares = {"always": {1.0}, "never": {0.0}}.get(policy)
    assert shares is None or set(outcome.fetched) == shares
    assert bool(outcome.quote_errors) == (policy == "auto")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_learned_beats_always_and_never_and_is_close_to_the_best(seed: int) -> None:
    found = quotelab.compare(seed, per_phase=PER_PHASE)
    print(f"seed={seed} {found}")
    total = found.total
    assert total["auto"] < VS_ALWAYS * total["always"]
    assert total["auto"] < VS_NEVER * total["never"]
    assert total["auto"] < VS_ORACLE * total["oracle"]
    assert found.fetched["idle"] > 0.9, "with nobody around it fetches"
    assert found.fetched["flash flooded"] < 0.5, "while the flash is flooded it computes"
    assert found.fetched["processor busy"] > 0.8, "while the processor is busy it fetches"
    assert 0.5 < found.quote_error < 2, "half of the fetches take less than quoted, about"


class Quotes(floods.Flood):
    """As many quotes of as many keys as there may be."""

    name = "quotes"
    at_once = 16

    async def attack(self, guest: Guest) -> None:
        keys = self.names + self.place.rng.randbytes(16 * (4_096 - len(self.names) // 16))
        await guest.call(Quote(guest.handle, OpenAt.HOST, False, keys))


def test_a_flood_of_quotes_is_as_harmless_as_any_other(tmp_path: Path) -> None:
    """As Q1 judges the other floods."""

    async def whole() -> Any:
        tenants = dict.fromkeys((*floods.VICTIMS, floods.FLOODER), 1)
        place = await Place.open(tmp_path / "keys", 3, tenants)
        try:
            return await floods.storm(place, Quotes, 1.0)
        finally:
            await place.close()

    logging.disable(logging.CRITICAL)
    try:
        calm, rough = simloop.run(whole(), 3, loop=BusyLoop(3))
    finally:
        logging.disable(logging.NOTSET)
    assert rough.gets.slow(few=True) <= 2 * calm.gets.slow(few=True)
    assert rough.puts.slow(few=True) <= 2.5 * calm.puts.slow(few=True)
    assert rough.blocks >= 0.9 * rough.offered_blocks
