"""The bench's own logic: what is merged, what is skipped and why, and that nothing stays behind.

No speeds are judged here. Processes are real ones, killed as an impatient user kills them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench_main
from bench import daemon, fio, flash, paired, plots, results, scratch
from bench.peers import install, race, redis
from bench.peers.base import Peer, Server, Work
from bench.peers.drive import load
from bench.peers.race import Variant
from bench.peers.running import NAMES, running
from bench.processes import NEW_NETWORK, ROOT, Child, NotRunError, free_ports, listens
from bench.region import Region
from bench.results import Curve, Line
from bench.sections import NO_PEERS, SECTIONS, SIZES, Plan
from entresol_daemon.config import Config

BLOCK, COUNT = 16384, 4
SOON_SECONDS = 30.0


def soon(true: Callable[[], bool]) -> bool:
    """Whether it comes true within a time that no healthy machine needs."""
    until = time.monotonic() + SOON_SECONDS
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def gone(pid: int) -> bool:
    """Whether a process has ended, waited for by somebody or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    with Region(tmp_path / "region", BLOCK, COUNT, create=True) as one:
        yield one


def work_for(region: Region, folder: Path) -> Work:
    return Work(BLOCK, COUNT, str(region.path), str(folder))


# Results ---------------------------------------------------------------------------------------


def save(tmp_path: Path, size: str, *lines: Line, curves: tuple[Curve, ...] = ()) -> dict:  # type: ignore[type-arg]
    told = {"machine": "m", "commit": "c", "size": size, "date": "d"}
    return results.save(
        lines, curves, told, results=tmp_path / "results.json", about=tmp_path / "about.json"
    )


def test_part_of_a_run_leaves_the_other_numbers(tmp_path: Path) -> None:
    save(tmp_path, "commit", Line("a", "s", [3.0, 1.0, 2.0]), Line("b", "s", [5.0]))
    kept = save(tmp_path, "commit", Line("b", "s", [7.0]))
    assert kept == json.loads((tmp_path / "results.json").read_text())
    assert kept["a"] == {"value": 2.0, "unit": "s", "low": 1.0, "high": 3.0}
    assert kept["b"]["value"] == 7.0


@pytest.mark.parametrize(("size", "value"), [("quick", 1.0), ("commit", 9.0), ("full", 9.0)])
def test_a_quick_run_never_replaces_a_number_of_a_larger_one(
    tmp_path: Path, size: str, value: float
) -> None:
    save(tmp_path, "full", Line("a", "s", [1.0]))
    kept = save(tmp_path, size, Line("a", "s", [9.0]), Line("new", "s", [4.0]))
    assert kept["a"]["value"] == value
    assert kept["new"]["value"] == 4.0
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["a"]["size"] == ("full" if size == "quick" else size)


@pytest.mark.parametrize("content", ["", "not JSON", "[1, 2]"])
def test_a_file_that_is_no_result_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    assert list(save(tmp_path, "commit", Line("a", "s", [1.0]))) == ["a"]


def test_curves_come_back_for_the_pictures(tmp_path: Path) -> None:
    curve = Curve("scale_x", "blocks", "us", {"one": [(1, 2.0), (10, 3.0)]})
    save(tmp_path, "commit", curves=(curve,))
    (back,) = results.curves_of(tmp_path / "about.json")
    assert back.name == curve.name
    assert [tuple(point) for point in back.points["one"]] == curve.points["one"]
    assert "10: 3" in back.text()


def test_a_budget_is_judged_on_the_median() -> None:
    line = Line("x", "ratio", [0.1, 0.9, 0.95], at_least=0.9)
    assert line.holds
    assert not replace(line, at_least=0.91).holds
    assert not Line("y", "ms", [4, 6, 7], at_most=5).holds
    assert "MISSED" in Line("y", "ms", [6], at_most=5).text()


# The memory and the judge ----------------------------------------------------------------------


def test_a_single_wrong_byte_is_noticed_and_nothing_passes_twice(region: Region) -> None:
    region.into[:] = region.source
    region.check()
    with pytest.raises(AssertionError, match="block 0"):
        region.check()  # what was there has been wiped
    region.into[:] = region.source
    region.into[3 * BLOCK + 7] ^= 1
    with pytest.raises(AssertionError, match="block 3"):
        region.check()


