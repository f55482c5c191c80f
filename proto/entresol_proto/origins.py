"""Where connections of strangers come from, and who has to go when they are too many. Pure.

Invariant: nobody fills a crowd alone: where there is no room, the oldest of the origin that has
most gives way. Who is quick finds a place, whoever else keeps silent there.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

NETWORK_BITS = 64  # of an IPv6 address; who has one has all that begin alike

T = TypeVar("T", bound=Hashable)


def origin_of(host: str) -> str:
    """Whose connections count together: an IPv4 address, or the network of an IPv6 one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address), NETWORK_BITS), strict=False))
    return str(address)


class Crowd(Generic[T]):
    """At most `most` things at a time, each of an origin."""

    def __init__(self, most: int) -> None:
        assert most > 0, "a crowd of nobody"
        self._most = most
        self._origins: dict[T, str] = {}  # in the order they came
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._origins)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._origins))

    def add(self, one: T, origin: str) -> T | None:
        """Enter one. Returns who has to leave for it and is not in here any more, which may be
        `one` itself; None while there is room."""
        leaves = None
        if len(self._origins) >= self._most:
            crowded = max(self._counts, key=lambda each: (self._counts[each], each == origin))
            if self._counts[crowded] < 2:
                return one  # so many origins are no one's flood
            leaves = next(each for each, of in self._origins.items() if of == crowded)
            self.discard(leaves)
        self._origins[one] = origin
        self._counts[origin] += 1
        return leaves

    def discard(self, one: T) -> None:
        """It has left by itself. Idempotent."""
        origin = self._origins.pop(one, None)
        if origin is not None:
            self._counts[origin] -= 1
            if not self._counts[origin]:
                del self._counts[origin]
