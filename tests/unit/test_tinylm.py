"""The demo's decoder: exactness across cache reuse and processes, its files, its tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from entresol_client.demo.convert import read_safetensors_bf16
from entresol_client.demo.tinylm import (
    KVCache,
    TinyLM,
    block_hashes,
    from_bf16,
    load_document,
    reusable_blocks,
    to_bf16,
)
from entresol_client.demo.tokenizer import BOS, Tokenizer, compact_from_hugging_face
from entresol_client.demo.weights import FIXED, read_weights, write_weights
from entresol_proto.status import FormatError

BLOCK = 64
PROMPT = 5 * BLOCK + 9
DECODED = 6
KNOWN = {
    "Ownership is Rust\u2019s most unique feature.": [
        *(47, 1349, 375, 2986, 311, 1480, 886, 83, 2006, 506, 73, 3483, 2197, 14)
    ],
    "they'll don't  we've\n\n  x": [711, 89, 7, 964, 2505, 1239, 221, 834, 7, 414, 922, 929],
    "na\u00efve \u8a9e \u00bd\u00b2 12\u0663\u2003a\x1cb\t\t!!": [
        *(78, 65, 128, 108, 414, 221, 165, 104, 253, 600, 122, 127, 111, 3727, 150, 97, 624),
        *(226, 65, 217, 66, 198, 198, 1, 1),
    ],
}


@pytest.fixture(scope="module")
def model() -> TinyLM:
    return TinyLM.load()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load()


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(load_document())[:PROMPT]


def bits(logits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(logits).view(np.uint32)


def shared_tinylm() -> Path:
    default = Path(__file__).resolve().parents[3] / "shared"
    folder = Path(os.environ.get("ENTRESOL_SHARED", default)) / "data" / "tinylm"
    if not folder.is_dir():
        pytest.skip("not run here: the shared training data is not beside this checkout")
    return folder


# The model has learned something, and reads far fewer nats than chance.


def test_model_predicts_the_document_better_than_chance(
    model: TinyLM, tokenizer: Tokenizer
) -> None:
    nats = model.score(tokenizer.encode(load_document())[:512])
    assert 3.0 < nats < 6.5  # uniform: ln 4096 = 8.32


def test_shuffled_tokens_are_predicted_worse(model: TinyLM, prompt: list[int]) -> None:
    shuffled = prompt[:]
    random.Random(11).shuffle(shuffled)
    assert model.score(shuffled) > model.score(prompt) + 0.5


def test_attention_reaches_back_across_blocks(model: TinyLM, prompt: list[int]) -> None:
    changed = [prompt[0], prompt[2], prompt[1], *prompt[3:]]
    first = model.prefill(prompt, model.new_cache(PROMPT))
    second = model.prefill(changed, model.new_cache(PROMPT))
    assert not np.array_equal(first, second)


# Exactness.


def test_loaded_blocks_give_the_same_bits_as_prefill(model: TinyLM, prompt: list[int]) -> None:
    cold = model.new_cache(PROMPT + DECODED)
    first = model.prefill(prompt, cold)
    stored = [block.tobytes() for block in cold.blocks()]
    assert len(stored) == reusable_blocks(PROMPT, BLOCK) == 5
    wanted = model.decode_greedy(cold, first, DECODED)
    for count in (1, 3, 5):
        warm = model.new_cache(PROMPT + DECODED)
        for block in stored[:count]:
            warm.append_block(block)
        assert warm.tokens == count * BLOCK
        again = model.prefill(prompt, warm)
        assert np.array_equal(bits(again), bits(first)), f"blocks={count}"
        got = model.decode_greedy(warm, again, DECODED)
        assert got.tokens == wanted.tokens
        assert np.array_equal(bits(got.logits), bits(wanted.logits)), f"blocks={count}"
        assert [block.tobytes() for block in warm.blocks()] == stored


CHILD = """
import hashlib, sys
from entresol_client.demo.tinylm import TinyLM, load_document
from entresol_client.demo.tokenizer import Tokenizer
prompt_tokens, decoded, block_bytes = map(int, sys.argv[1:])
model = TinyLM.load()
prompt = Tokenizer.load().encode(load_document())[:prompt_tokens]
cache = model.new_cache(prompt_tokens + decoded)
while block := sys.stdin.buffer.read(block_bytes):
    cache.append_block(block)
