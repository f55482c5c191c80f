"""Host-sealed namespaces on the real daemon: it stores and serves what it cannot open.

Two hosts of a tenant (two clients with copies of one key file) share blocks exactly over every data
path; whoever has not the file, or none, misses. What the daemon is told, grants, believes and
refuses is looked at from raw sessions. The proof line K4 looks into its memory and files.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import (
    DESCRIPTOR,
    FABRICS,
    Raw,
    Site,
    all_are,
    assert_idle,
    blocks,
    client_of,
    content,
    get,
    key_of,
    keys_of,
    put,
    raw_of,
    shape,
)
from harness import Running, eventually, running_daemon

from entresol_client.buffers import UsageError
from entresol_client.client import AsyncClient
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore
from entresol_client.results import RequestFailedError
from entresol_client.tenant_key import HostSeal, KeyFile, TenantKey
from entresol_daemon.events.types import Kind
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_proto.ids import EngineKey, TenantName, pack_token_ids, wire_key
from entresol_proto.limits import KIB
from entresol_proto.seal.block import (
    BlockIdentity,
    BlockKey,
    BlockMeta,
    SealedHeader,
    derive_block_key,
    seal_into,
    sealed_bytes_max,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.keys import HOST_KEY_LABEL, KEY_LABEL
from entresol_proto.status import ConfigError, KeyringError, Status
from entresol_proto.wire import opening
from entresol_proto.wire.data import OpenAt, PutItem
from entresol_proto.wire.opening import NamespaceOpened, OpenNamespace

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(300)]

SIZE = 96 * KIB
TOKENS = tuple(range(5_000, 5_016))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenant.key"
    TenantKey.generate(1_000).save(path, new=True)
    return path


@pytest.fixture(params=FABRICS)
async def served(request: Any, tmp_path: Path) -> AsyncIterator[tuple[Running, str]]:
    fabric: str = request.param
    change = shape(fabrics=("shm",) if fabric == "shm" else ("tcp",), tcp_tls=fabric == "tls")
    async with running_daemon(tmp_path / "daemon", change) as running:
        yield running, fabric


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_daemon(tmp_path / "daemon", shape(fabrics=("shm", "tcp"))) as found:
        yield found


def headers(running: Running) -> list[SealedHeader]:
    """Of what lies in the daemon's memory."""
    residents = list(running.daemon.shard.parts.residency._by_slot.values())
    return [SealedHeader.parse(one.extent.view[RECORD_HEADER_BYTES:]) for one in residents]


def opens(header: SealedHeader, dek: bytes) -> bool:
    return any(
        derive_block_key(dek, header.salt, label).commitment == header.commitment
        for label in (KEY_LABEL, HOST_KEY_LABEL)
    )


async def test_two_hosts_share_exactly_and_the_daemon_opens_nothing(
    served: tuple[Running, str], key_file: Path
) -> None:
    running, fabric = served
    copy = key_file.with_name("copied.key")
    shutil.copy(key_file, copy)
    keys = keys_of(9, "shared")
    async with (
        client_of(running, fabric=fabric, tenant_key=key_file) as one,
        client_of(running, fabric=fabric, tenant_key=copy) as two,
        client_of(running, fabric=fabric) as plain,
    ):
        mine = await one.namespace(DESCRIPTOR)
        chain = blocks(keys, SIZE, token_ids=TOKENS)
        assert all_are(await mine.put(chain, ack="durable"), Status.OK)
        theirs = await two.namespace(DESCRIPTOR)
        assert all_are(await get(theirs, keys, SIZE), Status.OK)
        assert (await theirs.exists(keys)).prefix_blocks == len(keys)
        assert all_are(await theirs.put(blocks(keys, SIZE)), Status.EXISTS)
        open_book = await plain.namespace(DESCRIPTOR)
        assert all_are(await get(open_book, keys, SIZE), Status.MISS)
        # ... and the other way round: the two kinds never meet.
        others = keys_of(3, "daemon-sealed")
        assert all_are(await put(open_book, others, SIZE), Status.OK)
        assert all_are(await get(theirs, others, SIZE), Status.MISS)
        deks = running.daemon.shard.parts.keyring.get("dev").deks.values()
        found = headers(running)
        assert sum(header.host_sealed for header in found) == len(keys)
        for header in found:
            assert any(opens(header, dek) for dek in deks) is not header.host_sealed
            assert header.host_sealed is (header.engine_key not in (*keys, *others))
        assert (await theirs.forget(keys[5:])).count == 4
        reasons = [row.reason.label for row in await theirs.explain(keys) if row.reason]
        assert reasons == ["forgotten"] * 4
        assert (await theirs.touch(keys)).count == 5
    await assert_idle(running.daemon)


