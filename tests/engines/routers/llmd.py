"""llm-d's reading of KV events, written anew from its documentation and source (llm-d-router,
pkg/kvevents and pkg/kvcache, of August 2026).

It is Go and does not run here, so this is what our messages are checked against: topic of three
parts, events as arrays or maps in an array, a hash is a number or the last 8 bytes, a block whose
parent is unknown is dropped, one that was stored several times goes when it was removed as often,
prefixes are scored block by block with a weight per tier. Strict where llm-d is, and where it would
guess, this raises.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip
WEIGHTS = {"gpu": 1.0, "cpu": 0.8}  # its defaults; a tier without one counts as 1.0
U64_MAX = 2**64 - 1


class Unreadable(Exception):
    """llm-d would not read this."""


@dataclass(frozen=True)
class Stored:
    """BlockStored as llm-d has it."""

    hashes: list[int]
    parent: int  # 0: none
    tokens: list[int]
    block_size: int
    tier: str
    lora: str | None


@dataclass(frozen=True)
class Removed:
    """BlockRemoved as llm-d has it."""

    hashes: list[int]
    tier: str


class Cleared:
    """AllBlocksCleared."""


def parse_topic(topic: bytes) -> tuple[str, str]:
    """(pod, model)."""
    parts = topic.decode().split("@")
    if len(parts) != 3 or parts[0] != "kv":
        raise Unreadable(f"topic {topic!r}")
    return parts[1], parts[2]


def parse(payload: bytes) -> list[Stored | Removed | Cleared]:
    """The events of a message."""
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list) or not 2 <= len(batch) <= 3:
        raise Unreadable("a batch is an array of two or three")
    stamp, events, *rank = batch
    if not isinstance(stamp, float) or (rank and not isinstance(rank[0], int | None)):
        raise Unreadable("a batch begins with its time and ends with a rank or nothing")
    return [_event(event) for event in events]


def _event(fields: Any) -> Stored | Removed | Cleared:
    if isinstance(fields, dict):
        tag = fields.get("type")
        fields = [tag, *(fields.get(name) for name in FIELDS.get(tag, ()))]  # type: ignore[arg-type]
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        raise Unreadable("an event is an array that begins with its name")
    if fields[0] == "BlockStored":
        return _stored(fields)
    if fields[0] == "BlockRemoved":
        if len(fields) < 2:
            raise Unreadable("BlockRemoved names its blocks")
        return Removed([_hash(one) for one in fields[1]], _text(fields, 2) or "")
    if fields[0] == "AllBlocksCleared":
        return Cleared()
    raise Unreadable(f"event {fields[0]!r}")


def _stored(fields: list[Any]) -> Stored:
    if len(fields) < 5 or not isinstance(fields[4], int):
        raise Unreadable("BlockStored has hashes, parent, tokens and block size")
    if len(fields) > 5 and not isinstance(fields[5], int | None):
        raise Unreadable("the adapter's number is a number or nothing")
    if not all(isinstance(one, int) and 0 <= one < 2**32 for one in fields[3]):
        raise Unreadable("token ids are u32")
    parent = 0 if fields[2] is None else _hash(fields[2])
    return Stored(
        [_hash(one) for one in fields[1]], parent, fields[3], fields[4], _text(fields, 6) or "",
        _text(fields, 7),
    )  # fmt: skip


def _hash(value: Any) -> int:
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, int) and 0 <= value <= U64_MAX:
        return value
    raise Unreadable(f"hash {value!r}")


def _text(fields: list[Any], at: int) -> str | None:
    if len(fields) <= at or fields[at] is None:
        return None
    if not isinstance(fields[at], str):
        raise Unreadable(f"field {at} is a text or nothing")
    return str(fields[at])


@dataclass
class Index:
    """Its index and longest-prefix scorer, with a block size of its own."""

    block_size: int = 16
    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    requests: dict[int, list[bytes]] = field(default_factory=dict)  # engine hash -> own keys
    holders: dict[bytes, set[tuple[str, str]]] = field(default_factory=dict)  # (pod, tier)
    counts: Counter[tuple[int, str, str]] = field(default_factory=Counter)  # engine hash, pod, tier
    dropped: int = 0  # stores behind a parent that is not known
    missing: set[int] = field(default_factory=set)  # engine hashes dropped so, and not told since

    def keys(self, parent: bytes, tokens: Sequence[int], model: str) -> list[bytes]:
        """Own keys of the full blocks in `tokens`."""
        found = []
        for start in range(0, len(tokens) // self.block_size * self.block_size, self.block_size):
            piece = repr((parent, tuple(tokens[start : start + self.block_size]), model))
            parent = hashlib.sha256(piece.encode()).digest()
            found.append(parent)
        return found

    def read(self, topic: bytes, payload: bytes) -> None:
        """Take a message in."""
        pod, model = parse_topic(topic)
        for event in parse(payload):
            if isinstance(event, Stored):
                self._store(pod, model, event)
            elif isinstance(event, Removed):
                for one in event.hashes:
                    self._evict(one, (pod, event.tier.lower() or "gpu"))
            else:
                for each in [each for each in self.counts if each[1] == pod]:
                    del self.counts[each]
                for holders in self.holders.values():
                    holders -= {place for place in holders if place[0] == pod}

    def _store(self, pod: str, model: str, event: Stored) -> None:
        parent = b""
        if event.parent:
            if event.parent not in self.requests:
                self.dropped += 1
                self.missing.update(event.hashes)
                return
            parent = self.requests[event.parent][-1]
        keys = self.keys(parent, event.tokens, event.lora or model)
        if not keys:
            raise Unreadable("no full block of tokens")
        count = max(len(keys), len(event.hashes))
        fresh: dict[int, list[bytes]] = {}
        for at in range(count):
            engine = event.hashes[at * len(event.hashes) // count]
            fresh.setdefault(engine, []).append(keys[at * len(keys) // count])
        self.requests |= fresh
        self.missing.difference_update(fresh)
        tier = event.tier.lower() or "gpu"
        self.counts.update((one, pod, tier) for one in event.hashes)
        for key in keys:
            self.holders.setdefault(key, set()).add((pod, tier))

    def _evict(self, engine: int, place: tuple[str, str]) -> None:
        left = self.counts[engine, *place] - 1
        self.counts[engine, *place] = max(0, left)
        if left > 0:
            return  # told once more than it was taken back
        keys = self.requests.get(engine, [])
        self.missing.discard(engine)
        for key in keys:
            self.holders.get(key, set()).discard(place)
        if not any(self.holders.get(key) for key in keys):
            self.requests.pop(engine, None)

    def scores(self, tokens: Sequence[int], model: str) -> dict[str, float]:
        """Of every pod that has a prefix: the weights of its blocks, added up to the first hole."""
        scores: dict[str, float] = {}
        active: set[str] | None = None
        for key in self.keys(b"", tokens, model):
            best: dict[str, float] = {}
            for pod, tier in self.holders.get(key, ()):
                best[pod] = max(best.get(pod, 0.0), self.weights.get(tier, 1.0))
            active = set(best) if active is None else active & set(best)
            for pod in active:
                scores[pod] = scores.get(pod, 0.0) + best[pod]
        return scores
