"""What a host of the demo does with the decoder and a daemon: prefill, put, fetch, compare.

Invariants: a timed way to the first token begins with the prompt's token ids and ends with the
token chosen; loading the model, connecting and allocating the cache lie outside it, for fetching as
for recomputing. Nothing is compared while a timer runs. Whatever a fetch leaves in a buffer is
checked: an exact block where it says OK, only zeros where it does not.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entresol_client.config import ClientConfig
from entresol_client.demo.tinylm import (
    KVCache,
    TinyLM,
    block_hashes,
    load_document,
    reusable_blocks,
)
from entresol_client.demo.tokenizer import Tokenizer
from entresol_client.results import GetResult, PutBlock
from entresol_client.sync import Client, SyncNamespace
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import EntresolError, Status

QUESTION = "\n\nIn short, what are the rules of ownership in Rust?\n"
CALL_NS = 60_000_000_000  # generous: the demo also runs on slow and busy machines
Blocks = Sequence[NDArray[np.uint16]]
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """What a host process was asked for.

    Attributes:
        config: client configuration file of its tenant.
        facts: what host A writes down about its blocks, for the others to compare with.
    """

    config: Path
    facts: Path
    fabric: str
    context_tokens: int
    decode_tokens: int
    block_tokens: int

    def client(self) -> Client:
        """A connected client. Raises: EntresolError when there is no session."""
        config = ClientConfig.load(self.config)
        if self.fabric != "auto":
            config = replace(config, fabric=self.fabric, fallback=False)
        client = Client(config)
        report = client.shards()[0]
        if not report.connected or report.fabric == "none":
            client.close()
            why = report.last_error or report.fabric_reason
            raise EntresolError(f"no session with the daemon at {report.address}: {why}")
        return client


@dataclass(frozen=True, slots=True)
class Facts:
    """What host A stored."""

    descriptor: NamespaceDescriptor
    keys: list[bytes]
    digests: list[bytes]  # SHA-256 of each block's bytes
    block_bytes: int

    def write(self, path: Path) -> None:
        """As JSON."""
        fields = {
            "descriptor": self.descriptor.canonical().hex(),
            "keys": [key.hex() for key in self.keys],
            "digests": [digest.hex() for digest in self.digests],
            "block_bytes": self.block_bytes,
        }
        path.write_text(json.dumps(fields))

    @classmethod
    def read(cls, path: Path) -> Facts:
        """What `write` wrote."""
        fields = json.loads(path.read_text())
        return cls(
            NamespaceDescriptor.parse(bytes.fromhex(fields["descriptor"])),
            [bytes.fromhex(key) for key in fields["keys"]],
            [bytes.fromhex(digest) for digest in fields["digests"]],
            int(fields["block_bytes"]),
        )


class Engine:
    """The decoder with a prompt: the document as context, then a question."""

    def __init__(self, task: Task) -> None:
        """Raises: EntresolError when the document is too short for the context."""
        began_s = time.perf_counter()
        self.model = TinyLM.load()
        self.block_tokens = task.block_tokens
        self.decode_tokens = task.decode_tokens
        tokenizer = Tokenizer.load()
        context = tokenizer.encode(load_document())[: task.context_tokens]
        question = tokenizer.encode(QUESTION, bos=False)
        if len(context) < task.context_tokens or not 0 < len(question) <= task.block_tokens:
            raise EntresolError("the document is shorter than the context asked for")
        self.prompt = context + question
        self.context_blocks = reusable_blocks(len(self.prompt), self.block_tokens)
        self.load_ms = (time.perf_counter() - began_s) * 1e3
        self._warm_up()

    @property
    def descriptor(self) -> NamespaceDescriptor:
        """Where this decoder's blocks belong."""
        c = self.model.config
        return NamespaceDescriptor(
            model="entresol-demo-decoder",
            model_revision=self.model.digest.hex(),
            dtype="bf16",
            layers=c.layers,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            page_layout="layer,kv,token,head,dim",
            block_tokens=self.block_tokens,
        )

    def new_cache(self) -> KVCache:
        """Empty, with room for prompt and answer, every page touched."""
        size = len(self.prompt) + self.decode_tokens
        return self.model.new_cache(size, block_tokens=self.block_tokens)

    def keys(self) -> list[bytes]:
        """Engine keys of the blocks that may come from a store."""
        return block_hashes(self.prompt, self.block_tokens)[: self.context_blocks]

    def first_token(
        self, cache: KVCache, on_progress: Callable[[int, int], None] | None = None
    ) -> tuple[NDArray[np.float32], float]:
        """Prefill what the cache lacks; the logits, and the ms until the token is chosen."""
        began_s = time.perf_counter()
        logits = self.model.prefill(self.prompt, cache, on_progress)
        np.argmax(logits)
        return logits, (time.perf_counter() - began_s) * 1e3

    def answer(self, cache: KVCache, logits: NDArray[np.float32]) -> dict[str, Any]:
        """Decode greedily: the tokens, and a digest of every logit they were chosen from."""
        decoded = self.model.decode_greedy(cache, logits, self.decode_tokens)
        digest = hashlib.sha256(np.ascontiguousarray(decoded.logits).tobytes()).hexdigest()
        return {"tokens": decoded.tokens, "logits_sha256": digest}

    def _warm_up(self) -> None:
        """One answer over a context of zeros: libraries, tables and scratch memory in place, as in
        an engine that has been running; for both sides of the comparison."""
        cache = self.new_cache()
        for index in range(self.context_blocks):
            cache.append_block(cache.pool[index])
        self.model.prefill(self.prompt, cache)


