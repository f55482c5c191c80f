"""The web page is one file that loads nothing, and its headers let nothing else run."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from typing import Any

import pytest

from entresol_daemon.control import page
from entresol_daemon.control.http import HttpServer
from entresol_daemon.control.rendered import AT_ONCE_MAX, PER_SECOND, Rendered
from entresol_daemon.metrics import Metrics

HTML = page.FILE.read_text(encoding="utf-8")


class Source:
    """An overview without a shard."""

    def look(self) -> Any:
        return {"looked": 1}

    def render(self, looked: Any) -> bytes:
        assert looked == {"looked": 1}
        return b'{"format":1}'


async def ask(
    server: HttpServer, path: str, method: str = "GET", host: str = "localhost"
) -> tuple[int, str, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


def test_the_page_is_one_file_that_loads_nothing() -> None:
    assert not re.search(r"""(?:src|href|action)\s*=\s*["'](?!data:,["'])""", HTML)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", HTML)
    assert re.findall(r"""fetch\(["']([^"']*)""", HTML) == ["overview.json"]


def test_the_page_writes_text_never_markup() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "javascript:", "cookie", "localStorage"):  # fmt: skip
        assert word not in HTML, word
    markup = HTML.partition("<script>")[0] + HTML.rpartition("</script>")[2]
    assert not re.search(r"\son\w+\s*=|\sstyle\s*=", markup), "the policy would refuse these"


def test_the_policy_names_what_may_run() -> None:
    headers = dict(line.split(": ", 1) for line in page.load().headers)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        inside = HTML.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


async def test_page_and_overview_are_served_to_readers_only() -> None:
    server = HttpServer(Metrics(), list, overview=Source())
    await server.start()
    try:
        code, head, body = await ask(server, "/")
        assert (code, body.decode()) == (200, HTML)
        assert "Content-Type: text/html" in head
        assert "Content-Security-Policy: default-src 'none'" in head
        code, head, body = await ask(server, "/overview.json?x=1")
        assert (code, body) == (200, b'{"format":1}')
        assert "Access-Control-Allow-Origin" not in head, "no other site may read it"
        assert (await ask(server, "/overview.json", "POST"))[0] == 405
        assert (await ask(server, "/page.html"))[0] == 404
    finally:
        await server.close()


async def test_without_a_shard_there_is_no_page() -> None:
    server = HttpServer(Metrics(), list)
    await server.start()
    try:
        assert [(await ask(server, path))[0] for path in ("/", "/overview.json")] == [404, 404]
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200), ("LocalHost:7443", 200), ("127.0.0.1:7443", 200), ("127.9.9.9", 200),
        ("[::1]:7443", 200), ("::1", 200),
        ("evil.example", 403), ("localhost.evil.example:7443", 403),
        ("127.0.0.1.evil.example", 403), ("10.0.0.1", 403), ("[::2]:80", 403),
        ("", 403), ("[", 403),
    ],
)  # fmt: skip
async def test_another_name_for_loopback_reads_nothing(host: str, code: int) -> None:
    """DNS rebinding: a site's own name comes to mean 127.0.0.1, and its script asks us."""
    server = HttpServer(Metrics(), list, overview=Source())
    await server.start()
    try:
        assert (await ask(server, "/overview.json", host=host))[0] == code
        assert (await ask(server, "/", host=host))[0] == code
        wanted = code if host else 200
        assert (await ask(server, "/metrics", host=host))[0] == wanted, "machines may name none"
        assert (await ask(server, "/healthz", host=host))[0] == 200, "says nothing of tenants"
    finally:
        await server.close()


async def test_off_loopback_any_name_will_do() -> None:
    server = HttpServer(Metrics(), list, overview=Source())
    await server.start()
    server._host = "10.0.0.1"  # as if it had been bound there
    try:
        for path in ("/", "/overview.json", "/metrics"):
            assert (await ask(server, path, host="kv-1.pod"))[0] == 200
    finally:
        await server.close()


async def test_two_hosts_are_none() -> None:
    """A proxy that looks at the first, and we at the last, would let a stranger's name through."""
    server = HttpServer(Metrics(), list, overview=Source())
    await server.start()
    try:
        for first, second in (("evil.example", "localhost"), ("", "localhost"), ("a", "a")):
            got = await ask(server, "/healthz", host=f"{first}\r\nhost: {second}")
            assert (got[0], got[2]) == (400, b"more than one host\n")
    finally:
        await server.close()


# A flood of readers -------------------------------------------------------------------------------


class Clock:
    now_ns = 10**15

    def __call__(self) -> int:
        return self.now_ns


async def test_a_flood_of_readers_has_few_pages_made() -> None:
    made, clock = 0, Clock()

    async def render() -> bytes:
        nonlocal made
        made += 1
        return str(made).encode()

    kept = Rendered(render, clock)
    got = [await kept.get() for _ in range(1_000)]
    assert got[: AT_ONCE_MAX + 1] == [str(n + 1).encode() for n in range(AT_ONCE_MAX)] + [got[-1]]
    assert made == AT_ONCE_MAX, "who asks now and then gets a new one, a flood does not"
    for _ in range(10):
        clock.now_ns += 10**9 // PER_SECOND
        for _ in range(100):
            await kept.get()
    assert made == AT_ONCE_MAX + 10
    clock.now_ns += 3_600 * 10**9
    for _ in range(100):
        await kept.get()
    assert made == 2 * AT_ONCE_MAX + 10
    await kept.close()


async def test_all_who_wait_share_one_page_and_who_leaves_does_not_end_it() -> None:
    go, made = asyncio.Event(), 0

    async def render() -> bytes:
        nonlocal made
        made += 1
        await go.wait()
        return b"page"

    kept = Rendered(render, Clock())
    waiting = [asyncio.ensure_future(kept.get()) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    go.set()
    assert await asyncio.gather(*waiting[1:]) == [b"page"] * 19
    assert made == 1
    await kept.close()


async def test_a_page_that_breaks_is_made_again() -> None:
    answers: list[Exception | bytes] = [ValueError("broken"), b"whole"]

    async def render() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    kept = Rendered(render, Clock())
    with pytest.raises(ValueError, match="broken"):
        await kept.get()
    assert await kept.get() == b"whole"
    await kept.close()


async def test_the_endpoint_has_its_pages_made_so() -> None:
    looks = 0

    class Counted(Source):
        def look(self) -> Any:
            nonlocal looks
            looks += 1
            return super().look()

    server = HttpServer(Metrics(), list, overview=Counted(), now_ns=Clock())
    await server.start()
    try:
        for _ in range(3 * AT_ONCE_MAX):
            assert (await ask(server, "/overview.json"))[2] == b'{"format":1}'
        assert looks == AT_ONCE_MAX
    finally:
        await server.close()