async def test_nobody_can_have_the_daemon_open_a_block(running: Running, key_file: Path) -> None:
    keys = keys_of(2, "refused")
    async with client_of(running, tenant_key=key_file) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE)
        with pytest.raises(UsageError, match="keeps its keys"):
            await get(space, keys, SIZE, open_at="daemon")
        with pytest.raises(UsageError, match="keeps its keys"):
            await space.stage(keys, open_at="daemon")
    seal = HostSeal(KeyFile(key_file), DESCRIPTOR)
    async with raw_of(running) as raw:  # a host without manners
        opened: NamespaceOpened = await raw.ask(OpenNamespace(seal.canonical))
        assert opened.seal_at_host, "also over a path that nobody else sees"
        run = b"".join(wire_key(opened.secret, seal.mask(EngineKey(key))) for key in keys)
        with pytest.raises(RequestFailedError) as caught:
            await raw.fetch(opened.handle, run, open_at=OpenAt.DAEMON)
        assert caught.value.status is Status.UNSUPPORTED
        (grant,) = await raw.fetch(opened.handle, run)
        assert len(grant.items) == 2
        assert all(item.key == bytes(32) for item in grant.items), "a grant carries no key"
        assert all(item.commitment == bytes(16) for item in grant.items)
    toml = running.home.client_toml_of("dev")
    toml.write_text(f'tenant_key = "{key_file}"\n' + toml.read_text())
    with pytest.raises(ConfigError, match="tenant_key"):
        EngineStore(EngineSettings(open_at="daemon", config=str(toml)))


