"""`entresol top`: rates from two overviews, the verdict, and frames that fit any terminal."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from entresol_client.cli.main import main
from entresol_client.cli.top_frame import Screen, frame
from entresol_client.cli.top_reading import (
    Pair,
    Price,
    Verdict,
    fullness,
    rates,
    text_of,
    verdict,
    writes_per_day,
)

GB = 10**9


def overview(**changes: Any) -> dict[str, Any]:
    """A daemon after a minute of life."""
    found: dict[str, Any] = {
        "format": 1, "version": "0.1.0", "shard": "s0", "state": "serving", "not_ready": [],
        "time_unix_ns": 1_700_000_000 * GB, "uptime_ns": 60 * GB,
        "memory": {"unassigned": 50, "free": 25, "ready": 25},
        "flash": {
            "capacity_bytes": 100 * GB, "live_bytes": 25 * GB, "written_bytes": 30 * GB,
            "read_bytes": 5 * GB, "segments": {"free": 3, "open": 1, "sealed": 1, "condemned": 0},
            "refusals": {"read": 0, "write": 0, "flush": 0},
            "map": {"segments_per_cell": 1, "segment_bytes": 20 * GB, "cells": "o5s9f0f0f0"},
        },
        "budget": None, "served": {"memory": 60, "flash": 20}, "missed": {"miss": 20},
        "get_bytes": {"plain": 8 * GB, "wire": 6 * GB}, "put_bytes": {"plain": 4 * GB},
        "removed": {}, "corrupt": {"flash": 0}, "first_grant": {"count": 10, "seconds": 0.1},
        "queues": {"get": 0, "loop": 3}, "shed": {}, "sessions": {"tcp": 1, "shm": 0},
        "leases": 2, "loop_lag_max_s": 0.001, "scrub_found": {}, "compression_ratio": 1.5,
        "tenants": {"count": 1, "rows": [
            {"tenant": "a", "flash_bytes": 25 * GB, "dram_bytes": 25, "blocks": 5, "sessions": 1,
             "leases": 2, "served": 80, "missed": 20, "refused": 0}]},
        "events": [{"time_unix_ns": 1_700_000_000 * GB, "kind": "stored", "reason": "none",
                    "tenant": "a", "blocks": 2, "bytes": 100}],
    }  # fmt: skip
    return found | changes


def later(seconds: float = 2.0) -> dict[str, Any]:
    """The same daemon after two busy seconds."""
    found = copy.deepcopy(overview())
    found["uptime_ns"] += int(seconds * GB)
    found["served"] = {"memory": 66, "flash": 22}
    found["missed"] = {"miss": 21, "busy": 1}
    found["get_bytes"] = {"plain": 10 * GB, "wire": 7 * GB}
    found["put_bytes"] = {"plain": 5 * GB}
    found["flash"]["written_bytes"] += GB
    found["first_grant"] = {"count": 12, "seconds": 0.2}
    return found


def test_the_same_overview_again_is_no_step_in_time() -> None:
    pair, first, second = Pair(), overview(), later()
    assert pair.add(first)
    assert not pair.add(copy.deepcopy(first))
    assert pair.before is None
    assert pair.add(second)
    told = rates(pair.before, second)
    assert told is not None
    assert not pair.add(copy.deepcopy(second))
    assert pair.now is second
    assert rates(pair.before, second) == told


def test_a_restarted_daemon_is_another_overview() -> None:
    pair = Pair()
    pair.add(later())
    assert pair.add(overview())
    assert rates(pair.before, overview()) is None


def plain(lines: list[str]) -> str:
    return re.sub(r"\033\[[0-9;]*m", "", "\n".join(lines))


# Rates --------------------------------------------------------------------------------------------


def test_rates_are_differences_over_the_daemons_own_time() -> None:
    got = rates(overview(), later())
    assert got is not None
    assert got.seconds == 2
    assert got.out_bytes == GB
    assert got.in_bytes == GB / 2
    assert got.served == {"memory": 3, "flash": 1}
    assert got.missed == {"miss": 0.5, "busy": 0.5}
    assert (got.asked, got.hit_rate) == (5, 0.8)
    assert got.first_grant_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    "before",
    [None, overview(uptime_ns=70 * GB), overview(shard="other"), overview(uptime_ns=62 * GB)],
)
def test_nothing_is_made_up_across_starts(before: dict[str, Any] | None) -> None:
    """Another start of the daemon counts from 0 again: a difference would be nonsense."""
    assert rates(before, later()) is None
    shown = plain(frame(later(), before, Screen(columns=100)))
    assert "out" in shown
    assert "GB/s" not in shown


def test_no_requests_have_no_hit_rate() -> None:
    quiet = overview(uptime_ns=61 * GB)
    got = rates(overview(), quiet)
    assert got is not None
    assert got.hit_rate is None
    assert verdict(quiet, got)[0] is Verdict.IDLE


def test_wear_is_in_sizes_of_the_flash_per_day() -> None:
    old = overview(uptime_ns=620 * GB)
    now, mean = writes_per_day(later(), rates(overview(), later()))
    assert now == pytest.approx(0.5 * 86_400 / 100)
    assert mean is None, "what a minute of filling is in a day says nothing"
    assert writes_per_day(old, None) == (None, pytest.approx(30 / 620 * 86_400 / 100))
    assert writes_per_day({}, None) == (None, None)
    shown = plain(frame(later(), overview(), Screen(columns=100)))
    assert "432.00 drive writes a day now, too early for a mean, no budget" in shown
    assert "- drive writes a day now, 41.81 since start" in plain(frame(old, None, Screen()))


def test_prefill_saved_needs_both_numbers() -> None:
    assert Price(1000, 50).seconds(100_000) == 2
    assert Price(1000, 0).seconds(100_000) is None
    assert Price(0, 50).seconds(100_000) is None


# Verdicts -----------------------------------------------------------------------------------------


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = later()
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


VERDICTS: list[tuple[dict[str, Any] | None, Verdict]] = [
    (None, Verdict.DOWN),
    (later(), Verdict.HEALTHY),
    (changed(("corrupt",), {"flash": 1}), Verdict.FAILING),
    (changed(("flash", "refusals"), {"read": 1}), Verdict.FAILING),
    (changed(("scrub_found",), {"io_error": 1}), Verdict.FAILING),
    (changed(("flash", "segments"), {"condemned": 1}), Verdict.FAILING),
    (changed(("flash", "segments"), {"unread": 3}), Verdict.FAILING),
    (changed(("not_ready",), ["flash failed: puts are refused"]), Verdict.FAILING),
    (changed(("not_ready",), ["draining"]), Verdict.NOT_READY),
    (changed(("state",), "locked"), Verdict.NOT_READY),
    (changed(("shed",), {"get": 4}), Verdict.OVERLOADED),
    (changed(("loop_lag_max_s",), 0.5), Verdict.OVERLOADED),
    (changed(("flash", "live_bytes"), 95 * GB), Verdict.FULL),
    (changed(("removed",), {"evicted": 8}), Verdict.FULL),
    (changed(("removed",), {"forgotten": 8}), Verdict.HEALTHY),
]


@pytest.mark.parametrize(("now", "expected"), VERDICTS)
def test_the_verdict(now: dict[str, Any] | None, expected: Verdict) -> None:
    recent = None if now is None else rates(overview(), now)
    assert verdict(now, recent)[0] is expected
    shown = plain(frame(now, overview(), Screen(columns=120)))
    assert expected.value in shown.splitlines()[0]


def test_old_trouble_is_not_trouble_now() -> None:
    """A block that was damaged an hour ago must not keep the word FAILING for ever."""
    before, now = overview(corrupt={"flash": 3}), later()
    now["corrupt"] = {"flash": 3}
    assert verdict(now, rates(before, now))[0] is Verdict.HEALTHY


# Frames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("colour", [True, False])
def test_a_frame_fits(columns: int, unicode: bool, colour: bool) -> None:
    screen = Screen(columns=columns, lines=20, colour=colour, unicode=unicode)
    lines = frame(later(), overview(), screen, history=[(float(n), 1.0) for n in range(300)])
    assert len(lines) <= 20
    assert all(len(line) <= columns for line in plain(lines).splitlines())
    assert ("\033" in "".join(lines)) is colour
    if not unicode:
        assert plain(lines).isascii()


def test_one_frame_says_it_all() -> None:
    now = later()
    now["budget"] = {"drive_writes_per_day": 3.0, "room_bytes": -(2**30), "burst_bytes": 2**31}
    shown = plain(frame(now, overview(), Screen(columns=160), price=Price(100_000, 10_000)))
    for words in (
        "s0  HEALTHY  25 % of flash in use  out 1.00 GB/s  in 500.00 MB/s  hits 80 %",
        "saves 1 s of prefill a second",
        "first grant 50 ms on average, stored 1.50:1",
        "from memory          60 %",
        "missed: busy         10 %",
        "◆█···",
        "1.0 GiB owed: most are stored when offered twice",
        "loop 3",
        "1 session (1 tcp), 2 leases",
        "stored  a  2 blocks, 100 B",
    ):
        assert words in shown, shown


def test_a_daemon_that_went_away_is_shown_with_what_was_known() -> None:
    shown = plain(frame(later(), overview(), Screen(), problem="no daemon answers at h:1"))
    assert shown.splitlines()[0] == " DOWN   no daemon answers at h:1"
    assert "9.3 GiB since start" in shown
    assert "GB/s" not in shown, "a rate of then is none of now"


HOSTILE: list[Any] = [
    {"shard": "\033[2J\033]0;owned\007x", "not_ready": ["\033[31mred"], "state": "\r\n"},
    {"flash": None, "memory": [], "served": "x", "missed": {"\x07": 1}, "tenants": {"rows": 5}},
    {"flash": {"capacity_bytes": float("nan"), "map": {"cells": "zz\x1b9"}}, "uptime_ns": "1"},
    {"events": [1, {"kind": "\033[H", "time_unix_ns": 1e300}], "tenants": {"rows": [None, {}]}},
    {"queues": {"get": True}, "leases": -1, "budget": [], "get_bytes": {"plain": float("inf")}},
    {"served": {"memory": "many"}, "sessions": {"tcp": -5}, "compression_ratio": "high"},
]


@pytest.mark.parametrize("changes", HOSTILE)
def test_whatever_answers_cannot_write_to_the_terminal(changes: dict[str, Any]) -> None:
    """The address may be anybody's: no escape sequence of it reaches the terminal, no crash."""
    now = later() | changes
    lines = frame(now, overview(), Screen(columns=100, colour=False))
    assert lines
    shown = "\n".join(lines)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown), shown
    assert all("\n" not in line for line in lines)


