"""What `entresol size` says: the answer as lines for a person and as JSON.

Invariant: decimal units for what is bought (drives, links), both kinds where a size is quoted
elsewhere in either; what was assumed is told last, with the option that changes it.
"""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from entresol_client.cli import output
from entresol_client.sizing.tier import (
    INDEX_BYTES_PER_BLOCK,
    MEASURED_RATIOS,
    fetch_s,
)

if TYPE_CHECKING:
    from entresol_client.sizing.shapes import KvShape
    from entresol_client.sizing.tier import Context, Flow, Footprint, Hardware, Use
    from entresol_client.sizing.worth import Worth

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_YEARS_SHOWN_MAX = 100
_TRAFFIC = ("dwpd", "warranty", "active", "peak", "answer_tokens", "years")
# Option: how its value is told.
_ASSUMED = {
    "dwpd": "{} drive writes per day",
    "warranty": "{} years of warranty",
    "drives_per_shard": "{} drives per shard",
    "link": "{} Gb/s per shard",
    "link_share": "{} of a link for payload",
    "headroom": "{} of flash kept free",
    "hit_rate": "{} of tokens from the tier",
    "active": "{} of users at a time",
    "peak": "a peak of {} x the mean",
    "answer_tokens": "{} new tokens stored per turn",
    "prefill_share": "{} of GPU time in prefill",
    "fetch_cost": "{} of a prompt's GPU time for a fetch",
    "years": "{} years to pay the hardware",
}
_DEFAULTS = {
    "dwpd": 1.0, "warranty": 5.0, "drives_per_shard": 8, "link": 400.0, "link_share": 0.9,
    "headroom": 0.1, "hit_rate": 0.5, "active": 1.0, "peak": 1.0, "answer_tokens": 0,
    "prefill_share": 0.5, "fetch_cost": 3 / 62, "years": 5.0,
}  # fmt: skip
_SHARES = ("link_share", "headroom", "hit_rate", "active", "prefill_share", "fetch_cost")


@dataclass(frozen=True, slots=True)
class Answer:
    """All that was found, and the arguments it was found with."""

    context: Context
    use: Use
    hardware: Hardware
    held: Footprint
    moved: Flow | None
    costs: Worth
    gains: dict[str, float]
    arguments: dict[str, Any]


def decimal(length_bytes: float) -> str:
    """As drives and networks are sold: 65.5 GB."""
    value = float(length_bytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} {_UNITS[-1]}"


def both(length_bytes: int) -> str:
    """65.5 GB (61.0 GiB)."""
    return f"{decimal(length_bytes)} ({output.size(length_bytes)})"


def models(shapes: Iterable[KvShape]) -> list[str]:
    """The table of well-known models."""
    rows = []
    for shape in shapes:
        window = ", ".join(
            f"{group.layers} layers see {group.window_tokens:,}"
            for group in shape.groups
            if group.window_tokens
        )
        most = f"{shape.context_max_tokens:,}" if shape.context_max_tokens else "?"
        kind = window or ("one latent per layer (MLA)" if shape.is_latent else "")
        rows.append((shape.name, f"{shape.token_bytes(2):,}", most, kind))
    head = ("model", "bytes/token", "context max", "")
    return [
        *output.table(head, rows, right="lrrl"), "",
        "bytes per token of 2 bytes an element, every layer; sources: --json, client/SIZING.md",
    ]  # fmt: skip


def data(answer: Answer) -> dict[str, Any]:
    """The answer as JSON: plain numbers, units in the names."""
    context, shape = answer.context, answer.context.shape
    found: dict[str, Any] = {
        "model": None,
        "dtype": answer.arguments["dtype"],
        "context_tokens": context.tokens,
        "token_bytes": shape.token_bytes(context.element_bytes) if shape else None,
        "stored_token_bytes": context.stored_token_bytes or None,
        "context_bytes": context.whole_bytes,
        "context_needed_bytes": context.needed_bytes,
        "context_fetch_s": fetch_s(context, answer.use, answer.hardware),
        "use": asdict(answer.use),
        "hardware": asdict(answer.hardware),
        "footprint": asdict(answer.held)
        | {"index_bytes_per_shard": answer.held.index_bytes_per_shard},
        "flow": asdict(answer.moved) if answer.moved else None,
        "costs": asdict(answer.costs),
        "more_tokens_per_dollar": answer.gains,
        "assumed": {name: answer.arguments[name] for name in _assumed(answer)},
    }
    if shape is not None:
        found["model"] = asdict(shape)
    finite: dict[str, Any] = output.finite(found)  # JSON knows no infinity
    return finite


