"""Which namespaces a relay speaks for: one model in one layout, every rank of it.

Pure. Invariant: blocks of two layouts (revision, dtype, shape, parallel sizes) are never published
as one: engines hash tokens, not weights, so the same hash may stand for different bytes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from entresol_proto.ids import NamespaceDescriptor

RANK_FIELDS = ("tp_rank", "pp_rank")
OWN_FIELDS = ("lora", "cache_salt")  # these do not make another layout
MATCH_FIELDS = tuple(
    one.name for one in fields(NamespaceDescriptor) if one.name not in (*RANK_FIELDS, *OWN_FIELDS)
)

RANKS_MAX = 4_096  # of a layout; each takes 2 bytes of a relay's memory for every block

Layout = tuple[str | int, ...]
"""Values of `MATCH_FIELDS`, in that order."""


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace of one shard, as the daemon tells it."""

    shard: str
    namespace_id: bytes
    layout: Layout
    lora: str  # empty: none
    salted: bool
    tp_rank: int
    pp_rank: int
    blocks: int = 0

    def value(self, name: str) -> str | int:
        """One of `MATCH_FIELDS`."""
        return self.layout[MATCH_FIELDS.index(name)]

    @property
    def rank(self) -> int:
        """Its number among the ranks of the layout."""
        return self.pp_rank * int(self.value("tp_world")) + self.tp_rank

    @property
    def ranks(self) -> int:
        """How many ranks hold a part of each block."""
        return max(1, int(self.value("tp_world"))) * max(1, int(self.value("pp_world")))

    @property
    def has_place(self) -> bool:
        """True for a rank that its layout has: hosts may write any number."""
        of_tp, of_pp = (max(1, int(self.value(name))) for name in ("tp_world", "pp_world"))
        return self.tp_rank < of_tp and self.pp_rank < of_pp and self.ranks <= RANKS_MAX


def words(layout: Layout) -> dict[str, str | int]:
    """A layout's fields by name."""
    return dict(zip(MATCH_FIELDS, layout, strict=True))


@dataclass
class Chooser:
    """Finds the layout that is published, and keeps to it.

    Attributes:
        match: field -> pattern (shell style); a namespace must match all.
        chosen: the layout, once one was found.
        others: layouts that match as well, and are not published.
    """

    match: Mapping[str, str] = field(default_factory=dict)
    chosen: Layout | None = None
    others: set[Layout] = field(default_factory=set)

    def candidates(self, found: Iterable[NamespaceInfo]) -> list[Layout]:
        """Matching layouts; those without a block only when none has any."""
        blocks: dict[Layout, int] = {}
        for one in found:
            if self.matches(one):
                blocks[one.layout] = blocks.get(one.layout, 0) + one.blocks
        filled = [layout for layout, count in blocks.items() if count]
        return filled or list(blocks)

    def choose(self, found: Sequence[NamespaceInfo]) -> None:
        """Settle on a layout as soon as there is exactly one; note the others."""
        layouts = self.candidates(found)
        if self.chosen is None and len(layouts) == 1:
            self.chosen = layouts[0]
        self.others.update(layout for layout in layouts if layout != self.chosen)

    def admits(self, one: NamespaceInfo) -> bool:
        """True for a namespace that is published: of the chosen layout, one of its ranks, and
        without a salt."""
        ours = one.layout == self.chosen and one.has_place
        return ours and not one.salted and self.matches(one)

    def matches(self, one: NamespaceInfo) -> bool:
        """True when every pattern fits."""
        return all(
            fnmatch.fnmatchcase(str(one.value(name)), pattern)
            for name, pattern in self.match.items()
        )
