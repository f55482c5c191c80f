"""vLLM's offloading connector, which also tells the Entresol tier the token ids of requests.

Only who feeds KV-aware routers from Entresol's own events needs it instead of vLLM's
`OffloadingConnector`: routers ignore stored blocks without token ids, and vLLM's tier interface has
none. It moves no data and overrides no decision.

Invariant: behaves exactly as vLLM's connector; a request is noted, never held.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from entresol_client.engines.vllm_tokens import live_requests


class EntresolConnector(OffloadingConnector):  # type: ignore[misc]
    """`"kv_connector": "EntresolConnector"`; every other setting as of OffloadingConnector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """The scheduler has taken a request: its blocks can be described from now on."""
        live_requests.add(request.request_id, request)
        super().on_new_request(request)
