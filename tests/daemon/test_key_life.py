"""Keys come, change and go while the real daemon serves: rotation, KEK change, locked start.

The quick part; the proof lines K1 to K3 do the same under load and with kill -9.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_lab import Cli, content, written
from daemon_lab import (
    DESCRIPTOR,
    Site,
    Starter,
    all_are,
    assert_idle,
    client_of,
    get,
    keys_of,
    put,
    put_item,
    raw_of,
)
from harness import Running, eventually

from entresol_client.client import AsyncClient
from entresol_client.connection import Connection
from entresol_client.results import RequestFailedError
from entresol_daemon import server
from entresol_daemon.events.types import Event, Kind
from entresol_daemon.events.types import Reason as EventReason
from entresol_daemon.keys.keyring import DEK_VERSIONS_PER_TENANT_MAX
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.server import Daemon
from entresol_daemon.shard import granting, keycare
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.ids import TenantName
from entresol_proto.limits import KIB
from entresol_proto.status import EntresolError, FormatError, KeyringError, Status

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(300)]

SIZE = 64 * KIB
DEV = TenantName("dev")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keycare, "LOOK_NS", 20_000_000)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site.prepare(tmp_path / "d", fabrics=("shm", "tcp"))
    found.fix_port()
    # Its own: preparing the folder again makes the usual one anew.
    own = (found.directory / "kek").rename(found.directory / "own.kek")
    keys_set(found, kek_file=own)
    return found


@pytest.fixture
async def running(site: Site) -> AsyncIterator[Running]:
    async with site.running() as found:
        yield found


def keys_set(site: Site, **values: Any) -> None:
    site.config = replace(site.config, keys=replace(site.config.keys, **values))
    site.write(site.config)


def versions(running: Running) -> dict[int, int]:
    """Blocks by key version."""
    info = running.daemon.shard.parts.keyring.info(DEV)
    assert info is not None
    return {use.version: use.blocks for use in running.daemon.shard.keycare.uses(info)[0]}


def events_of(running: Running) -> list[Event]:
    """What followers of the tenant were told."""
    found = running.daemon.shard.parts.events._read(DEV, 0, 1_000)
    assert found is not None
    return found


def kek_path(site: Site) -> Path:
    path = site.config.keys.kek_file
    assert path is not None
    return path


# Rotation.


async def test_old_blocks_stay_until_the_last_of_them_goes(running: Running) -> None:
    first, second = keys_of(6, "first"), keys_of(4, "second")
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        assert all_are(await put(space, first, SIZE, ack="durable"), Status.OK)
        assert (await running.daemon.admin.tenant_rotate(DEV)).dek_version == 2
        assert all_are(await put(space, second, SIZE, ack="durable"), Status.OK)
        assert all_are(await get(space, [*first, *second], SIZE), Status.OK)
        assert versions(running) == {1: 6, 2: 4}
        page = await metrics(running)
        assert page['entresol_tenant_key_version{tenant="dev"}'] == 2
        assert page['entresol_tenant_key_versions{tenant="dev"}'] == 2
        assert page['entresol_tenant_old_key_blocks{tenant="dev"}'] == 6
        assert page['entresol_key_rotations_total{cause="asked"}'] == 1
        await space.forget(first[1:])
        assert versions(running) == {1: 1, 2: 4}
        await asyncio.sleep(0.2)
        assert 1 in versions(running), "a version with a block is not ended"
        await space.forget(first[:1])
        await eventually(lambda: versions(running) == {2: 4}, what="version 1 to end")
        assert all_are(await get(space, second, SIZE), Status.OK)
    await assert_idle(running.daemon)


async def metrics(running: Running) -> dict[str, float]:
    page = running.daemon.metrics
    page.refresh()
    lines = page.render().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if line and line[0] != "#")
    return {name: float(value) for name, _, value in rows}


async def test_a_used_up_version_is_followed_by_the_next(site: Site) -> None:
    keys_set(site, rotate_blocks=8)
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        for round_number in range(3):
            keys = keys_of(8, f"round {round_number}")
            assert all_are(await put(space, keys, SIZE, ack="durable"), Status.OK)
            wanted = round_number + 2
            await eventually(
                lambda wanted=wanted: max(versions(running)) == wanted,  # type: ignore[misc]
                what=f"version {wanted}",
            )
        assert versions(running) == {1: 8, 2: 8, 3: 8, 4: 0}
        for round_number in range(3):
            got = await get(space, keys_of(8, f"round {round_number}"), SIZE)
            assert all_are(got, Status.OK)
        assert running.daemon.shard.keycare.rotations == {"limit": 3}
    # What a version has sealed is known after a restart, or overestimated: here it is used up.
    async with site.running() as running:
        await eventually(lambda: max(versions(running)) >= 4, what="the versions")
        assert all(b >= 0 for b in versions(running).values())


async def test_one_block_below_the_limit_nothing_happens(site: Site) -> None:
    keys_set(site, rotate_blocks=8)
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys_of(7), SIZE)
        await asyncio.sleep(0.3)
        assert versions(running) == {1: 7}


async def test_an_old_version_is_followed_by_the_next(site: Site) -> None:
    keys_set(site, rotate_age_ns=1_000_000_000)
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys_of(2), SIZE, ack="durable")
        await eventually(lambda: max(versions(running)) >= 3, seconds=30, what="two rotations")
        assert all_are(await get(space, keys_of(2), SIZE), Status.OK)
        assert versions(running)[1] == 2


async def test_a_block_whose_version_is_gone_makes_room_when_it_is_met(running: Running) -> None:
    """However it came to be there: unreadable, it could only stand in another's way."""
    keys = keys_of(3)
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE, ack="durable")
        await running.daemon.admin.tenant_rotate(DEV)
        keyring = running.daemon.shard.parts.keyring
        keyring.retire("dev", 1)  # and not a word to the shard, but to its sessions
        for session in running.daemon.shard.sessions.values():
            session.tenant = keyring.get("dev")
        assert all_are(await get(space, keys, SIZE), Status.ERASED)
        assert all_are(await put(space, keys, SIZE), Status.OK)
        assert all_are(await get(space, keys, SIZE), Status.OK)


