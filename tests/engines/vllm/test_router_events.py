"""vLLM's own classes decode what the relay writes; its own publisher replays in the same frames.

vLLM 0.32 reads events as maps inside an array (`--form map`); the positional form, which routers
read, is what it wrote before. Whichever the installed vLLM has is found by asking its classes.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from entresol_client.relay.chain import Removed, Stored
from entresol_client.relay.publisher import Publisher
from entresol_client.relay.wire import Form, Writer
from entresol_client.relay.workers import Worker
from tests.engines.routers import llmd
from tests.engines.routers.lab import RelayProcess, eventually
from tests.engines.vllm.conftest import Site
from tests.engines.vllm.engine import BLOCK_TOKENS, events, prompt

TOKENS = list(range(32))
SECONDS_MAX = 10.0


def form_of_this_vllm() -> Form:
    """What its classes are declared to be."""
    if KVEventBatch.__struct_config__.array_like:
        return "array" if BlockStored.__struct_config__.array_like else "map"
    return "maps"


def test_vllms_classes_decode_what_is_written() -> None:
    form = form_of_this_vllm()
    print(f"this vLLM reads --form {form}")
    writer = Writer(form, "STORAGE")
    events = [
        writer.event(Stored([11, 12], 10, array("I", TOKENS), 16, "tuned")),
        writer.event(Removed([12])),
        writer.cleared(),
    ]
    raw = writer.batch(events, time_unix_s=3.5, dp_rank=1)
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(raw)
    assert (batch.ts, batch.data_parallel_rank) == (3.5, 1)
    stored, removed, cleared = batch.events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ([11, 12], 10)
    assert (stored.token_ids, stored.block_size) == (TOKENS, 16)
    assert (stored.medium, stored.lora_id, stored.lora_name) == ("STORAGE", None, "tuned")
    assert getattr(stored, "locality", None) is None
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium) == ([12], "STORAGE")
    assert isinstance(cleared, AllBlocksCleared)


def test_what_vllm_writes_is_what_we_write() -> None:
    """The same content, encoded by vLLM's class and by the relay, is the same bytes or map."""
    form = form_of_this_vllm()
    theirs = msgspec.msgpack.encode(
        KVEventBatch(
            ts=1.0,
            events=[
                BlockStored(
                    block_hashes=[5], parent_block_hash=None, token_ids=TOKENS, block_size=32,
                    lora_id=None, medium="STORAGE", lora_name=None,
                ),
                BlockRemoved(block_hashes=[5], medium="STORAGE"),
                AllBlocksCleared(),
            ],
            data_parallel_rank=0,
        )
    )  # fmt: skip
    writer = Writer(form, "STORAGE")
    events = [
        writer.event(Stored([5], None, array("I", TOKENS), 32)),
        writer.event(Removed([5])),
        writer.cleared(),
    ]
    ours = writer.batch(events, time_unix_s=1.0, dp_rank=0)
    assert msgspec.msgpack.decode(ours) == msgspec.msgpack.decode(theirs)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_hashes_as_vllm_cuts_them(as_bytes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    from entresol_client.relay import keys

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0" if as_bytes else "1")
    block_hash = kv_cache_utils.BlockHash(bytes(range(32)))
    theirs = kv_cache_utils.maybe_convert_block_hash(block_hash)
    parts = keys.split(bytes(block_hash) + bytes(4), "vllm")
    assert theirs == (parts.hash if as_bytes else keys.number(parts.hash))


# Replay -------------------------------------------------------------------------------------------


def ask(place: str, start: int) -> list[list[bytes]]:
    """A replay as a reader that knows vLLM's publisher asks for it."""
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.connect(place)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            found = []
            while socket.poll(SECONDS_MAX * 1000):
                found.append(socket.recv_multipart())
                if found[-1][-2] == ZmqEventPublisher.END_SEQ:
                    return found
            raise AssertionError(f"no end after {found}")
    finally:
        context.destroy(linger=0)


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[tuple[str, ZmqEventPublisher]]:
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    publisher = ZmqEventPublisher(0, endpoint=live, replay_endpoint=replay, topic="kv@pod0@m")
    yield replay, publisher
    publisher.shutdown()


def test_replay_has_the_frames_of_vllms_own(theirs: tuple[str, ZmqEventPublisher]) -> None:
    place, publisher = theirs
    for number in range(3):
        publisher.publish(KVEventBatch(ts=float(number), events=[AllBlocksCleared()]))
    until = time.monotonic() + SECONDS_MAX
    while len(expected := ask(place, 1)) < 3:
        assert time.monotonic() < until, expected
    writer = Writer(form_of_this_vllm())
    ours = Publisher(
        [Worker("pod0", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", dp_rank=0)], "m", start_seq=0,
        replay_topic=len(expected[0]) == 4,
    )  # fmt: skip
    try:
        for number in range(3):
            stamp = float(number)
            ours.publish(
                lambda rank, stamp=stamp: writer.batch(  # type: ignore[misc]
                    [writer.cleared()], time_unix_s=stamp, dp_rank=rank
                )
            )
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                ours.serve()
                time.sleep(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            found = ask(ours.endpoints(ours.outlets[0])[1], 1)
        finally:
            stop.set()
            thread.join()
    finally:
        ours.close()
    assert len(expected[0]) == 4, "this vLLM tells the topic in replays: --replay-form topic"
    assert found == expected


# A real engine -----------------------------------------------------------------------------------


def test_what_a_real_engine_stores_is_scored_by_a_router(site: Site, tiny_llama: Path) -> None:
    """vLLM with `EntresolConnector` computes a prompt; the router scores it as llm-d would.

    The router may come while the blocks of earlier tests are being told for the first time: what
    hangs on blocks that it missed it has to drop, and has it all after the round made for it.
    """
    context = zmq.Context()
    words = prompt(77, 10 * BLOCK_TOKENS + 5)
    options = ("--served-name", "tiny", "--round-pause", "100ms")
    with RelayProcess(site.daemon, *options, model=str(tiny_llama)) as relay:
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv@pod0@tiny")
            socket.connect(relay.live["pod0"])
            eventually(lambda: relay.status()["rounds"], "the round for this router")
            site.b.run(words)
            site.b.settle()
            index = llmd.Index(block_size=BLOCK_TOKENS)

            def score() -> float:
                while socket.poll(50):
                    topic, _, payload = socket.recv_multipart()
                    index.read(topic, payload)
                return index.scores(words, "tiny").get("pod0", 0.0)

            try:
                eventually(
                    lambda: score() == 10.0 and not index.missing, "ten blocks, and none missing"
                )
            except AssertionError as error:
                error.add_note(f"scores {score()}, missing {index.missing}, told {index.requests}")
                error.add_note(f"the engine {site.b.counts()}, the relay {relay.status()}")
                raise
            told = {
                row["engine_keys"][0]: row["tokens"]
                for row in events(site.daemon)
                if row["kind"] == "stored"
            }
            hashes = {int.from_bytes(bytes.fromhex(key)[24:32], "big") for key in told}
            assert set(index.requests) <= hashes, "the router knows blocks by vLLM's own hashes"
            assert index.scores([1, *words], "tiny") == {}
        finally:
            socket.close(linger=0)
            context.destroy(linger=0)
