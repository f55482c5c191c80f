"""Life of a daemon at its edges: a stop while it starts, a start that fails late, a collector that
does not answer, a certificate with text before it, too little memory."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_daemon import dev, inspect, logs, ports, server, serving
from entresol_daemon.compute import InlineCompute
from entresol_daemon.config import BLOCKS_MAX, Config
from entresol_daemon.control import identity
from entresol_daemon.flash.engine import Engine, EngineOptions
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.server import Daemon
from entresol_daemon.serving import serve
from entresol_daemon.traces import Traces
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import EntresolError

# Starting -----------------------------------------------------------------------------------------


class SlowDaemon:
    """A daemon that is still recovering."""

    def __init__(self, _config: Config, *, settle: Callable[[], None]) -> None:
        self.said: list[str] = []
        self.go = asyncio.Event()
        self.shard = SimpleNamespace(hurry=lambda: None)
        SlowDaemon.last = self

    last: SlowDaemon

    async def start(self) -> None:
        self.said.append("starting")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.said.append("closed")
            raise
        self.said.append("started")

    async def until_broken(self) -> BaseException:
        await asyncio.Event().wait()
        raise AssertionError("it is well")

    async def stop(self) -> None:
        self.said.append("stopped")

    def on_hangup(self) -> None:
        self.said.append("hung up")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "Daemon", SlowDaemon)
    quiet = SimpleNamespace(**dict.fromkeys(("collect", "freeze", "set_threshold"), _nothing))
    monkeypatch.setattr(serving, "gc", quiet)


def _nothing(*_: object) -> None:
    return None


async def _until_starting() -> SlowDaemon:
    while getattr(SlowDaemon, "last", None) is None or not SlowDaemon.last.said:
        await asyncio.sleep(0)
    return SlowDaemon.last


@pytest.fixture(autouse=True)
def _forget() -> None:
    SlowDaemon.last = None  # type: ignore[assignment]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_while_starting_does_not_wait_for_the_recovery(number: int) -> None:
    ready: list[Any] = []
    serving = asyncio.ensure_future(serve(Config(), on_ready=ready.append))
    daemon = await _until_starting()
    os.kill(os.getpid(), number)
    await serving
    assert (daemon.said, ready) == (["starting", "closed"], [])


@pytest.mark.usefixtures("slow")
async def test_a_hangup_while_starting_is_remembered() -> None:
    serving = asyncio.ensure_future(serve(Config()))
    daemon = await _until_starting()
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGUSR1)
    await heard.wait()
    assert daemon.said == ["starting"]
    daemon.go.set()
    while "hung up" not in daemon.said:
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    assert daemon.said == ["starting", "started", "hung up", "stopped"]


class BrokenDaemon(SlowDaemon):
    """One that serves, breaks while it does or while it stops, and may hang on that."""

    hangs = late = False

    async def start(self) -> None:
        self.said.append("started")

    async def until_broken(self) -> BaseException:
        while self.late and "stopping" not in self.said:
            await asyncio.sleep(0)
        return MemoryError("b'a key' and\nevent=forged")

    async def stop(self, *, drain_ns: int = 1, clean: bool = True) -> None:
        assert (drain_ns, clean) == ((1, True) if self.late else (0, False))
        self.said.append("stopping")
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        self.said.append("stopped")


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_daemon_that_broke_ends_with_an_error_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, *, hangs: bool, late: bool
) -> None:
    def exit_at_once(status: int) -> None:
        raise SystemError(f"exit {status}")

    left: list[bool] = []
    monkeypatch.setattr(serving, "Daemon", BrokenDaemon)
    monkeypatch.setattr(BrokenDaemon, "hangs", hangs)
    monkeypatch.setattr(BrokenDaemon, "late", late)
    monkeypatch.setattr(serving, "BROKEN_STOP_S", 0.05)
    monkeypatch.setattr(serving.os, "_exit", exit_at_once)
    monkeypatch.setattr(serving.logging, "shutdown", _nothing)
    running = asyncio.ensure_future(serve(Config(), on_exit=lambda: left.append(True)))
    daemon = await _until_starting()
    if late:
        await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemError if hangs else EntresolError) as caught:
        await running
    assert daemon.said == ["started", "stopping"] + ["stopped"] * (not hangs)
    assert ("exit 1" if hangs else "writing to flash broke (MemoryError)") in str(caught.value)
    assert "key" not in str(caught.value), "its words may be content"
    assert left == [True] * hangs


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made, _ = dev.prepare(tmp_path / "d")
    made = dev.with_flash_bytes(made, 128 * MIB)
    return replace(made, fabric=replace(made.fabric, enabled=("tcp",)))


async def test_a_start_that_fails_late_leaves_nothing_open(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "check", lambda config: None)  # it is taken just after that look
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = replace(config.listen, metrics_port=other.getsockname()[1])
        daemon = Daemon(replace(config, listen=listen))
        with pytest.raises(EntresolError, match="cannot listen at"):
            await daemon.start()
    assert daemon.control._server is None, "it would go on to accept hosts"


async def test_what_a_start_takes_from_the_loop_is_no_stall(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector's last look made an idle daemon OVERLOADED in `entresol top` for a while."""
    looked = []

    def collect() -> None:
        looked.append(time.sleep(2))

    quiet = {"freeze": _nothing, "set_threshold": _nothing, "collect": collect}
    monkeypatch.setattr(serving, "gc", SimpleNamespace(**quiet))
    ready = asyncio.get_running_loop().create_future()
    served = asyncio.ensure_future(serve(config, on_ready=ready.set_result))
    daemon = await ready
    late = re.compile(r"^entresol_event_loop_lag_max_seconds (\S+)", re.M)
    late_s = 0.0
    async with asyncio.timeout(20):
        while not late_s:  # until somebody has looked
            await asyncio.sleep(0.01)
            daemon.metrics.refresh()
            late_s = float(late.findall(daemon.metrics.render().decode())[0])
    os.kill(os.getpid(), signal.SIGTERM)
    await served
    assert looked
    assert late_s < 1.5