async def test_versions_that_run_out_end_with_the_oldest(site: Site) -> None:
    """64 rotations later a block of the first version is a miss, and rotation goes on."""
    keys_set(site, rotate_blocks=1)
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        care = running.daemon.shard.keycare
        most = DEK_VERSIONS_PER_TENANT_MAX
        for number in range(most):
            stored = await put(space, keys_of(1, f"{number}"), 4096, ack="durable")
            assert stored.ok, stored.statuses
            await eventually(  # a session that has not heard of it stores under the older one
                lambda number=number: (
                    {  # type: ignore[misc]
                        session.tenant.info.active_version
                        for session in running.daemon.shard.sessions.values()
                    }
                    == {number + 2}
                ),
                seconds=60,  # freed memory is swept first, and a long test run has much of it
                what=f"version {number + 2}",
            )
        assert len(versions(running)) == most
        await eventually(
            lambda: any(event.reason is EventReason.ERASED for event in events_of(running)),
            what="the oldest block to be dropped",
        )
        assert not (await space.exists(keys_of(1, "0"))).present[0]
        assert (await get(space, keys_of(1, "0"), 4096)).statuses == [Status.MISS]
        assert all_are(await get(space, keys_of(1, "1"), 4096), Status.OK)
        assert care.versions_ended >= 1


