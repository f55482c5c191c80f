"""Every quota of a tenant, at its number and one past it, on a running shard.

Each story sets one quota, holds exactly as much, asks for one more, lets go of one, asks again.
Another tenant is there all the time: it is never refused anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon.core.accounts import Account
from entresol_daemon.keys.keyring import TenantQuota
from entresol_proto.ids import TenantName
from entresol_proto.status import EntresolError, QuotaError, Status
from entresol_proto.wire import data
from tests.proof.fairlab import KIB, SECOND_NS, Guest, Place, key_of

BLOCK_BYTES = 64 * KIB
RECORD_BYTES = 72 * KIB  # of such a block, header and all
HELD_NS = SECOND_NS // 5


@asynccontextmanager
async def place_with(folder: Path, seed: int, **quota: int) -> AsyncIterator[Place]:
    """Two tenants; `ann` has this quota."""
    place = await Place.open(folder, seed, {"ann": 1, "ben": 1})
    info = place.keyring.set_quota("ann", replace(TenantQuota(), **quota))
    place.shard.tenancy.adopt(info)
    try:
        yield place
        other = await guest_of(place, "ben")
        assert set(await other.put([key_of("ben", 1)], BLOCK_BYTES)) == {Status.OK}
        assert set(await other.get(other.names([key_of("ben", 1)]))) == {Status.OK}
        await other.gone()
    finally:
        await place.close()


async def guest_of(place: Place, tenant: str = "ann") -> Guest:
    guest = Guest(place, tenant)
    await guest.open()
    return guest


def account_of(place: Place) -> Account:
    return place.shard.parts.accounts.by_name[TenantName("ann")]


async def fetch(guest: Guest, names: bytes) -> tuple[int, list[Status]]:
    """One lease over these, kept; with what was refused by its deadline."""
    statuses: list[Status] = []
    lease = 0
    message = data.Fetch(guest.handle, data.OpenAt.HOST, False, HELD_NS, names)
    async for grant in guest._answers(message):
        statuses += [status for _, status in grant.misses]
        lease = grant.lease_id or lease
    return lease, statuses


async def sessions(folder: Path, seed: int) -> None:
    async with place_with(folder, seed, sessions=3) as place:
        guests = [await guest_of(place) for _ in range(3)]
        with pytest.raises(EntresolError) as caught:
            await guest_of(place)
        assert caught.value.status is Status.QUOTA, "a fourth session of three"
        await guests.pop().gone()
        await guest_of(place)


async def leases(folder: Path, seed: int) -> None:
    async with place_with(folder, seed, leases=2) as place:
        guest = await guest_of(place)
        keys = [key_of("ann", number) for number in range(4)]
        await guest.put(keys, BLOCK_BYTES)
        names = [guest.names([key]) for key in keys]
        held = [await fetch(guest, name) for name in names[:2]]
        assert all(lease and not refused for lease, refused in held), held
        assert await fetch(guest, names[2]) == (0, [Status.BUSY]), "a third lease of two"
        guest._send(data.Release((held[0][0],), ()))
        lease, refused = await fetch(guest, names[3])
        assert lease
        assert not refused
        assert account_of(place).leases == 2
        await asyncio.sleep(1.2)
        assert account_of(place).leases == 0, "leases that ran out still count"


async def get_bytes(folder: Path, seed: int) -> None:
    async with place_with(folder, seed, get_bytes=2 * RECORD_BYTES) as place:
        guest = await guest_of(place)
        keys = [key_of("ann", number) for number in range(4)]
        await guest.put(keys, BLOCK_BYTES)
        names = [guest.names([key]) for key in keys]
        held = [await fetch(guest, name) for name in names[:2]]
        assert all(lease and not refused for lease, refused in held), held
        account = account_of(place)
        assert account.get_bytes <= 2 * RECORD_BYTES
        if account.get_bytes < 2 * RECORD_BYTES:  # records are shorter than their bound
            await fetch(guest, names[0])
        assert await fetch(guest, names[2]) == (0, [Status.BUSY]), account.get_bytes
        guest._send(data.Release((held[0][0],), ()))
        await asyncio.sleep(1.2)
        assert account.get_bytes == 0, "memory of leases that ran out still counts"
        lease, refused = await fetch(guest, names[3])
        assert lease
        assert not refused


async def put_bytes(folder: Path, seed: int) -> None:
    async with place_with(folder, seed, put_bytes=3 * RECORD_BYTES) as place:
        guest = await guest_of(place)
        keys = [key_of("ann", number) for number in range(6)]
        items = tuple(
            data.PutItem(guest.names([key]), key, BLOCK_BYTES, at, b"", b"")
            for at, key in enumerate(keys)
        )
        message = data.Reserve(guest.handle, data.Ack.ACCEPTED, SECOND_NS, items)
        answers = (await guest.call(message)).items
        got = [answer.status for answer in answers]
        wanted = got.count(Status.OK)
        assert 3 <= wanted < 6, got
        assert set(got[wanted:]) == {Status.BUSY}, got
        assert account_of(place).put_bytes <= 3 * RECORD_BYTES
        await asyncio.sleep(1.2)  # nobody commits them
        assert account_of(place).put_bytes == 0
        assert set(await guest.put(keys[:3], BLOCK_BYTES)) == {Status.OK}


async def index_blocks(folder: Path, seed: int) -> None:
    async with place_with(folder, seed, index_blocks=10) as place:
        guest = await guest_of(place)
        for number in range(25):
            statuses = await guest.put([key_of("ann", number)], 64)
            assert statuses == [Status.OK], (number, statuses)
            assert account_of(place).flash_blocks <= 10, number
        assert set(await guest.get(guest.names([key_of("ann", 24)]))) == {Status.OK}


async def watchers(folder: Path, seed: int) -> None:
    async with place_with(folder, seed, watchers=2) as place:
        log, name = place.shard.parts.events, TenantName("ann")
        open_ones = [log.subscribe(name) for _ in range(2)]
        with pytest.raises(QuotaError) as caught:
            log.subscribe(name)
        assert caught.value.status is Status.QUOTA, "a third watcher of two"
        assert caught.value.hint
        open_ones.pop().close()
        log.subscribe(name)


async def flash_bytes(folder: Path, seed: int) -> None:
    async with place_with(folder, seed, flash_bytes=10 * RECORD_BYTES) as place:
        guest = await guest_of(place)
        for number in range(25):
            statuses = await guest.put([key_of("ann", number)], BLOCK_BYTES)
            assert statuses == [Status.OK], (number, statuses)
            assert account_of(place).flash_bytes <= 10 * RECORD_BYTES


STORIES = (sessions, leases, get_bytes, put_bytes, index_blocks, watchers, flash_bytes)
