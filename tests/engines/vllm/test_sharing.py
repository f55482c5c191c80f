"""Two vLLM processes share KV through the real daemon; what goes wrong costs time, never output.

Each test has prompts of its own. The first run of a prompt computes everything and is what later
runs are compared with. Engines compute in float32: in bfloat16 a prompt that is computed in other
pieces, as after a failed block, may end in other tokens without anything being wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.tier_daemon import StoredBlock
from tests.engines.vllm.conftest import LOAD_MS, LOOKUP_MS, Site
from tests.engines.vllm.engine import BLOCK_TOKENS, events, prompt

TOKENS = 1000
FULL = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS  # 992: what whole blocks of it cover
BLOCKS = FULL // BLOCK_TOKENS
LOGPROB_ERROR_MAX = 1e-3
SLACK_S = 3.0  # what a busy machine may add to a stall
# Two engines start in the first test's time, on a machine that may do much else.
pytestmark = pytest.mark.timeout(1200)
Figure = Callable[[str, float, str], None]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same output: every token, and how likely it was."""
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == pytest.approx(other["logprobs"], abs=LOGPROB_ERROR_MAX)


def grown(site: Site, before: dict[str, int]) -> dict[str, int]:
    """What B's counters grew by."""
    now = site.b.counts()
    return {name: now[name] - before.get(name, 0) for name in now}


def stored_by_a(site: Site, seed: int, **more: Any) -> tuple[list[int], dict[str, Any]]:
    """A prompt that A has computed and stored, and A's output."""
    tokens = prompt(seed, TOKENS)
    cold = site.a.run(tokens, **more)
    assert cold["cached_tokens"] == 0
    site.a.settle()
    return tokens, cold


def test_process_b_hits_what_process_a_stored(site: Site, figure: Figure) -> None:
    tokens, cold = stored_by_a(site, 1)
    before = site.b.counts()
    warm = site.b.run(tokens)
    figure("tokens of 1000 from Entresol in process B", warm["cached_tokens"], "tokens")
    assert warm["cached_tokens"] >= 990
    same(warm, cold)
    found = grown(site, before)
    assert found["load_blocks"] == found["lookup_hit_blocks"] == BLOCKS
    assert found["load_failed_blocks"] == found["lookup_unanswered"] == 0
    assert found["lookups"] == 1, "all blocks of a step in one question"
    site.b.settle()
    assert grown(site, before).get("stored_blocks", 0) == 0, "what was loaded is not stored again"


def test_another_prompt_with_the_same_beginning_hits_that_beginning(site: Site) -> None:
    tokens, _ = stored_by_a(site, 2)
    other = tokens[:500] + prompt(3, 500)
    assert site.b.run(other)["cached_tokens"] == 500 // BLOCK_TOKENS * BLOCK_TOKENS


def test_requests_of_one_batch_that_share_a_beginning_all_hit(site: Site) -> None:
    begin = prompt(20, 640)
    prompts = [begin + prompt(21 + n, 360) for n in range(5)]
    prompts += [prompts[0], prompt(30, 300)]  # one twice, one of its own
    cold = [site.a.run(tokens) for tokens in prompts]
    site.a.settle()
    before = site.b.counts()
    asked = [{"tokens": tokens} for tokens in prompts]
    rows = site.b.ask("generate", prompts=asked, together=True)["rows"]
    for row, alone, tokens in zip(rows, cold, prompts, strict=True):
        same(row, alone)
        assert row["cached_tokens"] == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    found = grown(site, before)
    assert found["load_failed_blocks"] == 0
    shared, own = 640 // BLOCK_TOKENS, BLOCKS - 640 // BLOCK_TOKENS
    assert found["load_blocks"] == shared + 5 * own + 300 // BLOCK_TOKENS, "each block once"


def test_a_request_that_loads_from_no_tier_computes(site: Site) -> None:
    tokens, cold = stored_by_a(site, 18)
    row = site.b.run(tokens, params={"kv_load_tiers": []})
    same(row, cold)
    assert row["cached_tokens"] == 0


