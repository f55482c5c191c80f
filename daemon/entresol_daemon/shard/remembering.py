"""Whose a namespace is, and what, is written down before the first of its puts; once a tenant has
as many as it may, the oldest of those that have nothing are given up again.

Invariants: what is reserved, stored or may come back from flash stands in a namespace with a
record; one that was given up is written down again by its next put, whoever has had it open.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakValueDictionary

from entresol_daemon.core.accounts import Account
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import Session
from entresol_proto.ids import TenantName
from entresol_proto.status import DeviceError, QuotaError

LOOK_COST = 1  # of the loop: whether one namespace has anything

log = logging.getLogger("entresol.put")


class Remembering:
    """The records of all tenants' namespaces, as puts need them."""

    def __init__(self, parts: Parts, removal: Removal) -> None:
        self._parts = parts
        self._removal = removal
        self._held: dict[bytes, int] = {}  # RESERVEs under way and reservations, by namespace
        self._doomed: set[bytes] = set()  # being given up: a put waits until that is over
        # Who writes or gives up records of a tenant, one after the other.
        self._turns: WeakValueDictionary[TenantName, asyncio.Lock] = WeakValueDictionary()

    def hold(self, namespace_id: bytes) -> None:
        """Something is being put there: not to be given up until `let_go`."""
        self._held[namespace_id] = self._held.get(namespace_id, 0) + 1

    def let_go(self, namespace_id: bytes) -> None:
        """One `hold` is over."""
        self._held[namespace_id] -= 1
        if not self._held[namespace_id]:
            del self._held[namespace_id]

    async def write_down(self, session: Session, handle: int) -> None:
        """Return when the keyring knows this namespace. The caller holds it, and goes on to.

        Raises: KeyringError; QuotaError where the tenant has too many that are in use.
        """
        name = session.account.name
        namespace_id = session.namespace(handle).namespace_id
        if self._is_known(name, namespace_id):
            return
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            if self._is_known(name, namespace_id):
                return
            keyring, raw = self._parts.keyring, session.descriptors[handle]
            while True:
                try:
                    await self._parts.keys.run(keyring.remember_namespace, name, raw)
                    return
                except QuotaError:
                    if not await self._give_up_some(session.account):
                        raise

    def _is_known(self, name: TenantName, namespace_id: bytes) -> bool:
        known = self._parts.keyring.tenant_of(namespace_id) == name
        return known and namespace_id not in self._doomed

    async def _give_up_some(self, account: Account) -> int:
        """Drop the records of the oldest namespaces that have nothing, half of all at most, so that
        this is rare and what was opened lately keeps its own; how many there were.

        Raises: KeyringError, as when the tenant is erased meanwhile.
        """
        keyring, doomed = self._parts.keyring, list[bytes]()
        try:
            await self._choose(account, doomed)
            await self._bury(account, doomed)
            if not doomed:
                return 0
            count = await self._parts.keys.run(keyring.forget_namespaces, account.name, doomed)
            log.info("event=namespaces_given_up tenant=%s count=%d", account.name, count)
            return count
        finally:
            self._doomed.difference_update(doomed)

    async def _choose(self, account: Account, doomed: list[bytes]) -> None:
        """Append to `doomed` what has nothing; from that moment on nothing comes into it."""
        names = self._parts.keyring.namespaces_of(account.name)
        stretches = self._removal.stretches_of(account)
        for each in names:
            if not self._is_needed(each):
                self._doomed.add(each)
                doomed.append(each)
            if 2 * len(doomed) >= len(names):
                return
            await self._removal.rest(stretches, LOOK_COST)

    def _is_needed(self, namespace_id: bytes) -> bool:
        """Whether it has anything, or may: what an opening did not find may be of any namespace
        that was known before it."""
        engine = self._parts.engine
        if namespace_id in self._held or engine.index.has_namespace(namespace_id):
            return True
        return engine.hides_blocks and self._parts.keyring.was_found(namespace_id)

    async def _bury(self, account: Account, doomed: list[bytes]) -> None:
        """A crash brings no block of these back: it would belong to a namespace that is not known.
        Those of which that cannot be had are taken out of `doomed`."""
        engine, departed = self._parts.engine, self._removal.departed
        if not engine.is_haunted:
            departed.clear()
            return
        found = self._parts.keyring.was_found
        haunted = [each for each in doomed if departed.may_return(each) or found(each)]
        if not haunted:
            return
        try:
            await self._removal.barrier(account)  # where removals wait in vain, no more are added
            for each in haunted:
                engine.bury_namespace(each)
            await self._removal.barrier(account)
        except DeviceError as error:
            log.warning(
                "event=namespaces_kept tenant=%s count=%d reason=%s",
                account.name, len(haunted), error,
            )  # fmt: skip
            self._doomed.difference_update(haunted)
            kept = set(haunted)
            doomed[:] = [each for each in doomed if each not in kept]
            return
        for each in haunted:
            departed.buried(each)