print(cache.tokens)
logits = model.prefill(prompt, cache)
print(hashlib.sha256(model.decode_greedy(cache, logits, decoded).logits.tobytes()).hexdigest())
print(hashlib.sha256(b"".join(block.tobytes() for block in cache.blocks())).hexdigest())
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_another_process_gives_the_same_bits(
    model: TinyLM, prompt: list[int], threads: str
) -> None:
    cache = model.new_cache(PROMPT + DECODED)
    first = model.prefill(prompt, cache)
    stored = b"".join(block.tobytes() for block in cache.blocks())
    logits = model.decode_greedy(cache, first, DECODED).logits
    wanted = [hashlib.sha256(logits.tobytes()).hexdigest(), hashlib.sha256(stored).hexdigest()]
    arguments = [str(PROMPT), str(DECODED), str(cache.block_bytes)]
    for loaded in (0, 3 * cache.block_bytes):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, *arguments],
            input=stored[:loaded],
            capture_output=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": ":".join(sys.path)},
            timeout=120,
            check=False,
        )
        assert child.returncode == 0, child.stderr.decode()
        tokens, *got = child.stdout.decode().split()
        assert int(tokens) == loaded // cache.block_bytes * BLOCK
        assert got == wanted, f"loaded_bytes={loaded} threads={threads}"


def test_a_changed_token_in_a_block_changes_the_logits(model: TinyLM, prompt: list[int]) -> None:
    cold = model.new_cache(PROMPT)
    first = model.prefill(prompt, cold)
    warm = model.new_cache(PROMPT)
    for i, block in enumerate(cold.blocks()):
        changed = block.copy()
        if i == 1:
            changed[:, 1, 7] = 0  # V of one token
        warm.append_block(changed)
    assert not np.array_equal(bits(model.prefill(prompt, warm)), bits(first))


def test_a_prompt_that_ends_a_block_recomputes_that_block(model: TinyLM, prompt: list[int]) -> None:
    whole = prompt[: 3 * BLOCK]
    cold = model.new_cache(len(whole))
    first = model.prefill(whole, cold)
    assert len(cold.blocks()) == 3
    assert reusable_blocks(len(whole), BLOCK) == 2
    warm = model.new_cache(len(whole))
    for block in cold.blocks()[:2]:
        warm.append_block(block)
    assert np.array_equal(bits(model.prefill(whole, warm)), bits(first))
    with pytest.raises(ValueError, match="prompt_tokens"):
        model.prefill(whole, warm)


@pytest.mark.parametrize("block_tokens", [16, 256])
def test_other_block_sizes_are_exact_too(
    model: TinyLM, prompt: list[int], block_tokens: int
) -> None:
    cold = model.new_cache(PROMPT, block_tokens=block_tokens)
    first = model.prefill(prompt, cold)
    warm = model.new_cache(PROMPT, block_tokens=block_tokens)
    for block in cold.blocks()[: reusable_blocks(PROMPT, block_tokens)]:
        warm.append_block(block)
    assert np.array_equal(bits(model.prefill(prompt, warm)), bits(first))


# The cache.


def test_block_shape_and_bytes(model: TinyLM) -> None:
    cache = model.new_cache(BLOCK)
    assert model.config.block_shape(BLOCK) == (6, 2, 64, 2, 64)
    assert cache.block_bytes == cache.pool[0].nbytes == 196_608


def test_blocks_are_views_of_the_pool_and_read_only(model: TinyLM, prompt: list[int]) -> None:
    config = model.config
    pool = np.zeros((6, *config.block_shape(BLOCK)), np.uint16)
    cache = model.new_cache(PROMPT, pool=pool)
    first = model.prefill(prompt, cache)
    blocks = cache.blocks()
    assert all(np.shares_memory(block, pool[i]) for i, block in enumerate(blocks))
    assert all(block.flags.c_contiguous and not block.flags.writeable for block in blocks)
    in_place = model.new_cache(PROMPT, pool=pool.copy())
    for i in range(5):
        in_place.append_block(in_place.pool[i])  # as a fetch straight into the pool would leave it
    assert np.array_equal(bits(model.prefill(prompt, in_place)), bits(first))


