"""shm peers that leave unanswered what is exposed to them: its descriptors do not gather."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest
import uvloop
from shm_peer import raw_session, run

from entresol_proto import limits
from entresol_proto.fabric import shmlink
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.shmlink import Kind, Message
from entresol_proto.status import FabricError, Status


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


@pytest.mark.parametrize("answers_late", [True, False])
def test_a_peer_that_answers_no_exposure_is_cut_off(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_late: bool
) -> None:
    """What it does not receive, its descriptors with it, waits in the kernel and then in a queue of
    the daemon's own: sessions that never looked had all files that the daemon may have open."""
    monkeypatch.setattr(limits, "EXPOSE_DEADLINE_NS", 1_000_000)

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            with MemfdBuffer(4_096) as buffer:
                buffer.seal_for_readers()
                for turn in range(2 * limits.SHM_UNANSWERED_MAX):
                    assert not endpoint.closed, turn
                    with pytest.raises(FabricError) as caught:
                        await endpoint.expose(buffer)
                    assert caught.value.status is Status.DEADLINE
                    if answers_late:
                        packet, fds, _, _ = socket.recv_fds(peer.sock, 100, 4)
                        os.close(fds[0])
                        rkey = shmlink.parse(packet, list(fds)).rkey
                        assert (await peer.hear()).kind is Kind.REVOKE
                        peer.say(Message(Kind.EXPOSED, rkey).encode())
                        peer.say(Message(Kind.REVOKED, rkey).encode())
                        await asyncio.sleep(0.005)
                    elif turn == limits.SHM_UNANSWERED_MAX:
                        break
            assert endpoint.closed is not answers_late

    run(runner, scenario())


def test_without_a_descriptor_for_what_waits_the_session_ends(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, _):
            with MemfdBuffer(4_096) as buffer:
                buffer.seal_for_readers()
                assert endpoint._link is not None
                while not endpoint._link._queue:  # until the kernel takes no more
                    endpoint._link.send(Message(Kind.REVOKED, 1).encode())

                def none_left(fd: int) -> int:
                    raise OSError(errno.EMFILE, "Too many open files")

                monkeypatch.setattr(os, "dup", none_left)
                with pytest.raises(FabricError) as caught:
                    await endpoint.expose(buffer)
                assert caught.value.status is Status.DISCONNECTED
            assert endpoint.closed

    run(runner, scenario())


@pytest.mark.parametrize("answers", [True, False])
def test_exposures_that_nobody_waits_for_count_from_their_deadline_on(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """A slab that is given back while a host has not answered yet cancels its exposure: those were
    not counted, and each kept its descriptor, and so the memory, in the host's socket."""
    monkeypatch.setattr(limits, "EXPOSE_DEADLINE_NS", 200_000_000)

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            with MemfdBuffer(4_096) as buffer:
                buffer.seal_for_readers()
                for _ in range(2 * limits.SHM_UNANSWERED_MAX):
                    exposing = asyncio.ensure_future(endpoint.expose(buffer))
                    await asyncio.sleep(0.001)
                    exposing.cancel()
                    await asyncio.wait((exposing,))
                    if answers:
                        packet, fds, _, _ = socket.recv_fds(peer.sock, 100, 4)
                        os.close(fds[0])
                        rkey = shmlink.parse(packet, list(fds)).rkey
                        assert (await peer.hear()).kind is Kind.REVOKE
                        peer.say(Message(Kind.EXPOSED, rkey).encode())
                        peer.say(Message(Kind.REVOKED, rkey).encode())
                assert not endpoint.closed, "a host has until their deadline to answer"
                await asyncio.sleep(0.4)
            assert endpoint.closed is not answers

    run(runner, scenario())
