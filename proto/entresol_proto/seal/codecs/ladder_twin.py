"""The ladder format in numpy: what runs where the package was built without its C kernel.

Invariant: encodes to the same bytes as native/ladder.h and refuses what that refuses, whatever it
is given; the C code is the faster of the two, not the reference. Byte layout: proto/FORMAT.md.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from entresol_proto.status import CodecError

FORMAT = 1
HEAD = struct.Struct("<BBBBHBB")  # format, kind, log2 of a section, 0, period, window, 0
SECTION = struct.Struct("<BBHHHH")  # cut, base, values on levels 2 to 4, literals
LANES = 32
PERIOD_MAX = 2048
LITERAL = 15
CONTEXTS = 4
BELOW = 9
_SECTION_LOG2 = range(12, 16)
_SECTION_LOG2_OURS = 15
_PROBED = 16
_SAMPLED = 64
_SPARED = 8
_WIDE = (3, 2, 2, 1)
_FINALISTS = 3
_RESET_COST = 96
_SEEN, _TRIED, _FIRST = 32768, 16384, 4096

U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
# Bytes of an element, raw bytes and raw bits beside its exponent.
KINDS = {1: (2, 1, 0), 2: (2, 1, 3), 3: (1, 0, 4), 4: (1, 0, 3)}


def _split(plain: memoryview, kind: int) -> tuple[U8, U8, U8]:
    """Exponents, raw bytes (or none), raw bits (or none)."""
    none = np.zeros(0, np.uint8)
    if kind <= 2:
        x = np.frombuffer(plain, "<u2")
        if kind == 1:
            return _u8(x >> 7), _u8((x >> 8 & 0x80) | (x & 0x7F)), none
        return _u8(x >> 10 & 31), _u8(x), _u8((x >> 8 & 3) | (x >> 13 & 4))
    y = np.frombuffer(plain, np.uint8)
    if kind == 3:
        return _u8(y >> 3 & 15), none, _u8((y & 7) | (y >> 4 & 8))
    return _u8(y >> 2 & 31), none, _u8((y & 3) | (y >> 5 & 4))


def _join(sym: U8, rest: U8, extra: U8, kind: int, into: memoryview) -> None:
    out = np.frombuffer(into, np.uint8)
    if kind <= 2:
        s, r = sym.astype(np.uint16), rest.astype(np.uint16)
        if kind == 1:
            x = s << 7 | (r & 0x7F) | (r & 0x80) << 8
        else:
            e = extra.astype(np.uint16)
            x = r | ((s & 31) << 2 | (e & 3) | (e & 4) << 5) << 8
        out[:] = x.astype("<u2").view(np.uint8)
    elif kind == 3:
        out[:] = (sym & 15) << 3 | (extra & 7) | (extra & 8) << 4
    else:
        out[:] = (sym & 31) << 2 | (extra & 3) | (extra & 4) << 5


def _u8(x: npt.NDArray[Any]) -> U8:
    return x.astype(np.uint8)


def _pack(bits: int, codes: U8) -> bytes:
    """Codes of one or two bits, the first lowest, padded with 0 to a multiple of 8 values; of three
    bits the two low ones of all, then the high ones."""
    if bits == 3:
        return _pack(2, _u8(codes & 3)) + _pack(1, _u8(codes >> 2))
    padded = np.zeros(-(-len(codes) // 8) * 8, np.uint8)
    padded[: len(codes)] = codes
    if bits == 1:
        return np.packbits(padded, bitorder="little").tobytes()
    four = padded.reshape(-1, 4)
    return _u8(four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6).tobytes()


def _unpack(bits: int, packed: U8) -> U8:
    if bits == 3:
        low = len(packed) // 3 * 2
        return _u8(_unpack(2, packed[:low]) | _unpack(1, packed[low:]) << 2)
    if bits == 1:
        return np.unpackbits(packed, bitorder="little")
    return _u8(packed[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1)


def _widths(bits: int) -> list[int]:
    """How raw bits are stored: two of each value, then the rest."""
    return [min(2, bits - done) for done in range(0, bits, 2)]


def _bits_of(of_rank: Ints, outside: int, bits: tuple[int, ...]) -> tuple[int, int]:
    """Bits of all values when levels are cut so, and how many ranks have codes."""
    cost = length = rank = 0
    for width in bits:
        length += width
        end = rank + 2**width - 1
        cost += length * int(of_rank[rank:end].sum())
        rank = end
    return cost + (outside + int(of_rank[rank:].sum())) * (length + 8), rank


@dataclass(slots=True)
class _Ranking:
    """How the places of each context rank, and how the levels are cut."""

    place_of: Ints  # [contexts, 16], by rank
    bits: tuple[int, ...] = ()
    rank_of: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))  # [contexts, 16], by place

    @classmethod
    def of(cls, counts: Ints) -> _Ranking:
        return cls(np.argsort(-counts, axis=1, kind="stable"))

    def cut(self, counts: Ints, outside: int, spare: tuple[int, int] | None = None) -> int:
        """Cut the levels so that places in this order take fewest bits; returns how many.

        `spare`: the bits of a value, and those beside its exponent, where codes of three bits are
        taken if they cost little of what is saved.
        """
        of_rank = np.take_along_axis(counts, self.place_of, 1).sum(0)
        best = codes = -1
        for way in range(4):
            bits = (2 - (way & 1), 2 - (way >> 1), 2, 2)
            cost, rank = _bits_of(of_rank, outside, bits)
            if best < 0 or cost < best:
                best, codes, self.bits = cost, rank, bits
        if spare is not None:
            values = outside + int(of_rank.sum())
            cost, rank = _bits_of(of_rank, outside, _WIDE)
            saved = values * (spare[0] - spare[1]) - best
            if saved > 0 and (cost - best) * _SPARED <= saved:
                best, codes, self.bits = cost, rank, _WIDE
        ranks = np.arange(16)
        known = np.where(ranks < codes, ranks, LITERAL).astype(np.uint8)
        self.rank_of = np.zeros(self.place_of.shape, np.uint8)
        np.put_along_axis(self.rank_of, self.place_of, known[None, :], 1)
        return best


def _window_of(counts: Ints) -> int:
    sums = np.concatenate([[0], np.cumsum(counts)])
    return int(np.argmax(sums[16:] - sums[:-16]))


@dataclass(slots=True)
class _Model:
    """Channels of a row, each with its predicted exponent within the window, in 1/16."""

    period: int = 0
    window: int = 0
    begun: bool = False
    state: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def see(self, sym: U8) -> Ints:
        """What the model sees: 16 times the exponent within the window, and 8."""
        found: Ints = np.clip(sym.astype(np.int64) - self.window, 0, 15) * 16 + 8
        return found

    def learn(self, seen: Ints) -> None:
        """Bring the first channels up to date."""
        was, x = self.state[: len(seen)], seen
        for _ in range(3):
            x = (was + x + 1) >> 1
        self.state[: len(seen)] = x

    def move(self, how: int) -> Ints:
        """The channels after what is stored of a row."""
        if how < 128:
            return np.full(self.period, how * 2, np.int64)
        return np.clip(self.state + (how - 192), 0, 255)


def _decide(model: _Model, seen: Ints) -> tuple[int, int]:
    """What to store of a row (-1: nothing), and what prediction then misses."""
    total, length = int(seen.sum()), len(seen)
    mean = total // length // 2 * 2
    reset = int(np.abs(seen - mean).sum()) + _RESET_COST
    if not model.begun:
        return mean // 2, reset
    was = model.state[:length]
    keep = int(np.abs(seen - was).sum())
    by = max(-63, min(63, total // length - int(was.sum()) // length))
    move = int(np.abs(seen - model.move(192 + by)[:length]).sum()) + _RESET_COST
    if move < keep and move < reset:
        return 192 + by, move
    return (mean // 2, reset) if reset < keep else (-1, keep)


def _place_rows(sym: U8, model: _Model) -> tuple[U8, bytes, bytes, int]:
    """Places of exponents, flags and bytes of rows, what prediction missed."""
    places = np.zeros(len(sym), np.uint8)
    flags: list[bool] = []
    moves = bytearray()
    cost = 0
    if not model.begun:
        model.state = np.zeros(model.period, np.int64)
    seen = model.see(sym)
    for at in range(0, len(sym), model.period):
        row = seen[at : at + model.period]
        how, missed = _decide(model, row)
        flags.append(how >= 0)
        if how >= 0:
            model.state = model.move(how)
            model.begun = True
            moves.append(how)
        cost += missed + _RESET_COST // 9
        was = model.state[: len(row)]
        here = (
            sym[at : at + len(row)].astype(np.int64) - (model.window - BELOW) - (was >> 4)
        ) & 255
        places[at : at + len(row)] = np.where(here < 16, here | (was & 12) << 2, 0x80)
        model.learn(row)
    return places, np.packbits(flags, bitorder="little").tobytes(), bytes(moves), cost


def _periods_of(seen: Ints) -> list[int]:
    """The shortest distances at whose multiples values resemble each other more than elsewhere."""
    first = min(len(seen) // 2 // LANES * LANES, _FIRST)
    scores = [0]
    most = min(4 * PERIOD_MAX, len(seen) - first) // LANES if first else 0
    for at in range(LANES, (most + 1) * LANES, LANES):
        scores.append(int(np.abs(seen[:first] - seen[at : at + first]).sum()))
    searched = len(scores) - 1
    if searched < 8:
        return []
    every = sum(scores) * 256 // searched
    means = {i: sum(scores[i::i]) * 256 // len(scores[i::i]) for i in range(2, searched // 4 + 1)}
    best = min(means.values())
    near = [i for i in means if every <= best or (means[i] - best) * 8 <= (every - best) * 5]
    return [i * LANES for i in near[:_FINALISTS]]


def _rows_lose(sym: U8, period: int, window: int) -> bool:
    """True when the values take fewer bits with one base: where channels do not differ, each
    predicts its own noise."""
    places = _place_rows(sym, _Model(period, window))[0]
    counts = np.bincount(places, minlength=256)
    rows = counts[: 16 * CONTEXTS].reshape(CONTEXTS, 16)
    found = np.bincount(sym, minlength=256)
    base = _window_of(found)
    flat = found[base : base + 16].reshape(1, 16)
    flat_bits = _Ranking.of(flat).cut(flat, len(sym) - int(flat.sum()))
    return flat_bits <= _Ranking.of(rows).cut(rows, int(counts[0x80]))


def _look(plain: memoryview, kind: int, by_channel: bool) -> _Model | None:
    """A model for the chunk, or None when encoding would not pay."""
    width, rest, extra = KINDS[kind]
    groups = len(plain) // width // LANES
    samples = min(groups, _PROBED)
    sym = _split(plain, kind)[0]
    picked = sym.reshape(groups, LANES)[[i * groups // samples for i in range(samples)]]
    counts = np.bincount(picked.reshape(-1), minlength=256)
    base, mode = _window_of(counts), int(np.argmax(counts))
    inside = counts[base : base + 16][None, :]
    size = samples * LANES
    bits = _Ranking.of(inside).cut(inside, size - int(inside.sum())) + size * (8 * rest + extra)
    if bits * 1000 > size * 8 * width * (1000 if by_channel else 970):
        return None
    model = _Model()
    if not by_channel:
        return model
    model.window = max(0, min(240, mode - BELOW))
    best: tuple[int, int] | None = None
    for period in _periods_of(model.see(sym[:_SEEN])):
        cost = _place_rows(sym[:_TRIED], _Model(period, model.window))[3]
        if best is None or cost < best[0]:
            best = (cost, period)
    model.period = best[1] if best and not _rows_lose(sym[:_TRIED], best[1], model.window) else 0
    return model


def _section(
    plain: memoryview, kind: int, model: _Model, before: list[_Ranking], hasty: bool
) -> bytes:
    """One section; `before` holds the ranking of the last one, if any."""
    width, rest_bytes, extra_bits = KINDS[kind]
    sym, rest, extra = _split(plain, kind)
    base, flags, moves, spare = 0, b"", b"", None
    if model.period:
        places, flags, moves, _ = _place_rows(sym, model)
        counts = np.bincount(places, minlength=256)
        inside, outside = counts[: 16 * CONTEXTS].reshape(CONTEXTS, 16), int(counts[0x80])
    else:
        picked = sym.reshape(-1, LANES)[::_SAMPLED].reshape(-1)
        counts = np.bincount(picked, minlength=256)
        base = _window_of(counts)
        inside = counts[base : base + 16].reshape(1, 16)
        outside = len(picked) - int(inside.sum())
        here = sym - np.uint8(base)
        places = np.where(here < 16, here, np.uint8(0x80))
        if hasty:
            spare = 8 * width, 8 * rest_bytes + extra_bits
    ranking = _Ranking.of(inside)
    bits = ranking.cut(inside, outside, spare)
    again = False
    if model.period and before and before[0].cut(inside, outside) <= bits + 64 * CONTEXTS:
        again, ranking = True, before[0]
    before[:] = [ranking]
    ranks = np.where(places & 0x80, LITERAL, ranking.rank_of.reshape(-1)[places & 63])
    literals = sym[ranks == LITERAL]
    counted, levels = [], b""
    left: U8 = _u8(ranks)
    for width in ranking.bits:
        escape = 2**width - 1
        levels += _pack(width, np.minimum(left, np.uint8(escape)))
        left = left[left >= escape] - np.uint8(escape)
        counted.append(len(left))
    assert counted[-1] == len(literals)
    first = 8 if ranking.bits[0] == 3 else ranking.bits[0] - 1
    cut = first | (ranking.bits[1] - 1) << 1 | again << 2
    out = [SECTION.pack(cut, base, *counted), rest.tobytes()]
    at = 0
    for width in _widths(extra_bits):
        out.append(_pack(width, extra >> at & (2**width - 1)))
        at += width
    if not again:
        pairs = ranking.place_of.reshape(-1, 2)
        out.append(_u8(pairs[:, 0] | pairs[:, 1] << 4).tobytes())
    return b"".join([*out, flags, moves, levels, literals.tobytes()])


def _section_values(model: _Model, log2: int) -> int:
    return (1 << log2) if not model.period else (1 << log2) // model.period * model.period


def encode(plain: memoryview, kind: int, by_channel: bool, bytes_max: int) -> bytes | None:
    """The chunk, or None when it takes more than `bytes_max` or is not worth a try."""
    width = KINDS[kind][0]
    count = len(plain) // width // LANES * LANES
    body, tail = plain[: count * width], plain[count * width :]
    if count == 0 or bytes_max < HEAD.size + len(tail):
        return None
    model = _look(body, kind, by_channel)
    if model is None:
        return None
    step = _section_values(model, _SECTION_LOG2_OURS) * width
    before: list[_Ranking] = []
    out = HEAD.pack(FORMAT, kind, _SECTION_LOG2_OURS, 0, model.period, model.window, 0)
    for at in range(0, len(body), step):
        out += _section(body[at : at + step], kind, model, before, not by_channel and kind == 1)
        if len(out) + len(tail) > bytes_max:
            return None
    return out + bytes(tail)


@dataclass(slots=True)
class _Reader:
    """Takes pieces off the front of a chunk. Raises: CodecError when there is less."""

    data: U8

    def take(self, size: int) -> U8:
        if size > len(self.data):
            raise CodecError(f"ladder chunk ends {size - len(self.data)} bytes early")
        piece, self.data = self.data[:size], self.data[size:]
        return piece


def _climb(bits: tuple[int, ...], counts: list[int], packed: list[U8]) -> U8:
    """Ranks of all values. Raises: CodecError where levels do not fit together."""
    first = sum(2**width - 1 for width in bits[:3])
    below = np.full(counts[4], LITERAL, np.uint8)
    for level in (3, 2, 1, 0):
        codes = _unpack(bits[level], packed[level])
        escaped = codes == 2 ** bits[level] - 1
        if int(escaped.sum()) != counts[level + 1]:
            raise CodecError(f"ladder level {level + 1} does not fit the one below")
        ranks = codes + np.uint8(first)
        ranks[escaped] = below
        below = ranks[: counts[level]]
        first -= 2 ** bits[level - 1] - 1 if level else 0
    return below


def _take_section(
    reader: _Reader, count: int, kind: int, model: _Model, names: U8, into: memoryview
) -> None:
    """Decode one section. Raises: CodecError."""
    _, rest_bytes, extra_bits = KINDS[kind]
    cut, base, *found = SECTION.unpack(reader.take(SECTION.size).tobytes())
    counts = [count, *found]
    wide = cut >> 3
    if cut > 15 or (wide and (cut & 1 or model.period)):
        raise CodecError("ladder section with codes of no such widths")
    if any(here > above for above, here in itertools.pairwise(counts)):
        raise CodecError("ladder section with impossible counts")
    bits = (3 if wide else (cut & 1) + 1, (cut >> 1 & 1) + 1, 2, 2 - wide)
    rest = reader.take(count * rest_bytes)
    extra, at = np.zeros(count, np.uint8), 0
    for width in _widths(extra_bits):
        extra |= _unpack(width, reader.take(count // 8 * width)) << at
        at += width
    if not cut & 4:
        table = reader.take(8 * CONTEXTS if model.period else 8)
        names[: 2 * len(table)] = np.stack([table & 15, table >> 4], 1).reshape(-1)
    rows = -(-count // model.period) if model.period else 0
    flags = np.unpackbits(reader.take(-(-rows // 8)), bitorder="little")[:rows]
    moves = reader.take(int(flags.sum())).tolist()
    packed = [reader.take(-(-counts[i] // 8) * bits[i]) for i in range(4)]
    literals = reader.take(counts[4])
    ranks = _climb(bits, counts, packed)
    if not model.period:
        sym = names[ranks] + np.uint8(base)
        spots = np.flatnonzero(ranks == LITERAL)
        sym[spots] = literals[: len(spots)]
    else:
        sym = np.zeros(count, np.uint8)
        for row in range(rows):
            at = row * model.period
            here = ranks[at : at + model.period]
            if flags[row]:
                model.state = model.move(moves.pop(0))
            was = model.state[: len(here)]
            named = names[(was & 12) * 4 + here].astype(np.int64) + (was >> 4)
            one = _u8(named + (model.window - BELOW) & 255)
            spots = np.flatnonzero(here == LITERAL)
            one[spots], literals = literals[: len(spots)], literals[len(spots) :]
            sym[at : at + len(here)] = one
            model.learn(model.see(one))
    _join(sym, rest, extra, kind, into)


def decode_into(stored: memoryview, kind: int, into: memoryview) -> None:
    """Fill `into`. Raises: CodecError unless `stored` encodes exactly that many bytes."""
    width = KINDS[kind][0]
    count = len(into) // width // LANES * LANES
    tail_bytes = len(into) - count * width
    if count == 0 or len(stored) < HEAD.size + tail_bytes:
        raise CodecError(f"ladder chunk of {len(stored)} bytes for {len(into)}")
    number, of, log2, zero, period, window, also_zero = HEAD.unpack_from(stored)
    if (number, of, zero, also_zero) != (FORMAT, kind, 0, 0) or log2 not in _SECTION_LOG2:
        raise CodecError("ladder chunk of an unknown format, or of another dtype")
    if window > 240 or period % LANES or period > PERIOD_MAX:
        raise CodecError("ladder chunk with an impossible row")
    model = _Model(period, window, False, np.zeros(period, np.int64))
    reader = _Reader(np.frombuffer(stored, np.uint8)[HEAD.size : len(stored) - tail_bytes])
    names = np.zeros(16 * CONTEXTS, np.uint8)
    step = _section_values(model, log2)
    for done in range(0, count, step):
        now = min(step, count - done)
        _take_section(reader, now, kind, model, names, into[done * width : (done + now) * width])
    if len(reader.data):
        raise CodecError(f"ladder chunk with {len(reader.data)} bytes too many")
    into[count * width :] = stored[len(stored) - tail_bytes :]
