"""The small plain-HTTP endpoint: /metrics, /healthz, /readyz, a page and what it shows.

GET only, read only: `/` is the page (`control.page`), `/overview.json` what it and `entresol top`
show.

Invariants owned here: whatever a client sends, memory per connection is bounded by the request
limit, time by the deadlines, and their number by `CONNECTIONS_MAX`, beyond which the oldest of the
address that has most gives way: nobody who keeps silent there hides the daemon's health. A flood of
requests has no more pages made than `control.rendered` allows. Every connection carries one request
and is closed. It listens on the address it is told, loopback by default, and after `close` no task,
socket or thread of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from entresol_daemon.control import page
from entresol_daemon.control.rendered import Rendered
from entresol_daemon.metrics import CONTENT_TYPE, Metrics
from entresol_proto.origins import Crowd, origin_of
from entresol_proto.threads import Pool

log = logging.getLogger("entresol.http")

REQUEST_BYTES_MAX = 8 * 1024  # request line and headers; a body is not read
CONNECTIONS_MAX = 32
REQUEST_DEADLINE_S = 5.0
REPLY_DEADLINE_S = 10.0
LINGER_S = 1.0
LINGER_READS_MAX = 64
BACKLOG = 16
BACKLOG_KEPT = 512  # of a socket that gathers whoever comes while no daemon runs

_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
# A browser may be led here under another name, which then could read what this one may
# (DNS rebinding): on loopback, these are given to who asks for a loopback address only. Machines
# that name none may have the metrics; a browser always names one.
_NOT_FOR_STRANGERS = ("/", "/overview.json", "/metrics")
_PLAIN = "text/plain; charset=utf-8"
_JSON = "application/json"
_HTML = "text/html; charset=utf-8"


class OverviewSource(Protocol):
    """What /overview.json shows (`entresol_daemon.overview.Overview`)."""

    def look(self) -> Any:
        """Read the shard; on the loop."""
        ...

    def render(self, looked: Any) -> bytes:
        """The document; in any thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Reply:
    code: int
    body: bytes
    content_type: str = _PLAIN
    headers: tuple[str, ...] = ()


