"""Other drives and other users: what the runbook says of them, done as it says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.world import SOCKET, TOML, UNIT, World, expect

SIZE_BYTES = 384 << 20
MOUNT, NODE = "/mnt/kv", "/dev/entresol-raw"


def other_user(world: World) -> str:
    """An engine that is not root: shared memory for members of the group, tcp for others."""
    fabrics = {}
    for user, groups in (("engine", ("--groups", "entresol-hosts")), ("stranger", ())):
        folder = f"/srv/{user}"
        world.machine.run("useradd", "--system", "--no-create-home", *groups, user)
        world.machine.run("cp", "-r", "/etc/entresol/tenants/other", folder)
        world.machine.run("dd", "if=/dev/urandom", f"of={folder}/content", "bs=1M", "count=2")
        world.machine.run("chown", "-R", user, folder)
        words = ("runuser", "-u", user, "--", "env", f"ENTRESOL_CONFIG={folder}/client.toml")
        said = world.machine.run(
            *words, "entresol", "put", "--json", f"{folder}/content", "--name", user
        ).stdout
        fabrics[user] = json.loads(said)["fabric"]
        world.machine.run(*words, "entresol", "get", "--name", user, "--output", f"{folder}/back")
        world.machine.run("cmp", f"{folder}/content", f"{folder}/back")
        asked = world.machine.run(
            *words, "entresol", "stat", "--admin-socket", "/run/entresol/admin.sock", check=False
        )
        expect(asked.returncode != 0, f"{user} is operator")
        world.machine.run("userdel", user)
        world.machine.run("rm", "-r", folder)
    expect(fabrics == {"engine": "shm", "stranger": "tcp"}, f"data paths: {fabrics}")
    return "of the group: over shm; of none: over tcp; neither is operator"


def mounted_drive(world: World) -> str:
    """A data file on another file system."""
    world.machine.run("mkdir", "-p", MOUNT)
    world.machine.run("mount", "-t", "tmpfs", "-o", "size=450m", "tmpfs", MOUNT)
    world.machine.run(
        "install", "-d", "-o", "entresol", "-g", "entresol", "-m", "700", f"{MOUNT}/entresol"
    )
    path = f"{MOUNT}/entresol/flash.data"
    with _flash(world, path, f'"{SIZE_BYTES >> 20}MiB"'):
        refused = world.systemctl("start", UNIT, check=False)
        expect(refused.returncode != 0, "it writes outside of the unit's folders")
        world.says("ReadWritePaths=")
        world.drop_in(f"[Service]\nReadWritePaths={MOUNT}/entresol\n")
        _serves_and_keeps(world)
        found = world.machine.run("stat", "-c", "%s %U", path).stdout.split()
        expect(found == [str(SIZE_BYTES), "entresol"], f"the data file: {found}")
        # Another size counts only for a new file: it keeps its own, and both tools tell.
        world.machine.run("sed", "-i", f's/"{SIZE_BYTES >> 20}MiB"/"512MiB"/', TOML)
        world.systemctl("restart", UNIT)
        world.says("event=size_kept")
        judged = world.machine.run(
            "entresol", "doctor", "--daemon-config", TOML, "--config",
            "/etc/entresol/tenants/load/client.toml", check=False,
        )  # fmt: skip
        expect("counts when it is made" in judged.stdout, f"doctor: {judged.stdout[-1500:]}")
        expect(" 0 failed" in judged.stdout, f"doctor: {judged.stdout[-1500:]}")
    world.machine.run("umount", MOUNT)
    return "refused without ReadWritePaths=; with it, stored and there after a restart"


def raw_drive(world: World) -> str:
    """A block device, all of it."""
    with _loop_device(world) as loop:
        if not loop:
            return "NOT TRIED: this machine gives no loop device"
        found = os.stat(loop).st_rdev
        world.machine.run("mknod", NODE, "b", str(os.major(found)), str(os.minor(found)))
        world.machine.run("chown", "entresol", NODE)  # a udev rule's part
        with _flash(world, NODE, "0"):
            world.drop_in(f"[Service]\nPrivateDevices=no\nDeviceAllow={NODE} rw\n")
            _serves_and_keeps(world)
            blocks = world.life()["blocks"]
        world.machine.run("rm", NODE)
    return f"a loop device of {SIZE_BYTES >> 20} MiB: stored, {blocks} blocks there after a restart"


def _serves_and_keeps(world: World) -> None:
    world.systemctl("start", UNIT)
    expect(world.life()["recovery"] == "formatted", "there were blocks on it")
    world.machine.run("dd", "if=/dev/urandom", "of=/srv/drive", "bs=1M", "count=4")
    world.entresol("put", "/srv/drive", "--name", "drive")
    world.systemctl("restart", UNIT)
    world.entresol("get", "--name", "drive", "--output", "/srv/drive.back")
    world.machine.run("cmp", "/srv/drive", "/srv/drive.back")


@contextlib.contextmanager
def _flash(world: World, path: str, size: str) -> Iterator[None]:
    """With the data somewhere else; afterwards as before."""
    before = world.machine.run("cat", TOML).stdout
    lines = []
    for line in before.splitlines():
        if line.startswith("size_bytes"):
            line = f'size_bytes = {size}\npath = "{path}"'
        lines.append(line)
    world.systemctl("stop", SOCKET, UNIT)
    world.machine.write(Path(TOML), "\n".join([*lines, ""]))
    yield
    world.systemctl("stop", SOCKET, UNIT)
    world.drop_in("")
    world.machine.write(Path(TOML), before)
    world.systemctl("start", UNIT)


@contextlib.contextmanager
def _loop_device(world: World) -> Iterator[str]:
    """A block device over a file of this machine's, which the machine in there does not see; empty
    where there is none to be had."""
    image = world.machine.folder / "raw.img"
    with open(image, "wb") as file:
        file.truncate(SIZE_BYTES)
    made = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    loop = made.stdout.strip() if made.returncode == 0 else ""
    try:
        yield loop
    finally:
        if loop:
            subprocess.run(["losetup", "--detach", loop], check=False, capture_output=True)
        image.unlink()
