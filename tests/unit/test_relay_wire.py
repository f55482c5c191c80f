"""Messages as each generation of readers decodes them: three of vLLM's, and llm-d's.

The readers here are written from vLLM's classes of each generation; `tests/engines` decodes with
vLLM's own, and has Dynamo's indexer read.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from entresol_client.relay.chain import Removed, Stored
from entresol_client.relay.wire import END_OF_REPLAY, Form, Writer, seq_frame, topic
from tests.engines.routers import llmd

TOKENS = list(range(100, 132))
STORED = Stored([2**64 - 1, 7], 5, array("I", TOKENS), 16, "tuned")
REMOVED = Removed([7, 9])


class OldBatch(msgspec.Struct, array_like=True):
    """vLLM 0.9 to 0.2x: arrays in arrays."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class OldStored(msgspec.Struct, array_like=True, tag="BlockStored", forbid_unknown_fields=True):
    """With what the last of that generation had."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class OldRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", forbid_unknown_fields=True):
    """The same."""

    block_hashes: list[int | bytes]
    medium: str | None = None


class OldCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    """The same."""


class NewStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    """vLLM 0.32: maps."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    locality: str | None = None


class NewRemoved(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    """The same."""

    block_hashes: list[int | bytes]
    medium: str | None


class NewCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The same."""


class OldKvBatch(OldBatch):
    """Typed."""

    events: list[OldStored | OldRemoved | OldCleared]


class MidKvBatch(msgspec.Struct, array_like=True):
    """vLLM 0.32: an array of maps."""

    ts: float
    events: list[NewStored | NewRemoved | NewCleared]
    data_parallel_rank: int | None = None


class NewKvBatch(msgspec.Struct):
    """vLLM's next: maps in a map."""

    ts: float
    events: list[NewStored | NewRemoved | NewCleared]
    data_parallel_rank: int | None = None


READERS: dict[Form, type] = {"array": OldKvBatch, "map": MidKvBatch, "maps": NewKvBatch}


def written(form: Form, medium: str = "EXTERNAL", dp_rank: int | None = 3) -> bytes:
    writer = Writer(form, medium)
    events = [writer.event(STORED), writer.event(REMOVED), writer.cleared()]
    return writer.batch(events, time_unix_s=12.5, dp_rank=dp_rank)


@pytest.mark.parametrize("form", READERS)
@pytest.mark.parametrize("medium", ["EXTERNAL", "STORAGE"])
def test_every_generation_reads_its_form_and_all_that_is_needed(form: Form, medium: str) -> None:
    batch = msgspec.msgpack.Decoder(READERS[form]).decode(written(form, medium))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    stored, removed, cleared = batch.events
    assert (stored.block_hashes, stored.parent_block_hash) == (STORED.hashes, 5)
    assert (stored.token_ids, stored.block_size) == (TOKENS, 16)
    assert (stored.lora_id, stored.medium, stored.lora_name) == (None, medium, "tuned")
    assert (removed.block_hashes, removed.medium) == ([7, 9], medium)
    assert type(cleared) in (OldCleared, NewCleared)


@pytest.mark.parametrize("form", READERS)
def test_no_form_is_taken_for_another(form: Form) -> None:
    for other, reader in READERS.items():
        if other != form:
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.Decoder(reader).decode(written(form))


def test_no_locality_is_sent_in_any_form() -> None:
    assert all(b"locality" not in written(form).lower() for form in READERS)
    stored = msgspec.msgpack.decode(written("array"))[1][0]
    assert len(stored) == 8, "nothing behind the adapter's name"


def test_hashes_may_be_bytes_and_the_root_has_no_parent() -> None:
    writer = Writer()
    event = writer.event(Stored([b"h" * 32], None, array("I", [1, 2]), 2))
    raw = writer.batch([event], time_unix_s=1.0, dp_rank=None)
    batch = msgspec.msgpack.Decoder(OldKvBatch).decode(raw)
    assert batch.data_parallel_rank is None
    assert batch.events[0].block_hashes == [b"h" * 32]
    assert batch.events[0].parent_block_hash is None
    assert batch.events[0].lora_name is None


def test_an_empty_batch_is_one_in_every_form() -> None:
    for form, reader in READERS.items():
        raw = Writer(form).batch([], time_unix_s=1.0, dp_rank=None)
        assert msgspec.msgpack.Decoder(reader).decode(raw).events == []
    assert llmd.parse(Writer().batch([], time_unix_s=1.0, dp_rank=None)) == []


def test_frames() -> None:
    assert topic("pod0", "org/model") == b"kv@pod0@org/model"
    assert seq_frame(258) == bytes([0, 0, 0, 0, 0, 0, 1, 2])
    assert int.from_bytes(END_OF_REPLAY, "big", signed=True) == -1


# llm-d --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["array", "map"])
def test_llmd_reads_arrays_and_maps_in_an_array(form: Form) -> None:
    stored, removed, cleared = llmd.parse(written(form))
    assert stored == llmd.Stored(STORED.hashes, 5, TOKENS, 16, "EXTERNAL", "tuned")
    assert removed == llmd.Removed([7, 9], "EXTERNAL")
    assert isinstance(cleared, llmd.Cleared)
    with pytest.raises(llmd.Unreadable):
        llmd.parse(written("maps"))


def test_llmd_counts_how_often_a_block_was_stored() -> None:
    index, writer = llmd.Index(), Writer()

    def read(*changes: Stored | Removed) -> float:
        events = [writer.event(change) for change in changes]
        batch = writer.batch(events, time_unix_s=1.0, dp_rank=None)
        index.read(topic("pod0", "m"), batch)
        return index.scores(TOKENS, "m").get("pod0", 0.0)

    stored = Stored([1, 2], None, array("I", TOKENS), 16)
    assert [read(stored), read(stored), read(Removed([1, 2]))] == [2.0] * 3
    assert read(Removed([1, 2])) == 0.0
    assert [read(stored), read(stored), read(Removed([1, 1, 1, 2, 2]))] == [2.0, 2.0, 0.0]


def test_llmd_takes_pod_and_model_from_the_topic() -> None:
    assert llmd.parse_topic(topic("pod0", "org/model")) == ("pod0", "org/model")
    with pytest.raises(llmd.Unreadable):
        llmd.parse_topic(topic("pod0", "org@model"))


@pytest.mark.parametrize("weights", [{}, {"external": 0.5}])
def test_llmd_scores_the_prefix_with_the_tiers_weight(weights: dict[str, float]) -> None:
    """Without a weight of its own the tier counts as much as the GPU: one should be added."""
    index = llmd.Index(weights=llmd.WEIGHTS | weights)
    writer = Writer()

    def read(*changes: Stored | Removed) -> None:
        events = [writer.event(change) for change in changes]
        batch = writer.batch(events, time_unix_s=1.0, dp_rank=None)
        index.read(topic("pod0", "m"), batch)

    read(Stored([1, 2], None, array("I", TOKENS), 16))
    read(Stored([3], 2, array("I", range(16)), 16))
    prompt = [*TOKENS, *range(16)]
    weight = weights.get("external", 1.0)
    assert index.scores(prompt, "m") == {"pod0": 3 * weight}
    assert index.scores([1, *prompt], "m") == {}
    read(Removed([2]))
    assert index.scores(prompt, "m") == {"pod0": weight}
    read(Stored([4], 99, array("I", range(16)), 16))
    assert index.dropped == 1, "a block of an unknown parent is of no use to it"


def test_llmd_reads_stored_blocks_that_are_larger_than_its_own() -> None:
    index, writer = llmd.Index(block_size=8), Writer()
    event = writer.event(Stored([1], None, array("I", TOKENS), 32))
    index.read(topic("p", "m"), writer.batch([event], time_unix_s=1.0, dp_rank=None))
    assert index.scores(TOKENS, "m") == {"p": 4.0}
