"""The decoder's KV cache: a pool of engine blocks, and float32 working copies attention reads.

Invariants:
- One block is ONE contiguous u16 array [layers, 2 (K after RoPE, V), block_tokens, kv_heads,
  head_dim] of bf16 bit patterns, stored, exported and loaded as it is.
- The working copies hold exactly the pool's values (bf16 widened), so a cache filled from stored
  blocks and one filled by prefill cannot differ when the blocks do not.
- `blocks()` exports only blocks that were computed in one piece or loaded: a block finished token
  by token (decode) may differ in the last bit and must not be stored under the same key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entresol_proto.limits import TOKENS_PER_BLOCK_MAX

CONTEXT_TOKENS_MAX = 65_536
F32 = np.float32
U16 = np.uint16
U32 = np.uint32


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the decoder: Llama style, grouped-query attention, tied embedding."""

    vocab: int
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float
    norm_eps: float

    def block_shape(self, block_tokens: int) -> tuple[int, int, int, int, int]:
        """[layers, 2 (K, V), tokens, kv_heads, head_dim]."""
        return (self.layers, 2, block_tokens, self.kv_heads, self.head_dim)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block of bf16 K and V."""
        return self.layers * 2 * block_tokens * self.kv_heads * self.head_dim * 2


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns of finite float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, F32).view(U32)
    odd = (bits >> U32(16)) & U32(1)
    return ((bits + (odd + U32(0x7FFF))) >> U32(16)).astype(U16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bf16 bit patterns; exact."""
    return (bits.astype(U32) << U32(16)).view(F32)


class KVCache:
    """K and V of one sequence, up to `max_tokens`. Not for several threads at once.

    Attributes:
        pool: u16 [max_blocks, *block shape]; caller-provided memory (for example memory a fabric
            can reach) or the cache's own. `pool[i]` is block i of the sequence.
        tokens: tokens cached so far; the position of the next one.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        *,
        block_tokens: int = 64,
        pool: NDArray[np.uint16] | None = None,
    ) -> None:
        """Allocates the working copies, and the pool unless one is given, and touches every page:
        like an engine's pool, paid for at start-up and not on the way to the first token.

        Raises:
            ValueError: a size beyond its limit, or a pool of another type or shape.
        """
        if not 1 <= block_tokens <= TOKENS_PER_BLOCK_MAX:
            raise ValueError(f"block_tokens={block_tokens} is outside 1..{TOKENS_PER_BLOCK_MAX}")
        if not 1 <= max_tokens <= CONTEXT_TOKENS_MAX:
            raise ValueError(f"max_tokens={max_tokens} is outside 1..{CONTEXT_TOKENS_MAX}")
        self.config = config
        self.block_tokens = block_tokens
        max_blocks = -(-max_tokens // block_tokens)
        self.max_tokens = max_blocks * block_tokens
        shape = (max_blocks, *config.block_shape(block_tokens))
        if pool is None:
            pool = np.full(shape, 0, U16)
        if pool.dtype != U16 or pool.shape != shape or not pool.flags.c_contiguous:
            raise ValueError(f"pool must be contiguous uint16 {shape}")
        self.pool = pool
        working = (config.layers, config.kv_heads, self.max_tokens, config.head_dim)
        self._k = np.full(working, 0, F32)
        self._v = np.full(working, 0, F32)
        self.tokens = 0
        self._exportable = 0  # leading blocks loaded, or computed in one piece

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.config.block_bytes(self.block_tokens)

    def append_block(self, block: NDArray[np.uint16] | bytes | bytearray | memoryview) -> None:
        """Takes the next block of the sequence, as bytes or as the array itself.

        The bytes are copied; the buffer is the caller's again on return. A block that already lies
        in its place (`pool[i]`, for instance because a fetch put it there) is not copied.

        Raises:
            ValueError: wrong size or type, the cache is full or not at a block boundary.
        """
        index, rest = divmod(self.tokens, self.block_tokens)
        if rest:
            raise ValueError("a partial block is in the way: truncate first")
        if index >= len(self.pool):
            raise ValueError("the cache is full")
        slot = self.pool[index]
        if isinstance(block, np.ndarray):
            if block.dtype != U16 or block.size != slot.size or not block.flags.c_contiguous:
                raise ValueError("a block array must be contiguous uint16 of the block's size")
            source = block.reshape(slot.shape)
        else:
            if memoryview(block).nbytes != self.block_bytes:
                raise ValueError(f"a block is {self.block_bytes} bytes")
            source = np.frombuffer(block, U16).reshape(slot.shape)
        if source.ctypes.data != slot.ctypes.data:
            np.copyto(slot, source)
        start, end = self.tokens, self.tokens + self.block_tokens
        for working, kind in ((self._k, 0), (self._v, 1)):
            bits = working.view(U32)[:, :, start:end]
            np.left_shift(slot[:, kind].transpose(0, 2, 1, 3), 16, out=bits, dtype=U32)
        self.tokens = end
        if self._exportable == index:
            self._exportable += 1

    def blocks(self) -> list[NDArray[np.uint16]]:
        """The exportable whole blocks, in order: read-only views of the pool, valid while it is
        and until `truncate` or `append_block` writes there again."""
        views = [self.pool[i] for i in range(self._exportable)]
        for view in views:
            view.flags.writeable = False
        return views

    def truncate(self, tokens: int) -> None:
        """Forgets everything from position `tokens` on.

        Raises:
            ValueError: `tokens` is more than is cached, or negative.
        """
        if not 0 <= tokens <= self.tokens:
            raise ValueError(f"cannot truncate {self.tokens} tokens to {tokens}")
        self.tokens = tokens
        self._exportable = min(self._exportable, tokens // self.block_tokens)

    def write_layer(self, layer: int, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """Rounds K and V of the next tokens, [tokens, kv_heads, head_dim] each, into one layer.

        `commit` makes them count once every layer is written. They must fit the current block.
        """
        count = len(k)
        index, offset = divmod(self.tokens, self.block_tokens)
        assert offset + count <= self.block_tokens, "a piece crosses a block boundary"
        span = slice(offset, offset + count)
        place = slice(self.tokens, self.tokens + count)
        for working, kind, values in ((self._k, 0, k), (self._v, 1, v)):
            bits = to_bf16(values)
            self.pool[index, layer, kind, span] = bits
            working[layer, :, place] = from_bf16(bits).transpose(1, 0, 2)

    def layer(self, layer: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K and V, [kv_heads, tokens + count, head_dim] each: cached plus `count` just written."""
        end = self.tokens + count
        return self._k[layer, :, :end], self._v[layer, :, :end]

    def commit(self, count: int) -> None:
        """Counts `count` tokens whose every layer was written."""
        index, offset = divmod(self.tokens, self.block_tokens)
        self.tokens += count
        if offset == 0 and count == self.block_tokens and self._exportable == index:
            self._exportable += 1


def reusable_blocks(tokens: int, block_tokens: int) -> int:
    """How many leading blocks of a prompt of `tokens` tokens may come from a store.

    The last token is always computed, for its logits: one block fewer when it ends a block.
    """
    return max(0, tokens - 1) // block_tokens
