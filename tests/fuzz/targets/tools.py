"""Files that people hand to tools: traces to replay, a model's config.json, hashes and token ids.

Nothing of them reaches a daemon before it is read; so what is asked here is that a file is either
refused in words or gives numbers that fit each other, and that nobody believes what it says of its
own size.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from entresol_client.cli import prompts
from entresol_client.sizing import hf_config
from entresol_client.sizing.shapes import SizingError
from entresol_daemon.replay import traces
from entresol_daemon.replay.traces import Trace, TraceError
from entresol_proto import limits
from entresol_proto.status import EntresolError
from tests.fuzz.mutate import mutate_tree, to_json
from tests.fuzz.target import Parser, Scratch, Target

# Request traces -----------------------------------------------------------------------------------

REFS_MAX = 1 << 16  # in place of the product's: what a limit refuses must not be allocated before
ROWS: tuple[dict[str, Any], ...] = (
    {"timestamp": 0, "hash_ids": [0, 1, 2], "input_length": 1_400, "output_length": 9},
    {"timestamp": 27, "hash_ids": [0, 1, 3]},
    {"timestamp": 27, "hash_ids": []},
    {"timestamp": 3_000, "hash_ids": [7]},
)


def jsonl_seeds() -> list[bytes]:
    """All of them, one, none with blocks, ids far apart."""
    far = {"timestamp": 1, "hash_ids": [-(2**40), 2**40, 5]}
    lists = (ROWS, ROWS[:1], ROWS[2:3], [far])
    return [b"\n".join(to_json(row) for row in rows) + b"\n" for rows in lists]


def a_trace(rng: Random) -> bytes:
    """Rows in order, one of them wrong somewhere."""
    rows: list[Any] = [dict(rng.choice(ROWS), timestamp=n * 10) for n in range(rng.randint(1, 4))]
    at = rng.randrange(len(rows))
    rows[at] = mutate_tree(rng, rows[at])
    return b"\n".join(to_json(row) for row in rows)


def _checked(found: Trace) -> str:
    """Dense, in order, and as long as it says."""
    assert len(found.cuts) >= 2
    assert found.cuts[0] == 0
    assert found.cuts[-1] == len(found.ids)
    assert bool(np.all(np.diff(found.cuts) >= 0))
    assert len(found) == len(found.arrivals_ms) == len(found.tenants)
    assert found.arrivals_ms == sorted(found.arrivals_ms)
    assert all(type(each) is int for each in found.arrivals_ms)
    assert found.span_ms >= 0
    assert set(found.ids.tolist()) == set(range(found.distinct)), "ids with gaps"
    assert sum(len(each) for each in found.requests()) == len(found.ids)
    assert found.block_tokens > 0
    return f"ok {min(len(found), 3)} {min(found.distinct, 3)}"


def _trace_parser(name: str) -> Parser:
    """A trace that is as it says, or a TraceError."""
    file = Scratch(name)

    def parse(raw: bytes) -> str:
        try:
            with patch.object(traces, "REFS_MAX", REFS_MAX):
                found = traces.load(file.holds(raw))
        except TraceError as error:
            return f"refused {_kind(str(error))}"
        except OSError:  # so says pyarrow of files that are cut short or no parquet
            if not name.endswith(".parquet"):
                raise
            return "refused unreadable"
        return _checked(found)

    return parse


def _kind(text: str) -> str:
    """The few words that tell refusals apart."""
    for word in ("line", "no blocks", "in order", "lacks", "no parquet", "differ", "more than"):
        if word in text:
            return word
    return "other"


@functools.cache
def parquet_seeds() -> list[bytes]:
    """With and without tenants, runs of several kinds, and what says how long a block is."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    plain = {"ts_ms": [0, 5, 9], "run_start": [[0], [0, 9], []], "run_len": [[3], [2, 1], []]}
    found = []
    for table in (
        pa.table(plain),
        pa.table({**plain, "tenant": [0, 1, 0]}).replace_schema_metadata({"block_tokens": "16"}),
        pa.table({"ts_ms": [1], "run_start": [[2**40]], "run_len": [[1]], "other": ["x"]}),
    ):
        out = io.BytesIO()
        parquet.write_table(table, out, compression="none", use_dictionary=False)
        found.append(out.getvalue())
    return found


