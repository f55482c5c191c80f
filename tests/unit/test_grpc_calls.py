"""Calls of one tenant leave room for those of others, and end when nothing comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from test_grpc import A, describe, read, refusal, running, store

from entresol_proto.ids import TenantName
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg


async def never_asked(channel: grpc.aio.Channel, count: int) -> list[grpc.aio.Call]:
    """Calls whose headers are there and whose request is not."""
    calls = []
    for _ in range(count):
        calls.append(channel.stream_unary("/entresol.v1.Describe/Describe")())
        await calls[-1].wait_for_connection()
    return calls


async def watching_health(channel: grpc.aio.Channel, count: int) -> list[grpc.aio.Call]:
    calls = []
    for _ in range(count):
        calls.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await asyncio.wait_for(calls[-1].read(), 10)
    return calls


@pytest.mark.parametrize("begin", [never_asked, watching_health])
async def test_a_tenant_that_ends_no_call_keeps_nobody_out(tmp_path, begin):
    """The calls of a server have a bound: one tenant had all of them, and the others none."""
    async with (
        running(tmp_path, calls_max=8) as pod,
        pod.dial(pod.tenant("a")) as channel,
        pod.dial(pod.tenant("b")) as other,
    ):
        calls = await begin(channel, 8)
        async with asyncio.timeout(10):
            while sum(call.done() for call in calls) < 4:  # the rest of them
                await asyncio.sleep(0.01)
        assert (await describe(other)).tenant == "b"
        code, _ = await refusal(describe(channel))
        assert code is grpc.StatusCode.UNAVAILABLE
        for call in calls:
            call.cancel()
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await describe(channel)).tenant == "a"
                    break
                await asyncio.sleep(0.05)


async def test_a_call_without_its_request_ends(tmp_path):
    async with running(tmp_path, request_deadline_s=0.1) as pod, pod.dial(pod.tenant("a")) as one:
        (call,) = await never_asked(one, 1)
        code, _ = await asyncio.wait_for(refusal(call), 10)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        ended = one.stream_unary("/entresol.v1.Describe/Describe")()
        await ended.done_writing()
        code, _ = await asyncio.wait_for(refusal(ended), 10)
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_takes_a_turn_of_its_tenant(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        turns = []
        turn = pod.backend.event_turn

        async def noted(tenant: TenantName, events: int) -> None:
            turns.append(tenant)
            await turn(tenant, events)

        pod.backend.event_turn = noted
        await describe(channel)
        assert turns == ["a"]


async def test_connections_have_a_bound_and_make_room_again(tmp_path):
    """Descriptors are the process's: idle connections could keep hosts from its other ports."""
    loop = asyncio.get_running_loop()
    async with running(tmp_path, connections_max=3, handshake_deadline_s=60) as pod:
        silent = [socket.create_connection(("localhost", pod.server.port)) for _ in range(6)]
        for one in silent:
            one.setblocking(False)
        ends = [asyncio.ensure_future(loop.sock_recv(one, 1)) for one in silent]
        async with asyncio.timeout(10):
            while sum(end.done() for end in ends) < 3:
                await asyncio.sleep(0.01)
        assert sum(end.done() for end in ends) == 3, "those beyond the bound, and no others"
        for one, end in zip(silent, ends, strict=True):
            end.cancel()
            one.close()
        await asyncio.wait(ends)
        async with pod.dial(pod.tenant("a")) as channel:
            reply = pbg.DescribeStub(channel).Describe(pb.DescribeRequest(), wait_for_ready=True)
            assert (await asyncio.wait_for(reply, 10)).tenant == "a"


async def test_a_connection_without_calls_ends(tmp_path):
    async with (
        running(tmp_path, connection_idle_max_s=0.2) as pod,
        pod.dial(pod.tenant("a")) as channel,
    ):
        await describe(channel)
        async with asyncio.timeout(10):
            while channel.get_state() is grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.05)
        assert (await describe(channel)).tenant == "a", "and comes back with the next one"


async def test_the_operators_connection_has_no_maximum_age(tmp_path):
    """It has no certificate, and what happened while it came back would be lost: nothing is
    replayed of all tenants."""
    async with (
        running(tmp_path, connection_age_max_s=0.3, connection_age_grace_s=0.3) as pod,
        pod.operator() as channel,
        pod.dial(pod.tenant("a")) as aging,
    ):
        watch = pbg.EventsStub(channel).Watch(pb.WatchRequest())
        await read(watch, 1)
        for _ in range(2):  # one that has an age, as long: how long that is differs by a tenth
            old = pbg.EventsStub(aging).Watch(pb.WatchRequest(), wait_for_ready=True)
            async with asyncio.timeout(10):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while await old.read() is not grpc.aio.EOF:
                        pass
        store(pod.backend, A, 1)
        (reply,) = await read(watch, 1)
        assert [event.seq for event in reply.events] == [1]
