"""Every limit, met exactly and overstepped by one: which check belongs to which constant.

`CHECKS` covers `entresol_proto.limits`; `settings_checks` covers every setting of the daemon and of
the client that has a range. A check is a function here, the name of a test that does it, or, where
neither can be, a reason. tests/unit/test_bounds.py fails for a constant without an entry.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entresol_client import config as client_config
from entresol_client.config import ClientConfig
from entresol_daemon import config as daemon_config
from entresol_daemon.config import Config
from entresol_daemon.config_values import settings_of
from entresol_proto import ids, limits
from entresol_proto.fabric import framing, shmendpoint, tcp, verbs_wire
from entresol_proto.fabric.base import FabricKind, Offer, RemoteSpan
from entresol_proto.fabric.tcp_wire import TcpParams
from entresol_proto.fabric.tickets import OfferTable
from entresol_proto.seal import block as sealing
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.header import BlockIdentity, BlockMeta
from entresol_proto.status import EntresolError, ProtocolError, Status
from entresol_proto.wire import data, opening, session
from entresol_proto.wire.frames import FrameDecoder, FrameType, encode_frame
from entresol_proto.wire.session import ServerSession, State


@dataclass(frozen=True, slots=True)
class Test:
    """A test that meets the limit and oversteps it."""

    __test__ = False

    node: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why there is nothing to overstep, or where it is done instead."""

    text: str


Check = Callable[[], None] | Test | Reason


def refused(action: Callable[[], object], status: Status | None = None) -> None:
    """Raises: AssertionError unless the action is refused with one of our errors."""
    try:
        action()
    except EntresolError as error:
        found = error
    else:
        raise AssertionError("one past the limit was taken")
    assert status in (None, found.status), f"{found.status.label}: {found}"


# Blocks and keys ----------------------------------------------------------------------------------


def block_bytes_min() -> None:
    assert sealing.sealed_bytes_max(limits.BLOCK_BYTES_MIN) > 0
    refused(lambda: sealing.sealed_bytes_max(limits.BLOCK_BYTES_MIN - 1), Status.BAD_REQUEST)


def block_bytes_max() -> None:
    assert sealing.sealed_bytes_max(limits.BLOCK_BYTES_MAX) > limits.BLOCK_BYTES_MAX
    refused(lambda: sealing.sealed_bytes_max(limits.BLOCK_BYTES_MAX + 1), Status.TOO_LARGE)


def align_bytes() -> None:
    def check(segment_bytes: int) -> None:
        config = Config.dev("/nowhere")
        flash = dataclasses.replace(config.flash, segment_bytes=segment_bytes)
        dataclasses.replace(config, flash=flash).check()

    check((16 << 20) + limits.ALIGN_BYTES)
    refused(lambda: check((16 << 20) + limits.ALIGN_BYTES + 1))
    refused(lambda: check((16 << 20) + limits.ALIGN_BYTES - 1))


def chunk_bytes() -> None:
    def size(chunk: int) -> int:
        return sealing.sealed_bytes_max(100_000, chunk_bytes=chunk)

    assert size(limits.CHUNK_BYTES_MIN) > 0
    assert size(limits.CHUNK_BYTES_MAX) > 0
    refused(lambda: size(limits.CHUNK_BYTES_MIN - 1), Status.BAD_REQUEST)
    refused(lambda: size(limits.CHUNK_BYTES_MAX + 1), Status.BAD_REQUEST)


def chunk_bytes_default() -> None:
    default = inspect.signature(sealing.seal_into).parameters["chunk_bytes"].default
    assert default == limits.CHUNK_BYTES_DEFAULT == Config().sealing.chunk_bytes


def chunks_per_block() -> None:
    def size(plain: int) -> int:
        return sealing.sealed_bytes_max(plain, chunk_bytes=limits.CHUNK_BYTES_MIN)

    most = limits.CHUNKS_PER_BLOCK_MAX * limits.CHUNK_BYTES_MIN
    assert size(most) > most
    refused(lambda: size(most + 1), Status.TOO_LARGE)


def _identity(space: int = 16, wire: int = 16, engine: int = 16) -> BlockIdentity:
    return BlockIdentity(bytes(space), bytes(wire), bytes(engine), DType.BF16, 1)


