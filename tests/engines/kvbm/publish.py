"""Real KVBM without vLLM, as a process: which hashes does it publish for given tokens?

    python -m tests.engines.kvbm.publish '{"requests": [{"tokens": [...], "salt": "s"}, ...]}'

Prints one JSON line: the block hashes of the events KVBM's consolidator sends for each request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

BLOCK_TOKENS, BLOCKS, LAYERS = 16, 64, 2
QUIET_SECONDS, EVENTS_SECONDS_MAX = 1.0, 20.0


def start(core: Any, inbound: str, outbound: str) -> tuple[Any, Any, list[tuple[str, Any]], Any]:
    """KVBM's leader and worker over caches in ordinary memory, and events the worker points at."""
    import torch
    from kvbm import KvbmLeader

    from tests.engines.kvbm.on_cpu import Event, OnDevice

    shape = (2, BLOCKS, BLOCK_TOKENS, 2, 64)
    caches: list[tuple[str, Any]] = [
        (f"layers.{layer}", OnDevice(torch.zeros(shape, dtype=torch.float16)))
        for layer in range(LAYERS)
    ]
    events = [Event() for _ in caches]
    worker = core.PyKvConnectorWorker(None, "worker")
    handles = [event.cuda_event for event in events]
    worker.register_kv_caches(
        BLOCKS, BLOCK_TOKENS, 0, 2, caches, handles, outer_dim=None, inner_dim=None
    )
    leader = core.PyKvConnectorLeader(
        "engine", None, BLOCK_TOKENS, KvbmLeader(1),
        consolidator_vllm_endpoint=inbound, consolidator_output_endpoint=outbound,
        consolidator_mode="passthrough",
    )  # fmt: skip
    return leader, worker, caches, events


def offload(core: Any, leader: Any, worker: Any, caches: Any, name: str, one: Any) -> None:
    """One request computed in one step, as vLLM would tell of it."""
    tokens, first = one["tokens"], one["first_block"]
    device = list(range(first, first + len(tokens) // BLOCK_TOKENS + 1))
    leader.create_slot(core.KvbmRequest(name, one.get("lora_name"), one.get("salt")), tokens)
    assert leader.get_num_new_matched_tokens(name, len(tokens), 0) == (0, False)
    leader.update_state_after_alloc(name, device, 0)
    step = core.SchedulerOutput()
    step.add_new_request(name, tokens, device, 0)
    step.add_num_scheduled_tokens({name: len(tokens)})
    worker.bind_connector_metadata(bytes(leader.build_connector_metadata(step)))
    for layer, tensor in caches:
        worker.save_kv_layer(layer, tensor)
    worker.clear_connector_metadata()


def hashes(subscriber: Any, count: int) -> list[int]:
    """Hashes of stored blocks, in the order of their events, until it has been quiet."""
    import msgpack

    found: list[int] = []
    until_s = time.monotonic() + EVENTS_SECONDS_MAX
    while time.monotonic() < until_s and len(found) < count:
        if subscriber.poll(100):
            _, _, raw = subscriber.recv_multipart()
            for event in msgpack.unpackb(raw, raw=False, strict_map_key=False)[1]:
                if event["type"] == "BlockStored":
                    found += [int(one) for one in event["block_hashes"]]
    return found


def main() -> None:
    """Publish what the command line asks for."""
    import kvbm  # noqa: F401 (loads NIXL before its core)
    import zmq
    from kvbm._core import _vllm_integration as core

    context = zmq.Context.instance()
    publisher = context.socket(zmq.PUB)
    inbound = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
    spare = context.socket(zmq.PUB)
    outbound = f"tcp://127.0.0.1:{spare.bind_to_random_port('tcp://127.0.0.1')}"
    spare.close(0)
    leader, worker, caches, _events = start(core, inbound, outbound)
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(outbound)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    time.sleep(QUIET_SECONDS)
    rows = []
    first = 0
    for number, one in enumerate(json.loads(sys.argv[1])["requests"]):
        offload(core, leader, worker, caches, f"r{number}", {**one, "first_block": first})
        blocks = len(one["tokens"]) // BLOCK_TOKENS
        first += blocks + 1
        rows.append(hashes(subscriber, blocks))
    print(json.dumps({"hashes": rows}), flush=True)
    os._exit(0)  # KVBM's runtime threads do not end by themselves


if __name__ == "__main__":
    main()
