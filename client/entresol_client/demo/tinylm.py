"""A small real decoder in numpy: what the demo prefills, stores, fetches back and decodes with.

Llama style: RMSNorm, rotary positions (NeoX halves), grouped-query attention, SwiGLU, tied
embedding; 9.69 M parameters trained on documentation text. Activations are float32, weights are
bf16 widened once, K and V are rounded to bf16 before attention reads them.

Invariant (exactness): logits after loading blocks 0..k, prefilling the rest and decoding are bit
for bit those after prefilling everything, in any process on the same machine with the same numpy
and the same number of BLAS threads (`load` sets one: two were seen to give other last bits). It
holds because prefill works in pieces of exactly one block (and one shorter last piece), so every
matrix product has the same shape whoever computes it, over the same bf16 values. On another
machine (other SIMD width, other BLAS) a recomputation may differ in the last bits; fetched blocks
are exact everywhere.
The converse does not hold: one flipped bit far back often moves no logit, so whoever wants to show
that fetched blocks are exact compares the blocks as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entresol_proto.status import FormatError

from .kvcache import F32, KVCache, ModelConfig, from_bf16, reusable_blocks, to_bf16
from .weights import Weights, read_weights

__all__ = [
    "Decoded",
    "KVCache",
    "ModelConfig",
    "TinyLM",
    "block_hashes",
    "from_bf16",
    "limit_blas_threads",
    "load_document",
    "reusable_blocks",
    "to_bf16",
]

BLOCK_TOKENS_DEFAULT = 64
SCORE_TOKENS_MAX = 8_192
Array = NDArray[np.float32]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What greedy decoding produced.

    Attributes:
        tokens: the chosen token ids.
        logits: float32 [len(tokens), vocab]; row i is what token i was chosen from.
    """

    tokens: list[int]
    logits: Array


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; matrices are [out, in], as trained."""

    attention_norm: Array
    qkv: Array
    out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


class TinyLM:
    """The decoder. Use from one thread at a time (it keeps scratch memory).

    Attributes:
        config: its shape.
        digest: 32 bytes naming these exact weights.
    """

    def __init__(self, weights: Weights) -> None:
        """Widens the weights to float32, about 39 MB.

        Raises:
            FormatError: a tensor is missing or has another shape than the config says.
        """
        try:
            self.config = ModelConfig(
                **{name: int(weights.config[name]) for name in _SIZES},
                rope_theta=float(weights.config["rope_theta"]),
                norm_eps=float(weights.config["norm_eps"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"weights file has no usable config: {error}") from error
        self.digest = weights.digest
        c = self.config
        attention = c.q_heads * c.head_dim

        def tensor(name: str, *shape: int) -> Array:
            bits = weights.tensors.get(name)
            if bits is None or bits.shape != shape:
                raise FormatError(f"weights file lacks a tensor name={name} shape={shape}")
            return from_bf16(bits)

        self._embedding = tensor("e.weight", c.vocab, c.hidden)
        self._norm = tensor("n.w", c.hidden)
        self._layers = [
            _Layer(
                attention_norm=tensor(f"ls.{i}.n1.w", c.hidden),
                qkv=tensor(f"ls.{i}.qkv.weight", attention + 2 * c.kv_heads * c.head_dim, c.hidden),
                out=tensor(f"ls.{i}.o.weight", c.hidden, attention),
                ffn_norm=tensor(f"ls.{i}.n2.w", c.hidden),
                gate_up=tensor(f"ls.{i}.gu.weight", 2 * c.ffn, c.hidden),
                down=tensor(f"ls.{i}.dn.weight", c.hidden, c.ffn),
            )
            for i in range(c.layers)
        ]
        self._scratch = np.empty(0, F32)
        self._cos = np.empty((0, c.head_dim // 2), F32)
        self._sin = self._cos

    @classmethod
    def load(cls, path: Path | None = None, *, blas_threads: int = 1) -> TinyLM:
        """The decoder shipped with the demo, or one from `path`.

        `blas_threads` is set for the whole process, where the BLAS allows it. The exactness rule
        compares processes with equal settings only; and one thread never waits, spinning, for a
        core that the daemon is using.

        Raises:
            FormatError: the weights file is damaged or not ours.
        """
        limit_blas_threads(blas_threads)
        if path is not None:
            return cls(read_weights(path.read_bytes()))
        data = resources.files(__package__).joinpath("data/decoder.weights").read_bytes()
        return cls(read_weights(data))

    def new_cache(
        self,
        max_tokens: int,
        *,
        block_tokens: int = BLOCK_TOKENS_DEFAULT,
        pool: NDArray[np.uint16] | None = None,
    ) -> KVCache:
        """An empty cache for one sequence (see `KVCache`)."""
        return KVCache(self.config, max_tokens, block_tokens=block_tokens, pool=pool)

    def prefill(
        self, tokens: Sequence[int], cache: KVCache, progress: Progress | None = None
    ) -> Array:
        """Computes `tokens`, the whole prompt, as far as `cache` does not hold it already.

        The cache must hold whole blocks only (0..k of this prompt) and not the entire prompt.
        `progress(done, total)` is called after every piece, in tokens of the prompt.

        Returns:
            Logits after the last token, float32 [vocab].

        Raises:
            ValueError: the cache is not at a block boundary, too small, or holds the whole prompt.
        """
        if cache.tokens % cache.block_tokens:
            raise ValueError("prefill starts at a block boundary: truncate the cache first")
        if not cache.tokens < len(tokens) <= cache.max_tokens:
            raise ValueError(
                f"prompt_tokens={len(tokens)} must be more than cached={cache.tokens} "
                f"and at most {cache.max_tokens}"
            )
        hidden = np.empty((0, self.config.hidden), F32)
        for start in range(cache.tokens, len(tokens), cache.block_tokens):
            piece = tokens[start : start + cache.block_tokens]
            hidden = self._forward(piece, cache)
            if progress is not None:
                progress(start + len(piece), len(tokens))
        logits: Array = self._logits(hidden[-1:])[0]
        return logits

    def decode_greedy(
        self,
        cache: KVCache,
        first_logits: Array,
        count: int,
        on_token: Callable[[int], None] | None = None,
    ) -> Decoded:
        """Chooses `count` tokens, each the likeliest (the lowest id among equals).

        The cache grows by `count - 1` tokens: the last one chosen is not fed back.

        Raises:
            ValueError: they do not fit into the cache, or `count` < 1.
        """
        if count < 1 or cache.tokens + count - 1 > cache.max_tokens:
            raise ValueError(f"cannot decode count={count} at tokens={cache.tokens}")
        chosen: list[int] = []
        rows = np.empty((count, self.config.vocab), F32)
        logits = first_logits
        for i in range(count):
            if i:
                logits = self._logits(self._forward(chosen[-1:], cache))[0]
            rows[i] = logits
            chosen.append(int(np.argmax(logits)))
            if on_token is not None:
                on_token(chosen[-1])
        return Decoded(chosen, rows)

    def score(self, tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS_DEFAULT) -> float:
        """Mean cross-entropy of tokens 1.. given those before, nats per token.

        Raises:
            ValueError: fewer than two tokens or more than SCORE_TOKENS_MAX.
        """
        if not 2 <= len(tokens) <= SCORE_TOKENS_MAX:
            raise ValueError(f"score takes 2..{SCORE_TOKENS_MAX} tokens")
        cache = self.new_cache(len(tokens), block_tokens=block_tokens)
        total = 0.0
        for start in range(0, len(tokens), block_tokens):
            piece = tokens[start : start + block_tokens]
            targets = tokens[start + 1 : start + 1 + len(piece)]
            logits = self._logits(self._forward(piece, cache))[: len(targets)]
            top = logits.max(axis=1)
            spread = np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)) + top
            right = logits[np.arange(len(targets)), np.asarray(targets, np.intp)]
            total += float((spread - right).sum(dtype=np.float64))
        return total / (len(tokens) - 1)

    def _forward(self, piece: Sequence[int], cache: KVCache) -> Array:
        """Hidden states [len(piece), hidden] after the last norm; the cache grows by the piece."""
        c = self.config
        ids = np.asarray(piece, np.intp)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= c.vocab:
            raise ValueError("token id outside the vocabulary")
        count, heads = len(ids), c.q_heads + c.kv_heads
        cos, sin = self._rope_tables(cache.tokens, count)
        x = self._embedding[ids]
        for i, w in enumerate(self._layers):
            y = self._rms(x, w.attention_norm) @ w.qkv.T
            y = y.reshape(count, heads + c.kv_heads, c.head_dim)
            rotated = _rope(y[:, :heads], cos, sin)
            cache.write_layer(i, rotated[:, c.q_heads :], y[:, heads:])
            x += self._attend(rotated[:, : c.q_heads], *cache.layer(i, count)) @ w.out.T
            gate_up = self._rms(x, w.ffn_norm) @ w.gate_up.T
            x += (_silu(gate_up[:, : c.ffn]) * gate_up[:, c.ffn :]) @ w.down.T
        cache.commit(count)
        return self._rms(x, self._norm)

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        """Causal attention of the last `len(q)` tokens; [tokens, q_heads * head_dim].

        The query heads that share a KV head are rows of one matrix product, so K and V are never
        repeated in memory.
        """
        c = self.config
        count, length = len(q), k.shape[1]
        group = c.q_heads // c.kv_heads
        rows = group * count
        if self._scratch.size < rows * length:
            self._scratch = np.empty(rows * max(length, 4096), F32)
        scores = self._scratch[: rows * length].reshape(rows, length)
        last = scores.reshape(group, count, length)[:, :, length - count :]
        hidden_later = np.triu(np.full((count, count), -np.inf, F32), 1)
        scaled = np.multiply(q, c.head_dim**-0.5, dtype=F32)
        out = np.empty((count, c.kv_heads, group, c.head_dim), F32)
        for head in range(c.kv_heads):
            mine = scaled[:, head * group : (head + 1) * group].transpose(1, 0, 2)
            np.matmul(mine.reshape(rows, c.head_dim), k[head].T, out=scores)
            last += hidden_later
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = (scores @ v[head]) / scores.sum(axis=1, keepdims=True)
            out[:, head] = mixed.reshape(group, count, c.head_dim).transpose(1, 0, 2)
        return out.reshape(count, c.q_heads * c.head_dim)

    def _logits(self, hidden: Array) -> Array:
        logits: Array = hidden @ self._embedding.T
        return logits

    def _rms(self, x: Array, weight: Array) -> Array:
        mean = np.mean(x * x, axis=1, keepdims=True, dtype=F32)
        scaled = x * weight
        scaled /= np.sqrt(mean + self.config.norm_eps)
        return scaled

    def _rope_tables(self, start: int, count: int) -> tuple[Array, Array]:
        """Cosines and sines of positions start.., [count, 1, head_dim / 2] each."""
        if len(self._cos) < start + count:
            c = self.config
            inverse = c.rope_theta ** (-np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
            ends = max(start + count, 2 * len(self._cos), 4096)
            angles = np.outer(np.arange(ends, dtype=np.float64), inverse)
            self._cos, self._sin = np.cos(angles).astype(F32), np.sin(angles).astype(F32)
        span = slice(start, start + count)
        return self._cos[span, None], self._sin[span, None]


_SIZES = ("vocab", "hidden", "layers", "q_heads", "kv_heads", "head_dim", "ffn")


def _rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding (Su et al. 2021), halves of each head as pairs; x [t, heads, dim]."""
    half = x.shape[2] // 2
    a, b = x[:, :, :half], x[:, :, half:]
    out = np.empty_like(x)
    out[:, :, :half] = a * cos - b * sin
    out[:, :, half:] = b * cos + a * sin
    return out


