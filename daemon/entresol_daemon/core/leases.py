"""Leases: how long a host may read what it was granted. Pure; time comes in as `now_ns`.

Invariant: a lease ends exactly once, by release, by expiry or with its session, and whoever made it
gets its payload back at that moment to let go of the memory. What a table holds is bounded by its
living leases: deadlines of ended ones are swept out.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

from entresol_proto.status import QuotaError, Status

T = TypeVar("T")

_Place = tuple[int, int]  # session, lease id

STALE_DEADLINES_MAX = 1_024  # beyond as many as there are living leases; then they are swept out


# Not frozen, because several are made per request: a frozen one takes several times as long.
@dataclass(slots=True)
class Lease(Generic[T]):
    """Right of one session to read `payload` until `expires_ns` (monotonic)."""

    lease_id: int
    session: int
    expires_ns: int
    payload: T


class LeaseTable(Generic[T]):
    """Leases of all sessions. Ids are of the session they were given to, and mean nothing outside:
    counted over all sessions they would tell each what others do."""

    def __init__(self, *, leases_per_session_max: int) -> None:
        self._leases_per_session_max = leases_per_session_max
        self._granted = 0
        self._leases: dict[_Place, Lease[T]] = {}
        self._by_session: dict[int, set[int]] = {}
        self._deadlines: list[tuple[int, int, _Place]] = []  # of one moment in order of grant

    def __len__(self) -> int:
        return len(self._leases)

    def held_by(self, session: int) -> int:
        """How many leases a session holds."""
        return len(self._by_session.get(session, ()))

    def room(self, session: int) -> bool:
        """True if the session may get another lease."""
        return self.held_by(session) < self._leases_per_session_max

    def grant(self, session: int, lease_id: int, payload: T, expires_ns: int) -> Lease[T]:
        """A new lease, under an id that the session has not had before, each above the last.

        Raises: QuotaError (BUSY) at the session's limit.
        """
        if not self.room(session):
            raise QuotaError(
                f"session holds {self._leases_per_session_max} leases", status=Status.BUSY
            )
        place = (session, lease_id)
        assert place not in self._leases, "an id that is in use"
        lease = self._leases[place] = Lease(lease_id, session, expires_ns, payload)
        self._by_session.setdefault(session, set()).add(lease_id)
        self._granted += 1
        heapq.heappush(self._deadlines, (expires_ns, self._granted, place))
        return lease

    def get(self, session: int, lease_id: int) -> Lease[T] | None:
        """The lease if it is alive and belongs to this session, else None."""
        return self._leases.get((session, lease_id))

    def release(self, session: int, lease_id: int) -> Lease[T] | None:
        """End a lease; None if there is none of that id for this session (late or forged)."""
        lease = self.get(session, lease_id)
        if lease is not None:
            self._forget(lease)
        return lease

    def expire(self, now_ns: int) -> list[Lease[T]]:
        """End every lease whose time has come."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            lease = self._leases.get(heapq.heappop(self._deadlines)[2])
            if lease is not None:
                self._forget(lease)
                ended.append(lease)
        return ended

    def of_session(self, session: int) -> list[Lease[T]]:
        """Every lease of a session."""
        mine = sorted(self._by_session.get(session, ()))
        return [self._leases[session, lease_id] for lease_id in mine]

    def end_session(self, session: int) -> list[Lease[T]]:
        """End every lease of a session."""
        ended = self.of_session(session)
        for lease in ended:
            self._forget(lease)
        return ended

    def next_expiry_ns(self) -> int | None:
        """When `expire` has something to do, or None. Released leases may make it early."""
        while self._deadlines and self._deadlines[0][2] not in self._leases:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _forget(self, lease: Lease[T]) -> None:
        del self._leases[lease.session, lease.lease_id]
        held = self._by_session[lease.session]
        held.discard(lease.lease_id)
        if not held:
            del self._by_session[lease.session]
        if len(self._deadlines) > 2 * len(self._leases) + STALE_DEADLINES_MAX:
            self._deadlines = [row for row in self._deadlines if row[2] in self._leases]
            heapq.heapify(self._deadlines)
