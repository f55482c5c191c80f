"""One FETCH or STAGE under way: what was asked, what is known of it and what is still to come.

Invariant: the grant for which `is_last` was true before it was made is the last one: nothing is
pending, and no other grant of the job is being made or waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from entresol_daemon.core.residency import Resident
from entresol_daemon.shard.door import Visit
from entresol_daemon.shard.sessions import OpenedNamespace, Session
from entresol_proto.status import Status
from entresol_proto.wire.data import Grant, OpenAt


@dataclass(slots=True, eq=False)
class Job:
    """See the module. `emit` sends a GRANT; `owed` is decremented once a grant is out."""

    session: Session
    namespace: OpenedNamespace
    open_at: OpenAt
    keys: bytes
    deadline_ns: int
    lease_ns: int
    emit: Callable[[Grant], None]
    prefix: bool = False
    misses: list[tuple[int, Status]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)  # slots, in order of the request
    pending: deque[int] = field(default_factory=deque)  # of what no window has been made yet
    slots: list[int] = field(default_factory=list)  # of all keys, as they were when the index
    slots_at: int = -1  # had changed so often; -1: they were not looked up in one go
    owed: int = 0  # grants that are to come, of windows there are
    landed: deque[list[tuple[int, Resident]]] = field(default_factory=deque)  # pinned; see below
    granter: bool = False  # somebody waits for their turn, and takes along what lands meanwhile
    ended: bool = False  # the final grant is out
    paid: bool = True  # the turn that began it is also that of its first window
    visit: Visit = field(init=False)

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after the grant that is about to be made."""
        return not self.pending and self.owed == 1

    def take_landed(self, blocks_max: int, bytes_max: int) -> list[tuple[int, Resident]]:
        """Blocks of windows that have landed, for whoever grants them now: as many as one window
        may have, or the first of these windows. What is owed are only the others from then on."""
        mine: list[tuple[int, Resident]] = []
        length_bytes = 0
        while self.landed:
            for _, resident in self.landed[0]:
                length_bytes += max(resident.extent.length_bytes, resident.plain_bytes)
            if mine and (length_bytes > bytes_max or len(mine) + len(self.landed[0]) > blocks_max):
                break
            mine += self.landed.popleft()
            self.owed -= 1
        return mine
