"""Bytes that are no message get the answer of any bad request, from a real daemon's sockets."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest
from harness import running_daemon

pytestmark = pytest.mark.daemon


async def refused(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    reply = call.read() if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reply
    return caught.value


async def test_what_is_no_message_is_a_bad_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by fuzzing (target grpc, seed 1): UNKNOWN with the name of a Python exception, and a
    traceback in the log for each."""
    async with running_daemon(tmp_path / "d") as running:
        socket = running.client_config().shards[0].admin_socket
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            with caplog.at_level(logging.WARNING):
                for call in (
                    channel.unary_unary("/entresol.v1.Admin/TenantAdd")(b"\xff\xff"),
                    channel.unary_stream("/entresol.v1.Events/Watch")(b"\xff\xff"),
                    channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff"),
                ):
                    error = await refused(call)
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert dict(error.trailing_metadata())["entresol-status"] == "bad_request"
                    assert "Decode" not in (error.details() or "")
            assert "Traceback" not in caplog.text
            assert not [record for record in caplog.records if record.exc_info]
            reply = await channel.unary_unary("/entresol.v1.Admin/Stat")(b"")
            assert reply
