"""Whose blocks a request may use, as vLLM's `kv_transfer_params` say it to the tier and to KVBM.

Invariant: parameters that make no sense name nobody. A request narrows; whom it may name at all is
the operator's list (`EngineSettings.tenants`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARAMS_KEY = "entresol"  # in a request's `kv_transfer_params`
SALT_CHARS_MAX = 512


class ParamsError(ValueError):
    """A request's parameters for this tier cannot be understood; the tier is not used for it."""


@dataclass(frozen=True, slots=True)
class Who:
    """Whose blocks a request may use. Tenant "": the one the engine's own certificate names."""

    tenant: str = ""
    salt: str = field(default="", repr=False)


def _is_utf8(text: str) -> bool:
    """False for lone surrogates, which JSON can spell and nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def who_asks(params: Mapping[str, Any] | None) -> Who:
    """Read `{"entresol": {"tenant": ..., "salt": ...}}` of a request's `kv_transfer_params`.

    Raises: ParamsError when it is there and anything else: guessing could share what must not be.
    """
    if params is not None and not isinstance(params, Mapping):
        raise ParamsError("kv_transfer_params is not a table")
    mine = (params or {}).get(PARAMS_KEY)
    if mine is None:
        return Who()
    if not isinstance(mine, Mapping) or not mine.keys() <= {"tenant", "salt"}:
        raise ParamsError(f"{PARAMS_KEY} is not a table of tenant and salt")
    for name, value in mine.items():
        if not isinstance(value, str) or not 0 < len(value) <= SALT_CHARS_MAX:
            raise ParamsError(
                f"{PARAMS_KEY}.{name} is not a text of 1..{SALT_CHARS_MAX} characters"
            )
        if not _is_utf8(value):
            raise ParamsError(f"{PARAMS_KEY}.{name} holds half a character")
    return Who(mine.get("tenant", ""), mine.get("salt", ""))
