"""Bugs that canaries plant in a real daemon process: each must be found by its line.

Called by name before the daemon starts, in its own process only.
"""

from __future__ import annotations

from entresol_daemon.flash import writer as flash_writer
from entresol_daemon.flash.group import Pending
from entresol_proto.status import Status


def early_ack() -> None:
    """`durable` is said before anything was written."""
    submit = flash_writer.Writer.submit

    def eager(self: flash_writer.Writer, pending: Pending) -> None:
        submit(self, pending)
        if pending.future is not None and not pending.future.done():
            pending.future.set_result(Status.OK)

    flash_writer.Writer.submit = eager  # type: ignore[method-assign]
