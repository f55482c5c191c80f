"""LMCache's second level in Entresol: an L2 adapter plug-in of LMCache's MP server.

    lmcache server --l2-adapter '{"type": "plugin", "shared": true,
        "module_path": "entresol_client.engines.lmcache", "class_name": "EntresolL2Adapter",
        "adapter_params": {"config": "/etc/entresol/client.toml"}}'

Invariants: submitting never blocks on the daemon and never raises; every task gets exactly one
result, read once; an object's bytes are used under the layout of the very buffer they go to.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib import metadata
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from entresol_client.engines import lmcache_keys as names
from entresol_client.engines.lmcache_spaces import Spaces
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore, LoadReply, Space, StoreReply
from entresol_client.loopthread import Gate
from entresol_client.results import PutBlock
from entresol_proto.status import ConfigError, Status

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

log = init_logger("entresol.lmcache")  # shows what LMCACHE_LOG_LEVEL says, as LMCache's own do

R = TypeVar("R")
TESTED = "0.5.6"
DELETE_SECONDS_MAX = 30.0


class Board(Generic[R]):
    """Results of one kind of task, each taken once, and the file descriptor that announces them.

    Without a lock: the loop posts, and must not wait for who takes (see `store`).
    """

    def __init__(self) -> None:
        self._results: dict[int, R] = {}
        self._notifier: Any = create_event_notifier()
        self._posting: set[int] = set()  # tasks whose result is being posted now
        self._to_close: list[Any] = [self._notifier]  # by whoever takes it out
        self._closed = False

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def post(self, task: int, result: R) -> None:
        """From any thread; after `close` nobody is told."""
        self._posting.add(task)
        try:
            if not self._closed:
                self._results[task] = result
                self._notifier.notify()
        finally:
            self._posting.discard(task)
            if self._closed:
                self._end()

    def take(self, task: int) -> R | None:
        return self._results.pop(task, None)

    def take_all(self) -> dict[int, R]:
        taken: dict[int, R] = {}
        with contextlib.suppress(KeyError):  # as many as there are
            while True:
                task, result = self._results.popitem()
                taken[task] = result
        return taken

    def close(self) -> None:
        """Close the descriptor, once nobody posts. Idempotent."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(IndexError):
            if not self._posting:
                self._to_close.pop().close()