def digest_of(block: NDArray[np.uint16]) -> bytes:
    """SHA-256 of a block's bytes."""
    return hashlib.sha256(np.ascontiguousarray(block).data).digest()


def wrong_bytes_in(blocks: Blocks, statuses: Sequence[Status], digests: Sequence[bytes]) -> int:
    """Bytes that should not be there: whole blocks that are OK and not those that were stored,
    and whatever is not zero in buffers of blocks that are not OK."""
    wrong = 0
    for block, status, digest in zip(blocks, statuses, digests, strict=True):
        if status is not Status.OK:
            wrong += int(np.count_nonzero(block.reshape(-1).view(np.uint8)))
        elif digest_of(block) != digest:
            wrong += block.nbytes
    return wrong


@dataclass(slots=True)
class Fetched:
    """A fetch on the way to the first token. `parts_ms` is in order and has no gaps."""

    cache: KVCache
    result: GetResult
    found_blocks: int
    wrong_bytes: int
    parts_ms: dict[str, float]
    logits: NDArray[np.float32]

    def as_dict(self) -> dict[str, Any]:
        """For the parent process."""
        tiers = Counter(
            tier.label
            for tier, status in zip(self.result.tiers, self.result.statuses, strict=True)
            if status is Status.OK
        )
        misses = Counter(s.label for s in self.result.statuses if s is not Status.OK)
        return {
            "found_blocks": self.found_blocks,
            "used_blocks": self.result.prefix_blocks,
            "hits": dict(tiers),
            "misses": dict(misses),
            "wrong_bytes": self.wrong_bytes,
            "plain_bytes": self.result.plain_bytes,
            "wire_bytes": self.result.wire_bytes,
            "parts_ms": {name: round(ms, 3) for name, ms in self.parts_ms.items()},
            "ttft_ms": round(sum(self.parts_ms.values()), 3),
        }


def fetch(
    engine: Engine,
    ns: SyncNamespace,
    facts: Facts,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fetched:
    """From the prompt to the first token, with what the daemon has. Timed in parts."""
    cache = engine.new_cache()
    parts: dict[str, float] = {}
    mark_s = time.perf_counter()

    def part(name: str) -> None:
        nonlocal mark_s
        now_s = time.perf_counter()
        parts[name] = (now_s - mark_s) * 1e3
        mark_s = now_s

    keys = engine.keys()
    part("hash")
    found = ns.exists(keys, deadline_ns=CALL_NS).prefix_blocks
    part("exists")
    into = [cache.pool[index] for index in range(found)]
    result = ns.get_into(keys[:found], into, deadline_ns=CALL_NS)
    part("fetch")
    for index in range(result.prefix_blocks):
        cache.append_block(cache.pool[index])
    part("load")
    wrong = wrong_bytes_in(into, result.statuses, facts.digests[:found])  # no timer runs
    logits, parts["tail"] = engine.first_token(cache, on_progress)
    return Fetched(cache, result, found, wrong, parts, logits)


def put_items(engine: Engine, keys: Sequence[bytes], blocks: Blocks) -> list[PutBlock]:
    """Blocks of the prompt with what routers need to know of them."""
    size = engine.block_tokens
    return [
        PutBlock(
            key,
            block,
            position=index,
            parent_key=keys[index - 1] if index else None,
            token_ids=engine.prompt[index * size : (index + 1) * size],
        )
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True))
    ]
