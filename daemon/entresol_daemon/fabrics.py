"""The data paths of one daemon: which are opened, and why one is not.

Invariant: what is configured and cannot be opened ends the start, with one exception: a machine
without RDMA simply does not offer verbs, unless `verbs_required` is set.
"""

from __future__ import annotations

import logging
import socket
import ssl as ssl_module
from collections.abc import Callable

from entresol_daemon.config import Config
from entresol_proto.fabric.base import FabricServer, VerbsSettings
from entresol_proto.fabric.mapped import MappedBudget
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.fabric.tcp import TcpFabricServer
from entresol_proto.fabric.verbs import VerbsFabricServer
from entresol_proto.status import FabricError

SHM_MAPPED_BYTES_PER_SESSION_MAX = 1 << 30  # of a host's put staging

log = logging.getLogger("entresol.fabric")


def verbs_settings(config: Config) -> VerbsSettings:
    """The overrides of [fabric], where they are set."""
    fabric = config.fabric
    return VerbsSettings(
        devices=fabric.verbs_devices,
        gid_index=fabric.verbs_gid_index if fabric.verbs_gid_index >= 0 else None,
        mtu_bytes=int(fabric.verbs_mtu) if fabric.verbs_mtu != "auto" else None,
    )


def _shm(config: Config) -> ShmFabricServer:
    """In a folder that shards may share, the socket has the shard's name."""
    folder = config.fabric.shm_dir
    most = SHM_MAPPED_BYTES_PER_SESSION_MAX
    budget = MappedBudget(config.fabric.shm_mapped_bytes_max)
    if folder is None:
        return ShmFabricServer(config.listen.unix_dir, mapped_bytes_max=most, budget=budget)
    name = f"{config.shard.name}.sock"
    return ShmFabricServer(folder, name=name, mapped_bytes_max=most, budget=budget)


async def open_fabrics(
    config: Config,
    tls: ssl_module.SSLContext,
    certificate_sha256: Callable[[], bytes],
    *,
    data_socket: socket.socket | None = None,
) -> list[FabricServer]:
    """Start every enabled fabric. Raises: FabricError; none is open then.

    `data_socket` listens already, at the tcp fabric's address, which then owns it.
    """
    made: dict[str, Callable[[], FabricServer]] = {
        "shm": lambda: _shm(config),
        "verbs": lambda: VerbsFabricServer(
            verbs_settings(config),
            private=config.fabric.verbs_private,
            windows=None if config.fabric.verbs_windows == "auto" else False,
        ),
        "tcp": lambda: TcpFabricServer(
            config.listen.data_host,
            config.listen.data_port,
            streams=config.fabric.streams,
            ssl=tls if config.fabric.tcp_tls else None,
            certificate_sha256=certificate_sha256,
            advertise_host=config.listen.data_advertise or None,
            listening=data_socket,
        ),
    }
    servers: list[FabricServer] = []
    try:
        for name in config.fabric.enabled:
            server = made[name]()
            try:
                await server.start()
            except FabricError as error:
                await server.close()
                if name != "verbs" or config.fabric.verbs_required:
                    raise
                log.info("event=fabric_off fabric=verbs reason=%s", error)
                continue
            servers.append(server)
        if not servers:
            raise FabricError(
                "no data path could be opened", hint="add tcp to [fabric] enabled, or see the log"
            )
    except BaseException:
        for server in servers:
            await server.close()
        raise
    return servers