class EntresolL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache ships no type marker
    """Stores, finds and loads LMCache's objects in Entresol.

    A lookup's lock is a touch: what was found is recent, so that it is evicted last. It takes no
    lock at the daemon, and `submit_unlock` has nothing to undo; an object that goes nevertheless
    is a cleared bit in the load's result, which LMCache recomputes.

    Entresol evicts by itself: no capacity is declared, so LMCache evicts nothing here on its own.
    """

    def __init__(
        self, params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        """`params` are `EngineSettings`, and `kv_format`: who lays out the bytes of an object
        (default: LMCache and its version).

        Raises: ConfigError, IdentityError. Never because the daemon is absent.
        """
        super().__init__()
        settings = EngineSettings.from_mapping(
            params, where="adapter_params", also=frozenset({"kv_format"})
        )
        if settings.tenants:
            raise ConfigError(
                "adapter_params: LMCache's requests name no tenant",
                hint="run one `lmcache server` per tenant, each with its own config",
            )
        version = metadata.version("lmcache")
        if version != TESTED:
            log.warning("event=lmcache_untested version=%s tested=%s", version, TESTED)
        self._store = EngineStore(settings)
        self._spaces = Spaces(self._store, params.get("kv_format", f"lmcache-{version}"))
        self._tasks = itertools.count(1)
        self._closed = False
        self._stores: Board[L2StoreResult] = Board()
        self._lookups: Board[Bitmap] = Board()
        self._loads: Board[Bitmap] = Board()
        if l1_memory_desc is not None:
            self._store.register(_memory(l1_memory_desc))
        log.info("event=lmcache_adapter_open lmcache=%s shards=%r", version, self._store.describe())

    # Descriptors -------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # Store -------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start storing. The objects stay LMCache's, unchanged, until the result is posted."""
        task = self._next_task()

        def finish(replies: list[tuple[list[int], StoreReply]]) -> None:
            good = [p for at, reply in replies for p in _kept(at, reply.statuses, Status.OK)]
            had = [p for at, reply in replies for p in _kept(at, reply.statuses, Status.EXISTS)]
            if good:
                sizes = [int(objects[p].get_size()) for p in good]
                _listeners(self._notify_keys_stored, [keys[p] for p in good], sizes)
            if had:
                _listeners(self._notify_keys_accessed, [keys[p] for p in had])
            stored_bytes = sum(reply.bytes_stored for _, reply in replies)
            ok = len(good) + len(had) == len(keys)
            self._stores.post(task, L2StoreResult(ok, stored_bytes))

        def start(space: Space, at: list[int], blocks: list[bytes]) -> Future[StoreReply]:
            views = [objects[p].byte_array for p in at]
            return space.store([PutBlock(k, v) for k, v in zip(blocks, views, strict=True)])

        self._run(keys, [_layout(one) for one in objects], start, finish)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    # Lookup ------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Start a lookup. Of a group whose layout neither the caller nor an earlier object told,
        nothing is found."""
        task = self._next_task()
        told = {
            group: names.layout_of(one.shapes, one.dtypes)
            for group, one in group_layout_descs.items()
        }

        def finish(replies: list[tuple[list[int], list[bool]]]) -> None:
            found = [p for at, hits in replies for p, hit in zip(at, hits, strict=True) if hit]
            self._lookups.post(task, _bitmap(len(keys), found))

        def start(space: Space, at: list[int], blocks: list[bytes]) -> Future[list[bool]]:
            future = space.lookup(blocks)
            future.add_done_callback(lambda done: _touch(space, blocks, done.result()))
            return future

        self._run(keys, [told.get(key.object_group_id) for key in keys], start, finish)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing to undo: see the class."""

    # Load --------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start loading into the objects, which stay alive and untouched until the result is
        posted; nothing lands later. Where a bit is cleared, a buffer is as it was, or zeros."""
        task = self._next_task()

        def finish(replies: list[tuple[list[int], LoadReply]]) -> None:
            good = [p for at, reply in replies for p in _kept(at, reply.statuses, Status.OK)]
            if good:
                _listeners(self._notify_keys_accessed, [keys[p] for p in good])
            self._loads.post(task, _bitmap(len(keys), good))

        def start(space: Space, at: list[int], blocks: list[bytes]) -> Future[LoadReply]:
            return space.load(blocks, [objects[p].byte_array for p in at])

        self._run(keys, [_layout(one) for one in objects], start, finish)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    # The rest ----------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Forget objects, for all hosts of the tenant, in every layout that they may have. Called
        by LMCache's own eviction (a quota of a salt); waits for the daemon, at most
        `DELETE_SECONDS_MAX`. What cannot be named here is not reported as deleted."""
        done = Gate()
        each = [(p, one) for p, key in enumerate(keys) for one in self._spaces.layouts(key)]
        sizes = [self._spaces.size_bytes(key) for key in keys]

        def finish(replies: list[tuple[list[int], bool]]) -> None:
            left = Counter(p for p, _ in each)
            left.subtract(each[at][0] for ats, complete in replies if complete for at in ats)
            gone = [p for p, layouts in left.items() if not layouts]
            if gone:
                told = [keys[p] for p in gone], [sizes[p] for p in gone]
                _listeners(self._notify_keys_deleted, *told)
            done.open()

        def start(space: Space, at: list[int], blocks: list[bytes]) -> Future[bool]:
            return space.forget(blocks)

        self._run([keys[p] for p, _ in each], [one for _, one in each], start, finish)
        if not done.wait(DELETE_SECONDS_MAX):
            log.warning("event=lmcache_delete_timeout keys=%d", len(keys))

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page. An absent daemon is no reason to restart LMCache: the adapter
        is healthy, and `connected` tells."""
        return {
            "is_healthy": not self._closed,
            "type": type(self).__name__,
            "connected": not self._closed and self._store.connected(),
            "shards": "" if self._closed else self._store.describe(),
            **self._store.stats(),
        }

    def close(self) -> None:
        """Give stores under way a moment, end the sessions, close the descriptors. Idempotent.
        After it nothing lands in any buffer."""
        self._closed = True
        self._store.close()
        self._spaces.close()
        for board in (self._stores, self._lookups, self._loads):
            board.close()

    # Inside ------------------------------------------------------------------------------------

    def _next_task(self) -> int:
        return next(self._tasks)

    def _run(
        self,
        keys: Sequence[ObjectKey],
        layouts: Sequence[names.Layout | None],
        start: Callable[[Space, list[int], list[bytes]], Future[R]],
        finish: Callable[[list[tuple[list[int], R]]], None],
    ) -> None:
        """Start one job per namespace; when all are done, `finish` gets (positions, reply) of each.
        Objects that cannot be named, and jobs that cannot be started, are in none. What `start`
        refers to lives until then: LMCache keeps its objects, and a mistake there must not become
        bytes landing in memory of somebody else."""
        jobs: list[tuple[list[int], Future[R]]] = []
        try:
            for space, positions, blocks in self._spaces.plan(keys, layouts):
                jobs.append((positions, start(space, positions, blocks)))
        except Exception:
            log.exception("event=lmcache_task_failed keys=%d", len(keys))
        ended = itertools.count(1)  # from any thread, without a lock

        def one_done(_: object, held: object = start) -> None:
            if next(ended) == len(jobs):
                finish([(positions, future.result()) for positions, future in jobs])

        if not jobs:
            finish([])
        for _, future in jobs:
            future.add_done_callback(one_done)


def _memory(desc: L1MemoryDesc) -> memoryview:
    """LMCache's own host memory, as far as it is there already; it outlives the adapter."""
    size_bytes = getattr(desc, "stable_registration_size", None) or desc.size
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(desc.ptr))


def _layout(one: MemoryObj) -> names.Layout:
    """The layout of the buffer itself."""
    meta = one.metadata
    if meta.shapes is not None and meta.dtypes is not None:
        return names.layout_of(meta.shapes, meta.dtypes)
    return names.layout_of([meta.shape], [meta.dtype])


def _kept(positions: list[int], statuses: Sequence[Status], wanted: Status) -> list[int]:
    return [p for p, status in zip(positions, statuses, strict=True) if status is wanted]


def _bitmap(length: int, positions: Sequence[int]) -> Bitmap:
    bitmap = Bitmap(length)
    for position in positions:
        bitmap.set(position)
    return bitmap


def _listeners(notify: Callable[..., None], *what: object) -> None:
    """Tell LMCache's listeners; one that fails must not cost a task its result."""
    try:
        notify(*what)
    except Exception:
        log.exception("event=lmcache_listener_failed")


def _touch(space: Space, blocks: list[bytes], found: list[bool]) -> None:
    here = [block for block, hit in zip(blocks, found, strict=True) if hit]
    if here:
        space.touch(here)