class HttpServer:
    """Serves the endpoint on the running loop. `start`, then `close`.

    `reasons_not_ready` is called on the loop for each /readyz; no reasons means ready.
    """

    def __init__(
        self,
        metrics: Metrics,
        reasons_not_ready: Callable[[], Sequence[str]],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        request_deadline_s: float = REQUEST_DEADLINE_S,
        overview: OverviewSource | None = None,
        listening: socket.socket | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`listening` is used instead of a socket of its own; the server owns it."""
        self._metrics = metrics
        self._reasons_not_ready = reasons_not_ready
        self._host = host
        self._port = port
        self._request_deadline_s = request_deadline_s
        self._listening = listening
        self._server: asyncio.Server | None = None
        self._tasks: Crowd[asyncio.Task[None]] = Crowd(CONNECTIONS_MAX)
        self._renderer: Pool | None = None
        self._kept: list[Rendered] = []
        self._routes: dict[str, Callable[[], Awaitable[_Reply]]] = {
            "/metrics": self._get_kept(Rendered(self._render_metrics, now_ns), CONTENT_TYPE),
            "/healthz": self._get_health,
            "/readyz": self._get_readiness,
        }
        if overview is not None:
            made = Rendered(functools.partial(self._render_overview, overview), now_ns)
            self._routes["/overview.json"] = self._get_kept(made, _JSON)
            self._routes["/"] = functools.partial(self._get_page, page.load())

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._server is not None, "not started"
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Bind and serve. Raises: OSError when the address is taken."""
        assert self._server is None, "started twice"
        # Rendering takes milliseconds: a thread of our own keeps the loop free of it.
        place: dict[str, Any] = {"host": self._host, "port": self._port, "backlog": BACKLOG}
        if self._listening is not None:
            place = {"sock": self._listening, "backlog": BACKLOG_KEPT}
        self._server = await asyncio.start_server(self._accept, **place, limit=REQUEST_BYTES_MAX)
        self._renderer = Pool(1, "entresol-http")
        log.info("event=http_listening host=%s port=%d", self._host, self.port)

    async def close(self) -> None:
        """Stop listening, end open connections, join the thread. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()
        for kept in self._kept:
            await kept.close()
        if self._renderer is not None:
            self._renderer.close(drop=True)
            self._renderer = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _task: writer.transport.abort())
        address = writer.get_extra_info("peername")
        leaves = self._tasks.add(task, origin_of(address[0]) if address else "")
        if leaves is not None:
            leaves.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self._answer(reader)
            async with asyncio.timeout(REPLY_DEADLINE_S):
                writer.write(_encode(reply))
                writer.write_eof()
                await writer.drain()
                await _linger(reader)
        except (OSError, TimeoutError):
            pass  # the client went away, or does not read: nothing is owed to it
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> _Reply:
        try:
            async with asyncio.timeout(self._request_deadline_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return _Reply(408, b"the request did not arrive in time\n")
        except asyncio.LimitOverrunError:
            return _Reply(431, b"request line and headers are too long\n")
        except asyncio.IncompleteReadError:
            return _Reply(400, b"the request is cut short\n")
        asked = _parse(head)
        if isinstance(asked, _Reply):
            return asked
        path, host = asked
        named = bool(host) or path != "/metrics"
        strange = named and _is_loopback(self._host) and not _is_loopback(host)
        if strange and path in _NOT_FOR_STRANGERS:
            return _Reply(403, b"ask for it as localhost or 127.0.0.1\n")
        route = self._routes.get(path)
        if route is None:
            return _Reply(404, b"try /metrics, /healthz or /readyz\n")
        try:
            return await route()
        except Exception:  # a broken page must not look like a dead daemon
            log.exception("event=http_failed path=%s", path)
            return _Reply(500, b"internal error; the daemon's log has it\n")

    def _get_kept(self, kept: Rendered, content_type: str) -> Callable[[], Awaitable[_Reply]]:
        self._kept.append(kept)

        async def get() -> _Reply:
            return _Reply(200, await kept.get(), content_type)

        return get

    async def _render_metrics(self) -> bytes:
        assert self._renderer is not None
        self._metrics.refresh()
        return await self._renderer.run(self._metrics.render)

    async def _render_overview(self, overview: OverviewSource) -> bytes:
        assert self._renderer is not None
        return await self._renderer.run(overview.render, overview.look())

    async def _get_page(self, found: page.Page) -> _Reply:
        return _Reply(200, found.body, _HTML, found.headers)

    async def _get_health(self) -> _Reply:
        return _Reply(200, b"alive\n")

    async def _get_readiness(self) -> _Reply:
        reasons = list(self._reasons_not_ready())
        body = json.dumps({"ready": not reasons, "reasons": reasons}).encode() + b"\n"
        return _Reply(503 if reasons else 200, body, _JSON)


async def _linger(reader: asyncio.StreamReader) -> None:
    """Take in what is still on its way: closing over unread bytes would reset the connection and
    could cost the client its reply. Bounded in bytes and time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            for _ in range(LINGER_READS_MAX):
                if not await reader.read(REQUEST_BYTES_MAX):
                    return


def _parse(head: bytes) -> tuple[str, str] | _Reply:
    """Path and host of a GET, or the refusal."""
    line, _, headers = head.partition(b"\r\n")
    parts = line.split(b" ")
    if len(parts) != 3 or not all(parts) or not line.isascii():
        return _Reply(400, b"malformed request line\n")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        return _Reply(505, b"HTTP/1.1 or HTTP/1.0\n")
    if method != b"GET":
        return _Reply(405, b"only GET\n")
    if not target.startswith(b"/"):
        return _Reply(400, b"malformed request target\n")
    host: str | None = None
    for header in headers.split(b"\r\n"):
        name, colon, value = header.partition(b":")
        if header and (not colon or not name or name != name.strip()):
            return _Reply(400, b"malformed header\n")
        if name.lower() == b"host":
            if host is not None:  # whoever stands between us may believe the other one
                return _Reply(400, b"more than one host\n")
            host = value.decode("latin-1").strip()
    return target.decode("ascii").partition("?")[0], host or ""


def _is_loopback(host: str) -> bool:
    """Whether `host`, with or without a port, is this machine to itself."""
    name = host.lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _encode(reply: _Reply) -> bytes:
    head = [
        f"HTTP/1.1 {reply.code} {_REASONS[reply.code]}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *reply.headers,
    ]
    if reply.code == 405:
        head.append("Allow: GET")
    return ("\r\n".join(head) + "\r\n\r\n").encode("ascii") + reply.body
