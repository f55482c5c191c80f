"""What the scheduler side of the tier beside KVBM plans, over requests as vLLM describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="not run here: no xxhash package")

from entresol_client.engines.kvbm_hash import KeyChain
from entresol_client.engines.kvbm_plan import Planner, StepPlan

BLOCK = 4


@dataclass
class Request:
    """A vLLM request, as far as the planner looks at one."""

    all_token_ids: list[int]
    request_id: str = "r"
    prompt: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens if self.prompt is None else self.prompt


def tokens(blocks: int, more: int = 0) -> list[int]:
    return list(range(100, 100 + blocks * BLOCK + more))


def key_list(request: Request) -> list[bytes]:
    chain = KeyChain(BLOCK, request.cache_salt)
    chain.extend(request.all_token_ids)
    return chain.keys


def holding(present: Callable[[str, int], bool]) -> Callable[..., Future[list[bool]]]:
    """A look-up that is answered at once by `present(tenant, index)`."""

    def look(tenant: str, keys: Sequence[bytes]) -> Future[list[bool]]:
        answer: Future[list[bool]] = Future()
        answer.set_result([present(tenant, index) for index in range(len(keys))])
        return answer

    return look


def planner(present: Callable[[str, int], bool] | None = None, **how: Any) -> Planner:
    made = Planner(BLOCK, **how)
    made.lookup = holding(present or (lambda tenant, index: True))
    return made


def kvbm(blocks: int = 0) -> Callable[[], tuple[int | None, bool]]:
    return lambda: (blocks * BLOCK, blocks > 0)


def scheduled(
    request: Request, computed: int, count: int, blocks: Sequence[int], *, new: bool = True
) -> Any:
    """vLLM's SchedulerOutput for one request."""
    rows = [SimpleNamespace(
        req_id=request.request_id, block_ids=(list(blocks),), num_computed_tokens=computed
    )]  # fmt: skip
    cached = SimpleNamespace(
        req_ids=[] if new else [request.request_id],
        new_block_ids=[] if new else [(list(blocks),)],
        num_computed_tokens=[] if new else [computed],
        resumed_req_ids=set(),
    )
    return SimpleNamespace(
        scheduled_new_reqs=rows if new else [],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={request.request_id: count},
    )


def nothing_scheduled() -> Any:
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}
    )


def stored(plan: StepPlan) -> list[tuple[int, int]]:
    return [(b.position, b.device_block) for op in plan.stores for b in op.blocks]


