"""What the scheduler side decides: which blocks Entresol adds behind KVBM's match, which it keeps.

Pure bookkeeping over vLLM's requests: no KVBM, no vLLM, no I/O but the look-up it is given.
Invariants:
- the tier only ever adds to what KVBM matched: blocks right behind KVBM's, never instead of them;
- a request is offered to the tier once: one whose load failed, or that was preempted, is computed;
- a block is stored only when every token of it is known and computed at the end of the step.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from entresol_client.engines.asker import ParamsError, who_asks
from entresol_client.engines.kvbm_hash import KeyChain
from entresol_client.engines.naming import new_epoch, of_epoch

Lookup = Callable[[str, Sequence[bytes]], Future[list[bool]]]
Match = tuple[int | None, bool]


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Blocks of one request to bring into device blocks; `keys[i]` belongs in `device_blocks[i]`.

    `beside_kvbm`: KVBM loads the blocks before these at the same time.
    """

    request_id: str
    tenant: str
    keys: tuple[bytes, ...]
    device_blocks: tuple[int, ...]
    beside_kvbm: bool


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """One computed block: where it lies on the device and what is said about it."""

    key: bytes
    device_block: int
    position: int
    parent_key: bytes | None
    token_ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Blocks of one request that this step completes, in sequence order."""

    request_id: str
    tenant: str
    blocks: tuple[StoreBlock, ...]


@dataclass(slots=True)
class StepPlan:
    """What the workers do in one step beside KVBM's own work."""

    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)


@dataclass(slots=True)
class _Match:
    """What was offered to vLLM last: blocks before `first` are computed, then KVBM's, then ours."""

    first: int
    kvbm_blocks: int
    blocks: int


@dataclass(slots=True)
class _Track:
    request: Any
    tenant: str
    chain: KeyChain
    device_blocks: list[int] = field(default_factory=list)
    lookup: Future[list[bool]] | None = None
    present: list[bool] = field(default_factory=list)
    match: _Match | None = None
    load: LoadOp | None = None
    given_up: bool = False
    keeps: bool = True
    stored_blocks: int = 0

    def known_tokens(self, prompt_only: bool) -> int:
        request = self.request
        return int(request.num_prompt_tokens if prompt_only else request.num_tokens)


