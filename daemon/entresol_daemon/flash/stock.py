"""Which segments can be freed, by stream and state, kept up to date as they change: whoever chooses
one need not look at all of them, of which there may be a hundred thousand.

Invariant: a segment that is sealed, condemned, or open and has or had live blocks is in exactly one
of the six; any other in none, nor one that rests. The owner calls `put` at every change of state,
and when the number of live blocks becomes zero or ceases to be.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class _State(Protocol):
    @property
    def value(self) -> str: ...


class _Segment(Protocol):
    @property
    def segment(self) -> int: ...
    @property
    def stream(self) -> bytes: ...
    @property
    def state(self) -> _State: ...
    @property
    def live_blocks(self) -> int: ...
    @property
    def unread(self) -> bool: ...


S = TypeVar("S", bound=_Segment)


class Stock(Generic[S]):
    """See the module. Segments by their number; `sealed` and `opened` also by stream, without
    streams that have none; in the order in which they came."""

    def __init__(self) -> None:
        self.sealed: dict[bytes, dict[int, S]] = {}  # with live blocks
        self.empty: dict[int, S] = {}  # sealed, without
        self.opened: dict[bytes, dict[int, S]] = {}  # with live blocks
        self.idle: dict[int, S] = {}  # open, without: whatever it had is gone
        self.condemned: dict[int, S] = {}
        self.unread: dict[int, S] = {}  # condemned, and another opening may find more in it
        self.resting: set[int] = set()  # could not be freed just now; nobody should try
        self._homes: dict[int, tuple[dict[int, S], bytes | None]] = {}
        self._stamps: dict[int, int] = {}
        self._stamp = 0

    def put(self, segment: S) -> None:
        """It has changed, or is new."""
        home, stream = self._home_of(segment)
        number = segment.segment
        before = self._homes.get(number)
        if before is not None:
            if before[0] is home and before[0].get(number) is segment:
                return
            self.drop(number)
        if home is not None:
            home[number] = segment
            self._homes[number] = (home, stream)
            self._stamp += 1
            self._stamps[number] = self._stamp

    def drop(self, number: int) -> None:
        """It is free, or about to be. Nothing happens if it was in none."""
        self.resting.discard(number)
        home, stream = self._homes.pop(number, (None, None))
        if home is None:
            return
        del home[number], self._stamps[number]
        if stream is not None and not home:
            by_stream = self.sealed if self.sealed.get(stream) is home else self.opened
            del by_stream[stream]

    def rest(self, segment: S) -> None:
        """Others are to be freed first, until `wake`."""
        self.drop(segment.segment)
        self.resting.add(segment.segment)

    def wake(self, segment: S) -> None:
        """It may be freed again."""
        self.resting.discard(segment.segment)
        self.put(segment)

    def stamp_of(self, number: int) -> int:
        """Grows with every segment that comes to where it is."""
        return self._stamps[number]

    def _home_of(self, segment: S) -> tuple[dict[int, S] | None, bytes | None]:
        state = segment.state.value
        if segment.segment in self.resting:
            return None, None
        if state == "condemned":
            return self.unread if segment.unread else self.condemned, None
        if state == "sealed" and not segment.live_blocks:
            return self.empty, None
        if state == "sealed":
            return self.sealed.setdefault(segment.stream, {}), segment.stream
        if state == "open" and segment.live_blocks:
            return self.opened.setdefault(segment.stream, {}), segment.stream
        if state == "open":
            return self.idle, None
        return None, None