async def test_a_start_that_is_cut_short_can_be_made_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What start opened until then is closed: keyring and data file are locked by their owner."""
    reached = asyncio.Event()

    async def hang(_self: Daemon) -> None:
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(Daemon, "_open_fabrics", hang)
        starting = asyncio.ensure_future(Daemon(config).start())
        await reached.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    again = Daemon(config)
    await again.start()
    await again.stop()


async def test_too_little_memory_is_said_in_words(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 32.0 GiB")

    monkeypatch.setattr(server.Engine, "open", fails)
    with pytest.raises(EntresolError, match=r"32\.0 GiB.*blocks_max"):
        await Daemon(config).start()


def test_the_index_of_a_huge_device_is_bounded() -> None:
    assert Config().blocks_max(2**60) == BLOCKS_MAX
    assert Config().blocks_max(2**40) == 2**40 // (256 * KIB)


# Certificates -------------------------------------------------------------------------------------


def test_text_of_any_encoding_may_stand_before_a_certificate(config: Config) -> None:
    """openssl writes names as they are in the certificate; the digest was made at each HELLO."""
    files = config.tls
    assert files.cert is not None
    assert files.key is not None
    assert files.ca is not None
    plain = files.cert.read_bytes()
    daemon = Daemon(config)
    daemon.tls = identity.ReloadingServerContext(files.cert, files.key, files.ca)
    wanted = daemon._certificate_sha256()
    files.cert.write_bytes("subject=/O=M\u00fcnchen\n".encode("latin-1") + plain)
    assert daemon.tls.check(force=True)
    assert daemon._certificate_sha256() == wanted


# Traces -------------------------------------------------------------------------------------------


class StuckProcessor:
    """Of a collector that accepts and never answers."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.ended = threading.Event()

    def force_flush(self, _milliseconds: int) -> None:
        self.go.wait()

    def shutdown(self) -> None:
        self.ended.set()