async def test_a_forced_rotation_drops_what_was_there(running: Running) -> None:
    keys = keys_of(6)
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE, ack="durable")
        row = await running.daemon.admin.tenant_rotate(DEV, force=True)
        assert (row.dek_version, row.blocks) == (2, 0)
        assert [use.version for use in row.key_versions] == [2]
        result = await get(space, keys, SIZE)
        assert all_are(result, Status.MISS), result.statuses
        gone = [e for e in events_of(running) if e.kind is Kind.REMOVED]
        assert {event.reason for event in gone} == {EventReason.ERASED}
        assert sum(len(event.wire_keys) for event in gone) == len(keys), "followers must hear of it"
        (why,) = await space.explain(keys[:1])
        assert why.reason is not None
        assert why.reason.label == "erased"
        assert all_are(await put(space, keys, SIZE, ack="durable"), Status.OK)
        assert all_are(await get(space, keys, SIZE), Status.OK)
    await assert_idle(running.daemon)


def block_keys(running: Running) -> list[bytes]:
    """Of the blocks in memory; the very objects."""
    residents = running.daemon.shard.parts.residency._by_slot.values()
    return [resident.block_key for resident in residents if resident.block_key]


async def test_a_blocks_key_is_derived_once_while_it_is_in_memory(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(40)  # some gets of so many take the long way
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE)
        assert all_are(await get(space, keys, SIZE), Status.OK)
        assert len(set(block_keys(running))) == len(keys)

        def never(*_args: object) -> Any:
            raise AssertionError("derived again")

        monkeypatch.setattr(granting, "derive_key_and_commitment", never)
        for some in (keys[:1], keys[:8], keys):
            assert all_are(await get(space, some, SIZE), Status.OK)
    await assert_idle(running.daemon)


async def test_a_key_that_was_damaged_in_memory_is_derived_anew(running: Running) -> None:
    """The block is all right: it must neither be dropped nor stay a miss."""
    keys = keys_of(1)
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE, ack="durable")
        assert all_are(await get(space, keys, SIZE), Status.OK)
        (resident,) = running.daemon.shard.parts.residency._by_slot.values()
        right = resident.block_key
        resident.block_key = bytes([right[0] ^ 1]) + right[1:]
        assert all_are(await get(space, keys, SIZE), Status.CORRUPT)
        await eventually(lambda: resident.block_key in (b"", right), what="the report to be heard")
        assert all_are(await get(space, keys, SIZE), Status.OK)
        assert resident.block_key == right
    await assert_idle(running.daemon)


@pytest.mark.parametrize("how", ["rotation", "erasure"])
async def test_no_lease_keeps_the_key_of_a_block_whose_data_key_was_destroyed(
    running: Running, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A lease over shm is the host's until it ends, whatever becomes of its session."""
    keys, admin = keys_of(6), running.daemon.admin
    async with client_of(running, fabric="shm") as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE, ack="durable")
        monkeypatch.setattr(Connection, "release", lambda *_args, **_named: None)
        assert all_are(await get(space, keys, SIZE), Status.OK)
        secrets = block_keys(running)
        assert len(secrets) == len(keys)
        if how == "rotation":
            await admin.tenant_rotate(DEV, force=True)
        else:
            await admin.tenant_erase(DEV)
        assert [bytes(secret) for secret in secrets] == [bytes(48)] * len(keys)


@pytest.mark.parametrize("how", ["rotation", "erasure", "retirement"])
async def test_no_key_of_a_block_outlives_what_it_was_derived_from(
    running: Running, how: str
) -> None:
    keys, admin = keys_of(6), running.daemon.admin
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE, ack="durable")
        assert all_are(await get(space, keys, SIZE), Status.OK)
        secrets = block_keys(running)
        assert len(secrets) == len(keys)
        assert bytes(48) not in secrets
        if how == "rotation":
            await admin.tenant_rotate(DEV, force=True)
        elif how == "erasure":
            await admin.tenant_erase(DEV)
        else:  # of an older version, once nothing is under it: these blocks stay
            await admin.tenant_rotate(DEV)
            await space.forget(keys[1:])
            await put(space, keys[1:], SIZE, ack="durable")
            assert all_are(await get(space, keys, SIZE), Status.OK)
            secrets += block_keys(running)
            await space.forget(keys[:1])
            keys = keys[1:]
        # One by one: an object's hash stays what it was.
        await eventually(lambda: all(s == bytes(48) for s in secrets), what="their keys wiped")
        if how == "retirement":
            assert all_are(await get(space, keys, SIZE), Status.OK)
            assert len(block_keys(running)) == len(keys)


