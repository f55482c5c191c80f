"""Where a relay publishes: one place for every worker of a router, and how that is written.

Routers credit blocks to workers, so what all workers can read is published once for each of them.
Invariant: without a word to the contrary a relay listens on loopback only: events carry token ids,
and ZMQ asks nobody who they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from entresol_client.cli.errors import UsageProblem

LOOPBACK = "127.0.0.1"
WORKERS_MAX = 64
_POD = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ENDPOINT = re.compile(r"tcp://[^\s,@]+:\d{1,5}|ipc://[^\s,]+")
_FORM = "POD=ENDPOINT[,replay=ENDPOINT][,dp=N][,connect]"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker: the pod's name in the topic, and its sockets.

    Attributes:
        replay: where readers ask for what they missed; empty: nowhere.
        dp_rank: data-parallel rank in every message; None: not told.
        connect: connect to a reader that binds, instead of binding.
    """

    pod: str
    endpoint: str
    replay: str = ""
    dp_rank: int | None = None
    connect: bool = False

    @property
    def open_to_others(self) -> bool:
        """True when machines other than this one may be able to connect."""
        places = [self.replay] if self.connect else [self.endpoint, self.replay]
        return any(place.startswith("tcp://") and not _is_loopback(place) for place in places)


def parse_worker(text: str) -> Worker:
    """Raises: UsageProblem."""
    pod, _, rest = text.partition("=")
    place, *options = rest.split(",")
    if not _POD.fullmatch(pod):
        raise _problem(text, f"{pod!r} is no pod name (letters, digits, . _ : -)")
    found: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("replay", "dp", "connect") or name in found:
            raise _problem(text, f"{option!r} is not understood")
        if (name == "connect") is bool(value):
            raise _problem(text, f"{option!r} is not understood")
        found[name] = value
    dp = found.get("dp")
    if dp is not None and not re.fullmatch(r"\d{1,4}", dp):
        raise _problem(text, f"dp={dp} is no data-parallel rank")
    return Worker(
        pod,
        _endpoint(text, place),
        _endpoint(text, found["replay"]) if "replay" in found else "",
        None if dp is None else int(dp),
        "connect" in found,
    )


def check_workers(workers: list[Worker]) -> None:
    """Raises: UsageProblem for none, too many, or two at one place."""
    if not workers:
        raise UsageProblem("no --worker is given", hint=f"--worker {_FORM}, once for each")
    if len(workers) > WORKERS_MAX:
        raise UsageProblem(f"{len(workers)} workers; at most {WORKERS_MAX}")
    bound = [one.replay for one in workers if one.replay]
    bound += [one.endpoint for one in workers if not one.connect]
    for place in bound:
        if bound.count(place) > 1 and not place.endswith(":0"):
            raise UsageProblem(f"two sockets at {place}", hint="give each an endpoint of its own")


def _endpoint(text: str, place: str) -> str:
    if re.fullmatch(r"\d{1,5}", place):
        place = f"tcp://{LOOPBACK}:{place}"
    if not _ENDPOINT.fullmatch(place):
        raise _problem(text, f"{place!r} is no endpoint")
    if place.startswith("tcp://") and int(place.rpartition(":")[2]) > 65535:
        raise _problem(text, f"{place!r} has no such port")
    return place


def _problem(text: str, what: str) -> UsageProblem:
    return UsageProblem(
        f"--worker {text!r}: {what}",
        hint=f"write {_FORM}; an endpoint is tcp://HOST:PORT, ipc://PATH, or a port on loopback",
    )


def _is_loopback(place: str) -> bool:
    host = place.removeprefix("tcp://").rpartition(":")[0]
    return host in (LOOPBACK, "localhost", "[::1]") or host.startswith("127.")
