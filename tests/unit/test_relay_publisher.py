"""The relay's sockets: order, numbers, replay with a bounded buffer, who came, who is behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from entresol_client.cli.errors import CliError, UsageProblem
from entresol_client.relay import publisher, workers
from entresol_client.relay.publisher import News, Publisher, first_seq
from entresol_client.relay.wire import END_OF_REPLAY, seq_frame
from entresol_client.relay.workers import Worker, parse_worker

SECONDS_MAX = 10.0
START = 1_000


class Lab:
    """A publisher, and sockets that read it."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.made: list[Publisher] = []
        self.sockets: list[zmq.Socket[bytes]] = []

    def publisher(self, *workers: Worker, **more: Any) -> Publisher:
        given = list(workers) or [Worker("pod0", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")]
        self.made.append(Publisher(given, "m", start_seq=START, **more))
        return self.made[-1]

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        self.sockets.append(self.context.socket(kind))
        return self.sockets[-1]

    def reader(self, place: str, prefix: bytes = b"") -> zmq.Socket[bytes]:
        socket = self.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, prefix)
        socket.connect(place)
        return socket

    def asker(self, place: str) -> zmq.Socket[bytes]:
        socket = self.socket(zmq.DEALER)
        socket.connect(place)
        return socket

    def close(self) -> None:
        for one in self.made:
            one.close()
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
def lab() -> Iterator[Lab]:
    one = Lab()
    yield one
    one.close()


def until(one: Publisher, holds: Callable[[News], Any]) -> News:
    """Serve until the news are what is waited for."""
    end_s = time.monotonic() + SECONDS_MAX
    while not holds(news := one.serve()):
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.005)
    return news


def frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(SECONDS_MAX * 1000), "nothing came"
    return socket.recv_multipart()


def joined(lab: Lab, one: Publisher, at: int = 0, prefix: bytes = b"") -> zmq.Socket[bytes]:
    """A reader whose subscription has arrived."""
    socket = lab.reader(one.endpoints(one.outlets[at])[0], prefix)
    until(one, lambda news: news.joined == (one.outlets[at],))
    return socket


def replay(asker: zmq.Socket[bytes], one: Publisher, asked: int) -> tuple[list[list[bytes]], News]:
    """Ask, and read to the end."""
    asker.send_multipart([b"", seq_frame(asked)])
    before = one.counts["replays"] + one.counts["replay_refused"]
    news = until(one, lambda _: one.counts["replays"] + one.counts["replay_refused"] > before)
    got = [frames(asker)]
    while got[-1][-2] != END_OF_REPLAY:
        got.append(frames(asker))
    return got[:-1], news


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def send(one: Publisher, *names: str) -> None:
    for name in names:
        one.publish(lambda _, name=name: name.encode())  # type: ignore[misc]


def test_messages_are_topic_number_and_payload_in_order(lab: Lab) -> None:
    one = lab.publisher()
    reader = joined(lab, one)
    send(one, "a", "b", "c")
    got = [frames(reader) for _ in range(3)]
    assert got == [[b"kv@pod0@m", seq_frame(START + n), b"abc"[n : n + 1]] for n in range(3)]


def test_every_worker_has_its_own_topic_rank_and_numbers(lab: Lab) -> None:
    places = [Worker(f"pod{n}", "tcp://127.0.0.1:0", dp_rank=n or None) for n in range(3)]
    one = lab.publisher(*places)
    readers = [joined(lab, one, n, b"kv@") for n in range(3)]
    one.publish_to(one.outlets[2], lambda rank: b"only")
    one.publish(lambda rank: f"rank {rank}".encode())
    assert frames(readers[2])[1:] == [seq_frame(START), b"only"]
    assert [frames(reader) for reader in readers] == [
        [b"kv@pod0@m", seq_frame(START), b"rank None"],
        [b"kv@pod1@m", seq_frame(START), b"rank 1"],
        [b"kv@pod2@m", seq_frame(START + 1), b"rank 2"],
    ]


def test_a_payload_is_made_once_for_all_workers_of_a_rank(lab: Lab) -> None:
    one = lab.publisher(*(Worker(f"pod{n}", "tcp://127.0.0.1:0") for n in range(5)))
    made: list[int | None] = []
    one.publish(lambda rank: made.append(rank) or b"x")  # type: ignore[func-returns-value]
    assert made == [None]


