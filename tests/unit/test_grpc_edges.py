"""The gRPC surface at its edges: sessions that were resumed, long lists, long refusals."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import certs
import grpc
import pytest

from entresol_daemon.control import grpc_convert, grpc_services
from entresol_daemon.control.admin import TenantRecord
from entresol_proto.ids import TenantName
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg
from tests.unit.test_grpc import Pod, refusal, running


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One of HTTP/2 (RFC 9113, 4.1)."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _describe(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[bool, bytes, ssl.SSLSession | None]:
    """Describe, by hand: gRPC's own client resumes no sessions. Whether this one was, what came
    back, and the session."""
    fields = {
        b":method": b"POST", b":scheme": b"https", b":path": b"/entresol.v1.Describe/Describe",
        b":authority": b"localhost", b"content-type": b"application/grpc", b"te": b"trailers",
    }  # fmt: skip
    # Each as a literal without indexing (RFC 7541, 6.2.2).
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    with (
        socket.create_connection(("127.0.0.1", port), 10) as raw,
        context.wrap_socket(raw, server_hostname="localhost", session=session) as link,
    ):
        link.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0) + _frame(1, 4, 1, headers)
            + _frame(0, 1, 1, bytes(5))
        )  # fmt: skip
        said = b""
        while b"grpc-status" not in said and (more := link.recv(65_536)):
            said += more
        return bool(link.session_reused), said, link.session


async def test_a_resumed_session_ends_with_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as pod:
        context = _resuming(pod)
        resumed, said, session = await asyncio.to_thread(_describe, pod.server.port, context, None)
        assert (resumed, b"grpc-status\x010" in said) == (False, True)
        later = SimpleNamespace(time=lambda: time.time() + 2 * 86_400)
        monkeypatch.setattr(grpc_services, "time", later, raising=False)
        resumed, said, _ = await asyncio.to_thread(_describe, pod.server.port, context, session)
        assert resumed
        assert b"the certificate expired" in said
        assert b"grpc-status\x017" in said


def _resuming(pod: Pod) -> ssl.SSLContext:
    context = certs.client_context(pod.tenant("a"), pod.ca)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    return context


async def test_a_long_list_of_tenants_lets_others_have_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, made, message = 0, list[int](), grpc_convert.tenant_message

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def making(tenant: TenantRecord) -> pb.TenantInfo:
        made.append(turn)
        return message(tenant)

    monkeypatch.setattr(grpc_convert, "tenant_message", making)
    async with running(tmp_path) as pod, pod.operator() as channel:
        names = [TenantName(f"t{number:03}") for number in range(200)]
        pod.backend.table = {name: TenantRecord(name) for name in names}
        counting = asyncio.create_task(count())
        listed = await pbg.AdminStub(channel).TenantList(pb.TenantListRequest())
        counting.cancel()
    assert [tenant.name for tenant in listed.tenants] == names
    assert max(Counter(made).values()) <= 16


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600"])
async def test_a_refusal_that_quotes_something_long_is_still_told(
    tmp_path: Path, letter: str
) -> None:
    async with running(tmp_path) as pod, pod.operator() as channel:
        name = letter * (60_000 // len(letter.encode()))
        code, details = await refusal(
            pbg.AdminStub(channel).TenantAdd(pb.TenantAddRequest(name=name))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("tenant name ")
        assert details.endswith("begin and end with a letter or digit)")
