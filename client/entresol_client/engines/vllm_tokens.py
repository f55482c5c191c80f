"""Token ids of live requests: what routers need of a stored block and vLLM's tier is not told.

`EntresolConnector` fills it, the tier reads it; both run on vLLM's scheduler thread. Empty with
vLLM's plain connector: blocks are then stored without token ids, and routers skip their events.

Invariant: what is given for a block was read from the request that stores it, or nothing is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

from entresol_proto import limits

GROUP_BYTES = 4  # of vLLM's offload key, behind the block hash


class LiveRequest(Protocol):
    """What is read of vLLM's Request."""

    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Told:
    """What a put carries of one block. Position counts chunks from the start of the prompt."""

    position: int = 0
    parent_key: bytes | None = None
    token_ids: tuple[int, ...] = ()


def named_by_tokens(request: Any) -> bool:
    """True when a request's block hashes follow from its token ids and nothing else.

    With an adapter, images, embeddings or a salt in them, a router would credit the block to
    plain prompts with the same tokens, whose hashes are others.
    """
    extras = ("lora_request", "mm_features", "prompt_embeds", "cache_salt")
    return all(_absent(getattr(request, name, None)) for name in extras)


def _absent(extra: Any) -> bool:
    return extra is None or (isinstance(extra, (str, list, tuple)) and not extra)


class LiveRequests:
    """Requests by name, while the engine works on them; keeps none of them alive."""

    def __init__(self) -> None:
        self._requests: WeakValueDictionary[str, LiveRequest] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, request: Any) -> None:
        """The engine has taken a request."""
        self._requests[request_id] = request

    def remove(self, request_id: str) -> None:
        """The engine will store nothing more for it."""
        self._requests.pop(request_id, None)

    def told(
        self,
        request_id: str,
        key: bytes,
        end_token: int | None,
        *,
        group_id: int,
        chunk_tokens: int,
        hash_tokens: int,
    ) -> Told:
        """What to put with vLLM's `key`, whose chunk ends before `end_token`.

        Only blocks of group `group_id` are described: the others hold the same tokens again. A
        chunk cut short (of a recurrent state) holds fewer than a router would count.
        """
        if end_token is None or end_token <= 0:
            return Told()
        position = (end_token - 1) // chunk_tokens
        request = self._requests.get(request_id)
        described = int.from_bytes(key[-GROUP_BYTES:], "big") == group_id
        if request is None or not described or end_token % chunk_tokens:
            return Told(position)
        if not named_by_tokens(request):
            return Told(position)
        begin = end_token - chunk_tokens
        hash_count = end_token // hash_tokens
        tokens = tuple(request.all_token_ids[begin:end_token])
        hashes = request.block_hashes
        if len(tokens) != chunk_tokens or len(hashes) < hash_count:
            return Told(position)
        if bytes(hashes[hash_count - 1]) != key[:-GROUP_BYTES]:
            return Told(position)  # not the hash of these tokens: say nothing rather than guess
        if chunk_tokens > limits.TOKENS_PER_BLOCK_MAX or not all(
            isinstance(one, int) and 0 <= one < 2**32 for one in tokens
        ):
            return Told(position)
        parent = None
        if begin:
            parent = bytes(hashes[begin // hash_tokens - 1]) + key[-GROUP_BYTES:]
        return Told(position, parent, tokens)


live_requests = LiveRequests()
