"""What the process gets from the manager that started it, and tells it: sockets, readiness, life.

systemd's protocols, which are environment variables, inherited descriptors and datagrams
(sd_listen_fds(3), sd_notify(3), sd_watchdog_enabled(3)); any other manager may speak them too.

Invariants: what is meant for another process is left alone; an inherited socket is used only where
the configuration says that this daemon listens, and one that nobody takes ends the start, because
hosts would reach it and never be answered; the sign of life comes from the event loop and from
nowhere else, so that a loop that hangs gives none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from entresol_proto.status import ConfigError

FIRST_FD = 3  # SD_LISTEN_FDS_START
SOCKETS_MAX = 16
SURFACES = ("control", "data", "metrics")
_LISTEN = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_HINT = "the addresses in the .socket unit and in [listen] must be the same: systemctl edit it"


@dataclass(frozen=True, slots=True)
class Inherited:
    """A listening socket that the manager keeps while this process comes and goes."""

    name: str
    socket: socket.socket

    @property
    def place(self) -> tuple[str, int]:
        """Address and port that it is bound to."""
        host, port = self.socket.getsockname()[:2]
        return str(host), int(port)


class Sockets:
    """The inherited sockets, and which of them nobody has taken yet.

    Whoever takes one closes it when it stops listening; `close` closes all that are still open.
    """

    def __init__(self) -> None:
        self._all: list[socket.socket] = []
        self._left: list[Inherited] = []

    @classmethod
    def from_environment(
        cls, environ: MutableMapping[str, str] | None = None, *, first_fd: int = FIRST_FD
    ) -> Sockets:
        """Take over what LISTEN_FDS announces; the variables are gone afterwards.

        Raises: ConfigError when a descriptor is not a listening TCP socket.
        """
        source = os.environ if environ is None else environ
        pid, count, names = (source.get(name, "") for name in _LISTEN)
        if pid != str(os.getpid()) or not count.isdecimal():
            return cls()
        for name in _LISTEN:
            source.pop(name, None)
        if int(count) > SOCKETS_MAX:
            raise ConfigError(f"{count} sockets were handed over, at most {SOCKETS_MAX} can be")
        named = names.split(":") if names else []
        made = cls()
        try:
            for at in range(int(count)):
                name = named[at] if at < len(named) else ""
                made._left.append(Inherited(name, _listening(first_fd + at)))
                made._all.append(made._left[-1].socket)
        except ConfigError:
            made.close()
            raise
        return made

    @property
    def none(self) -> bool:
        """Whether nothing was handed over, or all of it was taken."""
        return not self._left

    async def take(self, surface: str, host: str, port: int) -> list[socket.socket]:
        """The sockets for one of SURFACES, which listens at `host` and `port`; often none.

        A socket belongs where its address is configured. One that has a surface's name belongs
        there only, and may then have any port where the configuration leaves the port open (0).

        Raises: ConfigError for a socket of that name with another address.
        """
        mine = [one for one in self._left if one.name == surface or one.name not in SURFACES]
        if not mine:
            return []
        places = {
            (found[4][0], port)
            for found in await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        }
        taken = []
        for one in mine:
            address, real = one.place
            named = one.name == surface
            fits = (address, real) in places or (named and not port and (address, 0) in places)
            if fits:
                self._left.remove(one)
                taken.append(one.socket)
            elif named:
                raise ConfigError(
                    f"the {surface} socket that was handed over listens at {address}:{real}, "
                    f"the configuration says {host}:{port}",
                    hint=_HINT,
                )
        return taken

    async def take_one(self, surface: str, host: str, port: int) -> socket.socket | None:
        """As `take`, for a surface that listens once. Raises: ConfigError for a second one."""
        taken = await self.take(surface, host, port)
        if len(taken) > 1:
            raise ConfigError(
                f"{len(taken)} sockets were handed over for {surface}, which takes one", hint=_HINT
            )
        return taken[0] if taken else None

    def check_none_left(self) -> None:
        """Raises: ConfigError when a socket was handed over that nobody takes."""
        if self._left:
            places = ", ".join("{}:{}".format(*one.place) for one in self._left)
            raise ConfigError(
                f"sockets were handed over that the configuration does not name: {places}",
                hint=_HINT,
            )

    def close(self) -> None:
        """Close them. Idempotent."""
        for one in self._all:
            one.close()


def _listening(fd: int) -> socket.socket:
    """A descriptor as what it must be. Raises: ConfigError; it is closed then, if it is open."""
    try:
        found = socket.socket(fileno=fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise ConfigError(f"descriptor {fd} was handed over and is no socket: {error}") from None
    try:
        good = (
            found.type == socket.SOCK_STREAM
            and found.family in (socket.AF_INET, socket.AF_INET6)
            and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
    except OSError:
        good = 0
    if not good:
        found.close()
        raise ConfigError(
            f"descriptor {fd} was handed over and is no listening TCP socket",
            hint="ListenStream= with Accept=no, for an address and a port",
        )
    found.setblocking(False)
    found.set_inheritable(False)
    return found


def tell(message: str) -> None:
    """Send one message to $NOTIFY_SOCKET, if there is one. What cannot be sent is not sent."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)  # a manager that does not read must not hang us
        sender.sendto(message.encode(), address)


def watchdog_ns() -> int:
    """Within how long the manager wants a sign of life; 0: it wants none of this process."""
    within, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not within.isdecimal() or pid not in ("", str(os.getpid())):
        return 0
    return int(within) * 1_000


class Watchdog:
    """Says WATCHDOG=1 from the loop, three times within what is allowed. `start`, then `stop`."""

    def __init__(self, within_ns: int, *, say: Callable[[str], None] = tell) -> None:
        """`within_ns` as of `watchdog_ns`; with 0 nothing is ever said."""
        self._every_s = within_ns / 3e9
        self._say = say
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; call on the loop's thread."""
        assert self._timer is None, "started twice"
        if self._every_s:
            self._beat(loop)

    def stop(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._say("WATCHDOG=1")
        self._timer = loop.call_later(self._every_s, self._beat, loop)
