"""Names that keep one model's KV bytes from being taken for another's.

Invariant: whatever can change the bytes behind an engine's block hash is in the descriptor or in
the key. Engines hash token ids (and sometimes a salt), not weights, dtype, layout or topology; the
gaps that leaves are the field's most reported silent corruption.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entresol_proto import limits
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import ConfigError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLES_PER_FILE = 8
SAMPLE_BYTES = 16 * limits.KIB
SALT_BYTES = 16
FINGERPRINT_CHARS = 24
_DTYPES = {
    "bfloat16": DType.BF16, "float16": DType.FP16, "half": DType.FP16, "float32": DType.FP32,
    "float8_e4m3fn": DType.FP8_E4M3, "float8_e5m2": DType.FP8_E5M2, "int8": DType.INT8,
    "fp8": DType.FP8_E4M3, "fp8_e4m3": DType.FP8_E4M3, "fp8_e5m2": DType.FP8_E5M2,
}  # fmt: skip


def dtype_of(name: str) -> DType:
    """Our dtype for what PyTorch and engines call it ("torch.bfloat16", "fp8"); else OPAQUE."""
    return _DTYPES.get(name.removeprefix("torch."), DType.OPAQUE)


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Short hex digest of a canonical JSON form; for `page_layout` and the like.

    Values are texts, numbers, booleans, None, and lists or mappings of them.
    Raises: TypeError for anything else: `repr` of an object may differ between processes.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_CHARS // 2).hexdigest()


def weights_fingerprint(model_path: str | os.PathLike[str]) -> str | None:
    """Short hex digest of a local model's weight files; None when there are none to read.

    Takes each file's name, length and samples of its bytes (the first `SAMPLE_BYTES`, where
    safetensors lists its tensors, and `SAMPLES_PER_FILE` more, evenly spread), so that it costs a
    few megabytes of reading for any model. Two fine-tunes of one shape differ in it; two files that
    differ only between the samples would not. Same bytes give the same digest on every host.

    Raises: ConfigError when a weight file cannot be read.
    """
    folder = Path(model_path)
    files = [folder] if folder.is_file() else sorted(folder.glob("*")) if folder.is_dir() else []
    weights = [one for one in files if one.name.endswith(WEIGHT_SUFFIXES)]
    if not weights:
        return None
    digest = hashlib.blake2b(digest_size=FINGERPRINT_CHARS // 2, person=b"entresol-weights")
    for one in weights:
        try:
            with open(one, "rb") as file:
                length_bytes = os.fstat(file.fileno()).st_size
                digest.update(f"{one.name}\0{length_bytes}\0".encode())
                step = max(1, length_bytes // (SAMPLES_PER_FILE + 1))
                for at in [0, *(step * n for n in range(1, SAMPLES_PER_FILE + 1))]:
                    file.seek(at)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise ConfigError(
                f"cannot read weights {str(one)!r}: {error.strerror}",
                hint='set weights to "off" or to a text of your own',
            ) from None
    return digest.hexdigest()


def revision(model_path: str, configured: str, engine: str, weights: str) -> str:
    """The descriptor's `model_revision`: what was configured or the engine knows, plus the weights.

    `weights` is `EngineSettings.weights`: "auto", "off", or a text to use as it is.
    """
    name = configured or engine or "main"
    if weights == "off":
        return name
    mark = weights_fingerprint(model_path) if weights == "auto" else weights
    return f"{name}+w:{mark}" if mark else name


def salted(key: bytes, salt: str | None) -> bytes:
    """`key`, or with a salt `key` and 16 bytes of the salt's digest.

    Salts are folded into the engine key, not into the namespace, because a session has few
    namespaces and users many salts. Raises: ConfigError when the key leaves no room.
    """
    if not salt:
        return key
    if len(key) + SALT_BYTES > limits.ENGINE_KEY_BYTES_MAX:
        raise ConfigError(f"an engine key of {len(key)} bytes leaves no room for a salt")
    mark = hashlib.blake2b(salt.encode(), digest_size=SALT_BYTES, person=b"entresol-salt")
    return key + mark.digest()
