"""Recompute or fetch, on a real GPU: the time to the first token with and without the tier.

    python -m bench.ttft [--shape llama-3.1-8b] [--tokens 8192,32768] [--shards 2] [--rounds 5]

A decoder with the shape of a known model and random weights (`bench.decoder`) computes the KV of a
prompt, which is the prefill; its blocks are stored by real daemons on this machine. Then the cache
is wiped, the blocks are fetched into pinned memory, sealed and opened here, copied to the GPU and
put into the cache while later ones are fetched, and the last token is computed. Every byte of the
cache but that token's must be what the prefill left, and every logit what the last token has over
the KV that was computed: otherwise it fails.

Weights are random, so the KV is no model's: it hardly shrinks, and blocks stay raw. Without
`--config` the daemons are made here and serve over shm: then no network is in these numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from bench import scratch
from bench.results import Line
from entresol_client import AsyncClient, ClientConfig, Namespace, PutBlock
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.limits import GIB, MIB

DEADLINE_NS = 300_000_000_000
BATCH_BYTES = 128 * MIB  # asked for at a time
BATCHES_AHEAD = 3


@dataclass(slots=True)
class Found:
    """Seconds of each round of one length of prompt."""

    tokens: int
    bytes: int
    prefill_s: list[float] = field(default_factory=list)
    fetch_s: list[float] = field(default_factory=list)
    put_s: float = 0.0
    tiers: dict[str, int] = field(default_factory=dict)


class Prompt:
    """A prompt's blocks: on the GPU in the cache, on the host in pinned memory.

    One block holds `block_tokens` tokens of all layers: (layer, K or V, head, token, dim).
    """

    def __init__(self, model: Any, tokens: int, block_tokens: int, seed: int) -> None:
        import torch

        self._torch = torch
        self.model = model
        self.block_tokens = block_tokens
        self.count = tokens // block_tokens
        self.block_bytes = model.shape.token_bytes * block_tokens
        device = model.cache.device
        made = torch.Generator(device).manual_seed(seed)
        self.ids = torch.randint(0, 32_000, (tokens,), device=device, generator=made)
        pinned = device.type == "cuda"
        host = torch.empty(self.count * self.block_bytes, dtype=torch.uint8, pin_memory=pinned)
        s = model.shape
        self._host = host.view(torch.bfloat16).view(
            self.count, s.layers, 2, s.kv_heads, block_tokens, s.head_dim
        )
        whole = memoryview(host.numpy())
        self.views = [
            whole[at : at + self.block_bytes] for at in range(0, len(whole), self.block_bytes)
        ]
        self.keys = _keys(self.ids.cpu().numpy(), block_tokens)

    def _in_cache(self, begin: int, end: int) -> Any:
        """The cache of blocks begin to end, in the order of blocks."""
        size = self.block_tokens
        part = self.model.cache[:, :, :, begin * size : end * size]
        return part.unflatten(3, (end - begin, size)).movedim(3, 0)

    def to_host(self) -> None:
        """Copy all blocks out of the cache."""
        for at in range(self.count):
            self._host[at].copy_(self._in_cache(at, at + 1)[0])
        self.sync()

    def to_gpu(self, begin: int, end: int) -> None:
        """Queue the copy of some blocks into the cache; returns at once."""
        sent = self._host[begin:end].to(self.model.cache.device, non_blocking=True)
        self._in_cache(begin, end).copy_(sent, non_blocking=True)

    def sync(self) -> None:
        """Wait for the GPU."""
        if self.model.cache.device.type == "cuda":
            self._torch.cuda.synchronize()


def _keys(ids: Any, block_tokens: int) -> list[bytes]:
    """Each block's name is a hash of its tokens and of the block before it."""
    names, parent = [], b"bench.ttft"
    for at in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = hashlib.sha256(parent + ids[at : at + block_tokens].tobytes()).digest()
        names.append(parent)
    return names