def test_the_buffers_of_fio_are_not_what_is_put(tmp_path: Path) -> None:
    """fio takes them from the beginning of the file, and writes into them."""
    content = os.urandom(COUNT * BLOCK)
    with Region(tmp_path / "kv", BLOCK, COUNT, create=True, content=content) as one:
        with (tmp_path / "kv").open("r+b") as file:
            file.write(b"x" * (fio.DEPTH // 2 * BLOCK))
        assert one.source == content
        with pytest.raises(AssertionError, match="block 0"):
            one.check()
        with Region(tmp_path / "kv", BLOCK, COUNT) as theirs:
            theirs.into[:] = theirs.source
        one.check()


def test_what_a_killed_bench_left_goes_with_the_next(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    left = tmp_path / f"{scratch.PREFIX}{dead.pid}-x"
    mine = tmp_path / f"{scratch.PREFIX}{os.getpid()}-x"
    other = tmp_path / f"{scratch.PREFIX}somebody"
    for path in (left, mine, other):
        (path / "d").mkdir(parents=True)
    with scratch.folder(tmp_path) as one:
        assert one.is_dir()
        assert not left.exists()
        assert mine.exists()
        assert other.exists()
    assert not one.exists()


# fio -------------------------------------------------------------------------------------------


def report(error: int = 0) -> dict[str, object]:
    side = {
        "io_bytes": 128 << 20, "runtime": 64, "total_ios": 128,
        "clat_ns": {"percentile": {"50.000000": 1_500_000, "99.000000": 9_000_000}},
    }  # fmt: skip
    return {"jobs": [{"error": error, "read": side}]}


def test_a_report_of_fio_is_read() -> None:
    rate = fio.parse(report(), "read")
    assert rate.gbps == pytest.approx((128 << 20) / 0.064 / 1e9)
    assert (rate.p50_us, rate.p99_us, rate.requests) == (1500, 9000, 128)


def test_an_error_of_fio_is_a_reason() -> None:
    with pytest.raises(NotRunError, match="error 22"):
        fio.parse(report(error=22), "read")


def test_a_run_of_fio_of_which_nothing_counted_is_a_reason() -> None:
    side = {"clat_ns": {}, "runtime": 3, "io_bytes": 4096, "total_ios": 0}
    with pytest.raises(NotRunError, match="before what it counts"):
        fio.parse({"jobs": [{"error": 0, "read": side}]}, "read")


def test_no_fio_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRunError, match="not installed"):
        fio.Fio.find(download=False)
    monkeypatch.setenv(install.CACHE_ENV, str(tmp_path / "cache"))
    with pytest.raises(NotRunError, match="no apt-get here"):
        fio.Fio.find()


def test_only_what_was_written_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(8 << 20)
        os.pwrite(file.fileno(), b"x" * 8192, 1 << 20)
        os.pwrite(file.fileno(), b"x" * (2 << 20), (3 << 20) + 4096)
    runs = list(flash.data_runs(path))
    assert runs[-1] == ((3 << 20) + 4096, 2 << 20)
    assert flash.longest_run(path, 1 << 20) == (4 << 20, 1 << 20)


# Processes -------------------------------------------------------------------------------------

STARTS_A_CHILD = """
import sys, time
from pathlib import Path
from typing import Any
from bench.processes import Child
child = Child("sleeper", ["sleep", "1000"], Path(sys.argv[1]))
print(child.process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_bench_started_dies_with_it(tmp_path: Path, frozen: bool) -> None:
    """SIGKILL: no handler, no `finally` runs."""
    command = [sys.executable, "-c", STARTS_A_CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        comm = Path(f"/proc/{pid}/comm")
        assert soon(lambda: comm.read_text().strip() == "sleep")
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait()
    assert soon(lambda: gone(pid))


def test_a_child_whose_parent_is_gone_does_not_start(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    command = [sys.executable, str(ROOT / "bench" / "processes.py"), "1", "0", "touch", str(marker)]
    assert subprocess.run(command, check=False).returncode == 1
    assert not marker.exists()


def test_a_child_is_ended_with_all_of_its_session(tmp_path: Path) -> None:
    with Child("shell", ["sh", "-c", "sleep 1000 & echo $!; wait"], tmp_path, talks=True) as child:
        assert child.process.stdout is not None
        inner = int(child.process.stdout.readline())
        child.freeze()
    assert child.process.returncode is not None
    assert soon(lambda: gone(inner))


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    script = "echo starting; echo 'E: no such device' >&2; echo 'fatal error' >&2; exit 3"
    with (
        Child("server", ["sh", "-c", script], tmp_path) as child,
        pytest.raises(NotRunError, match=r"server ended with 3: fatal error"),
    ):
        child.wait_for_port(1)


def test_a_listener_is_found_without_connecting_to_it() -> None:
    (port,) = free_ports(1)
    assert not listens(os.getpid(), port)
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert listens(os.getpid(), port)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


LISTENS_EVERYWHERE = """
import socket, sys, time
one = socket.socket()
one.bind(("", int(sys.argv[1])))
one.listen()
time.sleep(1000)
"""


def test_a_server_on_every_interface_is_out_of_reach(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", LISTENS_EVERYWHERE, str(port)]
    with Child("wide", command, tmp_path, network=NEW_NETWORK) as child:
        try:
            child.wait_for_port(port)
        except NotRunError as error:
            pytest.skip(f"not run here: no network namespaces: {error}")
        assert not listens(os.getpid(), port)
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", port)) != 0


# Peers -----------------------------------------------------------------------------------------


def test_a_peer_does_the_work_in_a_process_of_its_own(region: Region, tmp_path: Path) -> None:
    """The plain file needs nothing installed: the whole way, and nothing stays."""
    with running(load("files"), work_for(region, tmp_path)) as one:
        pid = one._child.process.pid
        for generation in range(2):
            assert one.put(generation) > 0
            assert one.get(generation, 2) > 0
            region.check()
        with pytest.raises(NotRunError, match="KeyError"):
            one.get(7)  # an error is its answer, and it goes on
        assert one.get(1) > 0
    assert gone(pid)
    assert not (tmp_path / "files").exists()


class Broken(Peer):
    """A peer whose server ends, and whose client cannot connect then."""

    name = "files"
    ports = ("one",)

    def servers(self, work: Work) -> list[Server]:
        script = "echo 'error: there is no device' >&2; exit 1"
        return [Server("server", ["sh", "-c", script], work.ports["one"])]


def test_a_peer_that_cannot_run_is_a_reason(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench.peers.running as module

    monkeypatch.setattr(module, "_command", lambda words, python, unpacked: list(words))
    with (
        pytest.raises(NotRunError, match="there is no device"),
        running(Broken(), work_for(region, tmp_path)),
    ):
        pass


def test_what_cannot_be_installed_is_a_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(install.CACHE_ENV, str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(NotRunError, match="pip install no-such-peer==1"):
        install.environment(("no-such-peer==1",))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_an_interrupted_installation_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(install.CACHE_ENV, str(tmp_path))
    built = []

    def build(at: Path) -> None:
        built.append(sorted(path.name for path in at.iterdir()))
        (at / "half").touch()
        if len(built) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install._made("thing", ("a",), build)
    first = install._made("thing", ("a",), build)
    assert install._made("thing", ("a",), build) == first
    assert install._made("thing", ("b",), build) != first
    assert built == [[], [], []]


def test_every_peer_is_complete() -> None:
    for name in NAMES:
        peer = load(name)
        assert peer.name == name
        assert peer.about
        assert not (peer.engine and peer.wheels), "one environment"
        assert all("==" in wheel for wheel in peer.wheels), "pinned"
        if peer.network:
            ports = {port: number for number, port in enumerate(peer.ports, 1)}
            servers = peer.servers(Work(BLOCK, COUNT, "", "", ports=ports))
            assert servers
            assert all(server.port in ports.values() for server in servers)


def test_redis_is_spoken_to_in_its_protocol() -> None:
    assert redis.command(b"GET", b"key") == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"


# The rounds ------------------------------------------------------------------------------------


def variant(log: list[str], name: str, *, fails_in: int = -1) -> Variant:
    async def get(generation: int, times: int) -> float:
        log.append(f"{name}{generation}")
        if generation == fails_in:
            raise NotRunError("its server is gone")
        return 1.0

    return Variant(get)


async def test_everybody_has_a_turn_in_every_round_and_nobody_is_always_first(
    region: Region,
) -> None:
    log: list[str] = []
    variants = {name: variant(log, name) for name in "abc"}
    await race.run(variants, region, 3, {})
    assert log[::2] == log[1::2], "the lead, then what is timed"
    turns = log[::2]
    firsts = {turns[3 * round_][0] for round_ in range(4)}
    assert firsts == {"a", "b", "c"}
    assert all(len(one.gets_gbps) == 3 for one in variants.values())
    assert sorted(turns) == sorted(f"{name}{round_}" for name in "abc" for round_ in range(4))


async def test_a_turn_is_as_long_for_all_and_of_some_batches_at_least(region: Region) -> None:
    asked: dict[str, list[int]] = {"quick": [], "slow": []}

    def taking(name: str, batch_s: float) -> Variant:
        async def get(_generation: int, times: int) -> float:
            asked[name].append(times)
            return times * batch_s

        return Variant(get)

    variants = {"quick": taking("quick", race.TURN_S / 100), "slow": taking("slow", race.TURN_S)}
    await race.run(variants, region, 2, {})
    assert asked["quick"] == [2, 4, 40, 100, 40, 100], "the first turn tells how long one takes"
    assert asked["slow"] == [2, 4] * 3
    assert variants["slow"].gets_gbps == [pytest.approx(region.plain_bytes / 1e9 / race.TURN_S)] * 2


async def test_who_fails_on_the_way_is_named_and_the_others_go_on(region: Region) -> None:
    log: list[str] = []
    variants = {"a": variant(log, "a"), "b": variant(log, "b", fails_in=2)}
    not_run: dict[str, str] = {}
    await race.run(variants, region, 3, not_run)
    assert list(variants) == ["a"]
    assert len(variants["a"].gets_gbps) == 3
    assert not_run == {"b": "stopped in round 2: its server is gone"}


def test_the_best_peer_is_the_best_of_each_round() -> None:
    found = race.Race(
        {
            "entresol_tcp": [3.0, 3.0], "loopback_blocking": [4.0, 1.0],
            "loopback_uvloop": [2.0, 6.0], "redis": [1.0, 3.0], "flight": [2.0, 1.0],
        },
        {"entresol_tcp": [1.0, 1.0], "redis": [1.0, 2.0], "flight": [1.0, 1.0]},
        {},
    )  # fmt: skip
    lines = {line.name: line.values for line in race._lines(found)}
    assert lines["get_resident_tcp_vs_best_peer"] == [1.5, 1.0]
    assert lines["peers_get_tcp_vs_loopback"] == [0.75, 0.5]
    assert lines["put_resident_tcp_vs_best_peer"] == [1.0, 0.5]


def test_without_fio_there_is_no_ratio_and_no_budget() -> None:
    ours = (
        "shm", "tcp", "shm_together", "put_shm", "put_tcp",
        "first_byte_p50_us", "first_byte_p99_us",
    )  # fmt: skip
    found = flash.Found({name: [1.0] for name in ours})
    names = [line.name for line in flash.lines(found)]
    assert tuple(names[:2]) == results.CANONICAL
    assert not [name for name in names if "_vs_" in name]
    for name in ("fio_read", "fio_write", "device_p99_us"):
        found.add(name, 2.0)
    lines = {line.name: line for line in flash.lines(found)}
    assert lines["get_flash_vs_fio_read"].value == 0.5
    assert lines["put_durable_vs_fio_write"].value == 0.5
    assert not lines["get_flash_vs_fio_read"].holds


# Sections, pictures, words ---------------------------------------------------------------------


def test_the_daemon_accepts_the_settings_of_the_bench(tmp_path: Path) -> None:
    config = daemon.changed(Config.dev(tmp_path), daemon.SETTINGS)
    config.check("bench")
    assert config.flash.io_threads == fio.DEPTH
    assert config.flash.group_commit_bytes == flash.GROUP_BYTES


def test_first_tokens_are_compared_where_only_the_client_is() -> None:
    """A GPU host with the shim measures against its pod's daemon, whose package it has not."""
    script = "import sys; sys.modules['entresol_daemon'] = None; import bench.ttft; print('here')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "here\n", done.stderr


def test_the_quick_size_installs_nothing() -> None:
    assert Plan("quick").peers == ()
    assert Plan("commit").peers == NAMES
    assert Plan("full", ("redis",)).peers == ("redis",)
    for name in ("peers", "scale"):
        assert SECTIONS[name](Plan("quick")).not_run
    assert [Plan(size).of(1, 2, 3) for size in SIZES] == [1, 2, 3]


def test_labels_do_not_lie_on_each_other() -> None:
    placed = plots.spread([(1.0, "a"), (1.01, "b"), (5.0, "c"), (1.02, "d")], 0.5)
    heights = [at for at, _ in placed]
    assert heights == [1.0, 1.5, 2.0, 5.0]
    assert [end[1] for _, end in placed] == ["a", "b", "d", "c"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.123456, "0.123"), (1000, "1k"), (2_500_000, "2.5M"), (52.4, "52.4")]
)
def test_numbers_on_axes_are_short(value: float, text: str) -> None:
    assert plots.plain(value) == text


