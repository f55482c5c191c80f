"""Namespaces of which a block left the index. Pure.

What left may lie on flash for some time, and a crash then brings it back: whoever gives up what is
known of a namespace must know whether that may be.

Invariant: at most `names_max` names; past them every namespace is taken for one of these.
"""

from __future__ import annotations

NAMES_MAX = 16_384


class Departed:
    """See the module."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._names: set[bytes] = set()
        self._all = False

    def note(self, namespace_id: bytes) -> None:
        """A block of it left."""
        if len(self._names) < self._names_max:
            self._names.add(namespace_id)
        elif namespace_id not in self._names:
            self._all = True

    def may_return(self, namespace_id: bytes) -> bool:
        """Whether a block of it may have left."""
        return self._all or namespace_id in self._names

    def buried(self, namespace_id: bytes) -> None:
        """Nothing of it comes back."""
        self._names.discard(namespace_id)

    def clear(self) -> None:
        """Nothing of any comes back."""
        self._names.clear()
        self._all = False
