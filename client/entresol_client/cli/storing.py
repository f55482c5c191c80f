"""`entresol put`: a file into blocks.

Invariant: success means that every block could be read at the end, head included; a name that
stands for other content is never changed unless asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from entresol_client.cli import objects, options, output, session
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_client.cli.objects import Head
from entresol_proto import limits
from entresol_proto.status import Status

if TYPE_CHECKING:
    from entresol_client.results import AckLevel, PutBlock
    from entresol_client.sync import Client, SyncNamespace

WINDOW_BYTES = 32 * limits.MIB  # given to the client at once
TRIES_MAX = 4
RETRY_S = 0.2
RETRIED = frozenset({Status.BUSY})

EXAMPLES = """\
  entresol put notes.bin --name notes         then: entresol get --name notes -o copy.bin
  tar c dir | entresol put - --name backup    from standard input
  entresol put kv.bin --model llama-3.1-8b --dtype bf16 --name prompt-1
  entresol put page.bin --key 00112233445566778899aabbccddeeff     one block, your own key
  entresol put page.bin --key text:session-42                      one block, key made from text
  entresol put big.bin --name big --ack durable --json
"""
ABOUT = """\
The file is cut into blocks whose keys form a chain, as in a prefix cache: files with the same
beginning share blocks, and what is stored already moves no bytes. With --name, a small head stored
under the name lets `get --name` find everything again; without it, the name is made from the
content and printed. With --key, the whole file is one block under exactly that key.

exit status: 0 stored (or there already), 1 not stored, 2 wrong use, 3 no daemon.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "put", "store a file as a chain of blocks", about=ABOUT, examples=EXAMPLES,
        usage="FILE|- [--name NAME | --key KEY] [options]",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="what to store; - is standard input")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--name", help="name to find it again (default: made from the content)")
    which.add_argument(
        "--key",
        metavar="HEX|text:WORDS",
        help="the whole file as one block under this engine key, 8 to 64 bytes",
    )
    parser.add_argument(
        "--block",
        type=options.parse_block_size,
        metavar="SIZE",
        help="bytes of a block, 1B to 64MiB and at most what the daemon takes (default: 1MiB); "
        "not with --key",
    )
    parser.add_argument(
        "--ack",
        choices=("accepted", "durable"),
        default="accepted",
        help="wait until readable, or until on flash and flushed (default: accepted; both are the "
        "latter for a block that was there a moment ago and may still be on flash)",
    )
    parser.add_argument(
        "--replace", action="store_true", help="let the name stand for this content from now on"
    )
    options.add_deadline(parser)
    options.add_namespace(parser)
    options.add_common(parser)
    parser.set_defaults(run=run)


@dataclass(slots=True)
class Tally:
    """What a put did so far."""

    bytes: int = 0
    stored: int = 0
    existed: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0  # in calls to the client
    statuses: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Putter:
    """Puts blocks, retries what was shed, and counts."""

    ns: SyncNamespace
    ack: AckLevel
    deadline_ns: int
    tally: Tally = field(default_factory=Tally)
    client: Client | None = None  # to ask how long a block may be
    single: bool = False  # the file is one block

    def put(self, items: list[PutBlock], what: str = "") -> list[Status]:
        """Store all of `items`; without `what` they are blocks of a file.

        Raises: CliError with the first refusal.
        """
        statuses: list[Status] = [Status.BUSY] * len(items)
        todo = list(range(len(items)))
        for attempt in range(TRIES_MAX):
            if attempt:
                time.sleep(RETRY_S * attempt)
            began_s = time.monotonic()
            result = self.ns.put(
                [items[n] for n in todo], ack=self.ack, deadline_ns=self.deadline_ns
            )
            self.tally.seconds += time.monotonic() - began_s
            self.tally.stored += result.stored
            self.tally.existed += result.existed
            self.tally.wire_bytes += result.wire_bytes
            for position, status in zip(todo, result.statuses, strict=True):
                statuses[position] = status
            todo = [n for n in todo if statuses[n] in RETRIED]
            if not todo:
                break
        self.tally.statuses.update(status.label for status in statuses)
        refused = [n for n, s in enumerate(statuses) if s not in (Status.OK, Status.EXISTS)]
        if refused:
            bad = statuses[session.first_failure(statuses)]
            said = f"{what} was" if what else _blocks_were([items[n].position for n in refused])
            hint = ""
            if bad is Status.TOO_LARGE:
                hint = self._too_large(max(len(items[n].buffer) for n in refused))
            raise session.failure(f"{said} not stored", bad, hint=hint)
        return statuses

    def quiet(self) -> Putter:
        """The same for what is not the file's own: counted apart."""
        return replace(self, tally=Tally())

    def _too_large(self, length_bytes: int) -> str:
        """What to do about a block of this length."""
        limit = session.block_bytes_max(self.client) if self.client is not None else 0
        if not limit:
            return ""
        if length_bytes <= limit:
            return "a block must fit into half of staging_bytes_max of the client's configuration"
        fix = "use --name instead of --key" if self.single else f"use --block {limit} or less"
        return f"the daemon takes blocks of up to {output.size(limit)}: {fix}"


