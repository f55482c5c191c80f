"""A prompt's blocks as people have them: engine keys, an engine's hashes, or token ids.

Invariant: keys come out in prefix order and are the very keys that the engine's adapter stores
under; what cannot be turned into them is refused before anything is asked. Light: an engine's own
hashing is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from entresol_client.cli import objects
from entresol_client.cli.errors import CliError, UsageProblem
from entresol_proto import limits

BLOCKS_MAX = limits.KEYS_PER_FRAME_MAX
FILE_BYTES_MAX = 64 * limits.MIB  # of hashes or token ids
TOKEN_MAX = 2**32 - 1
GROUP_BYTES = 4  # of vLLM's offload key, behind the block hash: KV cache group, big-endian
PIECE_MAX = 255  # of SGLang's page key, behind the page hash: one byte
RAW, VLLM, SGLANG, KVBM = "raw", "vllm", "sglang", "kvbm"
ENGINES = (RAW, VLLM, SGLANG, KVBM)
HASHED_HERE = (SGLANG, KVBM)  # from token ids
_SOURCES = ("key_words", "key", "name", "hashes", "tokens")
_BETWEEN = re.compile(r"[\s,;\[\](){}\"']+")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command is about: blocks in prefix order, or (`prefix` False) blocks of their own.

    `block_tokens` is 0 where it is not known how many tokens a block has.
    """

    labels: list[str]
    keys: list[bytes]
    prefix: bool
    block_tokens: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """What names the blocks of a prompt."""
    parser.add_argument(
        "key_words", nargs="*", metavar="KEY",
        help="engine keys (hex or text:WORDS); several are one prompt's, in order",
    )  # fmt: skip
    parser.add_argument("--name", help="name it was put under")
    parser.add_argument(
        "--key", action="append", metavar="HEX|text:WORDS",
        help="engine key of a block (repeatable); each for itself, not a prompt",
    )  # fmt: skip
    group = parser.add_argument_group("a whole prompt")
    group.add_argument(
        "--hashes", metavar="FILE|-",
        help="its blocks' hashes or keys in hex, in order; spaces, commas or brackets between",
    )  # fmt: skip
    group.add_argument(
        "--tokens", metavar="FILE|-",
        help="its token ids, in order, from which the keys are computed: --engine kvbm or sglang",
    )  # fmt: skip
    group.add_argument(
        "--engine", choices=ENGINES, default=RAW,
        help="whose hashes: vllm adds the KV group to each, sglang the piece of the page, raw "
        "(default) nothing",
    )  # fmt: skip
    group.add_argument(
        "--group", type=int, default=0, metavar="N", help="KV group or piece (default: 0)"
    )
    group.add_argument(
        "--every", type=int, default=1, metavar="N",
        help="only every Nth hash names a block: vLLM's blocks_per_chunk (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--request-salt", metavar="TEXT", help='"salt" of the request\'s kv_transfer_params'
    )
    group.add_argument(
        "--cache-salt", metavar="TEXT", help="with --tokens: cache_salt of the request"
    )
    group.add_argument("--extra-key", metavar="TEXT", help="sglang: extra_key of the request")


def check(args: argparse.Namespace) -> None:
    """Refuse what makes no sense together. Raises: UsageProblem."""
    given = [name for name in _SOURCES if getattr(args, name)]
    if len(given) != 1:
        raise UsageProblem(
            "name the blocks in one way" if given else "nothing says which blocks",
            hint="KEY ..., --key, --name, --hashes or --tokens",
        )
    if args.tokens and args.engine == VLLM:
        raise UsageProblem(
            "vLLM's hashes begin with a seed of its own and depend on its version: not computed "
            "here",
            hint="give hashes, --hashes FILE --engine vllm: vLLM's KV events tell them whole with "
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, and `entresol events --json` tells keys "
            "beside the token ids of what was stored",
        )
    if args.tokens and args.engine not in HASHED_HERE:
        raise UsageProblem(
            "--tokens needs an engine whose hashes are computed here",
            hint=f"--engine {' or '.join(HASHED_HERE)}",
        )
    if args.engine == KVBM and not args.tokens:
        raise UsageProblem(
            "a KVBM hash alone names no block: 24 bytes of our own chain belong to its key",
            hint="give --tokens, or whole keys as `entresol events --json` shows them",
        )
    if args.cache_salt is not None and not args.tokens:
        raise UsageProblem("--cache-salt belongs to --tokens: hashes have it in them already")
    if args.extra_key is not None and not (args.tokens and args.engine == SGLANG):
        raise UsageProblem("--extra-key belongs to --tokens of --engine sglang")
    if args.request_salt is not None and args.engine not in (VLLM, KVBM):
        raise UsageProblem("--request-salt belongs to --engine vllm or kvbm")
    if args.every < 1:
        raise UsageProblem(f"--every {args.every} is less than 1")
    highest = PIECE_MAX if args.engine == SGLANG else 2 ** (8 * GROUP_BYTES) - 1
    if not 0 <= args.group <= highest:
        raise UsageProblem(f"--group {args.group} is not 0..{highest}")


