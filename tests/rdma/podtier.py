"""The tier on two machines: the daemon on the DPU, a client on the host, RoCE between them.

`python3 -m tests.rdma.podtier dpu` in one guest, `... host` in the other. They share a folder for
what no wire should carry: certificates, and requests to the DPU (kill, restart, CPU time).
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entresol_client import AsyncClient, ClientConfig, Namespace, PutBlock
from entresol_daemon import dev
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status
from tests.rdma import cost

POD, OUT, STATE = Path("/pod"), Path("/out"), Path("/tmp/entresol")
MIB = 1 << 20
WAIT_S = 240.0
DEADLINE_NS = 60_000_000_000
BLOCK, COUNT = 256 * 1024, 16
TRIES_MAX = 6
LOST = (Status.OK, Status.DISCONNECTED, Status.BREAKER_OPEN, Status.MISS, Status.GAP,
        Status.DEADLINE)  # fmt: skip
SESSION_LOST = {status.label for status in LOST}
SHARD = "dev"  # as the certificate of `dev.prepare` says

CONFIG = """\
[shard]
name = "{name}"
state_dir = "{home}/state"
[listen]
control_host = "{address}"
control_port = 7440
grpc_port = 0
data_host = "{address}"
data_port = 7442
metrics_port = 0
unix_dir = "{home}/run"
[tls]
cert = "{home}/pki/shard.pem"
key = "{home}/pki/shard.key"
ca = "{home}/pki/ca.pem"
[keys]
kek_file = "{home}/kek"
[flash]
size_bytes = "128MiB"
segment_bytes = "8MiB"
[memory]
dram_bytes = "48MiB"
slab_bytes = "8MiB"
[limits]
block_bytes_max = "1MiB"
[fabric]
enabled = ["verbs", "tcp"]
verbs_required = true
[tenants]
auto_add = true
"""


def say(*words: object) -> None:
    print(*words, flush=True)


def wait_for(path: Path) -> None:
    """Until the other machine made it. Raises: SystemExit after WAIT_S."""
    until = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit(f"{path.name} did not come within {WAIT_S:.0f} s")
        time.sleep(0.05)


# -- the DPU ------------------------------------------------------------------------------------


def own_address() -> str:
    """This machine's address on the wire: the peer's neighbour."""
    peer = os.environ["ENTRESOL_RDMA_PEER"]
    return "10.7.0.2" if peer.endswith(".1") else "10.7.0.1"


class Served:
    """The daemon as a process."""

    def __init__(self, config: Path) -> None:
        self._command = [sys.executable, "-m", "entresol_daemon", "--config", str(config)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

    def cpu_seconds(self) -> float:
        assert self.process is not None
        return cost.cpu_seconds(self.process.pid)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def dpu() -> int:
    """Serve until told to stop."""
    home = STATE
    dev.prepare(home, tenants=("dev", "other"))
    shutil.copytree(home / "pki", POD / "pki")
    config = home / "entresold.toml"
    config.write_text(CONFIG.format(name=SHARD, home=home, address=own_address()))
    say(f"{platform.machine()} {platform.release()} is the DPU, {own_address()}")
    served = Served(config)
    served.start()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    (POD / "began").touch()
    while not stopping:
        for asked in sorted(POD.glob("ask-*")):
            what = asked.name.split("-")[1]
            answer = ""
            if what == "cpu":
                answer = str(served.cpu_seconds())
            elif what == "kill":
                served.kill()
            elif what == "start":
                served.start()
            asked.unlink()
            part = POD / f"part-{asked.name}"
            part.write_text(answer)
            part.rename(POD / asked.name.replace("ask", "told"))
        time.sleep(0.05)
    return served.stop()


# -- the host -----------------------------------------------------------------------------------


class Asking:
    """Requests to the DPU."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, what: str) -> str:
        self._number += 1
        # By another name first: of a shared folder a file is made and then opened, and one that was
        # asked for in between is answered, and gone.
        part = POD / f"part-ask-{self._number}"
        part.touch()
        part.rename(POD / f"ask-{what}-{self._number}")
        answer = POD / f"told-{what}-{self._number}"
        wait_for(answer)
        return answer.read_text()


