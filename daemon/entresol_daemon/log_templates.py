"""Log calls as fields: `"event=x tenant=%s hint='do this'"` and its arguments, taken apart.

Invariants: a template that is not wholly `name=value` pairs after its event, and one whose
arguments do not fit, is nobody's fields: it is written as it stands. Names come from templates and
never from arguments, so no value can make a field. Knows nothing of what may be shown.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

TEMPLATE_CHARS_MAX = 2_048
TEMPLATES_KEPT = 1_024  # parsed ones; the code has far fewer

Value = int | float | bool | str | None

_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?([diuoxXeEfFgGcrsa])")
_PAIR = re.compile(
    r"([a-z][a-z0-9_]{0,63})="
    r"(?:'([^'\x00-\x1f]*)'|\"([^\"\x00-\x1f]*)\"|([^\s'\"=\\\x00-\x1f]+))(?: +(?=\S)|$)"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One `name=value` of a template. `text` is the value without its quotes, `kinds` the letters
    of its conversions; `whole` when it is nothing but one."""

    name: str
    text: str
    kinds: str
    whole: bool


@functools.lru_cache(TEMPLATES_KEPT)
def parse(template: str) -> tuple[Pair, ...] | None:
    """The pairs of a template; None when it is anything else, or does not begin with its event."""
    if not template.startswith("event=") or len(template) > TEMPLATE_CHARS_MAX:
        return None
    pairs, at = [], 0
    while at < len(template):
        found = _PAIR.match(template, at)
        if found is None:
            return None
        text = next(part for part in found.groups()[1:] if part is not None)
        kinds = "".join(_CONVERSION.findall(text))
        if "%" in _CONVERSION.sub("", text):  # %%, %(name)s, %*d: not used here
            return None
        pairs.append(Pair(found[1], text, kinds, _CONVERSION.fullmatch(text) is not None))
        at = found.end()
    return tuple(pairs)


def fields(template: str, args: Sequence[object]) -> list[tuple[str, Value, str]] | None:
    """Name, value and text of each field; None where template or arguments are of another form.

    Numbers that were given as such, or are written as one (`%d`, `%.1f`), stay numbers.
    """
    pairs = parse(template)
    if pairs is None or sum(len(pair.kinds) for pair in pairs) != len(args):
        return None
    found, at = [], 0
    try:
        for pair in pairs:
            mine = tuple(args[at : at + len(pair.kinds)])
            at += len(mine)
            found.append((pair.name, *_value(pair, mine)))
    except (TypeError, ValueError, OverflowError):
        return None
    return found


def _value(pair: Pair, args: tuple[object, ...]) -> tuple[Value, str]:
    if not pair.whole:
        text = pair.text % args if args else pair.text
        return text, text
    (arg,) = args
    if pair.kinds in "sra":
        if isinstance(arg, str):
            return arg, arg  # what %r puts around it is the form's business
        text = pair.text % args
        return (arg if _is_plain(arg) else text), text  # type: ignore[return-value]
    text = pair.text % args
    if pair.kinds in "diu":
        return int(text), text
    if pair.kinds in "eEfFgG":
        number = float(text)
        return (number if math.isfinite(number) else text), text
    return text, text


def _is_plain(value: object) -> bool:
    """Whether JSON has it; not enumerations, which have names."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) in (int, bool, type(None))
