"""Clients of every released control protocol against the real daemon, at once.

A fleet is upgraded host by host: a client that speaks only an older protocol works beside newer
ones on the same blocks, and one that speaks nothing the daemon does is told so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_lab import DESCRIPTOR, content, key_of, keys_of
from harness import DaemonProcess

from entresol_client import Client, PutBlock, handshake
from entresol_proto.status import Status
from entresol_proto.wire.opening import PROTOCOL_MAX, PROTOCOL_MIN

SIZE = 64 * 1024
RELEASED = range(PROTOCOL_MIN, PROTOCOL_MAX + 1)
QUOTES = 3  # the protocol that brought them

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    running = DaemonProcess(tmp_path_factory.mktemp("mixed") / "d")
    running.start()
    yield running
    running.stop()


@contextmanager
def client_of(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, newest: int, oldest: int = 1
) -> Iterator[Client]:
    """A client of the day when `newest` was the newest protocol."""
    with monkeypatch.context() as day:
        day.setattr(handshake, "PROTOCOL_MAX", newest)
        day.setattr(handshake, "PROTOCOL_MIN", oldest)
        with Client(daemon.client_config()) as client:
            yield client


@pytest.mark.parametrize("newest", RELEASED)
def test_an_older_client_does_all_it_could(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    keys = keys_of(4, f"old{newest}")
    with client_of(daemon, monkeypatch, newest) as client:
        space = client.namespace(DESCRIPTOR)
        items = [PutBlock(key, content(key, SIZE), n) for n, key in enumerate(keys)]
        assert space.put(items, ack="durable").stored == len(keys)
        found = space.exists(keys)
        assert found.prefix_blocks == len(keys), found
        into = [bytearray(SIZE) for _ in keys]
        assert space.get_into(keys, into).ok
        assert [bytes(data) for data in into] == [content(key, SIZE) for key in keys]
        assert space.touch(keys).count == len(keys)
        assert [one.reason.name for one in space.explain(keys)] == ["IN_MEMORY"] * len(keys)
        assert space.quote(keys).complete is (newest >= QUOTES)
        assert space.forget(keys[-1:]).count == 1
        assert space.get_into(keys[-1:], [bytearray(SIZE)]).statuses == [Status.MISS]
        assert client.shards()[0].connects == 1, "nothing ended the session"


@pytest.mark.parametrize("writer", RELEASED)
@pytest.mark.parametrize("reader", RELEASED)
def test_clients_of_different_days_share_blocks(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, writer: int, reader: int
) -> None:
    name = f"{writer}to{reader}"
    with client_of(daemon, monkeypatch, writer) as client:
        space = client.namespace(DESCRIPTOR)
        done = space.put([PutBlock(key_of(0, name), content(key_of(0, name), SIZE))], ack="durable")
        assert done.ok, done.statuses
    with client_of(daemon, monkeypatch, reader) as client:
        into = bytearray(SIZE)
        assert client.namespace(DESCRIPTOR).get_into([key_of(0, name)], [into]).ok
        assert bytes(into) == content(key_of(0, name), SIZE)


def test_who_speaks_nothing_in_common_is_told(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = PROTOCOL_MAX + 1
    with client_of(daemon, monkeypatch, later, later) as client:
        space = client.namespace(DESCRIPTOR)
        assert not space.get_into([key_of(0, "later")], [bytearray(SIZE)]).ok
        report = client.shards()[0]
        assert not report.connected
        assert f"{PROTOCOL_MIN}..{PROTOCOL_MAX}" in report.last_error, report.last_error


def test_the_lab_knows_every_protocol() -> None:
    assert QUOTES in RELEASED
    assert (Path(__file__).parent.parent / "vectors/v1" / f"session{PROTOCOL_MAX}.json").is_file()
