"""Dynamo's own indexer reads a relay unchanged, and scores prefixes as they are stored.

The daemon, the relay and the indexer are real processes; blocks are stored with the client as an
engine's tier stores them. The indexer's answer is compared with what the daemon says it has.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_client.relay.chain import TELLINGS_MAX
from entresol_proto.limits import MIB
from tests.engines.routers.lab import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    DESCRIPTOR,
    MODEL,
    Engine,
    Indexer,
    Prompt,
    RelayProcess,
    eventually,
    prompt,
)
from tests.engines.tier_daemon import TierDaemon


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    with Indexer(tmp_path) as one:
        yield one


def prefix(indexer: Indexer, one: Prompt, worker: int = 1) -> int:
    """Blocks of the prompt that the worker can take from the external tier, for all it knows."""
    found = indexer.query(one.tokens)["instances"].get(str(worker), {})
    assert found.get("gpu", 0) == found.get("cpu", 0) == 0, found
    tokens = found.get("disk", 0)
    assert tokens == found.get("longest_matched", 0), found
    assert tokens % BLOCK_TOKENS == 0
    return int(tokens) // BLOCK_TOKENS


def scores(indexer: Indexer, one: Prompt, blocks: int, worker: int = 1) -> None:
    """Wait until the prefix is exactly so long."""
    eventually(
        lambda: prefix(indexer, one, worker) == blocks or None,
        f"a prefix of {blocks} blocks for worker {worker}",
    )


def leading(stored: list[bool]) -> int:
    """How many blocks are stored before the first that is not."""
    return stored.index(False) if False in stored else len(stored)


def test_prefixes_after_store_and_forget(tier: TierDaemon, indexer: Indexer) -> None:
    first = prompt(8, 1)
    second = prompt(8, 2, shared=Prompt(first.tokens[: 4 * BLOCK_TOKENS], first.keys[:4]))
    with Engine(tier) as engine, RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        engine.store(first, 0, 3)
        scores(indexer, first, 3)
        scores(indexer, second, 3)
        engine.store(first, 3, 8)
        engine.store(second, 4, 8)
        scores(indexer, first, 8)
        scores(indexer, second, 8)
        assert prefix(indexer, prompt(8, 3)) == 0, "a prompt that nobody stored"
        engine.forget(first, 5, 6)
        scores(indexer, first, 5)
        scores(indexer, second, 8)
        engine.store(first, 5, 6)
        scores(indexer, first, 8)
        engine.forget(first, 0, 1)
        scores(indexer, first, 0)
        scores(indexer, second, 0)


@pytest.mark.full_only
def test_blocks_in_any_order_wait_for_their_parents(tier: TierDaemon, indexer: Indexer) -> None:
    one = prompt(6, 1)
    with Engine(tier) as engine, RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        for at in (5, 3, 4, 1):
            engine.store(one, at, at + 1)
        eventually(lambda: relay.status()["blocks"]["waiting"] == 4, "four blocks wait")
        assert prefix(indexer, one) == 0
        engine.store(one, 0, 1)
        scores(indexer, one, 2)
        engine.store(one, 2, 3)
        scores(indexer, one, 6)


@pytest.mark.full_only
def test_every_worker_is_credited(tier: TierDaemon, indexer: Indexer) -> None:
    one = prompt(5, 1)
    pods = ("pod0", "pod1", "pod2")
    with Engine(tier) as engine, RelayProcess(tier, pods=pods) as relay:
        for number, pod in enumerate(pods, start=1):
            indexer.register(number, relay, pod)
        engine.store(one)
        for number in range(1, 4):
            scores(indexer, one, 5, number)
        engine.forget(one, 4, 5)
        for number in range(1, 4):
            scores(indexer, one, 4, number)


def test_prefixes_after_real_eviction(
    make_tier: Callable[..., TierDaemon], indexer: Indexer
) -> None:
    """A flash that holds a fraction of what is stored: the scores follow what is left of it."""
    tier = make_tier(
        settings={
            "flash": {"size_bytes": 24 * MIB, "segment_bytes": 2 * MIB},
            "memory": {"dram_bytes": 16 * MIB, "slab_bytes": 4 * MIB},
            "limits": {"block_bytes_max": MIB // 2, "inflight_bytes_per_session_max": 16 * MIB,
                       "put_queue_bytes_max": 16 * MIB},
        }
    )  # fmt: skip
    tier.start()
    prompts = [prompt(16, number) for number in range(1, 49)]
    with Engine(tier) as engine, RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        for one in prompts:
            engine.store(one)
        gone = tier.metric("entresol_evicted_blocks_total", reason="evicted")
        assert gone > 100, "the flash is smaller than what was stored"
        truth = {number: leading(engine.stored(one)) for number, one in enumerate(prompts)}
        assert 0 < sum(truth.values()) < 16 * len(prompts)
        for number, one in enumerate(prompts):
            scores(indexer, one, truth[number])
        stored = sum(sum(engine.stored(one)) for one in prompts)
        eventually(lambda: relay.status()["blocks"]["stored"] == stored, f"{stored} known")
        print(f"evicted {gone:.0f} of {16 * len(prompts)} blocks, scores of {len(prompts)} agree")


def test_prefixes_after_the_daemon_restarts(tier: TierDaemon, indexer: Indexer) -> None:
    kept, forgotten = prompt(8, 1), prompt(4, 2)
    with RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        with Engine(tier) as engine:
            engine.store(kept)
            engine.store(forgotten)
            scores(indexer, kept, 8)
            scores(indexer, forgotten, 4)
        tier.restart()
        with Engine(tier) as engine:
            engine.forget(forgotten, 0, 4)
            scores(indexer, forgotten, 0)
            scores(indexer, kept, 8)
            new = prompt(9, 1, shared=kept)
            engine.store(new, 8, 9)
            scores(indexer, new, 9)
        assert relay.counts("announced_blocks", 13) == 8 + 4 + 1, "only the difference was told"
        assert relay.counts("withdrawn_blocks", 4) == 4


@pytest.mark.full_only
def test_prefixes_after_a_kill_that_lost_blocks(tier: TierDaemon, indexer: Indexer) -> None:
    """What the daemon lost with its memory is withdrawn by the snapshot that follows."""
    one = prompt(8, 1)
    with RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        with Engine(tier) as engine:
            engine.store(one, 0, 6)
            scores(indexer, one, 6)
        tier.kill()
        tier.data_file.unlink()
        tier.start()
        with Engine(tier) as engine:
            scores(indexer, one, 0)
            engine.store(one, 0, 2)
            scores(indexer, one, 2)


@pytest.mark.full_only
def test_a_shard_that_stays_away_is_withdrawn_and_comes_back(
    tier: TierDaemon, indexer: Indexer
) -> None:
    one = prompt(4, 1)
    with RelayProcess(tier, "--withdraw-after", "1s") as relay:
        indexer.register(1, relay, "pod0")
        with Engine(tier) as engine:
            engine.store(one)
            scores(indexer, one, 4)
        tier.stop()
        scores(indexer, one, 0)
        tier.start()
        scores(indexer, one, 4)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_prefixes_after_the_relay_restarts(tier: TierDaemon, indexer: Indexer, how: str) -> None:
    """The indexer keeps its connection and its last number; what changed meanwhile is corrected."""
    one, other = prompt(8, 1), prompt(4, 2)
    with Engine(tier) as engine, RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        engine.store(one)
        engine.store(other)
        scores(indexer, one, 8)
        scores(indexer, other, 4)
        if how == "stop":
            assert relay.stop() == 0
        relay.kill()
        engine.forget(one, 6, 8)
        engine.forget(other, 0, 4)
        assert prefix(indexer, one) == 8, "nobody told it yet"
        relay.start()
        scores(indexer, one, 6)
        scores(indexer, other, 0)
        engine.store(one, 6, 7)
        scores(indexer, one, 7)


def test_a_late_indexer_learns_by_replay_what_is_stored(tier: TierDaemon, tmp_path: Path) -> None:
    one = prompt(8, 1)
    with Engine(tier) as engine, RelayProcess(tier) as relay:
        for at in range(8):
            engine.store(one, at, at + 1)
        relay.announces(8)
        engine.forget(one, 7, 8)
        relay.announces(7)
        with Indexer(tmp_path) as late:
            late.register(1, relay, "pod0")
            scores(late, one, 7)
            relay.counts("replays")


@pytest.mark.parametrize("replay", [True, False])
def test_an_indexer_behind_the_buffer_is_told_everything_again(
    tier: TierDaemon, tmp_path: Path, replay: bool
) -> None:
    """The buffer holds four messages; and a reader without a replay socket has none at all."""
    one = prompt(12, 1)
    words = ("--buffer", "4", "--round-pause", "100ms")
    with Engine(tier) as engine, RelayProcess(tier, *words) as relay:
        for at in range(12):
            engine.store(one, at, at + 1)
            relay.announces(at + 1)
        with Indexer(tmp_path) as late:
            late.register(1, relay, "pod0", replay=replay)
            scores(late, one, 12)
            eventually(lambda: relay.status()["rounds"], "a round")


@pytest.mark.full_only
def test_media_and_forms_that_count_for_dynamo(tier: TierDaemon, indexer: Indexer) -> None:
    one = prompt(3, 1)
    with (
        Engine(tier) as engine,
        RelayProcess(tier, "--medium", "STORAGE") as storage,
        RelayProcess(tier, "--form", "map") as maps,
    ):
        for number, relay in enumerate((storage, maps), start=1):
            indexer.register(number, relay, "pod0")
        engine.store(one)
        for number in (1, 2):
            scores(indexer, one, 3, number)
        engine.forget(one, 2, 3)
        for number in (1, 2):
            scores(indexer, one, 2, number)


@pytest.mark.full_only
@pytest.mark.parametrize("words", [("--form", "maps"), ("--hashes", "bytes")])
def test_what_dynamo_does_not_read(tier: TierDaemon, indexer: Indexer, words: list[str]) -> None:
    """ROUTERS.md says so; when this fails, the page can promise more."""
    one = prompt(3, 1)
    with Engine(tier) as engine, RelayProcess(tier, *words) as relay:
        indexer.register(1, relay, "pod0")
        eventually(lambda: relay.status()["workers"][0]["readers"], "the indexer's subscription")
        engine.store(one)
        relay.announces(3)
        eventually(lambda: "Failed to decode" in indexer.log_path.read_text(), "its refusal")
        assert prefix(indexer, one) == 0


@pytest.mark.full_only
def test_larger_stored_blocks_are_cut_to_the_indexers(tier: TierDaemon, indexer: Indexer) -> None:
    """The engine stores four of its blocks as one; the indexer works in the engine's."""
    big = replace(DESCRIPTOR, block_tokens=4 * BLOCK_TOKENS)
    tokens = tuple(range(7000, 7000 + 12 * BLOCK_TOKENS))
    one = prompt(3, 9)
    with Engine(tier, big) as engine, RelayProcess(tier, "--block-tokens", "16") as relay:
        indexer.register(1, relay, "pod0")
        put = _put_big(engine, one, tokens)
        scores(indexer, Prompt(tokens, put), 12)
        engine.forget(one, 2, 3)
        scores(indexer, Prompt(tokens, put), 8)