def test_the_page_names_every_section_and_peer() -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    for name in (*SECTIONS, *NAMES):
        assert f"`{name}`" in page, name
    for name in NAMES:
        for wheel in load(name).wheels:
            assert wheel.replace("==", " ") in page, wheel


def test_every_picture_begins_at_zero_and_names_its_machine(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not run here: no matplotlib (extra bench)")
    curves = (
        Curve("scale_exists", "keys", "us", {"a": [(1, 300.0), (100_000, 9e4)]}, "key"),
        Curve("get_resident_by_block", "KiB", "GB/s", {"redis": [(64, 1.0), (1024, 2.0)]}),
    )
    lines = [
        Line(name, "", [3.0, 4.0])
        for name in ("bare_64k_exchange_p50_us", "bare_64k_exchange_p99_us", "get_flash_tcp_gbps")
    ]
    save(tmp_path, "commit", *lines, curves=curves)
    bottoms: list[float] = []
    real = plots._save

    def watched(figure: Any, path: Path) -> Path:
        bottoms.extend(axis.get_ylim()[0] for axis in figure.axes if "flash" not in path.name)
        assert "commit c" in " ".join(text.get_text() for text in figure.texts)
        return real(figure, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_save", watched)
        drawn = plots.draw(
            tmp_path / "png", of=tmp_path / "results.json", about_path=tmp_path / "about.json"
        )
    assert {path.name for path in drawn} == {
        "scale_exists.png", "throughput_by_block_size.png", "latency_percentiles.png", "flash.png",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert bottoms
    assert set(bottoms) == {0.0}


@pytest.mark.timeout(600)
def test_trees_take_turns_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="ent-") as folder:  # a short path, for sockets
        monkeypatch.setenv("TMPDIR", folder)
        words = ["--what", "resident", "--rounds", "2", "--starts", "2", "--at-once", "2"]
        assert paired.main([str(ROOT), str(ROOT), *words]) == 0
        assert not list(Path(folder).iterdir()), "folders of its daemons are left"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "speed over the first tree's 1.000 (quartiles 1.000 to 1.000), CPU 1.000" in lines[0]
    assert all(line.startswith(f"{ROOT}: ") and " GB/s, " in line for line in lines)
    with pytest.raises(SystemExit):
        paired.main([str(tmp_path)])
    assert "no tree with a bench" in capsys.readouterr().err


def test_a_tree_that_cannot_start_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "ours.py").write_text("raise RuntimeError('an old tree')\n")
    (tmp_path / "bench" / "__init__.py").write_text("")
    assert paired.main([str(tmp_path), "--rounds", "2"]) == 1
    said = capfd.readouterr().err
    assert f"{tmp_path} cannot do this work" in said


def test_a_peer_that_nobody_knows_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for asked in ("nobody", "redis,nobody", "none,redis"):
        with pytest.raises(SystemExit) as refused:
            bench_main.main(["--peers", asked])
        assert refused.value.code == 2
        assert "redis" in capsys.readouterr().err, "it names those there are"
    assert Plan("full", NO_PEERS).peers == ()
    assert Plan("full", ("redis",)).peers == ("redis",)
    assert set(Plan("full").peers) == set(NAMES)