@pytest.mark.parametrize("with_topic", [True, False])
def test_replay_gives_what_is_held_from_a_number_on(lab: Lab, with_topic: bool) -> None:
    one = lab.publisher(replay_topic=with_topic)
    send(one, *"abcdef")
    asker = lab.asker(one.endpoints(one.outlets[0])[1])
    got, news = replay(asker, one, START + 3)
    head = [b"", b"kv@pod0@m"] if with_topic else [b""]
    assert got == [[*head, seq_frame(START + n), b"abcdef"[n : n + 1]] for n in (3, 4, 5)]
    assert news.behind == ()
    assert replay(asker, one, START + 6)[0] == []
    assert len(replay(asker, one, 0)[0]) == 6, "before its time: all there is"


def test_a_replay_from_before_the_buffer_is_noticed(lab: Lab) -> None:
    one = lab.publisher(buffer_batches=4)
    asker = lab.asker(one.endpoints(one.outlets[0])[1])
    send(one, *"abcd")
    assert replay(asker, one, 0)[1].behind == (), "nothing is missing yet"
    send(one, "e")
    got, news = replay(asker, one, START)
    assert [frame[-1] for frame in got] == [b"b", b"c", b"d", b"e"]
    assert news.behind == (one.outlets[0],)
    for _ in range(10):  # a reader that takes what it asked for may ask for ever
        assert replay(asker, one, START + 1)[1].behind == ()


def test_the_buffer_is_bounded_in_bytes_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "BUFFER_BYTES_MAX", 10)
    one = lab.publisher()
    send(one, "four", "more", "last")
    outlet = one.outlets[0]
    assert [bytes(payload) for _, payload in outlet.buffer] == [b"more", b"last"]
    assert outlet.buffer_bytes == 8


@pytest.mark.parametrize(
    "request_frames",
    [[b""], [b"", b"short"], [b"", seq_frame(1), b"more"], [b"x", seq_frame(1)], [seq_frame(1)]],
)
def test_requests_that_are_none_are_counted_and_change_nothing(
    lab: Lab, request_frames: list[bytes]
) -> None:
    one = lab.publisher()
    send(one, "a")
    asker = lab.asker(one.endpoints(one.outlets[0])[1])
    asker.send_multipart(request_frames)
    until(one, lambda _: one.counts["replay_refused"])
    assert replay(asker, one, 0)[0][0][-1] == b"a"


def test_askers_that_do_not_read_take_no_memory(lab: Lab) -> None:
    one = lab.publisher()
    for _ in range(100):
        one.publish(lambda _: bytes(200_000))
    asker = lab.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVHWM, 1)
    asker.connect(one.endpoints(one.outlets[0])[1])
    before = resident_bytes()
    for _ in range(30):
        asker.send_multipart([b"", seq_frame(0)])
    until(one, lambda _: one.counts["replays"] + one.counts["replay_refused"] == 30)
    assert one.counts["replays"] > 5, "its queue has room for more than the buffer"
    grown, held = resident_bytes() - before, one.outlets[0].buffer_bytes
    assert grown < 2 * held, "what is asked for often is there once"


def test_an_asker_that_is_gone_does_no_harm(lab: Lab) -> None:
    one = lab.publisher()
    send(one, *"abc")
    for _ in range(20):
        asker = lab.asker(one.endpoints(one.outlets[0])[1])
        asker.send_multipart([b"", seq_frame(0)])
        asker.close(linger=100)
    until(one, lambda _: one.counts["replays"] + one.counts["replay_refused"] >= 10)
    reader = joined(lab, one)
    send(one, "d")
    assert frames(reader)[2] == b"d"


def test_vllms_own_asker_is_answered(lab: Lab) -> None:
    """Its example asks with a REQ socket, which adds and removes the empty frame by itself."""
    one = lab.publisher(replay_topic=False)
    send(one, "a")
    asker = lab.socket(zmq.REQ)
    asker.connect(one.endpoints(one.outlets[0])[1])
    asker.send(seq_frame(0))
    until(one, lambda _: one.counts["replays"])
    assert frames(asker) == [seq_frame(START), b"a"]  # type: ignore[arg-type]


def test_readers_are_noticed_coming_and_going(lab: Lab) -> None:
    one = lab.publisher()
    outlet = one.outlets[0]
    first, second = joined(lab, one), joined(lab, one, prefix=b"kv@pod0@")
    assert outlet.readers == 2
    stranger = lab.reader(one.endpoints(outlet)[0], b"kv@pod1@")
    first.close(linger=0)
    until(one, lambda _: outlet.readers == 1)
    second.close(linger=0)
    until(one, lambda _: outlet.readers == 0)
    assert one.counts["subscriptions"] == 2, "who reads another topic is none of ours"
    stranger.close(linger=0)


