"""What compression really saves, and which codec a session should use.

Invariants: the meter's table is bounded whatever namespaces appear, and who has most of it forgets
first (`shares`); and `choose_codec` changes speed only, any codec opens to the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from entresol_proto import native
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.shares import Shares
from entresol_proto.status import ConfigError

NAMESPACES_METERED_MAX = 1024


@dataclass(frozen=True, slots=True)
class RatioRow:
    """Totals of one (namespace, dtype, codec) since it is remembered."""

    namespace: str  # namespace id in hex
    dtype: str
    codec: str  # what the blocks were stored with, after any bypass
    blocks: int
    plain_bytes: int
    stored_bytes: int  # headers, tags and meta included when the caller counts them, as it should

    @property
    def ratio(self) -> float:
        """Plain over stored; above 1 is a saving."""
        return self.plain_bytes / self.stored_bytes if self.stored_bytes else 0.0


class RatioMeter:
    """Sums plain and stored bytes by tenant. Not for use from several threads at once."""

    def __init__(self, *, namespaces_max: int = NAMESPACES_METERED_MAX) -> None:
        self._totals: Shares[bytes, dict[tuple[DType, int], list[int]]]
        self._totals = Shares(namespaces_max, dict)

    def add(
        self,
        tenant: str,
        namespace_id: bytes,
        dtype: DType,
        codec_id: int,
        plain: int,
        stored: int,
        blocks: int = 1,
    ) -> None:
        """Count blocks of `plain` bytes together, stored in `stored` bytes.

        Raises: CodecError for an unknown codec.
        """
        codecs.get(codec_id)
        kinds = self._totals.use(tenant, namespace_id)
        totals = kinds.setdefault((dtype, codec_id), [0, 0, 0])
        totals[0] += blocks
        totals[1] += plain
        totals[2] += stored

    def rows(self, tenant: str) -> list[RatioRow]:
        """All totals of a tenant, sorted by namespace, dtype and codec."""
        return [
            RatioRow(namespace_id.hex(), dtype.label, codecs.get(codec_id).name, *totals)
            for namespace_id, kinds in sorted(self._totals.of(tenant).items())
            for (dtype, codec_id), totals in sorted(kinds.items())
        ]

    def forget(self, tenant: str) -> None:
        """The tenant was erased."""
        self._totals.forget(tenant)


@dataclass(frozen=True, slots=True)
class CodecRate:
    """What one codec does to one dtype; plain bytes per second of one core, without the cipher."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


# One core, x86 (Zen 3, AVX2), cryptography 50 and zstandard 0.25, `python -m bench.codec` on KV of
# two trained models in blocks of 64 tokens, on a busy machine; the lower one where they differ.
# fp16 and fp32 are the rows of full precision (bf16 values in wider storage shrink more). `plane`
# is for where the native kernel is missing: there `fast` and `dense` are slow. Of a reader that has
# none although this side has one, nothing is known.
# The published anchors agree: 1.4x bf16 (VAST; FlexKV with nvCOMP), 1.48x (ZipNN run on the same
# files). int8 is left out: engines scale it per channel or token, and no such data was at hand.
_RATES: dict[tuple[int, DType], CodecRate] = {
    (codecs.ZSTD, DType.OPAQUE): CodecRate(1.26, 0.8e9, 0.77e9),
    (codecs.PLANE, DType.BF16): CodecRate(1.49, 0.6e9, 1.2e9),
    (codecs.PLANE, DType.FP16): CodecRate(1.18, 0.7e9, 1.2e9),
    (codecs.PLANE, DType.FP8_E4M3): CodecRate(1.20, 0.35e9, 0.7e9),
    (codecs.PLANE, DType.FP8_E5M2): CodecRate(1.41, 0.37e9, 0.8e9),
    (codecs.PLANE, DType.FP32): CodecRate(1.20, 0.5e9, 1.0e9),
    (codecs.FAST, DType.BF16): CodecRate(1.43, 7.5e9, 8.9e9),
    (codecs.FAST, DType.FP16): CodecRate(1.17, 4.1e9, 5.3e9),
    (codecs.FAST, DType.FP8_E4M3): CodecRate(1.17, 3.3e9, 4.5e9),
    (codecs.FAST, DType.FP8_E5M2): CodecRate(1.36, 2.5e9, 3.1e9),
    (codecs.DENSE, DType.BF16): CodecRate(1.50, 0.8e9, 3.6e9),
    (codecs.DENSE, DType.FP16): CodecRate(1.17, 1.3e9, 5.2e9),
    (codecs.DENSE, DType.FP8_E4M3): CodecRate(1.20, 0.45e9, 1.0e9),
    (codecs.DENSE, DType.FP8_E5M2): CodecRate(1.41, 0.34e9, 1.2e9),
    (codecs.DENSE, DType.FP32): CodecRate(1.20, 0.5e9, 1.0e9),
}
_CIPHER_BYTES_PER_S = 3.8e9  # AES-256-GCM, same core and runs, either way