def a_parquet(rng: Random) -> bytes:
    """Whole files whose columns do not fit: types, lengths, nothings, what the metadata says."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    columns: dict[str, Any] = {
        "ts_ms": pa.array([0, 5, 9]), "run_start": pa.array([[0], [0, 9], []]),
        "run_len": pa.array([[3], [2, 1], []]), "tenant": pa.array([0, 1, 0]),
    }  # fmt: skip
    odd = (
        pa.array([9, 5, 0]), pa.array([None, 1, 2]), pa.array(["a", "b", "c"]), pa.nulls(3),
        pa.array([[], [], []]), pa.array([[1], None, []]), pa.array([[None], [1, 2], []]),
        pa.array([[-1], [2, 1], []]), pa.array([[0.5], [2, 1], []]), pa.array([[3], [2], [1]]),
        pa.array([[2**40], [1, 1], []]), pa.array([[2**62], [2**62, 2**62], []]),
        pa.array([[["x"]], [[]], []]), pa.array([[0], [2, 1], []]), pa.array([2**63 - 1] * 3),
        pa.array([0.5, float("nan"), 1e300]),
    )  # fmt: skip
    for name in rng.sample(sorted(columns), rng.randint(1, 2)):
        if rng.random() < 0.2:
            del columns[name]
        else:
            columns[name] = rng.choice(odd)
    table = pa.table(columns)
    said = rng.choice(("16", "0", "-1", "9" * 5_000, "x", "\u0663"))
    if rng.random() < 0.4:
        table = table.replace_schema_metadata({"block_tokens": said})
    out = io.BytesIO()
    parquet.write_table(table, out, compression="none")
    return out.getvalue()


def _in_any_order(*_: Any) -> Sequence[Any]:
    return ()


def _without_order() -> AbstractContextManager[object]:
    return patch.object(traces.itertools, "pairwise", _in_any_order)


def _without_words() -> AbstractContextManager[object]:
    """What numpy or pyarrow say goes on to the caller."""
    return patch.object(traces, "TraceError", type("Other", (TraceError,), {"__init__": _gone}))


def _gone(self: Any, *_: Any, **__: Any) -> None:
    raise KeyError("nobody says why")


# A model's config.json ----------------------------------------------------------------------------

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 131_072,
}  # fmt: skip
MODELS: tuple[dict[str, Any], ...] = (
    _LLAMA,
    {**_LLAMA, "head_dim": 128, "_name_or_path": "a/b"},
    {**_LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1},
    {**_LLAMA, "model_type": "mistral", "sliding_window": 4_096},
    {**_LLAMA, "model_type": "gemma3", "sliding_window": 512, "sliding_window_pattern": 6},
    {**_LLAMA, "model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True,
     "max_window_layers": 28},
    {**_LLAMA, "num_hidden_layers": 3, "sliding_window": 9,
     "layer_types": ["full_attention", "sliding_attention", "linear_attention"]},
    {**_LLAMA, "model_type": "qwen3_next", "full_attention_interval": 4},
    {**_LLAMA, "attention_chunk_size": 8_192, "model_type": "llama4_text"},
    {"model_type": "vlm", "text_config": _LLAMA},
    {**_LLAMA, "ssm_state_size": 128},
)  # fmt: skip


def model_seeds() -> list[bytes]:
    """One of each kind that is told apart."""
    return [to_json(each) for each in MODELS]


def a_model(rng: Random) -> bytes:
    """One of them, wrong somewhere, once or twice."""
    tree: Any = mutate_tree(rng, rng.choice(MODELS))
    return to_json(mutate_tree(rng, tree) if rng.random() < 0.4 else tree)


def model_parser() -> Parser:
    """A shape within its bounds, or a SizingError."""
    file = Scratch("config.json")

    def parse(raw: bytes) -> str:
        try:
            found = hf_config.read(file.holds(raw))
        except SizingError:
            return "refused"
        assert 1 <= found.layers <= hf_config.LAYERS_MAX
        for group in found.groups:
            assert group.layers >= 1
            assert 0 <= group.heads <= hf_config.VALUE_MAX
            assert 1 <= group.head_values <= 2 * hf_config.VALUE_MAX
            assert 0 <= group.window_tokens <= hf_config.VALUE_MAX
        assert found.token_bytes(2) > 0
        assert found.context_max_tokens >= 0
        return f"ok {len(found.groups)} {found.is_latent} {len(found.notes)}"

    return parse


def _any_number(text: Any, key: str, most: int, told: str) -> Any:
    return int(text.get(key) or 1)


# Hashes and token ids -----------------------------------------------------------------------------

_WAYS = (  # (--engine, whether the file has token ids, --every, --group)
    ("raw", False, 1, 0), ("vllm", False, 1, 3), ("vllm", False, 2, 0), ("sglang", False, 1, 255),
    ("kvbm", True, 1, 0), ("sglang", True, 1, 7),
)  # fmt: skip
BLOCK_TOKENS = 4
_HASHES = (
    b"[\n " + b", ".join(b'"' + bytes([n]).hex().encode() * 32 + b'"' for n in range(3)) + b"]"
)


def token_seeds() -> list[bytes]:
    """`u8 which way`, then the file."""
    tokens = " ".join(map(str, range(100, 117))).encode()
    files = (_HASHES, _HASHES, _HASHES, _HASHES, tokens, b"[1,2,3,4,\n4294967295,0,0,5]")
    return [bytes([way]) + file for way, file in enumerate(files)]


def tokens_parser() -> Parser:
    """Keys in order, one a block, each as long as a key may be; or an error for people."""
    file = Scratch("prompt.txt")

    def parse(raw: bytes) -> str:
        engine, tokens, every, group = _WAYS[raw[0] % len(_WAYS) if raw else 0]
        where = str(file.holds(raw[1:]))
        args = argparse.Namespace(
            engine=engine, tokens=where if tokens else None, hashes=None if tokens else where,
            every=every, group=group, key=None, key_words=[], name=None, request_salt=None,
            cache_salt=None, extra_key=None,
        )  # fmt: skip
        prompts.check(args)
        try:
            found = prompts.read(args, BLOCK_TOKENS)
        except EntresolError:
            return f"{engine} {tokens} refused"
        assert found.prefix
        assert 1 <= len(found.keys) == len(found.labels) <= prompts.BLOCKS_MAX
        assert all(8 <= len(key) <= limits.ENGINE_KEY_BYTES_MAX for key in found.keys)
        words = [word for word in prompts._BETWEEN.split(raw[1:].decode("ascii")) if word]
        assert len(found.keys) == len(words) // (BLOCK_TOKENS if tokens else every)
        return f"{engine} {tokens} ok {min(len(found.keys), 3)}"

    return parse


def _any_word(where: str) -> Any:
    with open(where, "rb") as file:
        return iter(json.loads(file.read()))


_JSON_WORDS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"1e400", b"NaN", b"-1",
               b"\\ud800", b"9" * 400, b"9" * 5_000, b"[" * 600, b"0.5", b"\xff")  # fmt: skip

TARGETS = (
    Target(
        name="trace_jsonl", share=15, seeds=jsonl_seeds, make=lambda: _trace_parser("t.jsonl"),
        generate=a_trace, alloc_bytes_max=4 << 20, canaries=(_without_order, _without_words),
        words=(*_JSON_WORDS, b"timestamp", b"hash_ids", b"\n", b"268435455", b"2147483648"),
        modules=("entresol_daemon.replay.traces",),
    ),
    Target(
        name="trace_parquet", share=5, seeds=parquet_seeds,
        make=lambda: _trace_parser("t.parquet"), generate=a_parquet, alloc_bytes_max=4 << 20,
        canaries=(_without_order,), canary_inputs=2_000, modules=("entresol_daemon.replay.traces",),
    ),
    Target(
        name="model_config", share=15, seeds=model_seeds, make=model_parser, generate=a_model,
        words=(*_JSON_WORDS, b"num_hidden_layers", b"sliding_window", b"layer_types", b"head_dim"),
        canaries=(lambda: patch.object(hf_config, "_number", _any_number),),
        alloc_bytes_max=1 << 20, modules=("entresol_client.sizing.hf_config",),
    ),
    Target(
        name="prompt_files", share=15, seeds=token_seeds, make=tokens_parser,
        words=(b" ", b",", b"[", b"]", b'"', b"0x", b"text:", b"4294967295", b"4294967296", b"00",
               b"-1", b"+1", b"ab" * 16, b"ab" * 64, b"1_000", b"\xc2\xb2", b"9" * 400),
        canaries=(lambda: patch.object(prompts, "_words", _any_word),),
        alloc_bytes_max=prompts.FILE_BYTES_MAX + (1 << 20),  # it asks for as much as it would take
        modules=("entresol_client.cli.prompts",),
    ),
)  # fmt: skip
