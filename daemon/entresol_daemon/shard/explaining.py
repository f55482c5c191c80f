"""EXPLAIN: why a key is, or is not, here.

Invariant: it looks at the asking tenant's own namespaces only, and lets others run in between.
"""

from __future__ import annotations

from collections.abc import Callable

from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.sessions import OpenedNamespace, Session
from entresol_daemon.shard.turns import (
    NAMESPACE_COST,
    WHY_COST,
    WHY_ELSEWHERE_COST,
    Stretches,
)
from entresol_proto import ids
from entresol_proto.wire.data import Explain, Explained, Reason


class Explainer:
    """Answers EXPLAIN for all sessions of a shard. `is_wanted` tells what is being stored."""

    def __init__(self, parts: Parts, is_wanted: Callable[[bytes, bytes], bool]) -> None:
        self._parts = parts
        self._is_wanted = is_wanted

    async def explain(self, session: Session, request: Explain) -> Explained:
        """A row per key; keys times namespaces of work."""
        parts = self._parts
        namespace = session.namespace(request.handle)
        others: list[tuple[bytes, bytes]] | None = None
        stretches = Stretches(parts.turns.loop, session.account)
        rows = []
        for raw in request.engine_keys:
            engine_key = ids.check_engine_key(raw)
            key = ids.wire_key(namespace.secret, engine_key)
            row = self._why(namespace, key)
            await stretches.spend(WHY_COST)
            if row[0] is Reason.NEVER_STORED:
                if others is None:
                    others = await self._other_namespaces(session, namespace, stretches)
                if await self._is_in_one_of(others, engine_key, stretches):
                    row = (Reason.OTHER_NAMESPACE, 0)
            rows.append(row)
        return Explained(tuple(rows))

    async def _is_in_one_of(
        self, spaces: list[tuple[bytes, bytes]], engine_key: ids.EngineKey, stretches: Stretches
    ) -> bool:
        find = self._parts.engine.index.find
        for namespace_id, secret in spaces:
            if find(namespace_id, ids.wire_key(secret, engine_key)) >= 0:
                return True
            await stretches.spend(WHY_ELSEWHERE_COST)
        return False

    async def _other_namespaces(
        self, session: Session, namespace: OpenedNamespace, stretches: Stretches
    ) -> list[tuple[bytes, bytes]]:
        """(id, secret) of the tenant's other namespaces that hold blocks.

        None where hosts seal: their masked keys are of one namespace each.
        """
        if namespace.host_sealed:
            return []
        keyring, name = self._parts.keyring, session.account.name
        blocks_of = self._parts.engine.index.count_of
        found: list[tuple[bytes, bytes]] = []
        for other in keyring.namespaces_of(name):
            if other == namespace.namespace_id or not blocks_of(other):
                continue
            descriptor = keyring.descriptor_of(other)
            if isinstance(descriptor, ids.NamespaceDescriptor):
                found.append(keyring.derive_namespace(name, descriptor.canonical()))
            await stretches.spend(NAMESPACE_COST)
        return found

    def _why(self, namespace: OpenedNamespace, key: bytes) -> tuple[Reason, int]:
        parts = self._parts
        slot = parts.engine.index.find(namespace.namespace_id, key)
        if slot >= 0:
            resident = parts.residency.get(slot)
            return (Reason.IN_MEMORY if resident is not None else Reason.ON_FLASH, 0)
        if self._is_wanted(namespace.namespace_id, key):
            return (Reason.BEING_STORED, 0)
        return parts.history.why(namespace.namespace_id, key)
