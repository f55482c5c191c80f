"""The relay itself: one loop between the daemon's events and the routers' sockets.

Invariants: one thread touches mirror and sockets; what cannot be published is counted, never
guessed; blocks of a shard that is gone too long are withdrawn, and come back with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from entresol_client.cli import output, rpc
from entresol_client.cli.errors import UsageProblem
from entresol_client.config import ClientConfig
from entresol_client.relay import feed, layouts
from entresol_client.relay.chain import Mirror
from entresol_client.relay.layouts import Chooser, NamespaceInfo
from entresol_client.relay.publisher import (
    BUFFER_BATCHES_DEFAULT,
    News,
    Publisher,
    first_seq,
    zmq_module,
)
from entresol_client.relay.wire import EVENTS_PER_BATCH_MAX, MEDIA, Form, Writer, batches
from entresol_client.relay.workers import Worker

TICK_MS = 250
STATUS_S = 0.2
HELLO_AFTER_S = 0.1  # lets a subscription be complete before the first message
ROUND_PAUSES = 4  # a full round at most every fifth of the time
CLEAR_AGAIN_S = 60.0  # since the start: who comes in it may know what a relay before told
ENDS = ("KIND_REMOVED", "KIND_EXPIRED", "KIND_CORRUPT")


@dataclass(frozen=True, slots=True)
class Options:
    """What a relay does. Spans are seconds.

    Attributes:
        served_model: the model's name in topics; empty: the descriptor's.
        match: field of the descriptor -> pattern; which layout is published.
        block_tokens: the readers' block size; 0: the stored one.
        clear: begin with a message that takes back everything of these pods.
        withdraw_after_s: a shard may be away so long before its blocks are withdrawn.
        round_pause_s: the least time between two rounds in which everything is told again.
    """

    workers: tuple[Worker, ...]
    served_model: str = ""
    match: Mapping[str, str] = field(default_factory=dict)
    medium: str = MEDIA[0]
    form: Form = "array"
    hashes_as_bytes: bool = False
    block_tokens: int = 0
    with_salted: bool = False
    replay_topic: bool = True
    buffer_batches: int = BUFFER_BATCHES_DEFAULT
    clear: bool = True
    withdraw_after_s: float = 60.0
    round_pause_s: float = 10.0


@dataclass
class _Shard:
    """What the relay knows about one shard."""

    state: str = "connecting"
    reason: str = ""
    since_s: float = 0.0  # of the state
    in_snapshot: bool = False
    synchronised: bool = False
    withdrawn: bool = False
    ever_up: bool = False
    erased: bool = False  # its blocks are gone for good, and need no waiting for

    @property
    def settled(self) -> bool:
        """Nothing more is to be expected of a round: it told all, or cannot."""
        return not self.in_snapshot and (self.synchronised or self.state == "down")


class Relay:
    """See the module. `run` in one thread; `stop` from any."""

    def __init__(
        self, options: Options, configuration: Callable[[], ClientConfig], *, model: str
    ) -> None:
        """`model` names the topics. Raises: CliError when a socket cannot be had."""
        self._zmq = zmq_module()
        self.options = options
        self.chooser = Chooser(dict(options.match))
        self.mirror = Mirror(
            as_bytes=options.hashes_as_bytes,
            block_tokens=options.block_tokens,
            with_salted=options.with_salted,
        )
        self.publisher = Publisher(
            list(options.workers),
            model,
            start_seq=first_seq(time.time_ns()),
            replay_topic=options.replay_topic,
            buffer_batches=options.buffer_batches,
        )
        self._writer = Writer(options.form, options.medium)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with the object, not before: `stop` and the feeds write from their own threads.
        weakref.finalize(self, os.close, self._wake_fd)
        self._inbox = feed.Inbox(lambda: os.eventfd_write(self._wake_fd, 1))
        self._infos: dict[tuple[str, bytes], NamespaceInfo] = {}
        self._stop = threading.Event()
        self._began_s = time.monotonic()
        names = [shard.name for shard in configuration().shards]
        self.shards = {name: _Shard(since_s=self._began_s) for name in names}
        self._feeds = [feed.ShardFeed(name, configuration, self._inbox) for name in names]
        self._round_wanted = False
        self._round_began_s = self._began_s
        self._round_done_s: float | None = None  # None: one is under way (the first)
        self._hello_at_s: float | None = None
        self._clear_wanted = False
        self.events = 0
        self.rounds = 0
        self.snapshots = {"complete": 0, "cut": 0}
        self._kinds = rpc.modules()[1].Kind
        self._closed = False
        self.latest = self.status()  # recent; may be read from any thread
        self._latest_s = self._began_s

    def stop(self) -> None:
        """End `run` soon. Safe in a signal handler."""
        self._stop.set()
        os.eventfd_write(self._wake_fd, 1)

    def again(self) -> None:
        """Tell readers everything again, as soon as the pause between rounds allows."""
        self._round_wanted = True

    def run(self, on_turn: Callable[[Relay], None] | None = None) -> None:
        """Relay until `stop`. Raises: EntresolError when no shard can ever be followed."""
        poller = self._zmq.Poller()
        poller.register(self._wake_fd, self._zmq.POLLIN)
        self.publisher.register(lambda socket: poller.register(socket, self._zmq.POLLIN))
        if self.options.clear:
            self._publish([self._writer.cleared()])
        for one in self._feeds:
            one.start()
        try:
            while not self._stop.is_set():
                poller.poll(TICK_MS)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                self.turn(time.monotonic())
                self._note_status(time.monotonic())
                if on_turn is not None:
                    on_turn(self)
        finally:
            self.close()

    def turn(self, now_s: float) -> None:
        """Do what there is to do. Raises: EntresolError, UsageProblem."""
        for item in self._inbox.take():
            self._apply(item, now_s)
            if self.mirror.changes_count >= EVENTS_PER_BATCH_MAX:
                self._flush()
        self._withdraw_absent(now_s)
        self._flush()
        self._greet(self.publisher.serve(), now_s)
        self._maybe_round(now_s)

    def close(self) -> None:
        """Stop the feeds, close the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.latest = self.status()
        self._inbox.close()
        for one in self._feeds:
            one.stop()
        for one in self._feeds:
            if one.ident is not None:
                one.join(rpc.CALL_DEADLINE_S)
        self.publisher.close()

    # ------------------------------------------------------------------------------ events

    def _apply(self, item: feed.Item, now_s: float) -> None:
        shard = self.shards[item.shard]
        if isinstance(item, feed.Events):
            self._take_events(item)
        elif isinstance(item, feed.Spaces):
            self._take_spaces(item)
        elif isinstance(item, feed.Begin):
            shard.in_snapshot = True
            self.mirror.begin_snapshot(item.shard)
        elif isinstance(item, feed.End):
            shard.in_snapshot = False
            shard.synchronised |= item.complete
            self.snapshots["complete" if item.complete else "cut"] += 1
            self.mirror.end_snapshot(item.shard, complete=item.complete)
        elif isinstance(item, feed.Up):
            shard.state, shard.reason, shard.since_s = "up", "", now_s
            shard.ever_up, shard.withdrawn = True, False
        else:
            if shard.state != "down":
                shard.state, shard.since_s = "down", now_s
            shard.reason, shard.erased = item.reason, item.erased
            hopes = (one.ever_up or one.state == "connecting" for one in self.shards.values())
            if item.fatal is not None and not any(hopes):
                raise item.fatal

    def _take_spaces(self, item: feed.Spaces) -> None:
        for info in item.found:
            self._infos[info.shard, info.namespace_id] = info
        self.chooser.choose(list(self._infos.values()))
        late: set[str] = set()
        for (shard, namespace_id), info in self._infos.items():
            if self.chooser.admits(info) and not self.mirror.knows(shard, namespace_id):
                self.mirror.add_space(info)
                late.add(shard)
        for one in self._feeds:
            # Told before it was known that it is ours: its events were not taken.
            if one.shard in late - {item.shard} and self.shards[one.shard].synchronised:
                one.again()

    def _take_events(self, item: feed.Events) -> None:
        kinds, shard = self._kinds, item.shard
        ends = {kinds.Value(name) for name in ENDS}
        self.events += len(item.events)
        for event in item.events:
            if event.kind == kinds.KIND_STORED:
                self.mirror.stored(
                    shard, event.namespace_id, event.wire_keys, event.engine_keys, event.parent,
                    event.position, event.block_tokens, event.token_ids, live=event.seq > 0,
                )  # fmt: skip
            elif event.kind in ends:
                self.mirror.removed(shard, event.namespace_id, event.wire_keys)
            elif event.kind in (kinds.KIND_CLEARED, kinds.KIND_TENANT_ERASED):
                self.mirror.cleared(shard, event.namespace_id)

    def _withdraw_absent(self, now_s: float) -> None:
        for name, shard in self.shards.items():
            if shard.state != "down" or shard.withdrawn:
                continue
            if shard.erased or now_s - shard.since_s > self.options.withdraw_after_s:
                shard.withdrawn, shard.synchronised = True, False
                self.mirror.cleared(name)
                for one in self._feeds:
                    if one.shard == name:
                        one.again()  # its blocks must be told from a snapshot when it is back

    # ---------------------------------------------------------------------------- publish

    def _flush(self) -> None:
        for piece in batches(self.mirror.take()):
            self._publish([self._writer.event(change) for change in piece])

    def _publish(self, events: list[Any]) -> None:
        self.publisher.publish(self._encoder(events))

    def _encoder(self, events: list[Any]) -> Callable[[int | None], bytes]:
        now_s = time.time()
        return lambda rank: self._writer.batch(events, time_unix_s=now_s, dp_rank=rank)

    def _greet(self, news: News, now_s: float) -> None:
        """A new reader gets an empty message, whose number shows it what it missed, and a round."""
        if news.joined:
            self._hello_at_s = now_s + HELLO_AFTER_S
            # It was not there when the start took everything back.
            recent = now_s - self._began_s < CLEAR_AGAIN_S
            self._clear_wanted |= self.options.clear and recent
        if news.joined or news.behind:
            self._round_wanted = True
        if self._hello_at_s is not None and now_s >= self._hello_at_s:
            self._hello_at_s = None
            self._publish([])

    def _maybe_round(self, now_s: float) -> None:
        """Tell everything again when somebody needs it, and not all the time."""
        if self._round_done_s is None:
            if all(one.settled for one in self.shards.values()):
                self._round_done_s = now_s
            return
        if self.mirror.lost:
            self._round_wanted = True
        took_s = self._round_done_s - self._round_began_s
        pause_s = max(self.options.round_pause_s, ROUND_PAUSES * took_s)
        if not self._round_wanted or now_s - self._round_done_s < pause_s:
            return
        self._round_wanted = False
        self._round_began_s, self._round_done_s = now_s, None
        self.rounds += 1
        if self._clear_wanted:
            self._clear_wanted = False
            self._publish([self._writer.cleared()])
        self.mirror.tell_again()
        for shard in self.shards.values():
            shard.synchronised = False
        for one in self._feeds:
            one.again()

    # ------------------------------------------------------------------------------- state

    def check_choice(self) -> None:
        """Raises: UsageProblem while several layouts match and none was chosen."""
        if self.chooser.chosen is None and len(self.chooser.others) > 1:
            raise ambiguous(self.chooser)

    def _note_status(self, now_s: float) -> None:
        if now_s - self._latest_s >= STATUS_S:
            self.latest, self._latest_s = self.status(), now_s

    def status(self) -> dict[str, Any]:
        """Everything a person or a monitor wants to know, as one JSON object."""
        mirror, chosen = self.mirror, self.chooser.chosen
        return {
            "type": "status",
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            "layout": None if chosen is None else layouts.words(chosen),
            "other_layouts": len(self.chooser.others),
            "blocks": {
                "announced": mirror.told_blocks,
                "stored": mirror.stored_blocks,
                "waiting": mirror.waiting_blocks,
            },
            "events": self.events,
            "rounds": self.rounds,
            "snapshots": dict(self.snapshots),
            "counts": dict(sorted((mirror.counts + self.publisher.counts).items())),
            "shards": [
                {"name": name, "state": one.state, "reason": one.reason or None}
                for name, one in self.shards.items()
            ],
            "workers": self.publisher.state(),
        }


def ambiguous(chooser: Chooser) -> UsageProblem:
    """Several layouts match: which fields tell them apart."""
    found = [layouts.words(layout) for layout in sorted(chooser.others, key=repr)]
    differing = [
        name for name in layouts.MATCH_FIELDS if len({str(words[name]) for words in found}) > 1
    ]
    shown = "; ".join(
        " ".join(f"{name}={words[name]}" for name in differing) for words in found[:4]
    )
    return UsageProblem(
        f"{output.plural(len(found), 'layout')} match: {shown}",
        hint=f"choose with --match {differing[0]}=... (a relay publishes one)",
    )
