"""What the vLLM tier knows of each request: whose it is, and what was asked and answered for it.

Pure: imports no vLLM, takes the time as an argument.

Invariants:
- a request uses the blocks of exactly one tenant, or none at all;
- a lookup is answered: by the daemon, or as absent once its deadline passed;
- a block that failed to load is absent for that request from then on, so that vLLM, which asks
  again after a failed load, does not load it for ever.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from entresol_client.engines.naming import new_epoch, of_epoch, salted

S = TypeVar("S")  # a space: whatever lookups are asked of


class Found(enum.Enum):
    """What is known of a block for a request."""

    ABSENT = enum.auto()
    PRESENT = enum.auto()
    ASKED = enum.auto()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The keys of one request among those of a question: their places, in prefix order."""

    positions: tuple[int, ...]
    first_end: int  # see `Request`


class Ask:
    """One lookup under way for several keys of a space."""

    __slots__ = ("_answers", "_future", "_looked_step", "keys", "until_s")

    def __init__(self, keys: Sequence[bytes], future: Future[list[bool]], until_s: float) -> None:
        self.keys = keys
        self.until_s = until_s
        self._future = future
        self._answers: dict[bytes, bool] | None = None
        self._looked_step = -1

    def answer(self, key: bytes, now_s: float, step: int) -> tuple[bool | None, bool]:
        """(present or None while it is under way, whether the deadline decided).

        An answer that comes while vLLM goes through a prompt's keys counts from the next step on:
        otherwise the rest of the keys would be loaded first, and the first ones by a second load.
        """
        if self._answers is None:
            if self._looked_step == step:
                return None, False
            self._looked_step = step
            if self._future.done():
                self._answers = dict(zip(self.keys, self._future.result(), strict=True))
            elif now_s < self.until_s:
                return None, False
            else:
                self._answers = dict.fromkeys(self.keys, False)
                return False, True
        return self._answers[key], False


class Request(Generic[S]):
    """One request of the engine. `space` is None when the tier is not used for it."""

    __slots__ = ("_mark", "asked", "first_end", "known", "space")

    def __init__(self, space: S | None, salt: str = "") -> None:
        self.space = space
        self.known: dict[bytes, bool] = {}
        self.asked: dict[bytes, Ask | None] = {}  # None: goes out at the end of this step
        self.first_end = 0  # tokens up to the end of the first chunk asked for; 0: not known
        self._mark = salted(b"", salt)

    def block_key(self, key: bytes) -> bytes:
        """The engine key a block has in the store: vLLM's, and the salt's mark if there is one."""
        return key + self._mark

    def absent(self, keys: Iterable[bytes]) -> None:
        """These (vLLM's keys) could not be loaded."""
        for key in keys:
            block = self.block_key(key)
            self.asked.pop(block, None)
            self.known[block] = False


class Requests(Generic[S]):
    """All requests the engine has told of. Used from vLLM's scheduler thread only."""

    def __init__(self) -> None:
        self._requests: dict[str, Request[S]] = {}
        self._fresh: dict[S, dict[bytes, list[Request[S]]]] = {}  # asked in this step
        self._step = 0
        self._epoch = ""  # since the last reset; empty before the first
        self.late_lookups = 0  # lookups the deadline decided, since the start

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, space: S | None, salt: str = "") -> Request[S]:
        """A new request; one of the same name is replaced."""
        made = self._requests[request_id] = Request(space, of_epoch(salt, self._epoch))
        return made

    def get(self, request_id: str) -> Request[S] | None:
        """The request, unless it has finished."""
        return self._requests.get(request_id)

    def remove(self, request_id: str) -> None:
        """The request has finished."""
        self._requests.pop(request_id, None)

    @property
    def begun_anew(self) -> bool:
        """Whether what was computed before and what is computed now are told apart."""
        return bool(self._epoch)

    def begin_anew(self) -> None:
        """From now on no request finds or stores what others did before, and those that are under
        way use the tier no more: of their blocks some are computed before."""
        self._epoch = new_epoch()
        self._fresh.clear()
        for request in self._requests.values():
            request.known.clear()
            request.asked.clear()
            request.space = None

    def look(self, request: Request[S], key: bytes, now_s: float) -> Found:
        """What is known of vLLM's `key`; notes the question when nothing is."""
        if request.space is None:
            return Found.ABSENT
        block = request.block_key(key)
        present = request.known.get(block)
        if present is None:
            present = self._ask(request, request.space, block, now_s)
        if present is None:
            return Found.ASKED
        return Found.PRESENT if present else Found.ABSENT

    def _ask(self, request: Request[S], space: S, block: bytes, now_s: float) -> bool | None:
        if block not in request.asked:
            request.asked[block] = None
            self._fresh.setdefault(space, {}).setdefault(block, []).append(request)
        ask = request.asked[block]
        if ask is None:
            return None
        present, late = ask.answer(block, now_s, self._step)
        self.late_lookups += late
        if present is not None:
            del request.asked[block]
            request.known[block] = present
        return present

    def flush(self, ask: Callable[[S, list[bytes], list[Prompt]], Ask], keys_max: int) -> int:
        """End a step: send its questions, one per space and `keys_max` keys. Returns how many."""
        fresh, self._fresh = self._fresh, {}
        self._step += 1
        sent = 0
        for space, blocks in fresh.items():
            keys = list(blocks)
            for at in range(0, len(keys), keys_max):
                part = keys[at : at + keys_max]
                asked = ask(space, part, _prompts(part, blocks))
                sent += 1
                for block in part:
                    for request in blocks[block]:
                        if block in request.asked:
                            request.asked[block] = asked
        return sent


def _prompts(keys: Sequence[bytes], blocks: dict[bytes, list[Request[S]]]) -> list[Prompt]:
    """Whose the keys of a question are. A key of several requests is in the prompt of each."""
    found: dict[Request[S], list[int]] = {}
    for at, key in enumerate(keys):
        for request in blocks[key]:
            found.setdefault(request, []).append(at)
    return [Prompt(tuple(places), request.first_end) for request, places in found.items()]
