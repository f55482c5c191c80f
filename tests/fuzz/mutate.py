"""Small damages of the kinds that parsers get wrong, all decided by the generator given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

INTERESTING = (
    0, 1, 0x7F, 0x80, 0xFF, 0x1000, 0xFFFF, 0x1_0000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF,
    0x7FFF_FFFF_FFFF_FFFF, 0x8000_0000_0000_0000, 0xFFFF_FFFF_FFFF_FFFF,
)  # fmt: skip
SIZES = (1, 2, 4, 8)
STEPS_MAX = 4


def mutate(
    rng: Random, raw: bytes, others: Sequence[bytes], _words: Sequence[bytes], bytes_max: int
) -> bytes:
    """One to four damages; `others` are spliced in."""
    out = bytearray(raw)
    random = rng.random
    for _ in range(1 + int(random() * STEPS_MAX)):
        length = len(out)
        at = int(random() * (length + 1))
        kind = int(random() * 10)
        if kind == 0 and length:
            out[at % length] ^= 1 << int(random() * 8)
        elif kind == 1 and length:
            out[at % length] = int(random() * 256)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = rng.randbytes(1 + int(random() * 24))
        elif kind == 4:
            size = SIZES[int(random() * 4)]
            value = INTERESTING[int(random() * len(INTERESTING))] + int(random() * 3) - 1
            out[at : at + size] = (value % 256**size).to_bytes(size, "little")
        elif kind == 5:
            del out[at : at + 1 + int(random() * 16)]
        elif kind == 6:
            out[at:at] = out[at : at + 1 + int(random() * 64)]
        elif kind == 7 and others:
            other = others[int(random() * len(others))]
            begin = int(random() * (len(other) + 1))
            out[at : at + int(random() * 64)] = other[begin : begin + int(random() * 256)]
        elif kind == 8 and length >= 8:
            # A number of the input, one off: counts and lengths that nearly fit.
            at = min(at, length - 4)
            value = int.from_bytes(out[at : at + 4], "little") + int(random() * 9) - 4
            out[at : at + 4] = (value % 2**32).to_bytes(4, "little")
        else:
            out += rng.randbytes(1 + int(random() * 8))
    return bytes(out[:bytes_max])


PRINTABLE = bytes(range(32, 127)) + b"\n\t"


def mutate_text(
    rng: Random, raw: bytes, others: Sequence[bytes], words: Sequence[bytes], bytes_max: int
) -> bytes:
    """As `mutate`, for formats that are text: what comes in is printable nearly always."""
    out = bytearray(raw)
    random = rng.random
    for _ in range(1 + int(random() * STEPS_MAX)):
        length = len(out)
        at = int(random() * (length + 1))
        kind = int(random() * 9)
        if kind == 0 and length:
            out[at % length] = PRINTABLE[int(random() * len(PRINTABLE))]
        elif kind == 1:
            del out[at : at + 1 + int(random() * 16)]
        elif kind == 2:
            out[at:at] = out[at : at + 1 + int(random() * 64)]
        elif kind == 3 and others:
            other = others[int(random() * len(others))]
            begin = int(random() * (len(other) + 1))
            out[at : at + int(random() * 32)] = other[begin : begin + int(random() * 128)]
        elif kind == 4:
            out[at:at] = str(INTERESTING[int(random() * len(INTERESTING))]).encode()
        elif kind == 5 and random() < 0.1:
            out[at:at] = rng.randbytes(1 + int(random() * 4))
        elif kind == 6 and random() < 0.2:
            del out[at:]
        else:
            out[at:at] = words[int(random() * len(words))]
    return bytes(out[:bytes_max])


ODD_TEXTS = (
    "", " ", "0", "-1", "a" * 65, "\0", "\ud800", "é" * 300, "../..", "spiffe://x", "true", "{}",
    "1e400", "NaN", "ff" * 32, "text:", "0x",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308,
    float("inf"), float("nan"), [], {}, [[]], {"": None}, *ODD_TEXTS,
)  # fmt: skip


def mutate_tree(rng: Random, tree: Any, depth: int = 0) -> Any:
    """One damage somewhere in a JSON-like value; the value given is not changed."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(sorted(tree))
        kind = rng.randrange(8)
        if kind == 0:
            return {name: value for name, value in tree.items() if name != key}
        if kind == 1:
            return {**tree, rng.choice((key + "x", key[:-1], rng.choice(ODD_TEXTS))): tree[key]}
        if kind == 2:
            return {**tree, key: tree[rng.choice(sorted(tree))]}
        return {**tree, key: mutate_tree(rng, tree[key], depth + 1)}
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        at = rng.randrange(len(tree))
        kind = rng.randrange(8)
        if kind == 0:
            return tree[:at] + tree[at + 1 :]
        if kind == 1:
            return [*tree[:at], tree[at], *tree[at:]]
        if kind == 2:
            return [*tree, rng.choice(ODD_VALUES)]
        return [*tree[:at], mutate_tree(rng, tree[at], depth + 1), *tree[at + 1 :]]
    if isinstance(tree, str) and tree and rng.random() < 0.5:
        at = rng.randrange(len(tree))
        return tree[:at] + rng.choice(("", "0", "g", "A", "\0", tree[at] * 2)) + tree[at + 1 :]
    if type(tree) is int and rng.random() < 0.5:
        return tree + rng.choice((-1, 1, 2**32, -(2**63)))
    if depth and rng.random() < 0.02:
        return nested(rng.choice((50, 500, 5_000)))
    return rng.choice(ODD_VALUES)


def nested(levels: int) -> Any:
    """A list in a list in a list."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def to_json(tree: Any) -> bytes:
    """JSON of a tree, however deep or odd it is; deep ones are written by hand."""
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return b"[" * 20_000 + b"]" * 20_000