def wire_key_bytes() -> None:
    size = limits.WIRE_KEY_BYTES
    _identity(wire=size)
    for wrong in (size - 1, size + 1):
        refused(lambda wrong=wrong: _identity(wire=wrong), Status.BAD_REQUEST)  # type: ignore[misc]
        refused(lambda wrong=wrong: data.Exists.decode(bytes(4 + wrong)))  # type: ignore[misc]
    data.Exists.decode(bytes(4 + size))


def namespace_id_bytes() -> None:
    size = limits.NAMESPACE_ID_BYTES
    _identity(space=size)
    for wrong in (size - 1, size + 1):
        refused(lambda wrong=wrong: _identity(space=wrong), Status.BAD_REQUEST)  # type: ignore[misc]


def engine_key_bytes() -> None:
    def both(size: int) -> None:
        ids.check_engine_key(bytes(size))
        _identity(engine=size)
        data.Explain.decode(data.Explain(1, (bytes(size),)).encode())

    for size in (limits.ENGINE_KEY_BYTES_MIN, limits.ENGINE_KEY_BYTES_MAX):
        both(size)
    for wrong in (limits.ENGINE_KEY_BYTES_MIN - 1, limits.ENGINE_KEY_BYTES_MAX + 1):
        refused(lambda wrong=wrong: ids.check_engine_key(bytes(wrong)), Status.BAD_REQUEST)  # type: ignore[misc]
        refused(lambda wrong=wrong: _identity(engine=wrong), Status.BAD_REQUEST)  # type: ignore[misc]
        raw = data.Explain(1, (bytes(wrong),)).encode()
        refused(lambda raw=raw: data.Explain.decode(raw))  # type: ignore[misc]


def tokens_per_block() -> None:
    def meta(count: int) -> bytes:
        return BlockMeta(b"", 0, 16, ids.pack_token_ids((1,) * count)).encode()

    def reserve(count: int) -> bytes:
        item = data.PutItem(bytes(16), bytes(16), 1, 0, b"", ids.pack_token_ids((1,) * count))
        return data.Reserve(1, data.Ack.DURABLE, 1, (item,)).encode()

    most = limits.TOKENS_PER_BLOCK_MAX
    assert len(BlockMeta.decode(meta(most)).token_ids) == most
    refused(lambda: meta(most + 1), Status.TOO_LARGE)
    data.Reserve.decode(reserve(most))
    refused(lambda: data.Reserve.decode(reserve(most + 1)))


# Frames -------------------------------------------------------------------------------------------


def frame_header_bytes() -> None:
    raw = encode_frame(FrameType.GOODBYE, 0, b"")
    assert len(raw) == limits.FRAME_HEADER_BYTES
    decoder = FrameDecoder()
    assert decoder.feed(raw[:-1]) == []
    assert len(decoder.feed(raw[-1:])) == 1


def frame_payload_bytes() -> None:
    most = limits.FRAME_PAYLOAD_BYTES_MAX
    raw = encode_frame(FrameType.PING, 1, bytes(most))
    decoder = FrameDecoder(most)
    assert len(decoder.feed(raw)[0].payload) == most
    refused(lambda: encode_frame(FrameType.PING, 1, bytes(most + 1)), Status.TOO_LARGE)
    refused(lambda: FrameDecoder(most - 1).feed(raw), Status.TOO_LARGE)


def frame_payload_bytes_before_open() -> None:
    most = limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX
    FrameDecoder().feed(encode_frame(FrameType.HELLO, 1, bytes(most)))
    over = encode_frame(FrameType.HELLO, 1, bytes(most + 1))
    refused(lambda: FrameDecoder().feed(over[: limits.FRAME_HEADER_BYTES]), Status.TOO_LARGE)
    machine = ServerSession(now_ns=0)
    refused(lambda: machine.receive(over[: limits.FRAME_HEADER_BYTES], 0), Status.TOO_LARGE)
    assert machine.state is State.CLOSED


