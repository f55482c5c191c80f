"""`entresol top`: how a daemon is doing, live in a terminal, as text or as JSON.

Invariant: whatever ends it (q, Ctrl-C, an error) leaves the terminal as it was; a daemon that goes
away is shown as such, and again when it is back. What is read is bounded, and safe to print.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import select
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from entresol_client.cli import options, output
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_client.cli.top_frame import HISTORY_MAX, Screen, frame
from entresol_client.cli.top_reading import (
    FORMAT,
    Pair,
    Price,
    rates,
    text_of,
    verdict,
    writes_per_day,
)

DOCUMENT_BYTES_MAX = 4 * 1024 * 1024
ANSWER_DEADLINE_S = 10.0
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.2, 3600
ONCE_READS_MAX = 5  # for another overview than the first: a daemon asked often makes two a second
PREFILL_RATE_MIN, PREFILL_RATE_MAX = 1e-3, 1e12
KEYS_EACH_S = 0.25  # how soon a key or another size of the window is noticed
PATH = "/overview.json"
PACKAGED = "http://127.0.0.1:7443"  # of the package's daemon, on its machine
_ABOUT = """\
One line says whether the tier is healthy, how full and how fast it is, what share of blocks it had,
and what prefill it saves; below it are bytes, where blocks were found and why not, memory and flash
with a map of its segments, the write budget and wear, what waits, tenants and the last events. q
ends it, the space bar stops and goes on.

It reads /overview.json beside the daemon's metrics: `metrics` of the shard in the configuration,
http://127.0.0.1:7443 where there is none, or --url. Prefill saved is what computing the same tokens
would have taken: --model (or --token-bytes) says what a token weighs, --prefill-rate how many your
GPU computes in a second.

exit status: 0 shown, 1 the daemon is not well (--once), 2 wrong use, 3 no daemon.
"""
_EXAMPLES = """\
  entresol top
  entresol top --model llama-3.1-8b --prefill-rate 12000
  entresol top --once
  entresol top --json --interval 10 | jq -c .rates
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "top", "watch how the daemon is doing", about=_ABOUT, examples=_EXAMPLES
    )
    parser.add_argument("--url", help="base address of the daemon's metrics, http://HOST:PORT")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SPAN",
        help="from one frame to the next, such as 500ms or 10s (default: 1s)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="one frame as text, after one interval")
    parser.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")
    parser.add_argument("--model", metavar="NAME", help="whose KV it holds, as `entresol size`")
    parser.add_argument(
        "--token-bytes", type=int, default=0, metavar="N", help="bytes of a token, instead of it"
    )
    parser.add_argument(
        "--dtype", default="bf16", metavar="NAME", help="of the cache (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill-rate", type=float, default=0.0, metavar="N",
        help="tokens per second that a GPU computes of a prompt",
    )  # fmt: skip
    options.add_shard(parser)
    options.add_common(parser)
    parser.set_defaults(run=run)


def _interval(words: str) -> float:
    found_s = options.parse_span_ns(words, most_s=INTERVAL_S_MAX) / 1e9
    if found_s < INTERVAL_S_MIN:
        raise argparse.ArgumentTypeError(f"{words!r} is less than {INTERVAL_S_MIN} s")
    return found_s


def run(args: argparse.Namespace) -> int:
    """The command."""
    price, source = _price(args), Source(_address(args))
    if args.once:
        return _once(args, source, price)
    source.read()  # a daemon that is not there is an error; one that goes away is shown
    if args.json or not sys.stdout.isatty():
        return _stream(args, source, price)
    return _watch(args, source, price)


def _price(args: argparse.Namespace) -> Price:
    """Raises: UsageProblem, SizingError."""
    from entresol_client.sizing import models, tier

    rate = args.prefill_rate
    if rate != 0 and not PREFILL_RATE_MIN <= rate <= PREFILL_RATE_MAX:  # also what is no number
        raise UsageProblem(f"no GPU computes {rate} tokens/s", hint="--prefill-rate 12000")
    if args.token_bytes < 0:
        raise UsageProblem("a negative size", hint="--token-bytes 131072")
    if not args.model:
        return Price(args.token_bytes, args.prefill_rate)
    if args.dtype not in tier.ELEMENT_BYTES:
        names = ", ".join(tier.ELEMENT_BYTES)
        raise UsageProblem(f"no dtype is called {args.dtype!r}", hint=f"--dtype {names}")
    token_bytes = models.named(args.model).token_bytes(tier.ELEMENT_BYTES[args.dtype])
    return Price(token_bytes, args.prefill_rate)


def _address(args: argparse.Namespace) -> str:
    """The base address. Raises: UsageProblem."""
    if args.url:
        return str(args.url)
    if not options.is_configured(args) and not args.shard:
        return PACKAGED
    config = options.load_config(args)
    shard = options.pick_shard(config.shards, args.shard)
    if not shard.metrics:
        raise UsageProblem(
            f"the configuration names no metrics address for shard {shard.name}",
            hint='metrics = "http://HOST:7443" in its [[shards]] table, or --url',
        )
    return shard.metrics


