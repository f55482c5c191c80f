"""Names of LMCache's objects: every field that LMCache tells apart gives another name."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_client.engines import lmcache_keys as keys
from entresol_client.engines import lmcache_spaces as spaces
from entresol_client.engines import naming
from entresol_client.engines.settings import EngineSettings
from entresol_proto import limits
from entresol_proto.ids import check_engine_key
from entresol_proto.status import ConfigError

HASH = bytes(range(32))
LAYOUT: keys.Layout = (((2, 4, 256, 128), "bfloat16"),)


def test_every_field_of_an_object_key_takes_part_in_the_key() -> None:
    hashes = [HASH, HASH[:-1] + b"\0"]
    ranks, groups = [0, 1, 2**24, 2**40], [0, 1]
    salts = ["", "team-a", "team-b"]
    cases = list(itertools.product(hashes, ranks, groups, salts))
    names = {keys.engine_key(*case) for case in cases}
    assert len(names) == len(cases)
    for name in names:
        check_engine_key(name)


def test_the_longest_fields_still_make_a_key_and_one_byte_more_is_refused() -> None:
    longest = bytes(keys.CHUNK_HASH_BYTES_MAX)
    key = keys.engine_key(longest, keys.KV_RANK_MAX, keys.GROUP_MAX, "s" * 128)
    assert len(key) == limits.ENGINE_KEY_BYTES_MAX
    with pytest.raises(ConfigError, match="chunk hash"):
        keys.engine_key(longest + b"\0", 0, 0, "")
    with pytest.raises(ConfigError, match="out of range"):
        keys.engine_key(HASH, keys.KV_RANK_MAX + 1, 0, "")
    with pytest.raises(ConfigError, match="out of range"):
        keys.engine_key(HASH, 0, keys.GROUP_MAX + 1, "")


def test_the_short_hashes_of_lmcaches_own_checks_make_keys() -> None:
    assert check_engine_key(keys.engine_key(b"\0\0\0\1", 0, 0, ""))


def test_a_salt_is_not_in_the_key_as_text() -> None:
    assert b"team-a" not in keys.engine_key(HASH, 0, 0, "team-a")


@pytest.mark.parametrize(
    "other",
    [
        {"model": "m2"},
        {"revision": "r2"},
        {"layout": (((2, 4, 256, 128), "float16"),)},
        {"layout": (((2, 4, 128, 256), "bfloat16"),)},
        {"layout": (((2, 4, 256, 64), "bfloat16"), ((2, 4, 256, 64), "bfloat16"))},
        {"kv_format": "f2"},
        {"hash_bytes": 16},
    ],
    ids=lambda other: "-".join(other),
)
def test_another_model_layout_or_format_is_another_namespace(other: dict[str, object]) -> None:
    usual = {
        "model": "m",
        "revision": "r",
        "layout": LAYOUT,
        "kv_format": "f",
        "hash_bytes": 32,
    }
    first = keys.descriptor(**usual)  # type: ignore[arg-type]
    second = keys.descriptor(**{**usual, **other})  # type: ignore[arg-type]
    assert first.canonical() != second.canonical()


def test_a_descriptor_tells_people_layers_tokens_and_dtype() -> None:
    found = keys.descriptor("m", "r", LAYOUT, "f", 32)
    assert (found.layers, found.block_tokens, found.dtype) == (4, 256, "bf16")
    odd = keys.descriptor("m", "r", (((7,), "uint8"),), "f", 32)
    assert (odd.layers, odd.block_tokens, odd.dtype) == (0, 1, "opaque")
    assert keys.descriptor("m", "r", (), "f", 32).dtype == "opaque"


def test_layouts_are_the_same_however_they_are_spelt() -> None:
    class Dtype:  # as torch prints one
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert keys.layout_of([[2, 4, 256, 128]], [Dtype()]) == LAYOUT
    assert keys.layout_of([(2, 4, 256, 128)], ["bfloat16"]) == LAYOUT


def test_a_chunk_longer_than_a_block_of_tokens_still_has_a_namespace() -> None:
    found = keys.descriptor(
        "m", "r", (((2, 4, 2 * limits.TOKENS_PER_BLOCK_MAX, 8), "int8"),), "f", 32
    )
    assert found.block_tokens == limits.TOKENS_PER_BLOCK_MAX
    assert dataclasses.replace(found, block_tokens=1).page_layout == found.page_layout


def chunk(number: int, model: str = "m", group: int = 0, rank: int = 1) -> Any:
    """Has the fields of LMCache's ObjectKey."""
    return SimpleNamespace(
        chunk_hash=number.to_bytes(32, "big"),
        model_name=model,
        kv_rank=rank,
        object_group_id=group,
        cache_salt="",
    )


