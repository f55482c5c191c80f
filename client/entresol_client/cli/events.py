"""`entresol events`: what happened to which block, replayed and followed.

A consumer by the book of daemon/EVENTS.md: events are numbered without holes inside one incarnation
of the daemon; whoever missed some is told so (a gap) and takes a snapshot.

Invariant: while following, no event is skipped silently: after a lost connection it goes on behind
the last number seen, and a gap is told before anything else is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from entresol_client.cli import options, output, rpc
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_client.cli.event_lines import Enough, Place, Printer
from entresol_client.cli.overview import one_admin_socket
from entresol_proto.status import ConfigError, Status

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from entresol_client.config import ClientConfig

BACKOFF_S_MIN = 0.25
BACKOFF_S_MAX = 5.0
PASSING = (Status.BUSY, Status.QUOTA, Status.LOCKED)  # refusals that end without the command

EXAMPLES = """\
  entresol events                         what the daemon still remembers, then stop
  entresol events --follow                from now on, until Ctrl-C
  entresol events --since 120 --follow    after number 120, then on
  entresol events --snapshot              what is stored now
  entresol events --snapshot --follow --json | my-router
  entresol events --follow --tenant acme  of one tenant: under its certificate, else as operator
  entresol events --all-tenants           the operator's view, over the admin socket
"""
ABOUT = """\
Events are numbered per tenant without holes, from 1 with every start (incarnation) of the daemon. A
position is written INCARNATION:NUMBER, and --since takes one, or a number of the present start.

When the daemon no longer holds what came after a position, it says so: a gap. With --follow the
command then tells which numbers are missing, prints a snapshot (every block stored now, as `stored`
events with number 0; what happens meanwhile comes in between, under its own numbers) and goes on
from there: what is printed is again the whole truth. Of --all-tenants nothing is replayed: after a
lost connection, or where this command was too slow, numbers that were not seen are a gap.

--tenant NAME uses client-NAME.toml beside the configuration; where there is none, the admin socket.

With --json every line is an object with "type": "event", "gap", "snapshot" (begins), "complete" (it
is, with --follow) or "position".

exit status: 0 done, 1 refused or gap without --follow, 2 wrong use, 3 no daemon.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "events", "show what happens to blocks", about=ABOUT, examples=EXAMPLES
    )
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C; reconnects")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--since", metavar="NUMBER|POSITION", help="begin after this event (0: all that is held)"
    )
    start.add_argument("--snapshot", action="store_true", help="begin with what is stored now")
    start.add_argument(
        "--all-tenants", action="store_true", help="operator: every tenant, from now on"
    )
    parser.add_argument("--tokens", action="store_true", help="with --json: the token ids too")
    parser.add_argument("--count", type=_count, metavar="N", help="stop after N events")
    options.add_admin(parser)
    options.add_common(parser)
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


