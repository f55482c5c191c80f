"""How a size is written, wherever a person may write one: options, settings of both sides.

Invariant: one text is one number of bytes everywhere. Binary: KiB, MiB, GiB, TiB, and K, M, G, T
alone. Decimal, as drives are sold: kB, MB, GB, TB. Case counts: "1mb" is refused.
"""

from __future__ import annotations

import re

_LETTERS = "KMGTPE"
SIZE_UNITS = {"": 1, "B": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate(_LETTERS, start=1)
    for tail, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
SIZE_UNITS["kB"] = SIZE_UNITS["KB"]
SIZE_LIMIT = 2**63  # TOML's integers, and files
_TEXT_CHARS_MAX = 64  # more digits than any size has
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """ "64MiB", "4G", "1.5 TiB", "100GB" or plain bytes; what is less than a byte is left out.

    Raises: ValueError.
    """
    text = text.strip()
    match = _SIZE.fullmatch(text)
    if not match or match[3] not in SIZE_UNITS:
        raise ValueError(f"{text[:40]!r} is not a size; write bytes, or like 64MiB, 4G or 15.36TB")
    whole, part, unit = match[1], match[2] or "", SIZE_UNITS[match[3]]
    found = SIZE_LIMIT
    if len(text) <= _TEXT_CHARS_MAX:
        found = int(whole + part) * unit // 10 ** len(part)
    if found >= SIZE_LIMIT:
        raise ValueError(f"the size {text[:20]}... has more than 64 bits")
    return found


def is_bare(text: str) -> bool:
    """True for a size without a unit, which may have been forgotten."""
    return text.strip().isdigit()