async def test_an_old_daemon_refuses_clearly(
    running: Running, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PROTOCOL_MAX", 1)  # the daemon's; a client has read it already
    config = running.client_config(tenant_key=key_file)
    async with await AsyncClient.open(config) as client:
        report = client.shards()[0]
        assert not report.connected
        assert "host speaks protocol 2.." in report.last_error
        assert "this daemon 1..1" in report.last_error
        space = await client.namespace(DESCRIPTOR)
        assert not (await put(space, keys_of(1), SIZE)).stored
    async with client_of(running) as client:  # whoever needs nothing new still gets along
        assert (await put(await client.namespace(DESCRIPTOR), keys_of(1), SIZE)).stored == 1


async def test_a_client_with_a_bad_key_file_does_not_start(
    running: Running, key_file: Path
) -> None:
    """Above all it does not go on without one."""
    key_file.chmod(0o644)
    with pytest.raises(KeyringError, match="chmod 600"):
        await AsyncClient.open(running.client_config(tenant_key=key_file))
    with pytest.raises(KeyringError, match="there is no tenant key file"):
        await AsyncClient.open(running.client_config(tenant_key=key_file.with_name("absent")))


async def test_engines_need_nothing_but_the_configuration(running: Running, key_file: Path) -> None:
    """Adapters stand on EngineStore, and that on the client."""
    toml = running.home.client_toml_of("dev")
    toml.write_text(f'tenant_key = "{key_file}"\n' + toml.read_text())
    keys = keys_of(3, "engine")

    def engine() -> None:
        store = EngineStore(EngineSettings(config=str(toml)))
        try:
            space = store.space(DESCRIPTOR)
            chain = blocks(keys, SIZE, token_ids=TOKENS)
            assert space.store(chain).result(60).ok
            assert space.lookup(keys).result(60) == [True] * 3
            buffers = [bytearray(SIZE) for _ in keys]
            assert space.load(keys, buffers).result(60).ok
            assert [bytes(b) for b in buffers] == [content(key, SIZE) for key in keys]
        finally:
            store.close()

    await asyncio.to_thread(engine)
    assert all(header.host_sealed for header in headers(running))


async def test_events_tell_nothing_of_the_prompt(running: Running, key_file: Path) -> None:
    keys = keys_of(3, "quiet")
    async with client_of(running, tenant_key=key_file) as client:
        space = await client.namespace(DESCRIPTOR)
        await space.put(blocks(keys, SIZE, token_ids=TOKENS), ack="durable")
    seal = HostSeal(KeyFile(key_file), DESCRIPTOR)
    admin = running.daemon.admin
    told = [event async for event in admin.snapshot(TenantName("dev")) if event is not None]
    live = running.daemon.shard.parts.events._read("dev", 0, 10)  # type: ignore[arg-type]
    assert live is not None
    assert len(told) == len(live) == 3
    for event, key, position in zip([*told, *live], keys * 2, [0, 1, 2] * 2, strict=True):
        assert event.kind is Kind.STORED
        assert event.engine_keys == (seal.mask(EngineKey(key)),)
        assert (event.parent, event.token_ids, event.position) == (b"", (), position)
        assert event.block_tokens == DESCRIPTOR.block_tokens
    (row,) = await admin.namespaces("dev")  # type: ignore[arg-type]
    assert row.descriptor.canonical() == seal.canonical
    assert DESCRIPTOR.model.encode() not in seal.canonical


class Host:
    """A host of the tenant that stores what it likes, over tcp."""

    def __init__(self, raw: Raw, opened: NamespaceOpened, seal: HostSeal) -> None:
        self.raw, self.opened, self.seal = raw, opened, seal

    async def store(self, key: bytes, plain: bytes, spoil: Any = None, **change: Any) -> Status:
        """Seal, let `spoil` have its way with the bytes, commit."""
        masked = self.seal.mask(EngineKey(key))
        name = wire_key(self.opened.secret, masked)
        item = PutItem(name, masked, len(plain), 0, b"", b"")
        (answer,) = (await self.raw.reserve(self.opened.handle, [item])).items
        if answer.status is not Status.OK:
            return answer.status  # type: ignore[no-any-return]
        assert (answer.salt, answer.key, answer.commitment) == (bytes(32), bytes(32), bytes(16))
        version, salt, block_key = self.seal.new_key()
        identity = BlockIdentity(
            self.opened.namespace_id, name, masked, DType.BF16, version, host_sealed=True
        )
        memory = bytearray(sealed_bytes_max(len(plain) + 64, meta_tokens=2_048))
        header = seal_into(
            memoryview(memory), memoryview(plain), identity=replace(identity, **change),
            block_key=block_key, salt=salt, codec_id=0,
            meta=BlockMeta(b"", 0, 16, pack_token_ids(TOKENS[:3])),
        )  # fmt: skip
        if spoil is not None:
            spoil(memory, header)
        exposure = await self.raw.endpoint.expose(memoryview(memory))
        span = exposure.span(0, header.sealed_bytes)
        (status,) = await self.raw.commit([(answer.put_id, span)])
        await self.raw.endpoint.revoke(exposure)
        return status


async def test_the_daemon_checks_what_it_can_without_a_key(
    running: Running, key_file: Path
) -> None:
    seal = HostSeal(KeyFile(key_file), DESCRIPTOR)
    plain = content(key_of(1), SIZE)

    def damaged_header(memory: bytearray, _header: SealedHeader) -> None:
        memory[20] ^= 1

    wrongs: list[dict[str, Any]] = [
        {"namespace_id": bytes(16)},
        {"wire_key": bytes(16)},
        {"engine_key": key_of(1)},  # not masked
        {"engine_key": key_of(9)},
        {"host_sealed": False},
        {"spoil": damaged_header},
    ]
    async with raw_of(running, fabric="tcp") as raw:
        host = Host(raw, await raw.ask(OpenNamespace(seal.canonical)), seal)
        for wrong in wrongs:
            assert await host.store(key_of(1), plain, **wrong) in (
                Status.CORRUPT, Status.CONFLICT
            ), wrong  # fmt: skip
        assert await host.store(key_of(1), plain) is Status.OK
        assert await host.store(key_of(1), plain) is Status.EXISTS
        # The flag must not pass in a namespace whose keys the daemon has, either.
        opened = await raw.namespace()
        name = wire_key(opened.secret, EngineKey(key_of(2)))
        item = PutItem(name, key_of(2), SIZE, 0, b"", b"")
        (grant,) = (await raw.reserve(opened.handle, [item])).items
        memory = bytearray(sealed_bytes_max(SIZE))
        header = seal_into(
            memoryview(memory), memoryview(plain),
            identity=BlockIdentity(
                opened.namespace_id, name, key_of(2), DType.BF16, grant.dek_version,
                host_sealed=True,
            ),
            block_key=BlockKey(grant.key, grant.commitment), salt=grant.salt, codec_id=0, meta=None,
        )  # fmt: skip
        exposure = await raw.endpoint.expose(memoryview(memory))
        span = exposure.span(0, header.sealed_bytes)
        assert await raw.commit([(grant.put_id, span)]) == [Status.CORRUPT]
    async with client_of(running, fabric="tcp", tenant_key=key_file) as client:
        space = await client.namespace(DESCRIPTOR)
        assert all_are(await get(space, [key_of(1)], SIZE), Status.OK)
    await assert_idle(running.daemon)


async def test_a_block_that_does_not_open_is_dropped_on_its_tenants_word(
    running: Running, key_file: Path
) -> None:
    """One host stores rubbish under a good header: the daemon cannot tell, the others can."""
    seal = HostSeal(KeyFile(key_file), DESCRIPTOR)
    bad, good = key_of(1), key_of(2)
    index = running.daemon.shard.parts.engine.index

    def rubbish(memory: bytearray, header: SealedHeader) -> None:
        memory[header.chunk_span(0)[0]] ^= 1

    async with raw_of(running, fabric="tcp") as raw:
        host = Host(raw, await raw.ask(OpenNamespace(seal.canonical)), seal)
        assert await host.store(bad, content(bad, SIZE), spoil=rubbish) is Status.OK
        assert await host.store(good, content(good, SIZE)) is Status.OK
    async with client_of(running, fabric="tcp", tenant_key=key_file) as client:
        space = await client.namespace(DESCRIPTOR)
        result = await get(space, [bad, good], SIZE)
        assert result.statuses == [Status.CORRUPT, Status.OK]
        await eventually(lambda: len(index) == 1, what="the block to be dropped")
        assert all_are(await put(space, [bad], SIZE), Status.OK)  # a good copy has its place
        assert all_are(await get(space, [bad, good], SIZE), Status.OK)
        (row,) = await space.explain([key_of(3)])
        assert row.reason is not None
    totals = running.daemon.shard.parts.meters.totals
    assert totals.corrupt_where == {"host_report": 1}
    await assert_idle(running.daemon)


async def test_a_host_without_the_version_misses_and_drops_nothing(
    running: Running, key_file: Path
) -> None:
    """A report of it would have the daemon throw away what others can read."""
    old = key_file.with_name("old.key")
    shutil.copy(key_file, old)
    TenantKey.load(key_file).rotated(2).save(key_file)
    keys = keys_of(4, "new version")
    async with (
        client_of(running, tenant_key=key_file) as one,
        client_of(running, tenant_key=old) as two,
    ):
        space = await one.namespace(DESCRIPTOR)
        assert all_are(await put(space, keys, SIZE, ack="durable"), Status.OK)
        behind = await two.namespace(DESCRIPTOR)
        assert all_are(await get(behind, keys, SIZE), Status.LOCKED)
        assert all_are(await get(space, keys, SIZE), Status.OK)
        await assert_idle(running.daemon)
        assert len(running.daemon.shard.parts.engine.index) == 4


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_a_host_with_another_key_of_that_number_misses_and_drops_nothing(
    running: Running, key_file: Path, fabric: str
) -> None:
    """Copies of the file were rotated on two hosts: each called what the other stored damaged, and
    the daemon dropped it."""
    other = key_file.with_name("other.key")
    shutil.copy(key_file, other)
    for path in (key_file, other):
        TenantKey.load(path).rotated(2).save(path)
    keys = keys_of(4, "another key")
    async with (
        client_of(running, fabric=fabric, tenant_key=key_file) as one,
        client_of(running, fabric=fabric, tenant_key=other) as two,
    ):
        space, stranger = await one.namespace(DESCRIPTOR), await two.namespace(DESCRIPTOR)
        assert all_are(await put(space, keys, SIZE), Status.OK)
        assert all_are(await get(stranger, keys, SIZE), Status.LOCKED)
        assert all_are(await get(space, keys, SIZE), Status.OK)
        assert running.daemon.shard.parts.meters.totals.corrupt_where == {}
        await assert_idle(running.daemon)


async def test_they_come_within_their_grant_as_others_do(running: Running, key_file: Path) -> None:
    """Over tcp, small ones. Who has another key of that number drops nothing here either."""
    other = key_file.with_name("other.key")
    shutil.copy(key_file, other)
    for path in (key_file, other):
        TenantKey.load(path).rotated(2).save(path)
    keys = keys_of(4, "carried")
    carried = running.daemon.shard.parts.metrics.grants_carried._value
    async with (
        client_of(running, fabric="tcp", tenant_key=key_file) as one,
        client_of(running, fabric="tcp", tenant_key=other) as two,
    ):
        space, stranger = await one.namespace(DESCRIPTOR), await two.namespace(DESCRIPTOR)
        assert all_are(await put(space, keys, 16 * KIB), Status.OK)
        for reader, status in ((space, Status.OK), (stranger, Status.LOCKED)):
            await get(reader, keys, 16 * KIB)  # the slab is shown to it
            before = carried.get()
            assert all_are(await get(reader, keys, 16 * KIB), status)
            assert carried.get() == before + 1
        assert all_are(await get(space, keys, 16 * KIB), Status.OK)
        assert running.daemon.shard.parts.meters.totals.corrupt_where == {}
        await assert_idle(running.daemon)


async def test_the_daemons_own_keys_do_not_touch_them(running: Running, key_file: Path) -> None:
    """Forced rotation drops what the daemon sealed, and erasing drops everything."""
    keys, others = keys_of(5, "host"), keys_of(5, "daemon")
    async with (
        client_of(running, tenant_key=key_file) as mine,
        client_of(running) as plain,
    ):
        space, open_book = await mine.namespace(DESCRIPTOR), await plain.namespace(DESCRIPTOR)
        await put(space, keys, SIZE, ack="durable")
        await put(open_book, others, SIZE, ack="durable")
        row = await running.daemon.admin.tenant_rotate("dev", force=True)  # type: ignore[arg-type]
        assert (row.blocks, row.blocks_host_sealed) == (5, 5)
        assert all_are(await get(space, keys, SIZE), Status.OK)
        assert not (await open_book.exists(others)).prefix_blocks
        await running.daemon.admin.tenant_erase("dev")  # type: ignore[arg-type]
    assert len(running.daemon.shard.parts.engine.index) == 0


async def test_a_forced_rotation_spares_them_also_where_nobody_knows_what_they_are(
    tmp_path: Path, key_file: Path
) -> None:
    """The file that says what a namespace is was damaged, and the daemon started anew: it has not
    looked at any block yet."""
    keys, others = keys_of(5, "host"), keys_of(4, "daemon")
    site = Site.prepare(tmp_path / "d", fabrics=("shm", "tcp"))
    site.fix_port()
    async with (
        site.running() as running,
        client_of(running, tenant_key=key_file) as mine,
        client_of(running) as plain,
    ):
        await put(await mine.namespace(DESCRIPTOR), keys, SIZE, ack="durable")
        await put(await plain.namespace(DESCRIPTOR), others, SIZE, ack="durable")
        folder = running.daemon.shard.parts.keyring._namespaces.folder
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    async with site.running() as running, client_of(running, tenant_key=key_file) as mine:
        row = await running.daemon.admin.tenant_rotate("dev", force=True)  # type: ignore[arg-type]
        assert row.dek_version == 2
        assert all_are(await get(await mine.namespace(DESCRIPTOR), keys, SIZE), Status.OK)
        index = running.daemon.shard.parts.engine.index
        await eventually(lambda: len(index) == len(keys), what="the others to be looked at")
        assert all_are(await get(await mine.namespace(DESCRIPTOR), keys, SIZE), Status.OK)
