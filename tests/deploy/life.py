"""The steps of one life up to its last upgrade: what is done, and what must hold afterwards.

Every step ends with what it found, in words, and takes the time it takes: numbers are printed, and
none is asserted. While the daemon is restarted, killed, hung and upgraded, one and the same host
process works against it (`inside/load.py`); it must see right bytes or misses, and nothing else.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy import after, drives, keys, locks, watching
from tests.deploy.runbook import NEWER, PACKAGE, Do
from tests.deploy.world import (
    EDITED,
    KEK,
    PYTHON,
    SECONDS_MAX,
    SOCKET,
    STATE,
    TOML,
    UNIT,
    WORK_BLOCKS,
    Broken,
    Load,
    World,
    expect,
)  # fmt: skip

PORTS = ("7440", "7442", "7443")
STOP_FILE = "/run/load.stop"
RESTARTS = 3
DRAINED = "event=drained complete=True"
DEMO_TOKENS = "256"
FLASH = "1GiB"
# Whoever edits has saved what lies in EDITED; `systemctl edit` may say a line first.
EDITOR = f"""#!/bin/sh
for file in "$@"; do
    case "$file" in +*) ;; *) cat {EDITED} > "$file" ;; esac
done
"""
SHARED = ("prometheus/entresol.rules.yml", "grafana/entresol.json", "hugepages.conf")
# What a host may be told while its daemon is away: a miss, whatever it is called.
MISSES = {"miss", "gap", "draining", "disconnected", "breaker_open", "deadline", "busy"}


def boot(world: World) -> str:
    world.machine.boot()
    release = world.machine.run("cat", "/etc/debian_version").stdout.strip()
    systemd = world.machine.run("systemctl", "--version").stdout.splitlines()[0]
    return f"Debian {release}, {systemd}"


def install(world: World) -> str:
    # Losing power is not in this life: dpkg need not flush each of its thousands of files.
    world.machine.write(Path("/etc/dpkg/dpkg.cfg.d/deploy"), "force-unsafe-io\n")
    for package in (world.packages.first, world.packages.next):
        shutil.copy(package, world.machine.root / "srv" / package.name)
    world.follow(Do.INSTALL, put={PACKAGE: f"/srv/{world.packages.first.name}"})
    world.machine.run("id", "entresol")
    for unit in (UNIT, SOCKET):
        expect(world.active(unit) == "inactive", f"{unit} was started by installing it")
    expect(not world.there(KEK), "a key was made by installing it")
    for name in SHARED:
        expect(world.there(f"/usr/share/entresol/{name}"), f"it brings no {name}")
    world.machine.run(
        "systemd-analyze", "verify", "--man=no", "--recursive-errors=no", UNIT, SOCKET,
        "entresold-keys.service", "entresold@5.service", "entresold@5.socket",
    )  # fmt: skip
    world.machine.write(Path("/usr/local/bin/editor"), EDITOR)
    world.machine.run("chmod", "755", "/usr/local/bin/editor")
    return f"version {world.installed()}, nothing started, no key made"


def first_start(world: World) -> str:
    world.follow(Do.ENABLE)
    expect(world.active(SOCKET) == "active", "the sockets are not kept")
    for unit in (UNIT, SOCKET):
        world.machine.run("systemctl", "is-enabled", unit)
    for path, wanted in (
        ("kek", "600 root"), ("pki/shard.key", "640 root"), ("pki/ca.key", "600 root"),
    ):  # fmt: skip
        found = world.machine.run("stat", "-c", "%a %U", f"/etc/entresol/{path}").stdout.strip()
        expect(found == wanted, f"{path} is {found}, not {wanted}")
    world.says("event=sandboxed")
    life = world.life()
    expect(life["recovery"] == "formatted", f"a first start was {life['recovery']}")
    text = world.machine.show(UNIT, "StatusText")
    told = world.follow(Do.STATUS).stdout
    expect(f'Status: "{text}"' in told, f"status: {told}")
    for user in ("root", "entresol"):  # neither has a client configuration
        told = world.follow(Do.STAT, user=user).stdout
        expect("serving" in told, f"stat, as {user}: {told}")
    told = world.follow(Do.JUDGE).stdout
    expect(" 0 failed" in told, f"doctor: {told}")
    return f"ready, says: {text}"


def restrictions(world: World) -> str:
    world.locks = found = locks.look(world.machine)
    expect(len(found.applied) >= 10, f"only {found.applied} hold here")
    wrong = locks.contradicted(locks.claims(locks.PAGE.read_text()), found)
    expect(not wrong, f"the page and this machine differ: {'; '.join(wrong)}")
    return f"{len(found.applied)} tried and held, {len(found.not_applied)} not applied (see below)"


def tenants(world: World) -> str:
    names = ("dev", "other", "load")
    for name in names:
        world.certify(name)
    for name in names:
        world.entresol("tenant", "add", name)
    world.follow(Do.CERTIFY)
    world.follow(Do.TENANT_ADD)
    expect(_quota(world) == 2 << 40, "the quota is another one")
    world.follow(Do.TENANT_QUOTA)
    expect(_quota(world) == 4 << 40, "the quota did not change")
    pem = "/etc/entresol/tenants/acme/tenant.pem"
    before = world.machine.run("cat", pem).stdout
    world.follow(Do.CERTIFY)
    expect(world.machine.run("cat", pem).stdout == before, "a certificate that holds was replaced")
    world.follow(Do.CERTIFY, Do.CERTIFY_RENEW)
    expect(world.machine.run("cat", pem).stdout != before, "the certificate is the same")
    return f"four; doctor: {world.follow(Do.DOCTOR).stdout.strip().splitlines()[-1]}"


def _quota(world: World) -> int:
    """Of acme, in bytes of flash."""
    rows = json.loads(world.follow(Do.TENANT_LIST, more=["--json"]).stdout)["tenants"]
    return int(next(row["quota"]["flash_bytes"] for row in rows if row["name"] == "acme"))


def configure(world: World) -> str:
    """A smaller store, as an operator would change it; no later step may lose that."""
    text = world.machine.run("cat", TOML).stdout
    expect('"4GiB"' in text, "the packaged configuration says another size")
    world.edit(Do.EDIT_CONFIG, text.replace('"4GiB"', f'"{FLASH}"'))
    judged = world.follow(Do.CHECK, put={"FILE": TOML}).stdout
    expect(f"{TOML}: good" in judged, f"--check: {judged}")
    world.follow(Do.STOP_ALL)
    world.machine.run("rm", f"{STATE}/flash.data")
    world.follow(Do.START)
    told = world.follow(Do.FORMATS, put={"FILE": TOML}).stdout
    expect({line.split()[0] for line in told.splitlines()} == {"data-file", "keyring"},
           f"formats: {told}")  # fmt: skip
    return f"a data file of {FLASH} instead; both formats are told"


def demo(world: World) -> str:
    done = world.machine.run(
        PYTHON, "-IB", "/mnt/inside/demo_on_unit.py", DEMO_TOKENS, check=False
    )  # fmt: skip
    expect(done.stdout.strip(), f"the demo did not run: {done.stderr[-800:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    expect(done.returncode == 0 and not found["broken"], f"broken promises: {found['broken']}")
    world.systemctl("start", UNIT)
    return (
        f"{found['durable']} blocks durable, {found['warm_restart_hits']} back after SIGKILL, "
        f"{found['corrupt_blocks_detected']} damaged and found, over {found['fabric']}"
    )


def host_begins(world: World) -> str:
    world.load = Load(
        world.machine.start(
            PYTHON, "-IB", "/mnt/inside/load.py", "--run", "life", "--until", STOP_FILE,
            "--config", "/etc/entresol/tenants/load/client.toml", "--knock", *PORTS,
        )
    )  # fmt: skip
    load = world.load
    threading.Thread(target=load.listen, daemon=True).start()
    world.until(lambda: load.durable() >= WORK_BLOCKS, "the first durable blocks")
    return f"{load.durable()} blocks durable so far"


def restart(world: World) -> str:
    before = world.pid()
    drained = world.machine.journal(UNIT).count(DRAINED)
    with world.work_goes_on():
        began_s = time.monotonic()
        world.systemctl("restart", UNIT)
        took_s = time.monotonic() - began_s
    expect(world.pid() not in (before, 0), "the process is the same")
    world.until(lambda: world.machine.journal(UNIT).count(DRAINED) > drained, "this stop's drain")
    life = world.life()
    expect(life["recovery"] == "checkpoint", f"the start after a stop was {life['recovery']}")
    return f"{took_s:.1f} s from stop to ready; {life['blocks']} blocks by {life['recovery']}"


def new_certificate(world: World) -> str:
    before = world.pid()
    reloads = world.machine.journal(UNIT).count("event=tls_reloaded")
    with world.work_goes_on():
        world.follow(Do.RENEW)
        world.follow(Do.RELOAD)
        world.until(
            lambda: world.machine.journal(UNIT).count("event=tls_reloaded") > reloads,
            "the new certificate",
        )
    expect(world.pid() == before, "a new certificate took a new process")
    world.entresol("doctor")  # shakes hands anew
    return "taken over by HUP, in the same process"


def kill(world: World) -> str:
    before = world.pid()
    with world.work_goes_on():
        began_s = time.monotonic()
        world.systemctl("kill", "--signal=KILL", "--kill-who=main", UNIT)
        world.until(lambda: world.pid() not in (before, 0) and world.is_up(), "another process")
        took_s = time.monotonic() - began_s
    life = world.life()
    return f"back after {took_s:.1f} s; {life['blocks']} blocks by {life['recovery']}"


def hang(world: World) -> str:
    """With a watchdog of 3 s instead of 30, to wait less; everything else is as installed."""
    world.drop_in("[Service]\nWatchdogSec=3\n")
    world.systemctl("restart", UNIT)
    before = world.pid()
    with world.work_goes_on():
        hanging = world.machine.start(PYTHON, "-IB", "/mnt/inside/hang.py", str(before))
        began_s = time.monotonic()
        world.until(lambda: world.pid() not in (before, 0) and world.is_up(), "another process")
        took_s = time.monotonic() - began_s
        hanging.communicate(timeout=SECONDS_MAX)
    world.says("Watchdog timeout")
    world.says("most recent call first")  # where each thread was
    world.drop_in("")  # the next start's watchdog is the unit's again
    return f"its main thread stopped: killed and back after {took_s:.1f} s, stacks in the log"


def upgrade(world: World) -> str:
    before, wanted = world.installed(), world.packages.next_version
    with world.work_goes_on():
        began_s = time.monotonic()
        world.follow(Do.UPGRADE, put={NEWER: f"/srv/{world.packages.next.name}"})
        took_s = time.monotonic() - began_s
    expect(f'"{FLASH}"' in world.machine.run("cat", TOML).stdout, "the configuration was replaced")
    life = world.life()
    expect(life["version"] == wanted, f"{life['version']} runs after the upgrade to {wanted}")
    expect(life["recovery"] == "checkpoint", f"the next version's start was {life['recovery']}")
    return f"{before} to {wanted} in {took_s:.1f} s; {life['blocks']} blocks by {life['recovery']}"


def host_ends(world: World) -> str:
    world.machine.run("touch", STOP_FILE)
    load, world.load = world.load, None
    assert load is not None
    status = load.process.wait(SECONDS_MAX)
    found = load.said[-1] if load.said else {}
    expect(status == 0 and found.get("final"), "the host failed: " + "\n".join(load.noise[-30:]))
    expect(found["wrong_bytes"] == 0, f"{found['wrong_bytes']} blocks had wrong bytes")
    expect(found["missing"] == 0, f"{found['missing']} of {found['durable']} blocks are gone")
    expect(not found["knocks_wrong"], f"refused connects: {found['knocks_wrong']}")
    expect(not found["refused"], f"the client was refused: {found['refused']}")
    strange = (set(found["got_as"]) | set(found["put_as"])) - MISSES - {"ok"}
    expect(not strange, f"the host was told {strange}")
    return (
        f"{found['durable']} durable blocks all there, 0 wrong bytes; gets {found['got_as']}, puts "
        f"{found['put_as']}; {found['connects']} sessions; {found['knocks']} connects, 0 refused; "
        f"longest call {found['longest_call_ms']} ms"
    )


def without_sockets(world: World) -> str:
    """The fault to be found: nobody keeps the sockets while the daemon is away."""
    world.systemctl("stop", SOCKET, UNIT)
    world.systemctl("mask", "--runtime", SOCKET)
    world.systemctl("start", UNIT)
    return "entresold.socket is masked"


def host_is_refused(world: World) -> str:
    """Raises: Broken when the host noticed nothing."""
    try:
        host_ends(world)
    except Broken as found:
        expect("refused connects" in str(found), f"something else was found: {found}")
        return "found"
    raise Broken("connects were refused, and no step noticed")


CANARY: list[tuple[str, Callable[[World], str]]] = [
    ("boot", boot),
    ("install", install),
    ("first start", first_start),
    ("tenants", tenants),
    ("planted: no sockets", without_sockets),
    ("a host begins", host_begins),
    ("restart", restart),
    ("the host ends", host_is_refused),
]
STEPS: list[tuple[str, Callable[[World], str]]] = [
    ("boot", boot),
    ("install", install),
    ("first start", first_start),
    ("restrictions", restrictions),
    ("tenants", tenants),
    ("configure", configure),
    ("demo on the unit", demo),
    ("engines of other users", drives.other_user),
    ("a host begins", host_begins),
    *[(f"restart {at + 1}", restart) for at in range(RESTARTS)],
    ("new certificate", new_certificate),
    ("a broken certificate", keys.broken_certificate),
    ("SIGKILL", kill),
    ("a hung loop", hang),
    ("upgrade", upgrade),
    ("the host ends", host_ends),
    ("watching it", watching.watch),
    ("stopped, and woken", watching.stopped_and_woken),
    *after.STEPS,
]
