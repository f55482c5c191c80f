"""`entresol relay`: a tenant's events for routers, on ZMQ, until it is stopped.

Invariant: light to import, as every command; and it tells at its start what it publishes, where,
and who can read it.
"""

from __future__ import annotations

import argparse
import glob
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from entresol_client.cli import options, output, rpc
from entresol_client.cli.errors import UsageProblem
from entresol_client.relay import workers
from entresol_proto.status import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from entresol_client.config import ClientConfig
    from entresol_client.relay.service import Relay

SPANS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "": 1.0}
SPAN_S_MAX = 366 * 86_400.0
MEDIA = ("EXTERNAL", "STORAGE")
FORMS = ("array", "map", "maps")
BUFFER_BATCHES_MAX = 1_000_000
STATUS_S_DEFAULT = 10.0

EXAMPLES = """\
  entresol relay --list
  entresol relay --model my/model --worker pod0=5557,replay=5558
  entresol relay --model my/model --worker pod0=tcp://10.0.0.7:5557 --worker pod1=tcp://10.0.0.7:5559
  entresol relay --model my/model --worker pod0=tcp://router:5557,connect --block-tokens 16
"""
ABOUT = """\
Follows the tenant's events on every configured shard, and publishes which prefixes of one model
are stored, in the wire form of vLLM's KV events: a router that reads those (Dynamo, llm-d) reads
these. Routers credit blocks to workers, so give one --worker for each worker that can load them;
POD is the worker's name in the router.

Messages carry token ids, and ZMQ has no authentication: whoever reaches an endpoint reads them. A
port alone is on loopback.

Blocks without token ids, and blocks under a cache salt, cannot be matched to a prompt by a router;
they are counted and not published. client/ROUTERS.md has the whole story.

HUP: tell everything again. TERM, Ctrl-C: stop.

exit status: 0 stopped, 1 refused, 2 wrong use, 3 no daemon (--list; otherwise it waits for one).
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers,
        "relay",
        "publish events for routers, as vLLM does",
        about=ABOUT,
        examples=EXAMPLES,
        usage="--model M --worker POD=ENDPOINT[,replay=ENDPOINT] ... [options]",
    )
    parser.add_argument("--list", action="store_true", help="show what is stored, and stop")
    _add_what(parser)
    _add_where(parser)
    _add_behaviour(parser)
    options.add_common(parser)
    parser.set_defaults(run=run)


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is published")
    group.add_argument("--model", metavar="NAME", help="model, as in the namespace (see --list)")
    group.add_argument("--served-name", metavar="NAME", help="the router's name for it, if other")
    group.add_argument(
        "--match",
        metavar="FIELD=PATTERN",
        action="append",
        default=[],
        help="narrow to one layout where a model has several: model_revision, dtype, tp_world, ...",
    )
    group.add_argument(
        "--block-tokens",
        type=_count,
        default=0,
        metavar="N",
        help="the router's block size, if stored blocks are a multiple of it",
    )
    group.add_argument(
        "--salted", action="store_true", help="publish blocks under cache salts too (see ROUTERS)"
    )


def _add_where(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where and in which form")
    group.add_argument(
        "--worker",
        metavar="SPEC",
        action="append",
        default=[],
        help="POD=ENDPOINT[,replay=ENDPOINT][,dp=N][,connect]; once for every worker",
    )
    group.add_argument(
        "--medium", choices=MEDIA, default=MEDIA[0], help="the tier's name (default: %(default)s)"
    )
    group.add_argument(
        "--form", choices=FORMS, default=FORMS[0], help="array: positional (default), map, maps"
    )
    group.add_argument(
        "--hashes", choices=("int", "bytes"), default="int", help="of blocks (default: %(default)s)"
    )
    group.add_argument(
        "--replay-form",
        choices=("topic", "plain"),
        default="topic",
        help="topic: replies carry it, as vLLM from 0.26 (default); plain: they do not",
    )


def _add_behaviour(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("behaviour")
    group.add_argument(
        "--buffer",
        type=_count,
        default=10_000,
        metavar="N",
        help="messages held for replay (default: %(default)s)",
    )
    group.add_argument(
        "--keep",
        action="store_true",
        help="do not begin with AllBlocksCleared, which takes back all of a pod, the GPU's too",
    )
    group.add_argument(
        "--withdraw-after",
        type=_span,
        default=60.0,
        metavar="SPAN",
        help="withdraw the blocks of a shard that is away so long (default: 60s)",
    )
    group.add_argument(
        "--round-pause",
        type=_span,
        default=10.0,
        metavar="SPAN",
        help="at least so long between telling everything to new readers (default: 10s)",
    )
    group.add_argument(
        "--status", type=_span, default=STATUS_S_DEFAULT, metavar="SPAN",
        help="how often to tell the state, when it changed (default: 10s)",
    )  # fmt: skip
    group.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics there")


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= BUFFER_BATCHES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1..{BUFFER_BATCHES_MAX}")
    return int(text)


def _span(text: str) -> float:
    """Seconds. Raises: ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if not match or match[2] not in SPANS_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 500ms, 10s, 2min, 1h")
    found = float(match[1]) * SPANS_S[match[2]]
    if not 0 < found <= SPAN_S_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return found


