"""Every limit at itself and one past it; no constant and no range without a check.

The checks are in tests/bounds.py, with the line F3 of tests/proof. Here are also those tests that
no other place had.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import bounds
import pytest
import uvloop
from harness import running_daemon
from tcp_peer import raw_session

from entresol_daemon.events.log import EventLimits, EventLog
from entresol_daemon.events.stream import EventStream
from entresol_daemon.events.types import Event, Gap, Kind, Position
from entresol_daemon.keys.keyring import DEK_VERSIONS_PER_TENANT_MAX, Keyring
from entresol_daemon.keys.providers import FileKek
from entresol_proto import limits
from entresol_proto.fabric import framing, verbs_messenger
from entresol_proto.fabric.verbs_rail import RailLink
from entresol_proto.fabric.verbs_wire import Kind as VerbsKind
from entresol_proto.fabric.verbs_wire import Message
from entresol_proto.ids import NamespaceId, TenantName
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import FabricError, KeyringError, QuotaError, Status
from tests.daemon.daemon_lab import key_of, put_item, raw_of, shape

ROOT = Path(__file__).resolve().parents[2]
CALLED = {name: check for name, check in bounds.CHECKS.items() if callable(check)}
NAMED = {
    check.node
    for check in (*bounds.CHECKS.values(), *bounds.AT_WORK.values())
    if isinstance(check, bounds.Test)
}
RANGES = dict(bounds.settings_checks())


def test_every_constant_has_a_check_or_a_reason() -> None:
    constants = {name for name, value in vars(limits).items() if name.isupper()}
    assert set(bounds.CHECKS) == constants
    for name, check in bounds.CHECKS.items():
        if isinstance(check, bounds.Reason):
            assert len(check.text) > 10, name


@pytest.mark.parametrize("node", sorted(NAMED))
def test_the_named_tests_exist(node: str) -> None:
    path, _, name = node.partition(":" * 2)
    assert re.search(rf"^(async )?def {name}\b", (ROOT / path).read_text(), re.M), node


@pytest.mark.parametrize("name", CALLED)
def test_at_the_limit_and_one_past(name: str) -> None:
    CALLED[name]()


@pytest.mark.parametrize("name", RANGES)
def test_ranges_of_settings(name: str) -> None:
    RANGES[name]()


def test_a_limit_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check fails when the limit it is about moves under the code."""
    monkeypatch.setattr(limits, "KEYS_PER_FRAME_MAX", limits.KEYS_PER_FRAME_MAX - 1)
    bounds.keys_per_frame()  # follows the constant
    monkeypatch.setattr(bounds.data.Cursor, "check_count", lambda *_: None)
    with pytest.raises(AssertionError, match="one past the limit"):
        bounds.keys_per_frame()


# tcp ----------------------------------------------------------------------------------------------


def test_pieces_of_a_span_are_bounded() -> None:
    """A span leaves in pieces of DATA_PIECE_BYTES_MAX, the rest behind them."""

    async def lengths(size: int) -> list[int]:
        async with raw_session() as (endpoint, peer):
            exposure = await endpoint.expose(memoryview(bytearray(size)))
            peer.say(framing.read(1, [exposure.span(0, size)]))
            found: list[int] = []
            while sum(found) < size:
                kind, _, _, _, _, body = await peer.hear()
                assert kind == framing.Message.DATA
                found.append(len(body))
            await endpoint.revoke(exposure)
            return found

    most = limits.DATA_PIECE_BYTES_MAX
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(lengths(most)) == [most]
        assert runner.run(lengths(most + 1)) == [most, 1]


# verbs, as far as it goes without a device --------------------------------------------------------


def test_a_rail_has_room_for_so_many_reads() -> None:
    rail = SimpleNamespace(reads_posted=0, bytes_posted=0, window_bytes=limits.VERBS_WINDOW_BYTES)
    room: Callable[[int], bool] = lambda n: RailLink.has_room(rail, n)  # type: ignore[arg-type]  # noqa: E731
    rail.reads_posted = limits.VERBS_READS_POSTED_MAX - 1
    assert room(1)
    rail.reads_posted += 1
    assert not room(1)
    rail.reads_posted, rail.bytes_posted = 1, limits.VERBS_WINDOW_BYTES - 5
    assert room(5)
    assert not room(6)


