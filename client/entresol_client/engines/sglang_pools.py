"""One host pool of SGLang and its pages as blocks: which keys, which memory, copied or not.

Invariant: the blocks of a page are the memory that the pool itself names for it, or one flat copy
of it; which of the two is fixed when the pool is registered and is part of the namespace.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch

from entresol_client.engines import sglang_pages as names
from entresol_client.engines.naming import salted
from entresol_client.engines.store import EngineStore, Space
from entresol_proto.ids import NamespaceDescriptor

log = logging.getLogger("entresol.sglang")

Buffers = list[Any]


def platform_facts() -> dict[str, str]:
    """Of the machine, what decides how rows lie and which fp8 is meant: AMD's is another."""
    versions = getattr(torch, "version", None)
    platforms = ("hip", "cuda", "xpu")
    return {"platform": next((one for one in platforms if getattr(versions, one, None)), "")}


class PagePool:
    """The pages of one registered host pool. Every list is in the order of its pages' pieces."""

    def __init__(self, name: str, pool: Any, *, zero_copy: bool) -> None:
        """`zero_copy` wishes for blocks in place; a pool that cannot name its pages' memory, or
        cuts a page in many pieces, is copied."""
        self.name = name
        self.pool = pool
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        group = getattr(pool, "anchor_entry", None)
        self.described = group.host_pool if group is not None else pool
        # DeepSeek V4 keeps only indices in this pool, and its bytes in the others.
        self.holds_nothing = getattr(pool, "kv_buffer", self) is None
        self.piece_bytes: tuple[int, ...] = ()
        self.copies = True
        self.space: Space | None = None
        self.epoch = ""
        if self.holds_nothing:
            return
        if zero_copy:
            self.piece_bytes = self._pieces_in_place()
            self.copies = not self.piece_bytes
        if self.copies:
            page = pool.get_dummy_flat_data_page()
            self.piece_bytes = (int(page.numel() * page.element_size()),)

    def open(self, store: EngineStore, descriptor: NamespaceDescriptor) -> None:
        """Use this namespace, and name the pool's memory for reads into it."""
        self.space = store.space(descriptor)
        memory = getattr(self.described, "kv_buffer", None)
        if not self.copies and isinstance(memory, torch.Tensor) and memory.is_contiguous():
            size_bytes = memory.numel() * memory.element_size()
            place = (ctypes.c_ubyte * size_bytes).from_address(memory.data_ptr())
            store.register(memoryview(place))

    @property
    def pieces(self) -> int:
        """Blocks per page."""
        return len(self.piece_bytes)

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        mark = salted(b"", self.epoch)
        return [names.page_key(one, piece) + mark for one in hashes for piece in range(self.pieces)]

    def fits(self, hashes: Sequence[str], indices: torch.Tensor | None) -> bool:
        """Whether there is a page of the pool for every hash."""
        if indices is not None and indices.numel() == len(hashes) * self.page_size:
            return True
        log.error(
            "event=sglang_indices_mismatch pool=%s pages=%d indices=%d",
            self.name,
            len(hashes),
            0 if indices is None else indices.numel(),
        )
        return False

    def sources(self, indices: torch.Tensor) -> Buffers:
        """What to store for these pages. Where they are copies, the caller keeps them alive."""
        if not self.copies:
            return self._in_place(indices)
        pages = [self.pool.get_data_page(at, flat=True) for at in self._starts(indices)]
        return [page.contiguous() for page in pages]

    def targets(self, indices: torch.Tensor) -> Buffers:
        """Where to load these pages to; `place` afterwards those that are complete."""
        if not self.copies:
            return self._in_place(indices)
        return [self.pool.get_dummy_flat_data_page() for _ in self._starts(indices)]

    def place(self, indices: torch.Tensor, targets: Buffers, good: Sequence[bool]) -> None:
        """Put loaded pages where they belong."""
        if self.copies:
            for at, page, ok in zip(self._starts(indices), targets, good, strict=True):
                if ok:
                    self.pool.set_from_flat_data_page(at, page)

    def of_pages(self, pieces: Sequence[bool]) -> list[bool]:
        """Per page: whether all its pieces are good."""
        step = self.pieces
        return [all(pieces[at : at + step]) for at in range(0, len(pieces), step)]

    def _starts(self, indices: torch.Tensor) -> list[int]:
        return [int(at) for at in indices[:: self.page_size].tolist()]

    def _in_place(self, indices: torch.Tensor) -> Buffers:
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        return [(int(at), int(size)) for at, size in zip(addresses, sizes, strict=True)]

    def _pieces_in_place(self) -> tuple[int, ...]:
        """Lengths of a page's pieces; empty when the pool does not tell, or has too many."""
        try:
            _, sizes = self.pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (NotImplementedError, ValueError, AssertionError, AttributeError, TypeError) as why:
            log.info("event=sglang_pool_copied pool=%s reason=%s", self.name, str(why) or "none")
            return ()
        if len(sizes) > names.PIECES_MAX:
            log.info("event=sglang_pool_copied pool=%s pieces=%d", self.name, len(sizes))
            return ()
        return tuple(int(size) for size in sizes)
