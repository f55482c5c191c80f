"""R7: a scene whose faults struck nothing is no scene."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest

from tests.daemon import siege_lab
from tests.daemon.faults_lab import Act, Call, Kind, Rule
from tests.daemon.siege_lab import SCENES, Scene

RULE = Rule((Call.READ,), (Kind.DATA,), Act.ERROR, rate=1.0)


class Weak:
    """Faults of which the n-th look sees the first that struck."""

    def __init__(self, looks: int) -> None:
        self.looks, self.on = looks, False

    def strike(self, rules: Any, seed: int) -> None:
        self.on = True

    def heal(self) -> None:
        self.on = False

    def injected(self) -> dict[tuple[Call, Kind], int]:
        self.looks -= self.on
        return {(Call.READ, Kind.DATA): 5 + (self.looks <= 0)}


def a_scene(looks: int) -> Scene:
    lab: Any = None
    faults: Any = Weak(looks)
    return Scene(lab, faults, random.Random(1), 1)


def test_a_strike_goes_on_until_something_was_struck() -> None:
    scene = a_scene(looks=4)
    assert not scene.injects
    scene.strike(RULE, seconds=0)
    assert scene.injects
    assert scene.struck == 1


def test_a_strike_that_meets_nothing_ends_and_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siege_lab, "STRUCK_SECONDS_MAX", 0.1)
    scene = a_scene(looks=1_000)
    scene.strike(RULE, seconds=0)
    assert scene.injects
    assert not scene.struck


def test_no_scene_has_faults_behind_the_counters_back() -> None:
    for scene in SCENES:
        assert "faults.strike" not in inspect.getsource(scene), scene.__name__
