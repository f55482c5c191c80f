"""What a review of the command found: mistakes that ended in tracebacks, and one in wrong data."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc._cython import cygrpc

from entresol_client.cli import (
    doctor,
    errors,
    events,
    fetching,
    output,
    overview,
    rpc,
    session,
    storing,
    tenants,
    top,
)
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_client.cli.main import _behind, main
from entresol_client.cli.objects import Head
from entresol_client.relay import command as relay
from entresol_client.results import Explanation
from entresol_daemon.control import grpc_server
from entresol_proto.status import Status

COMMAND = [sys.executable, "-m", "entresol_client.cli.main"]
SIZE = ("size", "--per-user", "30GB", "--turns-per-hour", "6", "--json")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(words))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


# Finding 3: standard input that does not block.


def test_input_that_is_not_there_yet_is_waited_for() -> None:
    """Else `slow | put -` stored what had come so far, and said that it was all."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    more, buffer = threading.Event(), bytearray(100_000)
    with open(reader, "rb") as source, open(writer, "wb", buffering=0) as sink:
        sink.write(b"a" * 1_000)

        class Watched:
            def readinto(self, view: memoryview) -> int | None:
                count: int | None = source.readinto(view)  # type: ignore[attr-defined]
                if count is None:
                    more.set()
                return count

            def fileno(self) -> int:
                return source.fileno()

        def rest() -> None:
            assert more.wait(30)
            sink.write(b"b" * 50_000)
            sink.close()

        thread = threading.Thread(target=rest)
        thread.start()
        watched: Any = Watched()
        assert storing._read_into(watched, memoryview(buffer)) == 51_000
        thread.join()
    assert bytes(buffer[:51_000]) == b"a" * 1_000 + b"b" * 50_000


# Finding 5: a daemon's host that dies silently.


def test_watches_ping_and_the_daemon_lets_them() -> None:
    client = dict(rpc._options())
    daemon = dict(grpc_server._options(grpc_server.GrpcLimits()))
    allowed_ms = daemon["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= 2 * allowed_ms
    assert client["grpc.keepalive_timeout_ms"] > 0
    assert client["grpc.http2.max_pings_without_data"] == 0
    # gRPC ignores a name that it does not know.
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name in (*client, *daemon) if name.encode() not in library] == []


# Findings 6, 12, 13: what the process is started with.


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_end_nothing(closed: str) -> None:
    script = (
        "import os, sys\n"
        "from entresol_client.cli import main, streams\n"
        "code = main.main(['version'])\n"
        "assert code == 0\n"
        "import uvloop; uvloop.new_event_loop().close()\n"
        "assert all(os.fstat(fd) for fd in range(3))\n"
        "assert sys.stdin.read() == '' or '<' not in sys.argv[1]\n"
        "os._exit(7)\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, script, closed],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("words", [["version"], ["--help"]])
def test_a_full_disk_below_the_output_is_no_traceback(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    if words == ["version"]:
        assert done.returncode == errors.EXIT_FAILED
        assert done.stderr.splitlines() == [b"entresol: No space left on device"]


def test_what_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "\N{GREEK SMALL LETTER ALPHA}") + b"\xff"
    done = subprocess.run(
        [*COMMAND, "key", "new", path], capture_output=True, timeout=60, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u03b1\\udcff" in done.stdout


# Finding 11: where `get` writes to.


@pytest.mark.parametrize("name", [".", "..", "/", "DIR"])
def test_a_folder_is_no_output_file(name: str, tmp_path: Path) -> None:
    where = str(tmp_path) if name == "DIR" else name
    with pytest.raises(UsageProblem, match="is a folder"), fetching._target(where):
        pass


def test_what_is_buffered_fails_as_what_is_written() -> None:
    with pytest.raises(CliError, match="No space left"), fetching._target("/dev/full") as file:
        file.write(b"x")


def test_a_file_that_cannot_be_finished_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_paths: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching.os, "replace", full)
    path = tmp_path / "out"
    with pytest.raises(CliError, match="No space left"), fetching._target(str(path)) as file:
        file.write(b"x")
    assert list(tmp_path.iterdir()) == []


# Finding 14, of the command.


def test_key_files_that_are_none_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for words in (["new", "."], ["new", "/"], ["show", str(tmp_path / "pipe")], ["show", "a\0b"]):
        code, _, err = said(capsys, "key", *words)
        assert code in (errors.EXIT_FAILED, errors.EXIT_USAGE), words
        assert err.startswith("entresol: ")
    path = tmp_path / "k"
    assert said(capsys, "key", "new", str(path))[0] == 0
    path.write_text(
        "\n".join(
            f"created_unix_s = {10**30}" if "created" in line else line
            for line in path.read_text().splitlines()
        )
    )
    assert str(10**30) in said(capsys, "key", "show", str(path))[1]


# Findings 15 to 18: addresses, and servers that are no daemons.


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1", "http://h:0", "http://h:x", "http://a b", "http://h\n:1", "http://a..b",
        f"http://{'a' * 64}:1", "http://h:99999", "ftp://h", "http://", "http://u@h", "x\0y",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageProblem, match="not an address"):
        top.Source(url)


