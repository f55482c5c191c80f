"""What one token leaves in a KV cache: layers, heads, sizes, windows, and who holds which part.

Invariant: exact whole bytes. A shape says what attention *keeps*, which is not what weights or
activations take: `layers x (keys + values) x heads x size x bytes of an element`, or, where keys
and values are one latent (MLA), `layers x latent x bytes of an element`.

Sources: for grouped heads arXiv 2305.13245, for the latent arXiv 2405.04434 (section 2.1: the
compressed latent and the decoupled rotary key are what is cached).
"""

from __future__ import annotations

from dataclasses import dataclass

from entresol_proto.status import EntresolError, Status

TENSOR_PARALLEL_MAX = 1024


class SizingError(EntresolError):
    """The numbers given do not describe anything that can be sized."""

    status = Status.BAD_REQUEST


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same per token.

    `head_values` is what one KV head keeps per token, key and value together. `heads` is 0 where
    there are no heads to share out: then `head_values` is the latent of a layer, of which every
    rank needs all. `window_tokens` is 0 where a layer sees the whole context.
    """

    layers: int
    heads: int
    head_values: int
    window_tokens: int = 0

    @property
    def values(self) -> int:
        """Elements per token over all layers of the group, on all ranks together, once."""
        return self.layers * max(1, self.heads) * self.head_values


@dataclass(frozen=True, slots=True)
class KvShape:
    """One model's KV: `groups` of layers. `context_max_tokens` is 0 where nobody says."""

    name: str
    groups: tuple[LayerGroup, ...]
    context_max_tokens: int = 0
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Layers that keep anything per token."""
        return sum(group.layers for group in self.groups)

    @property
    def is_latent(self) -> bool:
        """Keys and values are one latent, whole on every rank (MLA)."""
        return all(not group.heads for group in self.groups)

    @property
    def windowed_layers(self) -> int:
        """Layers that see the last tokens only."""
        return sum(group.layers for group in self.groups if group.window_tokens)

    def token_bytes(self, element_bytes: int) -> int:
        """Of one token in every layer, once over all ranks."""
        return element_bytes * sum(group.values for group in self.groups)

    def needed_bytes(self, context_tokens: int, element_bytes: int) -> int:
        """What going on after so many tokens needs: of windowed layers, the last window only."""
        return element_bytes * sum(
            group.values * min(context_tokens, group.window_tokens or context_tokens)
            for group in self.groups
        )

    def rank_token_bytes(self, element_bytes: int, ranks: int) -> int:
        """Of one token on one tensor-parallel rank. Raises: SizingError."""
        return element_bytes * sum(
            group.layers * _heads_on_rank(group, ranks) * group.head_values for group in self.groups
        )

    def stored_token_bytes(self, element_bytes: int, ranks: int, *, every_rank: bool) -> int:
        """Of one token, over all ranks that store it.

        Ranks beyond the number of heads hold a copy of another rank's head, and store it: their
        blocks are other blocks. A latent is whole on every rank; it is stored once, by the rank
        that the engine chose, or by each (`every_rank`). Raises: SizingError.
        """
        if self.is_latent and not every_rank:
            return self.token_bytes(element_bytes)
        return ranks * self.rank_token_bytes(element_bytes, ranks)


def _heads_on_rank(group: LayerGroup, ranks: int) -> int:
    """KV heads of each rank. Raises: SizingError where they cannot be shared out evenly."""
    if not 1 <= ranks <= TENSOR_PARALLEL_MAX:
        raise SizingError(
            f"{ranks} tensor-parallel ranks", hint=f"--tp from 1 to {TENSOR_PARALLEL_MAX}"
        )
    if not group.heads:
        return 1
    if group.heads % ranks == 0:
        return group.heads // ranks
    if ranks % group.heads == 0:
        return 1
    raise SizingError(
        f"{group.heads} KV heads cannot be shared out over {ranks} ranks",
        hint="engines want --tp to divide the KV heads, or to be a multiple of them",
    )


def plain(
    name: str, layers: int, heads: int, head_dim: int, context_max_tokens: int = 0, source: str = ""
) -> KvShape:
    """Every layer keeps a key and a value of `head_dim` per KV head, of the whole context."""
    group = LayerGroup(layers, heads, 2 * head_dim)
    return KvShape(name, (group,), context_max_tokens, source)


def latent(
    name: str, layers: int, latent_values: int, context_max_tokens: int = 0, source: str = ""
) -> KvShape:
    """Every layer keeps one latent (MLA): its rank and the rotary key beside it."""
    return KvShape(name, (LayerGroup(layers, 0, latent_values),), context_max_tokens, source)


def windowed(
    name: str,
    layers: int,
    whole_layers: int,
    heads: int,
    head_dim: int,
    window_tokens: int,
    context_max_tokens: int = 0,
    source: str = "",
) -> KvShape:
    """`whole_layers` see everything, the others a window. One kind alone makes one group."""
    parts = (
        LayerGroup(whole_layers, heads, 2 * head_dim),
        LayerGroup(layers - whole_layers, heads, 2 * head_dim, window_tokens),
    )
    groups = tuple(part for part in parts if part.layers)
    return KvShape(name, groups, context_max_tokens, source)
