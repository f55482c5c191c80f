"""The host side of Entresol: read and write KV blocks, and never block an engine.

`AsyncClient` for asyncio, `Client` for everybody else; README.md beside this package has a page on
how to use them. Names are imported when first used, so that `entresol --help` does not wait for
numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        QuoteResult,
        ShardReport,
        StageResult,
    )
    from entresol_client.sync import Client, SyncNamespace

__all__ = [
    "AsyncClient", "BreakerSettings", "Client", "ClientConfig", "CountResult", "ExistsResult",
    "Explanation", "GetResult", "Namespace", "PutBlock", "PutResult", "QuoteResult",
    "ShardAddress", "ShardReport", "StageResult", "SyncNamespace", "TlsFiles", "UsageError",
    "as_view",
]  # fmt: skip

_HOMES = {
    "buffers": ("UsageError", "as_view"),
    "client": ("AsyncClient", "Namespace"),
    "config": ("BreakerSettings", "ClientConfig", "ShardAddress", "TlsFiles"),
    "results": (
        "CountResult", "ExistsResult", "Explanation", "GetResult", "PutBlock", "PutResult",
        "QuoteResult", "ShardReport", "StageResult",
    ),
    "sync": ("Client", "SyncNamespace"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what is asked for (PEP 562)."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found