def test_text_is_bounded() -> None:
    assert text_of("a" * 10_000) == "a" * 120
    assert fullness({"flash": {"capacity_bytes": 0}}) is None


# The command --------------------------------------------------------------------------------------


@contextmanager
def answering(status: int, raw: bytes) -> Iterator[str]:
    """Some HTTP server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "raw", "match"),
    [
        (404, b"no", "has no overview"),
        (200, b"<html>", "no overview that is understood"),
        (200, b"[]", "no overview that is understood"),
        (200, b'{"format": 2}', "no overview that is understood"),
        (200, b"[" * 100_000, "no overview that is understood"),
        (500, b"{}", r"understood \(500\)"),
    ],
)
def test_another_service_is_told_apart(
    status: int, raw: bytes, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, raw) as url:
        assert main(["top", "--once", "--url", url]) == 1
    assert re.search(match, capsys.readouterr().err)


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:1"]) == 3
    assert "fix: is it running?" in capsys.readouterr().err


def test_once_tells_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, json.dumps(overview(state="locked")).encode()) as url:
        assert main(["top", "--once", "--interval", "0.2", "--json", "--url", url]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not_ready"
    assert "rates" not in found, "no time passed between two equal documents"


@pytest.mark.parametrize(
    "words",
    [["--url", "https://h"], ["--url", "http://h:x"], ["--url", "http://"], ["--interval", "0"],
     ["--interval", "x"], ["--url", "http://h", "--model", "nobody"],
     ["--url", "http://h", "--prefill-rate", "-1"],
     ["--url", "http://h", "--model", "phi-4", "--dtype", "x"]],
)  # fmt: skip
def test_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *words]) == 2
    assert capsys.readouterr().err
