"""S1: nothing of a tenant reaches another, on any path, while its owner is given all of it.

Invariant: an attempt is one key asked over one path by a tenant that does not own it; every path
has at least one in a hundred of the attempts of a slice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from entresol_daemon.flash.index import Index
from entresol_proto.wire.data import split_keys
from tests.proof.isolation_paths import PATHS, Batch
from tests.proof.line import Line, Size, Slice, Tally
from tests.proof.tenancy import OTHER, Room, chain, relays_of, room_in, run_on_loop, wire_keys

BLOCKS = 256  # of a unit
SHARE_MIN = 0.01  # of a slice's attempts, on every path
HOUSE_BLOCKS = 16  # the other tenant's own, so that its tables are not empty


def run(part: Slice) -> Tally:
    """Units with an even seed have plain tcp, the others TLS on it."""
    tally = Tally()
    counts: dict[str, int] = {}
    for tls in (False, True):
        seeds = [seed for seed in part.seeds if bool(seed % 2) is tls]
        if seeds:
            folder = part.folder / ("tls" if tls else "tcp")
            run_on_loop(_rounds(folder, seeds, tls, tally, counts))
    whole = sum(counts.values())
    for path in PATHS:
        tally.figure(path, counts.get(path, 0))
        if counts.get(path, 0) < SHARE_MIN * whole:
            tally.found(part.seed, f"{path}: {counts.get(path, 0)} of {whole} attempts, too few")
    return tally


async def _rounds(
    folder: Path, seeds: list[int], tls: bool, tally: Tally, counts: dict[str, int]
) -> None:
    async with room_in(folder, tls=tls) as room, relays_of(room):
        house = chain(0, HOUSE_BLOCKS, "house")
        assert (await room.other.space.put(house)).ok
        grants = await room.other.shm.fetch(
            wire_keys(room.other.shm.space, [block.key for block in house])
        )
        room.other.shm.release(grants)  # a slab of its own is mapped from here on
        for seed in seeds:
            await _round(room, seed, tally, counts)


async def _round(room: Room, seed: int, tally: Tally, counts: dict[str, int]) -> None:
    blocks = chain(seed, BLOCKS)
    keys = [block.key for block in blocks]
    batch = Batch(blocks, keys, wire_keys(room.own.shm.space, keys), chain(seed, 1, "sentinel"))
    sentinels = [block.key for block in batch.sentinel]
    batch.sentinel_names = set(split_keys(wire_keys(room.other.shm.space, sentinels)))
    batch.before = {side.name: side.watcher.last_seq for side in (room.own, room.other)}
    assert (await room.own.space.put(blocks)).ok
    assert (await room.other.space.put(batch.sentinel)).ok
    for name, path in PATHS.items():
        try:
            asked = await path(room, batch)
        except Exception as error:  # the other paths are asked all the same
            tally.tried += 1
            tally.crashes += 1
            tally.found(seed, f"{name}: {error!r}")
            continue
        tally.tried += asked.other_of
        tally.survived += asked.other_of - asked.other
        tally.wrong_bytes += asked.other
        counts[name] = counts.get(name, 0) + asked.other_of
        tally.figure("own_given", asked.own)
        if asked.other:
            tally.found(seed, f"{name}: {OTHER} was given {asked.other} of {asked.other_of}")
        if asked.own != asked.own_of:
            tally.found(seed, f"{name}: its owner was given {asked.own} of {asked.own_of}")
    own, other = await room.own.space.forget(keys), await room.other.space.forget(sentinels)
    if (own.count, other.count) != (BLOCKS, len(sentinels)):
        tally.found(seed, f"forgotten at the end: {own.count} and {other.count}")


@contextmanager
def one_index_for_all() -> Iterator[None]:
    """The bug: a look-up that leaves the namespace out, as a filter shared by tenants would."""
    real: Callable[..., Any] = Index.lookup

    def lookup(self: Index, namespace_id: bytes, keys: bytes) -> Any:
        slots = real(self, namespace_id, keys)
        for other in self.namespaces():
            slots = np.maximum(slots, real(self, other, keys))
        return slots

    with mock.patch.object(Index, "lookup", lookup):
        yield


def canary() -> None:
    """See `one_index_for_all`. Raises: AssertionError when it goes unnoticed."""
    with one_index_for_all(), tempfile.TemporaryDirectory() as folder:
        tally = run(Slice(1, 1, Size.COMMIT, Path(folder)))
    found = {finding.text.partition(":")[0] for finding in tally.findings}
    assert {"exists", "touch"} <= found, tally.findings


LINES = (
    Line(
        id="S1",
        name="cross-tenant attempts on every path, the owner given all",
        unit="rounds over all paths",
        units={Size.COMMIT: 16, Size.NIGHTLY: 48, Size.RELEASE: 150},
        slice_units=8,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
