"""Which blocks of a lookup an engine is told of, so that it fetches what it would compute later.

An engine fetches what a lookup finds. With `recompute_or_fetch = auto`, a lookup also asks for
quotes, and blocks that take longer to fetch than to compute are answered as absent: none of them,
all of them, or those behind the first so many.

Invariants: a quote never delays a lookup, which is answered within its deadline as without; without
a quote, or while too little is known of the engine, every block that is there is told, as ever;
what other threads tell waits for the loop, which waits for none of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from entresol_client.crossover import Choice, Crossover, Offer
from entresol_client.engines.settings import EngineSettings
from entresol_client.namespace import QUOTE_KEYS_MAX, Namespace
from entresol_client.results import QuoteResult

log = logging.getLogger("entresol.engine")

QUOTES_PER_LOOKUP_MAX = 16  # runs beyond these are told whole
QUOTES_REMEMBERED_MAX = 256  # until their load ends
PREFILLS_WAITING_MAX = 256  # until a choice takes notice; of more the latest
DEADLINE_PART = 2  # of the lookup's, for its quotes


@dataclass(frozen=True, slots=True)
class Run:
    """The keys of one prompt in a lookup, in prefix order: their places among the lookup's keys,
    how many tokens they stand for, and how many are before them, in place already."""

    positions: Sequence[int]
    tokens: int
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Quoted:
    run: Run
    task: asyncio.Task[QuoteResult] | None  # None: not asked


class Chooser:
    """Of one namespace. On the loop, but for `prefilled` and `state`."""

    def __init__(
        self, namespace: Namespace, settings: EngineSettings, count: Callable[..., None]
    ) -> None:
        self._ns = namespace
        self._settings = settings
        self._count = count
        self._told: deque[tuple[int, int, float, float]] = deque(maxlen=PREFILLS_WAITING_MAX)
        self._learner = Crossover(prefill_tokens_per_s=settings.prefill_tokens_per_s)
        self._quotes: OrderedDict[bytes, QuoteResult] = OrderedDict()  # by a run's first key

    @property
    def learns(self) -> bool:
        """Whether prefill times are of any use."""
        return self._settings.recompute_or_fetch == "auto"

    def ask(self, keys: Sequence[bytes], runs: Sequence[Run], until_ns: int) -> list[_Quoted]:
        """Begin to ask for quotes; `narrow` ends what was begun. On the loop."""
        if not self.learns:
            return []
        found: list[_Quoted] = []
        for number, run in enumerate(runs):
            task = None
            if number < QUOTES_PER_LOOKUP_MAX and run.positions and run.tokens > 0:
                wanted = [keys[at] for at in run.positions[:QUOTE_KEYS_MAX]]
                left_ns = max(1, until_ns - time.monotonic_ns())
                work = self._ns.quote(wanted, deadline_ns=left_ns, open_at=self._settings.open_at)
                task = asyncio.get_running_loop().create_task(work)
            found.append(_Quoted(run, task))
        return found

    async def drop(self, asked: Sequence[_Quoted]) -> None:
        """End what `ask` has begun."""
        tasks = [one.task for one in asked if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def narrow(
        self, keys: Sequence[bytes], present: list[bool], asked: list[_Quoted], until_ns: int
    ) -> list[bool]:
        """`present` without what is better computed. Returns by `until_ns`."""
        waiting = [one.task for one in asked if one.task is not None]
        if not waiting:
            return present
        left_s = max(0.0, (until_ns - time.monotonic_ns()) / 1e9)
        await asyncio.wait(waiting, timeout=left_s)
        wanted: set[int] = set()
        better_computed: set[int] = set()
        for one in asked:
            places = one.run.positions
            fetch = self._decide(keys, one)
            wanted.update(places[:fetch])
            better_computed.update(places[fetch:])
        left_out = [at for at in better_computed - wanted if present[at]]
        for at in left_out:
            present[at] = False
        self._count(recompute_blocks=len(left_out))
        return present

    def _decide(self, keys: Sequence[bytes], one: _Quoted) -> int:
        """How many leading blocks of a run to tell of."""
        everything = len(one.run.positions)
        task = one.task
        quote = None
        if task is not None and task.done() and not task.cancelled() and not task.exception():
            quote = task.result()
        if quote is None or not quote.complete:
            self._count(quotes_missing=1)
            return everything
        blocks = quote.prefix_blocks
        self._count(quotes=1)
        if not blocks:
            return everything
        choice = self._choose(one.run, quote, blocks)
        if choice.fetch_blocks:
            self._quotes[keys[one.run.positions[0]]] = quote
            while len(self._quotes) > QUOTES_REMEMBERED_MAX:
                self._quotes.popitem(last=False)
        log.debug(
            "event=crossover blocks=%d fetch=%d explored=%s", blocks, choice.fetch_blocks,
            choice.explored,
        )  # fmt: skip
        return everything if choice.fetch_blocks >= blocks else choice.fetch_blocks

    def _choose(self, run: Run, quote: QuoteResult, blocks: int) -> Choice:
        def fetch(count: int) -> tuple[float, int]:
            quoted_ns, length_bytes = quote.first(count)
            return quoted_ns / 1e9, length_bytes

        tokens = run.tokens * blocks // len(run.positions)
        offer = Offer(
            blocks, tokens, fetch, run.context_tokens, tail_tokens=run.tokens - tokens
        )  # fmt: skip
        self._learn()
        choice = self._learner.choose(offer, time.monotonic())
        self._count(explorations=int(choice.explored))
        return choice

    def prefilled(self, context_tokens: int, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens behind so many, and it took so long. From any thread,
        and from a signal handler that interrupts this."""
        if self.learns and tokens > 0 and seconds > 0:
            self._told.append((context_tokens, tokens, seconds, time.monotonic()))

    def _learn(self) -> None:
        while self._told:
            self._learner.prefilled(*self._told.popleft())

    def fetched(self, keys: Sequence[bytes], loaded: int, seconds: float) -> None:
        """A load has ended, with its first so many blocks in place."""
        if not self.learns or not keys:
            return
        quote = self._quotes.pop(keys[0], None)
        if quote is None or loaded < len(keys):
            return
        quoted_ns, length_bytes = quote.first(loaded)
        if quoted_ns:
            self._learner.fetched(quoted_ns / 1e9, length_bytes, seconds, time.monotonic())

    def state(self) -> dict[str, Any]:
        """For people, from any thread: how much was learned."""
        return {
            "prefills_seen": self._learner.prefills_seen + len(self._told),
            "fetches_seen": self._learner.fetches_seen,
        }