def keys_per_frame() -> None:
    most = limits.KEYS_PER_FRAME_MAX
    for kind in (data.Exists, data.Touch, data.Forget):
        kind.decode(kind(1, bytes(16 * most)).encode())
        raw = kind(1, bytes(16 * (most + 1))).encode()
        refused(lambda kind=kind, raw=raw: kind.decode(raw))  # type: ignore[misc]


def blocks_per_fetch() -> None:
    def fetch(count: int) -> bytes:
        return data.Fetch(1, data.OpenAt.HOST, False, 1, bytes(16 * count)).encode()

    most = limits.BLOCKS_PER_FETCH_MAX
    data.Fetch.decode(fetch(most))
    refused(lambda: data.Fetch.decode(fetch(most + 1)))
    data.Release.decode(data.Release((1,) * most).encode())
    refused(lambda: data.Release.decode(data.Release((1,) * (most + 1)).encode()))
    keys = (bytes(8),) * (most + 1)
    data.Explain.decode(data.Explain(1, keys[:most]).encode())
    refused(lambda: data.Explain.decode(data.Explain(1, keys).encode()))


def carried_bytes() -> None:
    def grant(size: int) -> bytes:
        item = data.GrantItem(0, data.Tier.MEMORY, RemoteSpan(0, 0, size), 1, bytes(32), bytes(16))
        return data.Grant(True, 0, 0, 0, (item,), (), bytes(size)).encode()

    most = limits.CARRIED_BYTES_MAX
    data.Grant.decode(grant(most))
    refused(lambda: data.Grant.decode(grant(most + 1)))


def blocks_per_put() -> None:
    most = limits.BLOCKS_PER_PUT_MAX
    item = data.PutItem(bytes(16), bytes(8), 1, 0, b"", b"")
    span = (1, RemoteSpan(1, 0, 1))

    def reserve(count: int) -> bytes:
        return data.Reserve(1, data.Ack.DURABLE, 1, (item,) * count).encode()

    data.Reserve.decode(reserve(most))
    refused(lambda: data.Reserve.decode(reserve(most + 1)))
    data.Commit.decode(data.Commit((span,) * most).encode())
    refused(lambda: data.Commit.decode(data.Commit((span,) * (most + 1)).encode()))


def requests_in_flight() -> None:
    machine = ServerSession(now_ns=0)
    machine._enter(State.OPEN)
    ping = opening.Ping(bytes(8)).encode()
    most = limits.REQUESTS_IN_FLIGHT_MAX
    for number in range(1, most + 1):
        machine.receive(encode_frame(FrameType.PING, number, ping), 0)
    assert len(machine.in_flight) == most
    over = encode_frame(FrameType.PING, most + 1, ping)
    refused(lambda: machine.receive(over, 0), Status.BUSY)


def descriptor_bytes() -> None:
    def decode(size: int) -> object:
        return session._DECODERS[FrameType.OPEN_NAMESPACE](_open_namespace(size))

    decode(limits.DESCRIPTOR_BYTES_MAX)
    refused(lambda: decode(limits.DESCRIPTOR_BYTES_MAX + 1))


def _open_namespace(size: int) -> bytes:
    return opening.OpenNamespace(bytes(size)).encode()


