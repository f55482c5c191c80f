"""Names that keep one model's KV bytes from being taken for another's.

Invariant: whatever can change the bytes behind an engine's block hash is in the descriptor or in
the key. Engines hash token ids (and sometimes a salt), not weights, dtype, layout or topology; the
gaps that leaves are the field's most reported silent corruption.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from entresol_proto import limits
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import ConfigError

CONFIG_FILES = ("config.json", "adapter_config.json")  # beside the weights
CONFIG_BYTES_MAX = 16 * limits.MIB
# Of a model's configuration, what says nothing of its KV, or is said elsewhere.
NOT_OF_THE_MODEL = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})
# Positions that are encoded alike however long an engine lets prompts be. Of any other kind it is
# not known; with LongRoPE vLLM chooses the factors by `max_model_len`
# (model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py, 0.32).
ROPES_OF_ANY_LENGTH = frozenset(
    {"default", "linear", "dynamic", "llama3", "yarn", "deepseek_yarn", "mrope", "proportional"}
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLES_PER_FILE = 8
SAMPLE_BYTES = 16 * limits.KIB
TENSOR_SAMPLE_BYTES = 4 * limits.KIB
TENSORS_MAX = 4096  # of a file, that are sampled
HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
WEIGHTS_SIGN = "+w:"  # in a revision that says something of the weights
# Of what a model is loaded with, what reads the same files of its folder; how fast is their affair.
# "pt" and "npcache" read others, which may hold other weights.
LOAD_FORMATS_ALIKE = frozenset(
    {
        "",
        "auto",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "layered",
        "runai_streamer",
        "safetensors",
    }
)
RANDOM_WEIGHTS = "dummy"
LOADER_HABITS = frozenset(
    {
        "concurrency",
        "distributed",
        "enable_gds",
        "enable_multithread_load",
        "enable_weights_track",
        "hash_num_threads",
        "max_file_bytes",
        "memory_limit",
        "num_threads",
        "verify_on_load",
    }
)  # of `model_loader_extra_config`: how weights are loaded, not which
SALT_BYTES = 16
FINGERPRINT_CHARS = 24
log = logging.getLogger("entresol.engine")
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


def plain(value: Any) -> Any:
    """`value` in the form that `fingerprint` takes: a setting of an engine's, whatever it is.

    The same in every process: objects without a text of their own are their class's name.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value) if isinstance(value.value, (str, int)) else value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(one) for one in value), key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if not isinstance(value, type):
        told = getattr(value, "model_dump", None)
        if told is not None:  # pydantic's
            return plain(told())
        text = str(value)
        if " at 0x" not in text:
            return text
        value = type(value)
    return f"{value.__module__}.{value.__qualname__}"


def load_facts(load_format: Any, extra: Any) -> dict[str, Any]:
    """Of how an engine loads its weights, what may make them others than those of its folder; {}
    as a rule. `extra` is its `model_loader_extra_config`: a mapping, an object or JSON.

    Source: vLLM 0.33.0, model_executor/model_loader; SGLang 0.5.23, model_loader/loader.py.
    """
    facts: dict[str, Any] = {}
    kind = str(plain(load_format) or "").lower()
    if kind not in LOAD_FORMATS_ALIKE:
        facts["load_format"] = kind
    if isinstance(extra, str):
        with contextlib.suppress(ValueError):  # then it is a text
            extra = json.loads(extra or "{}")
    said = plain(extra)
    if isinstance(said, dict):
        said = {key: value for key, value in said.items() if key not in LOADER_HABITS}
    if said:
        facts["loader"] = said
    return facts


def check_loaded(load_format: Any, weights: str) -> None:
    """Refuse an engine that has made up its weights, unless `weights` is a text of its own.

    Raises: ConfigError.
    """
    if str(plain(load_format)).lower() == RANDOM_WEIGHTS and weights in ("auto", "off"):
        raise ConfigError(
            "load_format is dummy: what is computed with random weights would be stored under the "
            "name of the model's own",
            hint="leave it out, or set weights to a text that no other engine has",
        )


