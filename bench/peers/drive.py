"""Runs in a peer's interpreter: its client, told what to do by lines; or its server.

    python -m bench.peers.drive NAME client|serve      the work, as JSON, is in BENCH_WORK

A line is `put N R`, `get N R` (generation N, R times over), `forget N` or `quit`; the answer is a
line of JSON with the seconds it took or the error. Libraries print where they like: standard output
is theirs and goes to the log, the answers leave by a descriptor of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import TextIO

from bench.peers.base import Client, Peer, Work

WORK_ENV = "BENCH_WORK"
ERROR_CHARS_MAX = 400


def load(name: str) -> Peer:
    """The peer of that name."""
    peer = importlib.import_module(f"bench.peers.{name}").PEER
    assert isinstance(peer, Peer), name
    return peer


def _do(client: Client, words: list[str]) -> float:
    """Seconds of one command."""
    action = getattr(client, words[0])
    generation = int(words[1])
    times = int(words[2]) if len(words) > 2 else 1
    began = time.perf_counter()
    for _ in range(times):
        action(generation)
    return time.perf_counter() - began


def _answer(out: TextIO, **fields: object) -> None:
    out.write(json.dumps(fields) + "\n")
    out.flush()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:ERROR_CHARS_MAX]


def main() -> int:
    name, role = sys.argv[1:]
    work = Work(**json.loads(os.environ[WORK_ENV]))
    if role == "serve":
        load(name).serve(work)
        return 0
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        client = load(name).client(work)
    except Exception as error:
        _answer(out, error=_told(error))
        return 1
    _answer(out, seconds=0.0)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            break
        try:
            seconds = _do(client, words)
        except Exception as error:
            _answer(out, error=_told(error))
        else:
            _answer(out, seconds=seconds)
    client.close()
    out.flush()
    os._exit(0)  # threads of libraries do not always end


if __name__ == "__main__":
    sys.exit(main())
