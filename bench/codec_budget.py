"""What the codecs must reach: bounds, the price of a bypass, the choice by link, budgets.

    python -m bench.codec FILE.npy ...        prints these tables behind its own
    python -m bench --only codec --kv FOLDER  the budgets; CODEC_KV names the folder as well

Speeds are plain bytes per CPU-second of one core; each is the best of several, because what
disturbs a measurement of CPU time (another process in the shared caches) only ever adds to it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.codec import Bytes, best_s, blocks_of, convert, measure_codec
from entresol_proto.seal import block, codecs
from entresol_proto.seal.bypass import SKIPPED_MAX, TRIES, Bypass
from entresol_proto.seal.dtypes import DType

CHUNK_BYTES = 256 * 1024
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
    """K and V of one file shaped [layers, 2, tokens, heads, head_dim]; none of another shape."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim != 5:
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


def bypasses(repeats: int = 3) -> list[BypassCost]:
    """Every codec that compresses, on a megabyte of noise."""
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

    for name in codecs.names()[1:]:
        for dtype in (DType.BF16, DType.FP8_E4M3):
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
        for name, (ratio, encode, decode) in {"raw": (1.0, 1e9, 1e9), **rates}.items():
            crypt_s = 1 / (ratio * cipher_gb_per_s)
            stages = (threads / (1 / encode + crypt_s), link * ratio,
                      threads / (1 / decode + crypt_s))  # fmt: skip
            reached[name] = round(min(stages), 2)
        best = max(reached, key=lambda name: reached[name])
        found.append(Choice(link, reached["raw"], reached["fast"], reached["dense"], best))
    return found


def sample(paths: Iterable[str], blocks_max: int = 24) -> list[npt.NDArray[np.uint16]]:
    """Blocks of 64 tokens, spread evenly over all files."""
    found = [one for path in paths for one in blocks_of(path, 64)]
    return found[:: max(1, -(-len(found) // blocks_max))]


def canonical(folder: Path, repeats: int = 5) -> dict[str, float]:
    """The numbers of README and budgets: the lowest of every folder with .npy files below."""
    paths = sorted(folder.rglob("*.npy"))
    found: dict[str, float] = {}
    for one in sorted({path.parent for path in paths}):
        blocks: list[Bytes] = [
            convert(bits, DType.BF16)
            for bits in sample(str(path) for path in paths if path.parent == one)
        ]
        for name in ("dense", "fast"):
            row = measure_codec(blocks, DType.BF16, name, CHUNK_BYTES, repeats)
            for what, value in (
                ("ratio_bf16", row.ratio),
                ("decode_gbps", row.decode_gb_per_s),
                ("encode_gbps", row.encode_gb_per_s),
            ):
                key = f"codec_{name}_{what}"
                found[key] = min(value, found.get(key, value))
    return found
