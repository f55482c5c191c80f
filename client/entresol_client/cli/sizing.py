"""`entresol size`: how big a tier has to be, how long its drives live, what it is worth.

Invariant: needs no daemon and no client configuration; every assumption is an option, and is told
in the answer.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entresol_client.cli import options, output
from entresol_client.cli.errors import UsageProblem

if TYPE_CHECKING:
    from entresol_client.cli import sizing_words as words
    from entresol_client.sizing.shapes import KvShape
    from entresol_client.sizing.tier import Context, Hardware, Use

_ABOUT = """\
Arithmetic for whoever plans a tier: how many bytes a token leaves behind, how much the contexts of
all users come to, how many drives and shards hold it, what crosses the network, how long the drives
live, and what a token costs that need not be computed. No daemon is asked.

A context's bytes follow from the model: --model, its own config.json (--model-config), or
--layers, --kv-heads and --head-dim. Of layers with a sliding window an engine stores every block as
it is made, though going on needs the last window only; --windows needed counts just that.

Traffic, wear and worth need to know how often users come back: --turns-per-hour. Prices are
in any one currency, and are never assumed. What is assumed is told at the end of the answer;
client/SIZING.md has every formula and the published cases that it is tested with.

exit status: 0 done, 2 wrong use.
"""
_EXAMPLES = """\
  entresol size --model llama-3.1-405b --context 128000 --users 100000 --retention 15
  entresol size --model llama-3.1-70b --tp 8 --context 32000 --users 2000 --turns-per-hour 6 \\
      --hit-rate 60% --drive-price 2500 --gpu-hour 3 --prefill-rate 2500
  entresol size --model-config config.json --dtype fp8_e4m3 --context 64000
  entresol size --per-user 30GB --users 100000 --retention 15 --ratio 1
  entresol size --models