def test_publishing_does_not_wait_for_a_reader_that_stopped(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "SEND_QUEUE_MESSAGES_MAX", 4)
    one = lab.publisher(buffer_batches=10)
    reader = lab.socket(zmq.SUB)
    reader.set_hwm(4)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.connect(one.endpoints(one.outlets[0])[0])
    until(one, lambda news: news.joined)
    big = b"x" * 1_000_000
    began_s = time.monotonic()
    for _ in range(100):
        one.publish(lambda _: big)
    assert time.monotonic() - began_s < SECONDS_MAX / 2
    numbers = []
    while reader.poll(500):
        numbers.append(int.from_bytes(reader.recv_multipart()[1], "big"))
    assert 0 < len(numbers) < 100, "the reader sees by the numbers that some are missing"
    assert numbers == sorted(numbers)


def test_a_reader_may_bind_and_the_relay_connect(lab: Lab) -> None:
    central = lab.socket(zmq.SUB)
    central.setsockopt(zmq.SUBSCRIBE, b"kv@")
    port = central.bind_to_random_port("tcp://127.0.0.1")
    one = lab.publisher(Worker("pod0", f"tcp://127.0.0.1:{port}", connect=True))
    until(one, lambda news: central.poll(5) or news.joined)  # it subscribes when it reads
    send(one, "a")
    assert frames(central)[2] == b"a"


def test_a_taken_place_is_refused_with_its_name(lab: Lab) -> None:
    one = lab.publisher()
    place = one.endpoints(one.outlets[0])[0]
    with pytest.raises(CliError, match=place.rpartition(":")[2]):
        lab.publisher(Worker("pod0", place))


def test_numbers_of_a_later_start_are_higher() -> None:
    now_ns = time.time_ns()
    assert first_seq(now_ns + 1_000_000_000) - first_seq(now_ns) == 1_000_000
    assert first_seq(now_ns) < 2**63, "it fits where a reader takes it for a signed number"


def test_the_state_tells_where_it_is(lab: Lab) -> None:
    one = lab.publisher()
    send(one, "a")
    (row,) = one.state()
    assert row["topic"] == "kv@pod0@m"
    assert row["endpoint"].startswith("tcp://127.0.0.1:")
    assert (row["next_seq"], row["buffered"], row["readers"]) == (START + 1, 1, 0)


# Workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "worker"),
    [
        ("pod0=5557", Worker("pod0", "tcp://127.0.0.1:5557")),
        ("pod0=5557,replay=5558", Worker("pod0", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")),
        ("10.0.0.7:8000=tcp://*:5557,dp=3", Worker("10.0.0.7:8000", "tcp://*:5557", "", 3)),
        ("a=tcp://router:1,connect", Worker("a", "tcp://router:1", connect=True)),
        ("a=ipc:///run/kv.sock", Worker("a", "ipc:///run/kv.sock")),
        ("a=tcp://[::1]:7", Worker("a", "tcp://[::1]:7")),
    ],
)
def test_workers_as_they_are_written(text: str, worker: Worker) -> None:
    assert parse_worker(text) == worker


@pytest.mark.parametrize(
    "text",
    ["", "pod0", "=5557", "pod0=", "pod 0=5557", "a@b=5557", "pod0=99999", "pod0=tcp://x",
     "pod0=udp://x:1", "pod0=5557,replay", "pod0=5557,replay=", "pod0=5557,dp=x",
     "pod0=5557,dp=-1", "pod0=5557,connect=yes", "pod0=5557,topic=x", "pod0=5557,dp=1,dp=2",
     "pod0=5557,,"],
)  # fmt: skip
def test_mistaken_workers_are_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match="--worker"):
        parse_worker(text)


def test_two_sockets_at_one_place_are_refused() -> None:
    for words in (("a=5557", "b=5557"), ("a=5557,replay=5557",)):
        with pytest.raises(UsageProblem, match="two sockets"):
            workers.check_workers([parse_worker(word) for word in words])
    with pytest.raises(UsageProblem, match="no --worker"):
        workers.check_workers([])
    too_many = [Worker(f"p{n}", "tcp://127.0.0.1:0") for n in range(workers.WORKERS_MAX + 1)]
    with pytest.raises(UsageProblem, match="at most"):
        workers.check_workers(too_many)
    workers.check_workers(too_many[1:])
    same = [parse_worker("a=tcp://r:1,connect"), parse_worker("b=tcp://r:1,connect")]
    workers.check_workers(same)


@pytest.mark.parametrize(
    ("text", "others"),
    [("a=5557", False), ("a=5557,replay=5558", False), ("a=tcp://localhost:1", False),
     ("a=tcp://*:1", True), ("a=5557,replay=tcp://10.0.0.7:1", True),
     ("a=tcp://10.0.0.7:1,connect", False), ("a=ipc:///run/x", False)],
)  # fmt: skip
def test_what_other_machines_can_reach_is_known(text: str, others: bool) -> None:
    assert parse_worker(text).open_to_others is others
