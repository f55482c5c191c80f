"""Blocks by key version: what is counted in is counted out, and unknown is never unused."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from entresol_daemon.core.census import (
    HOST_SEALED,
    NO_BLOCK,
    NOT_COUNTED,
    VersionCensus,
    code_of,
)

STREAMS = (b"a" * 16, b"b" * 16)


def test_codes_stay_in_two_bytes_and_away_from_the_marks() -> None:
    codes = {code_of(version) for version in (1, 2, 65_533, 65_534, 65_535, 2**31, 2**32 - 1)}
    assert all(NO_BLOCK < code < min(NOT_COUNTED, HOST_SEALED) for code in codes)
    assert code_of(1) == code_of(65_534)  # shared far apart: kept too long, never too short
    assert len({code_of(version) for version in range(1, 1_000)}) == 999


def test_against_a_model() -> None:
    seed = 20_261
    rng = random.Random(seed)
    census = VersionCensus(200)
    model = {slot: (STREAMS[slot % 2], NOT_COUNTED) for slot in range(50)}
    census.found(np.arange(50, dtype=np.int64), dict.fromkeys(STREAMS, 25))
    for step in range(20_000):
        slot = rng.randrange(200)
        if slot in model and rng.random() < 0.4:
            census.gone(slot, model.pop(slot)[0])
        elif slot in model:
            stream = model[slot][0]
            model[slot] = (stream, rng.choice([1, 2, 3, HOST_SEALED]))
            census.note(slot, *model[slot])
        elif rng.random() < 0.9:
            model[slot] = (rng.choice(STREAMS), rng.choice([1, 2, 3, HOST_SEALED]))
            census.note(slot, *model[slot])
        else:
            census.gone(slot, STREAMS[0])  # nothing is there
        if step % 500 == 0:
            counts = Counter(model.values())
            for stream in STREAMS:
                for code in (1, 2, 3, HOST_SEALED, NOT_COUNTED):
                    assert census.blocks(stream, code) == counts[stream, code], (seed, step)
                assert census.total(stream) == sum(s == stream for s, _ in model.values())
            slots = np.arange(200, dtype=np.int64)
            known = {s: c for s, c in enumerate(census.codes(slots).tolist()) if c != NO_BLOCK}
            assert known == {slot: code for slot, (_, code) in model.items()}
