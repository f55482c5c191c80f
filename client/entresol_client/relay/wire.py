"""vLLM's KV event messages, as routers read them.

Pure. Invariant: what a `BlockStored` needs to be of use is always in it: token ids, parent, block
size and medium. `locality` is never sent: readers drop what does not say that it is local.

Three forms of one content, because vLLM changed it and readers did not follow at once:

| Form | Batch | Event | Who writes and reads it |
|---|---|---|---|
| `array` | array | array | vLLM to 0.2x, Dynamo, llm-d |
| `map` | array | map | vLLM 0.32 and 0.33, Dynamo, llm-d |
| `maps` | map | map | vLLM's sources, no release of it yet |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from entresol_client.relay.chain import Change, Removed, Stored

Form = Literal["array", "map", "maps"]

MEDIA = ("EXTERNAL", "STORAGE")
FRAME_SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * FRAME_SEQ_BYTES
CLEARED = "AllBlocksCleared"

EVENTS_PER_BATCH_MAX = 256
# Of a batch: what waits for a slow reader is counted in batches. No single event is so large, see
# the limits of `chain`.
BATCH_BYTES_MAX = 256 * 1024
# The most that msgpack makes of each.
_TOKEN_BYTES_MAX, _HASH_BYTES_MAX, _EVENT_BYTES_MAX = 5, 34, 1024

_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium")


def topic(pod: str, model: str) -> bytes:
    """The first frame of every message, by which readers tell pods and models apart."""
    return f"kv@{pod}@{model}".encode()


def seq_frame(seq: int) -> bytes:
    """The second frame."""
    return seq.to_bytes(FRAME_SEQ_BYTES, "big")


def batches(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Cut into batches within the limits, in order."""
    batch: list[Change] = []
    room = BATCH_BYTES_MAX
    for change in changes:
        need = _EVENT_BYTES_MAX + _HASH_BYTES_MAX * len(change.hashes)
        if isinstance(change, Stored):
            need += _TOKEN_BYTES_MAX * len(change.tokens)
        if batch and (need > room or len(batch) >= EVENTS_PER_BATCH_MAX):
            yield batch
            batch, room = [], BATCH_BYTES_MAX
        batch.append(change)
        room -= need
    if batch:
        yield batch


class Writer:
    """Encodes changes in one form, for one medium."""

    def __init__(self, form: Form = "array", medium: str = MEDIA[0]) -> None:
        self._as_array = form == "array"
        self._batch_as_map = form == "maps"
        self._medium = medium
        self._encoder = msgspec.msgpack.Encoder()

    def event(self, change: Change) -> Any:
        """One event, ready for `batch`."""
        if isinstance(change, Removed):
            return self._event("BlockRemoved", _REMOVED, (change.hashes, self._medium))
        return self._event("BlockStored", _STORED, self._stored(change))

    def cleared(self) -> Any:
        """The event that takes everything back: of the pod, whatever its medium."""
        return self._event(CLEARED, (), ())

    def _stored(self, change: Stored) -> tuple[Any, ...]:
        assert len(change.tokens) == len(change.hashes) * change.block_tokens
        return (
            change.hashes,
            change.parent,
            change.tokens.tolist(),
            change.block_tokens,
            None,
            self._medium,
            change.lora or None,
        )

    def _event(self, tag: str, names: Sequence[str], values: Sequence[Any]) -> Any:
        if self._as_array:
            return [tag, *values]
        return {"type": tag, **dict(zip(names, values, strict=True))}

    def batch(self, events: Iterable[Any], *, time_unix_s: float, dp_rank: int | None) -> bytes:
        """The third frame."""
        listed = list(events)
        if self._batch_as_map:
            whole: Any = {"ts": time_unix_s, "events": listed, "data_parallel_rank": dp_rank}
        else:
            whole = [time_unix_s, listed, dp_rank]
        return self._encoder.encode(whole)
