"""A real vLLM engine as a process of its own: commands in on stdin, answers out, a JSON per line.

    python -m tests.engines.vllm.serve '{"model": ..., "kv_transfer_config": ..., "answers_fd": 3}'

Commands: `generate` (prompts as token ids), `idle` (wait for stores), `reset` (forget what vLLM
itself cached), `counts` (the tier's), `metrics` (vLLM's), `before_load` (see there), `stop`.
Answers go to a descriptor of their own, because vLLM writes to the other two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any


def generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities, hits, and seconds of each prompt.

    In turn, or `together`: all in one batch, whose time each of them then has.
    """
    from vllm import SamplingParams

    prompts, samplings = [], []
    for one in command["prompts"]:
        extra = {"kv_transfer_params": one["params"]} if one.get("params") else None
        samplings.append(SamplingParams(
            temperature=0, max_tokens=one.get("max_tokens", 8), logprobs=0,
            ignore_eos=True, extra_args=extra,
        ))  # fmt: skip
        prompts.append({"prompt_token_ids": one["tokens"]})
        if one.get("cache_salt"):
            prompts[-1]["cache_salt"] = one["cache_salt"]
    rows = []
    step = len(prompts) if command.get("together") else 1
    for at in range(0, len(prompts), step):
        begun_s = time.perf_counter()
        part = slice(at, at + step)
        found = llm.generate(prompts[part], samplings[part], use_tqdm=False)
        took_s = time.perf_counter() - begun_s
        rows += [as_row(done, took_s) for done in found]
    return {"rows": rows}


def as_row(done: Any, took_s: float) -> dict[str, Any]:
    """One finished request."""
    output = done.outputs[0]
    tokens = list(output.token_ids)
    chances = zip(tokens, output.logprobs or [], strict=True)
    return {
        "tokens": tokens,
        "logprobs": [of_token[token].logprob for token, of_token in chances],
        "cached_tokens": done.num_cached_tokens,
        "seconds": took_s,
    }


def tier_of(llm: Any) -> Any:
    """The tier under test, inside the engine of this process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (tier,) = scheduler.connector.connector_scheduler.manager.secondary_tiers
    return tier


def idle(llm: Any, seconds_max: float) -> bool:
    """Step the engine until its tier has nothing under way (stores go on after an answer)."""
    until_s = time.monotonic() + seconds_max
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        if time.monotonic() > until_s:
            return False
        llm.llm_engine.step()
        time.sleep(0.001)
    return True


def before_load(llm: Any, command: dict[str, Any]) -> None:
    """Have something happen once, between vLLM's decision to load and the load.

    `freeze`, `kill`: the daemon of that pid. `freeze_kill`: freeze it, and kill it `after_s`
    seconds into the load. `forget`: the `number`th block of the load is dropped from the store.
    """
    tier = tier_of(llm)
    real = tier.submit_load

    def submit_load(job: Any) -> None:
        tier.submit_load = real
        what, pid = command["what"], command.get("pid", 0)
        if what == "forget":
            forget(tier, bytes(list(job.keys)[command["number"]]))
        elif what == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
        real(job)
        if what == "freeze_kill":
            timer = threading.Timer(command["after_s"], os.kill, (pid, signal.SIGKILL))
            timer.start()

    tier.submit_load = submit_load


def forget(tier: Any, key: bytes) -> None:
    """Drop one block from the store, with a client of its own."""
    from entresol_client import Client, ClientConfig

    with Client(ClientConfig.load(tier._settings.config)) as client:
        assert client.namespace(tier.descriptor).forget([key]).count == 1


def metrics(llm: Any) -> dict[str, float]:
    """What vLLM's Prometheus registry says of the offloading."""
    return {
        one.name: one.value
        for one in llm.get_metrics()
        if one.name.startswith("vllm:kv_offload") and hasattr(one, "value")
    }


def answer(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command."""
    what = command["do"]
    if what == "generate":
        return generate(llm, command)
    if what == "idle":
        return {"idle": idle(llm, command.get("seconds_max", 30.0))}
    if what == "reset":
        return {"reset": llm.reset_prefix_cache(reset_connector=True)}
    if what == "counts":
        return {"counts": dict(tier_of(llm).counts())}
    if what == "name":
        return {"name": repr(tier_of(llm).descriptor)}
    if what == "metrics":
        return {"metrics": metrics(llm)}
    if what == "before_load":
        before_load(llm, command)
        return {"ready": True}
    raise ValueError(what)


def main() -> None:
    """Serve until `stop` or the end of stdin."""
    options = json.loads(sys.argv[1])
    out = os.fdopen(options.pop("answers_fd"), "w", buffering=1)

    def say(row: dict[str, Any]) -> None:
        out.write(json.dumps(row) + "\n")

    from vllm import LLM

    begun_s = time.perf_counter()
    try:
        llm = LLM(enforce_eager=True, disable_log_stats=False, **options)
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


if __name__ == "__main__":
    main()
