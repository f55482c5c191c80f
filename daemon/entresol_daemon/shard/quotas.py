"""Where the bounds of tenants come from: the keyring's quota, else a share of the shard's limit.

Invariant: a bound of 0 in a quota means "none of its own"; then the named default holds.
"""

from __future__ import annotations

from dataclasses import fields

from entresol_daemon.config import Config
from entresol_daemon.control.admin import TenantQuota as AskedQuota
from entresol_daemon.core.accounts import Account, Accounts, Held, PutBudget, Shared
from entresol_daemon.events.log import EventLimits
from entresol_daemon.keys.keyring import TenantQuota
from entresol_proto.ids import TenantName


def follow(account: Account, quota: TenantQuota) -> None:
    """Bring an account in line with the keyring."""
    account.flash_quota_bytes = quota.flash_bytes
    account.dram_quota_bytes = quota.dram_bytes
    account.index_quota_blocks = quota.index_blocks
    account.get_quota_bytes = quota.get_bytes
    account.put_quota_bytes = quota.put_bytes
    account.sessions_quota = quota.sessions
    account.leases_quota = quota.leases
    account.watchers_quota = quota.watchers
    account.weight = quota.weight


def quota_of_new(config: Config) -> TenantQuota:
    """The quota of a tenant that is added on its first connection."""
    defaults = config.tenants
    return TenantQuota(**{each.name: getattr(defaults, each.name) for each in fields(TenantQuota)})


def to_keyring(quota: AskedQuota) -> TenantQuota:
    """What an operator asked for, as it is kept. Raises: KeyringError for impossible numbers."""
    given = {each.name: getattr(quota, each.name) for each in fields(TenantQuota)}
    return TenantQuota(**given | {"weight": quota.weight or 1})


def from_keyring(quota: TenantQuota) -> AskedQuota:
    """What is kept, as an operator sees it."""
    return AskedQuota(**{each.name: getattr(quota, each.name) for each in fields(TenantQuota)})


def put_budget_of(config: Config) -> PutBudget:
    """Puts between reservation and durability: they need memory, and gets need some of it too."""
    bytes_max = min(config.limits.put_queue_bytes_max, config.memory.dram_bytes // 2)
    return PutBudget(bytes_max, config.limits.put_queue_blocks_max)


def held_of(config: Config) -> Held:
    """What hosts hold at their own pace."""
    return Held(
        sessions=Shared(config.limits.sessions_max),
        leases=Shared(config.limits.leases_max),
        get_bytes=Shared(config.memory.dram_bytes),
        sessions_per_tenant_max=config.limits.sessions_per_tenant_max,
    )


def event_limits_of(config: Config) -> EventLimits:
    """Of the event log."""
    return EventLimits(
        tenant_events_max=config.events.history_events_max,
        subscriptions_per_tenant_max=config.events.watchers_per_tenant_max,
    )


def watchers_max(config: Config, accounts: Accounts, name: TenantName) -> int:
    """How many consumers of events a tenant may have."""
    account = accounts.by_name.get(name)
    own = account.watchers_quota if account is not None else 0
    return own or config.events.watchers_per_tenant_max
