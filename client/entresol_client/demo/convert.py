"""Makes the demo's data files from their sources: `python -m entresol_client.demo.convert --help`.

Kept out of the demo itself: the demo only reads what this wrote. Invariant: nothing is unpickled.
Weights come as safetensors (an 8-byte length, a JSON header, raw tensors; format:
https://github.com/huggingface/safetensors), tokenizers as Hugging Face `tokenizer.json`.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .tokenizer import compact_from_hugging_face
from .weights import write_weights

# What a safetensors file does not say: how the tensors are used.
TINYLM_CONFIG: dict[str, float] = {
    "vocab": 4096,
    "hidden": 384,
    "layers": 6,
    "q_heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 832,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
}


def read_safetensors_bf16(data: bytes) -> dict[str, NDArray[np.uint16]]:
    """The tensors of a safetensors file as bf16 bit patterns, sorted by name.

    Raises:
        ValueError: a tensor is not BF16, or its span lies outside the file.
    """
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    base = 8 + header_bytes
    tensors: dict[str, NDArray[np.uint16]] = {}
    for name in sorted(header):
        entry = header[name]
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= len(data) - base:
            raise ValueError(f"{name} lies outside the file")
        values = np.frombuffer(data, "<u2", (end - start) // 2, base + start)
        tensors[name] = values.reshape(entry["shape"]).astype(np.uint16)
    return tensors


def main(argv: list[str] | None = None) -> int:
    """Command line: `weights IN.safetensors OUT` or `tokenizer IN.json OUT`."""
    parser = argparse.ArgumentParser(prog="python -m entresol_client.demo.convert")
    parser.add_argument("kind", choices=("weights", "tokenizer"))
    parser.add_argument("source", type=Path, help="a .safetensors file, or a tokenizer.json")
    parser.add_argument("target", type=Path)
    options = parser.parse_args(argv)
    source: bytes = options.source.read_bytes()
    if options.kind == "weights":
        written = write_weights(TINYLM_CONFIG, read_safetensors_bf16(source))
    else:
        written = compact_from_hugging_face(source)
    options.target.write_bytes(written)
    print(f"source_bytes={len(source)} written_bytes={len(written)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