def descriptor_text_bytes() -> None:
    most = limits.DESCRIPTOR_TEXT_BYTES_MAX
    found = ids.NamespaceDescriptor("m" * most)
    assert ids.NamespaceDescriptor.parse(found.canonical()) == found
    refused(lambda: ids.NamespaceDescriptor("m" * (most + 1)), Status.BAD_REQUEST)
    refused(lambda: ids.NamespaceDescriptor("é" * (most // 2) + "m"), Status.BAD_REQUEST)


# Fabrics ------------------------------------------------------------------------------------------


def spans_per_read() -> None:
    most = limits.SPANS_PER_READ_MAX * framing.SPAN.size
    assert framing.is_read_length(most)
    assert not framing.is_read_length(most + framing.SPAN.size)


def data_streams() -> None:
    def offer(streams: int) -> object:
        raw = TcpParams("h", 1, streams, False, bytes(limits.TICKET_BYTES), None).encode()
        return TcpParams.parse(raw)

    offer(limits.DATA_STREAMS_PER_SESSION_MAX)
    refused(lambda: offer(limits.DATA_STREAMS_PER_SESSION_MAX + 1), Status.BAD_REQUEST)
    default = inspect.signature(tcp.TcpFabricServer.__init__).parameters["streams"].default
    assert default == limits.DATA_STREAMS_DEFAULT <= limits.DATA_STREAMS_PER_SESSION_MAX


def offer_params_bytes() -> None:
    Offer(FabricKind.TCP, bytes(limits.OFFER_PARAMS_BYTES_MAX))
    refused(lambda: Offer(FabricKind.TCP, bytes(limits.OFFER_PARAMS_BYTES_MAX + 1)))


class _Nobody:
    """Hears a greeting."""

    def on_hello(self, number: int, streams: int, ticket: bytes) -> None:
        assert len(ticket) == limits.TICKET_BYTES


def ticket_bytes() -> None:
    def greet(size: int) -> None:
        reader = framing.FrameReader(_Nobody(), framing.Message.HELLO)  # type: ignore[arg-type]
        raw = framing.hello(0, 1, bytes(size))
        for at in range(0, len(raw), 8):
            part = raw[at : at + 8]
            reader.buffer()[: len(part)] = part
            reader.received(len(part))

    greet(limits.TICKET_BYTES)
    for wrong in (limits.TICKET_BYTES - 1, limits.TICKET_BYTES + 1):
        refused(lambda wrong=wrong: greet(wrong))  # type: ignore[misc]


def offers_open() -> None:
    async def issue() -> None:
        table: OfferTable[object] = OfferTable(lambda endpoint: None)
        try:
            for _ in range(limits.OFFERS_OPEN_MAX):
                table.issue()
            refused(table.issue, Status.BUSY)
        finally:
            table.close()

    asyncio.run(issue())


def mapped_bytes() -> None:
    for made in (shmendpoint.ShmEndpoint.__init__,):
        default = inspect.signature(made).parameters["mapped_bytes_max"].default
        assert default == limits.MAPPED_BYTES_PER_SESSION_MAX


# Time ---------------------------------------------------------------------------------------------


def handshake_deadline() -> None:
    machine = ServerSession(now_ns=7)
    machine.handle_timer(7 + limits.HANDSHAKE_DEADLINE_NS - 1)
    refused(lambda: machine.handle_timer(7 + limits.HANDSHAKE_DEADLINE_NS), Status.DEADLINE)


def lease_default() -> None:
    assert Config().limits.lease_ns == limits.LEASE_NS_DEFAULT


def deadline_default() -> None:
    assert _client().deadline_ns == limits.DEADLINE_NS_DEFAULT <= limits.DEADLINE_NS_MAX


def deadline_max() -> None:
    def fetch(deadline_ns: int) -> object:
        return data.Fetch.decode(
            data.Fetch(1, data.OpenAt.HOST, False, deadline_ns, bytes(16)).encode()
        )

    fetch(limits.DEADLINE_NS_MAX)
    fetch(1)
    for wrong in (0, limits.DEADLINE_NS_MAX + 1):
        refused(lambda wrong=wrong: fetch(wrong))  # type: ignore[misc]


# verbs --------------------------------------------------------------------------------------------


def _rails(count: int) -> tuple[verbs_wire.Rail, ...]:
    gid = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
    return tuple(verbs_wire.Rail(n, False, 1024, 16, 0, 17 + n, 5, gid) for n in range(count))


def _verbs_offer(rails: int, lifetime_ms: int) -> object:
    raw = verbs_wire.OfferParams(True, lifetime_ms, bytes(16), _rails(rails)).encode()
    return verbs_wire.OfferParams.parse(raw)


def verbs_rails() -> None:
    _verbs_offer(limits.VERBS_RAILS_MAX, 1)
    refused(lambda: _verbs_offer(limits.VERBS_RAILS_MAX + 1, 1), Status.BAD_REQUEST)


def verbs_lifetime() -> None:
    _verbs_offer(1, limits.VERBS_OFFER_LIFETIME_MS_MAX)
    refused(lambda: _verbs_offer(1, limits.VERBS_OFFER_LIFETIME_MS_MAX + 1), Status.BAD_REQUEST)


_READER = "tests/unit/test_verbs_reader.py::"
_HOSTILE_TCP = "tests/unit/test_fabric_hostile_tcp.py::"
_HOSTILE_SHM = "tests/unit/test_fabric_hostile_shm.py::"
_CLOSING = "tests/unit/test_closing.py::"
_BOUNDS = "tests/unit/test_bounds.py::"
_OF_THE_DEVICE = Reason("given to the RDMA device, which keeps to it; tests/rdma runs with it")
_WINDOW = Test(_READER + "test_the_window_follows_the_wire")
_SIZES = Reason("a unit of size, no limit")

CHECKS: dict[str, Check] = {
    "KIB": _SIZES, "MIB": _SIZES, "GIB": _SIZES,
    "BLOCK_BYTES_MIN": block_bytes_min, "BLOCK_BYTES_MAX": block_bytes_max,
    "ALIGN_BYTES": align_bytes,
    "CHUNK_BYTES_DEFAULT": chunk_bytes_default, "CHUNK_BYTES_MIN": chunk_bytes,
    "CHUNK_BYTES_MAX": chunk_bytes, "CHUNKS_PER_BLOCK_MAX": chunks_per_block,
    "WIRE_KEY_BYTES": wire_key_bytes, "NAMESPACE_ID_BYTES": namespace_id_bytes,
    "ENGINE_KEY_BYTES_MIN": engine_key_bytes, "ENGINE_KEY_BYTES_MAX": engine_key_bytes,
    "TOKENS_PER_BLOCK_MAX": tokens_per_block,
    "FRAME_HEADER_BYTES": frame_header_bytes, "FRAME_PAYLOAD_BYTES_MAX": frame_payload_bytes,
    "FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX": frame_payload_bytes_before_open,
    "KEYS_PER_FRAME_MAX": keys_per_frame, "BLOCKS_PER_FETCH_MAX": blocks_per_fetch,
    "CARRIED_BYTES_MAX": carried_bytes, "BLOCKS_PER_PUT_MAX": blocks_per_put,
    "REQUESTS_IN_FLIGHT_MAX": requests_in_flight,
    "NAMESPACES_PER_SESSION_MAX":
        Test("tests/daemon/test_quota_full.py::test_sessions_and_namespaces_at_their_limits"),
    "DESCRIPTOR_BYTES_MAX": descriptor_bytes, "DESCRIPTOR_TEXT_BYTES_MAX": descriptor_text_bytes,
    "SPANS_PER_READ_MAX": spans_per_read, "DATA_STREAMS_PER_SESSION_MAX": data_streams,
    "REGIONS_PER_SESSION_MAX":
        Test("tests/contract/test_fabric_contract.py::test_exposures_are_bounded"),
    "OFFER_PARAMS_BYTES_MAX": offer_params_bytes, "TICKET_BYTES": ticket_bytes,
    "OFFERS_OPEN_MAX": offers_open, "DATA_STREAMS_DEFAULT": data_streams,
    "DATA_STREAMS_PENDING_MAX":
        Test(_HOSTILE_TCP + "test_silent_connections_are_dropped_and_bounded"),
    "DATA_PIECE_BYTES_MAX": Test(_BOUNDS + "test_pieces_of_a_span_are_bounded"),
    "DATA_QUEUE_BYTES_MAX": Test(
        _HOSTILE_TCP + "test_a_reader_that_does_not_receive_costs_bounded_memory_and_ends_at_revoke"
    ),
    "READS_PER_STREAM_MAX": Test(_HOSTILE_TCP + "test_more_requests_than_allowed_end_the_session"),
    "SPANS_PER_STREAM_MAX": Test(_HOSTILE_TCP + "test_more_requests_than_allowed_end_the_session"),
    "MAPPED_BYTES_PER_SESSION_MAX":
        Test(_HOSTILE_SHM + "test_memory_and_regions_of_a_peer_are_bounded"),
    "SHM_MAPPED_BYTES_MAX":
        Test("tests/unit/test_fabric_shm_budget.py::test_one_peer_cannot_have_all_that_a_daemon_maps"),
    "SHM_REGIONS_PER_HOST_MAX":
        Test(_HOSTILE_SHM + "test_memory_and_regions_of_a_peer_are_bounded"),
    "SHM_MESSAGES_QUEUED_MAX":
        Test(_HOSTILE_SHM + "test_a_peer_that_does_not_receive_its_answers_is_cut_off"),
    "SHM_UNANSWERED_MAX":
        Test("tests/unit/test_fabric_shm_unanswered.py::test_a_peer_that_answers_no_exposure_is_cut_off"),
    "SHM_CLOSERS_MAX": Test(
        _CLOSING + "test_threads_that_hang_are_bounded_and_then_nobody_new_is_let_in"
    ),
    "SHM_CLOSING_MAX":
        Test(_CLOSING + "test_nothing_is_received_while_too_much_waits_to_be_closed"),
    "EXPOSE_DEADLINE_NS":
        Test(_HOSTILE_SHM + "test_a_peer_that_hangs_or_refuses_fails_the_expose_only"),
    "REVOKE_DEADLINE_NS": Test(
        _HOSTILE_TCP + "test_a_reader_that_does_not_receive_costs_bounded_memory_and_ends_at_revoke"
    ),
    "VERBS_RAILS_MAX": verbs_rails, "VERBS_TIMEOUT": _OF_THE_DEVICE,
    "VERBS_RETRIES": _OF_THE_DEVICE, "VERBS_RNR_TIMER": _OF_THE_DEVICE,
    "VERBS_RNR_RETRIES": _OF_THE_DEVICE, "VERBS_RD_ATOMIC_MAX": _OF_THE_DEVICE,
    "VERBS_READS_POSTED_MAX": Test(_BOUNDS + "test_a_rail_has_room_for_so_many_reads"),
    "VERBS_WINDOW_BYTES": _WINDOW, "VERBS_WINDOW_BYTES_MIN": _WINDOW,
    "VERBS_WINDOW_BYTES_START": _WINDOW, "VERBS_WINDOW_NS": _WINDOW,
    "VERBS_READS_SIGNALED_EVERY": _OF_THE_DEVICE, "VERBS_SIGNALED_BYTES": _OF_THE_DEVICE,
    "VERBS_PIECE_BYTES_MAX": Test(_READER + "test_pieces_are_bounded_and_never_cross_a_granule"),
    "VERBS_READS_QUEUED_MAX": Test(_READER + "test_waiting_pieces_are_bounded"),
    "VERBS_MESSAGES_IN_FLIGHT_MAX": Test(_BOUNDS + "test_verbs_messages_wait_and_are_bounded"),
    "VERBS_MESSAGES_QUEUED_MAX": Test(_BOUNDS + "test_verbs_messages_wait_and_are_bounded"),
    "VERBS_OFFER_LIFETIME_MS_MAX": verbs_lifetime,
    "VERBS_GRANULE_BYTES": Test(_READER + "test_pieces_are_bounded_and_never_cross_a_granule"),
    "VERBS_REGISTRATIONS_MAX":
        Test(_READER + "test_registrations_are_bounded_and_closed_ones_do_not_count"),
    "VERBS_BOUNCE_BYTES": Reason("the size of a buffer; what does not fit waits, as "
                                 "test_the_bounce_ring_never_hands_out_bytes_twice shows"),
    "VERBS_BOUNCE_OP_BYTES_MAX":
        Test(_READER + "test_every_size_lands_exactly_and_nothing_else_does"),
    "VERBS_ANNOUNCE_NS": Reason("a wait on a device: tests/rdma/suites/test_verbs_fences.py"),
    "VERBS_DRAIN_NS": Test(_READER + "test_a_device_that_never_finishes_is_cut_off"),
    "VERBS_GOODBYE_NS": Reason("a wait on a device: tests/rdma/suites/test_verbs_faults.py"),
    "HANDSHAKE_DEADLINE_NS": handshake_deadline, "LEASE_NS_DEFAULT": lease_default,
    "DEADLINE_NS_DEFAULT": deadline_default, "DEADLINE_NS_MAX": deadline_max,
}  # fmt: skip

# [limits] and its like at work in a daemon, beside their ranges below.
AT_WORK: dict[str, Test] = {
    "sessions_max, sessions_per_tenant_max, namespaces_per_tenant_max":
        Test("tests/daemon/test_quota_full.py::test_sessions_and_namespaces_at_their_limits"),
    "block_bytes_max":
        Test("tests/daemon/test_quota_full.py::test_the_longest_block_and_one_byte_more"),
    "put_queue_blocks_max":
        Test("tests/daemon/test_quota_full.py::test_put_queue_in_blocks_at_its_limit"),
    "inflight_bytes_per_session_max":
        Test("tests/daemon/test_quota_full.py::test_in_flight_bytes_smaller_than_a_slab"),
    "leases_per_session_max":
        Test("tests/daemon/test_lease_life.py::test_lease_table_at_its_limit_and_one_past_it"),
    "blocks_max": Test("tests/daemon/test_quota_full.py::test_an_index_of_few_blocks"),
    "flash_bytes":
        Test("tests/daemon/test_quota_full.py::test_a_block_larger_than_the_whole_quota"),
    "dram_bytes": Test("tests/daemon/test_quota_full.py::test_memory_quota_of_a_tenant"),
    "tenants_max": Test(_BOUNDS + "test_tenants_and_key_versions_at_their_limits"),
    "history_events_max": Test(_BOUNDS + "test_history_at_its_limit"),
    "put_queue_bytes_max": Test(_BOUNDS + "test_the_put_queue_in_bytes_at_its_limit"),
}  # fmt: skip


# Ranges of settings -------------------------------------------------------------------------------


def settings_checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check) of every setting with a lower or an upper bound."""
    for section, cls in daemon_config._SECTIONS.items():
        for item, about in settings_of(cls):
            if about.low is not None or about.high is not None:
                yield (
                    f"[{section}] {item.name}",
                    lambda section=section, name=item.name, about=about: _daemon_range(
                        section, name, about.kind, about.low, about.high
                    ),  # type: ignore[misc]
                )
    for cls in (ClientConfig, client_config.BreakerSettings, client_config.ShardAddress):
        for field in dataclasses.fields(cls):
            if "low" in field.metadata:
                yield (
                    f"client {cls.__name__}.{field.name}",
                    lambda cls=cls, field=field: _client_range(cls, field),  # type: ignore[misc]
                )


def _beside(kind: str, bound: float, way: int) -> float:
    """The next value past a bound."""
    return math.nextafter(bound, way * math.inf) if kind == "float" else int(bound) + way


def _daemon_range(
    section: str, name: str, kind: str, low: float | None, high: float | None
) -> None:
    def parse(value: float) -> Any:
        written = repr(float(value)) if kind == "float" else str(int(value))
        found = Config.parse(f"[{section}]\n{name} = {written}\n", Path("c.toml"))
        return getattr(getattr(found, section), name)

    for bound, way in ((low, -1), (high, 1)):
        if bound is not None:
            assert parse(bound) == bound, f"{name} = {bound}"
            refused(lambda bound=bound, way=way: parse(_beside(kind, bound, way)))  # type: ignore[misc]


def _client(**values: Any) -> ClientConfig:
    raw = {"cert": "c", "key": "k", "ca": "a", "shards": [{"name": "s"}], **values}
    return ClientConfig.from_mapping(raw, Path("client.toml"))


def _client_range(cls: type, field: Any) -> None:
    def set_to(value: float) -> ClientConfig:
        if cls is client_config.BreakerSettings:
            others = {"cooldown_ns_min": 10**6, "cooldown_ns_max": 3600 * 10**9}
            others.pop(field.name, None)
            return _client(breaker={**others, field.name: value})
        if cls is client_config.ShardAddress:
            return _client(shards=[{"name": "s", field.name: value}])
        return _client(**{field.name: value})

    kind = "float" if isinstance(field.default, float) else "int"
    low, high = field.metadata["low"], field.metadata["high"]
    set_to(low)
    set_to(high)
    refused(lambda: set_to(_beside(kind, low, -1)))
    refused(lambda: set_to(_beside(kind, high, 1)))


assert issubclass(ProtocolError, EntresolError)
