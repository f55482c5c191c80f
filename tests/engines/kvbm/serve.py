"""A real vLLM engine with real KVBM in it, as a process: commands in, answers out, JSON lines.

    python -m tests.engines.kvbm.serve '{"model": ..., "kv_transfer_config": {...}, ...}'

Commands: `generate`, `idle`, `reset` (what the engine itself cached; `kvbm`: KVBM's caches too),
`counts` (both sides of the connector), `abort`, `blocks` (held by requests), `connected`,
`kill_at_load` (kill a process when the next load begins), `stop`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from tests.engines.kvbm import on_cpu
from tests.engines.vllm.serve import generate


def idle(core: Any, llm: Any, seconds_max: float) -> bool:
    """Step the engine until no request holds blocks: KVBM frees them when its copies are done."""
    until_s = time.monotonic() + seconds_max
    while core.scheduler.requests:
        if time.monotonic() > until_s:
            return False
        llm.llm_engine.step()
        time.sleep(0.005)
    return True


def abort(core: Any, llm: Any, tokens: list[int], when: str) -> bool:
    """Abort a request "loading" or "loaded", before its first step; True if it got that far."""
    from vllm import SamplingParams

    scheduler = core.scheduler
    llm.llm_engine.add_request(
        "aborted", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=4)
    )
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        llm.llm_engine.step()
        waiting = [one for one in scheduler.requests.values() if "REMOTE_KVS" in one.status.name]
        if when == "loading" and waiting:
            break
        if when == "loaded" and any(
            one.request_id in scheduler.finished_recving_kv_req_ids for one in waiting
        ):
            break
    else:
        return False
    llm.llm_engine.abort_request(["aborted"])
    return True


def kill_at_load(loader: Any, pid: int) -> bool:
    """Have the daemon die after vLLM was promised blocks and before they are there."""
    start = loader.start

    def kill_and_start(op: Any) -> None:
        os.kill(pid, signal.SIGKILL)
        loader.start = start
        start(op)

    loader.start = kill_and_start
    return True


def answer(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    core = llm.llm_engine.engine_core.engine_core
    what = command["do"]
    if what == "generate":
        return generate(llm, command)
    if what == "idle":
        return {"idle": idle(core, llm, command.get("seconds_max", 30.0))}
    if what == "abort":
        return {"aborted": abort(core, llm, command["tokens"], command["when"])}
    if what == "blocks":
        pool = core.scheduler.kv_cache_manager.block_pool
        return {"held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()}
    if what == "reset":
        return {"reset": llm.reset_prefix_cache(reset_connector=command["kvbm"])}
    sides = (core.scheduler.connector, get_kv_transfer_group())
    if what == "counts":
        return {"counts": {side.role.name.lower(): side.stats() for side in sides}}
    if what == "connected":
        return {"connected": all(side._tenants.connected() for side in sides)}
    if what == "kill_at_load":
        return {"armed": kill_at_load(sides[1]._worker_side._loader, command["pid"])}
    raise ValueError(what)


def main() -> None:
    """Serve until `stop` or the end of stdin."""
    options = json.loads(sys.argv[1])
    out = os.fdopen(options.pop("answers_fd"), "w", buffering=1)

    def say(row: dict[str, Any]) -> None:
        out.write(json.dumps(row) + "\n")

    from vllm import LLM

    on_cpu.install()
    begun_s = time.perf_counter()
    try:
        llm = LLM(enforce_eager=True, dtype="bfloat16", disable_log_stats=False, **options)
    except Exception as error:
        say({"refused": f"{type(error).__name__}: {error}"})
        raise
    say({"up": True, "seconds": time.perf_counter() - begun_s})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            break
        say(answer(llm, command))
    llm.llm_engine.engine_core.shutdown()
    say({"stopped": True})
    out.flush()
    os._exit(0)  # KVBM's runtime threads do not end by themselves


if __name__ == "__main__":
    main()