def holds(keyring: Any, name: str, *, before: bool) -> tuple[threading.Event, threading.Event]:
    """Stops a change of the keyring on its thread, before or after it is made.

    Returns (set when it is there, to be set to let it go on)."""
    change = getattr(keyring, name)
    there, go_on = threading.Event(), threading.Event()

    def held(*args: Any, **kwargs: Any) -> Any:
        made = None if before else change(*args, **kwargs)
        there.set()
        assert go_on.wait(60)
        return change(*args, **kwargs) if before else made

    setattr(keyring, name, held)
    return there, go_on


async def test_a_forced_rotation_whose_caller_goes_leaves_no_session_with_a_destroyed_key(
    running: Running,
) -> None:
    """What the session stored from then on could be opened by nobody after it."""
    keys = keys_of(3)
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        there, go_on = holds(running.daemon.shard.parts.keyring, "rotate", before=False)
        asking = asyncio.ensure_future(running.daemon.admin.tenant_rotate(DEV, force=True))
        await eventually(there.is_set, what="the keys to be changed")
        asking.cancel()
        go_on.set()
        assert isinstance(
            (await asyncio.gather(asking, return_exceptions=True))[0], asyncio.CancelledError
        )
        assert all_are(await put(space, keys, SIZE, ack="durable"), Status.OK)
    async with client_of(running) as client:
        result = await get(await client.namespace(DESCRIPTOR), keys, SIZE)
        assert all_are(result, Status.OK), result.statuses
    assert versions(running) == {2: 3}


async def test_an_unused_version_ends_only_when_no_session_uses_it_any_more(site: Site) -> None:
    """The keyring has a new version, of which the shard has not heard when it looks for unused
    ones: sessions still store under the old one."""
    keys = keys_of(3)
    # One thread is held here, and putting takes one.
    site.config = replace(site.config, sealing=replace(site.config.sealing, threads=4))
    site.write(site.config)
    async with site.running() as running:
        keyring = running.daemon.shard.parts.keyring
        async with client_of(running) as client:
            space = await client.namespace(DESCRIPTOR)
            ending, end = holds(keyring, "retire", before=True)
            keyring.rotate(DEV, now_unix_s=int(time.time()))
            await eventually(ending.is_set, what="the old one to be ended")
            assert all_are(await put(space, keys, SIZE, ack="durable"), Status.OK)
            end.set()
            await eventually(lambda: versions(running) == {2: 3}, what="version 1 to end")
        async with client_of(running) as client:
            result = await get(await client.namespace(DESCRIPTOR), keys, SIZE)
            assert all_are(result, Status.OK), result.statuses
        await assert_idle(running.daemon)


async def test_what_was_reserved_under_a_destroyed_key_is_not_stored(running: Running) -> None:
    """It could never be opened, and would stand in the way."""
    async with raw_of(running, fabric="shm") as raw:
        namespace = await raw.namespace()
        reserved = await raw.reserve(namespace.handle, [put_item(namespace, keys_of(1)[0], SIZE)])
        await running.daemon.admin.tenant_rotate(DEV, force=True)
        memory = MemfdBuffer(SIZE)
        memory.seal_for_readers()
        exposure = await raw.endpoint.expose(memory)
        answer = await raw.commit([(reserved.items[0].put_id, exposure.span(0, SIZE))])
        assert answer == [Status.ERASED]
        memory.close()
    assert len(running.daemon.shard.parts.engine.index) == 0
    await assert_idle(running.daemon)