async def _store(ns: Namespace, prompt: Prompt) -> float:
    began = time.perf_counter()
    step = max(1, BATCH_BYTES // prompt.block_bytes)
    for at in range(0, prompt.count, step):
        items = [
            PutBlock(prompt.keys[n], prompt.views[n], n, prompt.keys[n - 1] if n else None)
            for n in range(at, min(at + step, prompt.count))
        ]
        done = await ns.put(items, ack="durable", deadline_ns=DEADLINE_NS)
        assert done.stored + done.existed == len(items), done.statuses
    return time.perf_counter() - began


async def _fetch(ns: Namespace, prompt: Prompt, found: Found) -> None:
    """All blocks into the cache, several batches under way."""
    step = max(1, BATCH_BYTES // prompt.block_bytes)
    gate = asyncio.Semaphore(BATCHES_AHEAD)

    async def one(at: int) -> None:
        end = min(at + step, prompt.count)
        async with gate:
            got = await ns.get_into(
                prompt.keys[at:end], prompt.views[at:end], deadline_ns=DEADLINE_NS
            )
        assert got.ok, got.statuses
        for tier in got.tiers:
            found.tiers[tier.label] = found.tiers.get(tier.label, 0) + 1
        prompt.to_gpu(at, end)

    await asyncio.gather(*(one(at) for at in range(0, prompt.count, step)))


async def _measure(ns: Namespace, prompt: Prompt, rounds: int) -> Found:
    import torch

    model = prompt.model
    used = prompt.count * prompt.block_tokens
    found = Found(len(prompt.ids), prompt.count * prompt.block_bytes)
    for round_ in range(rounds + 1):  # the first one warms up
        prompt.sync()
        began = time.perf_counter()
        logits = model.run(prompt.ids)
        prompt.sync()
        if round_:
            found.prefill_s.append(time.perf_counter() - began)
    wanted = model.cache[:, :, :, :used].clone()
    again = model.run(prompt.ids, len(prompt.ids) - 1)  # the last token alone, as after a fetch
    prompt.to_host()
    found.put_s = await _store(ns, prompt)
    for round_ in range(rounds + 1):
        model.cache.zero_()
        prompt._host.zero_()
        prompt.sync()
        found.tiers.clear()
        began = time.perf_counter()
        await _fetch(ns, prompt, found)
        first = model.run(prompt.ids, len(prompt.ids) - 1)
        prompt.sync()
        if round_:
            found.fetch_s.append(time.perf_counter() - began)
        last = used - 1 if used == len(prompt.ids) else used
        same = torch.equal(model.cache[:, :, :, :last], wanted[:, :, :, :last])
        assert same, "the cache is not what the prefill left"
        assert torch.equal(first, again), "other logits than over the KV that was computed"
    assert torch.isfinite(logits).all()
    return found


@contextlib.contextmanager
def _fleet(asked: argparse.Namespace, stored_bytes: int) -> Iterator[ClientConfig]:
    """Daemons of this bench, with flash for twice what each will store."""
    from bench import daemon

    settings = {
        "memory": {"dram_bytes": int(asked.dram_gib * GIB), "slab_bytes": 256 * MIB},
        "limits": {"inflight_bytes_per_session_max": 512 * MIB},
        "flash": {"size_bytes": max(GIB, 2 * stored_bytes) // (64 * MIB) * 64 * MIB},
    }
    with (
        scratch.folder(asked.folder) as folder,
        daemon.fleet(folder, asked.shards, settings) as config,
    ):
        yield replace(config, fabric="shm", fallback=False)


async def run(asked: argparse.Namespace) -> list[Found]:
    """All lengths of prompt, one after the other, over the same daemons."""
    import torch

    from bench.decoder import SHAPES, Decoder

    shape = SHAPES[asked.shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = [int(text) for text in asked.tokens.split(",")]
    say(f"{shape.name}: {shape.weights / 1e9:.1f} G weights, {shape.token_bytes:,} B of KV a token")
    model = Decoder(shape, max(lengths), device)
    results = []
    async with contextlib.AsyncExitStack() as stack:
        if asked.config is not None:
            config = ClientConfig.load(asked.config)
        else:
            stored = sum(lengths) * shape.token_bytes // asked.shards
            config = stack.enter_context(_fleet(asked, stored))
        config = replace(config, open_threads=asked.threads, staging_bytes_max=512 * MIB)
        client = await stack.enter_async_context(await AsyncClient.open(config))
        for seed, tokens in enumerate(lengths):
            space = NamespaceDescriptor(
                model=shape.name, layers=shape.layers, kv_heads=shape.kv_heads,
                head_dim=shape.head_dim, block_tokens=asked.block_tokens, cache_salt=str(tokens),
            )  # fmt: skip
            prompt = Prompt(model, tokens, asked.block_tokens, seed)
            found = await _measure(await client.namespace(space), prompt, asked.rounds)
            say(told(found))
            results.append(found)
            del prompt
    return results


def told(found: Found) -> str:
    """One length of prompt in a line."""
    prefill, fetch = statistics.median(found.prefill_s), statistics.median(found.fetch_s)
    size = found.bytes / 1e9
    return (
        f"{found.tokens:,} tokens, {size:.2f} GB: prefill {prefill:.3f} s "
        f"({min(found.prefill_s):.3f} to {max(found.prefill_s):.3f}), fetch {fetch:.3f} s "
        f"({min(found.fetch_s):.3f} to {max(found.fetch_s):.3f}; {size / fetch:.2f} GB/s, "
        f"from {found.tiers}), {prefill / fetch:.2f} times as fast; "
        f"put {size / found.put_s:.2f} GB/s; every byte and logit equal"
    )


def lines(results: list[Found]) -> list[Line]:
    """For a table."""
    made = []
    for found in results:
        made += [
            Line(f"ttft_prefill_{found.tokens}_s", "s", found.prefill_s),
            Line(f"ttft_fetch_{found.tokens}_s", "s", found.fetch_s),
        ]
    return made


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="llama-3.1-8b", help="tiny, or a model of bench.decoder")
    parser.add_argument("--tokens", default="8192,32768", help="lengths of prompt")
    parser.add_argument("--block-tokens", type=int, default=32)
    parser.add_argument("--config", type=Path, help="a client.toml: of daemons that run already")
    parser.add_argument("--shards", type=int, default=2, help="daemons, each a process")
    parser.add_argument("--threads", type=int, default=4, help="of the client, that open blocks")
    parser.add_argument("--dram-gib", type=float, default=4.0, help="of each daemon; less: flash")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the daemons keep their flash")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    try:
        import torch
    except ImportError:
        print("not run: this bench needs PyTorch (pip install torch), and a GPU to mean anything")
        return 0
    if not torch.cuda.is_available():
        say("no GPU: what follows shows only that the bench works")
    results = uvloop.run(run(asked))
    for line in lines(results):
        print(line.text())
    if asked.json:
        print(json.dumps([{n: getattr(one, n) for n in one.__slots__} for one in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
