"""The host side of Entresol: read and write KV blocks, and never block an engine.

`AsyncClient` for asyncio, `Client` for everybody else; README.md beside this package has a page on
how to use them.
"""

from entresol_client.buffers import UsageError, as_view
from entresol_client.client import AsyncClient, Namespace
from entresol_client.config import BreakerSettings, ClientConfig, ShardAddress, TlsFiles
from entresol_client.results import (
    CountResult,
    ExistsResult,
    Explanation,
    GetResult,
    PutBlock,
    PutResult,
    ShardReport,
    StageResult,
)
from entresol_client.sync import Client, SyncNamespace

__all__ = [
    "AsyncClient", "BreakerSettings", "Client", "ClientConfig", "CountResult", "ExistsResult",
    "Explanation", "GetResult", "Namespace", "PutBlock", "PutResult", "ShardAddress",
    "ShardReport", "StageResult", "SyncNamespace", "TlsFiles", "UsageError", "as_view",
]  # fmt: skip