def weights_folder(model: str, revision: str) -> str:
    """Where a model's weights are on this host: itself if it is a path, else the hub's cache.

    Empty when neither has them. Downloads nothing.
    """
    if Path(model).exists():
        return model
    try:
        from huggingface_hub import snapshot_download  # of the engine's, not of ours

        return str(snapshot_download(model, revision=revision or None, local_files_only=True))
    except Exception:  # no hub library, no such snapshot, not a hub name: all mean "not here"
        return ""


def weights_fingerprint(model_path: str | os.PathLike[str]) -> str | None:
    """Short hex digest of a local model's or adapter's files; None when it has no weights to read.

    Takes what CONFIG_FILES say (another `rope_scaling` makes other keys of the same weights), and
    of weights each file's name, length and samples of its bytes: the first `SAMPLE_BYTES`, where
    safetensors lists its tensors; of each tensor `TENSOR_SAMPLE_BYTES` from its middle (of
    TENSORS_MAX where a file has more), or of another file `SAMPLES_PER_FILE`, evenly spread. So it
    costs some megabytes of reading for any model. Two fine-tunes of one shape differ in it; two
    files that differ only between the samples would not: in a small part of one tensor, that is.
    Same bytes give the same digest on every host.

    Raises: ConfigError when a file cannot be read.
    """
    folder = Path(model_path)
    files = [folder] if folder.is_file() else sorted(folder.glob("*")) if folder.is_dir() else []
    weights = [one for one in files if one.name.endswith(WEIGHT_SUFFIXES)]
    if not weights:
        return None
    digest = hashlib.blake2b(digest_size=FINGERPRINT_CHARS // 2, person=b"entresol-weights")
    configs = [one for one in files if one.name in CONFIG_FILES]
    for one in (*configs, *weights):
        try:
            with open(one, "rb") as file:
                if one in configs:
                    digest.update(
                        f"{one.name}\0{_config_mark(file.read(CONFIG_BYTES_MAX))}".encode()
                    )
                    continue
                length_bytes = os.fstat(file.fileno()).st_size
                digest.update(f"{one.name}\0{length_bytes}\0".encode())
                digest.update(file.read(SAMPLE_BYTES))
                for at, size in _samples(file, one.name, length_bytes):
                    file.seek(at)
                    digest.update(file.read(size))
        except OSError as error:
            raise ConfigError(
                f"cannot read {str(one)!r}: {error.strerror}",
                hint='set weights to "off" or to a text of your own',
            ) from None
    return digest.hexdigest()


def _samples(file: IO[bytes], name: str, length_bytes: int) -> Iterator[tuple[int, int]]:
    """Where to read of a file of weights, and how much."""
    tensors = _tensors(file, length_bytes) if name.endswith(".safetensors") else []
    for begin, end in tensors[:: -(-len(tensors) // TENSORS_MAX) or 1]:
        size = min(TENSOR_SAMPLE_BYTES, end - begin)
        yield begin + (end - begin - size) // 2, size
    if not tensors:
        step = max(1, length_bytes // (SAMPLES_PER_FILE + 1))
        for number in range(1, SAMPLES_PER_FILE + 1):
            yield step * number, SAMPLE_BYTES


def _tensors(file: IO[bytes], length_bytes: int) -> list[tuple[int, int]]:
    """Where the tensors of a safetensors file lie, in order; none if it is not one.

    Source: the format's description, github.com/huggingface/safetensors: eight bytes of length,
    then JSON with the offsets of each tensor, counted from its end.
    """
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(HEADER_BYTES_MAX, length_bytes - 8):
        return []
    try:
        told = json.loads(file.read(size))
        places = [tuple(one["data_offsets"]) for key, one in told.items() if key != "__metadata__"]
        found = sorted((8 + size + begin, 8 + size + end) for begin, end in places)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    good = all(8 + size <= begin <= end <= length_bytes for begin, end in found)
    return [(begin, end) for begin, end in found if end > begin] if good else []


def _config_mark(raw: bytes) -> str:
    """Of a configuration file: of what it says of the model, not of how it is written."""
    try:
        said = json.loads(raw)
        return fingerprint({k: v for k, v in said.items() if k not in NOT_OF_THE_MODEL})
    except (ValueError, AttributeError, RecursionError):
        return hashlib.blake2b(raw, digest_size=FINGERPRINT_CHARS // 2).hexdigest()


def model_facts(model: Any) -> dict[str, Any]:
    """What shapes the KV of a model whose weights are known: of vLLM's ModelConfig, which has read
    the model's configuration and applied what the command line overrides in it."""
    facts: dict[str, Any] = {
        "quantization": str(getattr(model, "quantization", None)),
        "dtype": str(getattr(model, "dtype", None)),
    }
    for name in ("quantization_config", "model_class_overrides", "model_weights"):
        if (value := getattr(model, name, None)) is not None and value != "" and value != {}:
            facts[name] = plain(value)
    told = getattr(getattr(model, "hf_config", None), "to_json_string", None)
    if told is not None:
        config: dict[str, Any] = json.loads(told(use_diff=False))
        facts["config"] = {k: v for k, v in config.items() if k not in NOT_OF_THE_MODEL}
        if not ROPES_OF_ANY_LENGTH.issuperset(_ropes(config)):
            facts["max_model_len"] = getattr(model, "max_model_len", None)
    return facts


def _ropes(config: Mapping[str, Any], *, inside: bool = False) -> Iterator[str]:
    """The kinds of rotary embedding that a configuration names, at any depth."""
    kind = config.get("rope_type") or (config.get("type") if inside else None)
    if isinstance(kind, str):
        yield kind
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _ropes(value, inside=inside or name in ("rope_scaling", "rope_parameters"))


def revision(
    model_path: str, configured: str, engine: str, weights: str, adapters: str = ""
) -> str:
    """The descriptor's `model_revision`: what was configured or the engine knows, plus the weights.

    `weights` is `EngineSettings.weights`: "auto", "off", or a text to use as it is; `adapters` is
    `EngineSettings.adapters`.
    """
    name = configured or engine or "main"
    if adapters:
        name = f"{name}+a:{adapters}"
    mark = weights_mark(model_path, weights)
    return f"{name}{WEIGHTS_SIGN}{mark}" if mark else name


def weights_mark(model_path: str, weights: str) -> str:
    """What stands for the weights in names; empty if nothing does."""
    if weights == "off":
        return ""
    mark = weights_fingerprint(model_path) if weights == "auto" else weights
    if not mark:
        log.warning(
            "event=weights_not_found model=%r effect=told_apart_by_name hint='set weights to a "
            "text, and change it with them'", model_path,
        )  # fmt: skip
    return mark or ""


def new_epoch() -> str:
    """A text of nobody's, for an engine that has dropped its caches: perhaps its weights are others
    now than in the files it was started with, and what was stored before is not theirs."""
    return secrets.token_hex(8)


def common_epoch(number: int) -> str:
    """As `new_epoch`, and the same text for all processes that this one's parent has started, each
    at its `number`-th time: the ranks of an engine that look for the same blocks. Ranks on another
    host have another: there what this one's rank 0 stores from then on is not found."""
    try:
        parent = os.getppid()
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        began = fields[19]  # starttime, the 22nd field; proc(5)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        return new_epoch()
    return fingerprint({"boot": boot, "parent": parent, "began": began, "number": number})


def of_epoch(salt: str, epoch: str) -> str:
    """The salt of a request since the caches were dropped; before that `epoch` is empty."""
    return f"{epoch}\0{salt}" if epoch else salt


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
