"""One FETCH or STAGE under way: what was asked, what is known of it and what is still to come.

Invariant: the grant for which `is_last` was true before it was made is the last one: nothing is
pending, and no other grant of the job is being made or waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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
    owed: int = 0  # grants that are to come, of windows there are
    ended: bool = False  # the final grant is out
    paid: bool = True  # the turn that began it is also that of its first window
    visit: Visit = field(init=False)

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after the grant that is about to be made."""
        return not self.pending and self.owed == 1
