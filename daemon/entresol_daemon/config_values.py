"""Reading one TOML table into one frozen dataclass, with errors that name the file, key and fix.

Invariant: a value reaches the dataclass only with the declared type, inside the declared range;
nothing is guessed, coerced or silently dropped. Knows no setting by name: those are in `config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from entresol_proto.status import ConfigError
from entresol_proto.units import SIZE_UNITS
from entresol_proto.units import parse_size as parse_size

S = TypeVar("S")

_TIME_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME_UNITS |= {"min": 60_000_000_000, "h": 3_600_000_000_000, "d": 86_400_000_000_000}
# What is written for them too; in lower case.
_OTHER_SIZES = {"k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB", "byte": "B", "bytes": "B"}
_OTHER_SIZES |= {"ki": "KiB", "mi": "MiB", "gi": "GiB", "ti": "TiB"}
_OTHER_TIMES = {"sec": "s", "secs": "s", "second": "s", "seconds": "s", "msec": "ms", "usec": "us"}
_OTHER_TIMES |= {"m": "min", "mins": "min", "minute": "min", "minutes": "min", "hr": "h"}
_OTHER_TIMES |= {"hour": "h", "hours": "h", "day": "d", "days": "d"}
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_NUMBER_LIMIT = 2**63  # TOML's integers
_LIST_ITEMS_MAX = 64
_TEXT_CHARS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known about one setting beside its name and default.

    `kind` is one of bool, int, float, size (bytes), duration (ns), text, choice, path, list.
    `credential`: the path may begin with $CREDENTIALS_DIRECTORY. `paths`: the list is of paths.
    """

    kind: str
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    credential: bool = False
    paths: bool = False


def setting(
    default: Any,
    doc: str,
    *,
    kind: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    credential: bool = False,
    paths: bool = False,
) -> Any:
    """A dataclass field with its documentation; the kind follows from the default unless given."""
    if not kind:
        kind = {bool: "bool", int: "int", float: "float", str: "text", tuple: "list"}.get(
            type(default), "path"
        )
        if kind == "text" and choices:
            kind = "choice"
    about = Setting(kind, doc, low, high, choices, credential, paths)
    return dataclasses.field(default=default, metadata={"setting": about})


def settings_of(section: Any) -> list[tuple[dataclasses.Field[Any], Setting]]:
    """The fields of a section class (or instance) with what is known about each."""
    found = []
    for item in dataclasses.fields(section):
        about = item.metadata["setting"]
        # A unit in the name decides the kind, so that the two cannot disagree.
        if item.name.endswith("_bytes") or "_bytes_" in item.name:
            about = dataclasses.replace(about, kind="size")
        elif item.name.endswith("_ns"):
            about = dataclasses.replace(about, kind="duration")
        found.append((item, about))
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the known word closest to `name`, or all of them when none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def home_of(key: str, sections: Mapping[str, type]) -> str:
    """A hint naming the sections that have this setting; empty when none has."""
    homes = [
        f"[{name}]"
        for name, section in sections.items()
        if any(item.name == key for item in dataclasses.fields(section))
    ]
    return f"it belongs to {' or '.join(homes)}" if homes else ""


def likely(value: object, kind: str) -> str:
    """What a size or duration with a mistyped unit may have been meant to be; "" for others."""
    match = _NUMBER_AND_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or kind not in ("size", "duration"):
        return ""
    units, other = (SIZE_UNITS, _OTHER_SIZES) if kind == "size" else (_TIME_UNITS, _OTHER_TIMES)
    if match[2] in units:
        return ""
    spellings = {**{unit.lower(): unit for unit in reversed(units)}, **other}
    meant = spellings.get(match[2].lower())
    return f"{match[1]}{meant}" if meant else ""


