"""Before a service sees a call: whose it is, how many that one has running, and a whole request.

gRPC bounds the calls of a server, not those of one caller: calls whose request never came, or that
watch for ever, would be a way for any tenant to have all of them. And without a look at the bytes
it answers UNKNOWN with the name of a Python exception to what does not parse, and logs a traceback
for every such request, which is a way to fill the log.

Invariants: no tenant has more calls running than are free (dynamic thresholds, as everything that
tenants hold: `core.accounts`); a call without its request ends at its deadline; bytes that do not
parse reach no service, the caller gets BAD_REQUEST like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from entresol_daemon.control.grpc_services import Identify, refuse
from entresol_proto.ids import TenantName
from entresol_proto.status import EntresolError, QuotaError, Status

Turn = Callable[[TenantName], Awaitable[None]]
"""Returns when the event loop has time for a call of this tenant. Raises: QuotaError."""

_STRANGERS = TenantName("")  # certificates that name no tenant: only their health checks are served


class _NoMessage:
    """In the place of a request that did not parse."""


_NO_MESSAGE = _NoMessage()


class StrictRequests(grpc.aio.ServerInterceptor):  # type: ignore[misc, type-arg, unused-ignore]
    """See the module. The operator's calls, on the unix socket, are not counted.

    To gRPC every call is one with a stream of requests, of which the first is taken: only then is
    it heard of before its request is there.
    """

    def __init__(
        self, identify: Identify, turn: Turn, *, calls_max: int, request_deadline_s: float
    ) -> None:
        self._identify = identify
        self._turn = turn
        self._calls_max = calls_max
        self._request_deadline_s = request_deadline_s
        self._running: Counter[TenantName] = Counter()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        method = str(details.method).rpartition("/")[2]
        parse = handler.request_deserializer

        def deserialize(raw: bytes) -> Any:
            try:
                return parse(raw)
            except DecodeError:
                return _NO_MESSAGE

        if handler.response_streaming and inspect.iscoroutinefunction(handler.unary_stream):
            return grpc.stream_stream_rpc_method_handler(  # it writes its replies by itself
                self._unary(handler.unary_stream, method), deserialize,
                handler.response_serializer,
            )  # fmt: skip
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method), deserialize,
                handler.response_serializer,
            )  # fmt: skip
        return grpc.stream_unary_rpc_method_handler(
            self._unary(handler.unary_unary, method), deserialize, handler.response_serializer
        )

    def _unary(
        self, serve: Callable[[Any, Any], Awaitable[Any]], method: str
    ) -> Callable[..., Any]:
        async def call(requests: AsyncIterator[Any], context: Any) -> Any:
            with contextlib.ExitStack() as counted:
                request = await self._begin(requests, context, method, counted)
                return await serve(request, context)

        return call

    def _stream(self, serve: Callable[[Any, Any], Any], method: str) -> Callable[..., Any]:
        async def call(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
            with contextlib.ExitStack() as counted:
                request = await self._begin(requests, context, method, counted)
                async with contextlib.aclosing(serve(request, context)) as replies:
                    async for reply in replies:
                        yield reply

        return call

    async def _begin(
        self, requests: AsyncIterator[Any], context: Any, method: str,
        counted: contextlib.ExitStack,
    ) -> Any:  # fmt: skip
        """The request of a call, which counts from here on. Ends the call when there is none."""
        try:
            caller = self._caller(context)
            counted.enter_context(self._count(caller))
            request = await self._request(requests, method)
            if caller:
                await self._turn(caller)
            return request
        except Exception as error:
            await refuse(context, error, method)
            raise AssertionError("abort returned") from error

    def _caller(self, context: Any) -> TenantName | None:
        """None for the operator. Who may not call at all is refused by the service."""
        try:
            return self._identify(context)
        except EntresolError:
            return _STRANGERS

    @contextlib.contextmanager
    def _count(self, caller: TenantName | None) -> Iterator[None]:
        if caller is None:
            yield
            return
        mine, free = self._running[caller], self._calls_max - self._running.total()
        if mine and mine + 1 > free:
            raise QuotaError(
                f"{mine} calls are running", hint="end some of them", status=Status.BUSY
            )
        self._running[caller] += 1
        try:
            yield
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]

    async def _request(self, requests: AsyncIterator[Any], method: str) -> Any:
        """Raises: EntresolError (DEADLINE, BAD_REQUEST)."""
        try:
            async with asyncio.timeout(self._request_deadline_s):
                request = await anext(requests, _NO_MESSAGE)
        except TimeoutError:
            raise EntresolError("the request did not come", status=Status.DEADLINE) from None
        if request is _NO_MESSAGE:
            raise EntresolError(f"not a request of {method}", status=Status.BAD_REQUEST)
        return request
