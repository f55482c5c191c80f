"""What `make bench` promises: every name, every budget, what it says of what is missing, pure JSON.

Nothing is measured: the sections are the real ones, what they call returns made-up numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import (
    __main__ as command,
)
from bench import (
    codec_budget,
    contract,
    control,
    flash,
    flash_kv,
    gets,
    index,
    kv,
    plots,
    policy,
    restart,
    results,
)
from bench.peers import race
from bench.processes import ROOT
from bench.sections import SECTIONS, Plan
from entresol_daemon.replay.run import Result

ISSUE = """
    get_resident_tcp_vs_loopback, get_resident_tcp_vs_best_peer, get_resident_shm_sealed_vs_aes,
    get_resident_shm_plain_vs_memcpy, get_flash_vs_fio_read, put_durable_vs_fio_write,
    codec_dense_ratio_bf16, codec_dense_decode_gbps, codec_fast_ratio_bf16, codec_fast_decode_gbps,
    codec_fast_encode_gbps, exists_8192_p50_ms, get_64k_resident_p50_us, index_bytes_per_block,
    restart_1m_warm_s, restart_1m_crash_s
"""
MEASURED = ("flash", "gets", "peers", "control", "index", "restart", "codec")
FAST = (
    "shm", "tcp", "shm_together", "put_shm", "put_tcp", "first_byte_p50_us", "first_byte_p99_us",
)  # fmt: skip


class Made(dict):  # type: ignore[type-arg]
    """Any name has rounds of numbers that meet every budget which is a ratio."""

    def __missing__(self, name: str) -> list[float]:
        return [2.0, 2.0]


def of_flash(**_: Any) -> flash.Found:
    found = flash.Found({name: [2.0, 2.0] for name in FAST})
    for name in ("fio_read", "fio_write", "device_p99_us"):
        found.values[name] = [1.0, 1.0]
    return found


def of_race(names: Sequence[str] = ("redis",)) -> race.Race:
    ours = {"entresol_tcp": [3.0], "entresol_shm": [4.0]}
    ceilings = {"loopback_blocking": [3.0], "loopback_uvloop": [3.0]}
    found = {name: [1.0] for name in names}
    return race.Race({**ours, **ceilings, **found}, {**ours, **found}, {"flight": "no wheel"})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """All measuring is replaced; results go to a folder of the test."""

    async def ran(found: Any) -> Any:
        return found

    def measures(module: Any, name: str, found: Any, *, later: bool = True) -> None:
        monkeypatch.setattr(module, name, lambda *_, **__: ran(found) if later else found)

    measures(flash, "measure", of_flash())
    kv_found = flash.Found({"shm": [3.0], "fio_read": [2.0], "stored": [1.4]})
    measures(flash_kv, "measure", kv_found)
    measures(gets, "measure", Made())
    measures(race, "race", of_race())
    measures(control, "measure", Made())
    measures(index, "bytes_per_block", 80.0, later=False)
    measures(restart, "measure", {"warm_s": 1.0, "crash_s": 2.0}, later=False)
    names = [name for name, budget in contract.BUDGETS.items() if budget.section == "codec"]
    measures(
        codec_budget, "canonical",
        {name: [1.0 if "cost" in name else 9.0] * 5 for name in names}, later=False,
    )  # fmt: skip
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(results, "ABOUT", tmp_path / "about.json")
    return monkeypatch


def run(*words: str, sections: Sequence[str] = MEASURED, folder: Path | None = None) -> int:
    given = ["--kv", str(folder or ROOT)]
    return command.main(["--only", ",".join(sections), *given, *words])


# Names -----------------------------------------------------------------------------------------


def test_the_contract_is_what_the_issue_demands() -> None:
    assert sorted(contract.CONTRACT) == sorted(re.findall(r"\w+", ISSUE))
    assert all(budget.section in SECTIONS for budget in contract.BUDGETS.values())
    assert {contract.BUDGETS[name].section for name in contract.CONTRACT} == set(MEASURED)
    for budget in contract.BUDGETS.values():
        assert (budget.at_least is None) != (budget.at_most is None)


@pytest.mark.parametrize("size", ["commit", "full"])
def test_a_whole_run_has_every_name_with_its_budget(made: pytest.MonkeyPatch, size: str) -> None:
    plan = Plan(size, kv=ROOT)
    lines = {line.name: line for name in MEASURED for line in SECTIONS[name](plan).lines}
    assert set(contract.CONTRACT) <= lines.keys()
    for name, budget in contract.BUDGETS.items():
        if budget.section in MEASURED:
            assert (lines[name].at_least, lines[name].at_most) == (budget.at_least, budget.at_most)
    assert len(lines["index_bytes_per_block"].values) == 5
    assert len(lines["restart_1m_warm_s"].values) == 5


def test_a_quick_run_has_no_name_of_another_size(made: pytest.MonkeyPatch) -> None:
    plan = Plan("quick", kv=ROOT)
    found = [line for name in MEASURED for line in SECTIONS[name](plan).lines]
    names = {line.name for line in found}
    assert {"index_200k_bytes_per_block", "restart_50k_warm_s", "restart_50k_crash_s"} <= names
    assert not [name for name in names if "1m" in name or name == "index_bytes_per_block"]
    assert all(line.at_most is None for line in found if "200k" in line.name or "50k" in line.name)
    assert SECTIONS["policy"](plan).not_run


# A run -----------------------------------------------------------------------------------------


def test_json_is_all_there_is_on_standard_output(
    made: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made.setattr(control, "measure", lambda **_: ran_control())

    async def ran_control() -> dict[str, list[float]]:
        print("a word of a library")
        return Made()

    assert run("--json") == 0
    out, error = capsys.readouterr()
    found = json.loads(out)
    assert set(contract.CONTRACT) <= found.keys()
    assert found["codec_fast_ratio_bf16"] == {
        "high": 9.0,
        "low": 9.0,
        "unit": "ratio",
        "value": 9.0,
    }
    assert "a word of a library" in error
    assert "\nbudgets\n" in error
    assert run() == 0
    assert "\nbudgets\n" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["commit", "full"])
def test_what_is_missing_is_said_and_fails(
    made: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    made.setattr(kv, "SHARED", Path("nowhere"))
    made.delenv(kv.SHARED_ENV, raising=False)
    words = ["--size", size, "--only", "codec,index"]
    assert command.main(words) == 1
    out = capsys.readouterr().out
    assert "not run: codec: no KV (--kv DIR" in out
    lacking = [name for name in contract.CONTRACT if contract.BUDGETS[name].section == "codec"]
    assert len(lacking) == 5
    assert f"\nmissing: {', '.join(lacking)}\n" in out
    assert all(f"  {name}: missing, its section codec did not find it" in out for name in lacking)
    assert command.main(["--size", size, "--only", "index"]) == 0, "it was not asked for"
    assert command.main([*words, "--quick"]) == 0, "no verdict"
    assert "missing" not in capsys.readouterr().out


def test_no_peer_at_all_is_said(
    made: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def alone(*_: Any, **__: Any) -> race.Race:
        return of_race(())

    made.setattr(race, "race", alone)
    assert run(sections=["peers"]) == 1
    out = capsys.readouterr().out
    assert "not run: get_resident_tcp_vs_best_peer: no peer" in out
    assert "not run: flight: no wheel" in out
    assert "\nmissing: get_resident_tcp_vs_best_peer\n" in out


def test_a_missed_budget_fails(
    made: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made.setattr(index, "bytes_per_block", lambda _: 129.0)
    assert run(sections=["index"]) == 1
    assert "\nmissed: index_bytes_per_block\n" in capsys.readouterr().out


def test_kv_is_found_where_the_shared_data_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(kv.SHARED_ENV, str(tmp_path))
    assert kv.beside("kv") is None
    assert command._parser().parse_args([]).kv is None
    (tmp_path / "data" / "kv").mkdir(parents=True)
    assert command._parser().parse_args([]).kv == tmp_path / "data" / "kv"
    assert command._parser().parse_args(["--kv", "other"]).kv == Path("other")
    monkeypatch.delenv(kv.SHARED_ENV)
    monkeypatch.setattr(kv, "SHARED", tmp_path)
    assert kv.beside("kv") == tmp_path / "data" / "kv"


def test_kv_that_does_not_shrink_gives_no_ratio(made: pytest.MonkeyPatch) -> None:
    async def raw(*_: Any, **__: Any) -> flash.Found:
        return flash.Found({"shm": [3.0], "fio_read": [2.0], "stored": [1.0]})

    assert not flash_kv.section(None, rounds=1).lines
    (ratio,) = [
        line for line in flash_kv.section(ROOT, rounds=1).lines if line.name == flash_kv.VS_FIO
    ]
    assert (ratio.value, ratio.at_least) == (1.5, 1.0)
    made.setattr(flash_kv, "measure", raw)
    found = flash_kv.section(ROOT, rounds=1)
    assert not found.lines
    assert "do not shrink" in found.not_run[0]


# The policy ------------------------------------------------------------------------------------


def row(trace: str, capacity: float, hit: float, amplified: float = 1.0) -> Result:
    return Result(
        capacity,
        0.0,
        hit,
        0.0,
        amplified,
        0,
        0,
        0,
        0.0,
        None,
        0.0,
        policy.TRACES[trace],
        "worth",
        4,
    )


def known() -> policy.Yardsticks:
    found: policy.Yardsticks = {}
    for trace in policy.TRACES.values():
        for size in policy.CAPACITIES:
            found[trace, policy.LRU, size] = 0.3
            found[trace, policy.OPTIMUM, size] = 0.4
    return found


def table(folder: Path, rows: policy.Yardsticks) -> None:
    lines = [f"{trace},{name},{size},0.9,{hit}" for (trace, name, size), hit in rows.items()]
    head = f"trace,policy,size,usable_hit,{policy.SECOND_HALF}"
    (folder / policy.REFERENCE).write_text("\n".join([head, *lines, "x,FIFO,0.02,0.1,"]) + "\n")


def test_shares_and_points_by_hand() -> None:
    rows = {
        "chat": [row("chat", 0.02, 0.1), row("chat", 0.1, 0.3, 1.1)],
        "rag": [row("rag", 0.1, 0.31)],
        "agents": [row("agents", 0.02, 0.297, 1.3), row("agents", 0.05, 0.299)],
    }
    lines = {line.name: line for line in policy.lines(rows, known())}
    assert lines["policy_chat_share_of_optimum"].value == pytest.approx((0.25 + 0.75) / 2)
    assert not lines["policy_chat_share_of_optimum"].holds
    assert lines["policy_agents_below_lru_points"].value == pytest.approx(0.3)
    assert lines["policy_rag_below_lru_points"].value == pytest.approx(-1.0)
    assert lines["policy_write_amplification"].value == 1.1, "from 10 % on"
    assert set(lines) == {n for n, b in contract.BUDGETS.items() if b.section == "policy"}


def test_a_trace_is_replayed_with_the_policy_of_daemons(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="not run here: no pyarrow (extra daemon)")
    import pyarrow.parquet as pq

    starts = np.random.default_rng(1).integers(0, 40, 400).astype(np.uint32) * 10
    columns = {
        "ts_ms": list(range(400)),
        "run_start": pa.array([[each] for each in starts.tolist()], pa.list_(pa.uint32())),
        "run_len": pa.array([[10]] * 400, pa.list_(pa.uint32())),
    }
    made = pa.table(columns).replace_schema_metadata({"block_tokens": "512"})
    pq.write_table(made, tmp_path / f"{policy.TRACES['chat']}.parquet")
    table(tmp_path, known())
    found = policy.section(tmp_path, {"chat": (0.1, 0.2), "rag": (0.1,)})
    assert [line.name for line in found.lines] == [
        "policy_chat_share_of_optimum", "policy_write_amplification",
    ]  # fmt: skip
    assert 0 < found.lines[0].value < 1.5
    assert "policy on rag" in found.not_run[0]
    (curve,) = found.curves
    assert list(curve.points) == [policy.POLICY_DEFAULT, "LRU, tail first", "optimum"]
    assert curve.points["optimum"][0] == (2.0, 40.0)


def test_without_an_optimum_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "load", lambda *_: pytest.fail("a trace was read"))
    for folder in (None, tmp_path):
        found = policy.section(folder, policy.COMMIT)
        assert not found.lines
        assert policy.GIVE in found.not_run[0]
    some = known()
    del some[policy.TRACES["rag"], policy.OPTIMUM, 0.05]
    table(tmp_path, some)
    found = policy.section(tmp_path, policy.FULL)
    assert not found.lines
    assert "lacks ragpulse_days1_4 at 0.05" in found.not_run[0]


def test_hit_rates_are_drawn_beside_their_yardsticks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not run here: no matplotlib (extra bench)")
    rows = {"chat": [row("chat", 0.02, 0.1), row("chat", 0.2, 0.3)], "rag": [row("rag", 0.1, 0.3)]}
    about = tmp_path / "about.json"
    results.save(
        [], policy.curves(rows, known()), {"size": "full"},
        results=tmp_path / "results.json", about=about,
    )  # fmt: skip
    drawn = plots.draw(tmp_path / "png", of=tmp_path / "results.json", about_path=about)
    assert [path.name for path in drawn] == ["hit_rate_by_capacity.png"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")


# Words -----------------------------------------------------------------------------------------


def test_the_page_has_every_budget_as_it_is() -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    told = page[page.index("## Budgets") : page.index("## Peers")]
    rows = [line for line in told.splitlines() if line.startswith("| `")]
    for name, budget in contract.BUDGETS.items():
        (cells,) = [line for line in rows if f"`{name}`" in line]
        names, words = cells.strip("|").split("|")
        limit = budget.at_least if budget.at_least is not None else budget.at_most
        kind = "at least" if budget.at_least is not None else "at most"
        assert kind in words, name
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", words)]
        place = re.findall(r"`(\w+)`", names).index(name)
        assert limit == numbers[place if len(numbers) > 1 else 0], name
    for name in contract.CONTRACT:
        assert f"`{name}`" in told


def told_rows(path: Path) -> dict[str, list[str]]:
    """The cells of each row of a page's tables that is about one name of the contract."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    return {name: row for name in contract.CONTRACT for row in cells if row[0] == f"`{name}`"}


def test_readme_has_every_number_of_the_contract_with_its_verdict() -> None:
    rows = told_rows(ROOT / "README.md")
    assert set(rows) == set(contract.CONTRACT)
    page = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    results_told = page[page.index("## Results") :].splitlines()
    for name, (_, value, limit, verdict) in rows.items():
        budget = contract.BUDGETS[name]
        bound = budget.at_least if budget.at_least is not None else budget.at_most
        assert bound is not None
        kind = "at least" if budget.at_least is not None else "at most"
        assert limit == f"{kind} {bound:g}", name
        holds = float(value) >= bound if budget.at_least is not None else float(value) <= bound
        assert verdict.startswith("held" if holds else "**missed**"), name
        (wide,) = [line for line in results_told if f"| `{name}` |" in line]
        assert f"| {value} |" in wide, f"bench/README.md has another {name}"
        assert ("**[missed]" in wide) is not holds, name
