"""What each tenant uses and may use. Pure.

Invariant: every byte charged is refunded exactly once; a tenant's usage never goes below zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from entresol_proto.ids import TenantName
from entresol_proto.status import Status

SHARE_OF_FREE = 8  # one busy tenant gets 8/9 of the put budget, two get 8/17 each


@dataclass(slots=True, eq=False)
class Account:
    """Quotas and usage of one tenant. A quota of 0 means no limit of its own."""

    name: TenantName
    stream: bytes  # 16 bytes; what the flash engine and the slabs know the tenant by
    flash_quota_bytes: int = 0
    dram_quota_bytes: int = 0
    weight: int = 1
    flash_bytes: int = 0  # record bytes of live blocks, on flash or on their way
    put_bytes: int = 0  # reserved and not yet durable
    put_blocks: int = 0
    sessions: int = 0


@dataclass(slots=True)
class PutBudget:
    """Bytes and blocks of puts between reservation and durability, over all tenants."""

    bytes_max: int
    blocks_max: int
    used_bytes: int = 0
    used_blocks: int = 0

    def admit(self, account: Account, record_bytes: int, *, alone: bool = True) -> Status:
        """Charge one put if it fits. QUOTA when it never can, BUSY when not now.

        Unless it is `alone`, a tenant may hold SHARE_OF_FREE times what is free, so that it never
        takes all and every further one finds some (dynamic thresholds: Choudhury and Hahne, 1998).
        """
        if account.flash_quota_bytes and record_bytes > account.flash_quota_bytes:
            return Status.QUOTA
        if record_bytes > self.bytes_max or not self.blocks_max:
            return Status.QUOTA
        if self.used_blocks >= self.blocks_max or self.used_bytes + record_bytes > self.bytes_max:
            return Status.BUSY
        if not alone and account.put_blocks:  # the first block of a tenant may take what is there
            free_bytes = self.bytes_max - self.used_bytes
            free_blocks = self.blocks_max - self.used_blocks
            if account.put_bytes + record_bytes > SHARE_OF_FREE * (
                free_bytes - record_bytes
            ) or account.put_blocks >= SHARE_OF_FREE * (free_blocks - 1):
                return Status.BUSY
        self.used_bytes += record_bytes
        self.used_blocks += 1
        account.put_bytes += record_bytes
        account.put_blocks += 1
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
class Accounts:
    """All tenants by name and by stream."""

    by_name: dict[TenantName, Account] = field(default_factory=dict)
    by_stream: dict[bytes, Account] = field(default_factory=dict)

    def add(self, account: Account) -> None:
        """Enter a tenant; its name and stream must be new."""
        assert account.name not in self.by_name, account.name
        assert account.stream not in self.by_stream, account.name
        self.by_name[account.name] = account
        self.by_stream[account.stream] = account

    def remove(self, name: TenantName) -> None:
        """The tenant is erased."""
        account = self.by_name.pop(name, None)
        if account is not None:
            del self.by_stream[account.stream]
