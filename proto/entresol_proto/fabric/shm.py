"""The shm fabric: both ends on one host share memory and a Unix socket passes the descriptors.

Invariant: the socket is a file in a directory that others cannot enter, never an abstract name, and
a connection is authenticated by the one-time ticket of the offer. What travels over it is in
shmlink.py and proto/FABRICS.md, what the two sides may rely on in shmendpoint.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from entresol_proto import limits
from entresol_proto.fabric.base import ConnectOptions, FabricKind, Offer
from entresol_proto.fabric.closing import CLOSER, close_socket
from entresol_proto.fabric.listening import ListeningServer
from entresol_proto.fabric.mapped import MappedBudget
from entresol_proto.fabric.registry import HOST_ID_BYTES, same_host_id
from entresol_proto.fabric.serving import ServingTurns
from entresol_proto.fabric.shmendpoint import ShmEndpoint
from entresol_proto.fabric.shmlink import first_packet, hello, parse_hello, welcome
from entresol_proto.status import FabricError, ProtocolError, Status

_log = logging.getLogger("entresol.fabric")

_SOCKET_PATH_BYTES_MAX = 107  # sun_path
_VERSION = 1


class ShmFabricServer(ListeningServer[ShmEndpoint]):
    """Listens on `<directory>/<name>`, which only this user and one group, if any, can reach.

    The directory is made with mode 0700 (0710 with a `group`) if it is missing and refused if
    others can enter it. One that is there with the set-group-ID bit names the group as well: the
    socket inherits it, so that a daemon needs no right to give files away. `mapped_bytes_max`
    bounds the memory mapped for one session's peer, `budget` that of all sessions together.
    """

    kind = FabricKind.SHM

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "fabric.sock",
        group: int | None = None,
        mapped_bytes_max: int = limits.MAPPED_BYTES_PER_SESSION_MAX,
        budget: MappedBudget | None = None,
        offer_lifetime_ns: int = limits.HANDSHAKE_DEADLINE_NS,
    ) -> None:
        super().__init__(offer_lifetime_ns=offer_lifetime_ns)
        self._path = directory / name
        self._group = group
        self._mapped_bytes_max = mapped_bytes_max
        self._budget = budget or MappedBudget(limits.SHM_MAPPED_BYTES_MAX)
        self._turns = ServingTurns()

    async def start(self) -> None:
        """Bind and listen. Raises: FabricError."""
        if len(os.fsencode(self._path)) > _SOCKET_PATH_BYTES_MAX:
            raise FabricError(
                f"the socket path {self._path} is longer than {_SOCKET_PATH_BYTES_MAX} bytes",
                hint="use a shorter runtime directory",
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _prepare_directory(self._path.parent, self._group)
            _remove_stale(self._path)
            listener.bind(str(self._path))
            inherits = bool(self._path.parent.stat().st_mode & stat.S_ISGID)
            os.chmod(self._path, 0o600 if self._group is None and not inherits else 0o660)
            if self._group is not None:
                os.chown(self._path, -1, self._group)
            self._listen(listener)
        except OSError as error:
            listener.close()
            raise FabricError(
                f"cannot listen on {self._path}: {error}",
                hint="see [listen] unix_dir; a socket's path has at most 107 characters",
            ) from None
        except FabricError:
            listener.close()
            raise

    def offer(self, *, peer: object | None = None) -> Offer:
        """See `base.FabricServer.offer`. Raises: FabricError, also while too much of what peers
        passed cannot be closed."""
        if CLOSER.full:
            raise FabricError("what peers passed cannot be closed", status=Status.BUSY)
        params = _Params(same_host_id(), self._issue(peer), str(self._path))
        return Offer(FabricKind.SHM, params.encode())

    async def close(self) -> None:
        """See `base.FabricServer.close`. Removes the socket file."""
        listening = self._listener is not None
        await super().close()
        if listening:
            self._path.unlink(missing_ok=True)

    def _ticket_of(self, offer: Offer) -> bytes:
        return _Params.parse(offer.params).ticket

    def _has_room(self) -> bool:
        return not CLOSER.full

    def _drop(self, sock: socket.socket) -> None:
        close_socket(sock)

    async def _greet(self, sock: socket.socket) -> bool:
        known = False
        try:
            sock.setblocking(False)
            ticket = parse_hello(await first_packet(sock))
            offer = self._offers.find(ticket)
            if offer is None:
                raise ProtocolError("no valid ticket")
            endpoint = ShmEndpoint(
                mapped_bytes_max=self._mapped_bytes_max,
                budget=self._budget,
                peer=offer.peer,
                turns=self._turns,
                on_closed=self._endpoints.discard,
            )
            known = True
            self._endpoints.add(endpoint)
            endpoint.start(sock, greeting=welcome())
            offer.endpoint = endpoint
            self._offers.complete(offer)
        except (ProtocolError, FabricError) as error:
            _log.info("event=connection_refused fabric=shm error=%s", str(error))
        finally:
            if not known:
                self._drop(sock)
        return known


def _prepare_directory(directory: Path, group: int | None) -> None:
    """Make the directory or check that others cannot enter. Raises: FabricError, OSError."""
    if not directory.exists():
        directory.mkdir(mode=0o700 if group is None else 0o710, parents=True)
        if group is not None:
            os.chown(directory, -1, group)
    found = directory.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o027:
        raise FabricError(
            f"others can enter or change {directory}",
            hint="chmod 0700 it, or 2750 with a group for the clients",
        )
    if found.st_uid not in (0, os.geteuid()):
        raise FabricError(f"{directory} belongs to another user", hint="chown it to the daemon's")


def _remove_stale(path: Path) -> None:
    """Remove the socket of a dead daemon. Raises: FabricError when one answers on it."""
    if not path.is_socket():
        return  # bind reports what else may be there
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise FabricError(f"another process listens on {path}", hint="is the daemon running already?")


@dataclass(frozen=True, slots=True)
class _Params:
    """What a shm offer carries."""

    host_id: bytes
    ticket: bytes
    path: str

    def encode(self) -> bytes:
        return bytes([_VERSION]) + self.host_id + self.ticket + os.fsencode(self.path)

    @classmethod
    def parse(cls, raw: bytes) -> _Params:
        """Raises: FabricError (BAD_REQUEST)."""
        at = 1 + HOST_ID_BYTES
        end = at + limits.TICKET_BYTES
        path = raw[end:]
        if raw[:1] != bytes([_VERSION]) or not path.startswith(b"/") or b"\0" in path:
            raise FabricError("malformed shm offer", status=Status.BAD_REQUEST)
        return cls(raw[1:at], raw[at:end], os.fsdecode(path))


async def connect(
    offer: Offer, deadline_ns: int, options: ConnectOptions
) -> tuple[ShmEndpoint, bytes]:
    """Take a shm offer: connect to its socket. See `registry.connect`."""
    params = _Params.parse(offer.params)
    if params.host_id != same_host_id():
        raise FabricError("the shm offer is from another host", status=Status.UNSUPPORTED)
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
            await loop.sock_connect(sock, params.path)
            await loop.sock_sendall(sock, hello(params.ticket))
            if await first_packet(sock) != welcome():
                raise FabricError(
                    "the daemon refused the shm connection", hint="the ticket may have expired"
                )
        endpoint = ShmEndpoint(mapped_bytes_max=options.mapped_bytes_max, lends=True)
    except TimeoutError:
        close_socket(sock)
        raise FabricError("the daemon does not answer on shm", status=Status.DEADLINE) from None
    except OSError as error:
        close_socket(sock)
        raise FabricError(f"cannot connect to {params.path}: {error}") from None
    except BaseException:
        close_socket(sock)
        raise
    endpoint.start(sock)
    return endpoint, b""
