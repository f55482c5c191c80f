"""A bounded table of which no owner can take what others have. Pure.

Invariant: at most `entries_max` entries. For a new one more, the least recently used entry of the
owner with most goes: an owner with no more than its equal share loses nothing because of others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_NOTHING: Mapping[object, object] = MappingProxyType({})


class Shares(Generic[K, V]):
    """Entries by owner and key; `make` makes a new one."""

    def __init__(self, entries_max: int, make: Callable[[], V]) -> None:
        assert entries_max > 0
        self._entries_max = entries_max
        self._make = make
        self._owners: dict[str, dict[K, V]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def use(self, owner: str, key: K) -> V:
        """The entry, made if there is none; it is its owner's most recently used one now."""
        entries = self._owners.get(owner)
        if entries is None:
            entries = self._owners[owner] = {}
        entry = entries.pop(key, None)
        if entry is not None:
            entries[key] = entry
            return entry
        entry = entries[key] = self._make()
        self._count += 1
        if self._count > self._entries_max:
            self._let_one_go()
        return entry

    def of(self, owner: str) -> Mapping[K, V]:
        """An owner's entries, the least recently used first. Not to be kept over a change."""
        return self._owners.get(owner, _NOTHING)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        """Everything, of all owners."""
        for entries in self._owners.values():
            yield from entries.items()

    def drop(self, owner: str, key: K) -> None:
        """Drop an entry, if there is one."""
        entries = self._owners.get(owner)
        if entries is not None and entries.pop(key, None) is not None:
            self._count -= 1
            if not entries:
                del self._owners[owner]

    def forget(self, owner: str) -> None:
        """Drop all that an owner has."""
        self._count -= len(self._owners.pop(owner, ()))

    def _let_one_go(self) -> None:
        most = max(self._owners, key=lambda owner: len(self._owners[owner]))
        entries = self._owners[most]
        del entries[next(iter(entries))]
        self._count -= 1
        if not entries:
            del self._owners[most]