async def test_blocks_found_at_start_are_counted_and_orphans_dropped(site: Site) -> None:
    """A crash between destroying a version and dropping its blocks leaves some nobody opens."""
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys_of(5, "old"), SIZE, ack="durable")
        await running.daemon.admin.tenant_rotate(DEV)
        await put(space, keys_of(3, "new"), SIZE, ack="durable")
        running.daemon.shard.parts.keyring.retire("dev", 1)  # and not a word to the shard
    async with site.running() as running, client_of(running) as client:
        await eventually(lambda: versions(running) == {2: 3}, what="the blocks to be counted")
        assert len(running.daemon.shard.parts.engine.index) == 3
        gone = [e for e in events_of(running) if e.kind is Kind.REMOVED]
        assert sum(len(event.wire_keys) for event in gone) == 5
        space = await client.namespace(DESCRIPTOR)
        assert all_are(await get(space, keys_of(3, "new"), SIZE), Status.OK)
        assert all_are(await put(space, keys_of(5, "old"), SIZE), Status.OK)


# The KEK.


async def test_the_kek_changes_while_it_serves(site: Site, tmp_path: Path) -> None:
    new = tmp_path / "kek.new"
    FileKek.generate(new)
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys_of(3), SIZE, ack="durable")
        old_id, new_id = await running.daemon.change_kek(str(new))
        assert old_id != new_id
        assert all_are(await get(space, keys_of(3), SIZE), Status.OK)
        assert all_are(await put(space, keys_of(3, "more"), SIZE, ack="durable"), Status.OK)
        with pytest.raises(KeyringError):
            await running.daemon.change_kek(str(tmp_path / "absent"))
    with pytest.raises(KeyringError, match="is wrapped under KEK"):
        async with site.running():
            pass
    keys_set(site, kek_file=new)
    second, third = (FileKek.generate(tmp_path / name) for name in ("second", "third"))
    async with site.running() as running:  # two operators: each is told which key to keep
        changes = await asyncio.gather(
            *(running.daemon.change_kek(kek.source) for kek in (second, third))
        )
        last = running.daemon.shard.parts.keyring.kek_id.hex()
    former = dict(map(reversed, changes))
    assert former[former[last]] == new_id
    keys_set(site, kek_file=Path((second if last == second.kek_id().hex() else third).source))
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        assert all_are(await get(space, [*keys_of(3), *keys_of(3, "more")], SIZE), Status.OK)


