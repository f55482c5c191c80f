"""LMCache's adapter where a signal handler interrupts it, without LMCache: what it imports is
stood in for, as far as the adapter needs it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from interrupting import at_every_line
from test_client_life import write_config
from test_client_sync import PeerThread

SOON_S = 5.0  # liveness only
LAYOUT = SimpleNamespace(shapes=[(2, 4, 16, 8)], dtypes=["bfloat16"])


class Notifier:
    """As LMCache's: a second `close` does nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found: dict[str, dict[str, Any]] = {
        "lmcache": {},
        "lmcache.lmcache_native": {"Bitmap": lambda length: SimpleNamespace(set=bool)},
        "lmcache.logging": {"init_logger": logging.getLogger},
        "lmcache.v1": {},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": SimpleNamespace},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.base": {
            "L2AdapterInterface": type("L2AdapterInterface", (), {"__init__": lambda self: None})
        },
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
    }
    for name, values in found.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.5.6" if name == "lmcache" else version(name)
    )
    module = importlib.import_module("entresol_client.engines.lmcache")
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def adapter(lmcache: Any, tmp_path: Path) -> Iterator[Any]:
    peer = PeerThread(tmp_path, "tcp")
    path = write_config(peer.peer.config(), tmp_path / "client.toml")
    made = lmcache.EntresolL2Adapter({"config": str(path), "model_revision": "r"})
    try:
        yield made
    finally:
        made.close()
        peer.stop()


def object_key() -> Any:
    return SimpleNamespace(
        chunk_hash=bytes(32), kv_rank=0, object_group_id=0, cache_salt="", model_name="m"
    )


def test_a_signal_handler_may_wait_for_the_loop_wherever_it_interrupts_the_adapter(
    adapter: Any,
) -> None:
    """What the loop has to post it posts, whatever the interrupted thread was about to do."""
    keys, told = [object_key()], {0: LAYOUT}
    thread = adapter._store._thread
    tasks = iter(range(10**6, 2 * 10**6))

    def handler() -> None:
        posted: Future[None] = Future()

        def post() -> None:
            for board in (adapter._stores, adapter._lookups, adapter._loads):
                board.post(next(tasks), None)
            posted.set_result(None)

        thread._loop.call_soon_threadsafe(post)
        posted.result(SOON_S)

    for ask in (
        lambda: adapter.query_lookup_and_lock_result(7),
        lambda: adapter.query_load_result(7),
        lambda: adapter.pop_completed_store_tasks(),
        lambda: adapter._loads.post(next(tasks), None),
        lambda: adapter._next_task(),
    ):
        assert at_every_line(ask, handler) > 0
    submitted = set()

    def submits() -> None:
        submitted.add(adapter.submit_lookup_and_lock_task(keys, told))

    submits()
    at_every_line(lambda: adapter._spaces.plan(keys, [None]), lambda: (handler(), submits()))
    assert len(submitted) > 1


def test_a_board_that_is_closed_as_a_result_is_posted_keeps_its_descriptor_until_then(
    lmcache: Any,
) -> None:
    """Its number would be somebody else's by then, who would be written to."""
    board = lmcache.Board()
    fd, tell, open_then = board.fileno(), board._notifier.notify, []

    def notify() -> None:
        board.close()
        open_then.append(os.fstat(fd))
        tell()

    board._notifier.notify = notify
    board.post(1, "result")
    assert open_then
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    board.post(2, "late")
    board.close()
    assert (board.take(2), board.take_all()) == (None, {1: "result"})