@pytest.mark.parametrize("computed", [0, 1, 2])
@pytest.mark.parametrize("kvbm_blocks", [0, 1, 3])
@pytest.mark.parametrize("present", [0, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_the_prefix_is_kvbms_and_then_ours(
    computed: int, kvbm_blocks: int, present: int, more: int
) -> None:
    request = Request(tokens(8, more))
    one = planner(lambda tenant, index: index < present)
    answer, asynchronous = one.match(request, computed * BLOCK, kvbm(kvbm_blocks))
    usable = 8 if more else 7  # vLLM must be left a token to compute
    ours = max(0, min(present, usable) - computed - kvbm_blocks)
    assert answer == (kvbm_blocks + ours) * BLOCK
    assert asynchronous is (answer > 0)
    assert computed * BLOCK + answer < request.num_tokens
    device = list(range(50, 50 + computed + kvbm_blocks + ours))
    given = one.allocated(request, device, answer)
    plan = one.step(nothing_scheduled())
    if not ours:
        assert given is None
        assert not plan.loads
        return
    start = computed + kvbm_blocks
    assert given == (start, kvbm_blocks * BLOCK)
    (load,) = plan.loads
    assert load.keys == tuple(key_list(request)[start : start + ours])
    assert load.device_blocks == tuple(device[start:])
    assert load.beside_kvbm is (kvbm_blocks > 0)


def test_a_gap_ends_what_is_offered() -> None:
    one = planner(lambda tenant, index: index != 3)
    assert one.match(Request(tokens(8, 1)), 0, kvbm(1)) == (3 * BLOCK, True)


def test_kvbm_can_bridge_a_gap() -> None:
    one = planner(lambda tenant, index: index != 3)
    assert one.match(Request(tokens(8, 1)), 0, kvbm(4)) == (8 * BLOCK, True)


def test_kvbm_is_not_asked_before_the_tier_has_answered() -> None:
    answer: Future[list[bool]] = Future()
    one = Planner(BLOCK)
    one.lookup = lambda tenant, keys: answer
    request = Request(tokens(4, 1))

    def too_early() -> tuple[int | None, bool]:
        raise AssertionError("KVBM stages blocks for a number of computed tokens that may change")

    one.seen(request)
    assert one.match(request, 0, too_early) == (None, False)
    answer.set_result([True] * 4)
    assert one.match(request, BLOCK, kvbm()) == (3 * BLOCK, True)


def test_a_load_that_failed_is_not_tried_again() -> None:
    request, one = Request(tokens(4, 1)), planner()
    one.match(request, 0, kvbm())
    one.allocated(request, [5, 6, 7, 8], 4 * BLOCK)
    one.step(nothing_scheduled())
    one.transferred(["r"], [6])
    assert one.match(request, 0, kvbm()) == (0, False)
    assert one.counts["given_up_requests"] == 1


def test_blocks_of_a_failed_load_are_stored_when_they_are_computed() -> None:
    request, one = Request(tokens(4, 1)), planner()
    one.match(request, 0, kvbm())
    one.allocated(request, [5, 6, 7, 8], 4 * BLOCK)
    one.step(nothing_scheduled())
    one.transferred(["r"], [7])
    plan = one.step(scheduled(request, 2 * BLOCK, 2 * BLOCK + 1, [5, 6, 7, 8, 9]))
    assert (2, 7) in stored(plan)
    assert (3, 8) in stored(plan)


def test_a_failure_of_others_does_not_end_a_request() -> None:
    request, one = Request(tokens(4, 1)), planner()
    one.match(request, 0, kvbm())
    one.allocated(request, [5, 6, 7, 8], 4 * BLOCK)
    one.transferred([], [99])
    assert one.match(request, 0, kvbm()) == (4 * BLOCK, True)


def test_only_whole_computed_blocks_are_stored_and_each_once() -> None:
    request, one = Request(tokens(4, 2)), planner(lambda tenant, index: False)
    one.match(request, 0, kvbm())
    one.allocated(request, [1, 2, 3, 4, 5], 0)
    assert stored(one.step(scheduled(request, 0, 7, [1, 2, 3, 4, 5]))) == [(0, 1)]
    assert stored(one.step(scheduled(request, 7, 6, [], new=False))) == [(1, 2), (2, 3)]
    assert stored(one.step(scheduled(request, 13, 5, [], new=False))) == [(3, 4)]
    assert not one.step(scheduled(request, 18, 1, [], new=False)).stores


def test_what_is_stored_names_its_tokens_and_its_parent() -> None:
    request, one = Request(tokens(2, 1)), planner(lambda tenant, index: False)
    one.match(request, 0, kvbm())
    (op,) = one.step(scheduled(request, 0, 9, [1, 2, 3])).stores
    keys = key_list(request)
    assert [block.key for block in op.blocks] == keys[:2]
    assert [block.parent_key for block in op.blocks] == [None, keys[0]]
    assert [list(block.token_ids) for block in op.blocks] == [tokens(2)[:4], tokens(2)[4:]]


def test_blocks_the_tier_has_are_not_stored_again_but_gaps_before_them_are() -> None:
    request, one = Request(tokens(4, 1)), planner(lambda tenant, index: index == 1)
    one.match(request, 2 * BLOCK, kvbm())  # the engine has two blocks itself
    plan = one.step(scheduled(request, 2 * BLOCK, 2 * BLOCK + 1, [1, 2, 3, 4, 5]))
    assert stored(plan) == [(0, 1), (2, 3), (3, 4)]


def test_generated_tokens_are_stored_when_they_are_known() -> None:
    request, one = Request(tokens(1, 3), prompt=7), planner(lambda tenant, index: False)
    one.match(request, 0, kvbm())
    one.step(scheduled(request, 0, 7, [1, 2]))
    # The eighth token is computed in this step but not known yet: the block waits.
    assert not one.step(scheduled(request, 7, 1, [], new=False)).stores
    request.all_token_ids += [7, 8]
    assert stored(one.step(scheduled(request, 8, 1, [3], new=False))) == [(1, 2)]


def test_speculative_decoding_keeps_generated_tokens_out() -> None:
    request = Request(tokens(4), prompt=6)
    one = planner(lambda tenant, index: False, prompt_only=True)
    one.match(request, 0, kvbm())
    assert stored(one.step(scheduled(request, 0, 16, [1, 2, 3, 4]))) == [(0, 1)]


def test_blocks_of_a_resumed_request_are_its_new_ones() -> None:
    request, one = Request(tokens(2, 1)), planner(lambda tenant, index: False)
    one.match(request, 0, kvbm())
    one.step(scheduled(request, 0, 3, [1]))
    again = scheduled(request, 0, 9, [7, 8, 9], new=False)
    again.scheduled_cached_reqs.resumed_req_ids = {"r"}
    assert stored(one.step(again)) == [(0, 7), (1, 8)]


def test_kvbms_disk_is_not_trusted_with_what_is_stored() -> None:
    for blocks, expected in ((0, 4), (2, 0)):
        request = Request(tokens(4, 1))
        one = planner(lambda tenant, index: False, trust_kvbm=False)
        answer, _ = one.match(request, 0, kvbm(blocks))
        one.allocated(request, [1, 2, 3, 4], answer or 0)
        plan = one.step(scheduled(request, blocks * BLOCK, 17 - blocks * BLOCK, [1, 2, 3, 4, 5]))
        assert len(stored(plan)) == expected


@pytest.mark.parametrize(
    "unfit",
    [
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"kv_transfer_params": {"entresol": {"tenant": "stranger"}}},
        {"kv_transfer_params": {"entresol": "team-a"}},
        {"kv_transfer_params": {"entresol": {"tenant": ""}}},
        {"kv_transfer_params": {"entresol": {"tenent": "team-a"}}},
    ],
)
def test_what_tokens_do_not_name_is_left_to_kvbm(unfit: dict[str, Any]) -> None:
    request, one = Request(tokens(4, 1), **unfit), planner(tenants=["team-a"])
    one.seen(request)
    assert one.match(request, 0, kvbm(1)) == (BLOCK, True)
    assert one.allocated(request, [1], BLOCK) is None
    assert one.step(scheduled(request, 4, 13, [1, 2, 3, 4, 5])) == StepPlan()


@pytest.mark.parametrize("new", [True, False])
def test_a_session_is_left_to_kvbm_once_an_image_has_come(new: bool) -> None:
    """Its input comes in parts, and of an image the keys have the placeholder tokens alone."""
    request, one = Request(tokens(2, 1)), planner(lambda tenant, index: False)
    one.seen(request)
    assert stored(one.step(scheduled(request, 0, 9, [1, 2, 3]))) == [(0, 1), (1, 2)]
    request.mm_features.append(object())
    request.all_token_ids += tokens(2)
    assert one.step(scheduled(request, 9, 8, [1, 2, 3, 4, 5], new=new)) == StepPlan()
    assert one.match(request, 0, kvbm(1)) == (BLOCK, True)
    assert one.counts["unfit_requests"] == 1


def test_a_tenant_sees_its_own_blocks_alone() -> None:
    asked = []
    one = planner(lambda tenant, index: bool(asked.append(tenant)) or tenant == "a", tenants=["a"])
    for name, blocks in (("a", 4), ("", 0)):
        params = {"entresol": {"tenant": name}} if name else None
        request = Request(tokens(4, 1), request_id=f"r{name}", kv_transfer_params=params)
        assert one.match(request, 0, kvbm()) == (blocks * BLOCK, blocks > 0)
    assert set(asked) == {"a", ""}


def test_salts_lead_to_other_keys() -> None:
    seen: list[Sequence[bytes]] = []

    def look(tenant: str, keys: Sequence[bytes]) -> Future[list[bool]]:
        seen.append(keys)
        return holding(lambda tenant, index: False)(tenant, keys)

    one = planner()
    one.lookup = look
    for number, more in enumerate(
        [{}, {"cache_salt": "x"}, {"kv_transfer_params": {"entresol": {"salt": "x"}}}]
    ):
        one.seen(Request(tokens(2, 1), request_id=f"r{number}", **more))
    assert len({key for keys in seen for key in keys}) == 6


def test_without_an_answerer_kvbm_is_alone_and_blocks_are_stored() -> None:
    request, one = Request(tokens(2, 1)), Planner(BLOCK)
    assert one.match(request, 0, kvbm()) == (0, False)
    assert stored(one.step(scheduled(request, 0, 9, [1, 2, 3]))) == [(0, 1), (1, 2)]


def test_an_engine_that_begins_anew_uses_nothing_of_before() -> None:
    """vLLM drops its caches: its weights may be others now."""
    seen: list[Sequence[bytes]] = []

    def look(tenant: str, keys: Sequence[bytes]) -> Future[list[bool]]:
        seen.append(keys)
        return holding(lambda tenant, index: True)(tenant, keys)

    one = planner()
    one.lookup = look
    under_way = Request(tokens(4, 1), request_id="a")
    assert one.match(under_way, 0, kvbm()) == (4 * BLOCK, True)
    one.allocated(under_way, [1, 2, 3, 4], 4 * BLOCK)
    one.begin_anew()
    assert one.match(under_way, 0, kvbm()) == (0, False)
    assert stored(one.step(scheduled(under_way, 0, 4 * BLOCK, [1, 2, 3, 4]))) == []
    one.transferred(["a"], [1])
    for name in "bc":
        assert one.match(Request(tokens(4, 1), request_id=name), 0, kvbm()) == (4 * BLOCK, True)
    assert seen[1] == seen[2]
    assert not set(seen[0]) & set(seen[1])
    one.finished("a")


def test_a_preempted_request_is_kvbms_alone() -> None:
    """Its first life is still reported by KVBM's worker; vLLM may hear of an end only once."""
    request, one = Request(tokens(4, 1), num_preemptions=1), planner()
    assert one.match(request, 0, kvbm(1)) == (BLOCK, True)


def test_reading_nothing_from_caches_is_respected() -> None:
    request, one = Request(tokens(4, 1), skip_reading_prefix_cache=True), planner()
    assert one.match(request, 0, kvbm()) == (0, False)


def test_a_finished_request_leaves_nothing_behind() -> None:
    request, one = Request(tokens(4, 1)), planner()
    one.match(request, 0, kvbm())
    one.finished("r")
    assert one.step(scheduled(request, 0, 17, [1, 2, 3, 4, 5])) == StepPlan()
    one.finished("r")


def test_taking_other_than_what_was_offered_is_refused() -> None:
    request, one = Request(tokens(4, 1)), planner()
    one.match(request, 0, kvbm())
    with pytest.raises(RuntimeError, match="offered"):
        one.allocated(request, [1, 2], 4 * BLOCK)