def _silu(x: Array) -> Array:
    """x * sigmoid(x); the clip keeps exp finite and changes no float32 result that matters."""
    silu = np.exp(np.minimum(-x, F32(80)))
    silu += 1
    return np.divide(x, silu, out=silu)


def block_hashes(tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS_DEFAULT) -> list[bytes]:
    """Engine keys of the whole blocks of `tokens`: 32 bytes each; block i sits at position i.

    Chained: SHA-256(parent key ‖ token ids as u32 little-endian), the first parent being 32 zero
    bytes, so a key names a block together with everything before it.
    """
    keys: list[bytes] = []
    parent = bytes(32)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids = tokens[start : start + block_tokens]
        parent = hashlib.sha256(parent + struct.pack(f"<{len(ids)}I", *ids)).digest()
        keys.append(parent)
    return keys


def load_document() -> str:
    """The long real text shipped with the demo (provenance and licence: data/README.md)."""
    return resources.files(__package__).joinpath("data/ownership.txt").read_text(encoding="utf-8")


def limit_blas_threads(threads: int) -> bool:
    """Limits the threads of the OpenBLAS this process has loaded; True when one was found.

    Best effort, Linux only: the library is looked up among the mapped files, by the symbol names of
    numpy's wheels and of distributions.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line}
    found = False
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                call = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if call is not None:
                    call(ctypes.c_int(threads))
                    found = True
    return found
