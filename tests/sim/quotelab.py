"""An engine that may fetch or recompute, beside a shard whose hardware has rates, on virtual time.

The shard, its sessions and the learner (`entresol_client.crossover`) are the real ones; the drive,
the link and the event loop take time as in `tests.proof.fairlab`. The engine computes prompts at a
rate of its own, which other work on its processor lowers, and reports what each prefill took. What
is around it changes from phase to phase: nobody, tenants who flood the flash, a busy processor.

Invariant: every policy meets the same requests in the same phases, drawn from the seed alone. What
is measured is the time to the first token, from the lookup to the end of the prefill, with the
quote in it. The oracle is, request by request, the better of always fetching and never fetching.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entresol_client.crossover import Crossover, Offer
from entresol_client.results import QuoteResult, quote_of
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import OpenAt
from entresol_proto.wire.quote import Quote
from tests import simloop
from tests.proof.fairlab import KIB, Guest, Place, key_of
from tests.proof.machines import BusyLoop

BLOCK_BYTES = 256 * KIB
BLOCK_TOKENS = 256
PROMPTS = 10
PROMPT_BLOCKS = (12, 36)
TAIL_TOKENS = (32, 256)
FLOODERS = ("flood-1", "flood-2", "flood-3", "flood-4")
FLOOD_BLOCKS = 48
FLOOD_AT_ONCE, FLOOD_GET_BLOCKS = 2, 4
SEGMENTS = 48
THINK_S = 0.005
COLD = 8  # prompts that nobody has, at the begin: what an engine computes anyway

# The engine: about 25 ms for 8,192 tokens, which the idle flash gives in 8 ms.
PREFILL_S, TOKEN_S, PAIR_S = 1.5e-3, 2.2e-6, 1.2e-10


@dataclass(frozen=True, slots=True)
class Phase:
    """What is around the engine for a while."""

    name: str
    flooders: int = 0  # tenants that read from flash as fast as they can
    busy: float = 0.0  # share of the processor that others have


PHASES = (
    Phase("idle"),
    Phase("flash flooded", flooders=4),
    Phase("processor busy", busy=0.8),
    Phase("idle again"),
    Phase("both", flooders=4, busy=0.6),
    Phase("flooded again", flooders=4),
)
POLICIES = ("always", "never", "auto")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of the engine: the first blocks of one that is stored, and what follows."""

    prompt: int
    blocks: int
    tail_tokens: int
    noise: float  # of its prefill


@dataclass(slots=True)
class Outcome:
    """Of one policy: seconds to the first token, request by request, and what was decided."""

    ttft_s: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    fetched: list[float] = field(default_factory=list)  # share of the blocks
    quote_errors: list[float] = field(default_factory=list)  # seconds of a fetch over the quoted

    def mean(self, phase: str) -> float:
        """Mean time to the first token in a phase."""
        pairs = zip(self.ttft_s, self.phases, strict=True)
        return statistics.fmean(each for each, name in pairs if name == phase)


def requests_of(seed: int, per_phase: int) -> list[list[Request]]:
    """Of every phase."""
    rng = random.Random(f"{seed} requests")

    def one() -> Request:
        prompt = rng.randrange(PROMPTS)
        return Request(
            prompt, rng.randint(*PROMPT_BLOCKS), rng.randint(*TAIL_TOKENS), rng.gauss(1, 0.05)
        )

    return [[one() for _ in range(per_phase)] for _ in PHASES]


class Engine:
    """One engine with one session, and a policy."""

    def __init__(self, guest: Guest, policy: str) -> None:
        self.guest = guest
        self.policy = policy
        self.learner = Crossover()
        self.outcome = Outcome()
        self.busy = 0.0
        self._loop = asyncio.get_running_loop()
        self._names = [b""] * PROMPTS

    async def store(self) -> None:
        """Put every prompt."""
        for prompt in range(PROMPTS):
            keys = [key_of(f"p{prompt}", at) for at in range(PROMPT_BLOCKS[1])]
            for at in range(0, len(keys), 12):
                statuses = await self.guest.put(keys[at : at + 12], BLOCK_BYTES)
                assert set(statuses) == {Status.OK}, statuses
            self._names[prompt] = self.guest.names(keys)

    async def prefill(self, context: int, tokens: int, noise: float) -> None:
        """Compute tokens behind others; others use the processor too."""
        pairs = tokens * (context + tokens / 2)
        alone_s = (PREFILL_S + TOKEN_S * tokens + PAIR_S * pairs) * max(0.8, noise)
        begun = self._loop.time()
        await asyncio.sleep(alone_s / (1 - self.busy))
        now = self._loop.time()
        self.learner.prefilled(context, tokens, now - begun, now)

    async def serve(self, request: Request, phase: str) -> None:
        """One request, to its first token."""
        begun = self._loop.time()
        names = self._names[request.prompt][: 16 * request.blocks]
        fetch = {"always": request.blocks, "never": 0}.get(self.policy)
        quote: QuoteResult | None = None
        if fetch is None:
            fetch, quote = await self._decide(names, request)
        if fetch:
            fetch = await self._fetch(names[: 16 * fetch], fetch, quote)
        context = fetch * BLOCK_TOKENS
        rest = (request.blocks - fetch) * BLOCK_TOKENS + request.tail_tokens
        await self.prefill(context, rest, request.noise)
        self.outcome.ttft_s.append(self._loop.time() - begun)
        self.outcome.phases.append(phase)
        self.outcome.fetched.append(fetch / request.blocks)

    async def _decide(self, names: bytes, request: Request) -> tuple[int, QuoteResult]:
        reply = await self.guest.call(Quote(self.guest.handle, OpenAt.HOST, True, names))
        quote = quote_of(reply.tier_list(), [reply], complete=True)

        def fetch(blocks: int) -> tuple[float, int]:
            quoted_ns, length_bytes = quote.first(blocks)
            return quoted_ns / 1e9, length_bytes

        tokens = quote.prefix_blocks * BLOCK_TOKENS
        offer = Offer(quote.prefix_blocks, tokens, fetch, tail_tokens=request.tail_tokens)
        choice = self.learner.choose(offer, self._loop.time())
        return choice.fetch_blocks, quote

    async def _fetch(self, names: bytes, blocks: int, quote: QuoteResult | None) -> int:
        begun = self._loop.time()
        try:
            statuses = await self.guest.get(names)
        except EntresolError:
            statuses = [Status.BUSY] * blocks
        now = self._loop.time()
        if quote is not None:
            quoted_ns, length_bytes = quote.first(blocks)
            self.learner.fetched(quoted_ns / 1e9, length_bytes, now - begun, now)
            self.outcome.quote_errors.append((now - begun) / (quoted_ns / 1e9))
        return next((at for at, s in enumerate(statuses) if s is not Status.OK), blocks)