async def test_a_full_disk_is_not_asked_by_every_put_to_write_uses_down(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Puts go on, and say so once a minute: the log was full of it, and the disk never at rest."""
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        keyring, tries = running.daemon.shard.parts.keyring, list[str]()

        def full(name: str) -> None:
            tries.append(name)
            raise KeyringError("no space left", status=Status.IO_ERROR)

        with monkeypatch.context() as patch:
            patch.setattr(keyring, "keep_usage", full)
            patch.setattr(keyring, "note_sealed", lambda *_: True)
            for part in range(8):
                assert all_are(await put(space, keys_of(2, f"full{part}"), SIZE), Status.OK)
                await asyncio.sleep(0.02)
        assert tries == ["dev"]
        assert caplog.text.count("event=key_care_failed") == 1

        running.daemon.shard.keycare._note_after_ns.clear()  # a minute later
        before = keyring.generation
        monkeypatch.setattr(keyring, "note_sealed", lambda *_: True)
        assert all_are(await put(space, keys_of(2, "again"), SIZE), Status.OK)
        await eventually(lambda: keyring.generation > before)


# Locked.


async def test_without_its_kek_it_waits_and_loses_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    monkeypatch.setattr(server, "tell", told.append)
    caplog.set_level(logging.INFO, logger="entresol.daemon")
    keys = keys_of(4)
    async with site.running() as running, client_of(running) as client:
        await put(await client.namespace(DESCRIPTOR), keys, SIZE, ack="durable")
    kek = kek_path(site)
    away = kek.rename(kek.with_name("away"))
    told.clear()
    caplog.clear()
    async with site.running() as running:
        assert told[-2:] == ["STATUS=waiting, locked: see `entresol unlock`; 4 blocks", "READY=1"]
        assert "event=waiting_locked" in caplog.text
        assert "event=serving" not in caplog.text
        reasons = running.daemon.admin.reasons_not_ready()
        assert len(reasons) == 1
        assert "locked" in reasons[0]
        assert "entresol unlock" in reasons[0]
        config = running.client_config(connect_deadline_ns=5_000_000_000)
        async with await AsyncClient.open(config) as client:
            assert "locked" in client.shards()[0].last_error
            space = await client.namespace(DESCRIPTOR)
            assert all_are(await get(space, keys, SIZE), Status.LOCKED)
            assert all_are(await put(space, keys_of(1, "x"), SIZE), Status.LOCKED)
            FileKek.generate(kek.with_name("foreign"))
            with pytest.raises(KeyringError, match="is wrapped under KEK"):
                await running.daemon.unlock(str(kek.with_name("foreign")))
            running.daemon.on_hangup()  # too early: still locked, still there
            await asyncio.sleep(0.1)
            assert running.daemon.admin.reasons_not_ready() == reasons
            away.rename(kek)
            running.daemon.on_hangup()
            await eventually(lambda: not running.daemon.admin.reasons_not_ready())
            await eventually(lambda: client.shards()[0].connected, seconds=30)
            assert all_are(await get(space, keys, SIZE), Status.OK)
            assert told[-1].startswith("STATUS=serving; 4 blocks")
            assert "event=serving" in caplog.text
            assert await running.daemon.unlock() == FileKek.open(kek).kek_id().hex()
    assert isinstance(running.daemon, Daemon)


@pytest.mark.parametrize("exists", [False, True])
async def test_a_locked_daemon_makes_and_formats_nothing(site: Site, exists: bool) -> None:
    kek_path(site).unlink()
    data = site.config.flash_path
    data.parent.mkdir(parents=True, exist_ok=True)
    if exists:
        data.write_bytes(b"")
        os.truncate(data, site.config.flash.size_bytes)
    before = data.read_bytes() if exists else None
    with pytest.raises((FormatError, EntresolError)) as caught:
        async with site.running():
            pass
    assert "key-encryption key" in caught.value.hint + str(caught.value)
    assert exists or ("KEK file" in str(caught.value) and "prepare" in caught.value.hint)
    assert data.exists() is exists
    if exists:
        assert data.read_bytes() == before


async def test_a_tenant_can_be_erased_while_locked(site: Site) -> None:
    async with site.running() as running, client_of(running) as client:
        await put(await client.namespace(DESCRIPTOR), keys_of(3), SIZE, ack="durable")
    kek_path(site).rename(kek_path(site).with_name("away"))
    async with site.running() as running:
        receipt = await running.daemon.admin.tenant_erase(DEV)
        assert receipt.blocks_dropped == 3
        with pytest.raises(RequestFailedError):
            async with raw_of(running):
                pass


# By hand.


@pytest.fixture
def starter(tmp_path: Path) -> Any:
    found = Starter(tmp_path)
    yield found
    found.close()


async def test_the_commands(
    site: Site, starter: Starter, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key, kek, new = tmp_path / "tenant.key", kek_path(site), tmp_path / "kek.new"
    FileKek.generate(new)
    async with site.running() as running:
        cli = Cli(capsys, running.home.client_toml_of("dev").parent)

        def run(words: Callable[[], Any]) -> Any:
            return asyncio.to_thread(words)

        file = written(tmp_path / "in", content("commands", 50_000))
        await run(lambda: _keys_of_the_tenant(cli, key, file))
        said = await run(lambda: cli("tenant", "rotate", "dev", "--json"))
        assert said.json["dek_version"] == 2
        said = await run(lambda: cli("tenant", "keys", "dev", "--json"))
        assert [row["version"] for row in said.json["versions"]][-1] == 2
        assert said.json["blocks_host_sealed"] == 3  # the file's blocks and its own description
        await run(lambda: cli("tenant", "keys", "dev"))
        await run(lambda: cli.fails("tenant", "keys", "nobody", code=1, match="no tenant"))
        said = await run(lambda: cli("tenant", "rotate", "dev", "--force", "--yes"))
        assert "dropped" in said.out
        said = await run(lambda: cli("unlock", "--json"))
        (row,) = said.json["shards"]
        assert (row["state"], row["kek_id"]) == ("serving", FileKek.open(kek).kek_id().hex())
        await run(lambda: cli.fails("change-kek", str(tmp_path / "no"), code=1, match="no KEK"))
        said = await run(lambda: cli("change-kek", str(new)))
        assert "kek_file" in said.out
    # ... and back, with the daemon stopped.
    keys_set(site, kek_file=new)
    code, said_by = starter.run("--config", str(site.toml), "rewrap", str(kek))
    assert code == 0, said_by
    assert "is wrapped under" in starter.refuses("--config", str(site.toml), "rewrap", str(kek))
    keys_set(site, kek_file=kek)
    async with site.running():
        refused = starter.refuses("--config", str(site.toml), "rewrap", str(new))
        assert "another process" in refused


def _keys_of_the_tenant(cli: Cli, key: Path, file: str) -> None:
    """`entresol key`, and what a configuration with it does."""

    def of_key(*words: str) -> Any:
        from entresol_client.cli.main import main

        cli._capsys.readouterr()
        code = main(["key", *words])
        out, err = cli._capsys.readouterr()
        return code, out, err

    assert of_key("new", str(key))[0] == 0
    assert os.stat(key).st_mode & 0o777 == 0o600
    code, _, err = of_key("new", str(key))
    assert code == 1
    assert "not overwritten" in err
    assert of_key("rotate", str(key))[0] == 0
    assert "seals" in of_key("show", str(key))[1]
    told = json.loads(of_key("show", str(key), "--json")[1])
    newest = told["active"]
    assert [row["version"] for row in told["versions"]] == [1, newest]
    assert of_key("retire", str(key), "1")[0] == 0
    assert of_key("retire", str(key), str(newest))[0] == 2
    secrets = [line.split('"')[1] for line in key.read_text().splitlines() if "secret" in line]
    assert not any(secret in of_key("show", str(key))[1] for secret in secrets)
    config = cli.folder / "client-sealed.toml"
    config.write_text(f'tenant_key = "{key}"\n' + cli.config.read_text())
    cli("put", file, "--name", "sealed", "--ack", "durable", config=config)
    out = file + ".out"
    cli("get", "--name", "sealed", "-o", out, config=config)
    assert Path(out).read_bytes() == Path(file).read_bytes()
    cli("exists", "--name", "sealed", code=1)  # without the key file it is not there
    assert "no daemon can open our blocks" in cli("doctor", config=config).out


async def test_what_the_keyring_writes_is_in_nobodys_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new namespace waits for a disk, and the threads that seal and open waited with it."""
    site.config = replace(site.config, sealing=replace(site.config.sealing, threads=1))
    site.write(site.config)
    async with site.running() as running:
        parts = running.daemon.shard.parts
        go_on = threading.Event()
        remember = parts.keyring.remember_namespace

        def slow(*args: Any) -> Any:
            assert go_on.wait(60)
            return remember(*args)

        monkeypatch.setattr(parts.keyring, "remember_namespace", slow)
        async with client_of(running) as client:
            spaces = [
                await client.namespace(replace(DESCRIPTOR, cache_salt=f"user-{n}"))
                for n in range(8)
            ]
            puts = [asyncio.ensure_future(put(each, keys_of(1), SIZE)) for each in spaces]
            await eventually(lambda: parts.keys.pending, what="a put that waits for the keyring")
            assert await asyncio.wait_for(parts.compute.run(lambda: 7), 10) == 7
            assert parts.compute.pending == 0
            go_on.set()
            for done in await asyncio.gather(*puts):
                assert all_are(done, Status.OK)
