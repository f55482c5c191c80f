"""What comes over gRPC, HTTP and ZeroMQ, and in certificates.

The gRPC target talks to a real daemon over its real sockets: raw bytes where a request belongs. The
others call the reader alone.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import grpc
import zmq
from google.protobuf.message import DecodeError

from entresol_client.cli import rpc
from entresol_client.relay.chain import Mirror
from entresol_client.relay.layouts import MATCH_FIELDS, NamespaceInfo
from entresol_client.relay.publisher import Publisher
from entresol_client.relay.workers import Worker
from entresol_daemon.config import Config
from entresol_daemon.control import grpc_convert, grpc_services, http
from entresol_daemon.control.admin import TenantQuota
from entresol_proto import identity, limits
from entresol_proto.identity import IdentityError
from entresol_proto.ids import NamespaceDescriptor, check_tenant_name
from entresol_proto.status import Status
from entresol_proto.v1 import entresol_pb2 as pb
from tests.fuzz.target import Parser, Target
from tests.harness import Running, running_daemon

# gRPC against a daemon ----------------------------------------------------------------------------

CALL_S = 60.0  # a busy machine takes its time; a call that hangs is found
METHODS = (
    ("Describe/Describe", False), ("Events/Namespaces", False), ("Events/Watch", True),
    ("Events/Snapshot", True), ("Admin/Stat", False), ("Admin/TenantAdd", False),
    ("Admin/TenantList", False), ("Admin/TenantSetQuota", False), ("Admin/TenantRotate", False),
    ("Admin/TenantErase", False), ("Admin/Segments", False), ("Admin/Drain", False),
)  # fmt: skip
TENANTS_MAX = 6
OUR_CODES = set(grpc_services.GRPC_CODES.values())


def _small(config: Config) -> Config:
    return replace(config, limits=replace(config.limits, tenants_max=TENANTS_MAX))


class GrpcDaemon:
    """A daemon in a thread, a channel as the operator and one as a tenant. Close it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-grpc-"))
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._running: Running | None = None
        self._thread = threading.Thread(target=self._run, name="fuzz-daemon", daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        assert self._running is not None, "the daemon did not start"
        config = self._running.client_config("dev")
        self._tenant: Any = rpc.tenant_channel(config, config.shards[0])
        unix = f"unix:{config.shards[0].admin_socket}"
        self._channels: list[Any] = [grpc.insecure_channel(unix), self._tenant.__enter__()]
        self._calls: list[list[Any]] = [
            [self._stub(channel, name, stream) for name, stream in METHODS]
            for channel in self._channels
        ]

    @staticmethod
    def _stub(channel: Any, name: str, stream: bool) -> Any:
        path = f"/entresol.v1.{name}"
        return channel.unary_stream(path) if stream else channel.unary_unary(path)

    def _run(self) -> None:
        async def live() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            async with running_daemon(self.folder / "d", _small) as self._running:
                self._ready.set()
                await self._stop.wait()

        try:
            asyncio.run(live())
        finally:
            self._ready.set()

    def __call__(self, raw: bytes) -> str:
        as_tenant, which = bool(raw[:1] and raw[0] & 0x80), (raw[0] if raw else 0) % len(METHODS)
        name, stream = METHODS[which]
        body = raw[1:]
        if name == "Admin/Drain" and not _refused_drain(body):
            return "would drain"
        call = self._calls[as_tenant][which]
        try:
            if stream:
                replies = call(body, timeout=CALL_S)
                for _reply in replies:
                    break
                replies.cancel()
            else:
                call(body, timeout=CALL_S)
        except grpc.RpcError as error:
            return self._refused(error, name, as_tenant)
        assert not (as_tenant and name.startswith("Admin")), "a tenant was an operator"
        return f"{name} ok"

    def _refused(self, error: Any, name: str, as_tenant: bool) -> str:
        """The refusal in a word. Raises: AssertionError for one that is not documented."""
        label = dict(error.trailing_metadata() or ()).get("entresol-status", "")
        code, details = error.code(), f"{name}: {error.code()} {error.details()}"
        assert label != Status.INTERNAL.label, details
        if label:
            assert code in OUR_CODES, details
            return f"{name} {label}"
        if as_tenant and name.startswith("Admin"):
            assert code is grpc.StatusCode.UNIMPLEMENTED, details
            return "no such method"
        raise AssertionError(details)

    def close(self) -> None:
        """End channels, daemon and thread."""
        self._tenant.__exit__(None, None, None)
        self._channels[0].close()
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        shutil.rmtree(self.folder, ignore_errors=True)


def _refused_drain(body: bytes) -> bool:
    """A drain that is carried out would be the end of the target."""
    try:
        return bool(pb.DrainRequest.FromString(body).deadline_ns > limits.DEADLINE_NS_MAX)
    except DecodeError:
        return True


def grpc_seeds() -> list[bytes]:
    """`u8 which call, and as whom`, then the request."""
    quota = pb.Quota(flash_bytes=1 << 30, weight=2)
    requests: dict[int, list[Any]] = {
        0: [pb.DescribeRequest()], 1: [pb.NamespacesRequest(tenant="dev"), pb.NamespacesRequest()],
        2: [pb.WatchRequest(), pb.WatchRequest(tenant="other"),
            pb.WatchRequest(after=pb.Position(incarnation=1, seq=2))],
        3: [pb.SnapshotRequest(tenant="dev"), pb.SnapshotRequest(),
            pb.SnapshotRequest(follow=True)],
        4: [pb.StatRequest()],
        5: [pb.TenantAddRequest(name="new-1", quota=quota), pb.TenantAddRequest(name="A b")],
        6: [pb.TenantListRequest()], 7: [pb.TenantSetQuotaRequest(name="new-1", quota=quota)],
        8: [pb.TenantRotateRequest(name="new-1"), pb.TenantRotateRequest(name="nobody")],
        9: [pb.TenantEraseRequest(name="new-1", confirm="new-2")],
        10: [pb.SegmentsRequest(first_segment=1, count_max=2)],
        11: [pb.DrainRequest(deadline_ns=2**63)],
    }  # fmt: skip
    return [
        bytes([first]) + one.SerializeToString()
        for which, listed in requests.items() for one in listed
        for first in _firsts(which)
    ]  # fmt: skip


def _firsts(which: int) -> tuple[int, int]:
    tenant = next(n for n in range(0x80, 256) if n % len(METHODS) == which)
    return which, tenant


def _quota_fault() -> AbstractContextManager[object]:
    """Undocumented errors come out of a service."""

    def quota_record(message: Any) -> TenantQuota:
        raise ZeroDivisionError

    logging.getLogger("entresol.grpc").setLevel(logging.CRITICAL)
    return patch.object(grpc_convert, "quota_record", quota_record)


# Events, as a relay takes them --------------------------------------------------------------------

SPACE = b"n" * 16


def event_seeds() -> list[bytes]:
    """`WatchReply`s: stored, removed, cleared, a gap."""
    kinds = pb.Kind

    def reply(**fields: Any) -> bytes:
        return pb.WatchReply(incarnation=1, events=[pb.Event(seq=1, **fields)]).SerializeToString()

    stored: dict[str, Any] = {
        "kind": kinds.KIND_STORED, "tenant": "dev", "namespace_id": SPACE, "block_tokens": 16,
        "wire_keys": [b"w" * 16, b"x" * 16], "engine_keys": [b"e" * 32, b"f" * 32],
        "token_ids": range(32), "medium": 1,
    }  # fmt: skip
    return [
        reply(**stored), reply(**{**stored, "parent": b"e" * 32, "position": 2}),
        reply(kind=kinds.KIND_REMOVED, namespace_id=SPACE, wire_keys=[b"w" * 16], reason=1),
        reply(kind=kinds.KIND_CLEARED, namespace_id=SPACE), reply(kind=kinds.KIND_TENANT_ERASED),
        pb.WatchReply(incarnation=1, gap=pb.Gap()).SerializeToString(),
    ]  # fmt: skip


def events_parser() -> Parser:
    """An event converts there and back, or names something not known; a mirror takes anything that
    is a message, and stays within its bound."""
    layout = [getattr(NamespaceDescriptor("m"), name) for name in MATCH_FIELDS]
    space = NamespaceInfo("dev", SPACE, tuple(layout), "", False, 0, 0)

    def parse(raw: bytes) -> str:
        try:
            reply = pb.WatchReply.FromString(raw)
        except DecodeError:
            return "not a message"
        mirror = Mirror(waiting_bytes_max=64 * 1024)
        mirror.add_space(space)
        seen = set()
        for message in reply.events:
            try:
                record = grpc_convert.event_record(message)
                assert grpc_convert.event_record(grpc_convert.event_message(record)) == record
                seen.add(record.kind.name)
            except ValueError:
                seen.add("unknown")
            _mirrored(mirror, message)
            assert mirror.waiting_bytes <= 64 * 1024 + 4 * len(raw)
        return " ".join([*sorted(seen), str(bool(mirror.take())), str(reply.HasField("gap"))])

    return parse


def _mirrored(mirror: Mirror, event: Any) -> None:
    """As `relay.service` does it."""
    if event.kind == pb.Kind.KIND_STORED:
        mirror.stored(
            "dev", event.namespace_id, event.wire_keys, event.engine_keys, event.parent,
            event.position, event.block_tokens, event.token_ids,
        )  # fmt: skip
    elif event.kind == pb.Kind.KIND_CLEARED:
        mirror.cleared("dev", event.namespace_id)
    else:
        mirror.removed("dev", event.namespace_id, event.wire_keys)


def _strict_kinds() -> AbstractContextManager[object]:
    def event_record(message: Any) -> Any:
        return {1: message}[message.kind]

    return patch.object(grpc_convert, "event_record", event_record)


# HTTP ---------------------------------------------------------------------------------------------


def http_seeds() -> list[bytes]:
    """What browsers, Prometheus and the curious send."""
    return [
        b"GET /metrics HTTP/1.1\r\nHost: a:7443\r\nAccept: */*\r\n\r\n",
        b"GET /healthz?x=1 HTTP/1.0\r\n\r\n", b"POST /readyz HTTP/1.1\r\n\r\n",
        b"GET http://a/metrics HTTP/1.1\r\nA : b\r\n\r\n", b"GET / HTTP/2\r\n\r\n", b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1]:7443\r\n\r\n",
    ]  # fmt: skip


