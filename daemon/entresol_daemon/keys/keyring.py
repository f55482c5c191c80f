"""The tenants and their keys, on disk and in memory.

Invariant: a key that has been erased exists nowhere; a key that has not been erased is never lost
to a crash. Both come from one rule: every change writes a complete new generation to keyring.json
and then to keyring.json.bak, each in one step, and opening takes the newer whole one and brings the
other into line. On disk there are only keys wrapped under the KEK.

Methods that write (`open`, `unlock`, `add_tenant`, `set_quota`, `rotate`, `retire`, `keep_usage`,
`erase`, `rewrap`, `remember_namespace`, `forget_namespaces`) block on fsync: call them on a worker
thread. The others touch memory only and may be called from the event loop at the same time.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from entresol_daemon.keys import files
from entresol_daemon.keys.errors import erased_error, io_error, locked_error, wrong_kek_error
from entresol_daemon.keys.names import NamespaceNames
from entresol_daemon.keys.namespaces import NamespaceRegistry
from entresol_daemon.keys.providers import KekProvider
from entresol_daemon.keys.receipts import (
    RECEIPT_FORMAT,
    Receipt,
    public_key_of,
    sign_receipt,
    verify_receipt,
)
from entresol_daemon.keys.state import SECRET_BYTES, State, StoredReceipt, StoredTenant, TenantQuota
from entresol_daemon.keys.store import KeyringStore
from entresol_daemon.keys.tenant import (
    USAGE_FIRST_BLOCKS,
    Tenant,
    TenantInfo,
    create_tenant,
    info_of,
    rewrap_tenant,
    unwrap_receipt_seed,
    unwrap_tenant,
    wrap_dek,
    wrap_receipt_seed,
)
from entresol_proto import ids
from entresol_proto.seal.wiping import wipe
from entresol_proto.status import KeyringError, QuotaError, Status

__all__ = ["Keyring", "Receipt", "Tenant", "TenantInfo", "TenantQuota", "verify_receipt"]

log = logging.getLogger("entresol.keys")

TENANTS_MAX_DEFAULT = 1024
NAMESPACES_PER_TENANT_MAX_DEFAULT = 1024
DEK_VERSIONS_PER_TENANT_MAX = 64
USAGE_STEP_BLOCKS = 1 << 20  # sealed blocks are written down so many at a time, ahead of use
USAGE_AHEAD_BLOCKS = USAGE_FIRST_BLOCKS // 2  # left of them when the next are written down
RECEIPTS_KEPT_MAX = 4096  # the oldest go first; their numbers are never given again


class Keyring(NamespaceNames):
    """See the module. One process at a time may have a keyring open."""

    def __init__(
        self,
        state_dir: Path,
        kek: KekProvider | None,
        *,
        tenants_max: int,
        namespaces_per_tenant_max: int,
        calls: files.OsCalls,
        random: Callable[[int], bytes],
    ) -> None:
        """Use `open`."""
        self._store = KeyringStore(state_dir, calls)
        self._kek = kek
        self._tenants_max = tenants_max
        self._random = random
        self._state = State()
        self._unwrapped: dict[str, Tenant] = {}
        self._receipt_seed = b""
        self._used: dict[tuple[str, int], int] = {}  # (tenant, version): blocks sealed, or more
        self._destroyed: dict[str, list[bytes]] = {}  # by tenant: secrets to be wiped from memory
        self._lock = threading.Lock()
        self._namespaces = NamespaceRegistry(
            calls, state_dir / "namespaces", namespaces_per_tenant_max, random
        )

    @classmethod
    def open(
        cls,
        state_dir: str | Path,
        kek: KekProvider | None,
        *,
        tenants_max: int = TENANTS_MAX_DEFAULT,
        namespaces_per_tenant_max: int = NAMESPACES_PER_TENANT_MAX_DEFAULT,
        calls: files.OsCalls | None = None,
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> Keyring:
        """Read (or begin) the keyring in `state_dir`; without a KEK it is locked.

        Raises: KeyringError: another process has it open, another KEK wrapped it, both copies are
            damaged, another version wrote it, or the folder is unusable. Nothing is overwritten in
            any of these cases.
        """
        ring = cls(
            Path(state_dir),
            kek,
            tenants_max=tenants_max,
            namespaces_per_tenant_max=namespaces_per_tenant_max,
            calls=calls or files.OsCalls(),
            random=random,
        )
        try:
            ring._store.lock()
            ring._load()
        except OSError as error:
            ring.close()
            raise io_error(ring._store.path, error) from None
        except BaseException:
            ring.close()
            raise
        return ring

    def close(self) -> None:
        """Let go of the folder and drop the unwrapped keys. Idempotent."""
        self._unwrapped = {}
        self._receipt_seed = b""
        self._kek = None
        self._store.unlock()

    # Reading: memory only.

    def __repr__(self) -> str:
        return f"Keyring(tenants={len(self._state.tenants)}, locked={self.locked})"

    @property
    def locked(self) -> bool:
        """True when there is no KEK: tenants can be listed and erased, nothing else."""
        return self._kek is None

    @property
    def kek_id(self) -> bytes:
        """The KEK the keyring is wrapped under; empty before the first one."""
        return self._state.kek_id

    @property
    def receipt_public_key(self) -> bytes:
        """32 bytes for `verify_receipt`; empty before the first KEK."""
        return self._state.receipt_public

    @property
    def generation(self) -> int:
        """Counts the changes."""
        return self._state.generation

    @property
    def copies_recovered(self) -> int:
        """Copies of keyring.json that `open` found missing, stale or damaged and rewrote."""
        return self._store.copies_recovered

    def tenants(self) -> list[TenantInfo]:
        """All tenants by name; works while locked."""
        return [info_of(tenant) for _, tenant in sorted(self._state.tenants.items())]

    def info(self, name: str) -> TenantInfo | None:
        """One tenant without its keys; works while locked."""
        stored = self._state.tenants.get(name)
        return info_of(stored) if stored else None

    def by_stream(self, stream: bytes) -> TenantInfo | None:
        """The tenant that owns a segment."""
        for tenant in self._state.tenants.values():
            if tenant.stream == stream:
                return info_of(tenant)
        return None

    def receipts(self) -> list[Receipt]:
        """The erasures, oldest first."""
        return [receipt.parsed() for receipt in self._state.erased]

    def was_erased(self, name: str) -> bool:
        """True when a tenant of this name was erased and has not been added again."""
        return name not in self._state.tenants and any(
            receipt.tenant == name for receipt in self._state.erased
        )

    def get(self, name: str) -> Tenant:
        """A tenant with its keys.

        Raises: KeyringError: LOCKED without a KEK, ERASED, or FORBIDDEN when there is none.
        """
        self._stored(name)
        held = self._unwrapped.get(name)
        if held is None:
            # Locked, or for an instant while another thread adds or erases the tenant.
            raise locked_error(f"keys of tenant {name}")
        return held

    # Changing: blocking.

    def add_tenant(
        self,
        name: str,
        quota: TenantQuota | None = None,
        *,
        now_unix_s: int,
        after_erase: bool = False,
    ) -> Tenant:
        """Add a tenant with fresh keys and return it.

        Raises: KeyringError: CONFLICT when it exists; ERASED when it was erased, unless
            `after_erase` says that somebody decided to begin anew; LOCKED. QuotaError at the
            limit. BadKeyError for the name.
        """
        checked = ids.check_tenant_name(name)
        with self._lock:
            state = self._state
            if name in state.tenants:
                raise KeyringError(f"tenant {name} exists already", status=Status.CONFLICT)
            if not after_erase and self.was_erased(name):
                raise erased_error(name)
            if len(state.tenants) >= self._tenants_max:
                raise QuotaError(
                    f"there are {self._tenants_max} tenants already",
                    hint="erase one, or raise [limits] tenants_max",
                )
            kek = self._need_kek(f"adding tenant {name}")
            quota = quota or TenantQuota()
            stored, held = create_tenant(kek, checked, quota, now_unix_s, self._random)
            self._save(replace(state, tenants={**state.tenants, name: stored}))
            self._unwrapped[name] = held
            log.info("event=tenant_added tenant=%s", name)
            return held

    def set_quota(self, name: str, quota: TenantQuota) -> TenantInfo:
        """Replace a tenant's quota; works while locked. Raises: KeyringError."""
        with self._lock:
            stored = replace(self._stored(name), quota=quota)
            self._save(self._with(stored))
            if name in self._unwrapped:
                self._unwrapped[name] = replace(self._unwrapped[name], info=info_of(stored))
            return info_of(stored)

    def rotate(self, name: str, *, now_unix_s: int, force: bool = False) -> int:
        """Begin a new DEK version for new blocks and return it; older ones still open theirs.

        `force` destroys the older ones in the same step: what they sealed is gone. (A copy that
        could not be written holds them until the next change or start, and the log says so.)
        Raises: KeyringError; QuotaError when too many versions are in use.
        """
        with self._lock:
            stored = self._stored(name)
            kek = self._need_kek(f"rotating the key of tenant {name}")
            if len(stored.deks) >= DEK_VERSIONS_PER_TENANT_MAX and not force:
                raise QuotaError(
                    f"tenant {name} has {DEK_VERSIONS_PER_TENANT_MAX} key versions",
                    hint="`entresol tenant rotate --force` ends them, and drops what they sealed",
                )
            version = stored.deks[-1].version + 1
            dek = self._random(SECRET_BYTES)
            added = wrap_dek(kek, name, stored.stream, version, dek, now_unix_s)
            kept = () if force else stored.deks
            stored = replace(stored, deks=(*kept, added), active=version)
            self._save(self._with(stored))
            old = self._unwrapped[name]
            older = {} if force else old.deks
            if force:
                self._destroyed.setdefault(name, []).extend(old.deks.values())
            self._unwrapped[name] = replace(old, info=info_of(stored), deks={**older, version: dek})
            log.info("event=key_rotated tenant=%s version=%d force=%s", name, version, force)
            return version

    def note_sealed(self, name: str, version: int, blocks: int = 1) -> bool:
        """Count block keys given out; memory only. True when `keep_usage` is due, which is before
        more were given out than are written down."""
        place = (name, version)
        used = self._used[place] = self._used.get(place, 0) + blocks
        stored = self._state.tenants.get(name)
        if stored is None or stored.active != version:
            return False  # erased or rotated meanwhile: this version's count ends here
        return used + USAGE_AHEAD_BLOCKS > stored.deks[-1].sealed_blocks

    def sealed_blocks(self, name: str, version: int) -> int:
        """Block keys given out under a version; after a restart rounded up."""
        return self._used.get((name, version), 0)

    def keep_usage(self, name: str) -> None:
        """Write down, ahead of use, how much the active version sealed. Raises: KeyringError."""
        with self._lock:
            stored = self._stored(name)
            last = stored.deks[-1]
            ahead = self.sealed_blocks(name, last.version) + USAGE_STEP_BLOCKS
            deks = (*stored.deks[:-1], replace(last, sealed_blocks=ahead))
            self._save(self._with(replace(stored, deks=deks)))

    def retire(self, name: str, version: int) -> None:
        """Destroy one older DEK version in every copy: blocks sealed under it are gone.

        Raises: KeyringError: BAD_REQUEST for the active version or one that is not there.
        """
        with self._lock:
            stored = self._stored(name)
            kept = tuple(dek for dek in stored.deks if dek.version != version)
            if version == stored.active or len(kept) == len(stored.deks):
                raise KeyringError(
                    f"tenant {name} has no older key version {version}",
                    hint="rotate first; the active version cannot be retired",
                    status=Status.BAD_REQUEST,
                )
            stored = replace(stored, deks=kept)
            self._save(self._with(stored), both=True)
            if name in self._unwrapped:
                old = self._unwrapped[name]
                self._destroyed.setdefault(name, []).append(old.deks[version])
                deks = {number: dek for number, dek in old.deks.items() if number != version}
                self._unwrapped[name] = replace(old, info=info_of(stored), deks=deks)
            log.info("event=key_retired tenant=%s version=%d", name, version)

    def erase(self, name: str, *, now_unix_s: int) -> Receipt:
        """Destroy a tenant's keys in both copies; nothing of it opens afterwards.

        In memory nobody is given them any more, and `wipe_destroyed` ends them there, too. Works
        while locked (destruction needs no KEK), but then the receipt is unsigned. A second call
        returns the same receipt. The caller has to end its sessions, leases and index entries.

        Raises: KeyringError: FORBIDDEN when there was never such a tenant; IO_ERROR when a copy
            could not be written. Try again then: until this returns, a copy may remain.
        """
        with self._lock:
            state = self._state
            if self.was_erased(name):
                # The first attempt may have failed halfway: make both copies right, once more.
                self._save(state, both=True)
                found = next(r.parsed() for r in reversed(state.erased) if r.tenant == name)
                self._drop_namespaces(name, bytes.fromhex(found["stream"]))
                return found
            stored = self._stored(name)
            receipt = Receipt(
                format=RECEIPT_FORMAT,
                number=state.receipts_issued + 1,
                tenant=name,
                stream=stored.stream.hex(),
                erased=[
                    {"version": dek.version, "fingerprint": dek.fingerprint.hex()}
                    for dek in stored.deks
                ],
                time_unix_s=now_unix_s,
                kek_id=state.kek_id.hex(),
                public_key=state.receipt_public.hex(),
                signature="",
            )
            if not self.locked:
                receipt = sign_receipt(receipt, self._receipt_seed)
            left = {key: value for key, value in state.tenants.items() if key != name}
            erased = (*state.erased, StoredReceipt.of(receipt))[-RECEIPTS_KEPT_MAX:]
            after = replace(state, tenants=left, erased=erased, receipts_issued=receipt["number"])
            self._save(after, both=True)
            held = self._unwrapped.pop(name, None)
            if held is not None:
                self._destroyed.setdefault(name, []).extend(
                    (held.naming_secret, *held.deks.values())
                )
            for place in [place for place in list(self._used) if place[0] == name]:
                self._used.pop(place, None)  # others are counted on the loop meanwhile
            self._drop_namespaces(name, stored.stream)
            log.info("event=tenant_erased tenant=%s receipt=%d", name, receipt["number"])
            return receipt.copy()

    def wipe_destroyed(self, name: str) -> int:
        """Zeros over the keys of a tenant that were destroyed, where they lie in memory; how many.

        Memory only. Call it when no session, task or thread holds a `Tenant` from before: theirs
        are the same objects.
        """
        doomed = self._destroyed.pop(name, [])
        for secret in doomed:
            wipe(secret)
        return len(doomed)

    def unlock(self, kek: KekProvider) -> bool:
        """Give a locked keyring its KEK; False when it had that very one already.

        Raises: KeyringError: another KEK wrapped it, or its keys do not open; nothing has changed
            then, and it is still locked.
        """
        with self._lock:
            if self._kek is not None:
                if self._kek.kek_id() != kek.kek_id():
                    raise self._wrong(kek)
                return False
            self._adopt(kek, self._state)
            log.info(
                "event=unlocked kek_id=%s tenants=%d", kek.kek_id().hex(), len(self._unwrapped)
            )
            return True

    def rewrap(self, new_kek: KekProvider) -> bytes:
        """Change the KEK: every key is wrapped anew, the keys themselves stay. The former one's id.

        Raises: KeyringError; nothing has changed then.
        """
        with self._lock:
            self._need_kek("changing the key-encryption key")
            new_kek.settle()
            state = self._state
            tenants = {
                name: rewrap_tenant(new_kek, stored, self._unwrapped[name])
                for name, stored in state.tenants.items()
            }
            self._save(
                replace(
                    state,
                    tenants=tenants,
                    kek_id=new_kek.kek_id(),
                    receipt_wrapped=wrap_receipt_seed(new_kek, self._receipt_seed),
                )
            )
            self._kek = new_kek
            log.info("event=kek_changed kek_id=%s", new_kek.kek_id().hex())
            return state.kek_id

    # Inside.

    def _stored(self, name: str) -> StoredTenant:
        stored = self._state.tenants.get(name)
        if stored is not None:
            return stored
        if self.was_erased(name):
            raise erased_error(name)
        raise KeyringError(
            f"there is no tenant {name!r}",
            hint="add it with `entresol tenant add`",
            status=Status.FORBIDDEN,
        )

    def _with(self, stored: StoredTenant) -> State:
        return replace(self._state, tenants={**self._state.tenants, stored.name: stored})

    def _need_kek(self, what: str) -> KekProvider:
        if self._kek is None:
            raise locked_error(what)
        return self._kek

    def _load(self) -> None:
        state = self._store.read()
        kek = self._kek
        if kek is not None and state.kek_id:
            self._unwrap(kek, state)
        self._store.heal(state)
        self._state = state
        self._used = {
            (name, dek.version): dek.sealed_blocks
            for name, tenant in state.tenants.items()
            for dek in tenant.deks
        }
        if kek is not None and not state.kek_id:
            self._adopt(kek, state)
        self._namespaces.load({tenant.stream: tenant.name for tenant in state.tenants.values()})

    def _adopt(self, kek: KekProvider, state: State) -> None:
        """Make `kek` this keyring's; the first one ever is written down. Raises: KeyringError."""
        if state.kek_id:
            self._unwrap(kek, state)
        else:
            kek.settle()
            seed = self._random(SECRET_BYTES)
            self._save(
                replace(
                    state,
                    kek_id=kek.kek_id(),
                    receipt_wrapped=wrap_receipt_seed(kek, seed),
                    receipt_public=public_key_of(seed),
                )
            )
            self._receipt_seed = seed
        self._kek = kek

    def _unwrap(self, kek: KekProvider, state: State) -> None:
        """Every key, or nothing. Raises: KeyringError."""
        if kek.kek_id() != state.kek_id:
            raise self._wrong(kek, state)
        seed = unwrap_receipt_seed(kek, state)
        held = {name: unwrap_tenant(kek, stored) for name, stored in state.tenants.items()}
        self._receipt_seed, self._unwrapped = seed, held

    def _wrong(self, kek: KekProvider, state: State | None = None) -> KeyringError:
        source = getattr(kek, "source", "the one given")
        kek_id = (state or self._state).kek_id
        return wrong_kek_error(self._store.path, kek_id, source, kek.kek_id())

    def _save(self, state: State, *, both: bool = False) -> None:
        try:
            self._state = self._store.save(state, both=both)
        except OSError as error:
            raise io_error(self._store.path, error) from None
