"""How `entresol events` prints: events, gaps and positions as lines, for people or as JSON.

Invariant: a line is written at once, so that what reads them through a pipe follows too.
"""

from __future__ import annotations

import argparse
import datetime
from dataclasses import dataclass
from typing import Any

from entresol_client.cli import output, rpc

KEYS_SHOWN_MAX = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A position: the last event seen."""

    incarnation: int
    seq: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}:{self.seq}"


class Enough(Exception):
    """As many events as were asked for have been printed."""


class Printer:
    """Events, gaps and positions as lines."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._json = args.json
        self._tokens = args.tokens
        self._left: int | None = args.count
        self._tenants = args.all_tenants
        _, self._pb, _ = rpc.modules()

    def label(self, enum: str, value: int) -> str:
        """A number of the protocol in lower-case words; a newer one as a number."""
        kind = getattr(self._pb, enum)
        if value not in kind.values():
            return str(value)
        prefix = {"GapReason": "GAP_REASON_"}.get(enum, f"{enum.upper()}_")
        text = str(kind.Name(value)).removeprefix(prefix).lower()
        return "" if text == "unspecified" else text

    def event(self, event: Any) -> None:
        """One event. Raises: Enough after the last that was asked for."""
        if self._json:
            output.json_line(self._as_dict(event))
        else:
            print(self._as_line(event), flush=True)
        if self._left is not None:
            self._left -= 1
            if not self._left:
                raise Enough

    def _as_dict(self, event: Any) -> dict[str, Any]:
        row = {
            "type": "event",
            "seq": event.seq,
            "time_unix_ns": event.time_unix_ns,
            "tenant": event.tenant,
            "kind": self.label("Kind", event.kind),
            "reason": self.label("Reason", event.reason) or None,
            "medium": self.label("Medium", event.medium) or None,
            "namespace_id": event.namespace_id.hex(),
            "wire_keys": [key.hex() for key in event.wire_keys],
            "engine_keys": [key.hex() for key in event.engine_keys],
            "parent": event.parent.hex() or None,
            "position": event.position,
            "block_tokens": event.block_tokens,
            "tokens": len(event.token_ids),
            "size_bytes": event.size_bytes,
            "until_unix_ns": event.until_unix_ns or None,
        }
        if self._tokens:
            row["token_ids"] = list(event.token_ids)
        return row

    def _as_line(self, event: Any) -> str:
        when = datetime.datetime.fromtimestamp(event.time_unix_ns / 1e9)
        parts = [when.strftime("%H:%M:%S.%f")[:-3], f"{event.seq:>7}"]
        if self._tenants:
            parts.append(event.tenant)
        parts.append(f"{self.label('Kind', event.kind):<13}")
        where = self.label("Medium", event.medium) or self.label("Reason", event.reason)
        parts.append(f"{where:<9}")
        if event.wire_keys:
            parts.append(output.plural(len(event.wire_keys), "block"))
        if event.size_bytes:
            parts.append(output.size(event.size_bytes))
        if event.namespace_id:
            parts.append(f"ns={event.namespace_id[:4].hex()}")
        keys = event.engine_keys or event.wire_keys
        if keys:
            shown = ",".join(key[:4].hex() for key in keys[:KEYS_SHOWN_MAX])
            more = ",…" if len(keys) > KEYS_SHOWN_MAX else ""
            parts.append(f"keys={shown}{more} at={event.position}")
        return "  ".join(parts).rstrip()

    def gap(self, gap: Any, *, following: bool) -> str:
        """Tell what is missing; returns the sentence."""
        reason = self.label("GapReason", gap.reason)
        if reason == "incarnation":
            text = "the daemon was restarted: numbers begin again"
        elif reason == "ahead":
            text = f"number {gap.asked_seq} was not given out yet"
        elif gap.first_seq > gap.asked_seq + 1:
            text = (
                f"events {gap.asked_seq + 1} to {gap.first_seq - 1} are no longer held ({reason})"
            )
        else:
            text = f"events after {gap.asked_seq} are no longer held ({reason})"
        if self._json:
            fields = {
                "type": "gap", "reason": reason, "asked_seq": gap.asked_seq,
                "first_seq": gap.first_seq, "last_seq": gap.last_seq,
            }  # fmt: skip
            output.json_line(fields)
        elif following:
            print(f"-- gap: {text}; what is stored now follows, then new events --", flush=True)
        return text

    def missed(self, tenant: str, first: int, last: int, reason: str) -> None:
        """While following all tenants, events of one were not seen; perhaps none (last < first)."""
        if self._json:
            fields = {
                "type": "gap", "reason": reason, "tenant": tenant,
                "first_missed_seq": first, "last_missed_seq": last,
            }  # fmt: skip
            output.json_line(fields)
            return
        what = f"events {first} to {last} of tenant {tenant} were not seen"
        if last < first:
            what = f"what tenant {tenant} did last before was not seen"
        why = "the daemon was restarted: numbers begin again" if reason == "incarnation" else ""
        print(f"-- gap: {what}{f'; {why}' if why else ''} --", flush=True)

    def begin_snapshot(self, place: Place) -> None:
        """What follows is what is stored at a position."""
        if self._json:
            output.json_line({"type": "snapshot", "position": str(place)})
        else:
            print(f"-- stored at {place} --", flush=True)

    def end_snapshot(self, place: Place) -> None:
        """All that is stored at a position was told."""
        if self._json:
            output.json_line({"type": "complete", "position": str(place)})
        else:
            print(f"-- complete at {place} --", flush=True)

    def end(self, place: Place) -> None:
        """Where to go on another time."""
        if self._json:
            output.json_line({"type": "position", "position": str(place)})
        else:
            output.note(f"to go on from here: entresol events --since {place}")
