"""Dashboard and alerts name what the daemon has: metrics, labels and their values, and a way out.

What needs Prometheus itself is in tests/daemon/test_prometheus.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entresol_daemon.metric_families import Domain
from entresol_daemon.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "systemd" / "grafana" / "entresol.json"
RULES = ROOT / "systemd" / "prometheus" / "entresol.rules.yml"
RULE_TESTS = ROOT / "systemd" / "prometheus" / "entresol.rules.test.yml"
RUNBOOK = ROOT / "systemd" / "README.md"
# Of Prometheus itself, or of its library.
OTHERS = {"job", "instance", "le"}
TAILS = ("_bucket", "_sum", "_count")


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text(encoding="utf-8")))


def dashboard_queries() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (row["expr"] for row in dashboard()["annotations"]["list"])


def alerts() -> dict[str, str]:
    """The text of every alert's rule."""
    parts = re.split(r"^      - (?=alert|record)", RULES.read_text(encoding="utf-8"), flags=re.M)
    found = {}
    for one in parts:
        name = re.match(r"alert: (\w+)", one)
        if name:
            found[name[1]] = one
    assert len(found) > 10
    return found


def selectors(query: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(metric, label matchers) of a query."""
    for name, inside in re.findall(r"(?<![\w:])(entresol_\w+)(?:\{([^}]*)\})?", query):
        yield name, dict(re.findall(r'(\w+)(?:=~?|!=|!~)"([^"]*)"', inside))


def check(query: str) -> None:
    specs = {spec.name: spec for spec in Metrics().specs}
    for name, matchers in selectors(query):
        if name.startswith("entresol_process_") or name == "entresol_blocks_":
            continue  # of the library; a name given as a pattern
        base = next((name.removesuffix(t) for t in TAILS if name.endswith(t)), name)
        spec = specs.get(name) or specs.get(base)
        assert spec is not None, f"no metric is called {name}: {query}"
        assert (spec.kind == "histogram") == (name != spec.name), f"{name} in {query}"
        for label, value in matchers.items():
            if label in OTHERS:
                continue
            domain = spec.labels.get(label)
            assert domain is not None, f"{name} has no label {label}"
            if isinstance(domain, Domain) and value:
                never = set(value.split("|")) - set(domain.values)
                assert not never, f"{name}: {label} is never {never}"
        used = re.findall(r"by \(([^)]*)\)", query)
        known = OTHERS | {one for spec in specs.values() for one in spec.labels}
        assert {w.strip() for part in used for w in part.split(",")} <= known, query


def test_the_dashboard_asks_for_what_there_is() -> None:
    queries = list(dashboard_queries())
    assert len(queries) > 40
    for query in queries:
        check(query)


def test_the_dashboard_is_well_formed() -> None:
    found = dashboard()
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'instance=~"$instance"' in target["expr"]
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = set(
                re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"])))
            )
            assert used <= grouped | {"instance"}, f"{panel['title']}: legend of labels summed away"
    names = {row["name"] for row in found["templating"]["list"]}
    assert names == {"datasource", "instance"}


def test_alerts_ask_for_what_there_is() -> None:
    recorded = set(re.findall(r"- record: (\S+)", RULES.read_text(encoding="utf-8")))
    for name, rule in alerts().items():
        expression = re.search(r"expr: (.*?)\n        (?:for|labels):", rule, re.S)
        assert expression, name
        check(expression[1])
        assert set(re.findall(r"entresol:[\w:]+", expression[1])) <= recorded, name


def test_every_alert_says_what_to_do_and_is_tried() -> None:
    runbook = RUNBOOK.read_text(encoding="utf-8")
    tried = RULE_TESTS.read_text(encoding="utf-8")
    for name, rule in alerts().items():
        assert re.search(r"severity: (critical|warning|info)", rule), name
        assert re.search(r'summary: "\{\{ \$labels\.instance \}\}', rule), name
        assert re.search(r'^ +do: ".{20,}"$', rule, re.M), name
        assert re.search(rf"^\| `{name}` \|", runbook, re.M), f"{name} is not in the runbook"
        assert f'alertname="{name}"' in tried, f"{name} is in no test of the rules"
    assert set(re.findall(r"^\| `(Entresol\w+)` \|", runbook, re.M)) == set(alerts())
