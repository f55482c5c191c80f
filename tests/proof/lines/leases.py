"""S3: see `tests.proof.lease_reads`, imported when it runs, as it brings a daemon along."""

from __future__ import annotations

from tests.proof.line import Line, Size, Slice, Tally


def run(slice_: Slice) -> Tally:
    """Do the units of a slice."""
    from tests.proof import lease_reads

    return lease_reads.run(slice_)


def canary() -> None:
    """Plant bugs; raises AssertionError for one that is not found."""
    from tests.proof import lease_reads

    lease_reads.canary()


LINES = (
    Line(
        id="S3", name="leases on tcp, TLS and shm", unit="batches of 500 hostile reads",
        units={Size.COMMIT: 240, Size.NIGHTLY: 1_000, Size.RELEASE: 4_000}, slice_units=140,
        run=run, canary=canary,
    ),
)  # fmt: skip
