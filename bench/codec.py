"""Compression ratio and speed of every codec on real KV files, and what sealing adds.

    python -m bench.codec FILE.npy ... [--json] [--block-tokens 64] [--chunk-kib 256]

A file holds bf16 bit patterns (`bench.kv` says which files are accepted; another ends with a line
that says so, and status 2). It is cut into blocks of --block-tokens tokens, the last one shorter if
need be, blocks into chunks, as sealing does. fp8 and int8 are made from these values by rounding.
fp16 and fp32 hold bf16 precision in wider storage, as when a bf16 model runs with such a cache:
their low bits are zero and they shrink much more than values of full precision (rows "fp16 full",
"fp32 full": the same values, with the bits that bf16 never had drawn at random).

Speeds are plain bytes per CPU-second of this process on one core: for each block the best of
--repeats, then the median over blocks. They do not depend on what else the machine runs, except
through shared caches and clocks. Ratios are totals over all blocks, chunk framing and AEAD tags
included, header not (it is 0.02 % of a 1 MiB block).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench import kv
from bench.kv import Bits
from entresol_proto import limits
from entresol_proto.ids import BadKeyError
from entresol_proto.seal import block, codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import Status

if TYPE_CHECKING:
    from bench import codec_budget as budget

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
SEAL_ELEMENTS = 1 << 19  # a megabyte is sealed and opened


@dataclass(frozen=True, slots=True)
class Row:
    """One (dtype, codec): totals and medians over all blocks of all files."""

    dtype: str
    codec: str
    blocks: int
    plain_bytes: int
    ratio: float
    bypassed: int  # chunks the codec left raw
    encode_gb_per_s: float
    decode_gb_per_s: float


@dataclass(frozen=True, slots=True)
class SealRow:
    """Sealing and opening blocks with one codec, against the bare cipher on the same bytes."""

    codec: str
    block_bytes: int
    seal_gb_per_s: float
    open_gb_per_s: float
    bare_decrypt_gb_per_s: float
    open_over_bare_us: float  # raw codec: what the format and Python add to one block


def _float32(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_fp8(values: Floats, exponent_bits: int, top: float) -> Bytes:
    """Round to nearest even in an fp8 format without infinities in range; saturates at `top`."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    size = np.minimum(np.abs(values.astype(np.float64)), top)
    exponent = np.floor(np.log2(np.maximum(size, 2.0**-40))).astype(np.int64)
    exponent = np.maximum(exponent, 1 - bias)
    steps = np.rint(size / 2.0 ** (exponent - mantissa_bits)).astype(np.int64)
    code = ((exponent + bias - 1) << mantissa_bits) + steps
    packed: Bytes = (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
    return packed


def convert(bits: Bits, dtype: DType) -> Bytes:
    """The bytes of bf16 bit patterns in another dtype; OPAQUE is the bf16 bytes as they are."""
    values = _float32(bits)
    out: npt.NDArray[Any] = bits
    with np.errstate(over="ignore", invalid="ignore"):  # what fp16 cannot hold is infinite there
        if dtype is DType.FP16:
            out = values.astype(np.float16)
        elif dtype is DType.FP32:
            out = values
        elif dtype is DType.FP8_E4M3:
            out = _to_fp8(np.nan_to_num(values), 4, 448.0)
        elif dtype is DType.FP8_E5M2:
            out = _to_fp8(np.nan_to_num(values), 5, 57344.0)
        elif dtype is DType.INT8:
            known = np.nan_to_num(values)
            scale = max(float(np.abs(known).max()) / 127.0, 1e-30)
            out = np.rint(known / scale).astype(np.int8)
    return np.frombuffer(out.tobytes(), np.uint8)


def full_precision(bits: Bits, dtype: DType) -> Bytes:
    """bf16 values in fp16 or fp32 as if they had been computed there.

    Sign, exponent and seven bits of the mantissa are the file's; what is below, which bf16 does not
    have and no code can save, is drawn at random. The same bits give the same bytes.
    """
    low = np.random.default_rng(1).integers(0, 1 << 16, bits.shape, dtype=np.uint32)
    values = (bits.astype(np.uint32) << 16 | low).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        out = values.astype(np.float16) if dtype is DType.FP16 else values
    return np.frombuffer(out.tobytes(), np.uint8)


def best_s(call: Callable[[], object], repeats: int) -> float:
    """Least CPU seconds of one call."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        call()
        best = min(best, time.process_time() - began)
    return best


def measure_codec(
    blocks: list[Bytes], dtype: DType, name: str, chunk_bytes: int, repeats: int, note: str = ""
) -> Row:
    """Encode and decode every block chunk by chunk; asserts that the bytes come back."""
    codec = codecs.by_name(name)
    stored_total = plain_total = bypassed = 0
    encode_rates: list[float] = []
    decode_rates: list[float] = []
    for plain in blocks:
        view = plain.data
        chunks = [view[i : i + chunk_bytes] for i in range(0, len(view), chunk_bytes)]
        stored = [codec.encode(chunk, dtype) for chunk in chunks]
        pairs = [(s, len(c)) for s, c in zip(stored, chunks, strict=True) if s is not None]
        bypassed += len(chunks) - len(pairs)
        into = memoryview(bytearray(chunk_bytes))

        def encode(chunks: list[memoryview] = chunks) -> None:
            for chunk in chunks:
                codec.encode(chunk, dtype)

        def decode(pairs: list[Any] = pairs, into: memoryview = into) -> None:
            for encoded, size in pairs:
                codec.decode_into(memoryview(encoded), into[:size], dtype)

        for encoded, chunk in zip(stored, chunks, strict=True):
            if encoded is not None:
                codec.decode_into(memoryview(encoded), into[: len(chunk)], dtype)
                assert into[: len(chunk)] == chunk
        for encoded, chunk in zip(stored, chunks, strict=True):
            stored_total += len(chunk if encoded is None else encoded) + block.TAG_BYTES
        plain_total += len(view)
        encode_rates.append(len(view) / max(best_s(encode, repeats), 1e-9))
        decoded_bytes = sum(size for _, size in pairs)
        if decoded_bytes:
            decode_rates.append(decoded_bytes / max(best_s(decode, repeats), 1e-9))
    return Row(
        dtype=dtype.label + note,
        codec=name,
        blocks=len(blocks),
        plain_bytes=plain_total,
        ratio=round(plain_total / stored_total, 4),
        bypassed=bypassed,
        encode_gb_per_s=round(statistics.median(encode_rates) / 1e9, 3),
        decode_gb_per_s=round(statistics.median(decode_rates) / 1e9, 3) if decode_rates else 0.0,
    )


def measure_seal(plain: Bytes, dtype: DType, name: str, chunk_bytes: int, repeats: int) -> SealRow:
    """Seal and open one block; asserts that the bytes come back."""
    salt = block.new_salt()
    key = block.derive_block_key(bytes(range(32)), salt)
    identity = block.BlockIdentity(bytes(16), bytes(range(16)), bytes(32), dtype, 1)
    out = memoryview(bytearray(block.sealed_bytes_max(len(plain), chunk_bytes=chunk_bytes)))
    into = memoryview(bytearray(len(plain)))

    def seal() -> block.SealedHeader:
        return block.seal_into(
            out,
            plain.data,
            identity=identity,
            block_key=key,
            salt=salt,
            codec_id=codecs.by_name(name).codec_id,
            meta=None,
            chunk_bytes=chunk_bytes,
        )

    header = seal()
    sealed = out[: header.sealed_bytes]

    def open_() -> Status:
        return block.open_into(
            sealed,
            into,
            namespace_id=identity.namespace_id,
            wire_key=identity.wire_key,
            engine_key=identity.engine_key,
            block_key=key,
        )

    assert open_() is Status.OK
    assert into == plain.data
    cipher = AESGCM(key.key)
    pieces = []
    for start in range(0, len(plain), chunk_bytes):
        nonce = start.to_bytes(12, "little")
        piece = plain.data[start : start + chunk_bytes]
        stored = memoryview(bytearray(len(piece) + block.TAG_BYTES))
        cipher.encrypt_into(nonce, piece, header.aad, stored)
        pieces.append((nonce, stored, into[start : start + len(piece)]))

    def bare() -> None:
        for nonce, stored, piece in pieces:
            cipher.decrypt_into(nonce, stored, header.aad, piece)

    open_s, bare_s = best_s(open_, repeats), best_s(bare, repeats)
    return SealRow(
        codec=name,
        block_bytes=len(plain),
        seal_gb_per_s=round(len(plain) / best_s(seal, repeats) / 1e9, 3),
        open_gb_per_s=round(len(plain) / open_s / 1e9, 3),
        bare_decrypt_gb_per_s=round(len(plain) / bare_s / 1e9, 3),
        open_over_bare_us=round((open_s - bare_s) * 1e6, 1),
    )


def _rows(
    chosen: Sequence[Bits], dtypes: Sequence[DType], chunk_bytes: int, repeats: int
) -> list[Row]:
    """Every codec on every dtype."""
    rows = []
    for dtype in dtypes:
        made = {"": [convert(block_, dtype) for block_ in chosen]}
        if dtype in (DType.FP16, DType.FP32):
            made[" full"] = [full_precision(block_, dtype) for block_ in chosen]
        for name in codecs.names()[1:]:
            for note, blocks in made.items():
                rows.append(measure_codec(blocks, dtype, name, chunk_bytes, repeats, note))
    return rows


@dataclass(frozen=True, slots=True)
class Report:
    """What one run found."""

    codecs: list[Row]
    sealing: list[SealRow]
    bounds_bf16: list[budget.Bound]
    bypass: list[budget.BypassCost]
    choice_bf16_4_threads: list[budget.Choice]


def measure(
    found: Sequence[tuple[kv.Blocks, int]],
    paths: Sequence[str],
    dtypes: Sequence[DType],
    *,
    chunk_bytes: int,
    repeats: int,
    blocks_max: int,
) -> Report:
    """Everything, on at most `blocks_max` of the blocks that were found."""
    from bench import codec_budget as budget  # here: it measures with this module

    rows = _rows(kv.read(kv.spread(found, blocks_max)), dtypes, chunk_bytes, repeats)
    run = kv.first(found, SEAL_ELEMENTS).view(np.uint8)
    seals = [
        measure_seal(run, DType.BF16, name, chunk_bytes, 4 * repeats) for name in codecs.names()
    ]
    rates = {
        row.codec: (row.ratio, row.encode_gb_per_s, row.decode_gb_per_s)
        for row in rows
        if row.dtype == "bf16" and row.codec in ("fast", "dense")
    }
    cipher = max(seal.bare_decrypt_gb_per_s for seal in seals)
    return Report(
        rows,
        seals,
        [bound for path in paths for bound in budget.bounds(path)],
        budget.bypasses(),
        budget.choices(rates, cipher) if rates else [],
    )


def _print(report: Report) -> None:
    print(
        f"{'dtype':9} {'codec':6} {'ratio':>6} {'raw chunks':>10} {'enc GB/s':>9} {'dec GB/s':>9}"
    )
    for row in report.codecs:
        print(
            f"{row.dtype:9} {row.codec:6} {row.ratio:6.3f} {row.bypassed:10d} "
            f"{row.encode_gb_per_s:9.2f} {row.decode_gb_per_s:9.2f}"
        )
    for seal in report.sealing:
        print(
            f"{seal.codec:6} {seal.block_bytes} bytes: seal {seal.seal_gb_per_s:.2f} GB/s, "
            f"open {seal.open_gb_per_s:.2f} GB/s, bare cipher "
            f"{seal.bare_decrypt_gb_per_s:.2f} GB/s, open adds {seal.open_over_bare_us:.0f} us"
        )
    print("\nbf16, order-0 codes of the exponent: one, per layer, per layer and channel")
    for bound in report.bounds_bf16:
        print(
            f"{bound.file:16} {bound.part} {bound.one_table:6.3f} {bound.per_layer:6.3f} "
            f"{bound.per_channel:6.3f}"
        )
    print("\nbypass on noise: stored / raw, sealing time / raw, the same when remembered")
    for bypass in report.bypass:
        print(
            f"{bypass.codec:6} {bypass.dtype:9} {bypass.stored_over_plain:.4f} "
            f"{bypass.time_over_raw:.3f} {bypass.remembered_over_raw:.3f}"
        )
    cipher = max(seal.bare_decrypt_gb_per_s for seal in report.sealing)
    print(f"\nbf16 end to end, 4 cores each side, cipher {cipher:.1f} GB/s: plain GB/s")
    for line in report.choice_bf16_4_threads:
        print(
            f"link {line.link_gb_per_s:4.1f}: raw {line.raw:5.2f}  fast {line.fast:5.2f}  "
            f"dense {line.dense:5.2f}  best {line.best}"
        )


def _count(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers of an option."""

    def read(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return read


def _dtypes(text: str) -> list[DType]:
    try:
        return [DType.from_name(name) for name in text.split(",")]
    except BadKeyError as error:
        raise argparse.ArgumentTypeError(f"{error.args[0]}; {error.hint}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.codec", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.npy")
    parser.add_argument("--json", action="store_true")
    tokens, kib = _count(1, 1 << 20), _count(4, limits.CHUNK_BYTES_MAX // limits.KIB)
    parser.add_argument("--block-tokens", type=tokens, default=64)
    parser.add_argument("--chunk-kib", type=kib, default=256)
    parser.add_argument("--repeats", type=_count(1, 10_000), default=5)
    parser.add_argument(
        "--blocks-max", type=_count(1, 1 << 20), default=24, help="blocks in all, spread evenly"
    )
    all_of_them = "bf16,fp16,fp8_e4m3,fp8_e5m2,fp32,int8,opaque"
    parser.add_argument("--dtypes", type=_dtypes, default=_dtypes(all_of_them))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line; prints a table, or one JSON object. Status 2 for a file that is no KV."""
    args = _parser().parse_args(argv)
    chunk_bytes = args.chunk_kib * limits.KIB
    try:
        found = kv.all_blocks(args.files, args.block_tokens)
    except kv.KvError as error:
        print(f"bench.codec: {error}", file=sys.stderr)
        return 2
    report = measure(
        found, args.files, args.dtypes,
        chunk_bytes=chunk_bytes, repeats=args.repeats, blocks_max=args.blocks_max,
    )  # fmt: skip
    if args.json:
        told = {"block_tokens": args.block_tokens, "chunk_bytes": chunk_bytes, **asdict(report)}
        json.dump(told, sys.stdout, indent=1)
        print()
    else:
        _print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
