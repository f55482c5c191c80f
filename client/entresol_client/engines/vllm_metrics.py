"""What vLLM's Prometheus endpoint shows of the tier; client/VLLM.md has the same table.

Invariant: every name here is a counter of the neutral core or of the tier; imports nothing.
"""

from __future__ import annotations

METRIC = "vllm:kv_offload_entresol_"
COUNTERS = {
    "lookup_blocks": "Chunks the tier was asked for.",
    "lookup_hit_blocks": "Chunks of these that Entresol had.",
    "lookup_unanswered": "Lookups that the daemon did not answer in time; they read as misses.",
    "load_blocks": "Chunks loaded and verified.",
    "load_bytes": "Bytes loaded and verified.",
    "load_failed_blocks": "Chunks that were to be loaded and were not; vLLM recomputes them.",
    "load_corrupt_blocks": "Chunks of these whose bytes did not verify.",
    "stored_blocks": "Chunks stored.",
    "stored_bytes": "Bytes stored.",
    "existed_blocks": "Chunks that were there already; no bytes moved.",
    "store_failed_blocks": "Chunks that were to be stored and were not.",
    "shed_blocks": "Chunks not stored because too many waited.",
    "quotes": "Quotes of how long a load would take (recompute_or_fetch = auto).",
    "quotes_missing": "Lookups of a prompt that got no quote; what was there was loaded.",
    "recompute_blocks": "Chunks that Entresol had and vLLM computes, because that is quicker.",
    "refused_requests": "Requests that name an unknown tenant, have parameters that make no sense, "
    "or images with names of their own.",
}
GAUGES = {
    "backlog_bytes": "Bytes of stores waiting or under way.",
    "connected": "Shards connected now, of all tenants together.",
}
