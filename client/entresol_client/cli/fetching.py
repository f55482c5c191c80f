"""`entresol get`: blocks back into a file.

Invariant: the output file appears only when it is whole and its SHA-256 is the one that was stored;
a failed get leaves what was there before.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from entresol_client.cli import objects, options, output, session
from entresol_client.cli.errors import CliError, UsageProblem
from entresol_client.cli.objects import Head
from entresol_client.cli.storing import RETRY_S, TRIES_MAX, WINDOW_BYTES
from entresol_proto.status import Status

if TYPE_CHECKING:
    from entresol_client.results import OpenPlace
    from entresol_client.sync import SyncNamespace

RETRIED = frozenset({Status.BUSY, Status.LEASE_EXPIRED})

EXAMPLES = """\
  entresol get --name notes -o copy.bin
  entresol get --name backup -o - | tar x
  entresol get --key text:session-42 --length 65536 -o page.bin
  entresol get --name notes -o copy.bin --open-at daemon --json
"""
ABOUT = """\
Every block is verified where it is used; the SHA-256 of the whole is compared with the one that was
stored. When something is missing, the reason is asked for and told.

exit status: 0 all there, 1 missing (with the reason), 2 wrong use, 3 no daemon.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "get", "read back what put stored", about=ABOUT, examples=EXAMPLES,
        usage="(--name NAME | --key KEY --length SIZE) -o FILE|- [options]",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--name", help="name it was put under")
    which.add_argument("--key", metavar="HEX|text:WORDS", help="one block; needs --length")
    parser.add_argument(
        "--length",
        type=options.parse_block_size,
        metavar="SIZE",
        help="with --key: exact length of the block",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="where to; - is standard output"
    )
    parser.add_argument(
        "--open-at",
        choices=("host", "daemon"),
        default="host",
        help="where blocks are decrypted; daemon needs a private data path (default: host)",
    )
    options.add_deadline(parser)
    options.add_namespace(parser)
    options.add_common(parser)
    parser.set_defaults(run=run)


@dataclass(slots=True)
class Getter:
    """Gets blocks, retries what was shed, and counts."""

    ns: SyncNamespace
    open_at: OpenPlace
    deadline_ns: int
    seconds: float = 0.0  # in calls to the client
    wire_bytes: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)

    def get(self, keys: list[bytes], views: list[Any], what: Callable[[int], str]) -> None:
        """Fill every view. Raises: CliError naming the first block that cannot be had."""
        statuses: list[Status] = [Status.BUSY] * len(keys)
        todo = list(range(len(keys)))
        for attempt in range(TRIES_MAX):
            if attempt:
                time.sleep(RETRY_S * attempt)
            began_s = time.monotonic()
            result = self.ns.get_into(
                [keys[n] for n in todo],
                [views[n] for n in todo],
                deadline_ns=self.deadline_ns,
                prefix=False,
                open_at=self.open_at,
            )
            self.seconds += time.monotonic() - began_s
            self.wire_bytes += result.wire_bytes
            for position, status, tier in zip(todo, result.statuses, result.tiers, strict=True):
                statuses[position] = status
                if status is Status.OK:
                    self.tiers[tier.label] += 1
            todo = [n for n in todo if statuses[n] in RETRIED]
            if not todo:
                break
        self.statuses.update(status.label for status in statuses)
        if any(status is not Status.OK for status in statuses):
            bad = session.first_failure(statuses)
            raise session.missing(what(bad), self.ns, keys[bad], statuses[bad])


def read_head(ns: SyncNamespace, name: str, deadline_ns: int) -> Head:
    """What a name stands for. Raises: CliError with the reason when it is not stored."""
    raw = bytearray(objects.HEAD_BYTES)
    getter = Getter(ns, "host", deadline_ns)
    getter.get([objects.name_key(name)], [raw], lambda _: f"the name {name!r}")
    return Head.decode(raw)


def read_keys(ns: SyncNamespace, head: Head, name: str, deadline_ns: int) -> list[bytes]:
    """The keys of a file's blocks. Raises: CliError."""
    lists = [bytearray(head.list_length(number)) for number in range(len(head.list_keys()))]
    if lists:
        getter = Getter(ns, "host", deadline_ns)
        getter.get(head.list_keys(), list(lists), lambda _: f"the key list of {name!r}")
    return head.split_lists(lists)


