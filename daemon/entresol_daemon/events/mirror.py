"""A consumer's picture of one tenant, built from events alone: the executable form of EVENTS.md.

Pure. Used by whoever wants to know what is stored without asking (tools, tests, oracles).
Invariant: after snapshot + replay, or after a complete replay from 1, it equals the shard's index.
"""

from __future__ import annotations

from collections.abc import Iterable

from entresol_daemon.events.types import Event, Kind, Medium, Position

BlockName = tuple[bytes, bytes]
"""(namespace id, wire key)."""


class SequenceBrokenError(Exception):
    """An event does not follow the last one: the consumer missed some and must resynchronise."""


class Mirror:
    """Blocks of one tenant and where they are: `blocks[(namespace_id, wire_key)] -> media`."""

    def __init__(self) -> None:
        self.blocks: dict[BlockName, frozenset[Medium]] = {}
        self.position: Position | None = None  # None: never synchronised

    def restart(self, position: Position) -> None:
        """Begin a snapshot: forget everything; following events come after `position`."""
        self.blocks.clear()
        self.position = position

    def load(self, events: Iterable[Event]) -> None:
        """Take the events of a snapshot (`seq` 0)."""
        for event in events:
            assert event.seq == 0, "snapshots carry no sequence"
            self._apply(event)

    def follow(self, incarnation: int, events: Iterable[Event]) -> None:
        """Take events of the log, in order.

        Raises: SequenceBrokenError at a hole or another incarnation; nothing after it was applied.
        """
        for event in events:
            known = self.position
            if known is None or (known.incarnation, known.seq + 1) != (incarnation, event.seq):
                raise SequenceBrokenError(f"event {event.seq} of {incarnation} after {known}")
            self._apply(event)
            self.position = Position(incarnation, event.seq)

    def _apply(self, event: Event) -> None:
        if event.kind is Kind.TENANT_ERASED:
            self.blocks.clear()
        elif event.kind is Kind.CLEARED:
            self.blocks = {
                name: media
                for name, media in self.blocks.items()
                if event.namespace_id and name[0] != event.namespace_id
            }
        elif event.kind is not Kind.PINNED:
            for key in event.wire_keys:
                name = (event.namespace_id, key)
                if event.kind.ends_blocks:
                    self.blocks.pop(name, None)
                elif event.kind is Kind.DEMOTED:
                    self.blocks[name] = frozenset((event.medium,))
                else:
                    medium = Medium.MEMORY if event.kind is Kind.STAGED else event.medium
                    self.blocks[name] = self.blocks.get(name, frozenset()) | {medium}
