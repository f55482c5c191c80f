"""What a manager hands over and asks for: sockets by address and name, messages, a sign of life.

The faults: variables that were meant for a parent, a descriptor that is something else, an address
that the configuration does not name, a hung loop that would look alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes import free_ports
from entresol_daemon import manager
from entresol_daemon.manager import SOCKETS_MAX, Sockets, Watchdog, tell, watchdog_ns
from entresol_proto.status import ConfigError

HOST = "127.0.0.1"


def listening(family: int = socket.AF_INET, host: str = HOST, port: int = 0) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.bind((host, port))
    made.listen(8)
    return made


@contextlib.contextmanager
def handed(*given: socket.socket, names: str = "", **more: str) -> Iterator[Sockets]:
    """`given` on neighbouring descriptors, as a manager leaves them, and the object that took them
    over. The descriptors are copies; those that are handed over are closed again."""
    first = max(one.fileno() for one in given) + 10 if given else 900
    for at, one in enumerate(given):
        os.dup2(one.fileno(), first + at)
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(given))}
    environ |= {"LISTEN_FDNAMES": names} if names else {}
    environ |= more
    found = None
    try:
        found = Sockets.from_environment(environ, first_fd=first)
        yield found
    finally:
        if found is not None:
            found.close()
        for fd in range(first, first + len(given)):
            with contextlib.suppress(OSError):
                os.close(fd)
        for one in given:
            one.close()


def port_of(one: socket.socket) -> int:
    return int(one.getsockname()[1])


async def test_a_socket_goes_to_the_surface_whose_address_it_has() -> None:
    control, data = listening(), listening()
    with handed(data, control, names="entresold.socket:entresold.socket") as found:
        assert await found.take("metrics", HOST, 1) == []
        (mine,) = await found.take("control", HOST, port_of(control))
        assert mine.getsockname() == control.getsockname()
        assert not mine.get_inheritable()
        assert not mine.getblocking()
        other = await found.take_one("data", HOST, port_of(data))
        assert other is not None
        assert other.getsockname() == data.getsockname()
        found.check_none_left()


async def test_names_settle_what_an_open_port_leaves_open() -> None:
    control, data = listening(), listening()
    with handed(data, control, names="data:control") as found:
        (mine,) = await found.take("control", HOST, 0)
        assert mine.getsockname() == control.getsockname()
        with pytest.raises(ConfigError, match=f"{HOST}:{port_of(data)}"):
            found.check_none_left()


async def test_without_a_name_an_open_port_takes_nothing() -> None:
    with handed(listening()) as found:
        assert await found.take("control", HOST, 0) == []


async def test_a_named_socket_at_another_address_is_refused() -> None:
    with (
        handed(listening(), names="control") as found,
        pytest.raises(ConfigError, match=f"control socket.*says {HOST}:1") as caught,
    ):
        await found.take("control", HOST, 1)
    assert ".socket" in caught.value.hint


async def test_both_addresses_of_a_name_are_taken() -> None:
    (port,) = free_ports(1)
    four = listening(port=port)
    try:
        six = listening(socket.AF_INET6, "::1", port)
    except OSError as error:
        four.close()
        pytest.skip(f"not run here: no IPv6 on loopback ({error})")
    found_at = {
        one[4][0] for one in socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)
    } & {HOST, "::1"}
    with handed(four, six) as found:
        taken = await found.take("control", "localhost", port_of(six))
        assert {one.getsockname()[0] for one in taken} == found_at


async def test_one_too_many_is_refused_where_one_is_wanted() -> None:
    one = listening()
    with (
        handed(one, one.dup(), names="data:data") as found,
        pytest.raises(ConfigError, match="2 sockets were handed over for data"),
    ):
        await found.take_one("data", HOST, port_of(one))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "-1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "one"},
        {"LISTEN_PID": "", "LISTEN_FDS": "1"},
    ],
)
def test_what_is_not_for_us_is_left_alone(environ: dict[str, str]) -> None:
    before = dict(environ)
    Sockets.from_environment(environ, first_fd=901).check_none_left()
    assert environ == before


def test_the_variables_do_not_reach_a_child() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0", "LISTEN_FDNAMES": ""}
    Sockets.from_environment(environ)
    assert environ == {}


def test_more_than_the_limit_is_refused_before_any_is_looked_at() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(SOCKETS_MAX + 1)}
    with pytest.raises(ConfigError, match="at most 16"):
        Sockets.from_environment(environ, first_fd=901)


def test_a_descriptor_of_another_kind_is_refused_and_closed(tmp_path: Path) -> None:
    with socket.socket() as unbound, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((HOST, 0))
        for wrong in (unbound, datagrams):
            with pytest.raises(ConfigError, match="no listening TCP socket"), handed(wrong.dup()):
                pass
    with open(tmp_path / "file", "wb") as file:
        os.dup2(file.fileno(), 910)
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    with pytest.raises(ConfigError, match="descriptor 910 was handed over and is no socket"):
        Sockets.from_environment(environ, first_fd=910)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(910)


def test_tell_reaches_a_file_and_an_abstract_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in (str(tmp_path / "notify"), f"@entresol-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            heard.bind("\0" + address[1:] if address.startswith("@") else address)
            heard.settimeout(10)
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            tell("READY=1\nSTATUS=here")
            assert heard.recv(100) == b"READY=1\nSTATUS=here"


def test_nobody_listening_is_no_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    tell("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    tell("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.bind(str(tmp_path / "full"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "full"))
        for _ in range(10_000):  # far more than a queue of datagrams holds: returns nevertheless
            tell("WATCHDOG=1")


@pytest.mark.parametrize(
    ("usec", "pid", "expected_ns"),
    [
        (None, None, 0),
        ("30000000", None, 30_000_000_000),
        ("30000000", str(os.getpid()), 30_000_000_000),
        ("30000000", "1", 0),
        ("soon", None, 0),
        ("-5", None, 0),
    ],
)
def test_the_watchdog_is_asked_for_in_microseconds(
    usec: str | None, pid: str | None, expected_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert watchdog_ns() == expected_ns


async def test_a_loop_that_hangs_gives_no_sign_of_life() -> None:
    """Also not when it comes back: what was missed is not made up for."""
    said: list[str] = []
    watchdog = Watchdog(30_000_000, say=said.append)
    watchdog.start(asyncio.get_running_loop())
    try:
        async with asyncio.timeout(60):
            while len(said) < 4:
                await asyncio.sleep(0.005)
        time.sleep(0.3)  # noqa: ASYNC251 - the fault: ten times as long as is allowed
        before = len(said)
        await asyncio.sleep(0)
        assert len(said) <= before + 1
    finally:
        watchdog.stop()
    assert set(said) == {"WATCHDOG=1"}
    ended = len(said)
    await asyncio.sleep(0.1)
    assert len(said) == ended
    watchdog.stop()


async def test_nothing_is_said_to_a_manager_that_does_not_ask() -> None:
    said: list[str] = []
    watchdog = Watchdog(0, say=said.append)
    watchdog.start(asyncio.get_running_loop())
    await asyncio.sleep(0.02)
    watchdog.stop()
    assert not said


def test_the_names_are_those_of_the_configuration() -> None:
    from entresol_daemon.config import ListenConfig

    for surface in manager.SURFACES:
        assert hasattr(ListenConfig(), f"{surface}_host")
        assert hasattr(ListenConfig(), f"{surface}_port")
