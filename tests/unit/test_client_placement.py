"""Placement: the shares are right, and only the keys that must move do."""

from __future__ import annotations

import hashlib
import os

import pytest

from entresol_client import placement
from entresol_client.placement import Placement
from entresol_proto.ids import EngineKey

DIGEST = bytes(range(32))
KEYS = [EngineKey(hashlib.sha256(b"%d" % number).digest()) for number in range(4000)]


def owners(shards: list[tuple[str, float]], digest: bytes = DIGEST) -> list[str]:
    places = Placement(shards)
    return [shards[places.owner(digest, key)][0] for key in KEYS]


def test_equal_weights_share_equally() -> None:
    found = owners([(f"s{n}", 1.0) for n in range(4)])
    for n in range(4):
        # Binomial(4000, 1/4): 1000 with a standard deviation of 27; six of them.
        assert abs(found.count(f"s{n}") - 1000) < 165


def test_weights_share_in_proportion() -> None:
    found = owners([("small", 1.0), ("middle", 2.0), ("large", 5.0)])
    for name, share in (("small", 500), ("middle", 1000), ("large", 2500)):
        assert abs(found.count(name) - share) < 190


def test_weights_that_are_equal_do_not_matter() -> None:
    names = ["a", "b", "c"]
    assert owners([(n, 1.0) for n in names]) == owners([(n, 7.5) for n in names])


@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_a_new_shard_takes_only_its_own_and_a_removed_one_gives_back(weights: list[float]) -> None:
    shards = [(f"s{n}", weight) for n, weight in enumerate(weights)]
    before, after = owners(shards[:-1]), owners(shards)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert moved, "the new shard owns nothing"
    assert {new for _, new in moved} == {shards[-1][0]}
    share = len(KEYS) * weights[-1] / sum(weights)
    assert abs(len(moved) - share) < 190


def test_the_order_of_shards_does_not_matter() -> None:
    shards = [("a", 1.0), ("b", 2.0), ("c", 0.5)]
    assert owners(shards) == owners(shards[::-1])


def test_weighted_owners_stay_who_they_are() -> None:
    """Hosts of different versions look for a block at the same shard."""
    found = owners([("a", 1.0), ("b", 2.0), ("c", 0.5)])[:60]
    assert "".join(found) == "baabbbabbcaaababbabbababbbacbbabcbbabbbbacbbaacaaaabacbbbbbc"


def test_the_highest_score_and_the_lowest_are_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest ones round to 2^64, the logarithm of whose part of it is 0."""
    scores = {b"low": 0, b"high": 2**64 - 1, b"middle": 2**63}
    monkeypatch.setattr(placement, "placement_hash", lambda _digest, _key, name: scores[name])
    shards = [("low", 4.0), ("high", 1.0), ("middle", 2.0)]
    assert Placement(shards).owner(DIGEST, KEYS[0]) == 1
    assert Placement(shards).split(DIGEST, KEYS[:2]) == {1: [0, 1]}


def test_another_namespace_places_differently() -> None:
    shards = [("a", 1.0), ("b", 1.0)]
    same = sum(x == y for x, y in zip(owners(shards), owners(shards, bytes(32)), strict=True))
    assert abs(same - 2000) < 190


def test_split_keeps_order_and_covers_everything() -> None:
    parts = Placement([("a", 1.0), ("b", 1.0), ("c", 1.0)]).split(DIGEST, KEYS[:100])
    assert all(list(positions) == sorted(positions) for positions in parts.values())
    assert sorted(p for positions in parts.values() for p in positions) == list(range(100))
    assert Placement([("only", 1.0)]).split(DIGEST, KEYS[:3]) == {0: range(3)}
    assert Placement([("only", 1.0)]).split(DIGEST, []) == {}


@pytest.mark.parametrize("shards", [1, 2, 3, 17])
@pytest.mark.parametrize("equal", [True, False])
def test_splitting_many_keys_finds_the_owner_of_each(shards: int, equal: bool) -> None:
    places = Placement([(f"s{n}", 1.0 if equal else n + 1.0) for n in range(shards)])
    digest = bytes(range(32))
    for lengths in ((32,), (8, 64)):
        keys = [EngineKey(os.urandom(lengths[n % len(lengths)])) for n in range(300)]
        parts = places.split(digest, keys)
        assert sorted(p for positions in parts.values() for p in positions) == list(range(300))
        for owner, positions in parts.items():
            assert list(positions) == sorted(positions)
            assert {places.owner(digest, keys[p]) for p in positions} == {owner}
    assert places.split(digest, []) == {}