def _blocks_were(numbers: Sequence[int]) -> str:
    """ "block 3 was", "blocks 0 to 4 were", "2 of blocks 0 to 4 were"."""
    if len(numbers) == 1:
        return f"block {numbers[0]} was"
    text = f"blocks {numbers[0]} to {numbers[-1]} were"
    whole = numbers[-1] - numbers[0] + 1 == len(numbers)
    return text if whole else f"{len(numbers)} of {text}"


def run(args: argparse.Namespace) -> int:
    """The command."""
    key = objects.parse_key(args.key) if args.key is not None else None
    if key is not None and args.block is not None:
        raise UsageProblem(
            "--block does not go with --key, which makes the whole file one block",
            hint="use --name instead of --key to store it as a chain of blocks",
        )
    args.block = args.block or objects.BLOCK_BYTES_DEFAULT
    head_key = objects.name_key(args.name) if args.name is not None else None
    staging_bytes = limits.BLOCK_BYTES_MAX + limits.MIB if key is not None else 0
    staging_bytes = max(WINDOW_BYTES, staging_bytes or 2 * args.block + limits.MIB)
    with (
        _source(args.file) as source,
        session.open_namespace(args, staging_bytes=staging_bytes) as (client, ns),
    ):
        putter = Putter(ns, args.ack, args.deadline, client=client, single=key is not None)
        if key is not None:
            data = _put_single(putter, source, key, args)
        else:
            data = _put_file(putter, source, head_key, args)
        data["fabric"] = session.fabric_of(client)
    tally = putter.tally
    data |= {
        "stored_blocks": tally.stored,
        "existed_blocks": tally.existed,
        "statuses": dict(tally.statuses),
        "wire_bytes": tally.wire_bytes,
        "seconds": round(tally.seconds, 6),
        "gigabytes_per_second": output.gigabytes_per_second(data["bytes"], tally.seconds),
    }
    output.answer(args.json, data, _lines(args, data, tally))
    return 0


def _lines(args: argparse.Namespace, data: dict[str, Any], tally: Tally) -> list[str]:
    blocks = output.plural(data["blocks"], "block")
    already = f", {tally.existed} of them there already" if tally.existed else ""
    where = f"name {data['name']}" if data["name"] else f"key {data['key']}"
    if data["name"]:
        again = f"entresol get --name {_quoted(data['name'])}"
    else:
        again = f"entresol get --key {data['key']} --length {data['bytes']}"
    lines = [
        f"stored {output.size(data['bytes'])} in {blocks}{already}  ({where})",
        f"sha256 {data['sha256']}",
    ]
    if tally.wire_bytes:
        lines.append(
            f"{output.duration(tally.seconds * 1e9)}, "
            f"{output.rate(data['bytes'], tally.seconds)} over {data['fabric']}, "
            f"{output.size(tally.wire_bytes)} moved, ack {args.ack}"
        )
    else:
        lines.append("nothing had to be moved")
    lines.append(f"get it back: {again} -o FILE{options.namespace_words(args)}")
    return lines


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