class Wire:
    """A rail that keeps what is sent and tells of nothing."""

    def __init__(self) -> None:
        self.destroyed = False
        self.sent = 0
        self.domain = SimpleNamespace(register=lambda *_: SimpleNamespace(lkey=1))
        self.queue_pair = SimpleNamespace(post_receive=lambda receive: None)

    def post_send(self, work: object, address: int, lkey: int) -> None:
        self.sent += 1


def test_verbs_messages_wait_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are on the wire, so many wait behind them, and the next one is refused."""
    monkeypatch.setattr(verbs_messenger, "Receive", lambda *_: None)  # a thing of pyverbs
    wire = Wire()
    messenger = verbs_messenger.Messenger(wire, 1)  # type: ignore[arg-type]
    messenger.start()
    revoke = Message(VerbsKind.REVOKE, (1,))
    for _ in range(limits.VERBS_MESSAGES_IN_FLIGHT_MAX):
        messenger.send(revoke)
    assert wire.sent == limits.VERBS_MESSAGES_IN_FLIGHT_MAX
    for _ in range(limits.VERBS_MESSAGES_QUEUED_MAX):
        messenger.send(revoke)
    assert wire.sent == limits.VERBS_MESSAGES_IN_FLIGHT_MAX
    with pytest.raises(FabricError) as caught:
        messenger.send(revoke)
    assert caught.value.status is Status.DISCONNECTED


# The daemon's own tables --------------------------------------------------------------------------


def test_tenants_and_key_versions_at_their_limits(tmp_path: Path) -> None:
    ring = Keyring.open(tmp_path / "state", FileKek(bytes(range(32))), tenants_max=2)
    try:
        ring.add_tenant("a", now_unix_s=1)
        ring.add_tenant("b", now_unix_s=1)
        with pytest.raises(QuotaError):
            ring.add_tenant("c", now_unix_s=1)
        for _ in range(DEK_VERSIONS_PER_TENANT_MAX - 1):
            ring.rotate("a", now_unix_s=2)
        with pytest.raises(QuotaError):
            ring.rotate("a", now_unix_s=3)
        ring.retire("a", 1)
        assert ring.rotate("a", now_unix_s=4) == DEK_VERSIONS_PER_TENANT_MAX + 1
    except KeyringError as error:
        raise AssertionError(str(error)) from error
    finally:
        ring.close()


async def test_history_at_its_limit() -> None:
    """A reader as far behind as the history is long misses nothing; one more is a gap."""
    most = 5
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=most))
    tenant = TenantName("a")
    for number in range(most + 1):
        log.publish(
            Kind.STORED, tenant, time_unix_ns=1, namespace_id=NamespaceId(bytes(16)),
            wire_keys=(bytes([number]) * 16,), engine_keys=(bytes([number]) * 8,),
        )  # fmt: skip

    async def first(after: int) -> list[Event] | Gap:
        stream = EventStream(log, tenant, after=Position(1, after))
        try:
            async for batch in stream:
                return batch
        finally:
            stream.close()
        raise AssertionError("nothing came")

    found = await first(1)
    assert not isinstance(found, Gap)
    assert [event.seq for event in found] == list(range(2, most + 2))
    assert isinstance(await first(0), Gap)


@pytest.mark.daemon
async def test_the_put_queue_in_bytes_at_its_limit(tmp_path: Path) -> None:
    """Reservations up to the last byte, and not one record more; then again as they end."""
    base = shape()
    async with running_daemon(
        tmp_path / "d",
        lambda config: dataclasses.replace(
            base(config),
            limits=dataclasses.replace(base(config).limits, put_queue_bytes_max=2 * MIB),
        ),
    ) as running:
        budget = running.daemon.shard.parts.put_budget
        async with raw_of(running) as raw:
            namespace = await raw.namespace()
            items = [put_item(namespace, key_of(at), 100 * KIB) for at in range(40)]
            reply = await raw.reserve(namespace.handle, items)
            found = [item.status for item in reply.items]
            taken = found.count(Status.OK)
            assert found == [Status.OK] * taken + [Status.BUSY] * (40 - taken)
            record = budget.used_bytes // taken
            assert budget.used_bytes <= budget.bytes_max < budget.used_bytes + record
            raw.connection.give_up([item.put_id for item in reply.items[:1]])
            reply = await raw.reserve(namespace.handle, items[taken : taken + 2])
            assert [item.status for item in reply.items] == [Status.OK, Status.BUSY]
