"""Keys and certificates: lost, broken, changed, kept elsewhere, destroyed; as the runbook says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.deploy.runbook import Do
from tests.deploy.world import FIFTH, FIFTH_SOCKET, KEK, STATE, TOML, UNIT, World, expect

CERTIFICATE = "/etc/entresol/pki/shard.pem"
KEYS_UNIT = "entresold-keys.service"
KEK_ASIDE, SHOWN_KEK = "/srv/kek", "/run/entresol/kek"
RECEIPT = "/srv/receipt.json"
GO_ON = (("to go on: ", "acme\n"),)


def broken_certificate(world: World) -> str:
    """One that cannot be used changes nothing but what is told of it."""
    before = world.pid()
    failures = world.machine.journal(UNIT).count("event=tls_reload_failed")
    with world.work_goes_on():
        world.machine.run("cp", "-p", CERTIFICATE, "/srv/shard.pem")
        world.machine.write(Path(CERTIFICATE), "no certificate\n")
        world.follow(Do.RELOAD)
        world.until(
            lambda: world.machine.journal(UNIT).count("event=tls_reload_failed") > failures,
            "a certificate that is refused",
        )
        world.until(lambda: world.metric("entresol_tls_files_unusable") == 1, "the metric of it")
        judged = world.follow(Do.CHECK, put={"FILE": TOML}, user="entresol", check=False)
        expect(judged.returncode == 1, "--check finds nothing wrong with it")
        expect(CERTIFICATE in judged.stderr, f"--check does not say what is wrong: {judged.stderr}")
        world.follow(Do.DOCTOR)  # shakes hands anew, with the older one
        world.machine.run("cp", "-p", "/srv/shard.pem", CERTIFICATE)
        world.follow(Do.RELOAD)
        world.until(lambda: world.metric("entresol_tls_files_unusable") == 0, "the metric's end")
        world.follow(Do.CHECK, put={"FILE": TOML}, user="entresol")
    expect(world.pid() == before, "it took a new process")
    return "the older one served on; told by log, metric and --check, until HUP found a good one"


def no_kek(world: World) -> str:
    world.machine.run("mv", KEK, KEK_ASIDE)
    failed = world.systemctl("restart", UNIT, check=False)
    expect(failed.returncode != 0, "it started without its key")
    expect(not world.there(KEK), "a new key was made over old blocks")
    world.says("wrapped under", KEYS_UNIT)
    world.machine.run("mv", KEK_ASIDE, KEK)
    world.systemctl("restart", UNIT)
    blocks = int(world.life()["blocks"])
    expect(blocks > 0, "no blocks after the key came back")
    return f"no start, no new key; with the key back {blocks} blocks"


def begin_anew(world: World) -> str:
    """The key is lost with every copy: what it sealed goes out of the way, and only that."""
    world.follow(Do.STOP_ALL)
    world.machine.run("mv", KEK, KEK_ASIDE)
    world.machine.run("mv", STATE, f"{STATE}.lost")
    failed = world.follow(Do.START, check=False)
    expect(failed.returncode != 0 and not world.there(KEK), "a key was made beside old keys")
    world.follow(Do.STOP_ALL)
    world.machine.run("rm", "-rf", STATE)
    world.machine.run("mv", f"{STATE}.lost", STATE)
    world.follow(Do.BEGIN_ANEW)
    world.follow(Do.START)
    life = world.life()
    expect(life["recovery"] == "formatted", f"the start with nothing was {life['recovery']}")
    expect(world.there(KEK), "no key was made")
    rows = json.loads(world.follow(Do.TENANT_LIST, more=["--json"]).stdout)
    expect(not rows["tenants"], f"tenants of before: {rows}")
    world.follow(Do.STOP_ALL)
    world.machine.run("rm", "-rf", STATE, KEK)
    world.machine.run("mv", "/srv/entresol.lost", STATE)
    world.machine.run("mv", KEK_ASIDE, KEK)
    world.follow(Do.START)
    blocks = int(world.life()["blocks"])
    expect(blocks > 0, "the blocks of before are not there")
    return f"a new key where no old state is near; what was moved away serves {blocks} blocks again"


def damaged_keyring(world: World) -> str:
    """One copy of two is made anew from the other; both want a backup."""
    both = [f"{STATE}/keyring.json", f"{STATE}/keyring.json.bak"]
    world.follow(Do.STOP_ALL)
    world.machine.run("cp", "-p", *both, "/srv")
    world.machine.write(Path(both[0]), "no keyring\n")
    world.follow(Do.START)
    world.says("event=keyring_copy_recovered file=keyring.json")
    blocks = world.life()["blocks"]
    world.follow(Do.STOP_ALL)
    for path in both:
        world.machine.write(Path(path), "no keyring\n")
    failed = world.follow(Do.START, check=False)
    expect(failed.returncode != 0, "it began a new keyring over old blocks")
    world.says("are both unusable")
    world.follow(Do.STOP_ALL)
    for path in both:
        world.machine.run("cp", "-p", f"/srv/{Path(path).name}", path)
    world.follow(Do.START)
    expect(world.life()["blocks"] == blocks, "blocks were lost with the keyring")
    return f"one copy: made good by itself; both: no start; from a backup {blocks} blocks"


def change_kek(world: World) -> str:
    """Of two shards one runs, and is asked; the other is stopped, and its keyring is rewritten."""
    world.systemctl("stop", FIFTH_SOCKET, FIFTH)
    _change_kek(world)
    world.follow(Do.REWRAP)
    world.follow(Do.PLACE_NEW_KEK)
    world.systemctl("restart", UNIT)
    expect(int(world.life()["blocks"]) > 0, "no blocks under the new key")
    world.systemctl("start", FIFTH)
    expect(int(world.life(FIFTH)["blocks"]) > 0, "no blocks of the other shard")
    told = _change_kek(world)
    for unit in ("entresold", "entresold@5"):
        expect(f"{unit}: every key is wrapped" in told, f"{unit} was not asked: {told}")
    world.follow(Do.PLACE_NEW_KEK)
    world.systemctl("restart", UNIT, FIFTH)
    for unit in (UNIT, FIFTH):
        expect(int(world.life(unit)["blocks"]) > 0, f"{unit} has no blocks under the third key")
    return "of one that runs and one that is stopped, then of two that run; restarts found them"


def _change_kek(world: World) -> str:
    world.follow(Do.KEYGEN)
    world.follow(Do.SHOW_NEW_KEK)
    told = world.follow(Do.CHANGE_KEK).stdout  # finds the package's sockets by itself
    expect("every key is wrapped" in told, f"change-kek: {told}")
    world.follow(Do.HIDE_NEW_KEK)
    return told


def locked(world: World) -> str:
    """A KEK that is not on this machine: up, not ready, nothing touched, until it is shown one."""
    before = world.machine.run("cat", TOML).stdout
    blocks = world.life()["blocks"]
    world.edit(Do.EDIT_CONFIG, before.replace("kek_file =", "#kek_file ="))
    world.edit(Do.EDIT_SERVICE, "[Service]\nLoadCredential=\n")
    world.machine.run("mv", KEK, KEK_ASIDE)
    world.systemctl("restart", UNIT)
    expect(not world.there(KEK), "a key was made that nothing uses")
    expect(_is_locked(world), "it does not say that it is locked")
    told = world.follow(Do.TOP_ONCE, check=False)
    expect(told.returncode == 1 and "NOT READY" in told.stdout, f"top does not tell: {told}")
    told = world.follow(Do.READY, more=["--silent", "--write-out", " %{http_code}"])
    for words in ('"ready": false', "lock", " 503"):
        expect(words in told.stdout, f"readyz: {told.stdout}")
    world.machine.run("install", "-o", "entresol", "-m", "0600", KEK_ASIDE, SHOWN_KEK)
    world.follow(Do.UNLOCK)
    world.machine.run("rm", SHOWN_KEK)
    expect(not _is_locked(world), "it is still locked")
    expect(world.life()["blocks"] == blocks, "blocks were lost while it was locked")
    own = "/etc/entresol/own.kek"  # a file of the daemon's user, which comes later
    world.edit(Do.EDIT_CONFIG, before.replace('"$CREDENTIALS_DIRECTORY/kek"', f'"{own}"'))
    world.systemctl("restart", UNIT)
    expect(_is_locked(world), "it does not wait for the file")
    world.machine.run("install", "-o", "entresol", "-m", "0600", KEK_ASIDE, own)
    world.follow(Do.RELOAD)
    world.until(lambda: not _is_locked(world), "HUP to find the key")
    world.machine.run("rm", own)
    world.edit(Do.EDIT_CONFIG, before)
    world.machine.run("mv", KEK_ASIDE, KEK)
    world.follow(Do.REVERT)
    world.systemctl("restart", UNIT)
    return f"{blocks} blocks waited for their key, once by unlock and once by HUP"


def _is_locked(world: World) -> bool:
    return " locked:" in world.machine.show(UNIT, "StatusText")


def encrypted_kek(world: World) -> str:
    """The KEK on this machine's disk, but sealed by a key of systemd's."""
    blocks = world.life()["blocks"]
    world.follow(Do.ENCRYPT_KEK)
    world.edit(
        Do.EDIT_SERVICE,
        "[Service]\nLoadCredential=\nLoadCredentialEncrypted=kek:/etc/entresol/kek.cred\n",
    )
    world.follow(Do.MASK_KEYS)
    world.machine.run("mv", KEK, KEK_ASIDE)
    world.systemctl("restart", UNIT)
    expect(world.life()["blocks"] == blocks, "blocks were lost")
    expect(not world.there(KEK), "a key was made that nothing uses")
    world.machine.run("mv", KEK_ASIDE, KEK)
    world.machine.run("rm", "/etc/entresol/kek.cred")
    world.systemctl("unmask", KEYS_UNIT)
    world.follow(Do.REVERT)
    world.systemctl("restart", UNIT)
    return f"the host's key opened it at the start; {blocks} blocks"


def erase(world: World) -> str:
    """Rotating keeps what is stored, forcing it drops that, erasing ends it all, with a receipt."""
    world.puts("of-acme", "acme")
    world.follow(Do.ROTATE)
    world.gets("of-acme", "acme")
    world.follow(Do.ROTATE, Do.FORCE, typed=GO_ON)
    missed = world.entresol("exists", "--name", "of-acme", tenant="acme", check=False)
    expect(missed.returncode == 1, f"what an older key sealed is there: {missed.stdout}")
    world.puts("of-acme", "acme")
    told = world.follow(Do.ERASE, put={"acme.json": RECEIPT}, typed=[GO_ON[0]]).stdout
    expect("blocks dropped" in told, f"erase: {told}")
    put = {"acme.json": RECEIPT}
    checked = world.follow(Do.VERIFY_RECEIPT, put=put).stdout
    expect("good: tenant acme was erased" in checked, f"the receipt: {checked}")
    world.machine.run("sed", "-i", "s/acme/acne/", RECEIPT)
    forged = world.follow(Do.VERIFY_RECEIPT, put=put, check=False)
    expect(forged.returncode == 1, "a receipt that was changed is good")
    return checked.splitlines()[0]
