"""Other drives and other users: what the runbook says of them, done as it says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.runbook import UDEV_RULE, UDEV_RULES, Do
from tests.deploy.world import TOML, UNIT, World, expect

SIZE_BYTES = 384 << 20
OTHER_BYTES = 420 << 20
MOUNT, MOUNT_UNIT = "/mnt/kv", "mnt-kv.mount"
MOUNT_TEXT = f"[Mount]\nWhat=tmpfs\nWhere={MOUNT}\nType=tmpfs\nOptions=size=450m\n"  # as fstab's
SERIAL, BY_ID = "entresol-stand-in", "/dev/disk/by-id/entresol-stand-in"
# What 60-persistent-storage.rules does for drives with a serial number: a loop device has none.
STAND_IN_RULES = "/etc/udev/rules.d/60-persistent-storage-loop.rules"
STAND_IN = 'KERNEL=="%s", ENV{{ID_SERIAL}}="{serial}", SYMLINK+="disk/by-id/{serial}"\n'


def other_user(world: World) -> str:
    """An engine that is not root: shared memory for members of the group, tcp for others."""
    fabrics = {}
    for user in ("engine", "stranger"):
        folder = f"/srv/{user}"
        world.machine.run("useradd", "--system", "--no-create-home", user)
        if user == "engine":
            world.follow(Do.JOIN_GROUP, put={"USER": user})
        world.machine.run("cp", "-r", "/etc/entresol/tenants/other", folder)
        world.machine.run("dd", "if=/dev/urandom", f"of={folder}/content", "bs=1M", "count=2")
        world.machine.run("chown", "-R", user, folder)
        words = ("runuser", "-u", user, "--", "env", f"ENTRESOL_CONFIG={folder}/client.toml")
        said = world.machine.run(
            *words, "entresol", "put", "--json", f"{folder}/content", "--name", user
        ).stdout
        fabrics[user] = json.loads(said)["fabric"]
        told = world.machine.run(*words, "entresol", "doctor", check=False).stdout
        expect(f"data path {fabrics[user]}:" in told, f"doctor, as {user}: {told}")
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
    world.machine.write(Path(f"/etc/systemd/system/{MOUNT_UNIT}"), MOUNT_TEXT)
    world.systemctl("daemon-reload")
    world.systemctl("start", MOUNT_UNIT)
    world.follow(Do.MAKE_FOLDER)
    path = f"{MOUNT}/entresol/flash.data"
    with _flash(world, path, f'"{SIZE_BYTES >> 20}MiB"'):
        refused = world.follow(Do.START, check=False)
        expect(refused.returncode != 0, "it writes outside of the unit's folders")
        world.says("ReadWritePaths=")
        world.edit(
            Do.EDIT_SERVICE,
            f"[Unit]\nRequiresMountsFor={MOUNT}\n[Service]\nReadWritePaths={MOUNT}/entresol\n",
        )
        _serves_and_keeps(world)
        expect(MOUNT_UNIT in world.machine.show(UNIT, "Requires"), "it does not want the mount")
        _is(world, path, SIZE_BYTES)
        # Another size counts only for a new file: it keeps its own, and both tools tell.
        text = world.machine.run("cat", TOML).stdout
        text = text.replace(f'"{SIZE_BYTES >> 20}MiB"', f'"{OTHER_BYTES >> 20}MiB"')
        world.edit(Do.EDIT_CONFIG, text)
        world.systemctl("restart", UNIT)
        world.says("event=size_kept")
        judged = world.follow(Do.JUDGE, check=False).stdout
        expect("counts when it is made" in judged, f"doctor: {judged[-1500:]}")
        expect(" 0 failed" in judged, f"doctor: {judged[-1500:]}")
        world.follow(Do.STOP_ALL)
        world.machine.run("rm", path)
        world.follow(Do.START)
        _is(world, path, OTHER_BYTES)
    world.systemctl("stop", MOUNT_UNIT)
    world.machine.run("rm", f"/etc/systemd/system/{MOUNT_UNIT}")
    return (
        "refused without ReadWritePaths=; with it, stored and there after a restart; another size "
        "for a new file"
    )


def _is(world: World, path: str, size_bytes: int) -> None:
    found = world.machine.run("stat", "-c", "%s %U", path).stdout.split()
    expect(found == [str(size_bytes), "entresol"], f"the data file: {found}")


def raw_drive(world: World) -> str:
    """A block device, all of it, given to its user by a rule of udev's."""
    with _loop_device(world) as loop:
        if not loop:
            return "NOT TRIED: this machine gives no loop device"
        _make_node(world, loop)
        with _flash(world, BY_ID, "0"):
            seen = "[Service]\nPrivateDevices=no\n"
            world.edit(Do.EDIT_SERVICE, seen)
            held = world.follow(Do.START, check=False).returncode != 0
            if held:
                world.says(f"cannot read {BY_ID}: Operation not permitted")
            world.edit(Do.EDIT_SERVICE, f"{seen}DeviceAllow={BY_ID} rw\n")
            _serves_and_keeps(world)
            blocks = world.life()["blocks"]
        world.machine.run("rm", loop, BY_ID, UDEV_RULES, STAND_IN_RULES)
    without = "no start without DeviceAllow=" if held else "DevicePolicy= NOT APPLIED here"
    return (
        f"a loop device of {SIZE_BYTES >> 20} MiB, the user's by udev's rule: {without}; with it "
        f"stored, {blocks} blocks there after a restart"
    )


def _make_node(world: World, loop: str) -> None:
    """What a boot does: the kernel makes the node, udev's rules name it and say whose it is."""
    found = os.stat(loop).st_rdev
    name = Path(loop).name
    world.machine.run("mknod", "-m", "600", loop, "b", str(os.major(found)), str(os.minor(found)))
    world.machine.write(Path(STAND_IN_RULES), STAND_IN.format(serial=SERIAL) % name)
    rule = UDEV_RULE.replace("...", SERIAL)
    world.machine.write(Path(UDEV_RULES), f"{rule}\n")
    said = world.machine.run("udevadm", "test", "--action=add", f"/sys/class/block/{name}")
    owner = world.machine.run("stat", "-c", "%U", loop).stdout.strip()
    expect(owner == "entresol", f"udev left it to {owner}: {said.stderr[-1500:]}")
    expect(world.there(BY_ID), f"udev made no {BY_ID}: {said.stderr[-1500:]}")


def _serves_and_keeps(world: World) -> None:
    world.follow(Do.START)
    expect(world.life()["recovery"] == "formatted", "there were blocks on it")
    world.puts("drive")
    world.systemctl("restart", UNIT)
    world.gets("drive")


@contextlib.contextmanager
def _flash(world: World, path: str, size: str) -> Iterator[None]:
    """With the data somewhere else; afterwards as before."""
    before = world.machine.run("cat", TOML).stdout
    lines = []
    for line in before.splitlines():
        if line.startswith("size_bytes"):
            line = f'size_bytes = {size}\npath = "{path}"'
        lines.append(line)
    world.follow(Do.STOP_ALL)
    world.edit(Do.EDIT_CONFIG, "\n".join([*lines, ""]))
    yield
    world.follow(Do.STOP_ALL)
    world.follow(Do.REVERT)
    world.edit(Do.EDIT_CONFIG, before)
    world.follow(Do.START)


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