def http_parser() -> Parser:
    """A path of ASCII without a query, with its host, or one of the documented codes."""

    def parse(raw: bytes) -> str:
        found = http._parse(raw)
        if isinstance(found, tuple):
            path, host = found
            assert path.startswith("/")
            assert path.isascii()
            assert "?" not in path
            assert host == host.strip()
            return "loopback" if http._is_loopback(host) else "ok"
        assert found.code in http._REASONS
        assert http._encode(found).startswith(b"HTTP/1.1 ")
        return str(found.code)

    return parse


def _strict_ascii(head: bytes) -> str:
    return head.split(b" ")[1].decode("ascii")


# Certificates -------------------------------------------------------------------------------------

DOMAIN = "entresol.local"


def certificate_seeds() -> list[bytes]:
    """Nothing: new certificates would have new keys, and an input's bytes follow from its seed. The
    corpus has PEM and DER of a tenant, a shard, a CA, nobody and two."""
    return [b""]


def certificates_parser() -> Parser:
    """A tenant's name in the allowed form, or an IdentityError."""

    def parse(raw: bytes) -> str:
        try:
            found = identity.spiffe_id_from_cert(raw, DOMAIN)
        except IdentityError as error:
            text = str(error)
            words = (
                "not an X.509",
                "CA",
                "no URI",
                "URI names",
                "domain",
                "path",
                "no certificate",
            )
            return next((word for word in words if word in text), "refused")
        assert str(found).startswith(f"spiffe://{DOMAIN}/{found.role}/")
        check_tenant_name(found.name)
        return found.role

    return parse


