"""A connected client for a command, and one vocabulary for why a block is not there.

Invariant: a command that needs the data path either has a shard to talk to or fails before it does
anything else: with `Unreachable` where none answers, else with what the shard says.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from entresol_client.cli import options, output
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_proto.status import Status

if TYPE_CHECKING:
    from entresol_client.results import Explanation, ShardReport
    from entresol_client.sync import Client, SyncNamespace

# What a person can do about an outcome. Statuses without a line speak for themselves.
FIXES = {
    Status.QUOTA: "the tenant's quota is used up: `entresol tenant quota`, or forget something",
    Status.NO_SPACE: "the flash is full: give the daemon more, or forget something",
    Status.IO_ERROR: "the daemon's disk refuses: its log says what (a full [shard] state_dir "
    "takes no new namespace, a drive that fails takes nothing)",
    Status.INTERNAL: "a mistake of the daemon's: report it, with its log",
    Status.NOT_ADMITTED: "the admission policy spares the flash; see [admission] of the daemon",
    Status.LOCKED: "the daemon has no key-encryption key (`entresol unlock` there), or this host's "
    "tenant_key file lacks the block's version",
    Status.DRAINING: "the daemon is stopping; try again when it is back",
    Status.DEADLINE: "the daemon did not finish in time: try a longer --deadline",
    Status.BUSY: "the daemon is at one of its limits; try again in a moment",
    Status.DISCONNECTED: "the daemon went away: `entresol doctor` tells more",
    Status.BREAKER_OPEN: "the daemon stopped answering: `entresol doctor` tells more",
    Status.FABRIC_ERROR: "the data path failed: `entresol doctor` tells more",
    Status.UNSUPPORTED: "this data path cannot do that; see `entresol doctor`",
    Status.CORRUPT: "the block was damaged and has been dropped: store it again",
    Status.ERASED: "the tenant was erased: nothing of it can be read any more",
}
OUTAGES = frozenset({Status.DISCONNECTED, Status.BREAKER_OPEN, Status.DRAINING})


@contextlib.contextmanager
def open_client(args: argparse.Namespace, *, staging_bytes: int = 0) -> Iterator[Client]:
    """A client with at least one shard.

    `staging_bytes` bounds the memory shared with the daemon, which costs time to set up.

    Raises: ConfigError, UsageProblem, CliError of a shard that refuses, Unreachable.
    """
    from dataclasses import replace

    from entresol_client.sync import Client
    from entresol_proto.identity import IdentityError

    config = options.load_config(args)
    if 0 < staging_bytes < config.staging_bytes_max:
        config = replace(config, staging_bytes_max=staging_bytes)
    try:
        client = Client(config)
    except IdentityError as error:
        raise UsageProblem(Exception.__str__(error), hint=error.hint) from None
    with client:
        reports = client.shards()
        absent = [report for report in reports if not report.connected]
        for report in absent:
            if len(absent) == len(reports):
                raise _absence(report)
            output.note(f"entresol: {_of_absent(report)}; its blocks read as absent")
        yield client


def _of_absent(report: ShardReport) -> str:
    said = report.last_error or "no answer"
    where = f"shard {report.name} at {report.address}"
    return f"{where} refuses: {said}" if report.refused else f"{where}: {said}"


def _absence(report: ShardReport) -> CliError:
    """Why there is nobody to talk to: a shard that refuses is running, and says what to do."""
    text, status = _of_absent(report), report.last_status
    if not report.refused:
        hint = "is it running? `entresol doctor` checks every step"
        return Unreachable(f"no daemon to talk to; {text}", hint=hint)
    hint = report.last_hint or FIXES.get(status, "`entresol doctor` checks every step")
    kind = UsageProblem if status is Status.FORBIDDEN else CliError
    return (Unreachable if status in OUTAGES else kind)(text, hint=hint, status=status)


@contextlib.contextmanager
def open_namespace(
    args: argparse.Namespace, *, staging_bytes: int = 0
) -> Iterator[tuple[Client, SyncNamespace]]:
    """A client, and the namespace that the arguments name."""
    descriptor = options.descriptor(args)
    with open_client(args, staging_bytes=staging_bytes) as client:
        yield client, client.namespace(descriptor)


def fabric_of(client: Client) -> str:
    """Label of the data path, or of each shard's."""
    found = sorted({report.fabric for report in client.shards() if report.connected})
    return ", ".join(found) or "none"


