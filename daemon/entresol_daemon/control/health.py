"""grpc.health.v1: what orchestrators ask.

Not the service that grpcio-health-checking brings: it writes to a watcher while it holds the lock
that a change of status needs: one who does not read keeps the shard from saying that it stops.

Invariant: to change a status waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Reply = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Statuses by service; see the module. Used on one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, service: str, *, serving: bool) -> None:
        """What is answered from now on. Nothing changes once closed."""
        if not self._closed:
            self._statuses[service] = _Reply.SERVING if serving else _Reply.NOT_SERVING
            self._tell()

    def close(self) -> None:
        """Say NOT_SERVING, and end all watches."""
        self._statuses = dict.fromkeys(self._statuses, _Reply.NOT_SERVING)
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Any) -> Any:
        """The status of a service; NOT_FOUND for one that there is not."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Reply(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """The status of a service, and again whenever it is another."""
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _Reply.SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield _Reply(status=status)
            if self._closed:
                return
            if changed is self._changed:
                await changed.wait()
