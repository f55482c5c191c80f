"""How metrics are made, so that every module that has some makes them alike.

Invariants: a metric that is made has a row in METRICS.md (`specs`) and a closed domain per label,
and its series of a tenant go when the tenant does (`tenant_families`).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from entresol_daemon.metric_families import Domain, Family, M, Spec, TenantLabels

LATENCY_BUCKETS_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class Makers:
    """Makes the metrics of one registry. Names are without "entresol_"; `text` ends in a full stop.

    `eager` ones exist, at zero, from the start: those that alerts watch. `tenants` is the label of
    all metrics per tenant.
    """

    def __init__(self, registry: CollectorRegistry, specs: list[Spec]) -> None:
        self.tenants = TenantLabels()
        self.tenant_families: list[Family[Counter] | Family[Gauge]] = []
        self._registry = registry
        self._specs = specs

    def _name(
        self, name: str, kind: str, text: str, labels: dict[str, Domain | TenantLabels]
    ) -> str:
        name = f"entresol_{name}"
        self._specs.append(Spec(name, kind, labels, text))
        return name

    def _family(
        self, parent: M, labels: dict[str, Domain | TenantLabels], eager: bool
    ) -> Family[M]:
        family = Family(parent, labels)
        if eager:
            (domain,) = labels.values()
            assert isinstance(domain, Domain)
            for value in domain.values:
                family[value]
        return family

    def counters(
        self, name: str, text: str, *, eager: bool = False, **labels: Domain | TenantLabels
    ) -> Family[Counter]:
        """Counters with labels."""
        name = self._name(name, "counter", text, labels)
        parent = Counter(name, text, list(labels), registry=self._registry)
        family = self._family(parent, labels, eager)
        if "tenant" in labels:
            self.tenant_families.append(family)
        return family

    def gauges(
        self, name: str, text: str, *, eager: bool = False, **labels: Domain | TenantLabels
    ) -> Family[Gauge]:
        """Gauges with labels."""
        name = self._name(name, "gauge", text, labels)
        parent = Gauge(name, text, list(labels), registry=self._registry)
        family = self._family(parent, labels, eager)
        if "tenant" in labels:
            self.tenant_families.append(family)
        return family

    def histograms(
        self,
        name: str,
        text: str,
        *,
        buckets: tuple[float, ...] = LATENCY_BUCKETS_SECONDS,
        **labels: Domain | TenantLabels,
    ) -> Family[Histogram]:
        """Histograms with labels."""
        name = self._name(name, "histogram", text, labels)
        parent = Histogram(name, text, list(labels), registry=self._registry, buckets=buckets)
        return self._family(parent, labels, False)

    def counter(self, name: str, text: str) -> Counter:
        """A counter."""
        return Counter(self._name(name, "counter", text, {}), text, registry=self._registry)

    def gauge(self, name: str, text: str) -> Gauge:
        """A gauge."""
        return Gauge(self._name(name, "gauge", text, {}), text, registry=self._registry)

    def histogram(
        self, name: str, text: str, *, buckets: tuple[float, ...] = LATENCY_BUCKETS_SECONDS
    ) -> Histogram:
        """A histogram of seconds."""
        name = self._name(name, "histogram", text, {})
        return Histogram(name, text, registry=self._registry, buckets=buckets)
