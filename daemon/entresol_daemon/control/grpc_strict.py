"""What is no message at all gets the same kind of answer as any other bad request.

Without this, gRPC answers UNKNOWN with the name of a Python exception, and logs a traceback for
every such request, which is a way for any tenant to fill the log.

Invariant: bytes that do not parse reach no service; the caller gets BAD_REQUEST like any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from entresol_daemon.control.grpc_services import refuse
from entresol_proto.status import EntresolError, Status


class _NoMessage:
    """In the place of a request that did not parse."""


_NO_MESSAGE = _NoMessage()


class StrictRequests(grpc.aio.ServerInterceptor):  # type: ignore[misc, type-arg, unused-ignore]
    """Answers what does not parse, before the service."""

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

        if handler.response_streaming:
            return handler._replace(
                request_deserializer=deserialize,
                unary_stream=_stream(handler.unary_stream, method),
            )
        return handler._replace(
            request_deserializer=deserialize, unary_unary=_unary(handler.unary_unary, method)
        )


async def _no_message(context: Any, method: str) -> None:
    await refuse(
        context,
        EntresolError(f"not a request of {method}", status=Status.BAD_REQUEST),
        method,
    )


def _unary(serve: Callable[[Any, Any], Awaitable[Any]], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        if request is _NO_MESSAGE:
            await _no_message(context, method)
        return await serve(request, context)

    return call


def _stream(serve: Callable[[Any, Any], Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        if request is _NO_MESSAGE:
            await _no_message(context, method)
            return
        async with contextlib.aclosing(serve(request, context)) as replies:
            async for reply in replies:
                yield reply

    return call
