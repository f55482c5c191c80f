"""LMCache's own objects for tests, and a controller's part: submit, wait, ask.

Invariant: a result is only asked for after its descriptor was readable, as LMCache itself does.
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

MODEL = "tiny/llama"
SHAPE = (2, 4, 64, 128)  # K and V, layers, tokens, hidden: 128 KiB of bfloat16
SECONDS_MAX = 40.0


def adapter_json(config: Path, **params: Any) -> str:
    """What an operator gives `lmcache server --l2-adapter`; with more patience than the default,
    because a busy machine that tests this takes longer than a quarter of a second at times."""
    return json.dumps(
        {
            "type": "plugin",
            "shared": True,
            "module_path": "entresol_client.engines.lmcache",
            "class_name": "EntresolL2Adapter",
            "adapter_params": {"config": str(config), "lookup_deadline_ms": 5000, **params},
        }
    )


def create(spec: str, desc: Any = None) -> Any:
    """An adapter through LMCache's own parser and factory."""
    options = type("Options", (), {"l2_adapter": [spec]})
    (config,) = parse_args_to_l2_adapters_config(options).adapters
    return create_l2_adapter(config, l1_memory_desc=desc)


def key(number: int, **fields: Any) -> ObjectKey:
    """The object of one chunk."""
    usual = {"chunk_hash": number.to_bytes(32, "big"), "model_name": MODEL, "kv_rank": 1 << 24}
    return ObjectKey(**{**usual, **fields})


def memory(seed: int | None, shape: Sequence[int] = SHAPE, dtype: Any = torch.bfloat16) -> Any:
    """A memory object with random content, or zeros."""
    raw = torch.zeros(tuple(shape), dtype=dtype).view(-1).view(torch.uint8)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    meta = MemoryObjMetadata(
        shape=torch.Size(shape), dtype=dtype, address=raw.data_ptr(), phy_size=raw.numel(),
        fmt=MemoryFormat.KV_2LTD, ref_count=1,
    )  # fmt: skip
    return TensorMemoryObj(raw, meta, parent_allocator=None)


def layouts(shape: Sequence[int] = SHAPE, dtype: Any = torch.bfloat16, groups: int = 1) -> Any:
    """What LMCache tells a lookup about each object group."""
    one = MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[dtype])
    return dict.fromkeys(range(groups), one)


class Controller:
    """One adapter, used as LMCache's store and prefetch controllers use it."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> L2StoreResult:
        task = self.adapter.submit_store_task(keys, objects)
        until = time.monotonic() + SECONDS_MAX
        while True:
            _wait(self.adapter.get_store_event_fd(), until)
            done = self.adapter.pop_completed_store_tasks()
            if task in done:
                return done[task]

    def lookup(self, keys: list[ObjectKey], descs: Any = None) -> list[bool]:
        described = layouts() if descs is None else descs
        task = self.adapter.submit_lookup_and_lock_task(keys, described)
        fd = self.adapter.get_lookup_and_lock_event_fd()
        return _bits(fd, lambda: self.adapter.query_lookup_and_lock_result(task), len(keys))

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        fd = self.adapter.get_load_event_fd()
        return _bits(fd, lambda: self.adapter.query_load_result(task), len(keys))


def same(one: Any, other: Any) -> bool:
    """Whether two memory objects hold the same bytes."""
    return bool(torch.equal(one.raw_data, other.raw_data))


def _bits(fd: int, ask: Any, count: int) -> list[bool]:
    until = time.monotonic() + SECONDS_MAX
    while True:
        _wait(fd, until)
        bitmap = ask()
        if bitmap is not None:
            return [bitmap.test(at) for at in range(count)]


def _wait(fd: int, until: float) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(max(0.0, until - time.monotonic()) * 1000), "the descriptor stayed silent"
    consume_fd(fd)
