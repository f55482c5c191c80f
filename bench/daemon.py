"""The daemon as the bench runs it: the dev daemon with settings of the bench, bound to its parent.

    BENCH_DAEMON='{"memory": {"dram_bytes": 134217728}}' python -m bench.daemon PARENT --dev ...

Everything else is `entresold --dev`: its certificates, its fabrics, its sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.processes import die_with_parent
from entresol_client import ClientConfig
from entresol_daemon.__main__ import main as daemon_main
from entresol_daemon.config import Config
from entresol_proto.limits import MIB
from tests.harness import DaemonProcess

SETTINGS_ENV = "BENCH_DAEMON"
Settings = Mapping[str, Mapping[str, Any]]
# Those of a real configuration where the dev daemon is smaller: threads, depth, big blocks.
SETTINGS: Settings = {
    "flash": {"io_threads": 8, "segment_bytes": 64 * MIB, "scrub_bytes_per_s": 0},
    "memory": {"dram_bytes": 512 * MIB, "slab_bytes": 32 * MIB},
    "limits": {
        "block_bytes_max": 16 * MIB,
        "inflight_bytes_per_session_max": 256 * MIB,
        "put_queue_bytes_max": 256 * MIB,
    },
}


def changed(config: Config, settings: Settings) -> Config:
    """The configuration with these settings, section by section."""
    for name, values in settings.items():
        config = replace(config, **{name: replace(getattr(config, name), **values)})  # type: ignore[arg-type]
    return config


def merged(*all_settings: Settings) -> dict[str, dict[str, Any]]:
    """Later settings over earlier ones."""
    result: dict[str, dict[str, Any]] = {}
    for settings in all_settings:
        for name, values in settings.items():
            result[name] = {**result.get(name, {}), **values}
    return result


def process(folder: Path, settings: Settings | None = None, *, flash: int = 0) -> DaemonProcess:
    """A daemon that dies with the bench; `flash` in bytes, 0 for the dev daemon's."""
    arguments = ["--flash", f"{flash}B"] if flash else []
    env = {SETTINGS_ENV: json.dumps(merged(SETTINGS, settings or {}))}
    program = ("-m", "bench.daemon", str(os.getpid()))
    return DaemonProcess(folder, *arguments, env=env, program=program)


@contextlib.contextmanager
def fleet(folder: Path, shards: int, settings: Settings | None = None) -> Iterator[ClientConfig]:
    """Several daemons of one PKI, and the configuration that reaches all of them."""
    with contextlib.ExitStack() as stack:
        config: ClientConfig | None = None
        for number in range(shards):
            name = f"s{number}"
            home = folder / name
            if number:  # the same certificate authority and tenants, a certificate of its own
                shutil.copytree(folder / "s0" / "pki", home / "pki")
                for mine in ("shard.pem", "shard.key"):
                    (home / "pki" / mine).unlink()
            one = process(home, merged(settings or {}, {"shard": {"name": name}}))
            found = stack.enter_context(one).client_config()
            shards_so_far = (*config.shards, *found.shards) if config else found.shards
            config = replace(config or found, shards=shards_so_far)
        assert config is not None
        yield config


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    settings = json.loads(os.environ.get(SETTINGS_ENV, "{}"))
    original = Config.dev

    def dev(directory: str | Path) -> Config:
        return changed(original(directory), settings)

    Config.dev = staticmethod(dev)  # type: ignore[method-assign,assignment]
    return daemon_main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
