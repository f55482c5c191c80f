"""What the shard knows of one session: who it is, what it opened, what it holds.

Invariant: everything a session can name (namespace handles, leases, reservations) is looked up in
its own tables, so a forged number reaches nothing of another session.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.residency import Resident
from entresol_daemon.keys.keyring import Tenant
from entresol_daemon.memory.slabs import Extent, Slab, SlabPool
from entresol_daemon.shard.choosing import Choice
from entresol_proto import limits
from entresol_proto.fabric.base import Endpoint, Exposure, RegisteringEndpoint, Registration
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import EntresolError, FabricError, QuotaError, Status

log = logging.getLogger("entresol.session")


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """A namespace as one session uses it."""

    handle: int
    namespace_id: bytes
    secret: bytes = field(repr=False)
    block_tokens: int
    dtype: DType
    choice: Choice  # of the codec its blocks are sealed with
    host_sealed: bool = False  # the tenant keeps its keys: sealed and opened by hosts only


@dataclass(slots=True, eq=False)
class PlainBlock:
    """One opened block in the session's own memory. `pins` counts leases and holds."""

    place: tuple[bytes, bytes, bytes]  # namespace id, wire key, salt
    extent: Extent
    plain_bytes: int
    pins: int = 0
    engine_key_digest: bytes = bytes(32)


@dataclass(slots=True, eq=False)
class Leased:
    """What a lease keeps alive: sealed residents or opened blocks, by index in the FETCH."""

    session: Session
    namespace: OpenedNamespace
    sealed: dict[int, Resident] = field(default_factory=dict)
    plain: dict[int, PlainBlock] = field(default_factory=dict)
    exposures: list[Exposure] = field(default_factory=list)  # fenced: revoked at lease end
    staged: set[int] = field(default_factory=set)  # opened blocks that came up from flash for it
    held_bytes: int = 0
    exposed_blocks: int = 0
    granted: bool = False  # it counts among the tenant's leases


@dataclass(slots=True, eq=False)
class Session:
    """One open session. Owned by the shard from `open_session` to `close_session`."""

    number: int
    session_id: bytes
    account: Account
    tenant: Tenant
    same_host: bool
    open_threads: int
    client: str
    endpoint: Endpoint | None = None
    fabric: str = "none"
    namespaces: dict[int, OpenedNamespace] = field(default_factory=dict)
    descriptors: dict[int, bytes] = field(default_factory=dict, repr=False)  # by handle
    exposures: dict[int, Exposure] = field(default_factory=dict)  # by slab number
    plain_exposures: dict[int, Exposure] = field(default_factory=dict)
    registrations: dict[Slab, Registration] = field(default_factory=dict)
    plain_pool: SlabPool | None = None
    plain_blocks: dict[tuple[bytes, bytes, bytes], PlainBlock] = field(default_factory=dict)
    _showing: dict[tuple[bool, int], asyncio.Task[Exposure]] = field(default_factory=dict)
    held_bytes: int = 0
    exposed_blocks: int = 0  # opened blocks exposed one by one
    slow_reads: int = 0  # of its host under way, so long that their turns went to others
    opening: bool = True  # admitted, its data path not settled yet
    closed: bool = False
    # Of its leases and puts. From a random number on, so that no session guesses another's.
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(secrets.randbits(62) + 1))
    fenced: bool = False  # its data path is gone: nothing that it was shown can be read through it

    def namespace(self, handle: int) -> OpenedNamespace:
        """The namespace of a handle. Raises: EntresolError (BAD_REQUEST) for an unknown one."""
        found = self.namespaces.get(handle)
        if found is None:
            raise EntresolError(
                f"namespace handle {handle} was not opened in this session",
                status=Status.BAD_REQUEST,
            )
        return found

    def opened(self, namespace_id: bytes) -> OpenedNamespace | None:
        """The namespace if this session has it open already."""
        for found in self.namespaces.values():
            if found.namespace_id == namespace_id:
                return found
        return None

    def next_id(self) -> int:
        """A fresh number for a lease or a put: of this session only, since counted over all of them
        it would tell each how much others do."""
        return next(self._ids)

    def next_handle(self) -> int:
        """A fresh handle. Raises: QuotaError at NAMESPACES_PER_SESSION_MAX."""
        if len(self.namespaces) >= limits.NAMESPACES_PER_SESSION_MAX:
            raise QuotaError(f"{len(self.namespaces)} namespaces are open in this session")
        return len(self.namespaces) + 1

    def data_path(self) -> Endpoint:
        """The endpoint. Raises: EntresolError when the session attached none."""
        if self.endpoint is None:
            raise EntresolError(
                "this session has no data path", hint="attach a fabric", status=Status.BAD_REQUEST
            )
        if self.closed:
            raise EntresolError("session is closed", status=Status.DISCONNECTED)
        return self.endpoint

    def land_in(self, slab: Slab) -> None:
        """Reads from the host will land in this slab: tell a fabric that gains by knowing."""
        endpoint = self.endpoint
        if endpoint is None or not endpoint.capabilities.registers or slab in self.registrations:
            return
        registering = cast(RegisteringEndpoint, endpoint)
        try:
            self.registrations[slab] = registering.register(slab.buffer.view)
        except FabricError as error:  # too many: such reads cost more, and work
            log.debug("event=slab_not_registered session=%d reason=%s", self.number, error)

    def forget_slab(self, slab: Slab) -> None:
        """A slab's memory goes away."""
        registration = self.registrations.pop(slab, None)
        if registration is not None:
            registration.close()

    async def expose_slab(self, slab: Slab) -> Exposure:
        """Show a slab of sealed bytes to the peer, once per session and slab.

        Raises: FabricError, EntresolError (DISCONNECTED).
        """
        assert slab.owner == self.account.stream, "a slab of another tenant"
        return await self._expose_once(slab, self.exposures)

    async def expose_plain(self, slab: Slab) -> Exposure:
        """Show a slab of this session's own plaintext to the peer, once per slab.

        Raises: FabricError, EntresolError (DISCONNECTED).
        """
        return await self._expose_once(slab, self.plain_exposures)

    async def _expose_once(self, slab: Slab, exposures: dict[int, Exposure]) -> Exposure:
        """Whoever asks while it is being shown waits for that: the peer may take its time."""
        found = exposures.get(slab.number)
        if found is not None:
            return found
        place = (exposures is self.plain_exposures, slab.number)
        showing = self._showing.get(place)
        if showing is None:
            showing = asyncio.get_running_loop().create_task(self._show(slab, exposures))
            self._showing[place] = showing
            showing.add_done_callback(functools.partial(self._shown, place))
        return await asyncio.shield(showing)

    async def _show(self, slab: Slab, exposures: dict[int, Exposure]) -> Exposure:
        exposure = await self.data_path().expose(slab.buffer)  # type: ignore[arg-type]
        exposures[slab.number] = exposure
        return exposure

    def take_back(self, slab: Slab, *, plain: bool = False) -> Exposure | None:
        """A slab's memory goes away: what is to be revoked, if it was shown."""
        showing = self._showing.get((plain, slab.number))
        if showing is not None:
            showing.cancel()
        return (self.plain_exposures if plain else self.exposures).pop(slab.number, None)

    def stop_showing(self) -> None:
        """The data path is closed: nobody is waited for any more."""
        for showing in self._showing.values():
            showing.cancel()

    def _shown(self, place: tuple[bool, int], showing: asyncio.Task[Exposure]) -> None:
        del self._showing[place]
        if not showing.cancelled():
            showing.exception()  # told to those who wait; there may be none left
