"""One KV block as bytes, out of and into an engine's registered per-layer cache tensors.

The bytes of a block: for every layer, in layer order, the layer's planes (K and V, where they are
separate in memory; else one), each page in the order it has in memory. Nothing is reordered, so
two engines may only share blocks when `layout` is the same for both: it is in the namespace.

Invariant: a layout that is not understood is refused; a guess would be wrong bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from entresol_proto.status import ConfigError

_WIDEST = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class _Plane:
    """One run of bytes per block: `rows[block]`, as integers of the widest fitting width."""

    rows: torch.Tensor
    first: int
    last: int


class BlockPages:
    """The KV caches of one worker, addressed by block id.

    `caches` are (layer name, tensor) in layer order; `blocks` is the number of blocks in each. The
    tensors must outlive this.

    Raises: ConfigError for tensors whose blocks it cannot tell apart.
    """

    def __init__(self, caches: Sequence[tuple[str, torch.Tensor]], blocks: int) -> None:
        if not caches:
            raise ConfigError("no KV caches were registered")
        self.blocks = blocks
        self.device = caches[0][1].device
        parts = [_plane_geometry(name, tensor, blocks) for name, tensor in caches]
        widths = [span.width_bytes for spans in parts for span in spans]
        self._width_bytes = math.gcd(*widths)
        self._dtype = dict(_WIDEST)[self._width_bytes]
        self._planes: list[_Plane] = []
        at = 0
        for (_, tensor), spans in zip(caches, parts, strict=True):
            for span in spans:
                rows = span.rows(tensor, blocks, self._dtype, self._width_bytes)
                length = span.page_bytes // self._width_bytes
                self._planes.append(_Plane(rows, at, at + length))
                at += length
        self.block_bytes = at * self._width_bytes
        self.layout: dict[str, Any] = {
            "layers": len(caches),
            "shapes": sorted({span.shape for spans in parts for span in spans}),
            "planes": sorted({len(spans) for spans in parts}),
            "page_bytes": sorted({span.page_bytes for spans in parts for span in spans}),
            "dtypes": sorted({str(tensor.dtype) for _, tensor in caches}),
        }

    def gather(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        """Copy blocks into `out`, uint8 of (len(block_ids), block_bytes) on the caches' device."""
        index = self._index(block_ids)
        wide = out.view(self._dtype)
        for plane in self._planes:
            wide[:, plane.first : plane.last] = plane.rows.index_select(0, index)

    def scatter(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """Copy blocks from `source` (as `out` of `gather`) into the caches."""
        index = self._index(block_ids)
        wide = source.view(self._dtype)
        for plane in self._planes:
            plane.rows.index_copy_(0, index, wide[:, plane.first : plane.last])

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        if not all(0 <= one < self.blocks for one in block_ids):
            raise ValueError(f"block ids {min(block_ids)}..{max(block_ids)} of {self.blocks}")
        return torch.tensor(block_ids, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, slots=True)
class _Span:
    """Where one plane of one layer lies: a page at `offset_bytes + block * stride_bytes`."""

    shape: str
    offset_bytes: int
    stride_bytes: int
    page_bytes: int

    @property
    def width_bytes(self) -> int:
        return math.gcd(self.offset_bytes, self.stride_bytes, self.page_bytes, _WIDEST[0][0])

    def rows(
        self, tensor: torch.Tensor, blocks: int, dtype: torch.dtype, width_bytes: int
    ) -> torch.Tensor:
        view = torch.empty(0, dtype=dtype, device=tensor.device)
        return view.set_(
            tensor.untyped_storage(),
            self.offset_bytes // width_bytes,
            (blocks, self.page_bytes // width_bytes),
            (self.stride_bytes // width_bytes, 1),
        )


def _plane_geometry(name: str, tensor: torch.Tensor, blocks: int) -> list[_Span]:
    """The planes of one layer's tensor, outermost first. Raises: ConfigError."""
    item = tensor.element_size()
    where = [axis for axis in (0, 1) if axis < tensor.dim() and tensor.shape[axis] == blocks]
    if len(where) != 1:
        raise ConfigError(
            f"{name}: which axis of {tuple(tensor.shape)} counts the {blocks} blocks is unclear",
            hint="use another number of GPU blocks, or turn the tier off for this model",
        )
    axis = where[0]
    rest = [one for one in range(tensor.dim()) if one != axis and tensor.shape[one] > 1]
    rest.sort(key=tensor.stride, reverse=True)
    block_stride = tensor.stride(axis)
    # Axes behind the block axis in memory make the page; they must fill it without a gap.
    page = [one for one in rest if tensor.stride(one) < block_stride]
    outer = [one for one in rest if tensor.stride(one) >= block_stride]
    page_items = 1
    for one in reversed(page):
        if tensor.stride(one) != page_items:
            raise ConfigError(f"{name}: the pages of {tuple(tensor.shape)} have gaps in memory")
        page_items *= tensor.shape[one]
    if page_items > block_stride:
        raise ConfigError(f"{name}: the pages of {tuple(tensor.shape)} overlap in memory")
    names = "".join(
        f"{'o' if one in outer else 'p'}{one}:{tensor.shape[one]};" for one in (*outer, *page)
    )
    return [
        _Span(
            shape=names,
            offset_bytes=item
            * (
                tensor.storage_offset()
                + sum(at * tensor.stride(one) for at, one in zip(place, outer, strict=True))
            ),
            stride_bytes=item * block_stride,
            page_bytes=item * page_items,
        )
        for place in itertools.product(*(range(tensor.shape[one]) for one in outer))
    ]