def matches(words: list[str], model: str | None) -> dict[str, str]:
    """--match and --model as field -> pattern. Raises: UsageProblem."""
    from entresol_client.relay.layouts import MATCH_FIELDS

    found: dict[str, str] = {"model": glob.escape(model)} if model else {}
    for word in words:
        name, equals, pattern = word.partition("=")
        if not equals or not pattern or name not in MATCH_FIELDS or name in found:
            raise UsageProblem(
                f"--match {word!r} is not understood",
                hint=f"FIELD=PATTERN, each field once, of {', '.join(MATCH_FIELDS)}",
            )
        found[name] = pattern
    return found


def run(args: argparse.Namespace) -> int:
    """The command."""
    rpc.modules()
    found = matches(args.match, args.model)
    configuration = _reader(args)
    if args.list:
        return _list(args, configuration(), found)
    if not args.model:
        raise UsageProblem("no --model is given", hint="`entresol relay --list` shows them")
    chosen = [workers.parse_worker(text) for text in args.worker]
    workers.check_workers(chosen)
    served = args.served_name or args.model
    if "@" in served:
        raise UsageProblem(
            f"a topic cannot name {served!r}: @ divides it", hint="give another --served-name"
        )
    return _relay(args, found, chosen, served, configuration)


def _reader(args: argparse.Namespace) -> Callable[[], ClientConfig]:
    """Reads the configuration, again at every connection; the last good one while it is broken."""
    last = options.load_config(args)

    def read() -> ClientConfig:
        nonlocal last
        try:
            last = options.load_config(args)
        except ConfigError:
            return last  # it is being rewritten
        return last

    return read


def _list(args: argparse.Namespace, config: ClientConfig, found: dict[str, str]) -> int:
    """What is stored, by shard and namespace."""
    from entresol_client.relay import feed
    from entresol_client.relay.layouts import Chooser, words

    rows = []
    for shard in config.shards:
        _, pb, stubs = rpc.modules()
        with rpc.tenant_channel(config, shard) as channel:
            reply = rpc.call(stubs.EventsStub(channel).Namespaces, pb.NamespacesRequest())
        told = (one for one in reply.namespaces if not one.host_sealed)
        rows += [feed.namespace_info(shard.name, one) for one in told]
    chooser = Chooser(found)
    rows = [one for one in rows if chooser.matches(one)]
    if args.json:
        for one in rows:
            output.json_line(
                {
                    "type": "namespace", "shard": one.shard,
                    "namespace_id": one.namespace_id.hex(), **words(one.layout),
                    "lora": one.lora or None, "salted": one.salted, "tp_rank": one.tp_rank,
                    "pp_rank": one.pp_rank, "blocks": one.blocks,
                }
            )  # fmt: skip
        return 0
    head = ("shard", "blocks", "model", "revision", "tokens", "dtype", "rank", "layout", "lora")
    lines = [
        (
            one.shard, f"{one.blocks:,}", str(one.value("model")), str(one.value("model_revision")),
            str(one.value("block_tokens")), str(one.value("dtype")),
            f"{one.rank + 1}/{one.ranks}", str(one.value("page_layout")),
            one.lora + (" (salted)" if one.salted else ""),
        )
        for one in rows
    ]  # fmt: skip
    print("\n".join(output.table(head, lines, right=" r")) if rows else "nothing is stored")
    return 0


