"""Which namespace and key an LMCache object has: what `lmcache_keys` needs to know, remembered.

Invariant: planning waits for nothing but, once per model and bounded, the fingerprint of a local
model's weights; a model without its name yet has no objects here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from entresol_client.engines import lmcache_keys as names
from entresol_client.engines import naming
from entresol_client.engines.store import EngineStore, Space
from entresol_proto import limits
from entresol_proto.ids import BadKeyError
from entresol_proto.status import ConfigError

log = logging.getLogger("entresol.lmcache")

SPACES_MAX = limits.NAMESPACES_PER_SESSION_MAX
REVISION_SECONDS_MAX = 2.0
LAYOUTS_KEPT_MAX = 8  # of one model, rank and group: an engine that began anew may have another

Place = tuple[str, int, int]
"""(model, KV rank, object group): LMCache's rank has the world's size in it."""


class Spaces:
    """The namespaces in use. May be used from any thread."""

    def __init__(self, store: EngineStore, kv_format: object) -> None:
        """Raises: ConfigError when `kv_format` is not a text."""
        if not isinstance(kv_format, str) or not kv_format:
            raise ConfigError(f"adapter_params: kv_format is {kv_format!r}, not a text")
        self._store = store
        self._format = kv_format
        self._lock = threading.RLock()  # over what follows; never asked for on the loop
        self._spaces: dict[tuple[str, names.Layout, int], Space] = {}
        self._layouts: dict[Place, list[names.Layout]] = {}  # the newest last
        self._revisions: dict[str, Future[str]] = {}
        self._told: set[str] = set()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="entresol-weights")

    def plan(
        self, keys: Sequence[Any], layouts: Sequence[names.Layout | None]
    ) -> list[tuple[Space, list[int], list[bytes]]]:
        """Per namespace: the positions of its objects and their keys. An object that has no name
        (no known layout, too many namespaces, a field out of range) is in none; told once."""
        jobs: dict[Space, tuple[list[int], list[bytes]]] = {}
        for position, (key, told) in enumerate(zip(keys, layouts, strict=True)):
            layout = self._layout(key, told)
            if layout is None:
                continue
            try:
                block = names.engine_key(
                    key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt
                )
                space = self._space(key.model_name, layout, len(key.chunk_hash))
            except (BadKeyError, ConfigError) as error:
                self._tell_once(str(error))
                continue
            positions, blocks = jobs.setdefault(space, ([], []))
            positions.append(position)
            blocks.append(block)
        return [(space, *job) for space, job in jobs.items()]

    def layouts(self, key: Any) -> tuple[names.Layout, ...]:
        """Every layout that objects of this key's model, rank and group were seen in."""
        with self._lock:
            return tuple(self._layouts.get(_place(key), ()))

    def size_bytes(self, key: Any) -> int:
        """Bytes of an object, as far as its layout is known; 0 otherwise."""
        return names.size_bytes((self.layouts(key) or ((),))[-1])

    def close(self) -> None:
        """Stop the thread that reads weights, without waiting for it."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _layout(self, key: Any, told: names.Layout | None) -> names.Layout | None:
        """The layout of an object: as told, which is remembered, or the last that was told."""
        with self._lock:
            if not told:
                return (self._layouts.get(_place(key)) or (None,))[-1]
            seen = self._layouts.setdefault(_place(key), [])
            if told in seen:
                seen.remove(told)
            seen.append(told)
            del seen[:-LAYOUTS_KEPT_MAX]
            return told

    def _space(self, model: str, layout: names.Layout, hash_bytes: int) -> Space:
        """Raises: BadKeyError, ConfigError."""
        name = (model, layout, hash_bytes)
        with self._lock:
            space = self._spaces.get(name)
            if space is not None:
                return space
            if len(self._spaces) >= SPACES_MAX:
                raise ConfigError(f"more than {SPACES_MAX} models and layouts")
            revision, wait_seconds = self._revisions.get(model), 0.0
            if revision is None:
                wait_seconds = REVISION_SECONDS_MAX
                settings = self._store.settings
                revision = self._readers.submit(
                    naming.revision,
                    names.model_of(model),
                    settings.model_revision,
                    "",
                    settings.weights,
                    settings.adapters,
                )
                self._revisions[model] = revision
        try:
            text = revision.result(wait_seconds)
        except TimeoutError:
            raise ConfigError(f"the weights of {model!r} are still being read") from None
        found = names.descriptor(model, text, layout, self._format, hash_bytes)
        with self._lock:
            return self._spaces.setdefault(name, self._store.space(found))

    def _tell_once(self, reason: str) -> None:
        with self._lock:
            if reason in self._told or len(self._told) >= SPACES_MAX:
                return
            self._told.add(reason)
        log.warning("event=lmcache_object_without_name reason=%s", reason)


def _place(key: Any) -> Place:
    return key.model_name, key.kv_rank, key.object_group_id
