"""Callers' memory is their own again when a call has returned: without the garbage collector, which
an engine may have turned off, they may resize, unmap and free it."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_peer import DESCRIPTOR, Faults, serving
from test_client_sync import PeerThread

from entresol_client import AsyncClient, BreakerSettings, Client, Namespace, PutBlock, UsageError
from entresol_proto import limits
from entresol_proto.ids import BadKeyError, EngineKey
from entresol_proto.status import Status
from entresol_proto.wire import data, opening

BLOCK = 1 * limits.MIB
COUNT = 4
SOON_NS = 60_000_000


def key(number: int) -> EngineKey:
    return EngineKey(hashlib.sha256(b"key %d" % number).digest())


KEYS = [key(number) for number in range(COUNT)]
NEW_KEYS = [key(number) for number in range(COUNT, 2 * COUNT)]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(params=["tcp", "tls", "shm"])
async def served(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A namespace with KEYS in it, and the faults of its peer."""
    fabric = request.param
    async with serving(tmp_path, fabric=fabric, seal_at_host=fabric == "tcp") as peer:
        config = peer.config(breaker=BreakerSettings(1000), ping_interval_ns=10**9)
        async with await AsyncClient.open(config) as client:
            ns = await client.namespace(DESCRIPTOR)
            blocks = [PutBlock(one, random.randbytes(BLOCK)) for one in KEYS]
            assert (await ns.put(blocks)).ok
            yield ns, peer.faults


async def get(ns: Namespace, memory: list[bytearray], **options: Any) -> set[Status]:
    return set((await ns.get_into(KEYS, memory, **options)).statuses)


async def put(ns: Namespace, memory: list[bytearray], **options: Any) -> set[Status]:
    blocks = [PutBlock(one, buffer) for one, buffer in zip(NEW_KEYS, memory, strict=True)]
    return set((await ns.put(blocks, **options)).statuses)


Calls = Callable[[Namespace, Faults, list[bytearray]], Awaitable[set[Status]]]


async def found(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    return await get(ns, memory)


async def stored(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    return await put(ns, memory)


async def get_refused(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.refuse = {data.Fetch: Status.BUSY}
    return await get(ns, memory)


async def reserve_refused(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.refuse = {data.Reserve: Status.BUSY}
    return await put(ns, memory)


async def commit_refused(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.refuse = {data.Commit: Status.BUSY}
    return await put(ns, memory)


async def get_late(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.silent = True
    return await get(ns, memory, deadline_ns=SOON_NS)


async def put_late(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.silent = True
    return await put(ns, memory, deadline_ns=SOON_NS)


async def put_never_done(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.hold_put_done = True
    return await put(ns, memory, deadline_ns=300_000_000)


async def namespace_refused(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.refuse = {opening.OpenNamespace: Status.QUOTA}
    other = await ns._client.namespace(type(DESCRIPTOR)(model="other", dtype="bf16"))
    return await get(other, memory) | await put(other, memory)


async def garbage(ns: Namespace, faults: Faults, memory: list[bytearray]) -> set[Status]:
    faults.garbage = True
    return await get(ns, memory)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (found, Status.OK), (stored, Status.OK), (get_refused, Status.BUSY),
        (reserve_refused, Status.BUSY), (commit_refused, Status.BUSY), (get_late, Status.DEADLINE),
        (put_late, Status.DEADLINE), (put_never_done, Status.DEADLINE),
        (namespace_refused, Status.QUOTA), (garbage, Status.DISCONNECTED),
    ],
)  # fmt: skip
async def test_memory_is_free_after_a_call(served: Any, call: Calls, outcome: Status) -> None:
    ns, faults = served
    memory = [bytearray(BLOCK) for _ in range(COUNT)]
    assert await call(ns, faults, memory) == {outcome}
    for buffer in memory:
        buffer.append(0)  # BufferError while anything refers to it


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.006])
@pytest.mark.parametrize("call", [get, put])
async def test_memory_is_free_after_a_cancelled_call(
    served: Any, call: Callable[..., Awaitable[set[Status]]], after_s: float
) -> None:
    ns, faults = served
    faults.hold_put_done = True
    memory = [bytearray(BLOCK) for _ in range(COUNT)]
    task = asyncio.ensure_future(call(ns, memory))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait((task,))
    for buffer in memory:
        buffer.append(0)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("message", [data.Reserve, data.Commit, opening.OpenNamespace])
async def test_what_a_refused_put_was_given_is_freed(served: Any, message: type) -> None:
    ns, faults = served
    if message is opening.OpenNamespace:
        ns = ns._client._namespace(type(DESCRIPTOR)(model="other", dtype="bf16"))
    faults.refuse = {message: Status.BUSY}
    arrays = [np.zeros(BLOCK, np.uint8) for _ in range(COUNT)]
    gone = [weakref.ref(array) for array in arrays]
    result = await ns.put([PutBlock(*pair) for pair in zip(NEW_KEYS, arrays, strict=True)])
    assert set(result.statuses) == {Status.BUSY}
    del arrays
    assert [ref() for ref in gone] == [None] * COUNT


@pytest.mark.usefixtures("no_collector")
async def test_memory_is_free_while_the_error_of_a_wrong_call_is_kept(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as peer,
        await AsyncClient.open(peer.config()) as client,
    ):
        ns = await client.namespace(DESCRIPTOR)
        one, two = bytearray(BLOCK), bytearray(BLOCK)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: ns.get_into(KEYS[:2], [one, one]),
            lambda: ns.get_into(KEYS[:2], [one, two], deadline_ns=-1),
            lambda: ns.get_into(KEYS[:2], [one, two], open_at="moon"),  # type: ignore[arg-type]
            lambda: ns.put([PutBlock(KEYS[0], one)], ack="soon"),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(UsageError) as kept:
                await call()
            one.append(0)
            del one[-1:]
            assert kept.value.status is Status.BAD_REQUEST


@pytest.mark.usefixtures("no_collector")
def test_what_a_wrong_call_of_the_facade_was_given_is_freed(tmp_path: Path) -> None:
    thread = PeerThread(tmp_path, "tcp")
    try:
        with Client(thread.peer.config()) as client:
            ns = client.namespace(DESCRIPTOR)
            arrays = [np.zeros(BLOCK, np.uint8) for _ in range(2)]
            gone = [weakref.ref(array) for array in arrays]
            with pytest.raises(BadKeyError):
                ns.get_into([key(0), b"short"], arrays)
            with pytest.raises(UsageError):
                ns.put([PutBlock(key(0), arrays[0][::2])])
            del arrays
            assert [ref() for ref in gone] == [None, None]
    finally:
        thread.stop()
