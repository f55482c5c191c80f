"""Blocks between a worker's caches and the real daemon: every layout, and what goes wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from entresol_client.engines.kvbm_hash import KeyChain
from entresol_client.engines.kvbm_pages import BlockPages
from entresol_client.engines.kvbm_plan import LoadOp, StoreBlock, StoreOp
from entresol_client.engines.kvbm_space import KvbmSettings, Tenants
from entresol_client.engines.kvbm_transfer import (
    Arena,
    Arrivals,
    Loaded,
    Loader,
    Saver,
    _Accelerator,
)
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.limits import MIB
from entresol_proto.status import ConfigError
from tests.engines.tier_daemon import TierDaemon

BLOCKS = 64
LAYERS = 3
TOKENS = 16
WAIT_SECONDS = 30.0
# Shape of a layer's tensor, and the order of its axes in memory (outermost first).
LAYOUTS = {
    "blocks_kv_nhd": ((BLOCKS, 2, TOKENS, 4, 64), (0, 1, 2, 3, 4)),
    "kv_blocks_nhd": ((2, BLOCKS, TOKENS, 4, 64), (0, 1, 2, 3, 4)),
    "kv_blocks_hnd": ((2, BLOCKS, TOKENS, 4, 64), (0, 1, 3, 2, 4)),
    "packed": ((BLOCKS, 2, TOKENS, 128), (0, 1, 2, 3)),
    "heads_outermost": ((BLOCKS, 2, TOKENS, 128), (1, 0, 2, 3)),
    "mla": ((BLOCKS, TOKENS, 576), (0, 1, 2)),
}


def caches(
    layout: str, seed: int | None, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> list[tuple[str, torch.Tensor]]:
    """Layers of random numbers; of zeros without a seed."""
    shape, order = LAYOUTS[layout]
    made = []
    for layer in range(LAYERS):
        generator = torch.Generator().manual_seed((seed or 0) * 100 + layer)
        laid = [shape[axis] for axis in order]
        raw = torch.randint(0, 2**15, laid, generator=generator, dtype=torch.int16)
        if seed is None:
            raw.zero_()
        raw = raw.to(device)
        axes = [order.index(axis) for axis in range(len(order))]
        made.append((f"layers.{layer}", raw.view(dtype).permute(axes)))
    return made


def block_of(layout: str, tensor: torch.Tensor, block: int) -> torch.Tensor:
    axis = LAYOUTS[layout][0].index(BLOCKS)
    return tensor.select(axis, block).contiguous().view(torch.int16)


def keys(count: int) -> list[bytes]:
    chain = KeyChain(TOKENS)
    chain.extend(list(range(count * TOKENS)))
    return chain.keys


class Side:
    """One worker's caches with their way to the daemon."""

    def __init__(
        self,
        client_toml: Path,
        layout: str,
        seed: int | None,
        device: str = "cpu",
        **settings: int,
    ) -> None:
        self.layout = layout
        self.caches = caches(layout, seed, device=device)
        pages = BlockPages(self.caches, BLOCKS)
        self.pages = pages
        how = KvbmSettings(config=str(client_toml), **settings)  # type: ignore[arg-type]
        self.tenants = Tenants(how)
        spaces = self.tenants.spaces(
            NamespaceDescriptor("test/kvbm", layers=LAYERS, page_layout=layout)
        )
        self.saver = Saver(pages, spaces, how.staging_bytes)
        self.loader = Loader(pages, spaces, how.staging_bytes)

    def store(self, blocks: list[int]) -> None:
        rows = [
            StoreBlock(key, block, at, None, tuple(range(at * TOKENS, (at + 1) * TOKENS)))
            for at, (key, block) in enumerate(zip(keys(len(blocks)), blocks, strict=True))
        ]
        self.saver.keep(StoreOp("r", "", tuple(rows)))

    def stored(self, blocks: list[int]) -> None:
        self.store(blocks)
        until = time.monotonic() + WAIT_SECONDS
        while self.tenants.stats().get("stored_blocks", 0) < len(blocks):
            assert time.monotonic() < until, self.tenants.stats()
            time.sleep(0.01)

    def load(self, blocks: list[int], seconds: float = WAIT_SECONDS) -> Loaded:
        self.loader.start(LoadOp("r", "", tuple(keys(len(blocks))), tuple(blocks), False))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for over in self.loader.over():
                return over
            time.sleep(0.005)
        raise AssertionError("the load does not end")

    def block(self, block: int) -> list[torch.Tensor]:
        return [block_of(self.layout, tensor, block) for _, tensor in self.caches]

    def same(self, block: int, other: Side, there: int) -> bool:
        pairs = zip(self.block(block), other.block(there), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def empty(self, block: int) -> bool:
        return not any(part.any() for part in self.block(block))

    def close(self) -> None:
        self.loader.close()
        self.saver.close()
        self.tenants.close()


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*arguments, **settings) -> Side:  # type: ignore[no-untyped-def]
        made.append(Side(*arguments, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_into_other_places_byte_for_byte(
    layout: str, tier: TierDaemon, make_side: Callable[..., Side]
) -> None:
    """Through pieces smaller than the request, and nothing else of the device is touched."""
    rng = random.Random(3)
    here, there = rng.sample(range(BLOCKS), 40), rng.sample(range(BLOCKS), 40)
    writer = make_side(tier.client_toml(), layout, 1, staging_bytes=4 * MIB)
    writer.stored(here)
    reader = make_side(tier.client_toml(), layout, None, staging_bytes=MIB)
    assert reader.load(there).failed_blocks == ()
    assert all(reader.same(into, writer, out) for into, out in zip(there, here, strict=True))
    assert all(reader.empty(block) for block in set(range(BLOCKS)) - set(there))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run here: no GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_into_a_gpu(
    layout: str, tier: TierDaemon, make_side: Callable[..., Side]
) -> None:
    """The same through streams, events and pinned memory; a GPU's blocks are a CPU's."""
    here = random.Random(3).sample(range(BLOCKS), 40)
    writer = make_side(tier.client_toml(), layout, 1, device="cuda", staging_bytes=4 * MIB)
    writer.stored(here)
    for device in ("cuda", "cpu"):
        reader = make_side(tier.client_toml(), layout, None, device=device, staging_bytes=MIB)
        assert reader.load(here).failed_blocks == ()
        for block in here:
            pairs = zip(reader.block(block), writer.block(block), strict=True)
            assert all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pairs)


def test_the_same_numbers_lie_the_same_in_any_layout_they_share(tier: TierDaemon) -> None:
    """The bytes of a block are its layers in order, each as it lies in memory."""
    for layout in LAYOUTS:
        tensors = caches(layout, 2)
        pages = BlockPages(tensors, BLOCKS)
        out = torch.empty((1, pages.block_bytes), dtype=torch.uint8)
        pages.gather([7], out)
        expected = b""
        for _, tensor in tensors:
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            laid = tensor.permute(order)
            axis = order.index(LAYOUTS[layout][0].index(BLOCKS))
            expected += laid.select(axis, 7).contiguous().view(torch.uint8).numpy().tobytes()
        assert out.numpy().tobytes() == expected


def test_layouts_have_names_of_their_own() -> None:
    names = [repr(BlockPages(caches(layout, None), BLOCKS).layout) for layout in LAYOUTS]
    assert len(set(names)) == len(names)
    half = BlockPages(caches("packed", None, torch.float16), BLOCKS).layout
    assert half != BlockPages(caches("packed", None), BLOCKS).layout


@pytest.mark.parametrize("shape", [(2, 2, 16, 4, 8), (5, 7, 16), (16,)])
def test_a_shape_that_does_not_tell_its_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        BlockPages([("layers.0", torch.zeros(shape))], 2)


def test_pages_with_gaps_are_refused() -> None:
    holed = torch.zeros((BLOCKS, 16, 2, 8))[:, :, :1]
    with pytest.raises(ConfigError, match="gaps"):
        BlockPages([("layers.0", holed)], BLOCKS)


def test_a_block_id_out_of_range_touches_nothing() -> None:
    pages = BlockPages(caches("packed", None), BLOCKS)
    with pytest.raises(ValueError, match="block ids"):
        pages.scatter([BLOCKS], torch.zeros((1, pages.block_bytes), dtype=torch.uint8))


def test_a_corrupt_block_and_what_is_behind_it_fail_and_are_not_written(
    tier: TierDaemon, make_side: Callable[..., Side]
) -> None:
    writer = make_side(tier.client_toml(), "packed", 1)
    writer.stored(list(range(20)))
    bad = keys(20)[13]
    tier.damage(lambda blocks: [one for one in blocks if one.engine_key == bad])
    reader = make_side(tier.client_toml(), "packed", None, staging_bytes=MIB)
    over = reader.load(list(range(30, 50)))
    assert over.failed_blocks == tuple(range(43, 50))
    assert all(reader.same(30 + at, writer, at) for at in range(13))
    assert all(reader.empty(block) for block in range(43, 50))
    assert reader.tenants.stats()["load_corrupt_blocks"] == 1


def test_an_absent_daemon_fails_loads_at_once_and_holds_no_block(
    make_tier: Callable[..., TierDaemon], make_side: Callable[..., Side]
) -> None:
    side = make_side(make_tier().client_toml(), "packed", 1)
    begun = time.monotonic()
    assert side.load([1, 2, 3]).failed_blocks == (1, 2, 3)
    side.store([4, 5, 6])
    side.saver.settle()
    assert not side.saver.copying("r")
    assert time.monotonic() - begun < 5.0


def test_a_hung_daemon_costs_no_more_than_the_deadline(
    tier: TierDaemon, make_side: Callable[..., Side]
) -> None:
    side = make_side(tier.client_toml(), "packed", 1, load_deadline_ms=700)
    side.stored(list(range(8)))
    tier.freeze()
    begun = time.monotonic()
    assert side.load(list(range(20, 28))).failed_blocks == tuple(range(20, 28))
    assert time.monotonic() - begun < 3.0
    tier.thaw()
    assert side.load(list(range(20, 28))).failed_blocks == ()


def test_stores_beyond_the_staging_are_shed_without_waiting(
    tier: TierDaemon, make_side: Callable[..., Side]
) -> None:
    side = make_side(tier.client_toml(), "packed", 1, staging_bytes=MIB, store_deadline_ms=3000)
    tier.freeze()
    begun = time.monotonic()
    for _ in range(4):
        side.store(list(range(40)))
    assert time.monotonic() - begun < 1.0
    assert side.saver.counts["shed_blocks"] > 0
    side.saver.settle()
    tier.thaw()


def test_a_copy_off_the_device_that_fails_is_shed_and_the_engine_goes_on(
    tier: TierDaemon, make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV cache has taken nearly all memory of the device: there may be none for a copy."""
    side = make_side(tier.client_toml(), "packed", 1)
    free = side.saver._free.qsize()
    with monkeypatch.context() as patched:
        patched.setattr(Arena, "take", lambda *_: 1 / 0)
        side.store(list(range(8)))
    assert side.saver.counts["shed_blocks"] == 8
    assert side.saver._free.qsize() == free
    side.store(list(range(8)))
    side.saver.settle()


def test_a_copy_to_the_device_that_fails_is_waited_for() -> None:
    """What was queued before it still writes blocks that vLLM is about to be told are its own."""

    class Stream:
        waited = 0

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def wait_event(self, _event: object) -> None: ...

        def synchronize(self) -> None:
            self.waited += 1

    device = object.__new__(_Accelerator)
    device._stream = stream = Stream()  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        device.run(lambda: 1 // 0, None)  # type: ignore[arg-type, return-value]
    assert stream.waited == 1


def test_a_daemon_killed_under_a_load_leaves_whole_blocks_or_none(
    tier: TierDaemon, make_side: Callable[..., Side]
) -> None:
    writer = make_side(tier.client_toml(), "packed", 1)
    writer.stored(list(range(60)))
    reader = make_side(tier.client_toml(), "packed", None, staging_bytes=MIB, load_deadline_ms=2000)
    reader.loader.start(LoadOp("r", "", tuple(keys(60)), tuple(range(60)), False))
    time.sleep(0.005)
    tier.kill()
    until = time.monotonic() + WAIT_SECONDS
    over: list[Loaded] = []
    while not over and time.monotonic() < until:
        over = list(reader.loader.over())
    failed = set(over[0].failed_blocks)
    for block in range(60):
        assert reader.same(block, writer, block) if block not in failed else reader.empty(block)


def op(name: str, beside: bool) -> LoadOp:
    return LoadOp(name, "", (b"k",), (1,), beside)


def test_vllm_hears_of_a_request_once_when_both_loads_are_over() -> None:
    for order in ("kvbm first", "ours first", "together"):
        arrivals = Arrivals()
        load = op("r", True)
        arrivals.expect(load)
        ours, kvbm = [Loaded(load, (9,))], {"r"}
        if order == "together":
            assert arrivals.merge(kvbm, ours) == ({"r"}, {9})
        else:
            first, second = ((kvbm, []), (set(), ours))
            if order == "ours first":
                first, second = second, first
            assert arrivals.merge(*first) == (set(), set())
            assert arrivals.merge(*second) == ({"r"}, {9})
        assert arrivals.merge(set(), []) == (set(), set())


def test_loads_of_one_side_alone_pass() -> None:
    arrivals = Arrivals()
    assert arrivals.merge({"theirs"}, []) == ({"theirs"}, set())
    load = op("mine", False)
    arrivals.expect(load)
    assert arrivals.merge({"theirs"}, []) == ({"theirs"}, set())
    assert arrivals.merge(set(), [Loaded(load, ())]) == ({"mine"}, set())
