"""What the codecs must reach: bounds, the price of a bypass, the choice by link, budgets.

    python -m bench.codec FILE.npy ...        prints these tables behind its own
    python -m bench --only codec --kv FOLDER  the budgets

Speeds are plain bytes per CPU-second of one core; each is the best of several, because what
disturbs a measurement of CPU time (another process in the shared caches) only ever adds to it.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench import kv
from bench.codec import best_s, convert, full_precision, measure_codec
from bench.kv import Bits
from entresol_proto.seal import block, codecs
from entresol_proto.seal.bypass import SKIPPED_MAX, TRIES, Bypass
from entresol_proto.seal.dtypes import DType

CHUNK_BYTES = 256 * 1024
BLOCK_TOKENS = 64
BLOCKS_MAX = 24  # of a folder and round
PAIRS = [(name, dtype) for name in codecs.names()[1:] for dtype in (DType.BF16, DType.FP8_E4M3)]
LINKS_GB_PER_S = (1.0, 2.5, 5.0, 10.0, 25.0)


@dataclass(frozen=True, slots=True)
class Bound:
    """Ratios that no order-0 code of the exponent passes, sign and mantissa as they are."""

    file: str
    part: str  # K or V
    one_table: float  # one code for all
    per_layer: float  # one code per layer
    per_channel: float  # one code per layer and channel, whose tables would be free


@dataclass(frozen=True, slots=True)
class BypassCost:
    """Sealing incompressible bytes with a codec that declines, against sealing them raw: each block
    looked at, and as the blocks of one namespace after a while."""

    codec: str
    dtype: str
    stored_over_plain: float
    time_over_raw: float
    remembered_over_raw: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Plain GB/s across a link: the slowest of sealing, link and opening."""

    link_gb_per_s: float
    raw: float
    fast: float
    dense: float
    best: str