"""
_USAGE = "(--model NAME | --model-config FILE | --layers N ... | --per-user SIZE) [options]"

TOKENS_MAX = 10**9
USERS_MAX = 10**10
QUANTITY_MIN, QUANTITY_MAX = 1e-6, 1e12  # outside, arithmetic would run into zeros and infinities
HEADROOM_MAX, LINK_SHARE_MIN = 0.99, 0.001


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "size", "size a tier: bytes, drives, network, drive life, worth",
        about=_ABOUT, examples=_EXAMPLES, usage=_USAGE,
    )  # fmt: skip
    _add_model(parser.add_argument_group("the model"))
    _add_use(parser.add_argument_group("its use"))
    _add_hardware(parser.add_argument_group("the hardware"))
    _add_worth(parser.add_argument_group("what it is worth"))
    parser.add_argument("--json", action="store_true", help="answer in JSON, for scripts")
    parser.set_defaults(run=run)


def _add_model(group: Any) -> None:
    group.add_argument("--model", metavar="NAME", help="a well-known model; --models lists them")
    group.add_argument(
        "--model-config", type=Path, metavar="FILE", help="a model's config.json (Hugging Face)"
    )
    # Its name until it was seen that this is the client's file everywhere else.
    group.add_argument("--config", dest="model_config", type=Path, help=argparse.SUPPRESS)
    group.add_argument("--models", action="store_true", help="list the models and their sources")
    for name, text in (
        ("layers", "layers that keep keys and values"),
        ("kv-heads", "KV heads of a layer"),
        ("head-dim", "size of a head"),
        ("latent", "instead of heads: elements of a layer's latent (MLA)"),
        ("window-layers", "how many of the layers have a sliding window"),
        ("window", "tokens in that window"),
    ):
        group.add_argument(f"--{name}", type=_whole, default=0, metavar="N", help=text)
    group.add_argument(
        "--per-user", type=parse_bytes, default=0, metavar="SIZE",
        help="bytes of one context, such as 30GB, instead of a model",
    )  # fmt: skip
    group.add_argument(
        "--dtype", default="bf16", metavar="NAME",
        help="of the cache: bf16, fp16, fp8_e4m3, fp8_e5m2, int8, fp32 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--tp", type=_whole, default=1, metavar="N", help="tensor-parallel ranks (default: 1)"
    )
    group.add_argument(
        "--every-rank", action="store_true",
        help="MLA: every rank stores the latent, not one for all",
    )  # fmt: skip
    group.add_argument(
        "--windows", choices=("all", "needed"), default="all",
        help="of layers with windows count every token, or the last window (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--block-tokens", type=_whole, default=16, metavar="N", help="in one block (default: 16)"
    )


def _add_use(group: Any) -> None:
    group.add_argument(
        "--context", type=_tokens, default=0, metavar="N", help="tokens of one context"
    )
    group.add_argument(
        "--users", type=_whole, default=1, metavar="N", help="who share it (default: 1)"
    )
    group.add_argument(
        "--retention", type=_positive, default=1.0, metavar="N",
        help="contexts kept for each user (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--ratio", type=_positive, metavar="N",
        help="bytes over stored bytes (default: as measured for the dtype; 1: no codec)",
    )  # fmt: skip
    group.add_argument(
        "--turns-per-hour", type=_positive, default=0.0, metavar="N",
        help="requests of each active user; each brings a whole context",
    )  # fmt: skip
    group.add_argument(
        "--active", type=_share, default=1.0, metavar="SHARE",
        help="of the users, at a time (default: 100%%)",
    )  # fmt: skip
    group.add_argument(
        "--hit-rate", type=_share, default=0.5, metavar="SHARE",
        help="of a context's tokens, from the tier (default: 50%%)",
    )  # fmt: skip
    group.add_argument(
        "--answer-tokens", type=_whole, default=0, metavar="N",
        help="new tokens stored with each turn (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--peak", type=_positive, default=1.0, metavar="N",
        help="busiest moment over the mean (default: 1)",
    )  # fmt: skip


def _add_hardware(group: Any) -> None:
    group.add_argument(
        "--drive", type=parse_bytes, default=15_360 * 10**9, metavar="SIZE",
        help="of one drive (default: 15.36TB)",
    )  # fmt: skip
    group.add_argument(
        "--dwpd", type=_positive, default=1.0, metavar="N",
        help="drive writes per day it is warranted for (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--warranty",
        type=_positive,
        default=5.0,
        metavar="YEARS",
        help="of that warranty (default: 5)",
    )
    group.add_argument(
        "--drives-per-shard", type=_whole, default=8, metavar="N",
        help="drives of one DPU or box (default: 8)",
    )  # fmt: skip
    group.add_argument(
        "--shards", type=_whole, default=0, metavar="N",
        help="DPUs or boxes (default: as the drives need)",
    )  # fmt: skip
    group.add_argument(
        "--link", type=_positive, default=400.0, metavar="GBIT",
        help="Gb/s of a shard's network (default: 400)",
    )  # fmt: skip
    group.add_argument(
        "--link-share", type=_share, default=0.9, metavar="SHARE",
        help="of a link that payload may take (default: 90%%)",
    )  # fmt: skip
    group.add_argument(
        "--headroom", type=_share, default=0.1, metavar="SHARE",
        help="of flash kept free (default: 10%%)",
    )  # fmt: skip


def _add_worth(group: Any) -> None:
    for name, text in (
        ("drive-price", "of one drive"),
        ("shard-price", "of one DPU or box, without drives"),
        ("gpu-hour", "price of a GPU for an hour"),
        ("prefill-rate", "tokens per second that one such GPU computes of a prompt"),
    ):
        group.add_argument(f"--{name}", type=_positive, default=0.0, metavar="N", help=text)
    group.add_argument(
        "--years", type=_positive, default=5.0, metavar="N",
        help="over which the hardware is paid (default: 5)",
    )  # fmt: skip
    group.add_argument(
        "--prefill-share", type=_share, default=0.5, metavar="SHARE",
        help="of the GPUs' time that goes into prompts (default: 50%%)",
    )  # fmt: skip
    group.add_argument(
        "--fetch-cost", type=_share, default=3 / 62, metavar="SHARE",
        help="of a GPU's time for a prompt that a fetch still takes (default: 3/62)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """The command."""
    from entresol_client.cli import sizing_words as words
    from entresol_client.sizing import models

    if args.models:
        rows = list(models.known())
        output.answer(args.json, {"models": [asdict(row) for row in rows]}, words.models(rows))
        return 0
    context, hardware = _context(args), _hardware(args)
    use = _use(args, latent=context.shape is not None and context.shape.is_latent)
    try:
        answer = _answer(args, context, use, hardware)
        told = words.data(answer), words.lines(answer)
    except ArithmeticError:
        raise UsageProblem(
            "these quantities are too far apart to reckon with", hint="check each for its unit"
        ) from None
    output.answer(args.json, *told)
    return 0


def _answer(
    args: argparse.Namespace, context: Context, use: Use, hardware: Hardware
) -> words.Answer:
    from entresol_client.cli import sizing_words as words
    from entresol_client.sizing import tier
    from entresol_client.sizing import worth as money

    held = tier.footprint(context, use, hardware)
    moved = tier.flow(context, use, hardware, held)
    prices = money.Prices(
        args.drive_price, args.shard_price, args.gpu_hour, args.prefill_rate, args.years
    )
    costs = money.worth(
        prices, held.drives, held.shards,
        moved.drive_years if moved else math.inf, moved.tokens_from_tier_per_s if moved else 0.0,
    )  # fmt: skip
    gains = {
        "vendor": money.more_tokens_per_dollar(
            use.hit_rate, money.VENDOR_PREFILL_SHARE, money.VENDOR_FETCH_COST
        ),
        "yours": money.more_tokens_per_dollar(
            use.hit_rate, args.prefill_share, args.fetch_cost, _tier_over_gpu(args, costs)
        ),
    }
    return words.Answer(context, use, hardware, held, moved, costs, gains, vars(args))


def _tier_over_gpu(args: argparse.Namespace, costs: Any) -> float:
    """What the tier costs per token of prompt over what the GPUs cost per token, all work."""
    if costs.tier_per_million_tokens is None or costs.compute_per_million_tokens is None:
        return 0.0
    of_prefill = costs.tier_per_million_tokens * args.hit_rate / costs.compute_per_million_tokens
    return float(of_prefill * args.prefill_share)


def _context(args: argparse.Namespace) -> Context:
    """Raises: UsageProblem, SizingError."""
    from entresol_client.sizing import tier

    if args.dtype not in tier.ELEMENT_BYTES:
        raise UsageProblem(
            f"no dtype is called {args.dtype!r}", hint=f"--dtype {', '.join(tier.ELEMENT_BYTES)}"
        )
    shape = _shape(args)
    if shape is not None and not args.context:
        raise UsageProblem("how long is a context?", hint="--context 128000")
    if shape is None and args.answer_tokens:
        raise UsageProblem(
            "--answer-tokens needs a model", hint="--model, --model-config or --layers"
        )
    if args.block_tokens < 1:
        raise UsageProblem("a block of no tokens", hint="--block-tokens 16")
    return tier.Context(
        shape=shape,
        element_bytes=tier.ELEMENT_BYTES[args.dtype],
        tokens=args.context,
        ranks=args.tp,
        every_rank=args.every_rank,
        windows_only=args.windows == "needed",
        block_tokens=args.block_tokens,
        user_bytes=args.per_user,
        block_bytes=0 if shape is not None else 2**20,
    )


def _shape(args: argparse.Namespace) -> KvShape | None:
    """The model that the arguments name. Raises: UsageProblem, SizingError."""
    from entresol_client.sizing import hf_config, models, shapes

    ways = [
        name
        for name, given in (
            ("--model", args.model), ("--model-config", args.model_config),
            ("--layers", args.layers), ("--per-user", args.per_user),
        )
        if given
    ]  # fmt: skip
    if len(ways) != 1:
        found = " and ".join(ways) + " say" if ways else "nothing says"
        raise UsageProblem(
            f"{found} what is to be sized",
            hint="one of --model NAME, --model-config FILE, --layers with heads, --per-user SIZE",
        )
    if args.per_user:
        return None
    if args.model:
        return models.named(args.model)
    if args.model_config:
        return hf_config.read(args.model_config)
    heads, values = (0, args.latent) if args.latent else (args.kv_heads, 2 * args.head_dim)
    if not values or (not heads and not args.latent):
        raise UsageProblem(
            "--layers alone does not say enough", hint="--kv-heads and --head-dim, or --latent"
        )
    if args.window_layers > args.layers or bool(args.window_layers) != bool(args.window):
        raise UsageProblem(
            "windows need a number of layers, at most all, and a length",
            hint="--window-layers 18 --window 128",
        )
    parts = (
        shapes.LayerGroup(args.layers - args.window_layers, heads, values),
        shapes.LayerGroup(args.window_layers, heads, values, args.window),
    )
    return shapes.KvShape("as given", tuple(part for part in parts if part.layers))


def _use(args: argparse.Namespace, *, latent: bool) -> Use:
    from entresol_client.sizing import tier

    if args.users < 1 or args.users > USERS_MAX:
        raise UsageProblem(f"{args.users} users", hint=f"--users from 1 to {USERS_MAX:,}")
    measured = 1.0 if latent else tier.MEASURED_RATIOS.get(args.dtype, 1.0)
    return tier.Use(
        users=args.users,
        retention=args.retention,
        ratio=args.ratio or measured,
        turns_per_hour=args.turns_per_hour,
        active_share=args.active,
        hit_rate=args.hit_rate,
        answer_tokens=args.answer_tokens,
        peak=args.peak,
    )


def _hardware(args: argparse.Namespace) -> Hardware:
    from entresol_client.sizing import tier

    for name, value in (("drive", args.drive), ("drives-per-shard", args.drives_per_shard)):
        if value < 1:
            raise UsageProblem(f"--{name} is 0", hint=f"leave --{name} out for its default")
    if args.headroom > HEADROOM_MAX or args.link_share < LINK_SHARE_MIN:
        raise UsageProblem("nothing is left to use", hint="--headroom 10%, --link-share 90%")
    return tier.Hardware(
        drive_bytes=args.drive,
        drive_writes_per_day=args.dwpd,
        drive_warranty_years=args.warranty,
        drives_per_shard=args.drives_per_shard,
        shards=args.shards,
        link_gbit_per_s=args.link,
        link_share=args.link_share,
        headroom=args.headroom,
    )


# -- values


def parse_bytes(text: str) -> int:
    """ "30GB" (decimal, as drives are sold) or "28GiB". Raises: ArgumentTypeError."""
    found = options.parse_size(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is nothing; write 30GB, 15.36TB, 28GiB")
    return found


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,15}", text.replace(",", "").replace("_", "")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text.replace(",", "").replace("_", ""))


def _tokens(text: str) -> int:
    if re.fullmatch(r"\d+[kKmM]", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is read in two ways; write 128000 or 131072, whichever is meant"
        )
    found = _whole(text)
    if not 0 < found <= TOKENS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to {TOKENS_MAX:,} tokens")
    return found


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not QUANTITY_MIN <= found <= QUANTITY_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from {QUANTITY_MIN:g} to {QUANTITY_MAX:g}"
        )
    return found


def _share(text: str) -> float:
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 0.6 or 60%")
    return found