def lines(answer: Answer) -> list[str]:
    """The answer for a person."""
    told = [*_model_lines(answer), *_tier_lines(answer)]
    if answer.moved is not None:
        told += _flow_lines(answer, answer.moved)
    told += _worth_lines(answer)
    width = max(60, min(shutil.get_terminal_size().columns, 98))
    for note in _notes(answer):
        told += [
            "",
            *textwrap.wrap(f"note: {note}", width, subsequent_indent="  ", break_on_hyphens=False),
        ]
    assumed = ", ".join(
        f"{_ASSUMED[name].format(_shown(name, answer.arguments[name]))} "
        f"(--{name.replace('_', '-')})"
        for name in _assumed(answer)
    )
    if not assumed:
        return told
    return [
        *told,
        "",
        *textwrap.wrap(
            f"assumed: {assumed}", width, subsequent_indent="  ", break_on_hyphens=False
        ),
    ]


def _block(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [title, *(f"  {line}" for line in output.pairs([(f"{a:<11}", b) for a, b in rows]))]


def _model_lines(answer: Answer) -> list[str]:
    context, shape = answer.context, answer.context.shape
    if shape is None:
        return _block("as given", [("per context", both(context.whole_bytes))])
    token = shape.token_bytes(context.element_bytes)
    heads = {f"{group.heads} KV heads" if group.heads else "one latent" for group in shape.groups}
    sizes = {str(group.head_values // (2 if group.heads else 1)) for group in shape.groups}
    title = (
        f"{shape.name}: {shape.layers} layers, {' and '.join(sorted(heads))} of "
        f"{' and '.join(sorted(sizes))}, {answer.arguments['dtype']}"
    )
    rows = [("per token", f"{token:,} bytes ({output.size(token)})")]
    if context.ranks > 1:
        rank = shape.rank_token_bytes(context.element_bytes, context.ranks)
        times = "once" if context.copies == 1 else f"{context.copies:g} times"
        rows.append(
            ("each rank", f"{output.size(rank)} on each of {context.ranks}; stored {times}")
        )
    rows.append(("per context", f"{both(context.whole_bytes)} of {context.tokens:,} tokens"))
    if shape.windowed_layers:
        share = f"{shape.windowed_layers} of {shape.layers} layers have a window"
        rows.append(("to go on", f"{both(context.needed_bytes)}: {share}"))
    link = f"{answer.hardware.link_gbit_per_s:g} Gb/s"
    seconds = fetch_s(context, answer.use, answer.hardware)
    rows.append(("to fetch", f"{output.duration(seconds * 1e9)} over an idle link of {link}"))
    return _block(title, rows)


def _tier_lines(answer: Answer) -> list[str]:
    use, held, hardware = answer.use, answer.held, answer.hardware
    ratio = "no codec" if use.ratio == 1 else f"{use.ratio:g}:1"
    rows = [
        ("contexts", f"{use.users:,} users x {use.retention:g} = {decimal(held.plain_bytes)}"),
        ("stored", f"{decimal(held.stored_bytes)} ({ratio}), "
                   f"{decimal(held.raw_bytes)} with room kept free"),
        ("drives", f"{held.drives:,} of {hardware.drive_bytes / 1e12:g} TB, "
                   f"in {output.plural(held.shards, 'shard')}"),
        ("index", f"{held.blocks:,} blocks of {both(held.block_bytes)}, {INDEX_BYTES_PER_BLOCK} B "
                  f"each: {decimal(held.index_bytes_per_shard)} of memory per shard"),
    ]  # fmt: skip
    return ["", *_block("the tier", rows)]


def _flow_lines(answer: Answer, moved: Flow) -> list[str]:
    use, shards = answer.use, answer.held.shards
    per_shard = max(moved.read_bytes_per_s, moved.write_bytes_per_s) * use.peak / shards
    short = "" if moved.links <= shards else f": more than the {shards:,} shards have"
    rows = [
        ("turns", f"{moved.turns_per_s:,.3g} per second, {use.hit_rate:.0%} from the tier"),
        ("read", f"{decimal(moved.read_bytes_per_s)}/s sealed"),
        ("written", f"{decimal(moved.write_bytes_per_s)}/s sealed, "
                    f"{decimal(moved.flash_bytes_per_day)} a day on flash"),
        ("network", f"{output.plural(moved.links, 'link')} at the busiest{short}; "
                    f"{decimal(per_shard)}/s per shard"),
        ("stays", _days(moved.stays_days)),
        ("drives", f"{moved.drive_writes_per_day:.2f} writes a day, last {_years(moved)}"),
    ]  # fmt: skip
    return ["", *_block("its traffic", rows)]


def _days(days: float) -> str:
    if math.isinf(days):
        return "for ever: nothing is written"
    return f"{output.duration(days * 86_400e9)} until what is written gives way to newer"


def _years(moved: Flow) -> str:
    if moved.drive_years > _YEARS_SHOWN_MAX:
        return f"more than {_YEARS_SHOWN_MAX} years"
    if moved.drive_years < 1:
        return f"{12 * moved.drive_years:.1f} months"
    return f"{moved.drive_years:.1f} years"


def _worth_lines(answer: Answer) -> list[str]:
    use, costs, arguments = answer.use, answer.costs, answer.arguments
    rows = []
    if costs.tier_per_month is not None:
        rows.append(("the tier", f"{costs.tier_per_month:,.0f} a month"))
    if costs.tier_per_million_tokens is not None:
        rows.append(("from it", f"{costs.tier_per_million_tokens:,.4g} per million tokens"))
    if costs.compute_per_million_tokens is not None:
        rows.append(("computed", f"{costs.compute_per_million_tokens:,.4g} per million tokens"))
    counted = "the tier's cost counted" if _counts_tier(answer) else "the tier at no cost"
    rows += [
        ("yours", f"{answer.gains['yours']:+.0%} tokens for the same money at {use.hit_rate:.0%} "
                  f"hits, {arguments['prefill_share']:.0%} of GPU time in prefill, {counted}"),
        ("vendor's", f"{answer.gains['vendor']:+.0%}: all GPU time in prefill, 3 s for 62, "
                     "the tier at no cost (VAST's figures; the formula is inferred)"),
    ]  # fmt: skip
    told = ["", *_block("its worth", rows)]
    missing = [
        option
        for option, given in (
            ("--turns-per-hour", answer.moved), ("--drive-price", arguments["drive_price"]),
            ("--gpu-hour", arguments["gpu_hour"]), ("--prefill-rate", arguments["prefill_rate"]),
        )
        if not given
    ]  # fmt: skip
    return [*told, f"  for costs per token: {', '.join(missing)}"] if missing else told


def _counts_tier(answer: Answer) -> bool:
    costs = answer.costs
    return None not in (costs.tier_per_million_tokens, costs.compute_per_million_tokens)


def _notes(answer: Answer) -> Iterator[str]:
    context, shape, use = answer.context, answer.context.shape, answer.use
    dtype = answer.arguments["dtype"]
    if answer.arguments["ratio"] is None and shape is not None and shape.is_latent:
        yield "no codec was measured on latents: stored at full size; --ratio changes that"
    elif answer.arguments["ratio"] is None and dtype in MEASURED_RATIOS:
        yield (
            f"{use.ratio:g}:1 is what the codec `fast` made of {dtype} KV of two small models; "
            "measure yours (`entresol stat`), or --ratio 1 for none"
        )
    if answer.moved is not None and answer.moved.drive_years < answer.arguments["warranty"]:
        yield (
            "the drives wear out before their warranty ends: more drives, a higher --dwpd, or let "
            "the daemon refuse blocks offered only once ([admission] drive_writes_per_day)"
        )
    if shape is None:
        yield "blocks are taken to be 1 MiB; a model tells their size"
        return
    yield from shape.notes
    if shape.context_max_tokens and context.tokens > shape.context_max_tokens:
        yield f"{shape.name} is made for {shape.context_max_tokens:,} tokens at most"
    if shape.is_latent and context.ranks > 1 and not context.every_rank:
        yield (
            "every rank needs the whole latent; it is stored once if one rank stores for all "
            f"(SGLang does), else {context.ranks} times: --every-rank"
        )
    if shape.windowed_layers and not context.windows_only:
        yield "windowed layers are counted in full, as engines store them: --windows needed"


def _assumed(answer: Answer) -> list[str]:
    """Names of arguments that were left at their default and matter here."""
    same = [name for name, value in _DEFAULTS.items() if answer.arguments[name] == value]
    return [name for name in same if answer.moved is not None or name not in _TRAFFIC]


def _shown(name: str, value: float) -> str:
    if name == "fetch_cost":
        return "3/62"
    return f"{value:.0%}" if name in _SHARES else f"{value:g}"
