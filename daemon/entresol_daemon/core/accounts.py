"""What each tenant uses and may use. Pure.

Two bounds hold for everything a tenant can hold on to. Its *quota*, where it has one, is a number.
And of what the shard has in all, a tenant may hold so many times what is *free*, by its weight
(dynamic thresholds: Choudhury and Hahne, 1998): whatever one holds, and however many do, some is
left for the next, and nobody has to know how many there are. A tenant alone in the books may have
all of it.

Invariant: everything charged is refunded exactly once; a tenant's usage never goes below zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from entresol_proto.ids import TenantName
from entresol_proto.status import QuotaError, Status

PUTS_OF_FREE = 8  # one busy tenant gets 8/9 of the put budget, two get 8/17 each: puts end soon
HELD_OF_FREE = 1  # of leases and memory held by hosts: 1/2, two 1/3 each: a lease may last
SESSIONS_OF_FREE = 8
SESSIONS_OPENING_MAX = 64  # of one tenant, admitted and without a data path yet


@dataclass(slots=True, eq=False)
class Account:
    """Quotas and usage of one tenant. A quota of 0 means no number of its own."""

    name: TenantName
    stream: bytes  # 16 bytes; what the flash engine and the slabs know the tenant by
    flash_quota_bytes: int = 0
    dram_quota_bytes: int = 0
    index_quota_blocks: int = 0
    get_quota_bytes: int = 0
    put_quota_bytes: int = 0
    sessions_quota: int = 0
    leases_quota: int = 0
    watchers_quota: int = 0
    weight: int = 1
    flash_bytes: int = 0  # record bytes of live blocks, on flash or on their way
    flash_blocks: int = 0  # those blocks: entries of the index
    put_bytes: int = 0  # reserved and not yet durable
    put_blocks: int = 0
    get_bytes: int = 0  # leased to its hosts or being staged for them
    leases: int = 0
    sessions: int = 0
    sessions_opening: int = 0
    hidden_forgets: int = 0  # of keys that are not here and may be on flash all the same


@dataclass(slots=True)
class Shared:
    """Something of which the shard has `total` and tenants hold parts."""

    total: int
    used: int = 0

    def admits(self, held: int, more: int, quota: int, of_free: int) -> bool:
        """Whether one that holds `held` may hold `more` beside it. `of_free` 0: as much as is left.

        Whoever holds nothing may have what is there: a thing larger than the threshold must still
        get through.
        """
        free = self.total - self.used
        if more > free or (quota and held + more > quota and held):
            return False
        return not held or not of_free or held + more <= of_free * (free - more)

    def take(self, more: int) -> None:
        """Charge; not asked again whether it fits."""
        self.used += more

    def refund(self, less: int) -> None:
        """Give back what was taken."""
        self.used -= less
        assert self.used >= 0, "refunded twice"


@dataclass(slots=True)
class PutBudget:
    """Bytes and blocks of puts between reservation and durability, over all tenants."""

    bytes_max: int
    blocks_max: int
    used_bytes: int = 0
    used_blocks: int = 0

    def admit(self, account: Account, record_bytes: int, *, alone: bool = True) -> Status:
        """Charge one put if it fits; see `judge`."""
        status = self.judge(account, record_bytes, alone=alone)
        if status is not Status.OK:
            return status
        self.used_bytes += record_bytes
        self.used_blocks += 1
        account.put_bytes += record_bytes
        account.put_blocks += 1
        return Status.OK

    def judge(self, account: Account, record_bytes: int, *, alone: bool) -> Status:
        """Whether a put would fit: QUOTA when it never can, BUSY when not now.

        Unless it is `alone`, a tenant may hold PUTS_OF_FREE times what is free.
        """
        quota = account.put_quota_bytes
        if account.flash_quota_bytes and record_bytes > account.flash_quota_bytes:
            return Status.QUOTA
        if record_bytes > self.bytes_max or not self.blocks_max:
            return Status.QUOTA
        if quota and account.put_blocks and account.put_bytes + record_bytes > quota:
            return Status.BUSY
        if self.used_blocks >= self.blocks_max or self.used_bytes + record_bytes > self.bytes_max:
            return Status.BUSY
        if not alone and account.put_blocks:  # the first block of a tenant may take what is there
            free_bytes = self.bytes_max - self.used_bytes
            free_blocks = self.blocks_max - self.used_blocks
            if account.put_bytes + record_bytes > PUTS_OF_FREE * (
                free_bytes - record_bytes
            ) or account.put_blocks >= PUTS_OF_FREE * (free_blocks - 1):
                return Status.BUSY
        return Status.OK

    def refund(self, account: Account, record_bytes: int) -> None:
        """The put is durable, failed or given up."""
        self.used_bytes -= record_bytes
        self.used_blocks -= 1
        account.put_bytes -= record_bytes
        account.put_blocks -= 1
        assert min(self.used_bytes, self.used_blocks) >= 0, "put refunded twice"
        assert min(account.put_bytes, account.put_blocks) >= 0, "put refunded twice"


@dataclass(slots=True)
class Held:
    """What hosts hold of the shard at their own pace: sessions, leases, memory they may read."""

    sessions: Shared
    leases: Shared
    get_bytes: Shared
    sessions_per_tenant_max: int

    def may_open_session(self, account: Account, *, alone: bool) -> None:
        """Raises: QuotaError, QUOTA at a number of its own, BUSY for want of room."""
        most = account.sessions_quota or self.sessions_per_tenant_max
        if account.sessions >= most:
            raise QuotaError(
                f"tenant has {account.sessions} sessions open",
                hint="close some, or raise the tenant's quota of sessions",
            )
        if account.sessions_opening >= SESSIONS_OPENING_MAX:
            raise QuotaError(
                f"{account.sessions_opening} sessions of the tenant are being opened",
                hint="try again when they are open",
                status=Status.BUSY,
            )
        if not self.sessions.admits(account.sessions, 1, 0, 0 if alone else SESSIONS_OF_FREE):
            raise QuotaError(  # and not how many: they are others', too
                "as many sessions are open as may be",
                hint="try again later: what is left is kept for other tenants",
                status=Status.BUSY,
            )

    def may_lease(self, account: Account, of_free: int) -> bool:
        """Whether the tenant may hold one lease more now."""
        return self.leases.admits(account.leases, 1, account.leases_quota, of_free)

    def get_room(self, account: Account, of_free: int) -> int:
        """Bytes more that hosts of this tenant may have leased or being staged, 0 or less if none.

        A tenant that holds nothing has room for one block, whatever its length.
        """
        free = self.get_bytes.total - self.get_bytes.used
        room = free
        if of_free:  # the most m with held + m <= of_free * (free - m)
            room = min(room, (of_free * free - account.get_bytes) // (of_free + 1))
        if account.get_quota_bytes:
            room = min(room, account.get_quota_bytes - account.get_bytes)
        return max(room, 1) if not account.get_bytes else room

    def hold(self, account: Account, length_bytes: int) -> None:
        """Memory was leased to a host of this tenant, or is being staged for it."""
        account.get_bytes += length_bytes
        self.get_bytes.take(length_bytes)

    def let_go(self, account: Account, length_bytes: int) -> None:
        """A lease ended, or never came about."""
        account.get_bytes -= length_bytes
        assert account.get_bytes >= 0, "memory was let go twice"
        self.get_bytes.refund(length_bytes)


@dataclass(slots=True)
class Accounts:
    """All tenants by name and by stream."""

    by_name: dict[TenantName, Account] = field(default_factory=dict)
    by_stream: dict[bytes, Account] = field(default_factory=dict)
    least_weight: int = 1

    def add(self, account: Account) -> None:
        """Enter a tenant; its name and stream must be new."""
        assert account.name not in self.by_name, account.name
        assert account.stream not in self.by_stream, account.name
        self.by_name[account.name] = account
        self.by_stream[account.stream] = account
        self.reweigh()

    def remove(self, name: TenantName) -> None:
        """The tenant is erased."""
        account = self.by_name.pop(name, None)
        if account is not None:
            del self.by_stream[account.stream]
            self.reweigh()

    def reweigh(self) -> None:
        """Weights have changed, or who is here."""
        self.least_weight = min((each.weight for each in self.by_name.values()), default=1)

    def weight_of(self, stream: bytes) -> int:
        """A tenant's share, by its stream."""
        account = self.by_stream.get(stream)
        return account.weight if account is not None else 1

    def of_free(self, account: Account) -> int:
        """How many times what is free this tenant may hold; 0, without bound, when it is alone."""
        if len(self.by_name) <= 1:
            return 0
        return max(1, HELD_OF_FREE * account.weight // self.least_weight)