_POLICIES: dict[str, int] = {name: codecs.by_name(name).codec_id for name in codecs.names()}
POLICY_AUTO = "auto"
POLICIES = (POLICY_AUTO, *_POLICIES)


def choose_codec(
    *, same_host: bool, link_bytes_per_s: int, open_threads: int, dtype: DType, policy: str
) -> int:
    """The codec id that gets plaintext to this session's reader fastest.

    A `policy` that is the name of a codec decides alone. "auto" takes raw on one host, where the
    link is memory; otherwise the codec with the highest min(link × ratio, threads × opening rate of
    one core), the denser one on a tie. `link_bytes_per_s` is what the link carries for this
    session, `open_threads` how many cores may open blocks at once, as the peer says; below 1 counts
    as 1. A guess from constants: the meter tells what really happened.

    Raises: ConfigError for an unknown policy, or for "auto" without a positive link rate.
    """
    if policy != POLICY_AUTO:
        try:
            return _POLICIES[policy]
        except KeyError:
            raise ConfigError(
                f"unknown codec policy {policy!r}", hint=f"use one of {', '.join(POLICIES)}"
            ) from None
    if same_host:
        return codecs.RAW
    found = plain_rates(link_bytes_per_s=link_bytes_per_s, open_threads=open_threads, dtype=dtype)
    return max(reversed(found), key=lambda codec_id: found[codec_id])


class PlainRate(NamedTuple):
    """How fast plain bytes reach a reader, then the ratio; the greater of two is the better."""

    plain_per_s: float
    ratio: float
    bound: str  # what is the slowest: a name of `Load`'s, "link" or "opening"


@dataclass(frozen=True, slots=True)
class Load:
    """What bounds a writer and its readers beside the link, because work waits for it; 0: nothing
    does. `full`: blocks are evicted, so that a ratio is also what is kept longer."""

    flash_read_bytes_per_s: float = 0.0  # stored bytes
    flash_write_bytes_per_s: float = 0.0
    seal_threads: int = 0
    full: bool = False


IDLE = Load()


def plain_rates(
    *,
    link_bytes_per_s: int,
    open_threads: int,
    dtype: DType,
    ratios: Mapping[int, float] | None = None,
    load: Load = IDLE,
    seal_speeds: Mapping[int, float] | None = None,
) -> dict[int, PlainRate]:
    """What each codec that suits the dtype promises over a link, by its id; raw is always there.

    `ratios`: what blocks were really found to shrink by, where that is known. `seal_speeds`: plain
    bytes per second that one core seals with a codec, cipher included, where that was measured.

    Raises: ConfigError without a positive link rate.
    """
    if link_bytes_per_s <= 0:
        raise ConfigError("codec policy auto needs a link rate above zero")
    unsuited = (codecs.FAST, codecs.DENSE) if native.KERNEL is None else (codecs.PLANE,)
    known = {codecs.RAW: CodecRate(1.0, float("inf"), float("inf"))} | {
        codec_id: rate
        for (codec_id, of_dtype), rate in _RATES.items()
        if of_dtype is dtype and codec_id not in unsuited
    }
    found = {}
    for codec_id, rate in known.items():
        ratio = (ratios or {}).get(codec_id, rate.ratio)
        cipher_s = 1 / (ratio * _CIPHER_BYTES_PER_S)
        sealing = 1 / (1 / rate.encode_bytes_per_s + cipher_s)
        if seal_speeds is not None:
            sealing = seal_speeds.get(codec_id, sealing)
        stages = {
            "link": link_bytes_per_s * ratio,
            "opening": max(1, open_threads) / (1 / rate.decode_bytes_per_s + cipher_s),
            "flash reads": load.flash_read_bytes_per_s * ratio,
            "flash writes": load.flash_write_bytes_per_s * ratio,
            "sealing": load.seal_threads * sealing,
        }
        stages = {name: per_s for name, per_s in stages.items() if per_s > 0}
        slowest = min(stages, key=lambda name: stages[name])
        found[codec_id] = PlainRate(stages[slowest], ratio, slowest)
    return found
