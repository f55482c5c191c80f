"""The runbook's commands (systemd/README.md), word for word: those that a life tries, and the rest.

Invariant: only what `World.follow` ran counts as tried, and a whole life in which one of `Do` was
not run is broken. tests/unit/test_runbook.py holds both tables against the page.
"""

from __future__ import annotations

from enum import StrEnum

PACKAGE, NEWER = "./entresol_VERSION_ARCH.deb", "./entresol_NEWER_ARCH.deb"
UDEV_RULES = "/etc/udev/rules.d/61-entresol.rules"
UDEV_RULE = 'SUBSYSTEM=="block", ENV{ID_SERIAL}=="...", OWNER="entresol"'


class Do(StrEnum):
    """What is tried. Words in capitals and names of examples are replaced where it is run."""

    INSTALL = f"apt install {PACKAGE}"
    EDIT_CONFIG = "editor /etc/entresol/entresold.toml"
    ENABLE = "systemctl enable --now entresold"
    STATUS = "systemctl status entresold"
    STAT = "entresol stat"
    JUDGE = "entresol doctor --daemon-config /etc/entresol/entresold.toml"

    CERTIFY = (
        "entresold --config /etc/entresol/entresold.toml certify acme /etc/entresol/tenants/acme"
    )
    CERTIFY_HOST = "--host ADDRESS"
    CERTIFY_RENEW = "--renew"
    TENANT_ADD = "entresol tenant add acme --flash 2TiB"
    TENANT_LIST = "entresol tenant list"
    TENANT_QUOTA = "entresol tenant quota acme --flash 4TiB"
    DOCTOR = "entresol doctor --config /etc/entresol/tenants/acme/client.toml"
    OF_FIFTH = "--admin-socket /run/entresol-5/admin.sock"
    JOIN_GROUP = "usermod -aG entresol-hosts USER"

    EDIT_SOCKET = "systemctl edit entresold.socket"
    EDIT_SERVICE = "systemctl edit entresold"
    REVERT = "systemctl revert entresold entresold.socket"
    RELOAD_UNITS = "systemctl daemon-reload"
    STOP_ALL = "systemctl stop entresold.socket entresold"
    STOP = "systemctl stop entresold"
    START = "systemctl start entresold"

    RELOAD = "systemctl reload entresold"
    RESTART = "systemctl restart entresold"
    RENEW = "entresold --config /etc/entresol/entresold.toml renew"
    ROTATE = "entresol tenant rotate acme"
    FORCE = "--force"
    ERASE = "entresol tenant erase acme --receipt acme.json"
    VERIFY_RECEIPT = "entresold verify-receipt acme.json --state-dir /var/lib/entresol"
    KEYGEN = "entresold keygen /etc/entresol/kek.new"
    SHOW_NEW_KEK = "install -o entresol -m 0600 /etc/entresol/kek.new /run/entresol/kek.new"
    CHANGE_KEK = "entresol change-kek /run/entresol/kek.new"
    HIDE_NEW_KEK = "rm /run/entresol/kek.new"
    PLACE_NEW_KEK = "mv /etc/entresol/kek.new /etc/entresol/kek"
    REWRAP = (
        "entresold --config /etc/entresol/5.toml rewrap --old /etc/entresol/kek "
        "/etc/entresol/kek.new"
    )
    UNLOCK = "entresol unlock /run/entresol/kek"
    ENCRYPT_KEK = (
        "systemd-creds encrypt --name=kek --with-key=host /etc/entresol/kek /etc/entresol/kek.cred"
    )
    MASK_KEYS = "systemctl mask entresold-keys"

    UPGRADE = f"apt install {NEWER}"
    CHECK = "entresold --check --config FILE"
    FORMATS = "entresold --config FILE formats"
    MAKE_FOLDER = "install -d -o entresol -g entresol -m 700 /mnt/kv/entresol"
    BEGIN_ANEW = "mv /var/lib/entresol /srv/entresol.lost"
    SCRUB = "entresol scrub"
    INSPECT = "entresol inspect /var/lib/entresol/flash.data"

    ENABLE_FIFTH = "systemctl enable --now entresold@5"
    SIZE = "entresol size --model llama-3.1-8b --context 32000 --users 2000"
    REMOVE = "apt remove entresol"
    PURGE = "apt purge entresol"

    TOP = "entresol top"
    TOP_PRICED = "entresol top --model llama-3.1-8b --prefill-rate 12000"
    TOP_ONCE = "entresol top --once"
    TOP_JSON = "entresol top --json --interval 10"
    READY = "curl 127.0.0.1:7443/readyz"
    EXPLAIN = "entresol explain --name NAME"
    SCORE = "systemd-analyze security --offline=true /usr/lib/systemd/system/entresold.service"


# What the page names and no life here can try, with the reason.
NOT_TRIED = {
    "make dist": "builds both architectures; a life builds its packages by the same program",
    "make test-deploy": "is this itself",
    "ssh -L 7443:127.0.0.1:7443 HOST": "wants a second machine",
    "promtool test rules": "Prometheus is not in there: tests/daemon/test_prometheus.py runs it",
    "--with-key=tpm2": "wants a TPM",
    "entresold --config FILE prepare": "its unit runs it with more words; tests/unit does without",
    "nvme smart-log": "wants an NVMe drive",
    "dmesg": "would be the log of this machine's kernel",
}
