"""What a router's relay asks of the daemon: chains complete and in order, also after a restart.

A router can use a block only behind its parent, so parents come first, with tokens, whatever the
order in which blocks were put, and whether they are read from memory or from flash.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import fields, replace
from pathlib import Path

import grpc
import pytest
from daemon_lab import DESCRIPTOR, blocks, client_of, keys_of, seed_of, shape
from harness import Running, running_daemon

from entresol_client.cli import rpc
from entresol_client.cli.errors import CliError
from entresol_client.results import PutBlock
from entresol_daemon.events.types import Event, Kind, Medium
from entresol_daemon.server import ADMIN_SOCKET
from entresol_proto.ids import TenantName
from entresol_proto.limits import KIB
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg

DEV = TenantName("dev")
BLOCKS = 24


async def snapshot(running: Running) -> list[Event]:
    return [event async for event in running.daemon.admin.snapshot(DEV) if event is not None]


def check_chain(found: list[Event], chain: list[PutBlock], medium: Medium) -> None:
    assert [event.position for event in found] == list(range(len(chain)))
    for at, (event, block) in enumerate(zip(found, chain, strict=True)):
        assert (event.kind, event.seq, event.medium) == (Kind.STORED, 0, medium)
        assert event.engine_keys == (block.key,)
        assert event.parent == (chain[at - 1].key if at else b"")
        assert event.token_ids == tuple(block.token_ids)
        assert event.block_tokens == DESCRIPTOR.block_tokens


async def test_a_snapshot_after_a_restart_has_the_chain_parents_first(tmp_path: Path) -> None:
    keys = keys_of(BLOCKS)
    chain = [
        PutBlock(block.key, block.buffer, block.position, block.parent_key,
                 tuple(range(100 * at, 100 * at + 16)))
        for at, block in enumerate(blocks(keys, 8 * KIB))
    ]  # fmt: skip
    mixed = chain.copy()
    random.Random(seed_of("chain")).shuffle(mixed)
    async with running_daemon(tmp_path, shape()) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        for block in mixed:
            assert (await namespace.put([block], ack="durable")).ok
        check_chain(await snapshot(running), chain, Medium.MEMORY)
    async with running_daemon(tmp_path, shape()) as running:
        check_chain(await snapshot(running), chain, Medium.FLASH)


def namespaces(running: Running, tenant: str, named: str = "") -> list[pb.NamespaceInfo]:
    """As a tenant's own tool asks, under its certificate."""
    config = running.client_config(tenant)
    with rpc.tenant_channel(config, config.shards[0]) as channel:
        request = pb.NamespacesRequest(tenant=named)
        return list(rpc.call(pbg.EventsStub(channel).Namespaces, request).namespaces)


async def test_a_tenant_learns_what_its_namespaces_are_but_no_salt(tmp_path: Path) -> None:
    given = replace(DESCRIPTOR, lora="tuned", cache_salt="grain", tp_rank=1, tp_world=2)
    for start in range(2):
        async with running_daemon(tmp_path, shape()) as running:
            if not start:
                async with client_of(running) as client:
                    namespace = await client.namespace(given)
                    assert (await namespace.put(blocks(keys_of(3), KIB), ack="durable")).ok
            (found,) = await asyncio.to_thread(namespaces, running, "dev")
            (stored, *_) = await snapshot(running)
            assert (found.namespace_id, found.blocks) == (stored.namespace_id, 3)
            for field in fields(given):
                if field.name != "cache_salt":
                    assert getattr(found, field.name) == getattr(given, field.name), field.name
            assert found.salted
            assert b"grain" not in found.SerializeToString()


async def test_namespaces_of_another_tenant_are_not_told(tmp_path: Path) -> None:
    async with running_daemon(tmp_path, shape()) as running, client_of(running) as client:
        await (await client.namespace(DESCRIPTOR)).put(blocks(keys_of(1), KIB))
        assert not await asyncio.to_thread(namespaces, running, "other")
        with pytest.raises(CliError, match="its own tenant only"):
            await asyncio.to_thread(namespaces, running, "other", "dev")
        socket = f"unix:{running.daemon.config.listen.unix_dir}/{ADMIN_SOCKET}"
        async with grpc.aio.insecure_channel(socket) as channel:
            stub = pbg.EventsStub(channel)
            (found,) = (await stub.Namespaces(pb.NamespacesRequest(tenant="dev"))).namespaces
            assert found.model == DESCRIPTOR.model
            with pytest.raises(grpc.aio.AioRpcError, match="of one tenant"):
                await stub.Namespaces(pb.NamespacesRequest())
