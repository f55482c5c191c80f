"""The rest of a life: a full disk, no way back, a lost key, erasing, and three ways to end it."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy import drives
from tests.deploy.world import SOCKET, UNIT, World, expect

FIFTH = "entresold@5.service"
FIFTH_TOML = "/etc/entresol/5.toml"
FIFTH_STATE = "/var/lib/entresol-5"
DISK = "192m"
FLASH = "128MiB"
VERSION_AT = 8  # of a data file's superblock, daemon/DATA_FILE.md
LATER = 99  # a format that nobody reads yet
RECEIPT = "/srv/receipt.json"


def full_disk(world: World) -> str:
    """A second shard, by the template, on a small file system of its own that fills up."""
    text = (world.machine.root / "etc/entresol/entresold.toml").read_text()
    for old, new in (
        ('"shard0"', '"shard5"\nstate_dir = "' + FIFTH_STATE + '"'),
        ("\n[listen]", '\n[listen]\nunix_dir = "/run/entresol-5"\ncontrol_port = 7450\n'
         "grpc_port = 7451\ndata_port = 7452\nmetrics_port = 7453\n#"),
        ("pki/shard.", "pki/5."),
        ('"1GiB"', f'"{FLASH}"\nsegment_bytes = "8MiB"'),
        ('"512MiB"', '"64MiB"\nslab_bytes = "8MiB"\n\n[limits]\nblock_bytes_max = "2MiB"'),
    ):  # fmt: skip
        expect(old in text, f"the packaged configuration has no {old}")
        text = text.replace(old, new)
    world.machine.write(Path(FIFTH_TOML), text)
    world.machine.run("mkdir", "-p", FIFTH_STATE)
    world.machine.run("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", FIFTH_STATE)
    world.systemctl("start", FIFTH)
    folder = "/srv/five"
    world.machine.run("entresold", "--config", FIFTH_TOML, "certify", "five", folder)
    tool = ("env", f"ENTRESOL_CONFIG={folder}/client.toml", "entresol")
    world.machine.run(*tool, "tenant", "add", "five")
    world.machine.run("dd", "if=/dev/urandom", "of=/srv/content", "bs=1M", "count=4")
    world.machine.run(*tool, "put", "/srv/content", "--name", "kept")
    fill = f"{FIFTH_STATE}/fill"
    filled = world.machine.run("dd", "if=/dev/zero", f"of={fill}", "bs=64k", check=False)
    expect("No space left" in filled.stderr, f"the disk is not full: {filled.stderr}")
    refused = world.machine.run(*tool, "tenant", "add", "six", check=False)
    expect(refused.returncode != 0, "a tenant was added to a keyring that cannot be written")
    world.machine.run(*tool, "put", "/srv/content", "--name", "while-full")
    world.systemctl("restart", FIFTH)  # no room for the index's checkpoint
    for name in ("kept", "while-full"):
        world.machine.run(*tool, "get", "--name", name, "--output", f"/srv/{name}")
        world.machine.run("cmp", "/srv/content", f"/srv/{name}")
    life = world.life(FIFTH)
    world.machine.run("rm", fill)
    world.machine.run(*tool, "tenant", "add", "six")
    return (
        f"serves and stores, refuses a new tenant, warm restart by {life['recovery']}; "
        "with room again it takes the tenant"
    )


def downgrade_refused(world: World) -> str:
    """Data as a later format would have it: neither the package nor the daemon goes near it."""
    world.systemctl("stop", "entresold@5.socket", FIFTH)
    patch = "".join(f"\\{byte:03o}" for byte in struct.pack("<I", LATER))
    world.machine.run(
        "sh", "-c", f"printf '{patch}' | dd of={FIFTH_STATE}/flash.data bs=1 seek={VERSION_AT} "
        "conv=notrunc",
    )  # fmt: skip
    version = world.installed()
    refused = world.dpkg("-i", f"/srv/{world.packages.first.name}", check=False)
    expect(refused.returncode != 0, "an older package went over data of a later format")
    expect(
        f"format version {LATER}" in refused.stderr, f"it did not say why: {refused.stderr[-500:]}"
    )
    expect(world.installed() == version, "the installed version changed all the same")
    expect(world.is_up(), "the other shard does not run any more")
    started = world.systemctl("start", FIFTH, check=False)
    expect(started.returncode != 0, "the daemon started on data of a later format")
    world.says("install that one again", FIFTH)
    world.systemctl("stop", "entresold@5.socket", FIFTH)
    world.machine.run("umount", FIFTH_STATE)
    world.machine.run("rm", "-rf", FIFTH_STATE, FIFTH_TOML)
    world.systemctl("reset-failed", check=False)
    return "by dpkg before anything was replaced, and by the daemon at its start"


def no_kek(world: World) -> str:
    world.machine.run("mv", "/etc/entresol/kek", "/srv/kek")
    failed = world.systemctl("restart", UNIT, check=False)
    expect(failed.returncode != 0, "it started without its key")
    expect(not world.there("/etc/entresol/kek"), "a new key was made over old blocks")
    world.says("wrapped under", "entresold-keys.service")
    world.machine.run("mv", "/srv/kek", "/etc/entresol/kek")
    world.systemctl("restart", UNIT)
    blocks = int(world.life()["blocks"])
    expect(blocks > 0, "no blocks after the key came back")
    return f"no start, no new key; with the key back {blocks} blocks"


def erase(world: World) -> str:
    world.entresol("tenant", "rotate", "other")
    world.entresol("tenant", "erase", "other", "--yes", "--receipt", RECEIPT)
    checked = world.machine.run(
        "entresold", "verify-receipt", RECEIPT, "--state-dir", "/var/lib/entresol"
    ).stdout  # fmt: skip
    expect("good: tenant other was erased" in checked, f"the receipt: {checked}")
    return checked.splitlines()[0]


def replace_drive(world: World) -> str:
    """The data file is gone, as a drive would be: tenants and keys stay, blocks are misses."""
    world.systemctl("stop", SOCKET, UNIT)
    world.machine.run("rm", "/var/lib/entresol/flash.data")
    world.systemctl("start", UNIT)
    life = world.life()
    expect(life["blocks"] == "0", f"{life['blocks']} blocks on a new drive")
    rows = json.loads(world.entresol("tenant", "list", "--json").stdout)
    expect("load" in json.dumps(rows), f"the tenants are gone: {rows}")
    world.machine.run("dd", "if=/dev/urandom", "of=/srv/content", "bs=1M", "count=4")
    world.entresol("put", "/srv/content", "--name", "kept")
    return "empty, formatted, with the tenants and keys of before"


def remove(world: World) -> str:
    done = world.dpkg("-r", "entresol")
    expect("are kept" in done.stdout, "it does not say that data is kept")
    expect(world.active(UNIT) != "active", "it still runs")
    for path in ("/etc/entresol/kek", "/etc/entresol/entresold.toml",
                 "/var/lib/entresol/keyring.json", "/var/lib/entresol/flash.data"):  # fmt: skip
        expect(world.there(path), f"{path} is gone")
    expect(not world.there("/usr/lib/entresol/bin/entresold"), "the program is still there")
    return "stopped; blocks, keys and configuration are kept"


def install_again(world: World) -> str:
    world.dpkg("-i", f"/srv/{world.packages.next.name}")
    began_s = time.monotonic()
    world.systemctl("start", UNIT)
    took_s = time.monotonic() - began_s
    world.entresol("get", "--name", "kept", "--output", "/srv/kept")
    world.machine.run("cmp", "/srv/content", "/srv/kept")
    return f"ready after {took_s:.1f} s; {world.life()['blocks']} blocks, content is the same"


def purge(world: World) -> str:
    done = world.dpkg("-P", "entresol")
    expect("PURGE DESTROYS EVERY BLOCK AND EVERY KEY" in done.stderr, "it does not say so loudly")
    found = world.machine.run(
        "sh", "-c", "find / -xdev -iname '*entresol*' -not -path '/proc/*' -not -path '/srv/*' "
        "-not -path '/run/*' -not -path '/var/log/*' -not -path '/mnt/*' -not -path '/tmp/*'",
    ).stdout.split()  # fmt: skip
    # systemd's own records of units that once ran, and dpkg's of what it knew, are not ours.
    left = [path for path in found if not path.startswith("/var/lib/systemd/")]
    expect(not left, f"left behind: {left}")
    expect(world.machine.run("id", "entresol", check=False).returncode != 0, "the user is there")
    return "nothing of it is left: files, keys, units, user"


def serve_a_network(world: World) -> str:
    """An address that is not loopback's: the daemon wants the .socket unit to agree, and then the
    unit's list of whom it talks to decides."""
    toml, address = "/etc/entresol/entresold.toml", "10.77.0.1"
    before = world.machine.run("cat", toml).stdout
    there = before.replace(
        'control_host = "127.0.0.1"\ndata_host = "127.0.0.1"',
        f'control_host = "{address}"\ndata_host = "{address}"\ngrpc_host = "{address}"',
    )
    expect(there != before, "the packaged configuration names other addresses")
    world.machine.write(Path(toml), there)
    refused = world.systemctl("restart", UNIT, check=False)
    expect(refused.returncode != 0, "it started with sockets at another address")
    world.says("does not name: 127.0.0.1:7440")
    world.systemctl("stop", UNIT, SOCKET)
    lines = [f"ListenStream={address}:{port}" for port in (7440, 7442)]
    world.drop_in(
        "\n".join(["[Socket]", "ListenStream=", *lines, "ListenStream=127.0.0.1:7443", ""]), SOCKET
    )
    world.systemctl("start", UNIT)
    folder = "/etc/entresol/tenants/far"
    world.entresold("certify", "load", folder, "--host", address)
    outside = world.entresol("doctor", tenant="far", check=False)
    expect(outside.returncode != 0, "whoever is not in IPAddressAllow= reaches it")
    for port in (7440, 7441, 7442):
        expect(not _reaches(world, address, port), f"whoever is in no list reaches port {port}")
    world.drop_in(f"[Service]\nIPAddressAllow={address}\n")
    world.systemctl("restart", UNIT)
    expect(not _reaches(world, address, 7440), "the service's list opened the .socket unit's port")
    world.drop_in(
        "\n".join(["[Socket]", "ListenStream=", *lines, "ListenStream=127.0.0.1:7443",
                   f"IPAddressAllow={address}", ""]), SOCKET,
    )  # fmt: skip
    world.systemctl("stop", UNIT, SOCKET)
    world.systemctl("start", UNIT)
    said = world.entresol("doctor", tenant="far").stdout
    expect(f"{address}:7440 accepts" in said, f"doctor: {said}")
    world.machine.run("rm", "-r", folder)
    world.systemctl("stop", UNIT, SOCKET)
    world.machine.write(Path(toml), before)
    world.drop_in("", SOCKET)
    world.drop_in("")
    world.systemctl("start", UNIT)
    return "refused while socket and configuration differ, kept out until both units' lists name it"