@contextlib.contextmanager
def _source(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 - closed below; opening has an error of its own
    except OSError as error:
        hint = "tar c DIR | entresol put - --name NAME" if os.path.isdir(name) else ""
        raise UsageProblem(f"cannot read {name!r}: {error.strerror}", hint=hint) from None
    with file:
        yield file


def _read_into(source: BinaryIO, view: memoryview) -> int:
    """Fill the view as far as the source goes."""
    done = 0
    while done < len(view):
        try:
            count = source.readinto(view[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise CliError(f"reading failed: {error.strerror}", status=Status.IO_ERROR) from None
        if count is None:  # not blocking, and nothing is there yet: that is not the end
            select.select([source], [], [])
            continue
        if not count:
            break
        done += count
    return done


def _length_of(source: BinaryIO) -> int:
    """Bytes of a regular file; 0 when that is not known."""
    import stat

    try:
        info = os.fstat(source.fileno())
    except (OSError, ValueError):
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def _put_single(
    putter: Putter, source: BinaryIO, key: bytes, args: argparse.Namespace
) -> dict[str, Any]:
    from entresol_client.results import PutBlock

    buffer = bytearray(limits.BLOCK_BYTES_MAX + 1)
    length = _read_into(source, memoryview(buffer))
    if length > limits.BLOCK_BYTES_MAX:
        raise UsageProblem(
            f"one block holds at most {output.size(limits.BLOCK_BYTES_MAX)}",
            hint="use --name instead of --key to store it as a chain of blocks",
        )
    if not length:
        raise UsageProblem("there is nothing to store: a block has at least one byte")
    plain = memoryview(buffer)[:length]
    if args.replace:
        putter.ns.forget([key], deadline_ns=args.deadline)
    statuses = putter.put([PutBlock(key, plain)], f"key {args.key}")
    digest = hashlib.sha256(plain).hexdigest()
    if statuses[0] is Status.EXISTS:
        _check_same(putter, key, plain, args)
    return {"name": None, "key": key.hex(), "bytes": length, "blocks": 1, "sha256": digest}


def _check_same(putter: Putter, key: bytes, plain: memoryview, args: argparse.Namespace) -> None:
    """The key was there already: it must hold these very bytes. Raises: CliError."""
    found = bytearray(len(plain))
    result = putter.ns.get_into([key], [found], deadline_ns=args.deadline)
    if result.statuses[0] is Status.OK and memoryview(found) == plain:
        return
    if result.statuses[0] not in (Status.OK, Status.BAD_REQUEST):
        raise session.missing(f"key {args.key}", putter.ns, key, result.statuses[0])
    raise CliError(
        f"key {args.key} is stored already, with other bytes",
        hint="the first writer wins; --replace drops what is there first",
        status=Status.CONFLICT,
    )


def _put_file(
    putter: Putter, source: BinaryIO, head_key: bytes | None, args: argparse.Namespace
) -> dict[str, Any]:
    keys, digest = _put_chain(putter, source, args)
    raw_keys = b"".join(keys)
    head = Head(putter.tally.bytes, args.block, digest, hashlib.sha256(raw_keys).digest())
    name = args.name if args.name is not None else digest.hex()[:16]
    _put_lists(putter, head, raw_keys, name)
    _put_head(putter, head, head_key or objects.name_key(name), name, args)
    _check_complete(putter, keys, name)
    return {
        "name": name,
        "key": keys[-1].hex() if keys else None,
        "bytes": head.length_bytes,
        "blocks": head.blocks,
        "block_bytes": head.block_bytes,
        "sha256": digest.hex(),
    }


def _put_chain(
    putter: Putter, source: BinaryIO, args: argparse.Namespace
) -> tuple[list[bytes], bytes]:
    """All data blocks, a window at a time; returns their keys and the SHA-256 of the whole."""
    from entresol_client.results import PutBlock

    block_bytes: int = args.block
    buffer = memoryview(bytearray(max(1, WINDOW_BYTES // block_bytes) * block_bytes))
    digest, keys = hashlib.sha256(), list[bytes]()
    parent = b""
    with output.Progress("put", total_bytes=_length_of(source), forced=args.progress) as progress:
        while length := _read_into(source, buffer):
            items = []
            for at in range(0, length, block_bytes):
                plain = buffer[at : min(length, at + block_bytes)]
                digest.update(plain)
                key = objects.chain_key(parent, plain)
                items.append(PutBlock(key, plain, len(keys), parent or None))
                keys.append(key)
                parent = key
            if len(keys) > objects.BLOCKS_PER_FILE_MAX:
                raise UsageProblem(
                    f"that is more than {objects.BLOCKS_PER_FILE_MAX} blocks",
                    hint="use larger blocks: --block 64MiB",
                )
            putter.put(items)
            putter.tally.bytes += length
            progress.update(putter.tally.bytes)
            if length < len(buffer):
                break
    return keys, digest.digest()


def _put_lists(putter: Putter, head: Head, raw_keys: bytes, name: str) -> None:
    from entresol_client.results import PutBlock

    step = objects.KEYS_PER_LIST * objects.KEY_BYTES
    items = [
        PutBlock(key, raw_keys[number * step : (number + 1) * step])
        for number, key in enumerate(head.list_keys())
    ]
    if items:
        putter.quiet().put(items, f"the key list of {name}")


def _put_head(
    putter: Putter, head: Head, head_key: bytes, name: str, args: argparse.Namespace
) -> None:
    """The name, unless it stands for this content already. Raises: CliError when for other."""
    from entresol_client.results import PutBlock

    quiet = putter.quiet()
    item = PutBlock(head_key, head.encode())
    statuses = quiet.put([item], f"the head of {name}")
    if statuses[0] is Status.OK:
        return
    found = bytearray(objects.HEAD_BYTES)
    result = putter.ns.get_into([head_key], [found], deadline_ns=args.deadline)
    if result.statuses[0] is Status.OK and bytes(found) == head.encode():
        return
    if not args.replace:
        if result.statuses[0] not in (Status.OK, Status.BAD_REQUEST):
            raise session.missing(f"the head of {name}", putter.ns, head_key, result.statuses[0])
        raise CliError(
            f"the name {name!r} stands for other content already",
            hint="--replace lets it stand for this file from now on, or choose another --name",
            status=Status.CONFLICT,
        )
    putter.ns.forget([head_key], deadline_ns=args.deadline)
    if quiet.put([item], f"the head of {name}")[0] is not Status.OK:
        raise CliError(
            f"somebody else stored the name {name!r} at the same moment",
            hint="try again",
            status=Status.CONFLICT,
        )


def _check_complete(putter: Putter, keys: list[bytes], name: str) -> None:
    """What was stored first may have been evicted by what came later. Raises: CliError."""
    if not keys:
        return
    found = putter.ns.exists(keys, deadline_ns=putter.deadline_ns)
    if not found.complete:
        raise Unreachable(
            f"{name} was accepted, but whether all of it is there could not be asked: not every "
            "shard answered",
            hint="`entresol exists` when all of them are up",
        )
    gone = found.present.count(False)
    if gone:
        row = putter.ns.explain([keys[found.present.index(False)]])[0]
        text, _ = session.sentence(row)
        raise CliError(
            f"{name} does not fit: {output.plural(gone, 'block')} of {len(keys)} are gone again; "
            f"the first of them {text}",
            hint="a larger quota (`entresol tenant quota`), or more flash for the daemon",
            status=Status.QUOTA,
        )
