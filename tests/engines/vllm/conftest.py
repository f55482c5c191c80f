"""Engines that several tests share, because starting one takes ten to a hundred seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.tier_daemon import TierDaemon
from tests.engines.vllm.engine import Engine

LOOKUP_MS, LOAD_MS, STORE_MS = 400, 2_000, 5_000


@dataclass(slots=True)
class Site:
    """Two engines, one daemon that both use."""

    daemon: TierDaemon
    a: Engine
    b: Engine

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.a, self.b

    def ready(self) -> None:
        """The daemon serves, both engines are connected and hold nothing themselves."""
        if not self.daemon.running:
            self.daemon.kill()
            self.daemon.start()
        self.daemon.thaw()
        for engine in self.engines:
            engine.wait_connected(tenants=2)
            engine.settle()
            engine.forget()


def tier_settings(daemon: TierDaemon, **more: Any) -> dict[str, Any]:
    """What a test's engine says of the tier."""
    return {
        "type": "entresol",
        "config": str(daemon.client_toml()),
        "tenants": {"other": str(daemon.client_toml("other"))},
        "tenants_trust_each_other": True,
        "lookup_deadline_ms": LOOKUP_MS,
        "load_deadline_ms": LOAD_MS,
        "store_deadline_ms": STORE_MS,
        "durable": True,
        "on_reset": "keep",  # tests empty vLLM's own caches in this way
        **more,
    }


@pytest.fixture(scope="session")
def running_site(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Both engines start at the same time."""
    folder = tmp_path_factory.mktemp("engines")
    with TierDaemon() as daemon:
        tier = tier_settings(daemon)
        site = Site(
            daemon,
            Engine("a", folder, tiny_llama, tier),
            Engine("bb", folder, tiny_llama, tier, connector="EntresolConnector"),
        )
        try:
            for engine in site.engines:
                engine.wait_up()
            yield site
        finally:
            for engine in site.engines:
                engine.kill()


@pytest.fixture
def site(running_site: Site) -> Site:
    """The engines, with nothing cached in them and a daemon that serves."""
    running_site.ready()
    return running_site