def _relay(
    args: argparse.Namespace,
    found: dict[str, str],
    chosen: list[workers.Worker],
    served: str,
    configuration: Callable[[], ClientConfig],
) -> int:
    from entresol_client.relay.service import Options, Relay

    relay = Relay(
        Options(
            workers=tuple(chosen),
            match=found,
            medium=args.medium,
            form=args.form,
            hashes_as_bytes=args.hashes == "bytes",
            block_tokens=args.block_tokens,
            with_salted=args.salted,
            replay_topic=args.replay_form == "topic",
            buffer_batches=args.buffer,
            clear=not args.keep,
            withdraw_after_s=args.withdraw_after,
            round_pause_s=args.round_pause,
        ),
        configuration,
        model=served,
    )
    teller = _Teller(args, relay)
    stop_metrics = _serve_metrics(args.metrics, relay) if args.metrics else None
    before = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGTERM, lambda *_: relay.stop()),
            (signal.SIGINT, lambda *_: relay.stop()),
            (signal.SIGHUP, lambda *_: relay.again()),
        )
    }
    try:
        teller.begin()
        relay.run(teller.turn)
    finally:
        relay.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        if stop_metrics is not None:
            stop_metrics()
    teller.end()
    return 0


def _serve_metrics(place: str, relay: Relay) -> Callable[[], None]:
    host, _, port = place.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        relay.close()
        raise UsageProblem(f"--metrics {place!r} is no address", hint="write 127.0.0.1:9401")
    from entresol_client.relay import metrics

    try:
        return metrics.serve(relay, host.strip("[]"), int(port))
    except BaseException:
        relay.close()
        raise


class _Teller:
    """Tells people or scripts what the relay does."""

    def __init__(self, args: argparse.Namespace, relay: Relay) -> None:
        self._json = args.json
        self._every_s = args.status
        self._relay = relay
        self._due_s = time.monotonic()
        self._last: dict[str, Any] = {}
        self._warned_others = False

    def begin(self) -> None:
        """Say what is published where."""
        state = self._relay.latest
        if self._json:
            output.json_line({**state, "type": "relay"})
        for outlet, row in zip(self._relay.publisher.outlets, state["workers"], strict=True):
            replay = f", replay {row['replay']}" if row["replay"] else ", no replay"
            output.note(f"entresol: {row['topic']} at {row['endpoint']}{replay}")
            if outlet.worker.open_to_others:
                output.note(
                    "entresol: anyone who reaches that address can read the tenant's token ids"
                )

    def turn(self, relay: Relay) -> None:
        """Called by the relay after every turn. Raises: UsageProblem."""
        relay.check_choice()
        if relay.chooser.others and not self._warned_others:
            self._warned_others = True
            output.note(
                "entresol: another layout of this model is stored and not published; "
                "`entresol relay --list` shows it, --match chooses"
            )
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self._every_s
            self._tell(relay.latest)

    def end(self) -> None:
        """The last words."""
        self._tell(self._relay.latest, always=True)
        sys.stdout.flush()

    def _tell(self, state: dict[str, Any], *, always: bool = False) -> None:
        news = {key: value for key, value in state.items() if key != "uptime_s"}
        if news == self._last and not always:
            return
        self._last = news
        if self._json:
            output.json_line(state)
            return
        blocks = state["blocks"]
        parts = [f"{blocks['announced']:,} of {output.plural(blocks['stored'], 'block')} announced"]
        if blocks["waiting"]:
            parts.append(f"{blocks['waiting']:,} wait for a parent or rank")
        parts += [
            f"{count:,} {name.replace('_', ' ')}"
            for name, count in state["counts"].items()
            if name.endswith("_blocks") and name not in ("announced_blocks", "withdrawn_blocks")
        ]
        parts += [
            f"shard {row['name']} {row['state']}" + (f" ({row['reason']})" if row["reason"] else "")
            for row in state["shards"]
            if row["state"] != "up"
        ]
        output.note("entresol: " + "; ".join(parts))