class Planner:
    """The scheduler's half of the tier. One per scheduler, used from its thread alone.

    `lookup(tenant, keys)` answers which blocks every rank could load; it never raises and is
    answered within the look-up deadline. `tenants` are the names it knows; "" is the default.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        tenants: Iterable[str] = (),
        prompt_only: bool = False,
        trust_kvbm: bool = True,
    ) -> None:
        """`prompt_only`: keep no blocks with generated tokens (speculative decoding).

        `trust_kvbm`: False keeps nothing of a request for which KVBM loaded blocks: a failed read
        of its disk tier goes unnoticed, and what is computed behind it is wrong too.
        """
        self.block_tokens = block_tokens
        self.lookup: Lookup | None = None  # set when the workers have told their layout
        self.counts: Counter[str] = Counter()
        self._tenants = frozenset(tenants) | {""}
        self._prompt_only = prompt_only
        self._trust_kvbm = trust_kvbm
        self._tracks: dict[str, _Track | None] = {}
        self._plan = StepPlan()
        self._epoch = ""
        self._over = False

    def end(self) -> None:
        """From now on no request uses the tier."""
        self.begin_anew()
        self._over = True

    def begin_anew(self) -> None:
        """From now on no request finds or stores what others did before, and those that are under
        way use the tier no more: of their blocks some are computed before."""
        self._epoch = new_epoch()
        self._tracks = dict.fromkeys(self._tracks)
        self._plan.stores.clear()

    # Matching -----------------------------------------------------------------------------------

    def seen(self, request: Any) -> None:
        """A new request: ask the tier early, so that the answer is there when it is scheduled."""
        track = self._track(request)
        if track is not None:
            self._ask(track)

    def match(self, request: Any, computed_tokens: int, kvbm: Callable[[], Match]) -> Match:
        """What `get_num_new_matched_tokens` answers; `kvbm` asks KVBM.

        KVBM is asked only when the tier's answer is there: it stages blocks for the number of
        computed tokens of that moment, which may change while a request waits.
        """
        track = self._track(request)
        last = (int(request.num_tokens) - 1) // self.block_tokens  # one token stays to compute
        first = computed_tokens // self.block_tokens
        if (
            track is None
            or track.given_up
            or computed_tokens % self.block_tokens
            or last <= first
            or getattr(request, "skip_reading_prefix_cache", False)
            or getattr(request, "num_preemptions", 0)  # KVBM's worker still reports for it
            or not self._ask(track)
        ):
            return kvbm()
        if track.lookup is not None:
            if not track.lookup.done():
                return None, False
            track.present, track.lookup = track.lookup.result(), None
        tokens, asynchronous = kvbm()
        track.match = None
        if tokens is None or tokens % self.block_tokens:
            return tokens, asynchronous
        kvbm_blocks = tokens // self.block_tokens
        start = first + kvbm_blocks
        end = start
        while end < min(last, len(track.present)) and track.present[end]:
            end += 1
        if end == start:
            return tokens, asynchronous
        track.match = _Match(first, kvbm_blocks, end - start)
        return tokens + (end - start) * self.block_tokens, True

    def allocated(
        self, request: Any, device_blocks: Sequence[int], external_tokens: int
    ) -> tuple[int, int] | None:
        """vLLM gave the request blocks. Plans the load of ours among `external_tokens`.

        Returns None when they are all KVBM's (or there are none); else what is KVBM's: the number
        of blocks from the start that it may see, and its number of external tokens.
        """
        track = self._tracks.get(request.request_id)
        if track is None:
            self.counts.update(kvbm_blocks=external_tokens // self.block_tokens)
            return None
        track.device_blocks = list(device_blocks)
        match, track.match = track.match, None
        if external_tokens and not self._trust_kvbm and (match is None or match.kvbm_blocks):
            track.keeps = False
        if match is None or external_tokens == 0:
            self.counts.update(kvbm_blocks=external_tokens // self.block_tokens)
            return None
        self.counts.update(kvbm_blocks=match.kvbm_blocks)
        kvbm_tokens = match.kvbm_blocks * self.block_tokens
        start = match.first + match.kvbm_blocks
        blocks = (external_tokens - kvbm_tokens) // self.block_tokens
        if not 0 < blocks <= match.blocks or len(device_blocks) < start + blocks:
            raise RuntimeError(
                f"vLLM took {external_tokens} external tokens into {len(device_blocks)} blocks; "
                f"offered were {match}"
            )
        load = LoadOp(
            request_id=request.request_id,
            tenant=track.tenant,
            keys=tuple(track.chain.keys[start : start + blocks]),
            device_blocks=tuple(device_blocks[start : start + blocks]),
            beside_kvbm=match.kvbm_blocks > 0,
        )
        track.load = load
        self._plan.loads.append(load)
        self.counts.update(matched_blocks=blocks, matched_requests=1)
        return start, kvbm_tokens

    # Steps --------------------------------------------------------------------------------------

    def step(self, scheduled: Any) -> StepPlan:
        """The work of the step that `scheduled` (vLLM's SchedulerOutput) describes."""
        counts: Mapping[str, int] = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            track = self._known(new.req_id)
            if track is not None:
                track.device_blocks = list(new.block_ids[0])
                self._keep(track, new.num_computed_tokens + counts.get(new.req_id, 0))
        cached = scheduled.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new_blocks, computed in rows:
            track = self._known(request_id)
            if track is None:
                continue
            added = list(new_blocks[0]) if new_blocks is not None else []
            if request_id in cached.resumed_req_ids:
                track.device_blocks = added
            else:
                track.device_blocks += added
            self._keep(track, computed + counts.get(request_id, 0))
        plan, self._plan = self._plan, StepPlan()
        return plan

    def transferred(self, finished: Iterable[str], failed_blocks: Iterable[int]) -> None:
        """The workers' report: loads that ended, and device blocks that hold nothing of use."""
        failed = frozenset(failed_blocks)
        for track in self._tracks.values() if failed else ():
            if track is None or track.load is None or failed.isdisjoint(track.load.device_blocks):
                continue
            track.given_up = True
            track.present = []
            self.counts.update(given_up_requests=1)
        for request_id in finished:
            track = self._tracks.get(request_id)
            if track is not None:
                track.load = None

    def finished(self, request_id: str) -> None:
        """The request is over; its blocks may be anyone's soon."""
        self._tracks.pop(request_id, None)

    # Inside -------------------------------------------------------------------------------------

    def _track(self, request: Any) -> _Track | None:
        """The request's record; None when the tier is not for it."""
        request_id = request.request_id
        if request_id in self._tracks:
            return self._known(request_id)
        if self._over:
            return None
        who = None
        with contextlib.suppress(ParamsError):
            who = who_asks(getattr(request, "kv_transfer_params", None))
        track = None
        if who is None or who.tenant not in self._tenants:
            self.counts.update(unknown_tenant_requests=1)
        elif _has_more_than_tokens(request):
            self.counts.update(unfit_requests=1)
        else:
            cache_salt = getattr(request, "cache_salt", None)
            salt = of_epoch(who.salt, self._epoch)
            chain = KeyChain(self.block_tokens, cache_salt, private_salt=salt)
            track = _Track(request, who.tenant, chain)
        self._tracks[request_id] = track
        return track

    def _known(self, request_id: str) -> _Track | None:
        """The record of a request that was seen; None from when a later part of its input (a
        session's comes in parts) has what its tokens do not name."""
        track = self._tracks.get(request_id)
        if track is not None and _has_more_than_tokens(track.request):
            self.counts.update(unfit_requests=1)
            track = self._tracks[request_id] = None
        return track

    def _ask(self, track: _Track) -> bool:
        """Start the look-up unless one is there. False when there is nothing to ask, or nobody."""
        if track.lookup is not None or track.present:
            return True
        if self.lookup is None:
            return False
        request = track.request
        keys = track.chain.keys[: track.chain.extend(request.all_token_ids)]
        if not keys:
            return False
        track.lookup = self.lookup(track.tenant, keys)
        return True

    def _keep(self, track: _Track, computed_tokens: int) -> None:
        """Plan to store the blocks that are complete when `computed_tokens` are computed.

        Blocks before those of this step belong to it too, when the tier has said that it lacks
        them: it may have been absent when they were computed, and a gap hides what is behind it.
        """
        track.match = None
        if track.lookup is not None and track.lookup.done():
            track.present, track.lookup = track.lookup.result(), None
        known = min(computed_tokens, track.known_tokens(self._prompt_only))
        end = min(known // self.block_tokens, len(track.device_blocks))
        if end <= track.stored_blocks or not track.keeps:
            return
        request = track.request
        end = min(end, track.chain.extend(request.all_token_ids, end))
        blocks = tuple(
            self._block(track, index)
            for index in range(track.stored_blocks, end)
            if not (index < len(track.present) and track.present[index])
        )
        track.stored_blocks = max(track.stored_blocks, end)
        if blocks:
            self._plan.stores.append(StoreOp(request.request_id, track.tenant, blocks))

    def _block(self, track: _Track, index: int) -> StoreBlock:
        start = index * self.block_tokens
        return StoreBlock(
            key=track.chain.keys[index],
            device_block=track.device_blocks[index],
            position=index,
            parent_key=track.chain.parent(index),
            token_ids=tuple(track.request.all_token_ids[start : start + self.block_tokens]),
        )


def _has_more_than_tokens(request: Any) -> bool:
    """Whether the KV of a request depends on what its keys leave out."""
    return (
        getattr(request, "lora_request", None) is not None
        or bool(getattr(request, "mm_features", None))
        or getattr(request, "prompt_embeds", None) is not None
    )