def client_config(tenant: str, fabric: str) -> ClientConfig:
    pki = OUT / "pki"
    own = pki / "tenants" / tenant
    raw = {
        "cert": f"{own}.pem", "key": f"{own}.key", "ca": str(pki / "ca.pem"),
        "fabric": fabric, "fallback": False, "deadline_ns": "60s",
        "ping_deadline_ns": "20s", "connect_deadline_ns": "5s",
        "shards": [{"name": SHARD, "host": os.environ["ENTRESOL_RDMA_PEER"], "port": 7440}],
    }  # fmt: skip
    return ClientConfig.from_mapping(raw, OUT / "client.toml")


def content(key: bytes, size: int = BLOCK) -> bytes:
    return (key * (size // len(key) + 1))[:size]


def keys_of(name: str) -> list[bytes]:
    return [f"{name}-{number:04}".encode().ljust(32, b".") for number in range(COUNT)]


async def connected(client: AsyncClient) -> None:
    until = time.monotonic() + WAIT_S
    while not client.shards()[0].connected:
        if time.monotonic() > until:
            raise SystemExit(f"no session: {client.shards()[0]}")
        await asyncio.sleep(0.05)


async def put(ns: Namespace, keys: Sequence[bytes], size: int = BLOCK) -> None:
    items = [
        PutBlock(key, content(key, size), at, keys[at - 1] if at else None)
        for at, key in enumerate(keys)
    ]
    for _ in range(TRIES_MAX):
        done = await ns.put(items, ack="durable", deadline_ns=DEADLINE_NS)
        if set(done.statuses) == {Status.OK}:
            return
        await again("put", done.statuses)
    raise SystemExit("the blocks could not be put")


async def again(what: str, statuses: Sequence[Status]) -> None:
    """A busy host lets a machine stand still for so long that the other one takes it for gone."""
    found = Counter(status.label for status in statuses)
    say(f"{what} once more, after {dict(found)}")
    assert not found.keys() - SESSION_LOST, found
    await asyncio.sleep(1)


async def get(ns: Namespace, keys: Sequence[bytes], place: Any = "host") -> list[Status]:
    """Statuses; every byte of what is OK was compared."""
    into = [bytearray(BLOCK) for _ in keys]
    got = await ns.get_into(keys, into, open_at=place, deadline_ns=DEADLINE_NS)
    for key, buffer, status in zip(keys, into, got.statuses, strict=True):
        right = content(key) if status is Status.OK else bytes(BLOCK)
        assert bytes(buffer) == right, "wrong bytes"
    return list(got.statuses)


async def measured(ns: Namespace, fabric: str, size: int, ask: Asking) -> list[cost.Cost]:
    """Gets of blocks that are in the daemon's memory; every byte is compared."""
    keys = keys_of(f"{fabric}{size}")[: cost.BLOCKS_PER_GET]
    await put(ns, keys, size)
    into = [bytearray(size) for _ in keys]
    found: list[cost.Cost] = []
    tries = 0
    cpu, began = float(ask("cpu")), time.monotonic()
    await asyncio.sleep(cost.IDLE_S)
    idle = (float(ask("cpu")) - cpu) / (time.monotonic() - began)
    while len(found) <= cost.ROUNDS:
        for buffer in into:
            buffer[:] = bytes(size)
        cpu, began = float(ask("cpu")), time.monotonic()
        got = await ns.get_into(keys, into, deadline_ns=DEADLINE_NS)
        took, cpu = time.monotonic() - began, float(ask("cpu")) - cpu
        for key, buffer, status in zip(keys, into, got.statuses, strict=True):
            right = content(key, size) if status is Status.OK else bytes(size)
            assert bytes(buffer) == right, "wrong bytes"
        if set(got.statuses) == {Status.OK}:
            found.append(cost.Cost(fabric, size, len(keys), took, cpu, idle))
            continue
        tries += 1
        assert tries < TRIES_MAX
        await again("get", got.statuses)
    return found[1:]  # the first one warmed everything up


async def over(fabric: str, ask: Asking) -> list[cost.Cost]:
    """Put and get over one fabric, host-opened and, where it is private, daemon-opened."""
    async with await AsyncClient.open(client_config("dev", fabric)) as client:
        await connected(client)
        assert client.shards()[0].fabric == fabric
        ns = await client.namespace(NamespaceDescriptor(model="pod", cache_salt=fabric))
        keys = keys_of(fabric)
        await put(ns, keys)
        places = ("host", "daemon") if fabric == "verbs" else ("host",)
        for place in places:
            assert set(await get(ns, keys, place)) == {Status.OK}, place
        found = []
        for size in cost.BLOCK_SIZES:
            space = NamespaceDescriptor(model="pod", cache_salt=f"{fabric}{size}")
            found += await measured(await client.namespace(space), fabric, size, ask)
    async with await AsyncClient.open(client_config("other", fabric)) as client:
        await connected(client)
        ns = await client.namespace(NamespaceDescriptor(model="pod", cache_salt=fabric))
        theirs = set(await get(ns, keys))
        assert theirs <= {Status.MISS, Status.GAP}, f"another tenant's get said {theirs}"
    return found


async def after_a_crash(ask: Asking) -> dict[str, float]:
    """The DPU's daemon dies and starts again: what was durable is there, over the same session
    object, which reconnects by itself."""
    async with await AsyncClient.open(client_config("dev", "verbs")) as client:
        await connected(client)
        ns = await client.namespace(NamespaceDescriptor(model="pod", cache_salt="verbs"))
        ask("kill")
        began = time.monotonic()
        lost = await ns.get_into(
            keys_of("verbs"), [bytearray(BLOCK) for _ in range(COUNT)], deadline_ns=2_000_000_000
        )
        assert Status.OK not in lost.statuses
        silent_s = time.monotonic() - began
        ask("start")
        began = time.monotonic()
        while set(await get(ns, keys_of("verbs"))) != {Status.OK}:
            if time.monotonic() - began > WAIT_S:
                raise SystemExit("the daemon did not come back with its blocks")
            await asyncio.sleep(0.2)
        return {"call_during_outage_s": round(silent_s, 2),
                "back_after_s": round(time.monotonic() - began, 2)}  # fmt: skip


def host() -> int:
    """Use the tier; print one object."""
    wait_for(POD / "began")
    shutil.copytree(POD / "pki", OUT / "pki")
    for key in (OUT / "pki").rglob("*.key"):
        key.chmod(0o600)
    ask = Asking()
    found: dict[str, Any] = {"machine": platform.machine(), "wrong_bytes": 0}
    costs: list[cost.Cost] = []
    for fabric in ("verbs", "tcp"):
        began = time.monotonic()
        costs += asyncio.run(over(fabric, ask))
        say(f"{fabric}: put, get, another tenant ({time.monotonic() - began:.1f} s)")
    began = time.monotonic()
    found["crash"] = asyncio.run(after_a_crash(ask))
    say(f"crash: {found['crash']} ({time.monotonic() - began:.1f} s)")
    shutil.rmtree(OUT / "pki")
    found["costs"] = [one.values() for one in costs]
    found["growth"] = {fabric: cost.growth(costs, fabric) for fabric in ("verbs", "tcp")}
    (OUT / "podtier.json").write_text(json.dumps(found, indent=1) + "\n")
    say("\n".join(["wrong bytes: 0", *cost.lines(costs)]))
    if found["growth"]["verbs"] > cost.GROWTH_MAX:
        say("FAILED: over verbs the daemon's CPU grows with the bytes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit({"dpu": dpu, "host": host}[sys.argv[1]]())