@pytest.fixture
def planner() -> Iterator[Callable[..., spaces.Spaces]]:
    """`planner(**settings)`: spaces that are their descriptors."""
    made: list[spaces.Spaces] = []

    def make(**settings: Any) -> spaces.Spaces:
        store: Any = SimpleNamespace(settings=EngineSettings(**settings), space=lambda name: name)
        made.append(spaces.Spaces(store, "f"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_objects_are_planned_by_namespace_with_their_positions(
    planner: Callable[..., spaces.Spaces],
) -> None:
    other: keys.Layout = (((2, 4, 256, 64), "bfloat16"),)
    chunks = [chunk(0), chunk(1, group=1), chunk(2), chunk(3, model="n")]
    jobs = planner().plan(chunks, [LAYOUT, other, LAYOUT, LAYOUT])
    assert [positions for _, positions, _ in jobs] == [[0, 2], [1], [3]]
    assert len({space for space, _, _ in jobs}) == 3


def test_a_layout_told_once_is_remembered_and_without_one_nothing_is_asked(
    planner: Callable[..., spaces.Spaces],
) -> None:
    one = planner()
    assert one.plan([chunk(0)], [None]) == []
    (told,) = one.plan([chunk(0)], [LAYOUT])
    (remembered,) = one.plan([chunk(0)], [()])
    assert told == remembered
    assert one.size_bytes(chunk(0)) == 2 * 4 * 256 * 128 * 2
    assert one.size_bytes(chunk(0, group=1)) == 0


def test_engines_of_two_worlds_have_their_own_layouts(
    planner: Callable[..., spaces.Spaces],
) -> None:
    """LMCache deletes by keys alone: looked for under the other engine's layout, an object would
    stay and count as deleted."""
    one, halves = planner(), (((2, 4, 256, 64), "bfloat16"),)
    one.plan([chunk(0, rank=1), chunk(0, rank=2)], [LAYOUT, halves])
    assert [one.layouts(chunk(9, rank=rank)) for rank in (1, 2, 3)] == [(LAYOUT,), (halves,), ()]
    assert one.size_bytes(chunk(0, rank=1)) == 2 * one.size_bytes(chunk(0, rank=2))
    planned = one.plan([chunk(0, rank=1), chunk(0, rank=2), chunk(0, rank=3)], [None] * 3)
    assert [positions for _, positions, _ in planned] == [[0], [1]]


def test_every_layout_that_was_seen_is_remembered_up_to_a_bound(
    planner: Callable[..., spaces.Spaces],
) -> None:
    one = planner()
    wide: list[keys.Layout] = [
        (((2, 4, 256, size), "bfloat16"),) for size in range(1, spaces.LAYOUTS_KEPT_MAX + 2)
    ]
    for layout in (*wide, wide[3]):
        one.plan([chunk(0)], [layout])
    assert one.layouts(chunk(0)) == (*wide[1:3], *wide[4:], wide[3])
    (last,) = one.plan([chunk(0)], [None])
    assert last == one.plan([chunk(0)], [wide[3]])[0]


def test_namespaces_are_bounded_and_the_first_ones_stay(
    planner: Callable[..., spaces.Spaces],
) -> None:
    one = planner()
    for number in range(spaces.SPACES_MAX):
        assert one.plan([chunk(0, model=f"m{number}")], [LAYOUT])
    assert one.plan([chunk(0, model="one too many")], [LAYOUT]) == []
    assert one.plan([chunk(0, model="m0")], [LAYOUT])


def test_weights_are_found_behind_a_name_that_says_how_kv_lies(
    planner: Callable[..., spaces.Spaces], tmp_path: Path
) -> None:
    """With context parallelism LMCache appends its interleaving to the model's path."""
    (tmp_path / "model.safetensors").write_bytes(b"one")
    plain, decorated = str(tmp_path), f"{tmp_path}##lmcache-dcp-layout-v1-d2-interleave16"
    found = [planner().plan([chunk(0, model=name)], [LAYOUT])[0][0] for name in (plain, decorated)]
    assert naming.WEIGHTS_SIGN in found[0].model_revision
    assert found[0].model_revision == found[1].model_revision
    assert found[0].model != found[1].model
    (tmp_path / "model.safetensors").write_bytes(b"two")
    other = planner().plan([chunk(0, model=decorated)], [LAYOUT])[0][0]
    assert other.model_revision != found[1].model_revision


def test_slow_weights_delay_one_call_and_then_the_model_has_a_name(
    planner: Callable[..., spaces.Spaces], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()

    def slow(*_: str) -> str:
        assert read.wait(20.0)
        return "main+w:1"

    monkeypatch.setattr(naming, "revision", slow)
    monkeypatch.setattr(spaces, "REVISION_SECONDS_MAX", 0.2)
    one = planner()
    begun = time.monotonic()
    assert one.plan([chunk(0)], [LAYOUT]) == []
    once = time.monotonic()
    assert one.plan([chunk(0), chunk(1), chunk(2)], [LAYOUT] * 3) == []
    assert time.monotonic() - once < 0.15
    assert once - begun >= 0.2
    read.set()
    until = time.monotonic() + 20.0
    while not (jobs := one.plan([chunk(0)], [LAYOUT])):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert jobs[0][0].model_revision == "main+w:1"


def test_weights_that_cannot_be_read_mean_that_the_model_is_not_used(
    planner: Callable[..., spaces.Spaces], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: str) -> str:
        raise ConfigError("cannot read weights")

    monkeypatch.setattr(naming, "revision", broken)
    assert planner().plan([chunk(0)], [LAYOUT]) == []
