"""Which data paths a daemon opens, and what it does about those it cannot."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon import dev, fabrics
from entresol_daemon.config import Config
from entresol_daemon.control.identity import ReloadingServerContext
from entresol_proto.fabric.base import FabricKind, VerbsSettings
from entresol_proto.status import FabricError


class NoVerbs:
    """A verbs fabric of a machine without RDMA."""

    made: list[NoVerbs]
    kind = FabricKind.VERBS

    def __init__(self, settings: VerbsSettings, *, private: bool, windows: bool | None) -> None:
        self.settings, self.private, self.windows = settings, private, windows
        self.closed = False
        self.made.append(self)

    async def start(self) -> None:
        raise FabricError("this system has no RDMA device", hint="load rdma_rxe")

    async def close(self) -> None:
        self.closed = True


async def opened(config: Config) -> list[str]:
    """The fabrics that opened, closed again."""
    files = config.tls
    assert files.cert is not None
    assert files.key is not None
    assert files.ca is not None
    tls = ReloadingServerContext(files.cert, files.key, files.ca, interval_ns=10**9)
    servers = await fabrics.open_fabrics(config, tls.context, lambda: bytes(32))
    for server in servers:
        await server.close()
    return [server.kind.label for server in servers]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The dev configuration, on a machine without RDMA."""
    monkeypatch.setattr(NoVerbs, "made", [], raising=False)
    monkeypatch.setattr(fabrics, "VerbsFabricServer", NoVerbs)
    made, _ = dev.prepare(tmp_path / "d", tenants=("dev",))
    made.listen.unix_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return made


def of(config: Config, **changes: Any) -> Config:
    return replace(config, fabric=replace(config.fabric, **changes))


def test_a_machine_without_rdma_offers_the_others(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "entresol.fabric"):
        assert asyncio.run(opened(config)) == ["shm", "tcp"]
    assert "fabric_off fabric=verbs reason=this system has no RDMA device" in caplog.text
    assert NoVerbs.made[0].closed


def test_verbs_can_be_required(config: Config) -> None:
    with pytest.raises(FabricError, match="no RDMA device"):
        asyncio.run(opened(of(config, verbs_required=True)))
    with pytest.raises(FabricError, match="no data path"):
        asyncio.run(opened(of(config, enabled=("verbs",))))


def test_settings_reach_the_fabric(config: Config) -> None:
    asyncio.run(opened(config))
    plain = NoVerbs.made[-1]
    assert plain.settings == VerbsSettings()
    assert plain.private
    assert plain.windows is None
    chosen = of(
        config, verbs_devices=("mlx5_0:1",), verbs_gid_index=3, verbs_mtu="1024",
        verbs_private=False, verbs_windows="off",
    )  # fmt: skip
    asyncio.run(opened(chosen))
    made = NoVerbs.made[-1]
    assert made.settings == VerbsSettings(("mlx5_0:1",), 3, 1024)
    assert not made.private
    assert made.windows is False
