"""The outcome vocabulary: numbers that never change, labels, and exceptions that carry both."""

from __future__ import annotations

import pytest

from entresol_proto import status as status_module
from entresol_proto.status import EntresolError, Status

# On the wire since protocol 1: numbers are never reused or renamed, new ones are appended here.
NUMBERS = {
    "OK": 0, "MISS": 1, "GAP": 2, "EXISTS": 3, "CORRUPT": 4, "DEADLINE": 5, "BUSY": 6, "QUOTA": 7,
    "TOO_LARGE": 8, "BAD_REQUEST": 9, "FORBIDDEN": 10, "UNSUPPORTED": 11, "LEASE_EXPIRED": 12,
    "LOCKED": 13, "DRAINING": 14, "NO_SPACE": 15, "IO_ERROR": 16, "FABRIC_ERROR": 17,
    "DISCONNECTED": 18, "BREAKER_OPEN": 19, "CONFLICT": 20, "ERASED": 21, "INTERNAL": 22,
    "NOT_ADMITTED": 23,
}  # fmt: skip

ERRORS = [
    value
    for value in vars(status_module).values()
    if isinstance(value, type) and issubclass(value, EntresolError)
]


def test_numbers_stay() -> None:
    assert {item.name: int(item) for item in Status} == NUMBERS
    assert all(0 <= item < 256 for item in Status), "a status is one byte"


def test_labels_are_their_names_in_lower_case() -> None:
    assert len({item.label for item in Status}) == len(Status)
    for item in Status:
        assert item.label == item.name.lower()
        assert item.label.replace("_", "").isalpha()


def test_everything_but_ok_is_a_miss() -> None:
    assert [item for item in Status if not item.is_miss] == [Status.OK]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_carry_a_status_and_a_hint(kind: type[EntresolError]) -> None:
    plain = kind("it broke")
    assert plain.status is kind.status
    assert isinstance(plain.status, Status)
    assert str(plain) == "it broke"
    assert plain.hint == ""
    told = kind("it broke", hint="mend it", status=Status.QUOTA)
    assert str(told) == "it broke (mend it)"
    assert told.status is Status.QUOTA
    assert kind.status is not Status.OK, "an error is never OK"
    assert kind("again").status is kind.status, "the status of one error is not that of its class"


def test_errors_are_not_also_value_errors() -> None:
    """`except ValueError` around a call must not swallow ours, nor `except OSError`."""
    for kind in ERRORS:
        assert not issubclass(kind, (ValueError, OSError, RuntimeError))
