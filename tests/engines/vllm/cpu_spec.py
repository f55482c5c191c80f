"""vLLM's tiered offloading on a processor: upstream's worker insists on a GPU, and only there.

Everything else is vLLM's own: scheduler, tiering manager, primary tier, the tier under test. The
"device" is ordinary memory, so copies between it and the pool are done at once.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies KV blocks between the model's cache and the pool, one block and tensor at a time."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._pairs = []
        for tensor in kv_caches.tensors:
            page_bytes = tensor.page_size_bytes
            blocks = tensor.tensor.view(torch.int8).view(-1, page_bytes)
            chunks = region.create_next_worker_view(page_bytes * blocks_per_chunk)
            self._pairs.append((blocks, chunks, page_bytes))
        self._finished: list[TransferResult] = []

    def _copy(self, job_id: int, gpu: Any, pool: Any, *, store: bool) -> bool:
        begun_s = time.perf_counter()
        moved_bytes = 0
        assert len(gpu.group_sizes) == 1, "one KV group is all that this worker knows"
        first = int(gpu.block_indices[0]) % self._blocks_per_chunk
        chunk_ids = pool.chunk_ids if hasattr(pool, "chunk_ids") else pool.block_ids
        for number, block_id in enumerate(gpu.block_ids.tolist()):
            chunk, within = divmod(first + number, self._blocks_per_chunk)
            for blocks, chunks, page_bytes in self._pairs:
                at = within * page_bytes
                row = chunks[int(chunk_ids[chunk]), at : at + page_bytes]
                block = blocks[block_id]
                if store:
                    row.copy_(block)
                else:
                    block.copy_(row)
                moved_bytes += page_bytes
        took_s = time.perf_counter() - begun_s
        self._finished.append(TransferResult(job_id, True, moved_bytes, took_s))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._pairs.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CpuTieringSpec(TieringOffloadingSpec):
    """`"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm.cpu_spec"`."""

    def create_worker(self, kv_caches: Any) -> CopyingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, self.blocks_per_chunk, region)

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker
