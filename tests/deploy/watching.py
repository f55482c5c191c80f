"""Looking at a daemon that serves: what the runbook says of watching it, and of stopping it."""

from __future__ import annotations

import json
import re

from tests.deploy.runbook import Do
from tests.deploy.world import SOCKET, UNIT, World, expect

RULES = "/usr/share/entresol/prometheus/entresol.rules.yml"
CLIENT = "/etc/entresol/tenants/load/client.toml"
LIVE = (("of flash in use", "q"),)
CTRL_C, INTERRUPTED = "\x03", 130
SCORE_MAX = 1.0
_WELL = re.compile(r"\b(HEALTHY|IDLE|FULL)\b")
_METRIC = re.compile(r"\bentresol_\w+")
_TAIL = re.compile(r"_(bucket|sum|count)$")  # of a histogram in which nothing was counted yet


def watch(world: World) -> str:
    for words in (Do.TOP, Do.TOP_PRICED):
        shown = world.follow(words, typed=LIVE).stdout
        expect(_WELL.search(shown), f"{words}: {shown}")
    once = world.follow(Do.TOP_ONCE).stdout
    well = _WELL.search(once)
    expect(well and "of flash in use" in once, f"top --once: {once}")
    assert well is not None
    stopped = world.follow(Do.TOP_JSON, typed=[('"verdict"', CTRL_C)], check=False)
    expect(stopped.returncode == INTERRUPTED, f"top --json: {stopped}")
    told = world.follow(Do.READY, more=["--silent"]).stdout
    expect('"ready": true' in told, f"readyz: {told}")
    _page(world)
    metrics = _metrics_of_rules(world)
    world.follow(Do.SCRUB)
    stat = json.loads(world.follow(Do.STAT, more=["--json"]).stdout)["shards"][0]["stat"]
    expect(stat["scrub_state"] == "running" or stat["scrub_cycles"], f"scrub: {stat}")
    world.puts("watched")
    world.follow(Do.EXPLAIN, put={"NAME": "watched"}, more=["--config", CLIENT])
    missing = world.follow(
        Do.EXPLAIN, put={"NAME": "never"}, more=["--config", CLIENT], check=False
    )
    expect(missing.returncode == 1, f"explain of what never was: {missing}")
    world.follow(Do.SIZE)
    score = world.follow(Do.SCORE).stdout
    found = re.search(r"exposure level for \S+: ([\d.]+)", score)
    expect(found and float(found[1]) <= SCORE_MAX, f"the unit's score: {score[-300:]}")
    assert found is not None
    return (
        f"top says {well[0]}; {metrics} metrics of the alert rules are there; the unit "
        f"scores {found[1]}"
    )


def _page(world: World) -> None:
    """The page is there, for this machine's own names only."""
    found = world.http("/")
    expect("<html" in found and found.endswith(" 200"), f"the page: {found[-200:]}")
    other = world.http("/", "--header", "Host: elsewhere.example")
    expect(other.endswith(" 403"), f"the page under another name: {other[-200:]}")


def _metrics_of_rules(world: World) -> int:
    """How many there are, all of them told by this daemon. Raises: Broken."""
    told = set(_METRIC.findall(world.http("/metrics")))
    names = set(_METRIC.findall(world.machine.run("cat", RULES).stdout))
    wanted = {name for name in names if not name.endswith("_")}  # how a pattern of names begins
    expect(len(wanted) > 20, f"the rules name only {sorted(wanted)}")
    never = {name for name in wanted - told if _TAIL.sub("", name) not in told}
    expect(not never, f"no metric is called {sorted(never)}")
    return len(wanted)


def stopped_and_woken(world: World) -> str:
    """Without its socket it stays stopped for as long as nobody connects."""
    world.follow(Do.STOP)
    expect(world.active(UNIT) == "inactive", "it did not stop")
    expect(world.active(SOCKET) == "active", "its sockets stopped with it")
    world.follow(Do.READY)
    world.until(world.is_up, "who connects to wake it")
    world.follow(Do.STOP_ALL)
    refused = world.follow(Do.READY, check=False)
    expect(refused.returncode != 0, "somebody answers")
    expect(world.active(UNIT) == "inactive", "it came back without its socket")
    world.follow(Do.START)
    return "woken by who connects; not after its socket was stopped with it"