def _lenient() -> AbstractContextManager[object]:
    """Takes any name as it stands."""

    def parse_spiffe_id(uri: str, trust_domain: str) -> identity.SpiffeId:
        _, _, role, name = (*uri.split("/", 4)[1:], "", "", "")[:4]
        return identity.SpiffeId(trust_domain, role, name)

    return patch.object(identity, "parse_spiffe_id", parse_spiffe_id)


# The relay's sockets ------------------------------------------------------------------------------


def relay_seeds() -> list[bytes]:
    """`u8 to which socket`, then frames, each behind a byte of length."""

    def frames(*parts: bytes) -> bytes:
        return b"".join(bytes([len(part)]) + part for part in parts)

    return [
        b"\0" + frames(b"", (5).to_bytes(8, "big")), b"\0" + frames(b"", bytes(8)),
        b"\0" + frames(b"x"), b"\1" + frames(b"\1kv@"), b"\1" + frames(b"\0kv@"),
        b"\1" + frames(b"\2"),
    ]  # fmt: skip


class RelaySockets:
    """A publisher with three messages in its buffer, and a reader that sends anything."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-relay-"))
        places = [f"ipc://{self.folder}/{name}" for name in ("pub", "replay")]
        worker = Worker("pod", places[0], places[1])
        self.publisher = Publisher([worker], "m", start_seq=4)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._sub = self._context.socket(zmq.XSUB)
        for socket, place in ((self._dealer, places[1]), (self._sub, places[0])):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(place)
        for number in range(3):
            self.publisher.publish(lambda rank, number=number: bytes([number]))  # type: ignore[misc]

    def __call__(self, raw: bytes) -> str:
        parts: list[bytes] = []
        rest = raw[1:]
        while rest and len(parts) < 8:
            parts.append(rest[1 : 1 + rest[0]])
            rest = rest[1 + rest[0] :]
        if not parts:
            return "nothing"
        outlet = self.publisher.outlets[0]
        before = dict(self.publisher.counts)
        if raw[0] % 2:
            self._sub.send_multipart(parts)
            outlet.pub.poll(2)
        else:
            self._dealer.send_multipart(parts)
            outlet.router.poll(20)
        self.publisher.serve()
        assert len(outlet.buffer) == 3
        assert outlet.readers >= 0
        while self._dealer.poll(0):
            self._dealer.recv_multipart()
        changed = [name for name, n in self.publisher.counts.items() if before.get(name, 0) != n]
        return " ".join(sorted(changed)) or "unheard"

    def close(self) -> None:
        """Close all sockets."""
        self.publisher.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


def _any_frames() -> AbstractContextManager[object]:
    """Takes the third frame for a number, whatever came."""

    def take(self: Publisher, outlet: Any) -> bool:
        try:
            frames = outlet.router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._replay(outlet, frames[0], int.from_bytes(frames[2], "big"))
        return False

    return patch.object(Publisher, "_take_requests", take)


def a_request(rng: Random) -> bytes:
    """Frames of any number and length."""
    parts = [rng.randbytes(rng.choice((0, 0, 1, 7, 8, 9, 40))) for _ in range(rng.randint(1, 4))]
    return bytes([rng.randrange(2)]) + b"".join(bytes([len(part)]) + part for part in parts)


TARGETS = (
    Target(
        name="grpc", share=10, seeds=grpc_seeds, make=GrpcDaemon,
        alloc_bytes_max=16 << 20, canaries=(_quota_fault,), canary_inputs=2_000,
        modules=("entresol_daemon.control.grpc_services", "entresol_daemon.control.grpc_convert"),
    ),
    Target(
        name="events", share=30, seeds=event_seeds, make=events_parser,
        canaries=(_strict_kinds,), alloc_bytes_max=1 << 20,
        modules=("entresol_client.relay.chain", "entresol_daemon.control.grpc_convert"),
    ),
    Target(
        name="http", share=30, seeds=http_seeds, make=http_parser,
        words=(b"\r\n", b" ", b":", b"GET", b"/", b"HTTP/1.1", b"?", b"\xff"),
        canaries=(lambda: patch.object(http, "_parse", _strict_ascii),),
        modules=("entresol_daemon.control.http",),
    ),
    Target(
        name="certificates", share=20, seeds=certificate_seeds, make=certificates_parser,
        words=(b"spiffe://", b"/tenant/", DOMAIN.encode(), b"-----BEGIN CERTIFICATE-----"),
        canaries=(_lenient,), modules=("entresol_proto.identity",),
    ),
    Target(
        name="relay", share=10, seeds=relay_seeds, make=RelaySockets, generate=a_request,
        canaries=(_any_frames,), modules=("entresol_client.relay.publisher",),
    ),
)  # fmt: skip
