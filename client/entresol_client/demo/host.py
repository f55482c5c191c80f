"""One host of the demo, as a process: `python -m entresol_client.demo.host ROLE ...`.

Roles: `write` (host A), `read` (host B), `repair` (host B after the bit flip), `other` (another
tenant). Invariant: standard output carries JSON lines only: `{"progress", "done", "total"}`, one or
more `{"result": role, ...}`, or `{"error", "hint"}`; exit status 0 only after the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from entresol_client.demo.hosts import (
    CALL_NS,
    Engine,
    Facts,
    Fetched,
    Task,
    digest_of,
    fetch,
    put_items,
    wrong_bytes_in,
)
from entresol_client.sync import Client
from entresol_proto.status import EntresolError, Status

PROGRESS_SECONDS = 0.1


def say(**fields: Any) -> None:
    """One message to the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class _Telling:
    """A progress callback that speaks a few times a second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= PROGRESS_SECONDS or done == total:
            self._said_s = now_s
            say(progress=self._what, done=done, total=total)


def _ready(task: Task, *, engine: bool = True) -> tuple[Engine | None, Client, float]:
    """The model, then a session and what it took to get it, in ms."""
    made = Engine(task) if engine else None
    began_s = time.perf_counter()
    client = task.client()
    return made, client, (time.perf_counter() - began_s) * 1e3


def write(task: Task) -> None:
    """Host A: prefill the prompt, put its blocks durable, decode."""
    engine, client, connect_ms = _ready(task)
    assert engine is not None
    with client:
        ns = client.namespace(engine.descriptor)
        cache = engine.new_cache()
        logits, prefill_ms = engine.first_token(cache, _Telling("prefill"))
        keys, blocks = engine.keys(), cache.blocks()[: engine.context_blocks]
        answer = engine.answer(cache, logits)
        facts = Facts(
            engine.descriptor, keys, [digest_of(block) for block in blocks], cache.block_bytes
        )
        facts.write(task.facts)
        began_s = time.perf_counter()
        result = ns.put(put_items(engine, keys, blocks), ack="durable", deadline_ns=CALL_NS)
        put_ms = (time.perf_counter() - began_s) * 1e3
        shard = client.shards()[0]
        say(
            result="write",
            **answer,
            blocks=len(blocks),
            block_bytes=cache.block_bytes,
            prompt_tokens=len(engine.prompt),
            durable=result.stored,
            refused=[s.label for s in result.statuses if s is not Status.OK],
            put_ms=put_ms,
            prefill_ms=prefill_ms,
            load_ms=engine.load_ms,
            connect_ms=connect_ms,
            fabric=shard.fabric,
        )


def read(task: Task) -> None:
    """Host B: fetch twice (from flash, then from the daemon's memory), recompute, compare."""
    engine, client, connect_ms = _ready(task)
    assert engine is not None
    facts = Facts.read(task.facts)
    with client:
        ns = client.namespace(engine.descriptor)
        fetches = []
        for what in ("first fetch", "second fetch"):
            say(progress=what, done=0, total=0)
            fetched = fetch(engine, ns, facts)
            answer = engine.answer(fetched.cache, fetched.logits)
            fetches.append({**fetched.as_dict(), **answer})
            del fetched  # its cache, before the next is made
        cache = engine.new_cache()
        logits, recompute_ms = engine.first_token(cache, _Telling("recompute"))
        say(
            result="read",
            fetches=fetches,
            recompute={"ttft_ms": recompute_ms, **engine.answer(cache, logits)},
            load_ms=engine.load_ms,
            connect_ms=connect_ms,
            fabric=client.shards()[0].fabric,
        )


def repair(task: Task) -> None:
    """Host B after the flip: use the prefix up to the damage, recompute the rest, put it again."""
    engine, client, _ = _ready(task)
    assert engine is not None
    facts = Facts.read(task.facts)
    with client:
        ns = client.namespace(engine.descriptor)
        fetched: Fetched = fetch(engine, ns, facts, _Telling("recompute from the gap"))
        answer = engine.answer(fetched.cache, fetched.logits)
        blocks = fetched.cache.blocks()[: engine.context_blocks]
        after = ns.exists(facts.keys, deadline_ns=CALL_NS)
        missing = after.present.count(False)
        put = ns.put(put_items(engine, facts.keys, blocks), ack="durable", deadline_ns=CALL_NS)
        again = ns.exists(facts.keys, deadline_ns=CALL_NS)
        say(
            result="repair",
            **fetched.as_dict(),
            **answer,
            missing_after=missing,
            stored_again=put.stored,
            prefix_after_put=again.prefix_blocks,
        )


def other(task: Task) -> None:
    """Another tenant that knows descriptor and keys: what does it find?"""
    _, client, _ = _ready(task, engine=False)
    facts = Facts.read(task.facts)
    with client:
        ns = client.namespace(facts.descriptor)
        found = ns.exists(facts.keys, deadline_ns=CALL_NS)
        buffers = np.zeros((len(facts.keys), facts.block_bytes // 2), np.uint16)
        result = ns.get_into(facts.keys, list(buffers), prefix=False, deadline_ns=CALL_NS)
        got = [status is Status.OK for status in result.statuses]
        statuses = sorted({status.label for status in result.statuses})
        wrong = wrong_bytes_in(list(buffers), [Status.MISS] * len(got), facts.digests)
        say(
            result="other",
            tenant=client.shards()[0].tenant,
            asked=len(facts.keys),
            complete=found.complete,
            hits=sum(a or b for a, b in zip(found.present, got, strict=True)),
            statuses=statuses,
            wrong_bytes=wrong,
        )


_ROLES = {"write": write, "read": read, "repair": repair, "other": other}


def main(argv: list[str] | None = None) -> int:
    """Play a role; returns the exit status."""
    parser = argparse.ArgumentParser(prog="entresol_client.demo.host")
    parser.add_argument("role", choices=sorted(_ROLES))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--fabric", required=True)
    parser.add_argument("--context-tokens", type=int, required=True)
    parser.add_argument("--decode-tokens", type=int, required=True)
    parser.add_argument("--block-tokens", type=int, required=True)
    fields = vars(parser.parse_args(argv))
    role = _ROLES[fields.pop("role")]
    try:
        role(Task(**fields))
    except EntresolError as error:
        say(error=Exception.__str__(error), hint=error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
