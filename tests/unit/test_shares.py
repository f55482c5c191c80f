"""A table of several owners: bounded, the greatest gives way, nobody within its share loses."""

from __future__ import annotations

import random

from entresol_proto.shares import Shares


def test_the_least_recently_used_of_the_greatest_owner_goes() -> None:
    of: Shares[int, list[int]] = Shares(4, list)
    for key in (1, 2, 3):
        of.use("a", key).append(key)
    of.use("b", 1)
    assert of.use("a", 1) == [1]
    of.use("b", 2)
    assert (list(of.of("a")), list(of.of("b")), len(of)) == ([3, 1], [1, 2], 4)
    of.forget("a")
    assert (list(of.of("a")), list(of.of("b")), len(of)) == ([], [1, 2], 2)
    of.forget("a")
    assert len(of) == 2


def test_nobody_within_an_equal_share_loses_whatever_others_do() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        most, owners = rng.randrange(8, 40), rng.randrange(2, 6)
        of: Shares[int, list[int]] = Shares(most, list)
        mine = range(most // owners)
        for key in mine:
            of.use("me", key)
        for _ in range(500):
            of.use(f"{rng.randrange(owners - 1)}", rng.randrange(1000))
            assert len(of) <= most, seed
        assert list(of.of("me")) == list(mine), seed


def test_more_owners_than_entries() -> None:
    of: Shares[int, list[int]] = Shares(3, list)
    for owner in range(10):
        of.use(f"{owner}", 1)
    assert [owner for owner in range(10) if of.of(f"{owner}")] == [7, 8, 9]


def test_a_dropped_entry_leaves_room_for_one() -> None:
    of: Shares[int, list[int]] = Shares(2, list)
    of.use("a", 1)
    of.use("b", 1)
    for _ in range(2):
        of.drop("a", 1)
        of.drop("nobody", 1)
    assert (list(of.of("a")), list(of.of("b")), len(of)) == ([], [1], 1)
    of.use("b", 2)
    assert list(of.of("b")) == [1, 2]


def test_an_owner_keeps_the_rest_when_one_entry_goes() -> None:
    of: Shares[int, list[int]] = Shares(4, list)
    for key in (1, 2, 3):
        of.use("a", key)
    of.use("b", 1)
    of.drop("a", 2)
    assert (list(of.of("a")), list(of), len(of)) == ([1, 3], [(1, []), (3, []), (1, [])], 3)


def test_of_owners_who_have_nothing_left_nothing_is_kept() -> None:
    of: Shares[int, list[int]] = Shares(1, list)
    for owner in range(100):
        of.use(f"{owner}", 1)
    assert list(of._owners) == ["99"]
    of.drop("99", 1)
    assert not of._owners
