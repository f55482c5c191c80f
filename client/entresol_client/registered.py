"""Memory of the caller that reads land in: an engine's host pool, named once instead of per read.

Invariant: while a registration is open the fabric refers to the memory; once `close` returned, and
the reads into it are over, nothing does, so that the caller may unmap it.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from entresol_client.buffers import UsageError, view_of
from entresol_proto.fabric.base import Endpoint, RegisteringEndpoint, Registration
from entresol_proto.status import FabricError

log = logging.getLogger("entresol.client")


class RegisteredMemory:
    """One piece of the caller's memory and its registrations, one per session that gains by it.

    Only RDMA does, and only for what lands there as it is: blocks that the daemon opened. Every
    other way goes through staging memory, which is registered anyway. Belongs to the event loop of
    the client that made it.
    """

    def __init__(self, buffer: Any) -> None:
        """`buffer` is writable, C-contiguous memory of any length, see `buffers.as_view`.

        Raises: UsageError for anything else.
        """
        view = view_of(buffer)
        if view.readonly or view.nbytes == 0:
            raise UsageError("memory to register must be writable, contiguous and not empty")
        self._view: memoryview | None = view
        self._open: list[tuple[Endpoint, Registration]] = []

    @property
    def closed(self) -> bool:
        return self._view is None

    def show(self, endpoint: Endpoint | None) -> None:
        """Tell a new session's data path. A refusal costs speed, nothing else."""
        self._open = [pair for pair in self._open if not pair[0].closed]
        if self._view is None or endpoint is None or endpoint.closed:
            return
        if endpoint.capabilities.registers:
            registering = cast(RegisteringEndpoint, endpoint)
            try:
                self._open.append((endpoint, registering.register(self._view)))
            except FabricError as error:
                log.warning("event=memory_not_registered reason=%s", error)

    def close(self) -> None:
        """Give the memory back; end reads into it first. Idempotent."""
        pairs, self._open, view, self._view = self._open, [], self._view, None
        for _, registration in pairs:
            registration.close()
        if view is not None:
            try:
                view.release()
            except BufferError:  # a read into it is still under way, against our contract
                log.error("event=memory_in_use where=unregister")
