"""Writes ladder.json: golden chunks of the codecs fast and dense; run it as a script.

Deterministic, with the native kernel and without. A chunk that is there must decode for ever. An
encoder may come to choose otherwise; then its chunks are added under new names, and none goes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType

HERE = Path(__file__).parent


def plain_of(channels: int, size: int) -> bytes:
    """16-bit values from SHAKE-256: few exponents, other ones by channel, and some far off."""
    noise = hashlib.shake_256(b"ladder").digest(size + 2)
    out = bytearray()
    for at in range(0, size, 2):
        bits = noise[at] | noise[at + 1] << 8
        exponent = 118 + (bits >> 7 & 0xFF).bit_count() + at // 2 % channels % 3
        if bits & 0xFF == 0x55:
            exponent = bits >> 8
        out += (bits & 0x807F | (exponent & 0xFF) << 7).to_bytes(2, "little")
    return bytes(out[:size])


def cases() -> list[dict[str, Any]]:
    """Inputs of every golden chunk."""
    first = [
        {"name": f"{codec}_{dtype}", "codec": codec, "dtype": dtype, "channels": 96, "size": 20_011}
        for codec in ("fast", "dense")
        for dtype in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
    ]
    wide = {
        "name": "fast_bf16_wide",
        "codec": "fast",
        "dtype": "bf16",
        "channels": 1,
        "size": 20_011,
    }
    return [*first, wide]


def plain_case(case: dict[str, Any]) -> bytes:
    """What a case encodes; 8-bit types take the upper half of each value, shifted."""
    dtype = DType.from_name(case["dtype"])
    plain = plain_of(case["channels"], case["size"] * (3 - dtype.item_bytes))
    if dtype is DType.BF16:
        return plain
    values = [plain[at] | plain[at + 1] << 8 for at in range(0, len(plain) - 1, 2)]
    if dtype is DType.FP16:
        narrow = [v & 0x83FF | ((v >> 7) - 110 & 31) << 10 for v in values]
        return b"".join(v.to_bytes(2, "little") for v in narrow)
    low, bits = (3, 15) if dtype is DType.FP8_E4M3 else (2, 31)
    return bytes(
        v >> 8 & 0x80 | ((v >> 7) - 116 & bits) << low | v & (1 << low) - 1 for v in values
    )


def encode(case: dict[str, Any]) -> bytes:
    """The chunk of a case."""
    codec = codecs.by_name(case["codec"])
    made = codec.encode(memoryview(plain_case(case)), DType.from_name(case["dtype"]))
    assert made is not None, case["name"]
    return bytes(made)


def main() -> None:
    """Write the chunks that are not there, and the file that describes all."""
    described = []
    for case in cases():
        path = HERE / f"ladder_{case['name']}.bin"
        if not path.exists():
            path.write_bytes(encode(case))
        plain = hashlib.sha256(plain_case(case)).hexdigest()
        described.append({**case, "plain_bytes": len(plain_case(case)), "plain_sha256": plain})
    (HERE / "ladder.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