def test_a_block_finished_by_decoding_is_not_exported(model: TinyLM, prompt: list[int]) -> None:
    short = prompt[: 2 * BLOCK - 2]
    cache = model.new_cache(4 * BLOCK)
    model.decode_greedy(cache, model.prefill(short, cache), 4)
    assert cache.tokens == 2 * BLOCK + 1
    assert len(cache.blocks()) == 1
    cache.truncate(2 * BLOCK)
    assert len(cache.blocks()) == 1
    cache.truncate(BLOCK)
    model.prefill(prompt[: 3 * BLOCK], cache)
    assert len(cache.blocks()) == 3


def test_cache_refuses_what_does_not_fit(model: TinyLM, prompt: list[int]) -> None:
    cache = model.new_cache(BLOCK)
    with pytest.raises(ValueError, match="196608 bytes"):
        cache.append_block(bytes(196_607))
    with pytest.raises(ValueError, match="uint16"):
        cache.append_block(np.zeros(98_304, np.int16))
    with pytest.raises(ValueError, match="at most 64"):
        model.prefill(prompt[: BLOCK + 1], cache)
    first = model.prefill(prompt[:BLOCK], cache)
    with pytest.raises(ValueError, match="full"):
        cache.append_block(bytes(196_608))
    with pytest.raises(ValueError, match="cannot decode"):
        model.decode_greedy(cache, first, 2)
    cache.truncate(BLOCK - 1)
    with pytest.raises(ValueError, match="truncate"):
        cache.append_block(bytes(196_608))
    with pytest.raises(ValueError, match="boundary"):
        model.prefill(prompt[:BLOCK], cache)
    with pytest.raises(ValueError, match="cannot truncate"):
        cache.truncate(BLOCK)
    with pytest.raises(ValueError, match="max_tokens"):
        KVCache(model.config, 65_537)
    with pytest.raises(ValueError, match="vocabulary"):
        model.prefill([4096], model.new_cache(BLOCK))


def test_prefill_reports_progress_in_blocks(model: TinyLM, prompt: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    model.prefill(prompt, model.new_cache(PROMPT), lambda done, total: seen.append((done, total)))
    assert seen == [(min(i * BLOCK, PROMPT), PROMPT) for i in range(1, 7)]


def test_bf16_rounds_to_nearest_even() -> None:
    cases = {
        0x3F80_0000: 0x3F80,
        0x3F80_7FFF: 0x3F80,
        0x3F80_8000: 0x3F80,  # tie, even below
        0x3F81_8000: 0x3F82,  # tie, even above
        0x3F80_8001: 0x3F81,
        0xBF81_8000: 0xBF82,
        0x0000_0000: 0x0000,
        0x8000_0000: 0x8000,
    }
    values = np.array(list(cases), np.uint32).view(np.float32)
    assert to_bf16(values).tolist() == list(cases.values())
    every = np.arange(0x7F80, dtype=np.uint16)
    assert np.array_equal(to_bf16(from_bf16(every)), every)


# Engine keys.


def test_block_hashes_are_chained() -> None:
    tokens = list(range(200))
    keys = block_hashes(tokens, 64)
    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}
    ids = struct.pack("<64I", *range(64, 128))
    assert keys[1] == hashlib.sha256(keys[0] + ids).digest()
    assert keys[0] == hashlib.sha256(bytes(32) + struct.pack("<64I", *range(64))).digest()
    changed = block_hashes([1, *tokens[1:]], 64)
    assert not set(keys) & set(changed)
    assert block_hashes(tokens[:63], 64) == []


# Weights.


def test_weights_file_round_trip() -> None:
    rng = np.random.default_rng(3)
    tensors = {
        "a": rng.integers(0, 1 << 16, (3, 5), np.uint16),
        "b": rng.integers(0, 1 << 16, 7, np.uint16),
    }
    back = read_weights(write_weights({"hidden": 5}, tensors))
    assert back.config == {"hidden": 5}
    assert list(back.tensors) == ["a", "b"]
    assert all(np.array_equal(back.tensors[name], tensors[name]) for name in tensors)