def _put_big(engine: Engine, one: Prompt, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """Chunks of 64 tokens under the keys of a prompt."""
    from entresol_client import PutBlock

    width = 4 * BLOCK_TOKENS
    done = engine.space().put(
        [
            PutBlock(key, bytes(BLOCK_BYTES), at, one.keys[at - 1] if at else None,
                     tokens[at * width : (at + 1) * width])
            for at, key in enumerate(one.keys)
        ],
        ack="durable",
    )  # fmt: skip
    assert done.ok
    return one.keys


def test_a_prefix_needs_all_ranks(tier: TierDaemon, indexer: Indexer) -> None:
    two = replace(DESCRIPTOR, tp_world=2)
    one = prompt(4, 1)
    with Engine(tier, two) as engine, RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        engine.space(1).exists(list(one.keys))  # both workers are there before anything is stored
        engine.store(one, rank=0)
        engine.store(one, 0, 2, rank=1)
        scores(indexer, one, 2)
        engine.store(one, 2, 4, rank=1)
        scores(indexer, one, 4)
        assert engine.space(1).forget([one.keys[1]]).count == 1
        scores(indexer, one, 1)


def test_another_tenants_blocks_are_not_told(tier: TierDaemon, indexer: Indexer) -> None:
    """The relay runs as `dev`; `other` stores the same prompt under the same model."""
    from entresol_client import Client, ClientConfig, PutBlock

    one = prompt(4, 1)
    with RelayProcess(tier) as relay, Client(ClientConfig.load(tier.client_toml("other"))) as other:
        indexer.register(1, relay, "pod0")
        space = other.namespace(DESCRIPTOR)
        done = space.put(
            [PutBlock(key, bytes(BLOCK_BYTES), at, one.keys[at - 1] if at else None,
                      one.block_tokens(at)) for at, key in enumerate(one.keys)],
            ack="durable",
        )  # fmt: skip
        assert done.ok
        with Engine(tier) as engine:
            engine.store(prompt(2, 2))
            scores(indexer, prompt(2, 2), 2)
        assert prefix(indexer, one) == 0
        eventually(lambda: relay.status()["events"] == 2, "the two events of dev, and no other")


@pytest.mark.full_only
def test_hangup_tells_everything_again(tier: TierDaemon, indexer: Indexer) -> None:
    one = prompt(3, 1)
    with Engine(tier) as engine, RelayProcess(tier, "--round-pause", "100ms") as relay:
        indexer.register(1, relay, "pod0")
        engine.store(one)
        scores(indexer, one, 3)
        eventually(lambda: relay.status()["rounds"] == 1, "the round for the indexer")
        time.sleep(0.5)
        relay.signal(signal.SIGHUP)
        eventually(lambda: relay.status()["rounds"] == 2, "a round more")
        relay.announces(3)
        scores(indexer, one, 3)
        for rounds in range(3, TELLINGS_MAX + 3):  # past the one that takes back what was told
            relay.signal(signal.SIGHUP)
            eventually(lambda least=rounds: relay.status()["rounds"] >= least, "a round more")
        relay.announces(3)
        scores(indexer, one, 3)
        engine.forget(one, 1, 3)
        scores(indexer, one, 1)


@pytest.mark.full_only
def test_the_dump_is_what_is_stored(tier: TierDaemon, indexer: Indexer) -> None:
    one = prompt(5, 1)
    with Engine(tier) as engine, RelayProcess(tier) as relay:
        indexer.register(1, relay, "pod0")
        engine.store(one)
        scores(indexer, one, 5)
        dump = indexer.get("/dump")[f"{MODEL}:default"]
        assert dump["block_size"] == BLOCK_TOKENS
        found = {}
        for event in dump["events"]:
            assert event["storage_tier"] == "external"
            stored = event["event"]["data"]["stored"]
            (block,) = stored["blocks"]
            found[block["block_hash"]] = stored["parent_hash"]
        hashes = one.hashes
        assert found == {h: hashes[at - 1] if at else None for at, h in enumerate(hashes)}
