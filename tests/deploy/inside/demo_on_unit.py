"""`entresol demo` told on a daemon that systemd runs: the same hosts, the same promises.

Only the daemon is another: it is started, killed and stopped by systemctl, and its data file and
the tenants' configurations are where the package puts them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from entresol_client.demo import report
from entresol_client.demo.processes import Daemon, Tick
from entresol_client.demo.progress import Progress
from entresol_client.demo.story import OTHER_TENANT, TENANT, Options, Story

UNITS = ("entresold.socket", "entresold.service")


def systemctl(*words: str) -> None:
    subprocess.run(["systemctl", *words], check=True)


class UnitDaemon(Daemon):
    """entresold.service. `kill` is SIGKILL, and it stays down until `start`."""

    @property
    def data_file(self) -> Path:
        return Path("/var/lib/entresol/flash.data")

    def client_toml(self, tenant: str) -> Path:
        return Path(f"/etc/entresol/tenants/{tenant}/client.toml")

    def start(self, tick: Tick) -> None:
        systemctl("start", *UNITS)

    def kill(self) -> None:
        subprocess.run(
            ["systemctl", "kill", "--signal=KILL", UNITS[1]], check=False, capture_output=True
        )
        systemctl("stop", *UNITS)


class UnitStory(Story):
    """The story, on that daemon."""

    def _start_daemon(self) -> Daemon:
        self._show.step("systemd starts the daemon")
        daemon = UnitDaemon(Path("/etc/entresol"), Path("/dev/null"), (TENANT, OTHER_TENANT), ())
        daemon.start(self._ticker("starting"))
        self._show.done("serving")
        return daemon


def main() -> int:
    options = Options(
        context_tokens=int(sys.argv[1]), decode_tokens=8, block_tokens=64, fabric="auto",
        codec="auto", keep=None,
    )  # fmt: skip
    with UnitStory(options, Progress(sys.stderr)) as story:
        findings = story.tell()
    broken = report.broken_promises(findings)
    print(json.dumps({
        "broken": broken, "blocks": findings.blocks, "durable": findings.durable_blocks_put,
        "warm_restart_hits": findings.warm_restart_hits, "wrong_bytes": findings.wrong_bytes,
        "tokens_identical": findings.tokens_identical, "restart_ms": findings.restart_ms,
        "other_tenant_hits": findings.other_tenant_hits,
        "corrupt_blocks_detected": findings.corrupt_blocks_detected, "fabric": findings.fabric,
    }))  # fmt: skip
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