def test_addresses_are_read() -> None:
    assert top.Source("[::1]:7443").where == "::1:7443"
    assert top.Source("host").where == "host:80"


@pytest.mark.parametrize("rate", ["nan", "inf", "-1", "1e-320"])
def test_a_prefill_rate_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], rate: str
) -> None:
    code, out, err = said(capsys, "top", "--url", "h:1", "--prefill-rate", rate)
    assert (code, out) == (errors.EXIT_USAGE, "")
    assert err.startswith("entresol: ")


def test_json_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (-float("inf"),)}, "e": 3}
    output.json_line(data)
    output.answer(True, data, [])
    line, *rest = capsys.readouterr().out.splitlines()
    clean = {"a": None, "b": [None, 1.5], "c": {"d": [None]}, "e": 3}
    assert json.loads(line) == json.loads("".join(rest)) == clean


class Answers:
    """An HTTP server that says these bytes, whatever is asked."""

    def __init__(self, raw: bytes) -> None:
        import socket

        self._raw = raw
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        link, _ = self._socket.accept()
        with link:
            link.recv(4096)
            link.sendall(self._raw)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()


def test_a_strange_status_line_reaches_no_terminal() -> None:
    with Answers(b"\x1b]0;owned\x07\r\n\r\n") as server, pytest.raises(Unreachable) as caught:
        top.Source(f"127.0.0.1:{server.port}").read()
    assert "\x1b" not in str(caught.value)


def test_the_doctor_outlives_a_server_that_is_none() -> None:
    shard: Any = SimpleNamespace()
    with Answers(b"\x1b]0;owned\x07\r\n\r\n") as server:
        shard.metrics = f"http://127.0.0.1:{server.port}"
        (finding,) = doctor._check_metrics(shard, "metrics")
    assert "no metrics" in str(finding)
    assert "\x1b" not in str(finding)


def test_the_doctor_outlives_a_clock_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top.Source, "read", lambda _: {"time_unix_ns": float("inf")})
    shard: Any = SimpleNamespace(metrics="http://h:1")
    assert list(doctor._check_skew(shard, "metrics")) == []


# Findings 19 to 23: numbers and words.


@pytest.mark.parametrize(
    "text", [str(2**64), "9" * 5000, "-000000000000001:1", f"{'f' * 16}:{2**64}", "-1", "x"]
)
def test_positions_that_no_event_has_are_refused(text: str) -> None:
    with pytest.raises(UsageProblem):
        events._parse_place(text, 0)


def test_the_last_position_is_one() -> None:
    assert events._parse_place(f"{'f' * 16}:{2**64 - 1}", 0).seq == 2**64 - 1


def test_a_quota_fits_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "tenant", "quota", "acme", "--flash", "999999999999T")
    assert code == errors.EXIT_USAGE
    assert "more than 64 bits" in err


def test_an_answer_that_is_no_text_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), "utf-8"))
    with pytest.raises(CliError, match="that was not its name"):
        tenants._confirm("acme", "this destroys")


