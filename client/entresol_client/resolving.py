"""Names of shards and of their data paths to addresses, on threads of our own.

A resolver may take half a minute, and neither a client's end nor that of the interpreter waits for
it: uvloop's would, as it asks on threads whose answers its loop must hear before it can be closed.

Invariant: per loop at most one thread asks for one name, however often it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import weakref

THREAD_NAME = "entresol-resolve"

# Each touched on its loop only.
_Asked = dict[tuple[str, int], "asyncio.Future[list[str]]"]
_asked: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Asked]
_asked = weakref.WeakKeyDictionary()


async def addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which to try them; of an address itself.

    Raises: OSError when it has none or the resolver fails, ValueError (UnicodeError, but for a NUL)
    when it is no name.
    """
    if _is_address(host):
        return [host]
    loop = asyncio.get_running_loop()
    asked = _asked.setdefault(loop, {})
    answer = asked.get((host, port))
    if answer is None:
        answer = loop.create_future()
        _ask(loop, host, port, answer)
        asked[host, port] = answer
        answer.add_done_callback(lambda _: asked.pop((host, port), None))
        answer.add_done_callback(_seen)
    return await asyncio.shield(answer)  # others may wait for it


def _ask(
    loop: asyncio.AbstractEventLoop, host: str, port: int, answer: asyncio.Future[list[str]]
) -> None:
    """Raises: OSError when there is no thread for it."""

    def settle(found: list[str] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def work() -> None:
        found: list[str] | Exception
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(row[4][0]) for row in rows))
        except Exception as error:
            found = error
        try:
            loop.call_soon_threadsafe(settle, found)
        except RuntimeError:  # nobody waits any more: the loop is closed
            _asked.pop(loop, None)

    try:
        threading.Thread(target=work, name=THREAD_NAME, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"no thread to resolve {host!r}: {error}") from None


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, host)
            return True
    return False


def _seen(answer: asyncio.Future[list[str]]) -> None:
    """Also where nobody waits any more."""
    if not answer.cancelled():
        answer.exception()
