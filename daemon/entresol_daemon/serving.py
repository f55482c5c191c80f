"""A daemon from its start to the signal that stops it, or to what it cannot mend while it runs.

Invariant: a daemon that can no longer say what is on flash does not go on: it ends with an error,
in bounded time, and whoever starts it again (systemd, on failure) has what was durable.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable

from entresol_daemon.config import Config
from entresol_daemon.keys import pool_ends
from entresol_daemon.manager import tell
from entresol_daemon.server import Daemon
from entresol_proto.status import EntresolError

BROKEN_STOP_S = 10.0  # for a goodbye to hosts and for closing, when something broke
# The collector holds up the loop by a quarter to half a microsecond for each object it looks at: it
# does so often and briefly, but for all there is, which has hardly a cycle in it.
GC_OBJECTS_THRESHOLD = 250  # container objects made between two looks at the youngest
GC_YOUNG_LOOKS = 10  # of these between two looks at what lived through one
GC_OLD_LOOKS = 800  # of those between two looks at all there is

log = logging.getLogger("entresol.daemon")


def _nothing() -> None:
    """There is nothing to tidy up."""


async def serve(
    config: Config,
    *,
    on_ready: Callable[[Daemon], None] | None = None,
    on_exit: Callable[[], None] = _nothing,
    hangup_stops: bool = False,
) -> None:
    """Run a daemon until SIGTERM or SIGINT. A second signal shortens the drain.

    `hangup_stops`: SIGHUP means that its terminal has closed, which ends it as well.

    `on_exit` is called before the process is ended from here, which happens to one that broke and
    does not close. Raises: EntresolError when it cannot start, or something in it broke.
    """
    stop = asyncio.Event()
    hurry = asyncio.Event()
    daemon = Daemon(config, settle=_quiet_collector)
    hung_up = started = False

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    def on_hangup() -> None:
        nonlocal hung_up
        if hangup_stops:
            stop.set()
        elif started:
            daemon.on_hangup()
        else:
            hung_up = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    if not await _start_unless(stop, daemon):
        log.info("event=stopped while=starting")
        return
    started = True
    if hung_up:
        daemon.on_hangup()
    broken: BaseException | None = None
    try:
        if on_ready is not None:
            on_ready(daemon)
        broken = await _until(stop, daemon)
    finally:
        if broken is None:
            broken = await _stop(daemon, hurry, on_exit)
        else:
            await _end(asyncio.ensure_future(daemon.stop(drain_ns=0, clean=False)), on_exit)
    if broken is not None:  # its words are the log's, which lets no content through
        raise EntresolError(
            f"writing to flash broke ({type(broken).__name__}): the log says where",
            hint="start it again: what was durable is there; please tell the makers",
        )


async def _start_unless(stop: asyncio.Event, daemon: Daemon) -> bool:
    """Start it; False when a stop was asked for meanwhile: everything is closed again then.

    Raises: EntresolError when it cannot start.
    """
    starting = asyncio.ensure_future(daemon.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            return True
        tell("STOPPING=1\nSTATUS=stopping before it has started")
        return False
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


def _quiet_collector() -> None:
    """What was imported and built so far lives as long as the process: keep the collector from
    walking it again and again."""
    gc.collect()
    for _ in pool_ends.clear():  # which does not find them later
        pass
    gc.freeze()
    gc.set_threshold(GC_OBJECTS_THRESHOLD, GC_YOUNG_LOOKS, GC_OLD_LOOKS)


async def _until(stop: asyncio.Event, daemon: Daemon) -> BaseException | None:
    """Wait for the stop, or for what broke; returns that."""
    stopping = asyncio.ensure_future(stop.wait())
    breaking = asyncio.ensure_future(daemon.until_broken())
    try:
        await asyncio.wait({stopping, breaking}, return_when=asyncio.FIRST_COMPLETED)
        return breaking.result() if breaking.done() else None
    finally:
        for task in (stopping, breaking):
            task.cancel()
        await asyncio.gather(stopping, breaking, return_exceptions=True)


async def _stop(
    daemon: Daemon, hurry: asyncio.Event, on_exit: Callable[[], None]
) -> BaseException | None:
    """Drain and close; returns what broke meanwhile."""
    stopping = asyncio.ensure_future(daemon.stop())
    rushing = asyncio.ensure_future(hurry.wait())
    breaking = asyncio.ensure_future(daemon.until_broken())
    waits = {stopping, rushing, breaking}
    try:
        while not (stopping.done() or breaking.done()):
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if rushing in waits and rushing.done():
                waits.discard(rushing)
                log.warning("event=hurried hint='second signal: not waiting for hosts'")
                daemon.shard.hurry()
        if breaking.done():
            await _end(stopping, on_exit)
            return breaking.result()
        await stopping
        return None
    finally:
        for task in (rushing, breaking):
            task.cancel()
        await asyncio.gather(rushing, breaking, return_exceptions=True)


async def _end(stopping: asyncio.Future[None], on_exit: Callable[[], None]) -> None:
    """Wait until what can be closed is closed. What does not end by then may hang on what broke:
    it is left to the kernel, as after a kill."""
    await asyncio.wait({stopping}, timeout=BROKEN_STOP_S)
    if not stopping.done():
        log.error("event=stop_hangs effect=killed")
        on_exit()
        logging.shutdown()
        os._exit(1)
    if error := stopping.exception():
        log.error("event=stop_failed reason=%r", repr(error))