def test_damaged_weights_are_refused() -> None:
    data = resources.files("entresol_client.demo").joinpath("data/decoder.weights").read_bytes()
    assert read_weights(data).digest == TinyLM.load().digest
    for at in (0, 8, 12, 16, 60, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(FormatError):
            read_weights(bytes(damaged))
    for length in (0, FIXED.size - 1, FIXED.size, len(data) - 1):
        with pytest.raises(FormatError):
            read_weights(data[:length])
    with pytest.raises(FormatError):
        read_weights(data + b"\0")


def test_inconsistent_weights_with_a_right_digest_are_refused() -> None:
    good = write_weights({}, {"a": np.arange(6, dtype=np.uint16)})
    for old, new in (
        (b"[6]", b"[7]"),
        (b'"values":6', b'"values":7'),
        (b'"tensors"', b'"tensorx"'),
    ):
        body = good[FIXED.size :].replace(old, new)
        magic, version, header_bytes, _ = FIXED.unpack_from(good)
        digest = hashlib.blake2b(body, digest_size=32).digest()
        with pytest.raises(FormatError, match="malformed"):
            read_weights(FIXED.pack(magic, version, header_bytes, digest) + body)
    with pytest.raises(FormatError, match="config"):
        TinyLM(read_weights(good))


def test_safetensors_reader_takes_bf16_only() -> None:
    def file(dtype: str, end: int) -> bytes:
        entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, end]}
        header = json.dumps({"__metadata__": {}, "w": entry}).encode()
        return struct.pack("<Q", len(header)) + header + b"\x80\x3f\x00\xc0"

    assert read_safetensors_bf16(file("BF16", 4))["w"].tolist() == [0x3F80, 0xC000]
    with pytest.raises(ValueError, match="not BF16"):
        read_safetensors_bf16(file("F32", 4))
    with pytest.raises(ValueError, match="outside"):
        read_safetensors_bf16(file("BF16", 6))


# Tokenizer.


def test_document_round_trips_and_is_long_enough(tokenizer: Tokenizer) -> None:
    text = load_document()
    ids = tokenizer.encode(text)
    assert len(tokenizer) == 4096
    assert len(ids) >= 8_192 + 64
    assert ids[0] == BOS
    assert max(ids) < 4096
    assert tokenizer.decode(ids) == text


def test_any_text_round_trips(tokenizer: Tokenizer) -> None:
    seed = 20
    rng = random.Random(seed)
    letters = "ab's't 're ll\n\t\r  \x0b\x1c\x00\x85\xa0\u2003é語ñ½²٣…—🙂\u200d_-.<s>123"
    for _ in range(2_000):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(24)))
        assert tokenizer.decode(tokenizer.encode(text)) == text, f"seed={seed} {text!r}"


def test_known_encodings(tokenizer: Tokenizer) -> None:
    # Taken from the reference implementation (Hugging Face tokenizers) on the same vocabulary.
    assert tokenizer.encode("", bos=True) == [BOS]
    assert BOS not in tokenizer.encode("<s>", bos=False)
    for text, ids in KNOWN.items():
        assert tokenizer.encode(text, bos=False) == ids, text


def test_held_out_texts_encode_as_they_were_trained(tokenizer: Tokenizer) -> None:
    texts = json.loads((shared_tinylm() / "ids.json").read_text())
    exact = 0
    for name, ids in texts.items():
        text = tokenizer.decode(ids)
        if "\ufffd" in text:  # cut inside a character at its 1,024th token
            assert tokenizer.encode(text)[: len(ids) - 4] == ids[: len(ids) - 4], name
            continue
        assert tokenizer.encode(text) == ids, name
        exact += 1
    assert exact >= len(texts) - 1


def test_shipped_tokenizer_is_the_converted_original(tokenizer: Tokenizer) -> None:
    made = compact_from_hugging_face((shared_tinylm() / "tok.json").read_bytes())
    shipped = resources.files("entresol_client.demo").joinpath("data/tokenizer.json").read_bytes()
    assert made == shipped


def test_held_out_cross_entropy_matches_the_reference(model: TinyLM) -> None:
    # Reference: the torch definition in float32 on the same 1,024 tokens.
    ids = json.loads((shared_tinylm() / "ids.json").read_text())["man"]
    assert model.score(ids) == pytest.approx(4.1324, rel=0.001)


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"{}",
        b'{"version":2,"special":[],"alphabet":[],"merges":[]}',
        b'{"version":1,"special":[],"alphabet":[0,1],"merges":[]}',
        json.dumps(
            {"version": 1, "special": [], "alphabet": list(range(256)), "merges": [[0, 256]]}
        ).encode(),
    ],
)
def test_damaged_tokenizer_is_refused(damage: bytes) -> None:
    with pytest.raises(FormatError):
        Tokenizer.from_bytes(damage)
