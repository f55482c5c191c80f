"""The tenants of a shard: who is in the books, and who may change that.

The keyring says who there is, the books (`core.accounts`) what each uses. A change of a tenant
(added, erased, its quota, its keys) is several steps with others in between, so each tenant has
one at a time.

Invariants: an account's stream is that of the keyring's tenant of this name; while blocks, sessions
or keys of an erased tenant are left, nobody begins anew under its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from entresol_daemon.core.accounts import Account
from entresol_daemon.keys.errors import erasing_error
from entresol_daemon.keys.keyring import TenantInfo
from entresol_daemon.shard import quotas
from entresol_daemon.shard.parts import Parts
from entresol_proto.ids import TenantName
from entresol_proto.status import EntresolError

log = logging.getLogger("entresol.shard")


@dataclass(slots=True)
class _Turn:
    """Of one tenant, while somebody changes it or waits to."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Tenancy:
    """See the module."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turns: dict[TenantName, _Turn] = {}

    def find(self) -> None:
        """After recovery: charge every tenant with what lies in its segments.

        Blocks of a stream that is nobody's (a tenant erased just before a crash) cannot be asked
        for; their segments are the first to be evicted.
        """
        parts = self._parts
        for info in parts.keyring.tenants():
            self.adopt(info)
        orphans = 0
        blocks: Counter[bytes] = Counter()
        for segment in parts.engine.segments():
            blocks[segment.stream] += segment.live_blocks
            account = parts.accounts.by_stream.get(segment.stream)
            if account is not None:
                account.flash_bytes += segment.live_bytes
                account.flash_blocks += segment.live_blocks
            else:
                orphans += segment.live_blocks
        parts.census.found(parts.engine.index.live_slots(), +blocks)
        if orphans:
            log.warning("event=orphan_blocks blocks=%d", orphans)

    def adopt(self, info: TenantInfo) -> Account:
        """Enter a tenant of the keyring into the books; its quota follows the keyring.

        Raises: KeyringError (CONFLICT) while an erased one of this name is still in them.
        """
        found = self._parts.accounts.by_name.get(info.name)
        if found is None:
            found = Account(info.name, info.stream)
            self._parts.accounts.add(found)
        elif found.stream != info.stream:
            raise erasing_error(info.name)
        quotas.follow(found, info.quota)
        self._parts.accounts.reweigh()
        self._parts.room.notify()  # it may have more than it had
        return found

    async def admit(self, name: TenantName) -> Account:
        """The account of an authenticated tenant, added on first sight where that is configured.

        Raises: EntresolError: FORBIDDEN for a stranger, ERASED, LOCKED.
        """
        parts = self._parts
        account = parts.accounts.by_name.get(name)
        if account is not None:
            return account
        if parts.keyring.was_erased(name) or not parts.config.tenants.auto_add:
            parts.keyring.get(name)  # raises with the right words
        async with self.changing(name):
            try:
                tenant = await parts.keys.run(self._add_first_seen, name)
            except EntresolError:
                added = parts.keyring.info(name)  # by another session of its, a moment ago
                if added is None:
                    raise
                tenant = added
            return self.adopt(tenant)

    def _add_first_seen(self, name: TenantName) -> TenantInfo:
        quota = quotas.quota_of_new(self._parts.config)
        return self._parts.keyring.add_tenant(
            name, quota, now_unix_s=self._parts.unix_ns() // 1_000_000_000
        ).info

    @contextlib.asynccontextmanager
    async def changing(self, name: TenantName) -> AsyncIterator[None]:
        """Change a tenant: one at a time, others wait. Not to be entered again from within.

        Raises: KeyringError (CONFLICT), at once, while the tenant is being erased.
        """
        self._refuse_while_erased(name)
        async with self._alone(name):
            self._refuse_while_erased(name)
            yield

    @contextlib.asynccontextmanager
    async def erasing(self, name: TenantName) -> AsyncIterator[None]:
        """As `changing`, for an erasure: also for one that goes on where another was given up."""
        async with self._alone(name):
            yield

    def _refuse_while_erased(self, name: TenantName) -> None:
        """Its keys are destroyed first, its account is the last to go."""
        parts = self._parts
        if name in parts.accounts.by_name and parts.keyring.info(name) is None:
            raise erasing_error(name)

    @contextlib.asynccontextmanager
    async def _alone(self, name: TenantName) -> AsyncIterator[None]:
        turn = self._turns.setdefault(name, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[name]
