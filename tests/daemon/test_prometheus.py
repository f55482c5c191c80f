"""A real Prometheus scrapes a real daemon: page, rules, and every query of dashboard and alerts."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import Cli, content, written
from harness import DaemonProcess

from bench.processes import free_ports
from entresol_client.config import ClientConfig
from entresol_proto.limits import MIB

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "unit"))

from test_dashboards import RULE_TESTS, RULES, dashboard_queries  # noqa: E402

pytestmark = [pytest.mark.daemon, pytest.mark.slow]
SECONDS_MAX = 60.0
# Nothing of this can be seen where nothing went wrong, or nobody asked for it.
MAY_BE_EMPTY = re.compile(
    r"queue_shed|quota_refusals|quote_error|old_key_blocks|staging_read|changes\("
)
# A daemon that has to evict soon, and has a budget of writes that it only tells of.
SMALL = """
import sys
from dataclasses import replace
from entresol_daemon.config import Config
made = Config.dev
def small(root):
    found = made(root)
    return replace(
        found,
        admission=replace(found.admission, policy="all", drive_writes_per_day=100.0),
    )
Config.dev = small
from entresol_daemon.__main__ import main
sys.exit(main())
"""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"not run here: {name} is not installed (Debian: apt-get install prometheus)")
    return found


def promtool(*words: str, stdin: bytes | None = None) -> str:
    done = subprocess.run(
        [program("promtool"), *words], input=stdin, capture_output=True, timeout=SECONDS_MAX,
        check=False,
    )  # fmt: skip
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS_MAX) as answer:
        return bytes(answer.read())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("p") / "d"
    with DaemonProcess(folder, "--flash", "128MiB", program=("-c", SMALL)) as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


def target(daemon: DaemonProcess) -> str:
    config = ClientConfig.load(daemon.directory / "client.toml")
    return config.shards[0].metrics.removeprefix("http://")


def knock(daemon: DaemonProcess) -> None:
    """Somebody connects to the session port who does not speak TLS."""
    shard = daemon.client_config().shards[0]
    with socket.create_connection((shard.host, shard.port), SECONDS_MAX) as stranger:
        stranger.sendall(b"hello\r\n\r\n")
        while stranger.recv(4096):
            pass


def test_rules_are_rules_and_do_what_they_say() -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(RULES.parent / "prometheus.yml"))
    assert "SUCCESS" in promtool("test", "rules", str(RULE_TESTS))


def test_the_page_is_as_prometheus_wants_it(daemon: DaemonProcess) -> None:
    said = promtool("check", "metrics", stdin=get(f"http://{target(daemon)}/metrics"))
    assert not said.strip(), said


class Prometheus:
    """One that scrapes a daemon every half second, with our rules."""

    def __init__(self, folder: Path, daemon: DaemonProcess) -> None:
        folder.mkdir()
        (self.port,) = free_ports(1)
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\n"
            f"rule_files: [{json.dumps(str(RULES))}]\n"
            "scrape_configs:\n"
            f'- {{job_name: entresol, static_configs: [{{targets: ["{target(daemon)}"]}}]}}\n'
        )
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [program("prometheus"), f"--config.file={config}",
                 f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address=127.0.0.1:{self.port}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def query(self, text: str) -> list[dict[str, Any]]:
        words = urllib.parse.urlencode({"query": text})
        found = json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/query?{words}"))
        assert found["status"] == "success", found
        return list(found["data"]["result"])

    def wait(self, text: str) -> None:
        """Until a query has an answer."""
        end = time.monotonic() + SECONDS_MAX
        while True:
            try:
                if self.query(text):
                    return
            except OSError:
                pass
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.2)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS_MAX)


@pytest.fixture
def prometheus(tmp_path: Path, daemon: DaemonProcess) -> Iterator[Prometheus]:
    program("prometheus")
    found = Prometheus(tmp_path / "prometheus", daemon)
    try:
        yield found
    finally:
        found.close()


def test_every_query_of_the_dashboard_has_an_answer(
    prometheus: Prometheus, cli: Cli, daemon: DaemonProcess, tmp_path: Path
) -> None:
    source = written(tmp_path / "in", content("prometheus", 4 * MIB))
    prometheus.wait("up == 1")
    for turn in range(4):  # so that there are rates
        cli("put", source, "--name", f"p{turn}", "--ack", "durable")
        cli("get", "--name", f"p{turn}", "-o", str(tmp_path / f"o{turn}"))
        cli("get", "--name", "absent", "-o", str(tmp_path / "none"), code=1)
        cli("exists", "--name", "absent", code=1)
        time.sleep(0.7)
    cli("get", "--name", "p0", "-o", str(tmp_path / "again"))
    knock(daemon)
    for turn in range(5):  # more than there is room for, and again what had to go
        more = written(tmp_path / "more", content(f"more {turn}", 32 * MIB))
        cli("put", more, "--name", f"more {turn}", "--ack", "durable")
        cli("put", source, "--name", "p0", "--ack", "durable")
        knock(daemon)
        time.sleep(0.7)
    prometheus.wait("sum(rate(entresol_blocks_served_total[1m])) > 0")
    prometheus.wait("sum(rate(entresol_blocks_missed_total[1m])) > 0")
    empty = []
    for query in dashboard_queries():
        asked = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
        rows = prometheus.query(asked)
        bad = [row for row in rows if row["value"][1] in ("NaN", "+Inf", "-Inf")]
        if (not rows or bad) and not MAY_BE_EMPTY.search(query):
            empty.append(query)
    assert not empty, "\n".join(empty)
    (share,) = prometheus.query("entresol:hit_ratio:rate5m")
    assert 0 < float(share["value"][1]) < 1
    # A machine that is busy with other tests starves the daemon, and that is said.
    firing = prometheus.query(
        'ALERTS{alertstate="firing", alertname!~"EntresolStarved|EntresolLoopStalls"}'
    )
    assert not firing, "a daemon that is well raises nothing"
    rules = json.loads(get(f"http://127.0.0.1:{prometheus.port}/api/v1/rules"))
    every = [rule for group in rules["data"]["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in every} <= {"ok", "unknown"}, every