def _traces(processor: Any) -> Traces:
    traces = object.__new__(Traces)  # without the SDK
    traces._processor = processor
    return traces


def test_a_collector_that_does_not_answer_is_abandoned() -> None:
    processor = StuckProcessor()
    try:
        _traces(processor).close(seconds_max=0.01)
        assert not processor.ended.is_set()
    finally:
        processor.go.set()
    assert processor.ended.wait(10)


def test_a_processor_that_breaks_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    processor = StuckProcessor()
    processor.force_flush = None  # type: ignore[assignment]
    _traces(processor).close()
    assert "event=traces_close_failed" in caplog.text


async def test_the_flash_is_closed_before_traces_are_waited_for(config: Config) -> None:
    daemon = Daemon(config)
    await daemon.start()
    closed: list[str] = []
    engine, meters = daemon.shard.parts.engine, daemon.shard.parts.meters
    close = engine.close

    async def close_engine(*, clean: bool) -> None:
        await close(clean=clean)
        closed.append("engine")

    engine.close = close_engine  # type: ignore[method-assign]
    meters.traces = SimpleNamespace(close=lambda: closed.append("traces"))  # type: ignore[assignment]
    await daemon.stop()
    assert closed[:2] == ["engine", "traces"]


# Commands -----------------------------------------------------------------------------------------


def test_a_user_without_a_home_may_try_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user nobody has named."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    _, home = dev.prepare(tmp_path / "d")
    assert [rule.path for rule in dev.sandbox_rules(home)] == [home.directory]
    dev._point_to(home.client_toml)
    home.remove()


async def _data_file(path: Path) -> None:
    device = await FileDevice.open(path, 64 * MIB, create=True)
    compute = InlineCompute()
    options = EngineOptions(segment_bytes=8 * MIB, blocks_max=64)
    engine = await Engine.open(device, options, compute=compute, now_ns=lambda: 1)
    await engine.close(clean=True)
    await device.close()


def test_a_reader_that_leaves_early_does_not_make_a_file_damaged(tmp_path: Path) -> None:
    """`python -m entresol_daemon.inspect FILE | head -1`; here nobody reads at all."""
    asyncio.run(_data_file(tmp_path / "data"))
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "entresol_daemon.inspect", str(tmp_path / "data")],
            stdout=theirs, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (inspect.EXIT_SOUND, b"")


@pytest.mark.parametrize("length", [250, 300, 5_000])
def test_a_name_that_is_too_long_is_found_before_hours_of_reading(
    tmp_path: Path, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(_data_file(tmp_path / "data"))
    out = str(tmp_path / ("n" * length))
    assert inspect.main([str(tmp_path / "data"), "--parquet", out]) == inspect.EXIT_USAGE
    assert "File name too long" in capsys.readouterr().err


def test_what_is_no_data_file_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe kept the command waiting for its writer."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        assert inspect.main([str(path)]) == inspect.EXIT_USAGE
        assert f"{path} is not a regular file or block device" in capsys.readouterr().err


# The log ------------------------------------------------------------------------------------------


def test_the_filter_of_numbers_never_tries_again() -> None:
    """A name of many blanks took time by its square. What a possessive part has taken, it keeps."""
    taken = re.findall(r"[*+?}]\+?", logs._NUMBERS.pattern.replace("-?", "").replace("?:", ""))
    assert {len(one) for one in taken} == {2}, taken
    for numbers in ("[1,2,3,4,5,6,7,8]", "( 1 , -2,3,4,5,6,7,8,  9 , )", "[1,2,3,4,5,6,7,8 ,]"):
        assert logs.scrub(f"x {numbers} y") == "x <numbers> y"
    for numbers in (
        "[1,2,3,4,5,6,7]",
        "[1,2,3,4,5,6,7,8",
        "[1,2,3,4,5,6,7,8,,]",
        "1,2,3,4,5,6,7,8",
    ):
        assert logs.scrub(numbers) == numbers
