"""The tier on two machines: the daemon on the DPU, a client on the host, RoCE between them.

`python3 -m tests.rdma.podtier dpu` in one guest, `... host` in the other. They share a folder for
what no wire should carry: certificates, and requests to the DPU (kill, restart, CPU time).
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from entresol_client import AsyncClient, ClientConfig, Namespace, PutBlock
from entresol_daemon import dev
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status

POD, OUT, STATE = Path("/pod"), Path("/out"), Path("/tmp/entresol")
MIB = 1 << 20
WAIT_S = 240.0
DEADLINE_NS = 60_000_000_000
BLOCK, COUNT = 256 * 1024, 16
READS = 4  # of all blocks, per fabric
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
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
        (POD / f"ask-{what}-{self._number}").touch()
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


def content(key: bytes) -> bytes:
    return (key * (BLOCK // len(key) + 1))[:BLOCK]


def keys_of(name: str) -> list[bytes]:
    return [f"{name}-{number:04}".encode().ljust(32, b".") for number in range(COUNT)]


async def connected(client: AsyncClient) -> None:
    until = time.monotonic() + WAIT_S
    while not client.shards()[0].connected:
        if time.monotonic() > until:
            raise SystemExit(f"no session: {client.shards()[0]}")
        await asyncio.sleep(0.05)


async def put(ns: Namespace, keys: Sequence[bytes]) -> None:
    items = [
        PutBlock(key, content(key), at, keys[at - 1] if at else None) for at, key in enumerate(keys)
    ]
    done = await ns.put(items, ack="durable", deadline_ns=DEADLINE_NS)
    assert set(done.statuses) == {Status.OK}, done.statuses


async def get(ns: Namespace, keys: Sequence[bytes], place: Any = "host") -> list[Status]:
    """Statuses; every byte of what is OK was compared."""
    into = [bytearray(BLOCK) for _ in keys]
    got = await ns.get_into(keys, into, open_at=place, deadline_ns=DEADLINE_NS)
    for key, buffer, status in zip(keys, into, got.statuses, strict=True):
        right = content(key) if status is Status.OK else bytes(BLOCK)
        assert bytes(buffer) == right, "wrong bytes"
    return list(got.statuses)


async def measured(ns: Namespace, keys: Sequence[bytes], ask: Asking) -> dict[str, float]:
    """MB/s of gets from memory, and the CPU seconds they cost the daemon and us, per GB."""
    await get(ns, keys)
    size = READS * COUNT * BLOCK / 1e9
    theirs, ours = float(ask("cpu")), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    began = time.monotonic()
    for _ in range(READS):
        assert set(await get(ns, keys)) == {Status.OK}
    took = time.monotonic() - began
    ours = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - ours
    return {
        "mb_per_s": round(size * 1e3 / took, 2),
        "daemon_cpu_s_per_gb": round((float(ask("cpu")) - theirs) / size, 2),
        "host_cpu_s_per_gb": round(ours / size, 2),
    }


async def over(fabric: str, ask: Asking) -> dict[str, float]:
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
        result = await measured(ns, keys, ask)
    async with await AsyncClient.open(client_config("other", fabric)) as client:
        await connected(client)
        ns = await client.namespace(NamespaceDescriptor(model="pod", cache_salt=fabric))
        found = set(await get(ns, keys))
        assert found <= {Status.MISS, Status.GAP}, f"another tenant's get said {found}"
    return result


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
    found: dict[str, object] = {"machine": platform.machine(), "wrong_bytes": 0}
    for step, work in steps(ask):
        began = time.monotonic()
        found[step] = asyncio.run(work())
        say(f"{step}: {found[step]} ({time.monotonic() - began:.1f} s)")
    shutil.rmtree(OUT / "pki")
    (OUT / "podtier.json").write_text(json.dumps(found, indent=1) + "\n")
    say(json.dumps(found))
    return 0


def steps(ask: Asking) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the host does, in order."""
    yield "verbs", lambda: over("verbs", ask)
    yield "tcp", lambda: over("tcp", ask)
    yield "crash", lambda: after_a_crash(ask)


if __name__ == "__main__":
    sys.exit({"dpu": dpu, "host": host}[sys.argv[1]]())