def run(args: argparse.Namespace) -> int:
    """The command."""
    if args.key is not None and args.length is None:
        raise UsageProblem(
            "--key needs --length", hint="the exact length of the block, in bytes: it is verified"
        )
    if args.name is not None and args.length is not None:
        raise UsageProblem("--length belongs to --key; a name knows its length")
    key = objects.parse_key(args.key) if args.key is not None else None
    name_key = objects.name_key(args.name) if args.name is not None else None
    with session.open_namespace(args) as (client, ns):
        getter = Getter(ns, args.open_at, args.deadline)
        if key is not None:
            data = _get_single(getter, key, args)
        else:
            assert name_key is not None, "argparse requires one of the two"
            data = _get_file(getter, args)
        data["fabric"] = session.fabric_of(client)
    data |= {
        "statuses": dict(getter.statuses),
        "tiers": dict(getter.tiers),
        "opened_at": args.open_at,
        "wire_bytes": getter.wire_bytes,
        "seconds": round(getter.seconds, 6),
        "gigabytes_per_second": output.gigabytes_per_second(data["bytes"], getter.seconds),
    }
    lines = _lines(args, data, getter)
    to_stderr = args.output == "-"  # standard output holds the bytes
    output.answer(args.json, data, lines, to_stderr=to_stderr)
    return 0


def _lines(args: argparse.Namespace, data: dict[str, Any], getter: Getter) -> list[str]:
    tiers = ", ".join(f"{count} from {tier}" for tier, count in sorted(getter.tiers.items()))
    blocks = output.plural(data["blocks"], "block")
    lines = [
        f"got {output.size(data['bytes'])} in {blocks}: {tiers or 'nothing to read'}",
        f"sha256 {data['sha256']}" + ("  (as it was stored)" if args.name is not None else ""),
    ]
    if getter.wire_bytes:
        lines.append(
            f"{output.duration(getter.seconds * 1e9)}, "
            f"{output.rate(data['bytes'], getter.seconds)} over {data['fabric']}, "
            f"{output.size(getter.wire_bytes)} moved, opened at the {args.open_at}"
        )
    return lines


def _get_single(getter: Getter, key: bytes, args: argparse.Namespace) -> dict[str, Any]:
    plain = bytearray(args.length)
    getter.get([key], [plain], lambda _: f"key {args.key}")
    with _target(args.output) as target:
        _write(target, memoryview(plain))
    digest = hashlib.sha256(plain).hexdigest()
    return {"name": None, "key": key.hex(), "bytes": len(plain), "blocks": 1, "sha256": digest}


def _get_file(getter: Getter, args: argparse.Namespace) -> dict[str, Any]:
    head = read_head(getter.ns, args.name, args.deadline)
    keys = read_keys(getter.ns, head, args.name, args.deadline)
    digest = hashlib.sha256()
    step = max(1, WINDOW_BYTES // head.block_bytes)
    buffer = memoryview(bytearray(min(step * head.block_bytes, max(1, head.length_bytes))))

    def what(first: int) -> Callable[[int], str]:
        return lambda n: f"block {first + n} of {head.blocks} of {args.name!r}"

    with (
        _target(args.output) as target,
        output.Progress("get", total_bytes=head.length_bytes, forced=args.progress) as progress,
    ):
        done = 0
        for first in range(0, head.blocks, step):
            run_keys = keys[first : first + step]
            views = []
            at = 0
            for n in range(len(run_keys)):
                length = head.block_length(first + n)
                views.append(buffer[at : at + length])
                at += length
            getter.get(run_keys, views, what(first))
            digest.update(buffer[:at])
            _write(target, buffer[:at])
            done += at
            progress.update(done)
        if digest.digest() != head.sha256:
            raise CliError(
                f"the SHA-256 of {args.name!r} is not the one that was stored",
                hint="this is a bug: every block was verified; please report it",
                status=Status.CORRUPT,
            )
    return {
        "name": args.name,
        "bytes": head.length_bytes,
        "blocks": head.blocks,
        "block_bytes": head.block_bytes,
        "sha256": head.sha256.hex(),
    }


@contextlib.contextmanager
def _target(name: str) -> Iterator[BinaryIO]:
    """Standard output, or a file that replaces `name` only when the block ends well."""
    if name == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    if path.is_dir():
        raise UsageProblem(f"{name!r} is a folder", hint="name a file in it: -o FILE")
    if path.exists() and not path.is_file():  # a pipe or device: written as it comes
        try:
            with open(path, "wb") as file:
                yield file
        except BrokenPipeError:
            raise CliError(f"{name}: nobody reads it any more", status=Status.IO_ERROR) from None
        except OSError as error:
            raise _not_written(error) from None
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        file = open(part, "wb")  # noqa: SIM115 - closed below; opening has an error of its own
    except OSError as error:
        raise UsageProblem(f"cannot write {name!r}: {error.strerror}") from None
    try:
        with file:
            yield file
        os.replace(part, path)
    except OSError as error:  # also of what was buffered
        part.unlink(missing_ok=True)
        raise _not_written(error) from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write(target: BinaryIO, view: memoryview) -> None:
    try:
        target.write(view)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _not_written(error) from None


def _not_written(error: OSError) -> CliError:
    return CliError(
        f"writing failed: {error.strerror or error}",
        hint="make room, or write somewhere else: -o",
        status=Status.IO_ERROR,
    )