def _reaches(world: World, address: str, port: int) -> bool:
    """Whether a connection comes about; one that a list keeps out gets no answer."""
    words = ("timeout", "2", "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}")
    return world.machine.run(*words, check=False).returncode == 0


def change_kek(world: World) -> str:
    new, shown = "/etc/entresol/kek.new", "/run/entresol/kek.new"
    world.machine.run("entresold", "keygen", new)
    world.machine.run("install", "-o", "entresol", "-m", "0600", new, shown)
    world.machine.run("entresol", "change-kek", shown)  # finds the package's sockets by itself
    world.machine.run("rm", shown)
    world.machine.run("mv", new, "/etc/entresol/kek")
    world.systemctl("restart", UNIT)
    expect(int(world.life()["blocks"]) > 0, "no blocks under the new key")
    return "every key wrapped anew while it ran; the restart found them"


def locked(world: World) -> str:
    """A KEK that is not on this machine: up, not ready, nothing touched, until it is shown one."""
    toml = "/etc/entresol/entresold.toml"
    before = world.machine.run("cat", toml).stdout
    blocks = world.life()["blocks"]
    world.machine.write(Path(toml), before.replace("kek_file =", "#kek_file ="))
    world.drop_in("[Service]\nLoadCredential=\n")
    world.machine.run("mv", "/etc/entresol/kek", "/srv/kek")
    world.systemctl("restart", UNIT)
    expect(not world.there("/etc/entresol/kek"), "a key was made that nothing uses")
    expect("locked" in world.machine.show(UNIT, "StatusText"), "it does not say that it is locked")
    told = world.machine.run("entresol", "top", "--once", check=False)
    expect(told.returncode == 1 and "NOT READY" in told.stdout, f"top does not tell: {told}")
    shown = "/run/entresol/kek"
    world.machine.run("install", "-o", "entresol", "-m", "0600", "/srv/kek", shown)
    world.machine.run("entresol", "unlock", shown)
    world.machine.run("rm", shown)
    expect("unlocked" in world.machine.show(UNIT, "StatusText"), "it is still locked")
    expect(world.life()["blocks"] == blocks, "blocks were lost while it was locked")
    world.machine.write(Path(toml), before)
    world.machine.run("mv", "/srv/kek", "/etc/entresol/kek")
    world.drop_in("")
    world.systemctl("restart", UNIT)
    return f"{blocks} blocks waited for their key"


STEPS: list[tuple[str, Callable[[World], str]]] = [
    ("full disk, second shard", full_disk),
    ("downgrade refused", downgrade_refused),
    ("no KEK", no_kek),
    ("another KEK", change_kek),
    ("locked, unlocked", locked),
    ("serve a network", serve_a_network),
    ("erase a tenant", erase),
    ("replace the drive", replace_drive),
    ("a mounted drive", drives.mounted_drive),
    ("a raw drive", drives.raw_drive),
    ("remove", remove),
    ("install again", install_again),
    ("purge", purge),
]
