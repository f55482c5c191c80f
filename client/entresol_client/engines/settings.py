"""What an engine's own configuration may say about Entresol, the same for every adapter.

Invariant: an adapter runs only with settings declared here or by itself; an unknown one is refused
with the nearest known, because a mistyped deadline that silently falls back is an outage later.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from entresol_client.results import OpenPlace
from entresol_proto.ids import check_tenant_name
from entresol_proto.status import ConfigError, EntresolError

RecomputeOrFetch = Literal["always", "auto", "never"]
OnReset = Literal["new", "keep", "off"]


def _ranged(default: int, low: int, high: int) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that all adapters share. Durations and sizes are plain numbers, units in the name.

    Attributes:
        config: the client's TOML file; empty: `$ENTRESOL_CONFIG`, then the usual places.
        tenants: further tenants this engine may act for: name -> client TOML file (each with that
            tenant's certificate). A request names one; it can never name one that is not here.
        tenants_trust_each_other: has to be said with `tenants`: what is loaded for one tenant's
            request lies in the engine's own caches, which all requests of equal tokens share.
        lookup_deadline_ms: a lookup that takes longer reads as a miss.
        load_deadline_ms: blocks that have not come by then are misses, and are recomputed.
        store_deadline_ms: a store that takes longer counts as failed.
        store_backlog_bytes_max: stores beyond this are shed (loads never are).
        stores_in_flight_max: store jobs worked on at a time.
        durable: wait for flash before a store counts as done.
        open_at: where blocks are opened: "host" or "daemon" (needs a data path nobody else sees).
        recompute_or_fetch: "always" fetches what is there, "never" nothing (only stores), "auto"
            what takes less time to fetch than to compute, by quotes of the daemon.
        prefill_tokens_per_s: for "auto": how fast the engine computes; 0: what is seen of it.
        model_revision: overrides the engine's; part of the namespace.
        weights: "auto": fingerprint the files of a local model; "off"; or a text of your own.
        adapters: a text of your own that stands for what the LoRA adapters hold: engines tell them
            apart by name and path alone (LMCache not at all: there it tells engines apart, not
            requests), so change it when an adapter's content changes.
        on_reset: what an engine that drops its caches (new weights in a running engine, sleep) does
            with what is stored: "new" has keys of its own until it starts again, "keep" goes on
            with what there is, for engines whose weights never change while they run, and "off"
            uses the tier no more until it starts again: for engines that do it often, as "new"
            stores each time what nobody will find after the next.
    """

    config: str = ""
    tenants: Mapping[str, str] = field(default_factory=dict)
    tenants_trust_each_other: bool = False
    lookup_deadline_ms: int = _ranged(250, 1, 600_000)
    load_deadline_ms: int = _ranged(10_000, 1, 600_000)
    store_deadline_ms: int = _ranged(30_000, 1, 600_000)
    store_backlog_bytes_max: int = _ranged(2**30, 2**16, 2**50)
    stores_in_flight_max: int = _ranged(2, 1, 64)
    durable: bool = False
    open_at: OpenPlace = "host"
    recompute_or_fetch: RecomputeOrFetch = "always"
    prefill_tokens_per_s: int = _ranged(0, 0, 10**9)
    model_revision: str = ""
    weights: str = "auto"
    adapters: str = ""
    on_reset: OnReset = "new"

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.metadata:
                low, high = one.metadata["low"], one.metadata["high"]
                if type(value) is not int or not low <= value <= high:
                    raise ConfigError(f"{one.name} is {value!r}, not a number of {low}..{high}")
            elif isinstance(one.default, (bool, str)) and type(value) is not type(one.default):
                raise ConfigError(f"{one.name} is {value!r}, not {type(one.default).__name__}")
        if self.open_at not in get_args(OpenPlace):
            raise ConfigError(f"open_at is {self.open_at!r}", hint='use "host" or "daemon"')
        if self.recompute_or_fetch not in get_args(RecomputeOrFetch):
            raise ConfigError(
                f"recompute_or_fetch is {self.recompute_or_fetch!r}",
                hint='use "always", "auto" or "never"',
            )
        if self.on_reset not in get_args(OnReset):
            raise ConfigError(f"on_reset is {self.on_reset!r}", hint='use "new", "keep" or "off"')
        if not isinstance(self.tenants, Mapping):
            raise ConfigError("tenants is not a table", hint='{"team-a": "/etc/entresol/a.toml"}')
        for name, path in self.tenants.items():
            try:
                check_tenant_name(name)
            except EntresolError as error:
                raise ConfigError(f"tenants: {error}", hint=error.hint) from None
            if not isinstance(path, str) or not path:
                raise ConfigError(f"tenants: {name!r} names no client TOML file")
        if self.tenants and not self.tenants_trust_each_other:
            raise ConfigError(
                "one engine for several tenants: what one of them has stored, right or wrong, is "
                "loaded into caches that the engine shares between all requests of equal tokens",
                hint="set tenants_trust_each_other to true, or run an engine for each",
            )

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], *, where: str, also: frozenset[str]) -> Self:
        """The settings among `raw` (the engine's JSON object for this tier).

        `where` names the object in messages; `also` are keys that the adapter reads by itself.
        Raises: ConfigError for an unknown key or a value of the wrong type or range.
        """
        known = {one.name for one in dataclasses.fields(cls)}
        for key in raw:
            if key not in known | also:
                close = difflib.get_close_matches(key, sorted(known | also), n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"{where}: unknown setting {key!r}", hint=hint)
        try:
            return cls(**{key: value for key, value in raw.items() if key in known})
        except ConfigError as error:
            raise ConfigError(f"{where}: {Exception.__str__(error)}", hint=error.hint) from None