def parse_duration(text: str) -> int:
    """`"250ms"`, `"10s"`, `"2h"` to nanoseconds. Raises: ValueError."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if not match or match[2] not in _TIME_UNITS:
        raise ValueError(f"{text!r} is not a duration; write it like 250ms, 10s, 5min or 2h")
    return _scaled(match[1], _TIME_UNITS[match[2]], text)


def _scaled(number: str, unit: int, text: str) -> int:
    whole, _, part = number.partition(".")
    value = int(whole) * unit
    if part:
        extra = int(part) * unit
        if extra % 10 ** len(part):
            raise ValueError(f"{text!r} is not a whole number of its smallest unit")
        value += extra // 10 ** len(part)
    return value


def format_size(value: int) -> str:
    """The shortest exact form that `parse_size` reads back."""
    forms = [
        f"{value // SIZE_UNITS[unit]}{unit}"
        for unit in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB")
        if value and value % SIZE_UNITS[unit] == 0
    ]
    return min([*forms, str(value)], key=len)


def format_duration(value: int) -> str:
    """The shortest exact form that `parse_duration` reads back."""
    for unit in ("d", "h", "min", "s", "ms", "us"):
        if value and value % _TIME_UNITS[unit] == 0:
            return f"{value // _TIME_UNITS[unit]}{unit}"
    return f"{value}ns"


def format_number(value: float, kind: str) -> str:
    """A number as its kind is written: `64MiB`, `10s`, `0.5`, `7440`."""
    if kind == "size":
        return format_size(int(value))
    if kind == "duration":
        return format_duration(int(value))
    return str(value if kind == "float" else int(value))


def _number(value: object, kind: str) -> int | float:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    if isinstance(value, int):
        return float(_of_64_bits(value)) if kind == "float" else _of_64_bits(value)
    if kind == "float" and isinstance(value, float):
        return value
    if isinstance(value, str) and kind == "size":
        return _of_64_bits(parse_size(value))
    if isinstance(value, str) and kind == "duration":
        return _of_64_bits(parse_duration(value))
    wanted = {"size": "a size such as 64MiB", "duration": "a duration such as 250ms"}
    raise ValueError(f"{value!r} is not {wanted.get(kind, 'a number')}")


def _of_64_bits(value: int) -> int:
    if not -_NUMBER_LIMIT <= value < _NUMBER_LIMIT:
        raise ValueError("the number has more than 64 bits")
    return value


def _in_range(value: int | float, about: Setting) -> int | float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a usable number")
    if about.low is not None and value < about.low:
        low = format_number(about.low, about.kind)
        raise ValueError(f"{format_number(value, about.kind)} is below the smallest allowed, {low}")
    if about.high is not None and value > about.high:
        high = format_number(about.high, about.kind)
        raise ValueError(f"{format_number(value, about.kind)} is above the largest allowed, {high}")
    return value


def _one_text(value: object, about: Setting) -> str:
    if not isinstance(value, str):
        told = str(value).lower() if isinstance(value, bool) else repr(value)
        which = f": {', '.join(about.choices)}" if about.choices else ""
        raise ValueError(f"{told} is not text in quotes{which}")
    if len(value) > _TEXT_CHARS_MAX or "\0" in value:
        raise ValueError("the text is too long or holds a zero byte")
    if about.choices and value not in about.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(about.choices)}")
    return value


def convert(value: object, about: Setting, base: Path) -> object:
    """Check one TOML value and bring it into its stored form.

    Paths are taken relative to `base`, the folder of the config file; `$CREDENTIALS_DIRECTORY/...`
    is left for the reader of a credential to expand. Raises: ValueError with the reason.
    """
    if about.kind in ("int", "float", "size", "duration"):
        return _in_range(_number(value, about.kind), about)
    if about.kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is not true or false")
        return value
    if about.kind == "list":
        if not isinstance(value, list) or len(value) > _LIST_ITEMS_MAX:
            raise ValueError(f"{value!r} is not a list of at most {_LIST_ITEMS_MAX} texts")
        items = tuple(_one_text(item, about) for item in value)
        if about.paths:
            items = tuple(str(_path(item, about, base)) for item in items)
        if len(set(items)) != len(items):
            raise ValueError("the list names something twice")
        return items
    text = _one_text(value, about)
    if about.kind != "path":
        return text
    return _path(text, about, base)


def _path(text: str, about: Setting, base: Path) -> Path:
    if not text:
        raise ValueError("the path is empty; leave the setting out instead")
    if text.startswith("$"):  # nobody expands it: it would be a folder of that name
        if not (about.credential and text.startswith("$CREDENTIALS_DIRECTORY/")):
            raise ValueError(f"{text!r} begins with $, and variables are not read here")
        return Path(text)
    if text.startswith("~"):
        raise ValueError(f"{text!r} begins with ~, which only a shell reads: write the path out")
    return base / text


def read_section(
    cls: type[S], name: str, table: object, source: Path, sections: Mapping[str, type]
) -> S:
    """Build one section from its TOML table. Paths become absolute: whoever is told of one (a host,
    of a socket) may be in another folder. `sections`: all there are, for a setting in a wrong one.

    Raises: ConfigError for a table of another type, an unknown key, or a bad value.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: [{name}] is not a section", hint=f"write it as [{name}]")
    known = {item.name: about for item, about in settings_of(cls)}
    values: dict[str, object] = {}
    for key, value in table.items():
        if key not in known:
            hint = home_of(key, sections) or nearest(key, known)
            raise ConfigError(f"{source}: unknown setting {key!r} in [{name}]", hint=hint)
        try:
            values[key] = convert(value, known[key], source.parent.absolute())
        except ValueError as error:
            meant = likely(value, known[key].kind)
            hint = f"did you mean {meant!r}?" if meant else f"what it is: {known[key].doc}"
            raise ConfigError(f"{source}: [{name}] {key}: {error}", hint=hint) from None
    return cls(**values)