def block_bytes_max(client: Client) -> int:
    """The longest block that every shard takes; 0 when none is connected."""
    found = (report.block_bytes_max for report in client.shards() if report.connected)
    return min(found, default=0)


def failure(what: str, status: Status, *, hint: str = "") -> CliError:
    """Why a call on a block failed, as an error with its fix."""
    kind = Unreachable if status in OUTAGES else CliError
    return kind(f"{what}: {status.label}", hint=hint or FIXES.get(status, ""), status=status)


# Sentences for EXPLAIN, by the label of `Reason`. {when} is empty or " at <local time>".
_SENTENCES = {
    "in_memory": ("is in the daemon's memory", ""),
    "on_flash": ("is on flash", ""),
    "never_stored": (
        "was never stored here, or so long ago that nothing remembers it",
        "check the name and the namespace options; `entresol namespaces` lists what is here",
    ),
    "evicted": ("was evicted{when} to make room", "store it again, or give the daemon more flash"),
    "forgotten": ("was dropped{when} because the tenant asked for it", "store it again"),
    "corrupt": (
        "failed verification{when} and was dropped; nobody was given wrong bytes",
        "store it again, and look at the drive: `entresol inspect`",
    ),
    "erased": ("is gone for good: its keys were destroyed{when}", "store it again"),
    "being_stored": ("is being stored right now", "try again in a moment"),
    "other_namespace": (
        "is stored, but under another model, layout or salt than asked for",
        "repeat the options it was stored with (--model, --salt, ...): `entresol namespaces`",
    ),
    "not_admitted": (
        "was offered{when} but not admitted: the admission policy spared the flash",
        "store it again, or see [admission] of the daemon",
    ),
    "lost": (
        "was lost{when}: not yet durable when the daemon stopped, or its segment failed",
        "store it again; --ack durable waits for the flash",
    ),
}


def sentence(row: Explanation) -> tuple[str, str]:
    """What became of a block, in words that follow its name, and what to do about it."""
    when = f" at {output.local_time(row.when_unix_ns)}" if row.when_unix_ns else ""
    return _sentence(row, when)


def sentence_of_run(rows: Sequence[Explanation]) -> tuple[str, str]:
    """The same of several blocks of which one thing is true, which may differ in when."""
    if len(rows) == 1:
        return sentence(rows[0])
    times = sorted({output.local_time(row.when_unix_ns) for row in rows if row.when_unix_ns})
    when = f" at {times[0]}" if len(times) == 1 else ""
    if len(times) > 1:
        when = f" from {times[0]} to {times[-1]}"
    text, fix = _sentence(rows[0], when)
    for one, many in (
        ("is ", "are "),
        ("was ", "were "),
        ("are gone for good: its", "are gone for good: their"),
    ):
        if text.startswith(one):
            text = many + text[len(one) :]
    return text, fix


def _sentence(row: Explanation, when: str) -> tuple[str, str]:
    if row.reason is None:
        return (
            f"cannot be explained: shard {row.shard} answered {row.status.label}",
            FIXES.get(row.status, "`entresol doctor` tells more"),
        )
    text, fix = _SENTENCES[row.reason.label]
    return text.format(when=when), fix


def is_here(row: Explanation) -> bool:
    """True when the block could be read now."""
    return row.reason is not None and row.reason.label in ("in_memory", "on_flash")


def missing(what: str, ns: SyncNamespace, key: bytes, status: Status) -> CliError:
    """Why a block could not be had, asking the daemon where that tells more."""
    if status in (Status.MISS, Status.GAP):
        row = ns.explain([key])[0]
        if row.reason is not None and not is_here(row):
            text, fix = sentence(row)
            return CliError(f"{what} {text}", hint=fix)
    if status is Status.BAD_REQUEST:
        return CliError(
            f"{what} is stored with another length than the one that was asked for",
            hint="give its exact length in bytes",
        )
    return failure(f"{what} cannot be read", status)


def first_failure(statuses: Sequence[Status]) -> int:
    """Position of the block to talk about: the first that is neither OK nor a mere gap."""
    for position, status in enumerate(statuses):
        if status not in (Status.OK, Status.GAP, Status.EXISTS):
            return position
    return next((n for n, status in enumerate(statuses) if status is Status.GAP), 0)