def _entropy(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bits per value of each row of counts."""
    share = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    found: npt.NDArray[np.float64] = -(share * np.log2(np.where(share > 0, share, 1))).sum(-1)
    return found


def bounds(path: str) -> list[Bound]:
    """K and V of one file shaped [layers, 2, tokens, heads, head_dim]; none of another shape.

    Raises: KvError.
    """
    array = kv.load(path)
    if array.ndim != 5 or array.shape[1] != 2:
        return []
    layers, _, tokens = array.shape[:3]
    found = []
    for number, part in enumerate("KV"):
        exponents = (np.asarray(array[:, number]) >> 7 & 0xFF).reshape(layers, tokens, -1)
        channels = exponents.shape[-1]
        where = np.arange(layers)[:, None, None] * channels + np.arange(channels)
        flat = (where * 256 + exponents).reshape(-1)
        counts = np.bincount(flat, minlength=layers * channels * 256)
        counts = counts.reshape(layers, channels, 256)
        bits = (
            float(_entropy(counts.sum((0, 1)))),
            float(_entropy(counts.sum(1)).mean()),
            float(_entropy(counts).mean()),
        )
        one, layer, channel = (round(16 / (8 + b), 4) for b in bits)
        found.append(Bound(Path(path).name, part, one, layer, channel))
    return found


def bypasses(
    repeats: int = 3, pairs: Iterable[tuple[str, DType]] | None = None
) -> list[BypassCost]:
    """Every codec that compresses, or these `pairs` of one and a dtype, on a megabyte of noise."""
    noise = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
    salt = block.new_salt()
    key = block.derive_block_key(bytes(range(32)), salt)
    out = memoryview(bytearray(block.sealed_bytes_max(len(noise), chunk_bytes=CHUNK_BYTES)))
    found = []

    def seal(codec_id: int, dtype: DType) -> block.SealedHeader:
        return block.seal_into(
            out, noise.data, identity=block.BlockIdentity(
                bytes(16), bytes(range(16)), bytes(32), dtype, 1
            ), block_key=key, salt=salt, codec_id=codec_id, meta=None, chunk_bytes=CHUNK_BYTES,
        )  # fmt: skip

    for name, dtype in PAIRS if pairs is None else pairs:
        codec_id = codecs.by_name(name).codec_id
        ratio = seal(codec_id, dtype).sealed_bytes / seal(codecs.RAW, dtype).sealed_bytes
        memory = Bypass()
        for _ in range(TRIES + SKIPPED_MAX):
            memory.learn(bytes(16), dtype, codec_id, codecs.RAW)
        looked, remembered = [], []
        for _ in range(repeats * (SKIPPED_MAX + 1)):  # side by side: the machine is busy
            tried = _next(memory, codec_id, dtype)
            raw_s, coded_s, tried_s = (
                best_s(functools.partial(seal, one, dtype), 3)
                for one in (codecs.RAW, codec_id, tried)
            )
            looked.append(coded_s / raw_s)
            remembered.append(tried_s / raw_s)
        # a median of all would leave out the few that are looked at
        runs = [remembered[at :: SKIPPED_MAX + 1] for at in range(SKIPPED_MAX + 1)]
        memory_cost = statistics.fmean(map(statistics.median, runs))
        times = round(statistics.median(looked), 4), round(memory_cost, 4)
        found.append(BypassCost(name, dtype.label, round(ratio, 5), *times))
    return found


def _next(memory: Bypass, codec_id: int, dtype: DType) -> int:
    """What the next block of noise is sealed with."""
    tried = memory.codec(bytes(16), dtype, codec_id)
    memory.learn(bytes(16), dtype, tried, codecs.RAW)
    return tried


def choices(
    rates: dict[str, tuple[float, float, float]], cipher_gb_per_s: float, threads: int = 4
) -> list[Choice]:
    """By link speed; `rates` are (ratio, encode, decode) by codec name, speeds of one core."""
    found = []
    for link in LINKS_GB_PER_S:
        reached = {}
        for name, (ratio, encode, decode) in {"raw": (1.0, 0.0, 0.0), **rates}.items():
            crypt_s = 1 / (ratio * cipher_gb_per_s)
            codec_s = [1 / rate if rate else 0.0 for rate in (encode, decode)]  # 0: none at work
            sealing, opening = (threads / (each + crypt_s) for each in codec_s)
            stages = (sealing, link * ratio, opening)
            reached[name] = round(min(stages), 2)
        best = max(reached, key=lambda name: reached[name])
        found.append(Choice(link, reached["raw"], reached["fast"], reached["dense"], best))
    return found


def canonical(folder: Path, *, rounds: int, repeats: int) -> dict[str, list[float]]:
    """The numbers that have budgets, one of each per round: the worst of every folder with .npy
    files below. Each round takes other blocks, so that spreads are those of data and machine.

    Raises: KvError when there are none, or one of them is no KV.
    """
    folders = sorted({path.parent for path in kv.files_of(folder)})
    if not folders:
        raise kv.KvError(f"{folder}: no .npy files; {kv.ACCEPTED}")
    found: dict[str, list[float]] = defaultdict(list)
    for round_ in range(rounds):
        rows = []
        for one in folders:
            blocks = kv.all_blocks(sorted(one.glob("*.npy")), BLOCK_TOKENS)
            mine = blocks[round_ % len(blocks) :: rounds]
            rows.append(_of_folder(kv.read(kv.spread(mine, BLOCKS_MAX)), repeats))
        for name in rows[0]:
            found[name].append(min(row[name] for row in rows))
        found["codec_bypass_cost"].append(bypass_cost(bypasses(max(3, repeats), automatic())))
    return dict(found)


def _of_folder(bits: list[Bits], repeats: int) -> dict[str, float]:
    """Ratios of `dense`, the one that is asked for where a link or flash is the limit; speeds."""
    found = {}
    for name in ("dense", "fast"):
        blocks = [convert(one, DType.BF16) for one in bits]
        row = measure_codec(blocks, DType.BF16, name, CHUNK_BYTES, repeats)
        found[f"codec_{name}_ratio_bf16"] = row.ratio
        found[f"codec_{name}_decode_gbps"] = row.decode_gb_per_s
        found[f"codec_{name}_encode_gbps"] = row.encode_gb_per_s
    for name, dtype in (("e4m3", DType.FP8_E4M3), ("e5m2", DType.FP8_E5M2), ("fp16", DType.FP16)):
        made = full_precision if dtype is DType.FP16 else convert
        blocks = [made(one, dtype) for one in bits]
        row = measure_codec(blocks, dtype, "dense", CHUNK_BYTES, 1)
        found[f"codec_ratio_{name}"] = row.ratio
    return found


def automatic() -> list[tuple[str, DType]]:
    """Codecs that a namespace here gets by itself, `plane` without the native kernel."""
    names = {codecs.get(codecs.writable_here(each)).name for each in (codecs.FAST, codecs.DENSE)}
    typed = [pair for pair in PAIRS if pair[0] in names]
    return [*typed, ("zstd", DType.OPAQUE)]


def bypass_cost(found: list[BypassCost]) -> float:
    """The largest share, in percent, that any codec adds to time or bytes of incompressible data,
    as a namespace sees it after its first blocks."""
    return max(
        100 * (cost - 1)
        for one in found
        for cost in (one.remembered_over_raw, one.stored_over_plain)
    )
