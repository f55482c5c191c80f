"""R10: see `tests.proof.event_followers`, imported when it runs, as it brings a daemon along."""

from __future__ import annotations

from tests.proof.line import Line, Size, Slice, Tally


def run(slice_: Slice) -> Tally:
    """Do the units of a slice."""
    from tests.proof import event_followers

    return event_followers.run(slice_)


def canary() -> None:
    """Plant bugs; raises AssertionError for one that is not found."""
    from tests.proof import event_followers

    event_followers.canary()


LINES = (
    Line(
        id="R10", name="index rebuilt from events", unit="walks",
        units={Size.COMMIT: 10, Size.NIGHTLY: 300, Size.RELEASE: 1_000}, slice_units=50,
        run=run, canary=canary,
    ),
)  # fmt: skip