@pytest.mark.parametrize(
    "more",
    [
        ["--ratio", "1e-12"], ["--headroom", "0.9999999999999999"], ["--link-share", "1e-300"],
        ["--link", "1e-300"], ["--ratio", "nan"],
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_reckoned_with_are_refused(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    code, out, _ = said(capsys, *SIZE, *more)
    assert code == errors.EXIT_USAGE
    assert not out or set(json.loads(out)) == {"error", "status", "fix"}


@pytest.mark.parametrize(
    "more",
    [
        ["--active", "1e-300"], ["--hit-rate", "1e-300"], ["--fetch-cost", "1e-300"],
        ["--hit-rate", "1", "--drive-price", "1e12", "--years", "1e-6", "--gpu-hour", "1e-6",
         "--prefill-rate", "1e12", "--active", "1e-300"],
        ["--hit-rate", "1", "--drive-price", "2500"],
    ],
)  # fmt: skip
def test_whatever_size_answers_is_json(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    code, out, _ = said(capsys, *SIZE, *more)
    found = json.loads(out, parse_constant=lambda word: pytest.fail(word))
    if code:
        assert code == errors.EXIT_USAGE
        assert set(found) == {"error", "status", "fix"}


@pytest.mark.parametrize("place", ["h:\N{SUPERSCRIPT TWO}", "h:" + "1" * 5000, "h:65536", ":1"])
def test_a_place_for_metrics_that_is_none_is_refused(place: str) -> None:
    closed: list[bool] = []
    one: Any = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(UsageProblem, match="is no address"):
        relay._serve_metrics(place, one)
    assert closed == [True]


# Finding 25: a head that could not be looked at.


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (Status.OK, CliError, "other content"),
        (Status.BAD_REQUEST, CliError, "other content"),
        (Status.DISCONNECTED, Unreachable, "head of x"),
        (Status.DEADLINE, CliError, "head of x"),
        (Status.MISS, CliError, "was evicted"),
    ],
)
def test_an_outage_is_not_called_other_content(
    status: Status, kind: type[CliError], words: str
) -> None:
    from entresol_proto.wire.data import Reason

    ns: Any = SimpleNamespace(
        put=lambda items, **_: SimpleNamespace(
            stored=0, existed=1, wire_bytes=0, statuses=[Status.EXISTS]
        ),
        get_into=lambda keys, into, **_: SimpleNamespace(statuses=[status]),
        explain=lambda keys: [Explanation(Reason.EVICTED, 1, "a")],
    )
    args = Namespace(deadline=10**9, replace=False)
    head = Head(1, 1, bytes(32), bytes(32))
    with pytest.raises(kind, match=words):
        storing._put_head(storing.Putter(ns, "durable", 10**9), head, b"k" * 16, "x", args)


# Finding 26: several daemons on this machine, of which one does not answer.


def test_a_daemon_that_does_not_answer_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def over(path: Path) -> dict[str, Any]:
        if path.name == "a":
            raise Unreachable("no daemon answers")
        return {"shard": "b", "state": "serving"}

    asked: Callable[[Any], Any] = lambda _: [("entresold@1", Path("a")), ("entresold@2", Path("b"))]  # noqa: E731
    monkeypatch.setattr(overview, "admin_sockets", asked)
    monkeypatch.setattr(overview, "_over_socket", over)
    monkeypatch.setattr(overview, "_lines", lambda row: [])
    args = Namespace(admin_socket=Path("x"), json=True)
    assert overview.run(args) == 1
    rows = json.loads(capsys.readouterr().out)["shards"]
    assert rows == [
        {"shard": "entresold@1", "error": "no daemon answers"},
        {"shard": "b", "state": "serving"},
    ]
    monkeypatch.setattr(overview, "admin_sockets", lambda _: [("", Path("a"))])
    with pytest.raises(Unreachable):
        overview.run(args)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--config", "F", "stat"], ["stat", "--config", "F"]),
        (["--config=F", "tenant", "list"], ["tenant", "list", "--config=F"]),
        (["--config", "F", "put", "--", "-x"], ["put", "--config", "F", "--", "-x"]),
        (["stat", "--config", "F"], ["stat", "--config", "F"]),
        (["--config", "F"], ["--config", "F"]),
        (["--config"], ["--config"]),
        (["--configure", "F", "stat"], ["--configure", "F", "stat"]),
        ([], []),
    ],
)
def test_a_configuration_named_before_the_command(words: list[str], meant: list[str]) -> None:
    assert _behind(words) == meant


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("exists",), 2, "one of the arguments --name --key is required"),
        (("put", "x", "--block", "65MiB"), 2, "'65MiB' is not a block size"),
        (("put", "x", "--nosuch"), 2, "unrecognized arguments: --nosuch"),
        (("frobnicate",), 2, "invalid choice: 'frobnicate'"),
    ],
)
def test_wrong_use_is_json_as_every_failure(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, problem: str
) -> None:
    got, out, err = said(capsys, *words, "--json")
    assert got == code
    answer = json.loads(out)
    assert set(answer) == {"error", "status", "fix"}
    assert problem in answer["error"]
    assert answer["error"] in err
    assert err.endswith(f"  fix: {answer['fix']}\n")


def test_wrong_use_where_the_bytes_go_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    got, out, err = said(capsys, "get", "--nosuch", "--name", "n", "-o", "-", "--json")
    assert (got, out) == (2, "")
    assert json.loads(err.splitlines()[-1])["status"] == "bad_request"


@pytest.mark.parametrize("words", [["inspect", "LICENSE"], ["replay", "LICENSE"]])
def test_what_the_daemons_package_refuses_is_json(words: list[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*COMMAND, *words, "--json"], cwd=root, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert set(json.loads(done.stdout)) == {"error", "status", "fix"}


def test_an_unknown_option_shows_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "usage: entresol version " in said(capsys, "version", "--nosuch")[2]
    assert "usage: entresol [-h]" in said(capsys, "--nosuch")[2]
    before = said(capsys, "--json", "version")[2]  # it has that option, elsewhere
    assert "usage: entresol [-h]" in before
    assert "entresol: error: options go behind the command: --json\n" in before


def test_an_interval_is_a_span_as_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert top._interval("500ms") == 0.5
    assert top._interval("10") == top._interval("10s") == 10.0
    assert top._interval("60min") == 3600.0
    for words in ("0", "100ms", "61min", "nan", "a while"):
        assert said(capsys, "top", "--interval", words)[0] == 2


def test_an_answer_that_ends_early_leaves_no_open_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(CliError, match="that was not its name"):
        tenants._confirm("acme", "this destroys")
    assert capsys.readouterr().err.endswith("to go on: \n")


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.INTERNAL])
def test_what_the_daemon_could_not_do_has_a_fix(status: Status) -> None:
    """A put into a full state folder ended in a bare `io_error`."""
    assert "log" in session.failure("block 0 was not stored", status).hint
