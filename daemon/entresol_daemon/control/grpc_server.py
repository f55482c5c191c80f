"""The gRPC surface: one server over TCP with mutual TLS, one on a unix socket for the operator.

Invariants owned here:
- TCP: no call without a verified client certificate that is valid at that time; certificates are
  those in force at each handshake; connections end after `connection_age_max_s`, so a revoked
  certificate ends too. The operator's do not: nothing is replayed to a watch of all tenants.
- Admin is registered on the unix socket only, which has mode 0600 in a folder that nobody else
  can enter.
- After `close` no call, task or socket of ours is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from entresol_daemon.control.admin import ShardBackend
from entresol_daemon.control.grpc_services import (
    AdminService,
    DescribeService,
    EventsService,
    Identify,
    operator,
    tenant_of_certificate,
)
from entresol_daemon.control.grpc_strict import StrictRequests
from entresol_daemon.control.health import Health
from entresol_daemon.control.identity import PemBundle
from entresol_proto.ids import TenantName
from entresol_proto.status import ConfigError
from entresol_proto.v1 import entresol_pb2_grpc

log = logging.getLogger("entresol.grpc")

UNIX_PATH_BYTES_MAX = 107  # sun_path of Linux, without its final zero
ADMIN_SOCKET = "admin.sock"
_TCP_SERVICES = ("entresol.v1.Describe", "entresol.v1.Events")
_UNIX_SERVICES = (*_TCP_SERVICES, "entresol.v1.Admin")


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Named limits of both servers."""

    request_bytes_max: int = 64 * 1024
    calls_max: int = 1_024  # running at once, per server; of one tenant as many as are free
    connections_max: int = 4_096  # per server: descriptors are the process's
    connection_idle_max_s: float = 300.0  # without a call
    streams_per_connection_max: int = 64
    handshake_deadline_s: float = 5.0
    request_deadline_s: float = 10.0  # of a call's request, after its headers
    connection_age_max_s: float = 3_600.0  # over TCP
    connection_age_grace_s: float = 10.0  # a watch gets this long to end by itself
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    ping_interval_s_min: float = 10.0  # of clients; who pings faster is disconnected
    close_grace_s: float = 2.0