def read(args: argparse.Namespace, block_tokens: int) -> Asked:
    """The blocks that the arguments name; not for --name, whose blocks only a daemon knows.

    `block_tokens` of the namespace. Raises: UsageProblem, CliError, ConfigError.
    """
    if args.tokens:
        keys = _of_tokens(args, block_tokens)
        labels = [f"block {number}" for number in range(len(keys))]
        return Asked(labels, keys, True, block_tokens)
    words = args.key or args.key_words or list(_words(args.hashes))
    words = words[args.every - 1 :: args.every]
    if not words:
        raise UsageProblem(f"{args.hashes}: no hash in it, or fewer than --every")
    if len(words) > BLOCKS_MAX:
        raise UsageProblem(f"{len(words):,} blocks in one question, at most {BLOCKS_MAX:,}")
    keys = [_suffixed(args)(_parsed(number, text, args)) for number, text in enumerate(words)]
    prefix = not args.key and (bool(args.hashes) or len(words) > 1)
    labels = [f"block {number}" for number in range(len(keys))] if prefix else list(words)
    return Asked(labels, keys, prefix)


def _parsed(number: int, text: str, args: argparse.Namespace) -> bytes:
    try:
        return objects.parse_key(text)
    except UsageProblem as problem:
        if not args.hashes:
            raise
        raise UsageProblem(
            f"{args.hashes}: hash {number + 1}: {Exception.__str__(problem)}", hint=problem.hint
        ) from None


def _suffixed(args: argparse.Namespace) -> Callable[[bytes], bytes]:
    """What the adapter of the engine puts behind a hash."""
    from entresol_client.engines.naming import salted

    suffix = b""
    if args.engine == VLLM:
        suffix = args.group.to_bytes(GROUP_BYTES, "big") + salted(b"", args.request_salt)
    if args.engine == SGLANG:
        suffix = bytes([args.group])

    def of(key: bytes) -> bytes:
        if len(key) + len(suffix) > limits.ENGINE_KEY_BYTES_MAX:
            raise UsageProblem(
                f"a hash of {len(key)} bytes and {len(suffix)} more are no engine key",
                hint=f"engine keys have at most {limits.ENGINE_KEY_BYTES_MAX} bytes; are these "
                "whole keys already? then leave --engine out",
            )
        return key + suffix

    return of


def _of_tokens(args: argparse.Namespace, block_tokens: int) -> list[bytes]:
    tokens = []
    for number, word in enumerate(_words(args.tokens)):
        if not word.isascii() or not word.isdigit() or len(word) > 10 or int(word) > TOKEN_MAX:
            raise UsageProblem(
                f"{args.tokens}: token {number + 1} is {word[:20]!r}, not a token id",
                hint=f"token ids are decimal numbers from 0 to {TOKEN_MAX}",
            )
        tokens.append(int(word))
    full = len(tokens) // block_tokens
    if not 0 < full <= BLOCKS_MAX:
        raise UsageProblem(
            f"{args.tokens}: {len(tokens):,} tokens are {full:,} full blocks of {block_tokens}",
            hint=f"1 to {BLOCKS_MAX:,} are possible; --block-tokens says how many tokens each has",
        )
    of_engine = _sglang_keys if args.engine == SGLANG else _kvbm_keys
    keys = of_engine(args, tokens, block_tokens)
    assert len(keys) == full, "every token fits"
    return keys


def _kvbm_keys(args: argparse.Namespace, tokens: list[int], block_tokens: int) -> list[bytes]:
    from entresol_client.engines.kvbm_hash import KeyChain

    chain = KeyChain(block_tokens, args.cache_salt, private_salt=args.request_salt or "")
    chain.extend(tokens)
    return chain.keys


def _sglang_keys(args: argparse.Namespace, tokens: list[int], block_tokens: int) -> list[bytes]:
    from entresol_client.engines.sglang_pages import page_hashes, page_key

    hashes = page_hashes(tokens, block_tokens, extra_key=args.extra_key, cache_salt=args.cache_salt)
    return [page_key(one, args.group) for one in hashes]


def _words(where: str) -> Iterator[str]:
    """The words of a file, or of standard input. Raises: UsageProblem, CliError."""
    try:
        if where == "-":
            raw = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(where).open("rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CliError(
            f"cannot read {where}: {error.strerror or error}", hint="name a file, or - for stdin"
        ) from None
    if len(raw) > FILE_BYTES_MAX:
        raise UsageProblem(f"{where} has more than {FILE_BYTES_MAX // limits.MIB} MiB")
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError:
        raise UsageProblem(f"{where} is not text in ASCII") from None
    return (word for word in _BETWEEN.split(text) if word)