class Watcher:
    """One command's way through snapshot, replay and following."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._printer = Printer(args)
        self._grpc, self._pb, self._stubs = rpc.modules()
        self._named = (args.tenant or "") if args.admin_socket is not None else ""
        self._connected = False  # once, ever
        self._answered = False  # since the last outage
        self._seen: dict[str, Place] = {}  # of all tenants: the last event of each
        self._config: ClientConfig | None = None
        self._socket: Path | None = None
        self.place: Place | None = None

    def run(self) -> int:
        """Print what was asked for; reconnects while following."""
        args = self._args
        backoff_s = BACKOFF_S_MIN
        while True:
            try:
                self._once()
                if not args.follow and not args.all_tenants:
                    break
                reason = "the daemon ended the stream"
                backoff_s = BACKOFF_S_MIN
            except CliError as error:
                following = args.follow or args.all_tenants
                passes = isinstance(error, Unreachable) or error.status in PASSING
                if not passes or not following or not self._connected:
                    raise
                reason = Exception.__str__(error)
            if self._answered:  # what follows is another outage
                self._answered, backoff_s = False, BACKOFF_S_MIN
            output.note(f"entresol: {reason}; trying again in {backoff_s:.2g} s")
            time.sleep(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)
        if self.place is not None:
            self._printer.end(self.place)
        return 0

    def _channel(self) -> AbstractContextManager[Any]:
        """A channel; the configuration is read again, because a dev daemon's ports move."""
        args = self._args
        if args.all_tenants or args.admin_socket is not None:
            try:
                self._socket = one_admin_socket(args)
            except ConfigError:
                if self._socket is None:
                    raise  # as below
            return rpc.operator_channel(self._socket)
        try:
            self._config = options.load_config(args)
        except UsageProblem:
            path = self._socket_of_operator()
            if path is None:
                raise
            self._named = args.tenant
            return rpc.operator_channel(path)
        except ConfigError:
            if self._config is None:
                raise  # later on it is being rewritten, or we can do without it
        return rpc.tenant_channel(self._config, options.pick_shard(self._config.shards, args.shard))

    def _socket_of_operator(self) -> Path | None:
        """The admin socket, where a tenant's certificate is not at hand and the socket is."""
        args = argparse.Namespace(**{**vars(self._args), "tenant": None})
        shards = options.load_config(args).shards
        path = options.pick_shard(shards, args.shard).admin_socket
        return path if path is not None and path.exists() else None

    def _once(self) -> None:
        """One connection. Raises: CliError, Unreachable."""
        args = self._args
        with self._channel() as channel:
            stub = self._stubs.EventsStub(channel)
            try:
                if args.all_tenants:
                    while self._follow(stub, None, until=None):
                        pass  # fell behind: on from now
                    return
                if self.place is None:
                    self._check_known(channel, stub)
                    self.place = self._start(stub)
                if args.follow:
                    self._follow_through_gaps(stub)
                elif not args.snapshot:
                    self._replay(stub, self._now(stub))
            except self._grpc.RpcError as error:
                raise rpc.translate(error) from None

    def _check_known(self, channel: Any, stub: Any) -> None:
        """Of a tenant that an operator names, once, and that may be misspelt: it has no events, and
        would have none in an hour. Raises: CliError."""
        if not self._named or self._args.follow or self._now(stub).seq:
            return
        found = rpc.call(self._stubs.AdminStub(channel).TenantList, self._pb.TenantListRequest())
        known = [info.name for info in found.tenants]
        if self._named not in known:
            raise CliError(
                f"there is no tenant {self._named!r}",
                hint=f"known are {', '.join(known) or 'none'}",
            )

    def _start(self, stub: Any) -> Place:
        """Where to begin; a snapshot is printed on the way."""
        args = self._args
        if args.snapshot:
            return self._snapshot(stub)
        now = self._now(stub)
        if args.since is not None:
            return _parse_place(args.since, now.incarnation)
        return now if args.follow else self._oldest(stub, now)

    def _oldest(self, stub: Any, now: Place) -> Place:
        """The position before the oldest event that is held."""
        place = Place(now.incarnation, 0)
        for reply in self._watch(stub, place):
            if reply.HasField("gap"):
                output.note(
                    f"entresol: events 1 to {reply.gap.first_seq - 1} are no longer held; "
                    "--snapshot shows what is stored"
                )
                return Place(now.incarnation, max(0, reply.gap.first_seq - 1))
            if reply.events or now.seq == 0:
                break
        return place

    def _now(self, stub: Any) -> Place:
        """The newest position."""
        for reply in self._watch(stub, None):
            return Place(reply.position.incarnation, reply.position.seq)
        raise Unreachable("the daemon ended the stream", hint="it is stopping; try again")

    def _watch(self, stub: Any, after: Place | None) -> Iterator[Any]:
        """Replies of one Watch; the call ends with the iteration."""
        request = self._pb.WatchRequest(tenant=self._named)
        if after is not None:
            request.after.incarnation = after.incarnation
            request.after.seq = after.seq
        call = stub.Watch(request)
        try:
            for reply in call:
                self._connected = self._answered = True
                yield reply
        finally:
            call.cancel()

    def _snapshot(self, stub: Any) -> Place:
        """Print what is stored, and what happens meanwhile while following; returns the position
        to go on from. Of one that ended with a gap, because this command was too slow, nothing
        holds: another one follows."""
        while True:
            place = self._snapshot_once(stub)
            if place is not None:
                return place

    def _snapshot_once(self, stub: Any) -> Place | None:
        """None after a gap. Raises: Unreachable."""
        following = self._args.follow
        call = stub.Snapshot(self._pb.SnapshotRequest(tenant=self._named, follow=following))
        place: Place | None = None
        complete = False
        try:
            for reply in call:
                self._connected = self._answered = True
                if reply.HasField("position"):
                    place = Place(reply.position.incarnation, reply.position.seq)
                    self._printer.begin_snapshot(place)
                if reply.HasField("gap"):
                    self._printer.gap(reply.gap, following=True)
                    return None
                self._print(reply.events)
                seen = max((event.seq for event in reply.events), default=0)  # 0: listed only
                if place is not None and seen:
                    place = Place(place.incarnation, seen)
                complete = complete or reply.complete
        finally:
            call.cancel()
        if place is None or not complete:
            raise Unreachable("the snapshot was cut short", hint="try again")
        if following:
            self._printer.end_snapshot(place)
        return place

    def _follow_through_gaps(self, stub: Any) -> None:
        """Follow; after a gap, take a snapshot and follow from there."""
        while self._follow(stub, self.place, until=None):
            self.place = self._snapshot(stub)

    def _replay(self, stub: Any, until: Place) -> None:
        """Print events up to a position. Raises: CliError for a gap, Unreachable."""
        while self.place != until:
            before = self.place
            self._follow(stub, before, until=until)
            if self.place == before:
                raise Unreachable("the daemon ended the stream", hint="it is stopping; try again")
            if self.place is not None and self.place.seq >= until.seq:
                return
            # A tenant's watch ends with its erasure, and it was added again since.

    def _follow(self, stub: Any, after: Place | None, *, until: Place | None) -> bool:
        """Print events after a position; True when it ended with a gap.

        Stops behind `until`. Raises: CliError for a gap when not following.
        """
        following = self._args.follow
        for reply in self._watch(stub, after):
            if reply.HasField("gap"):
                if self._args.all_tenants:
                    self._tell_lost(reply)
                    return True
                text = self._printer.gap(reply.gap, following=following)
                if not following:
                    raise CliError(
                        text, hint="--snapshot shows what is stored now", status=Status.GAP
                    )
                return True
            if self._args.all_tenants:
                self._tell_missed(reply)
            self._print(reply.events)
            if reply.events and not self._args.all_tenants:
                self.place = Place(reply.incarnation, reply.events[-1].seq)
                if until is not None and self.place.seq >= until.seq:
                    return False
        return False

    def _tell_missed(self, reply: Any) -> None:
        """Of all tenants nothing is replayed after a reconnect: numbers tell what is missing."""
        for event in reply.events:
            last = self._seen.get(event.tenant)
            here = Place(reply.incarnation, event.seq)
            self._seen[event.tenant] = here
            if last is None:
                continue
            if last.incarnation != here.incarnation:
                self._printer.missed(event.tenant, 1, event.seq - 1, "incarnation")
            elif event.seq > last.seq + 1:
                self._printer.missed(event.tenant, last.seq + 1, event.seq - 1, "reconnected")

    def _tell_lost(self, reply: Any) -> None:
        """Of all tenants: we were slower than one of them. Of others, numbers tell it later."""
        gap = reply.gap
        reason = self._printer.label("GapReason", gap.reason)
        self._printer.missed(gap.tenant, gap.asked_seq + 1, gap.last_seq, reason)
        self._seen[gap.tenant] = Place(reply.incarnation, gap.last_seq)

    def _print(self, events: Iterable[Any]) -> None:
        for event in events:
            self._printer.event(event)


def _parse_place(text: str, incarnation: int) -> Place:
    """Raises: UsageProblem."""
    head, colon, tail = text.rpartition(":")
    try:
        seq = int(tail)
        found = Place(int(head, 16) if colon else incarnation, seq)
        if (colon and len(head) != 16) or not all(0 <= n < 2**64 for n in (seq, found.incarnation)):
            raise ValueError
        return found
    except ValueError:
        raise UsageProblem(
            f"--since {text!r} is no position",
            hint="write a number, or a position as this command prints it: INCARNATION:NUMBER",
        ) from None


def run(args: argparse.Namespace) -> int:
    """The command."""
    if args.since is not None:
        _parse_place(args.since, 0)
    if args.tokens and not args.json:
        raise UsageProblem("--tokens belongs to --json")
    try:
        return Watcher(args).run()
    except Enough:
        sys.stdout.flush()
        return 0
