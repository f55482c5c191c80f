"""Labelled metrics with a bounded number of series, and their rows in METRICS.md.

Invariant: a label takes values of a closed domain only; tenants past `TENANT_LABELS_MAX` share the
label `OTHER_TENANT`, so no tenant, however many there are, can make a series per name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

TENANT_LABELS_MAX = 64
OTHER_TENANT = "_other"  # not a tenant name: those begin with a letter or digit

M = TypeVar("M", Counter, Gauge, Histogram)
Value = str | enum.Enum
Key = Value | tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Domain:
    """The values a label can take. `fallback` stands in for any other; without it they are bugs.

    `words` describes them in METRICS.md where a list would be long.
    """

    values: tuple[str, ...]
    fallback: str | None = None
    words: str = ""


class TenantLabels:
    """Which tenants have a label of their own; first come, first served."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def label(self, name: str) -> str:
        if name != OTHER_TENANT and name not in self.names:
            if len(self.names) >= TENANT_LABELS_MAX:
                return OTHER_TENANT
            self.names.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Spec:
    """One row of METRICS.md."""

    name: str
    kind: str
    labels: dict[str, Domain | TenantLabels] = field(compare=False)
    help: str


class Family(dict[Key, M], Generic[M]):
    """The children of one labelled metric, bound on first use: `family["fetch", "ok"]`.

    Keys are one value, or a tuple in the order of the labels; enum members stand for their label.
    Raises: KeyError for a value outside a closed domain, which is a bug of the caller.
    """

    def __init__(self, parent: M, labels: dict[str, Domain | TenantLabels]) -> None:
        super().__init__()
        self._parent: M = parent
        self._domains = tuple(labels.values())

    def __missing__(self, key: Key) -> M:
        values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(self._domains):
            raise KeyError(f"{len(values)} label values for {len(self._domains)} labels")
        stands_in = False
        labels = []
        for value, domain in zip(values, self._domains, strict=True):
            text = _text(value)
            if isinstance(domain, TenantLabels):
                label = domain.label(text)
            elif text in domain.values:
                label = text
            elif domain.fallback is not None:
                label = domain.fallback
            else:
                raise KeyError(f"{text!r} is not among {domain.values}")
            stands_in |= label != text
            labels.append(label)
        child: M = self._parent.labels(*labels)
        if not stands_in:  # strangers are not remembered, or this dict would grow without bound
            self[key] = child
        return child

    def forget(self, tenant: str) -> None:
        """Drop the series of one tenant (the first label)."""
        for key in [key for key in self if isinstance(key, tuple) and key[0] == tenant]:
            self._parent.remove(*(_text(value) for value in key))
            del self[key]
        if self.pop(tenant, None) is not None:
            self._parent.remove(tenant)


def _text(value: Value) -> str:
    if isinstance(value, enum.Enum):
        label = getattr(value, "label", None)
        return label if isinstance(label, str) else value.name.lower()
    return value


def _domain_text(domain: Domain | TenantLabels) -> str:
    if isinstance(domain, TenantLabels):
        return f"tenant names, {TENANT_LABELS_MAX} at most, then `{OTHER_TENANT}`"
    return domain.words or ", ".join(f"`{value}`" for value in domain.values)


def table(specs: Iterable[Spec]) -> str:
    """METRICS.md's table: one row per metric, sorted by name."""
    rows = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for spec in sorted(specs, key=lambda spec: spec.name):
        labels = "; ".join(f"`{n}`: {_domain_text(d)}" for n, d in spec.labels.items())
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"
