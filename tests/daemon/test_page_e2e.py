"""The web page in a real browser, on a real daemon: what it shows, loads and complains about."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_lab import Browser, browser
from cli_lab import Cli, content, written
from harness import DaemonProcess

from entresol_client.cli.top_reading import rates, verdict
from entresol_client.config import ClientConfig
from entresol_proto.limits import MIB

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))

from test_top import VERDICTS
from test_top import overview as document

pytestmark = [pytest.mark.daemon, pytest.mark.slow]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Browser]:
    program = browser()
    if not program:
        pytest.skip("not run here: no chromium is installed (Debian: apt-get install chromium)")
    with Browser(program, tmp_path / "profile") as running:
        yield running


def address(daemon: DaemonProcess) -> str:
    return ClientConfig.load(daemon.directory / "client.toml").shards[0].metrics


def text(chromium: Browser, selector: str) -> str:
    return str(chromium.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


def test_the_page_shows_the_daemon(
    chromium: Browser, daemon: DaemonProcess, cli: Cli, tmp_path: Path
) -> None:
    where = address(daemon)
    cli(
        "put", written(tmp_path / "in", content("page", 4 * MIB)), "--name", "p", "--ack", "durable"
    )
    chromium.open(f"{where}/#token_bytes=1000&prefill_rate=1000")
    chromium.wait("document.querySelectorAll('#funnel tr').length > 0 && before !== null")
    cli("get", "--name", "p", "-o", str(tmp_path / "out"))
    chromium.wait("shown.get_bytes.plain >= 4194304")
    chromium.wait("document.title.endsWith(' dev')")
    assert text(chromium, "#shard") == "dev"
    assert "up " in text(chromium, "#about")
    assert text(chromium, "#tenants").splitlines()[1].startswith("dev")
    assert "stored" in text(chromium, "#events")
    assert chromium.evaluate("document.querySelectorAll('#map i').length") == chromium.evaluate(
        "shown.flash.map.cells.length / 2"
    )
    saved = text(chromium, "#cards .card:last-child b")
    assert saved.endswith(" s"), "what the get saved of prefill"
    assert chromium.picture().startswith(b"\x89PNG")
    assert chromium.complaints == [], "the policy lets the page do all it does"
    asked = {url.partition("#")[0] for url in chromium.requests}
    assert {url for url in asked if not url.startswith("data:")} == {
        f"{where}/", f"{where}/overview.json",
    }  # fmt: skip


def test_a_daemon_that_goes_away_is_said_to_be(chromium: Browser, daemon: DaemonProcess) -> None:
    chromium.open(f"{address(daemon)}/")
    chromium.wait("shown !== null")
    daemon.stop()
    chromium.wait("document.getElementById('verdict').textContent === 'DOWN'")
    assert chromium.evaluate("document.getElementById('verdict').className") == "bad"
    assert chromium.evaluate("document.querySelector('main').className") == "stale"


def test_page_and_top_give_the_same_verdicts(chromium: Browser, daemon: DaemonProcess) -> None:
    """The rules are written twice: they must not drift apart."""
    chromium.open(f"{address(daemon)}/")
    chromium.wait("shown !== null")
    earlier = document()
    for now, _ in VERDICTS:
        if now is None:
            continue
        word, _ = verdict(now, rates(earlier, now))
        script = (
            f"((b, n) => verdictOf(n, ratesOf(b, n), n.flash.live_bytes / n.flash.capacity_bytes))"
            f"({json.dumps(earlier)}, {json.dumps(now)})"
        )
        found: Any = chromium.evaluate(script)
        assert found[0] == word.value, now


def test_what_a_tenant_calls_itself_is_text(chromium: Browser, daemon: DaemonProcess) -> None:
    """Even if the daemon let markup through as a name, the page would show it, not run it."""
    chromium.open(f"{address(daemon)}/")
    chromium.wait("shown !== null")
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    now = document(shard=evil, not_ready=[evil], events=[
        {"time_unix_ns": 0, "kind": evil, "reason": evil, "tenant": evil, "blocks": 1, "bytes": 1}
    ])  # fmt: skip
    now["tenants"]["rows"][0]["tenant"] = evil
    now["flash"]["map"]["cells"] = "s9<i"
    chromium.evaluate(f"show({json.dumps(now)})")
    assert chromium.evaluate("document.querySelectorAll('img, script').length") == 1
    assert evil in text(chromium, "#events")