async def _flood(guest: Guest, names: bytes, rng: random.Random, ending: asyncio.Event) -> None:
    async def one() -> None:
        while not ending.is_set():
            at = rng.randrange(FLOOD_BLOCKS - FLOOD_GET_BLOCKS) * 16
            try:
                await guest.get(names[at : at + 16 * FLOOD_GET_BLOCKS])
            except EntresolError:
                await asyncio.sleep(0.002)

    await asyncio.gather(*(one() for _ in range(FLOOD_AT_ONCE)))


async def _live(folder: Path, seed: int, policy: str, per_phase: int) -> Outcome:
    tenants = dict.fromkeys(("engine", *FLOODERS), 1)
    place = await Place.open(folder, seed, tenants, flash_segments=SEGMENTS)
    try:
        guests = {name: Guest(place, name) for name in tenants}
        for guest in guests.values():
            await guest.open()
        engine = Engine(guests["engine"], policy)
        # Who never fetches does not meet the shard, so that nobody needs to flood it.
        flooders = () if policy == "never" else FLOODERS
        if flooders:
            await engine.store()
        names = {}
        for name in flooders:
            keys = [key_of(name, at) for at in range(FLOOD_BLOCKS)]
            for at in range(0, FLOOD_BLOCKS, 12):
                await guests[name].put(keys[at : at + 12], BLOCK_BYTES)
            names[name] = guests[name].names(keys)
        rng = random.Random(f"{seed} cold")
        for _ in range(COLD):
            await engine.prefill(0, rng.randint(*PROMPT_BLOCKS) * BLOCK_TOKENS, 1.0)
        for phase, requests in zip(PHASES, requests_of(seed, per_phase), strict=True):
            ending = asyncio.Event()
            floods = [
                asyncio.create_task(
                    _flood(guests[name], names[name], random.Random(f"{seed} {name}"), ending)
                )
                for name in flooders[: phase.flooders]
            ]
            engine.busy = phase.busy
            await asyncio.sleep(0.05)
            for request in requests:
                await engine.serve(request, phase.name)
                await asyncio.sleep(THINK_S)
            ending.set()
            await asyncio.gather(*floods)
        return engine.outcome
    finally:
        await place.close()


@functools.cache
def run(seed: int, policy: str, per_phase: int) -> Outcome:
    """One policy through all phases; remembered, for it takes a while."""
    logging.disable(logging.CRITICAL)  # a flood is refused by the thousand
    try:
        with tempfile.TemporaryDirectory(prefix="ent-quote-") as folder:
            story = _live(Path(folder) / "keys", seed, policy, per_phase)
            return simloop.run(story, seed, loop=BusyLoop(seed))
    finally:
        logging.disable(logging.NOTSET)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One seed: mean seconds to the first token of each policy and of the oracle."""

    seed: int
    total: dict[str, float]
    by_phase: dict[str, dict[str, float]]
    fetched: dict[str, float]  # share of blocks that `auto` fetched, by phase
    quote_error: float  # median, of `auto`


def compare(seed: int, *, per_phase: int, policies: Sequence[str] = POLICIES) -> Comparison:
    """All policies, and the oracle."""
    found = {policy: run(seed, policy, per_phase) for policy in policies}
    auto = found["auto"]
    best = [min(pair) for pair in zip(found["always"].ttft_s, found["never"].ttft_s, strict=True)]
    found["oracle"] = Outcome(best, auto.phases)
    names = [phase.name for phase in PHASES]
    return Comparison(
        seed,
        {policy: statistics.fmean(each.ttft_s) for policy, each in found.items()},
        {name: {policy: each.mean(name) for policy, each in found.items()} for name in names},
        {
            name: statistics.fmean(
                share for share, at in zip(auto.fetched, auto.phases, strict=True) if at == name
            )
            for name in names
        },
        statistics.median(auto.quote_errors),
    )