def test_a_corrupt_block_is_recomputed(site: Site) -> None:
    def choose(blocks: list[StoredBlock]) -> list[StoredBlock]:
        mine = [one for one in blocks if one.engine_key not in others]
        assert len(mine) == BLOCKS
        return [mine[BLOCKS // 2]]

    site.daemon.stop()
    others = {one.engine_key for one in site.daemon.stored_blocks()}
    site.ready()
    tokens, cold = stored_by_a(site, 4)
    site.daemon.damage(choose)
    site.ready()
    before = site.b.counts()
    warm = site.b.run(tokens)
    same(warm, cold)
    found = grown(site, before)
    assert found["load_corrupt_blocks"] == found["load_failed_blocks"] == 1
    assert 0 <= warm["cached_tokens"] < FULL
    site.b.settle()
    assert grown(site, before)["stored_blocks"] >= 1, "what was recomputed is stored again"
    site.ready()
    again = site.b.run(tokens)
    same(again, cold)
    assert again["cached_tokens"] == FULL


def test_a_block_that_goes_between_lookup_and_load_is_recomputed(site: Site) -> None:
    tokens, cold = stored_by_a(site, 5)
    before = site.b.counts()
    site.b.ask("before_load", what="forget", number=6)
    warm = site.b.run(tokens)
    same(warm, cold)
    assert warm["cached_tokens"] == 6 * BLOCK_TOKENS, "the good prefix is kept"
    found = grown(site, before)
    assert found["load_failed_blocks"] == 1, "one load, not one after the other"
    assert found["loads"] == 1


def test_a_hung_daemon_stalls_a_request_no_longer_than_the_lookup_deadline(
    site: Site, figure: Figure
) -> None:
    tokens, cold = stored_by_a(site, 6)
    quick = site.b.run(prompt(7, TOKENS))["seconds"]
    site.b.settle()
    site.daemon.freeze()
    try:
        stalled = site.b.run(tokens)
        figure("stall of a request, daemon hung", stalled["seconds"] - quick, "s")
        figure("lookup deadline", LOOKUP_MS / 1000, "s")
        same(stalled, cold)
        assert stalled["cached_tokens"] == 0
        assert stalled["seconds"] - quick < LOOKUP_MS / 1000 + SLACK_S
        site.b.forget()
        later = site.b.run(tokens)  # the breaker has opened, or opens with this one
        same(later, cold)
        assert later["seconds"] - quick < LOOKUP_MS / 1000 + SLACK_S
    finally:
        site.daemon.thaw()
    site.ready()
    assert found_again(site, tokens, cold)


def found_again(site: Site, tokens: list[int], cold: dict[str, Any]) -> bool:
    """The tier works again after an outage: retried, because breakers take a moment."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        site.b.settle()
        site.b.forget()
        warm = site.b.run(tokens)
        same(warm, cold)
        if warm["cached_tokens"] == FULL:
            return True
        time.sleep(0.2)
    return False


def test_a_daemon_that_hangs_after_the_lookup_costs_the_load_deadline(
    site: Site, figure: Figure
) -> None:
    tokens, cold = stored_by_a(site, 8)
    site.b.ask("before_load", what="freeze", pid=site.daemon.pid)
    begun = time.monotonic()
    try:
        stalled = site.b.run(tokens)
        figure("time of a request, daemon hung after its lookup", stalled["seconds"], "s")
        figure("load deadline", LOAD_MS / 1000, "s")
        same(stalled, cold)
        assert time.monotonic() - begun < (LOAD_MS + LOOKUP_MS) / 1000 + 2 * SLACK_S
    finally:
        site.daemon.freeze()  # it may have been stopped from elsewhere: know it, and wake it
        site.daemon.thaw()
    # Whatever the daemon sends now must land nowhere: other prompts use the same slots.
    other = prompt(9, TOKENS)
    same(site.b.run(other), site.a.run(other))
    site.ready()
    assert found_again(site, tokens, cold)


def test_an_absent_daemon_costs_nothing_but_its_hits(site: Site) -> None:
    tokens, cold = stored_by_a(site, 10)
    site.daemon.kill()
    begun = time.monotonic()
    alone = site.b.run(tokens)
    same(alone, cold)
    assert alone["cached_tokens"] == 0
    assert time.monotonic() - begun < cold["seconds"] + SLACK_S
    site.b.settle()
    site.ready()
    assert found_again(site, tokens, cold), "durable blocks are there after a restart"


def test_a_daemon_killed_during_a_load_gives_the_right_output(site: Site) -> None:
    tokens, cold = stored_by_a(site, 11)
    before = site.b.counts()
    site.b.ask("before_load", what="freeze_kill", pid=site.daemon.pid, after_s=0.1)
    broken = site.b.run(tokens)
    same(broken, cold)
    assert grown(site, before)["load_failed_blocks"] >= 1
    site.daemon.kill()
    site.ready()
    assert found_again(site, tokens, cold)


def test_tenants_and_salts_do_not_share(site: Site) -> None:
    as_other = {"entresol": {"tenant": "other"}}
    salted = {"entresol": {"salt": "user-1"}}
    tokens, cold = stored_by_a(site, 12)
    for params in (as_other, salted, {"entresol": {"salt": "user-2"}}):
        first = site.b.run(tokens, params=params)
        assert first["cached_tokens"] == 0, f"{params} found another's blocks"
        same(first, cold)
        site.b.settle()
        site.b.forget()
        again = site.b.run(tokens, params=params)
        assert again["cached_tokens"] == FULL, f"{params} did not find its own"
        same(again, cold)
        site.b.forget()
    assert site.b.run(tokens)["cached_tokens"] == FULL


def test_vllms_own_cache_salt_separates_too(site: Site) -> None:
    tokens, _ = stored_by_a(site, 13, cache_salt="one")
    assert site.b.run(tokens, cache_salt="two")["cached_tokens"] == 0
    assert site.b.run(tokens)["cached_tokens"] == 0
    assert site.b.run(tokens, cache_salt="one")["cached_tokens"] == FULL


@pytest.mark.parametrize(
    "mine", [{"tenant": "nobody"}, {"tenant": 7}, {"tenent": "other"}, "other"]
)
def test_a_request_for_an_unknown_tenant_uses_nobodys_blocks(site: Site, mine: Any) -> None:
    tokens = prompt(14, TOKENS)
    before = site.b.counts()
    for _ in range(2):
        row = site.b.run(tokens, params={"entresol": mine})
        assert row["cached_tokens"] == 0
        site.b.settle()
        site.b.forget()
    found = grown(site, before)
    assert found["refused_requests"] == 2
    assert found.get("stored_blocks", 0) == found.get("lookups", 0) == 0


def test_vllms_metrics_show_the_tier(site: Site) -> None:
    tokens, _ = stored_by_a(site, 15)
    site.b.run(tokens)
    found = site.b.ask("metrics")["metrics"]
    assert found["vllm:kv_offload_entresol_load_blocks"] >= BLOCKS
    assert found["vllm:kv_offload_entresol_load_bytes"] > 0
    assert found["vllm:kv_offload_entresol_connected"] >= 1


def stored_since(site: Site, sequence: int) -> list[dict[str, Any]]:
    found = [one for one in events(site.daemon) if one["seq"] > sequence]
    return [one for one in found if one["kind"] == "stored"]


def test_the_daemon_learns_token_ids_from_the_entresol_connector(site: Site) -> None:
    tokens = prompt(16, 4 * BLOCK_TOKENS)
    before = max((one["seq"] for one in events(site.daemon)), default=0)
    site.b.run(tokens)
    site.b.settle()
    told = stored_since(site, before)
    assert sum(len(one["wire_keys"]) for one in told) == 4
    found = [
        token for one in sorted(told, key=lambda one: one["position"]) for token in one["token_ids"]
    ]
    assert found == tokens, "in order, with their places"
    # The same blocks from vLLM's own connector: stored, and nothing known of their tokens.
    before = max(one["seq"] for one in events(site.daemon))
    site.a.run(prompt(17, 4 * BLOCK_TOKENS))
    site.a.settle()
    told = stored_since(site, before)
    assert sum(len(one["wire_keys"]) for one in told) == 4
    assert not any(one.get("token_ids") for one in told)