class Source:
    """Where overviews come from. Raises: UsageProblem for an address that is none."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname or "", 80 if parts.port is None else parts.port
            host.encode("idna")
            good = parts.scheme == "http" and bool(host) and port > 0 and not parts.username
        except ValueError:  # of brackets, a port or a name that is none
            good = False
        if not good or any(char.isspace() or not char.isprintable() for char in url):
            raise UsageProblem(f"{url!r} is not an address", hint="http://HOST:PORT")
        self.where = f"{host}:{port}"
        self._host, self._port = host, port

    def read(self) -> dict[str, Any]:
        """One overview. Raises: Unreachable, CliError."""
        link = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_DEADLINE_S)
        try:
            link.request("GET", PATH)
            answer = link.getresponse()
            raw = answer.read(DOCUMENT_BYTES_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or text_of(error) or type(error).__name__
            raise Unreachable(
                f"no daemon answers at {self.where}: {why}",
                hint="is it running? [listen] metrics_host and metrics_port say where it listens",
            ) from None
        finally:
            link.close()
        if answer.status == 404:
            raise CliError(f"{self.where} has no overview", hint="its daemon is older than that")
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if answer.status != 200 or not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CliError(
                f"{self.where} gives no overview that is understood ({answer.status})",
                hint="is that a daemon's metrics address, of this version?",
            )
        return found


def _data(now: Mapping[str, Any], before: Mapping[str, Any] | None, price: Price) -> dict[str, Any]:
    recent = rates(before, now)
    word, why = verdict(now, recent)
    told: dict[str, Any] = {"verdict": word.name.lower(), "why": why, "overview": dict(now)}
    told["drive_writes_per_day"] = dict(
        zip(("now", "mean"), writes_per_day(now, recent), strict=True)
    )
    if recent is not None:
        names = recent.__slots__
        told["rates"] = {name: getattr(recent, name) for name in names}
        told["rates"]["hit_rate"] = recent.hit_rate
        told["rates"]["prefill_saved_s"] = price.seconds(recent.out_bytes or 0.0)
    return told


def _screen(args: argparse.Namespace, *, live: bool) -> Screen:
    size = shutil.get_terminal_size((120, 50))
    encoding = (sys.stdout.encoding or "").lower()
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM", "") in ("", "dumb")
    return Screen(
        columns=max(40, size.columns),
        lines=size.lines - 1 if live else 10_000,
        colour=live and not (plain and os.environ.get("NO_COLOR", "1")),
        unicode=not args.ascii and encoding.startswith("utf"),
    )


def _once(args: argparse.Namespace, source: Source, price: Price) -> int:
    pair = Pair()
    pair.add(source.read())
    for _ in range(ONCE_READS_MAX):
        time.sleep(args.interval)
        if pair.add(source.read()):
            break
    now, before = pair.now, pair.before
    assert now is not None
    lines = frame(now, before, _screen(args, live=False), price=price)
    output.answer(args.json, _data(now, before, price), lines)
    return 1 if verdict(now, rates(before, now))[0].grade else 0


def _stream(args: argparse.Namespace, source: Source, price: Price) -> int:
    """Frames or JSON one after the other, until whoever reads them has enough."""
    pair = Pair()
    while True:
        try:
            pair.add(source.read())
        except CliError as error:
            output.note(f"entresol: {Exception.__str__(error)}")
        else:
            assert pair.now is not None
            if args.json:
                output.json_line(_data(pair.now, pair.before, price))
            else:
                screen = _screen(args, live=False)
                print("\n".join([*frame(pair.now, pair.before, screen, price=price), ""]))
                sys.stdout.flush()
        time.sleep(args.interval)


def _watch(args: argparse.Namespace, source: Source, price: Price) -> int:
    pair = Pair()
    history: deque[tuple[float, float]] = deque(maxlen=HISTORY_MAX)
    problem, due_s, shown, paused = "", 0.0, (0, 0), False
    with _terminal() as keys:
        while True:
            if time.monotonic() >= due_s and not paused:
                try:
                    found = source.read()
                except CliError as error:
                    problem = Exception.__str__(error)
                else:
                    problem = ""
                    recent = rates(pair.before, found) if pair.add(found) else None
                    if recent is not None:
                        history.append((recent.out_bytes or 0.0, recent.in_bytes or 0.0))
                due_s, shown = time.monotonic() + args.interval, (0, 0)
            size = tuple(shutil.get_terminal_size())
            if size != shown:
                screen = _screen(args, live=True)
                both = pair.now, pair.before
                _draw(frame(*both, screen, price=price, history=history, problem=problem))
                shown = (size[0], size[1])
            left_s = KEYS_EACH_S if paused else due_s - time.monotonic()
            pressed = _key(keys, max(0.01, min(KEYS_EACH_S, left_s)))
            if pressed in (b"q", b"Q", b"\x03"):
                return 0
            if pressed == b" ":
                paused = not paused


def _draw(lines: list[str]) -> None:
    """In one write, each line over the one before: nothing is cleared that is drawn again."""
    body = "".join(f"{line}\033[K\r\n" for line in lines)
    sys.stdout.write(f"\033[H{body}\033[J")
    sys.stdout.flush()


def _key(keys: int, seconds: float) -> bytes:
    if keys < 0:
        time.sleep(seconds)
        return b""
    ready, _, _ = select.select([keys], [], [], seconds)
    return os.read(keys, 1) if ready else b""


@contextlib.contextmanager
def _terminal() -> Iterator[int]:
    """The other screen, no cursor, keys as they are pressed; all put back at the end. Gives the
    descriptor of the keyboard, or -1 where there is none."""
    import termios
    import tty

    keys = sys.stdin.fileno() if sys.stdin.isatty() else -1
    kept = termios.tcgetattr(keys) if keys >= 0 else None
    try:
        if keys >= 0:
            tty.setcbreak(keys)
        sys.stdout.write("\033[?1049h\033[?25l")
        yield keys
    finally:
        sys.stdout.write("\033[?25h\033[?1049l")
        sys.stdout.flush()
        if kept is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, kept)
