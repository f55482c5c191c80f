"""grpc.health.v1: what orchestrators ask.

Not the service that grpcio-health-checking brings: it writes to a watcher while it holds the lock
that a change of status needs: one who does not read keeps the shard from saying that it stops.

Invariants: what is answered is read from the shard at that moment, as /readyz is; to tell of a
change waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

WATCH_S = 1.0  # so often a watch looks by itself

_Reply = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """One status for all `services`, which `is_serving` tells; on one event loop."""

    def __init__(self, services: Collection[str], is_serving: Callable[[], bool]) -> None:
        self._services = frozenset(services)
        self._is_serving = is_serving
        self._changed = asyncio.Event()
        self._closed = False

    def tell(self) -> None:
        """It may have changed: watches look now instead of in WATCH_S."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """Say NOT_SERVING, and end all watches."""
        self._closed = True
        self.tell()

    def _status(self, service: str) -> Any:
        """None where there is no such service."""
        if service not in self._services:
            return None
        serving = not self._closed and self._is_serving()
        return _Reply.SERVING if serving else _Reply.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        """The status of a service; NOT_FOUND for one that there is not."""
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Reply(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """The status of a service, and again whenever it is another."""
        told = None
        while True:
            changed = self._changed
            found = self._status(request.service)
            status = _Reply.SERVICE_UNKNOWN if found is None else found
            if status != told:
                told = status
                yield _Reply(status=status)
            if self._closed:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await changed.wait()
