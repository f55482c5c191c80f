"""How long an engine took to compute prompts, seen from a tier that is only asked and told. Pure.

A tier sees when a request's lookups were answered or its loads ended, which is when the engine may
begin, and when blocks that it computed are handed over to be stored. Blocks behind those that were
looked up are not of the prompt: they were generated, one token at a time, and say nothing here.

Invariant: a span is reported once, and only between two moments of the same request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REQUESTS_REMEMBERED_MAX = 4_096


@dataclass(slots=True)
class _Prompt:
    end_token: int = 0  # of what was looked up
    since_s: float = 0.0  # when the engine could go on
    done_token: int = 0  # computed before that


@dataclass(frozen=True, slots=True)
class Prefill:
    """So many tokens behind so many took so long, waiting included."""

    context_tokens: int
    tokens: int
    seconds: float


class Prefills:
    """All requests of an engine. Used from one thread."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def ready(self, request_id: str, end_token: int, now_s: float) -> None:
        """A lookup of a block that ends there was answered, or a load has ended (then 0)."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            if not end_token or len(self._prompts) >= REQUESTS_REMEMBERED_MAX:
                return
            prompt = self._prompts[request_id] = _Prompt()
        prompt.end_token = max(prompt.end_token, end_token)
        if not prompt.done_token:
            prompt.since_s = now_s

    def stored(
        self, request_id: str, ends: Sequence[int], block_tokens: int, now_s: float
    ) -> Prefill | None:
        """Blocks with these last tokens are there to be stored; the prefill that made them."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return None
        mine = [end for end in ends if prompt.done_token < end <= prompt.end_token]
        if not mine:
            return None
        begin = prompt.done_token or min(mine) - block_tokens
        last, since_s = max(mine), prompt.since_s
        prompt.done_token, prompt.since_s = last, now_s
        if begin < 0 or last <= begin or now_s <= since_s:
            return None
        return Prefill(begin, last - begin, now_s - since_s)

    def finished(self, request_id: str) -> None:
        """The request is over."""
        self._prompts.pop(request_id, None)