class GrpcServer:
    """Both servers of one shard. `start`, `announce`, then `close`, all on one loop."""

    def __init__(
        self,
        backend: ShardBackend,
        *,
        tls: Callable[[], PemBundle] | None = None,
        trust_domain: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        unix_path: Path | None = None,
        grpc_limits: GrpcLimits | None = None,
    ) -> None:
        """`tls` gives the certificate files in force (`ReloadingServerContext.bundle`); it is
        called on gRPC's threads at every handshake and must not raise. Without it there is no TCP
        server; without `unix_path` no unix socket.
        """
        self._backend = backend
        self._tls = tls
        self._trust_domain = trust_domain
        self._host = host
        self._asked_port = port
        self._unix_path = unix_path
        self._limits = grpc_limits or GrpcLimits()
        self._servers: list[Any] = []
        self._events: list[EventsService] = []
        self._announced = False
        self._health = Health(("", *_UNIX_SERVICES), self._is_serving)
        self._generation = 0
        self.port = 0  # of the TCP server, once started

    async def start(self) -> None:
        """Bind and serve; health says NOT_SERVING until `announce`.

        Raises: ConfigError when an address or the socket's folder cannot be used.
        """
        assert not self._servers, "started twice"
        try:
            if self._tls is not None:
                await self._start_tcp(self._tls)
            if self._unix_path is not None:
                await self._start_unix(self._unix_path)
        except BaseException:
            await self.close()
            raise

    async def _start_tcp(self, tls: Callable[[], PemBundle]) -> None:
        most = self._limits
        age = [
            ("grpc.max_connection_age_ms", int(most.connection_age_max_s * 1_000)),
            ("grpc.max_connection_age_grace_ms", int(most.connection_age_grace_s * 1_000)),
        ]
        server = self._server(tenant_of_certificate(self._trust_domain), age)
        first = tls()
        self._generation = first.generation
        credentials = grpc.dynamic_ssl_server_credentials(
            _certificates(first), self._fetch_certificates, require_client_authentication=True
        )
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self.port = server.add_secure_port(f"{host}:{self._asked_port}", credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen for gRPC at {host}:{self._asked_port}: {error}",
                hint="is another daemon running? see [listen] grpc_host and grpc_port",
            ) from None
        await server.start()
        log.info("event=grpc_listening host=%s port=%d", self._host, self.port)

    async def _start_unix(self, path: Path) -> None:
        _prepare_folder(path)
        server = self._server(operator, [])
        entresol_pb2_grpc.add_AdminServicer_to_server(AdminService(self._backend), server)
        mask = os.umask(0o177)  # the socket is private from its first moment on
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen at {str(path)!r}: {error}",
                hint="see [listen] unix_dir; a socket's path has at most 107 characters",
            ) from None
        finally:
            os.umask(mask)
        os.chmod(path, 0o600)
        await server.start()
        log.info("event=grpc_admin_listening path=%s", path)

    def _server(self, identify: Identify, more: list[tuple[str, int]]) -> Any:
        """A server with what both have in common, and `more` options; it is closed by `close` from
        here on."""
        server = grpc.aio.server(
            options=[*_options(self._limits), *more],
            maximum_concurrent_rpcs=self._limits.calls_max,
            interceptors=(
                StrictRequests(
                    identify, self._turn, calls_max=self._limits.calls_max,
                    request_deadline_s=self._limits.request_deadline_s,
                ),
            ),
        )  # fmt: skip
        self._servers.append(server)
        events = EventsService(self._backend, identify)
        self._events.append(events)
        entresol_pb2_grpc.add_EventsServicer_to_server(events, server)
        entresol_pb2_grpc.add_DescribeServicer_to_server(
            DescribeService(self._backend, identify), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    async def _turn(self, tenant: TenantName) -> None:
        await self._backend.event_turn(tenant, 0)

    def _fetch_certificates(self) -> Any:
        """On a thread of gRPC's, at every handshake: new certificates, or None for no change."""
        assert self._tls is not None
        try:
            bundle = self._tls()
            if bundle.generation == self._generation:
                return None
            certificates = _certificates(bundle)
        except Exception:  # the old certificates stay in force
            log.exception("event=grpc_certificates_failed")
            return None
        self._generation = bundle.generation
        return certificates

    def announce(self) -> None:
        """From now on grpc.health.v1 says SERVING, for the empty name and for each service, while
        nothing keeps the shard from being ready."""
        self._announced = True
        self._health.tell()

    def tell_health(self) -> None:
        """What the shard is ready for may have changed: watches of health look at once."""
        self._health.tell()

    def _is_serving(self) -> bool:
        return self._announced and not self._backend.reasons_not_ready()

    async def close(self) -> None:
        """Say NOT_SERVING, end watches, give other calls a moment, stop. Idempotent."""
        self._health.close()
        for events in self._events:
            events.close()
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(self._limits.close_grace_s) for server in servers))
        if servers and self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)


def _certificates(bundle: PemBundle) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(bundle.key, bundle.cert)], root_certificates=bundle.ca
    )


def _options(grpc_limits: GrpcLimits) -> list[tuple[str, int]]:
    """gRPC channel arguments; times there are milliseconds (include/grpc/impl/channel_arg_names.h
    of grpc/grpc)."""
    return [
        ("grpc.so_reuseport", 0),  # two daemons on one port must fail, not share
        ("grpc.max_receive_message_length", grpc_limits.request_bytes_max),
        ("grpc.max_concurrent_streams", grpc_limits.streams_per_connection_max),
        ("grpc.max_allowed_incoming_connections", grpc_limits.connections_max),
        ("grpc.max_connection_idle_ms", int(grpc_limits.connection_idle_max_s * 1_000)),
        ("grpc.server_handshake_timeout_ms", int(grpc_limits.handshake_deadline_s * 1_000)),
        ("grpc.keepalive_time_ms", int(grpc_limits.keepalive_s * 1_000)),
        ("grpc.keepalive_timeout_ms", int(grpc_limits.keepalive_timeout_s * 1_000)),
        # Else gRPC allows one ping in five minutes where no data flows, as on a quiet watch.
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            int(grpc_limits.ping_interval_s_min * 1_000),
        ),
    ]


def _prepare_folder(path: Path) -> None:
    """Make sure that the socket's folder is ours and that nobody else can change what is in it.

    Raises: ConfigError.
    """
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"the path of the admin socket is over {UNIX_PATH_BYTES_MAX} bytes",
            hint="choose a shorter [listen] unix_dir",
        )
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"cannot use the folder {str(folder)!r}: {error.strerror}") from None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigError(
            f"the folder {str(folder)!r} is not ours alone to write to",
            hint="it must belong to the daemon's user and have mode 0700 (or 0755)",
        )
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{str(path)!r} exists and is not a socket")
