"""The rest of a life: a full disk, no way back, another address, another drive, and its end."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy import drives, keys, memory
from tests.deploy.runbook import NEWER, NOT_TRIED, PACKAGE, Do
from tests.deploy.world import (
    FIFTH,
    FIFTH_SOCKET,
    FIFTH_STATE,
    FIFTH_TOML,
    KEK,
    STATE,
    TOML,
    UNIT,
    YES,
    World,
    expect,
)  # fmt: skip

DISK = "192m"
FLASH = "128MiB"
VERSION_AT = 8  # of a data file's superblock, daemon/DATA_FILE.md
LATER = 99  # a format that nobody reads yet


def full_disk(world: World) -> str:
    """A second shard, by the template, on a small file system of its own that fills up."""
    text = world.machine.run("cat", TOML).stdout
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
    world.follow(Do.ENABLE_FIFTH)
    expect(world.active(FIFTH_SOCKET) == "active", "its sockets are not kept")
    folder = "/srv/five"
    world.machine.run("entresold", "--config", FIFTH_TOML, "certify", "five", folder)
    tool = ("env", f"ENTRESOL_CONFIG={folder}/client.toml", "entresol")
    world.machine.run(*tool, "tenant", "add", "five")
    rows = json.loads(world.follow(Do.TENANT_LIST, Do.OF_FIFTH, more=["--json"]).stdout)
    expect([row["name"] for row in rows["tenants"]] == ["five"], f"another shard's: {rows}")
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
    world.systemctl("stop", FIFTH_SOCKET, FIFTH)
    patch = "".join(f"\\{byte:03o}" for byte in struct.pack("<I", LATER))
    world.machine.run(
        "sh", "-c", f"printf '{patch}' | dd of={FIFTH_STATE}/flash.data bs=1 seek={VERSION_AT} "
        "conv=notrunc",
    )  # fmt: skip
    put = {"FILE": FIFTH_TOML}
    told = world.follow(Do.FORMATS, put=put, check=False)
    expect(told.returncode == 1 and f"data-file {LATER} " in told.stdout, f"formats: {told}")
    judged = world.follow(Do.CHECK, put=put, check=False)
    expect(judged.returncode == 1, "--check takes data of a later format")
    expect(f"format version {LATER}" in judged.stderr, f"--check: {judged.stderr}")
    version = world.installed()
    older = {PACKAGE: f"/srv/{world.packages.first.name}"}
    refused = world.follow(Do.INSTALL, put=older, typed=YES, check=False)
    expect(refused.returncode != 0, "an older package went over data of a later format")
    expect(
        f"format version {LATER}" in refused.stdout, f"it did not say why: {refused.stdout[-800:]}"
    )
    expect(world.installed() == version, "the installed version changed all the same")
    expect(world.is_up(), "the other shard does not run any more")
    started = world.systemctl("start", FIFTH, check=False)
    expect(started.returncode != 0, "the daemon started on data of a later format")
    world.says("install that one again", FIFTH)
    world.systemctl("disable", "--now", FIFTH_SOCKET, FIFTH)
    world.machine.run("umount", FIFTH_STATE)
    world.machine.run("rm", "-rf", FIFTH_STATE, FIFTH_TOML)
    world.systemctl("reset-failed", check=False)
    return "by apt before anything was replaced, by --check, and by the daemon at its start"


def replace_drive(world: World) -> str:
    """The data file is gone, as a drive would be: tenants and keys stay, blocks are misses."""
    world.follow(Do.STOP_ALL)
    found = world.follow(Do.INSPECT, check=False)  # the demo damaged a block of it
    expect(found.returncode == 1 and "1 damaged" in found.stdout, f"inspect: {found}")
    world.machine.run("rm", f"{STATE}/flash.data")
    world.follow(Do.START)
    life = world.life()
    expect(life["blocks"] == "0", f"{life['blocks']} blocks on a new drive")
    rows = json.loads(world.entresol("tenant", "list", "--json").stdout)
    expect("load" in json.dumps(rows), f"the tenants are gone: {rows}")
    world.puts("kept")
    world.follow(Do.STOP_ALL)
    told = world.follow(Do.INSPECT).stdout
    expect(told.splitlines()[-1].strip() == "sound", f"inspect: {told}")
    world.follow(Do.START)
    return (
        "the old one holds 1 damaged block; the new one is sound, with tenants and keys of before"
    )


def remove(world: World) -> str:
    done = world.follow(Do.REMOVE, typed=YES)
    expect("are kept" in done.stdout, "it does not say that data is kept")
    expect(world.active(UNIT) != "active", "it still runs")
    for path in (KEK, TOML, f"{STATE}/keyring.json", f"{STATE}/flash.data"):
        expect(world.there(path), f"{path} is gone")
    expect(not world.there("/usr/lib/entresol/bin/entresold"), "the program is still there")
    return "stopped; blocks, keys and configuration are kept"


def install_again(world: World) -> str:
    world.follow(Do.UPGRADE, put={NEWER: f"/srv/{world.packages.next.name}"})
    began_s = time.monotonic()
    world.follow(Do.START)
    took_s = time.monotonic() - began_s
    world.gets("kept")
    return f"ready after {took_s:.1f} s; {world.life()['blocks']} blocks, content is the same"


def go_back(world: World) -> str:
    """To the older version, which reads what the newer one wrote."""
    put = {PACKAGE: f"/srv/{world.packages.first.name}"}
    world.follow(Do.INSTALL, put=put, typed=YES)
    life = world.life()
    expect(life["version"] == world.packages.first_version, f"{life['version']} runs")
    expect(life["recovery"] == "checkpoint", f"the older version's start was {life['recovery']}")
    world.gets("kept")
    return f"version {life['version']} runs again; {life['blocks']} blocks by {life['recovery']}"


def purge(world: World) -> str:
    done = world.follow(Do.PURGE, typed=YES)
    expect("PURGE DESTROYS EVERY BLOCK AND EVERY KEY" in done.stdout, "it does not say so loudly")
    found = world.machine.run(
        "sh", "-c", "find / -xdev -iname '*entresol*' -not -path '/proc/*' -not -path '/srv/*' "
        "-not -path '/run/*' -not -path '/var/log/*' -not -path '/mnt/*' -not -path '/tmp/*'",
    ).stdout.split()  # fmt: skip
    # systemd's own records of units that once ran, and dpkg's of what it knew, are not ours.
    left = [path for path in found if not path.startswith("/var/lib/systemd/")]
    expect(not left, f"left behind: {left}")
    expect(world.machine.run("id", "entresol", check=False).returncode != 0, "the user is there")
    return "nothing of it is left: files, keys, units, user"


def all_followed(world: World) -> str:
    never = [command for command in Do if command not in world.followed]
    expect(not never, f"tests/deploy/runbook.py says that these are tried: {never}")
    return f"{len(Do)} commands of the runbook tried as they stand there, {len(NOT_TRIED)} not"


def serve_a_network(world: World) -> str:
    """An address that is not loopback's: the daemon wants the .socket unit to agree, and then the
    lists of both units decide who reaches it."""
    address, folder = "10.77.0.1", "/etc/entresol/tenants/far"
    before = world.machine.run("cat", TOML).stdout
    there = before.replace(
        'control_host = "127.0.0.1"\ndata_host = "127.0.0.1"',
        f'control_host = "{address}"\ndata_host = "{address}"\ngrpc_host = "{address}"',
    )
    expect(there != before, "the packaged configuration names other addresses")
    world.edit(Do.EDIT_CONFIG, there)
    refused = world.systemctl("restart", UNIT, check=False)
    expect(refused.returncode != 0, "it started with sockets at another address")
    world.says("does not name: 127.0.0.1:7440")
    sockets = "".join([
        "[Socket]\nListenStream=\n", *(f"ListenStream={address}:{port}\n" for port in (7440, 7442)),
        "ListenStream=127.0.0.1:7443\n",
    ])  # fmt: skip
    world.edit(Do.EDIT_SOCKET, sockets)
    _begin_again(world)
    put = {"acme": "load", "/etc/entresol/tenants/acme": folder, "ADDRESS": address}
    world.follow(Do.CERTIFY, Do.CERTIFY_HOST, put=put)
    outside = world.entresol("doctor", tenant="far", check=False)
    expect(outside.returncode != 0, "whoever is not in IPAddressAllow= reaches it")
    for port in (7440, 7441, 7442):
        expect(not _reaches(world, address, port), f"whoever is in no list reaches port {port}")
    world.edit(Do.EDIT_SERVICE, f"[Service]\nIPAddressAllow={address}\n")
    world.follow(Do.RESTART)
    expect(not _reaches(world, address, 7440), "the service's list opened the .socket unit's port")
    world.edit(Do.EDIT_SOCKET, f"{sockets}IPAddressAllow={address}\n")
    _begin_again(world)
    said = world.entresol("doctor", tenant="far").stdout
    expect(f"{address}:7440 accepts" in said, f"doctor: {said}")
    world.machine.run("rm", "-r", folder)
    world.edit(Do.EDIT_CONFIG, before)
    world.follow(Do.REVERT)
    _begin_again(world)
    return "refused while socket and configuration differ, kept out until both units' lists name it"


def _begin_again(world: World) -> None:
    """What the runbook says after another address."""
    for command in (Do.RELOAD_UNITS, Do.STOP_ALL, Do.START):
        world.follow(command)


def _reaches(world: World, address: str, port: int) -> bool:
    """Whether a connection comes about; one that a list keeps out gets no answer."""
    words = ("timeout", "2", "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}")
    return world.machine.run(*words, check=False).returncode == 0


STEPS: list[tuple[str, Callable[[World], str]]] = [
    ("full disk, second shard", full_disk),
    ("huge pages", memory.huge_pages),
    ("another KEK", keys.change_kek),
    ("downgrade refused", downgrade_refused),
    ("no KEK", keys.no_kek),
    ("begin anew", keys.begin_anew),
    ("a damaged keyring", keys.damaged_keyring),
    ("locked, unlocked", keys.locked),
    ("an encrypted KEK", keys.encrypted_kek),
    ("serve a network", serve_a_network),
    ("erase a tenant", keys.erase),
    ("replace the drive", replace_drive),
    ("a mounted drive", drives.mounted_drive),
    ("a raw drive", drives.raw_drive),
    ("remove", remove),
    ("install again", install_again),
    ("go back", go_back),
    ("purge", purge),
    ("the runbook", all_followed),
]
