"""Recompute or fetch under an engine: real daemon, real store; and prefills seen from a tier."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import running_daemon
from interrupting import at_every_line
from test_engine_store import BLOCK, DESCRIPTOR, SOON_S, got, key, opened, puts, settings_for

from entresol_client.engines.choosing import QUOTES_PER_LOOKUP_MAX, Chooser, Run
from entresol_client.engines.prefills import REQUESTS_REMEMBERED_MAX, Prefill, Prefills
from entresol_client.engines.settings import EngineSettings
from entresol_client.results import QuoteResult
from entresol_daemon.shard.quoting import Quoting
from entresol_proto.status import ConfigError
from entresol_proto.wire import opening
from entresol_proto.wire.data import Tier

COUNT = 6
KEYS = [key(number) for number in range(COUNT)]
QUICK, SLOW = 10**9, 1  # tokens a second: computing takes no time, or for ever


async def test_what_is_quicker_computed_is_not_told_of(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d") as running:
        base = settings_for(running)
        async with opened(base) as store:
            space = store.space(DESCRIPTOR)
            assert (await got(space.store(puts(*range(COUNT))))).ok
            assert await got(space.lookup(KEYS)) == [True] * COUNT
            assert "quotes" not in store.stats(), "nobody asked for quotes"
        quick = settings_for(running, recompute_or_fetch="auto", prefill_tokens_per_s=QUICK)
        async with opened(quick) as store:
            space = store.space(DESCRIPTOR)
            assert await got(space.lookup(KEYS)) == [False] * COUNT
            found = store.stats()
            assert (found["quotes"], found["recompute_blocks"]) == (1, COUNT)
            assert found["lookup_hit_blocks"] == COUNT, "the daemon had them"
        slow = settings_for(running, recompute_or_fetch="auto", prefill_tokens_per_s=SLOW)
        async with opened(slow) as store:
            space = store.space(DESCRIPTOR)
            assert await got(space.lookup([*KEYS, key(99)])) == [True] * COUNT + [False]
            into = [bytearray(BLOCK) for _ in KEYS]
            assert (await got(space.load(KEYS, into))).ok
            assert space.chooser.state() == {"prefills_seen": 0, "fetches_seen": 1}
            space.chooser.prefilled(0, 100, 0.01)
            assert space.chooser.state()["prefills_seen"] == 1


async def test_a_signal_handler_may_wait_for_a_choice_wherever_it_interrupts_the_engine(
    tmp_path: Path,
) -> None:
    """The loop, which chooses, waits for no thread that tells what it saw."""
    async with running_daemon(tmp_path / "d") as running:
        learns = settings_for(running, recompute_or_fetch="auto", prefill_tokens_per_s=SLOW)
        async with opened(learns) as store:
            space = store.space(DESCRIPTOR)
            assert (await got(space.store(puts(*range(COUNT))))).ok

            def engine() -> None:
                space.chooser.prefilled(0, 100, 0.01)
                assert space.chooser.state()["prefills_seen"] > 0

            def handler() -> None:
                space.lookup(KEYS).result(SOON_S)

            lines = await asyncio.to_thread(at_every_line, engine, handler)
            assert store.stats()["quotes"] == lines > 4
            assert space.chooser.state()["prefills_seen"] == lines + 1


async def test_never_asks_for_nothing_and_stores_all_the_same(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d") as running:
        async with opened(settings_for(running, recompute_or_fetch="never")) as store:
            space = store.space(DESCRIPTOR)
            assert (await got(space.store(puts(0)))).ok
            assert await got(space.lookup(KEYS)) == [False] * COUNT
        async with opened(settings_for(running)) as store:
            assert (await got(store.space(DESCRIPTOR).lookup(KEYS)))[0]


async def test_a_key_that_one_prompt_wants_is_told(tmp_path: Path) -> None:
    """Two prompts in one lookup; of prompts beyond the limit everything is told."""
    async with running_daemon(tmp_path / "d") as running:
        async with opened(settings_for(running)) as store:
            assert (await got(store.space(DESCRIPTOR).store(puts(*range(COUNT))))).ok
        quick = settings_for(running, recompute_or_fetch="auto", prefill_tokens_per_s=QUICK)
        async with opened(quick) as store:
            space = store.space(DESCRIPTOR)
            runs = [Run((0, 1, 2), 96), Run((0, 3), 10**12)]  # to compute the second takes for ever
            found = await got(space.lookup(KEYS, runs))
            assert found == [True, False, False, True, True, True]
            many = [Run((4,), 1)] * QUOTES_PER_LOOKUP_MAX + [Run((5,), 1)]
            assert (await got(space.lookup(KEYS, many)))[4:] == [False, True]


async def test_without_a_quote_everything_is_told_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: Quoting, session: Any, request: Any) -> Any:
        await asyncio.Event().wait()

    async with running_daemon(tmp_path / "d") as running:
        quick = settings_for(
            running, recompute_or_fetch="auto", prefill_tokens_per_s=QUICK, lookup_deadline_ms=400
        )
        async with opened(quick) as store:
            assert (await got(store.space(DESCRIPTOR).store(puts(*range(COUNT))))).ok
            with monkeypatch.context() as patched:
                patched.setattr(Quoting, "quote", never)
                begun = time.monotonic()
                assert await got(store.space(DESCRIPTOR).lookup(KEYS)) == [True] * COUNT
                assert time.monotonic() - begun < SOON_S, "liveness, not speed"
            assert store.stats()["quotes_missing"] == 1
        monkeypatch.setattr(opening, "PROTOCOL_MAX", 2)  # the daemon's: an older one
        async with opened(quick) as store:
            assert await got(store.space(DESCRIPTOR).lookup(KEYS)) == [True] * COUNT
            assert store.stats()["quotes_missing"] == 1


def test_settings_that_make_no_sense_are_refused() -> None:
    assert EngineSettings().recompute_or_fetch == "always", "nobody is surprised"
    with pytest.raises(ConfigError, match="recompute_or_fetch"):
        EngineSettings(recompute_or_fetch="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prefill_tokens_per_s"):
        EngineSettings(prefill_tokens_per_s=-1)


# Prefills -----------------------------------------------------------------------------------------


def test_a_prefill_is_from_the_answer_to_the_blocks() -> None:
    seen = Prefills()
    for end in (64, 128, 192):
        seen.ready("r", end, 1.0)
    assert seen.stored("r", [64, 128, 192], 64, 1.5) == Prefill(0, 192, 0.5)
    assert seen.stored("r", [64, 128, 192], 64, 2.0) is None, "a span is reported once"
    seen.finished("r")
    assert seen.stored("r", [64], 64, 3.0) is None
    assert len(seen) == 0


def test_a_prefill_behind_loaded_blocks_and_in_parts() -> None:
    seen = Prefills()
    for end in range(64, 1024, 64):
        seen.ready("r", end, 1.0)
    seen.ready("r", 0, 2.0)  # a load has ended
    assert seen.stored("r", [576, 640], 64, 2.25) == Prefill(512, 128, 0.25)
    seen.ready("r", 64, 9.0)  # asked again: what was computed stands
    assert seen.stored("r", [704, 768], 64, 2.5) == Prefill(640, 128, 0.25)


def test_what_was_generated_is_no_prefill() -> None:
    seen = Prefills()
    seen.ready("r", 128, 1.0)
    assert seen.stored("r", [192], 64, 5.0) is None
    assert seen.stored("r", [128, 192, 256], 64, 6.0) == Prefill(64, 64, 5.0)
    assert seen.stored("nobody", [64], 64, 1.0) is None


def test_requests_are_bounded() -> None:
    seen = Prefills()
    for number in range(REQUESTS_REMEMBERED_MAX + 10):
        seen.ready(str(number), 64, 1.0)
    assert len(seen) == REQUESTS_REMEMBERED_MAX


@pytest.mark.parametrize("how", ["hangs", "fails", "late"])
async def test_a_quote_that_does_not_come_changes_nothing_and_is_not_left_behind(how: str) -> None:
    counted: Counter[str] = Counter()
    deadlines: list[int] = []

    async def quote(*_: object, deadline_ns: int, **__: object) -> Any:
        deadlines.append(deadline_ns)
        if how == "fails":
            raise ConnectionResetError
        await asyncio.sleep(3600)

    settings = EngineSettings(recompute_or_fetch="auto", prefill_tokens_per_s=QUICK)
    namespace: Any = SimpleNamespace(quote=quote)
    chooser = Chooser(namespace, settings, lambda **amounts: counted.update(amounts))
    until_ns = time.monotonic_ns() + (0 if how == "late" else 20_000_000)
    asked = chooser.ask(KEYS, [Run(range(COUNT), COUNT * 16)], until_ns)
    async with asyncio.timeout(SOON_S):
        assert await chooser.narrow(KEYS, [True] * COUNT, asked, until_ns) == [True] * COUNT
        await chooser.drop(asked)
    assert counted["quotes_missing"] == 1
    assert all(one.task is not None and one.task.done() for one in asked)
    assert all(deadline_ns > 0 for deadline_ns in deadlines)


async def test_only_a_whole_load_that_was_quoted_is_learned_from() -> None:
    answer = QuoteResult(COUNT, [Tier.MEMORY] * COUNT, 6_000, 0, 1, 2, 1, 3_000_000, 4_000_000)

    async def quote(*_: object, **__: object) -> QuoteResult:
        return answer

    settings = EngineSettings(recompute_or_fetch="auto", prefill_tokens_per_s=SLOW)
    namespace: Any = SimpleNamespace(quote=quote)
    chooser = Chooser(namespace, settings, lambda **_: None)
    learned: list[tuple[float, int, float]] = []
    learner: Any = SimpleNamespace(
        choose=chooser._learner.choose,
        prefilled=chooser._learner.prefilled,
        fetched=lambda quoted_s, size, seconds, _now: learned.append((quoted_s, size, seconds)),
    )
    chooser._learner = learner

    async def look_up() -> None:
        until_ns = time.monotonic_ns() + 10**10
        asked = chooser.ask(KEYS, [Run(range(COUNT), COUNT * 16)], until_ns)
        assert await chooser.narrow(KEYS, [True] * COUNT, asked, until_ns) == [True] * COUNT

    chooser.fetched(KEYS, COUNT, 0.5)  # nobody asked for a quote
    await look_up()
    chooser.fetched(KEYS, COUNT - 1, 0.5)  # not all of it came
    chooser.fetched(KEYS, COUNT, 0.5)  # its quote is gone with that
    assert learned == []
    await look_up()
    chooser.fetched(KEYS, COUNT, 0.5)
    assert learned == [(0.003, 6_000, 0.5)]
