"""Memory for opened blocks: a slab pool for each session that asks, of one budget for the shard.

Without the budget every session kept what it once needed, and many of them had all of the machine.

Invariants: all pools together map at most the budget; of what is free of it no tenant of several
takes more than its part (`core.accounts`); an empty slab of any session is given back before
somebody gets none. A slab that is given back is revoked first, and was wiped block by block.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter

from entresol_daemon.core.accounts import Shared
from entresol_daemon.memory.ranges import align_up
from entresol_daemon.memory.slabs import Slab, SlabBuffer, SlabPool
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.sessions import Session
from entresol_proto.ids import TenantName

PLAIN_OWNER = b"session plaintext"


class PlainMemory:
    """Of all sessions of a shard; the budget is `[memory] opened_bytes`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._mapped = Shared(parts.config.memory.opened_bytes_max)
        self._of_tenant: Counter[TenantName] = Counter()
        self._sessions: dict[int, Session] = {}
        self._revoking: set[asyncio.Task[None]] = set()

    @property
    def mapped_bytes(self) -> int:
        """Of all sessions, used or not."""
        return self._mapped.used

    def pool(self, session: Session) -> SlabPool:
        """A session's own, made on first use."""
        if session.plain_pool is None:
            config = self._parts.config
            budget = align_up(config.limits.inflight_bytes_per_session_max)  # may be a slab's size
            pool = SlabPool(
                budget,
                min(config.memory.slab_bytes, budget),
                lambda size: self._make(session, size),
            )
            pool.on_close = lambda slab: self._closes(session, slab)
            session.plain_pool = pool
            self._sessions[session.number] = session
        return session.plain_pool

    def is_full(self, session: Session) -> bool:
        """Whether a session has all that one session may: nobody else is in its way."""
        pool = self.pool(session)
        return pool.mapped_bytes + pool.slab_bytes > pool.budget_bytes

    def close(self, session: Session) -> None:
        """Give up a session's memory; its leases have ended, or nobody can be kept from reading."""
        pool, session.plain_pool = session.plain_pool, None
        if pool is not None:
            del self._sessions[session.number]
            pool.close()
            self._parts.room.notify()

    def _make(self, session: Session, size_bytes: int) -> SlabBuffer:
        """Raises: OSError when there is no room for it now."""
        if not self._admits(session, size_bytes):
            for other in list(self._sessions.values()):
                if other.plain_pool is not None:
                    other.plain_pool.release_owner(PLAIN_OWNER)
                if self._admits(session, size_bytes):
                    break
            else:
                raise OSError(errno.ENOMEM, "no memory for opened blocks")
        buffer = self._parts.make_plain_buffer(size_bytes)
        self._mapped.take(size_bytes)
        self._of_tenant[session.account.name] += size_bytes
        return buffer

    def _admits(self, session: Session, size_bytes: int) -> bool:
        account = session.account
        of_free = self._parts.accounts.of_free(account)
        return self._mapped.admits(self._of_tenant[account.name], size_bytes, 0, of_free)

    def _closes(self, session: Session, slab: Slab) -> None:
        name, size_bytes = session.account.name, slab.ranges.size_bytes
        self._mapped.refund(size_bytes)
        self._of_tenant[name] -= size_bytes
        if not self._of_tenant[name]:
            del self._of_tenant[name]
        exposure = session.take_back(slab, plain=True)
        if exposure is not None and session.endpoint is not None and not session.closed:
            task = asyncio.get_running_loop().create_task(session.endpoint.revoke(exposure))
            self._revoking.add(task)
            task.add_done_callback(self._revoking.discard)
