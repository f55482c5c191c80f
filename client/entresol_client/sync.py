"""The client without asyncio: the same core on a private thread with uvloop.

Invariant: a call that returns, raises or is interrupted has ended on the loop first, so nobody
writes into its buffers any more. Safe to use from several threads at once. Not usable after fork:
the thread does not exist in the child, which gets an error instead of a hang. A signal handler may
call and close a client that it interrupts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import ClientConfig
from entresol_client.loopthread import LoopThread
from entresol_client.results import (
    AckLevel,
    CountResult,
    ExistsResult,
    Explanation,
    GetResult,
    OpenPlace,
    PutBlock,
    PutResult,
    QuoteResult,
    ShardReport,
    StageResult,
)
from entresol_proto.ids import NamespaceDescriptor


class Client:
    """`AsyncClient` for callers without an event loop.

        with Client(ClientConfig.find()) as client:
            result = client.namespace(descriptor).get_into(keys, buffers)

    Raises: ConfigError, IdentityError. Never for an outage.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        self._open = False
        found = config or ClientConfig.find()
        self._thread = LoopThread()
        self._client: AsyncClient
        try:
            self._thread.call(lambda: self._begin(found))
        except BaseException:
            self._thread.stop()
            raise
        self._open = True

    async def _begin(self, config: ClientConfig) -> None:
        """On the loop, so that it is known there before an interrupt may come in between."""
        opened = self._client = await AsyncClient.open(config)

        async def end() -> None:  # which must not hold this: nobody would hear that it is forgotten
            await opened.close()

        self._thread.at_exit = end

    def namespace(self, descriptor: NamespaceDescriptor) -> SyncNamespace:
        """See `AsyncClient.namespace`."""
        return SyncNamespace(
            self._thread, self._thread.call(lambda: self._client.namespace(descriptor))
        )

    def shards(self) -> list[ShardReport]:
        """See `AsyncClient.shards`."""

        async def ask() -> list[ShardReport]:
            return self._client.shards()

        return self._thread.call(ask)

    def stats(self) -> dict[str, Any]:
        """See `AsyncClient.stats`."""

        async def ask() -> dict[str, Any]:
            return self._client.stats()

        return self._thread.call(ask)

    def close(self) -> None:
        """End all sessions and threads. Idempotent, also after fork (the child's copy is inert)."""
        self._open = False
        self._thread.stop()  # which closes the client first

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._thread.forked:
            warnings.warn("entresol Client was not closed", ResourceWarning, stacklevel=1)


class SyncNamespace:
    """`Namespace` for callers without an event loop: same arguments, results and errors."""

    def __init__(self, thread: LoopThread, namespace: Namespace) -> None:
        self.descriptor = namespace.descriptor
        self._thread = thread
        self._ns = namespace

    def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        *,
        deadline_ns: int | None = None,
        prefix: bool = True,
        open_at: OpenPlace = "host",
    ) -> GetResult:
        """See `Namespace.get_into`."""
        return self._thread.call(
            lambda: self._ns.get_into(
                keys, buffers, deadline_ns=deadline_ns, prefix=prefix, open_at=open_at
            )
        )

    def put(
        self,
        items: Sequence[PutBlock],
        *,
        ack: AckLevel = "accepted",
        deadline_ns: int | None = None,
    ) -> PutResult:
        """See `Namespace.put`."""
        return self._thread.call(lambda: self._ns.put(items, ack=ack, deadline_ns=deadline_ns))

    def exists(self, keys: Sequence[bytes], *, deadline_ns: int | None = None) -> ExistsResult:
        """See `Namespace.exists`."""
        return self._thread.call(lambda: self._ns.exists(keys, deadline_ns=deadline_ns))

    def quote(
        self,
        keys: Sequence[bytes],
        *,
        deadline_ns: int | None = None,
        prefix: bool = True,
        open_at: OpenPlace = "host",
    ) -> QuoteResult:
        """See `Namespace.quote`."""
        return self._thread.call(
            lambda: self._ns.quote(keys, deadline_ns=deadline_ns, prefix=prefix, open_at=open_at)
        )

    def stage(
        self,
        keys: Sequence[bytes],
        *,
        hold_ns: int = 10_000_000_000,
        open_at: OpenPlace = "host",
        deadline_ns: int | None = None,
    ) -> StageResult:
        """See `Namespace.stage`."""
        return self._thread.call(
            lambda: self._ns.stage(keys, hold_ns=hold_ns, open_at=open_at, deadline_ns=deadline_ns)
        )

    def touch(self, keys: Sequence[bytes], *, deadline_ns: int | None = None) -> CountResult:
        """See `Namespace.touch`."""
        return self._thread.call(lambda: self._ns.touch(keys, deadline_ns=deadline_ns))

    def forget(self, keys: Sequence[bytes], *, deadline_ns: int | None = None) -> CountResult:
        """See `Namespace.forget`."""
        return self._thread.call(lambda: self._ns.forget(keys, deadline_ns=deadline_ns))

    def explain(
        self, keys: Sequence[bytes], *, deadline_ns: int | None = None
    ) -> list[Explanation]:
        """See `Namespace.explain`."""
        return self._thread.call(lambda: self._ns.explain(keys, deadline_ns=deadline_ns))
