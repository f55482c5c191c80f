"""A decoder with the shape of a known model and random weights, for the time that a prefill takes.

What it computes means nothing; how long it computes, and the size and order of its KV, are those of
the model: RMSNorm, rotary grouped-query attention, SwiGLU (Llama's architecture; Touvron et al.,
"LLaMA", 2023). Prompts are taken in chunks over a KV cache, as engines do.

Invariant: the cache holds exact bytes: whoever puts a part of it back gets the same next logits.

Needs PyTorch; imported by `bench.ttft` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

ROPE_BASE = 500_000.0
CHUNK_TOKENS = 8_192  # of a prompt at a time
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the time of a prefill and the bytes of a token."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of the feed-forward part

    @property
    def token_bytes(self) -> int:
        """KV of one token in bf16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def weights(self) -> int:
        """Parameters, without the vocabulary."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)


# Layers, KV heads and head size as in `entresol_client.sizing.models`; heads, hidden and inner size
# as public copies of the models' config.json have them.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 2, 256, 4, 2, 64, 512),  # to try the bench itself
        Shape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336),
        Shape("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648),
        Shape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672),
    )
}


@dataclass(slots=True)
class _Layer:
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """Weights on a device and a cache of `tokens_max` tokens: (layer, K or V, head, token, dim)."""

    def __init__(self, shape: Shape, tokens_max: int, device: str, seed: int = 1) -> None:
        self.shape = shape
        self._options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self._made = torch.Generator(device).manual_seed(seed)
        s = shape
        self._layers = [
            _Layer(
                self._weight((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
                self._weight(s.hidden, s.heads * s.head_dim),
                self._weight(2 * s.inner, s.hidden),
                self._weight(s.hidden, s.inner),
            )
            for _ in range(s.layers)
        ]
        self._embedding = self._weight(VOCABULARY, s.hidden) * math.sqrt(s.hidden)
        self._head = self._weight(VOCABULARY, s.hidden)
        self._norm = torch.ones(s.hidden, **self._options)
        self.cache = torch.zeros(s.layers, 2, s.kv_heads, tokens_max, s.head_dim, **self._options)
        half = torch.arange(0, s.head_dim, 2, device=device, dtype=torch.float32) / s.head_dim
        angles = torch.arange(tokens_max, device=device)[:, None] * ROPE_BASE ** -half[None]
        angles = torch.cat([angles, angles], 1)
        self._cos, self._sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(rows, columns, **self._options)
        return made.normal_(0.0, 1 / math.sqrt(columns), generator=self._made)

    @torch.inference_mode()
    def run(self, tokens: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Take `tokens[begin:]` in, over what the cache holds before; the last token's logits."""
        hidden = self._embedding[tokens[:0]]
        for at in range(begin, len(tokens), CHUNK_TOKENS):
            end = min(at + CHUNK_TOKENS, len(tokens))
            hidden = self._embedding[tokens[at:end]]
            for number, layer in enumerate(self._layers):
                hidden = self._step(hidden, layer, self.cache[number], at, end)
        return self._normed(hidden[-1:]) @ self._head.T

    def _step(
        self, hidden: torch.Tensor, layer: _Layer, cache: torch.Tensor, at: int, end: int
    ) -> torch.Tensor:
        s = self.shape
        made = (self._normed(hidden) @ layer.qkv.T).view(end - at, -1, s.head_dim).transpose(0, 1)
        turned = self._rotated(made[: s.heads + s.kv_heads], at, end)
        query = turned[: s.heads]
        cache[0, :, at:end] = turned[s.heads :]
        cache[1, :, at:end] = made[s.heads + s.kv_heads :]
        mixed = _attention(query, cache[0, :, :end], cache[1, :, :end])
        hidden = hidden + mixed.transpose(0, 1).reshape(end - at, -1) @ layer.out.T
        gate, up = (self._normed(hidden) @ layer.gate_up.T).chunk(2, 1)
        return hidden + (functional.silu(gate) * up) @ layer.down.T

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, (self.shape.hidden,), self._norm)

    def _rotated(self, heads: torch.Tensor, at: int, end: int) -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        other = torch.cat([-second, first], -1)
        return heads * self._cos[at:end] + other * self._sin[at:end]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last `query` tokens over all keys; heads come first."""
    from torch.nn.attention import bias

    fresh, known = query.shape[1], key.shape[1]
    times = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(times, 0)
    value = value.repeat_interleave(times, 0)
    mask = None if fresh == 1 else bias.causal_lower_right(fresh, known)
    return functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask
    )[0]
